// What a block of sparse_mla_wgmma_rows.cu works on and with: shared memory, and q on its way into it.
#pragma once

#include "rows.cuh"
#include "scheduler.cuh"
#include "wgmma_block.cuh"

namespace mla {
namespace wgmma_rows {

using wgmma::kThreads;
using wgmma::largest_of;
using wgmma::half_product;
using wgmma::product;
using wgmma::to_half;

inline constexpr int kHeads = 32;  // of an item, at most
inline constexpr int kOutputThreads = 128, kFetchThreads = 256;  // of kThreads; between them 128 for scores
inline constexpr int kMaxSplits = kWgmmaRowsMaxSplits;

using Item = Keys<kTile>;

// Of two values, fp16.
__device__ __forceinline__ uint32_t times(uint32_t x, uint32_t by) {
  const __half2 r = __hmul2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(by));
  return reinterpret_cast<const uint32_t&>(r);
}

// The power of two that a row's values are divided by, so that none reaches 2^15, as the exponent of a float32: of
// E4M3, which is below 2^9, with such a largest scale. Within 2^100: see row_power().
__device__ __forceinline__ uint32_t power_of_row(uint32_t largest_scale) {
  return min(max(static_cast<int>(largest_scale >> 23) + 1 + 9 - 15, 127 - 100), 127 + 100);
}
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

template <RowFormat FORMAT>
struct Layout : RowLayout<FORMAT> {
  using R = RowLayout<FORMAT>;
  static constexpr bool kHasTail = R::kDims > kDim;  // 64 dimensions of keys alone, BF16
  static constexpr bool kHasFloatScales = R::kScales == Scales::kFloat;
  // Warpgroups: one for outputs, one for scores and weights, two that fetch and widen rows.
  static constexpr int kOutputRegisters = 160, kScoreRegisters = 96, kFetchRegisters = 128;
  static constexpr int kSlots = 2;  // of the ring, a tile each: as 8 operands of 64 dimensions, fp16, 128 bytes a row
  static constexpr int kBlockBytes = kTile * 128, kSlotBytes = kDim / 64 * kBlockBytes;
  static constexpr int kQBytes = kHeads * R::kDims * 2, kWeightBytes = kHeads * kTile * 2;
  static constexpr int kRing = 0;                               // [slots]
  static constexpr int kTail = kRing + kSlots * kSlotBytes;     // [slots] dimensions of keys alone, BF16
  static constexpr int kQ = kTail + (kHasTail ? kSlots * kBlockBytes : 0);  // [items, even and odd]
  static constexpr int kWeights = kQ + 2 * kQBytes;             // [2]
  static constexpr int kScale = kWeights + 2 * kWeightBytes;    // [items, even and odd][kHeads]
  static constexpr int kMaximum = kScale + 2 * kHeads * 4;      // [kHeads]
  static constexpr int kReduce = kMaximum + kHeads * 4;         // [4 warps][kHeads]: largest score, or sum
  static constexpr int kCorrection = kReduce + 4 * kHeads * 4;  // [weights][kHeads]
  static constexpr int kFactor = kCorrection + 2 * kHeads * 4;  // [weights][kHeads]; of partial output: maxima, sums
  static constexpr int kState = kFactor + 2 * kHeads * 4;       // [weights]: whether outputs are to be corrected
  static constexpr int kThere = kState + 8;                     // [slots][8 warps that fetch]: a bit for every row
  // [slots][64 rows]: the power of two that a row was divided by, as the exponent of a float32.
  static constexpr int kPowers = kThere + kSlots * 8;
  static constexpr int kTurns = kPowers + kSlots * kTile;
  static constexpr int kBarriers = (kTurns + Turns::kListBytes + 7) / 8 * 8;
  static constexpr int kTotal = kBarriers + (2 * kSlots + 8) * 8;
  static_assert(kQ % 1024 == 0 && kWeights % 1024 == 0, "an operand begins at a multiple of 1024 bytes");
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");
  static_assert(kHeads * kDim * 4 <= kSlots * kSlotBytes, "partial output must fit the ring");
};

// What lies in shared memory.
template <RowFormat FORMAT>
struct Storage : wgmma::Pipeline<RowParams, Layout<FORMAT>> {
  using L = Layout<FORMAT>;
  using Base = wgmma::Pipeline<RowParams, L>;
  using Base::p, Base::lane;
  const Turns turns;

  __device__ __forceinline__ int head0(int item) const {
    return p.head_blocks == 1 ? 0 : item / p.splits % p.head_blocks * kHeads;
  }
  __device__ __forceinline__ int64_t token(int item) const { return item / (p.splits * p.head_blocks); }
  // What follows from it is found again, and not kept in registers, which are few.
  __device__ __forceinline__ int lane_again() const {
    int again = lane;
    asm volatile("" : "+r"(again));
    return again;
  }
  __device__ __forceinline__ void init() const { Base::init(kFetchThreads, kOutputThreads, kOutputThreads); }
};

// The heads of q that a warp, of WARPS, brings into shared memory as B operand: 512 dimensions fp16, those of keys
// alone BF16. A row is divided by a power of two, which goes back in with the softmax scale.
template <RowFormat FORMAT, int WARPS>
struct PartOfQ {
  using L = Layout<FORMAT>;
  static constexpr int kRows = kHeads / WARPS;
  uint4 raw[kRows][2], tail;  // 16 dimensions of each; 8 of those of keys alone, of row lane / 8

  __device__ __forceinline__ void load(const RowParams& p, int64_t token, int head0, int warp, int lane) {
    const __nv_bfloat16* const q =
        static_cast<const __nv_bfloat16*>(p.q) + token * p.q_token_stride + head0 * p.q_head_stride;
    const int heads = p.heads - head0;
    const auto at = [&](int i, int dim) {
      return reinterpret_cast<const uint4*>(q + (i * WARPS + warp) * p.q_head_stride + dim);
    };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      raw[i][0] = raw[i][1] = make_uint4(0, 0, 0, 0);
      if (i * WARPS + warp < heads) raw[i][0] = at(i, lane * 16)[0], raw[i][1] = at(i, lane * 16)[1];
    }
    tail = make_uint4(0, 0, 0, 0);
    if (L::kHasTail && lane / 8 < kRows && lane / 8 * WARPS + warp < heads)
      tail = *at(lane / 8, kDim + lane % 8 * 8);
  }
  __device__ __forceinline__ void store(const RowParams& p, int warp, int lane, uint8_t* to, float* scales) {
    uint32_t largest[kRows], of_tail = 0;
    if constexpr (L::kHasTail) {
      const uint4 both[2] = {tail, tail};
      of_tail = largest_of(both);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = largest_of(raw[i]);
      largest[i] = max(largest[i], lane / 8 == i ? of_tail : 0);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) largest[i] = __reduce_max_sync(~0u, largest[i]);
    uint32_t inverse = 0;  // of the row that this lane has a tail of
    const float scale = p.bmm1 * kLog2e;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = i * WARPS + warp;
      const float power = to_half(raw[i], largest[i]);
      if (L::kHasTail && lane / 8 == i) inverse = __float_as_uint(power_below(largest[i]).y) >> 16;
      if (lane == 0) scales[row] = scale * power;
      const uint4 low = raw[i][0], high = raw[i][1];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int h = j ^ lane >> 2 & 1;  // neighbours write to different banks
        *reinterpret_cast<uint4*>(to + lane / 4 * kHeads * 128 + swizzled(row, lane % 4 * 2 + h)) = h ? high : low;
      }
    }
    if constexpr (L::kHasTail) {
      inverse *= 0x10001;
      if (lane / 8 < kRows)
        *reinterpret_cast<uint4*>(to + kDim / 64 * kHeads * 128 + swizzled(lane / 8 * WARPS + warp, lane % 8)) =
            make_uint4(scaled_bf16(tail.x, inverse), scaled_bf16(tail.y, inverse), scaled_bf16(tail.z, inverse),
                       scaled_bf16(tail.w, inverse));
    }
    fence_async();
  }
};

}  // namespace wgmma_rows
}  // namespace mla
