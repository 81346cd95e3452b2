// What the warpgroups of sparse_mla_wgmma_rows.cu share: shared memory, and how q gets there.
#pragma once

#include "cluster_merge.cuh"
#include "rows.cuh"
#include "wgmma_block.cuh"

namespace mla {
namespace wgmma_rows {

using wgmma::kOutputThreads;
using wgmma::kThreads;
using wgmma::largest_of;
using wgmma::product;
using wgmma::to_half;

inline constexpr int kHeads = 32;  // of an item, at most
inline constexpr int kMaxSplits = kWgmmaRowsMaxSplits;

using Item = Keys<kTile>;
// What a block that shares its token's keys is told: of units that are the dimensions of a warp.
using Told = Received<kHeads, kMaxSplits, 64, false>;

// d (64 x 32, fp32) = a (64 x 16, in registers) times b (16 x 32, in shared memory), both BF16, plus d if ADD.
template <bool ADD>
__device__ __forceinline__ void bf16_product(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" MLA_D16
               "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
               : MLA_F16(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}

// The power of two that a row's values are divided by, so that none reaches 2^15, as the exponent of a float32. The
// values are E4M3, which is below 2^9, with scales of `largest_scale` at most. Within 2^100: see row_power().
__device__ __forceinline__ uint32_t power_of_row(uint32_t largest_scale) {
  return min(max(static_cast<int>(largest_scale >> 23) + 1 + 9 - 15, 127 - 100), 127 + 100);
}
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// Where a warp is in a ring: a slot, and the parity of the phase that ends when it is full. A position follows from
// the one before, because a remainder of the number of slots would be a chain of ten uniform instructions, for which a
// warp waits every time.
template <int SLOTS>
struct RingPosition {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ RingPosition next(uint32_t by = 1) const {
    const uint32_t at = slot + by;
    return at < SLOTS ? RingPosition{at, parity} : RingPosition{at - SLOTS, parity ^ 1};
  }
};

template <RowFormat FORMAT>
struct Layout : RowLayout<FORMAT> {
  using R = RowLayout<FORMAT>;
  static constexpr bool kHasTail = R::kDims > kDim;  // 64 dimensions of keys alone, BF16
  static constexpr bool kHasFloatScales = R::kScales == Scales::kFloat;
  static constexpr int kOutputRegisters = kHasTail ? 128 : 136, kScoreRegisters = kHasTail ? 176 : 160;
  static constexpr int kFetchRegisters = 512 - 2 * kOutputRegisters - kScoreRegisters;
  static constexpr int kSlots = 7;                   // of the ring, half of a tile's rows each
  // Rows lie in groups of 8: their first 128 bytes, swizzled, then their next; the wide part is the last line.
  static constexpr int kGroupBytes = 8 * R::kPitch, kSlotBytes = kTile / 2 * R::kPitch;
  static constexpr int kWideAtGroup = 1024 * R::kWideLine;
  static constexpr int kQBytes = kHeads * R::kDims * 2, kWeightBytes = kHeads * kTile * 2;
  static constexpr int kWeights = 0;                            // [2]
  static constexpr int kRing = kWeights + 2 * kWeightBytes;     // [slots]
  // [slots][32 rows][16 bytes]: scales as they come. UE8M0 ones are then replaced by their ratios to the row's power of
  // two, fp16, and by the exponent of that in the last two bytes.
  static constexpr int kRowScales = kRing + kSlots * kSlotBytes;
  static constexpr int kRatios = kRowScales + kSlots * 32 * 16;    // [slots][groups][32 rows]: the same ratios
  static constexpr int kScale = kRatios + kSlots * R::kGroups * 32 * 2;  // [items, even and odd][kHeads]
  static constexpr int kMaximum = kScale + 2 * kHeads * 4;      // [kHeads]
  static constexpr int kReduce = kMaximum + kHeads * 4;         // [4 warps][kHeads]: largest score, or sum
  static constexpr int kCorrection = kReduce + 4 * kHeads * 4;  // [weights][kHeads]
  static constexpr int kFactor = kCorrection + 2 * kHeads * 4;  // [weights][kHeads]; of shared keys: sinks
  static constexpr int kState = kFactor + 2 * kHeads * 4;       // [weights]: whether outputs are to be corrected
  static constexpr int kRowMasks = kState + 8;                     // [slots]: a bit for every row
  static constexpr int kTurns = kRowMasks + kSlots * 4;
  static constexpr int kBarriers = (kTurns + Turns::kListBytes + 7) / 8 * 8;
  static constexpr int kQ = (kBarriers + (3 * kSlots + 8) * 8 + 1023) / 1024 * 1024;  // [items, even and odd]
  // In place of the second item's q: a block that shares keys has one item, and is told the others' outputs while it
  // works on that.
  static constexpr int kTold = kQ + kQBytes;
  static constexpr int kTotal = kTold + (kQBytes > sizeof(Told) ? kQBytes : sizeof(Told));
  static_assert(R::kPitch == 640 && R::kWide == 64, "the wide part is one line of 128 bytes, after four");
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");
};

// What lies in shared memory.
template <RowFormat FORMAT>
struct Storage : wgmma::Pipeline<RowParams, Layout<FORMAT>> {
  using L = Layout<FORMAT>;
  using Base = wgmma::Pipeline<RowParams, L>;
  using Base::p, Base::lane;
  using Position = RingPosition<L::kSlots>;
  const Turns turns;

  // The rows of a slot have come.
  __device__ __forceinline__ uint32_t copied(int slot) const { return Base::barrier(2 * L::kSlots + 8 + slot); }
  __device__ __forceinline__ void wait_full(const Position& at) const { barrier_wait(Base::full(at.slot), at.parity); }

  __device__ __forceinline__ int head0(int item) const {
    return p.head_blocks == 1 ? 0 : item / p.splits % p.head_blocks * kHeads;
  }
  // The lane, but as the compiler does not know it: what follows from it is computed again instead of being kept in
  // registers, which are few.
  __device__ __forceinline__ int opaque_lane() const {
    int again = lane;
    make_opaque(again);
    return again;
  }
  __device__ __forceinline__ Told& told() const { return *reinterpret_cast<Told*>(Base::smem + L::kTold); }
  __device__ __forceinline__ void init() const {
    if (p.splits > 1) told().init(p, kHeads, p.splits, p.share_of(blockIdx.x));
    for (int i = 0; i < L::kSlots; ++i) barrier_init(copied(i), 64 + 2);  // each thread's copies, and the masks
    Base::init(64, kOutputThreads);
  }
};

// The heads of q that one of WARPS warps brings into shared memory as B operand: 512 dimensions as fp16, the tail
// (dimensions of keys alone) as BF16. A row is divided by a power of two, which goes back in with the softmax scale.
template <RowFormat FORMAT, int WARPS>
struct QLoader {
  using L = Layout<FORMAT>;
  static constexpr int kRows = kHeads / WARPS;
  uint4 raw[kRows][2], tail;  // a lane has 16 dimensions of each row, and 8 of the tail of row lane / 8

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
      // Of 16 E4M3 dimensions of a row, a thread's word holds 4t to 4t + 3; they become columns 2t, 2t + 1, 2t + 8 and
      // 2t + 9 of its A fragment, so q is put in that order. Wide ones are in that of memory.
      const uint4 a = raw[i][0], b = raw[i][1];
      const bool is_wide = lane * 16 >= L::kNarrow;
      const uint4 low = is_wide ? a : make_uint4(a.x, a.z, b.x, b.z);
      const uint4 high = is_wide ? b : make_uint4(a.y, a.w, b.y, b.w);
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
