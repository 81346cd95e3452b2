// What a block of sparse_mla_wgmma.cu works on and with: items, products, q, and shared memory.
#pragma once

#include "turns.cuh"
#include "wgmma_shared.cuh"

namespace mla {
namespace wgmma {

inline constexpr int kThreads = 512;  // kOutputThreads, then 128 for scores and weights, and 128 that fetch
constexpr int kSplits = 2;  // blocks that share a token's keys, where they do

// What a block works on: some heads of a token and a share of its keys.
struct Item {
  int64_t token;
  int head0, window, first, keys, tiles;

  __device__ __forceinline__ Item(const Params& p, int i, int heads, const Lengths& lengths) {
    token = i / (p.splits * p.head_blocks);
    head0 = i / p.splits % p.head_blocks * heads;
    window = max(0, min(lengths.visible, kWindow));
    const int picked = lengths.visible > 0 ? max(kWindow, min(lengths.topk, p.width)) - kWindow : 0;
    const int all = window + picked;
    const int share = ((all + kTile - 1) / kTile + p.splits - 1) / p.splits * kTile;
    first = min(i % p.splits * share, all);
    keys = min(share, all - first);
    tiles = (keys + kTile - 1) / kTile;
  }
};

#define MLA_WGMMA(n, registers, outputs, a0, a1, a2, a3, b, add)                                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0;\n"                                              \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" registers "}, {" a0 "," a1 "," a2 \
               "," a3 "}, " b ", p, 1, 1, 0;}"                                                            \
               : outputs                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "n"(ADD))

// d (64 x N, fp32) = a (64 x 16, in registers) times b (16 x N, in shared memory), both fp16, plus d if ADD.
template <bool ADD>
__device__ __forceinline__ void product(float (&d)[8], const uint32_t (&a)[4], uint64_t b_descriptor) {
  MLA_WGMMA(16, MLA_D8, MLA_F8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13");
}
template <bool ADD>
__device__ __forceinline__ void product(float (&d)[16], const uint32_t (&a)[4], uint64_t b_descriptor) {
  MLA_WGMMA(32, MLA_D16, MLA_F16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21");
}

#define MLA_WGMMA_SHARED(n, registers, outputs, a, b, add, across)                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" registers "}, " a ", " b \
               ", p, 1, 1, " across ", 0;}"                                                         \
               : outputs                                                                            \
               : "l"(a_descriptor), "l"(b_descriptor), "n"(ADD), "n"(ACROSS))

// The same with a (64 x 16) in shared memory too, both BF16; ACROSS if a is to be read across its rows there. N is
// twice the heads where both terms of weights are columns of one product.
template <bool ADD, bool ACROSS = false>
__device__ __forceinline__ void product(float (&d)[8], uint64_t a_descriptor, uint64_t b_descriptor) {
  MLA_WGMMA_SHARED(16, MLA_D8, MLA_F8(d, 0), "%8", "%9", "%10", "%11");
}
template <bool ADD, bool ACROSS = false>
__device__ __forceinline__ void product(float (&d)[16], uint64_t a_descriptor, uint64_t b_descriptor) {
  MLA_WGMMA_SHARED(32, MLA_D16, MLA_F16(d, 0), "%16", "%17", "%18", "%19");
}
template <bool ADD, bool ACROSS = false>
__device__ __forceinline__ void product(float (&d)[32], uint64_t a_descriptor, uint64_t b_descriptor) {
  MLA_WGMMA_SHARED(64, MLA_D32, MLA_F32(d, 0), "%32", "%33", "%34", "%35");
}

// ---------------------------------------------------------------- q

// `heads` rows into the L2 cache, by 128 threads.
__device__ __forceinline__ void prefetch_q(const Params& p, const Item& item, int heads) {
  const int row_bytes = p.q_is_fp8 ? kDim : 2 * kDim, lines = row_bytes / 128;
  for (int i = threadIdx.x % 128; i < heads * lines; i += 128) {
    const int head = item.head0 + i / lines;
    const int64_t at =
        (item.token * p.q_token_stride + head * p.q_head_stride) * (p.q_is_fp8 ? 1 : 2) + i % lines * 128;
    if (head < p.heads) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(p.q) + at));
  }
}

// The largest magnitude of 16 values, as the bits of BF16, which are ordered like the numbers.
__device__ __forceinline__ uint32_t largest_of(const uint4 (&raw)[2]) {
  uint32_t largest = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(raw[h].x & 0x7FFF7FFF, raw[h].y & 0x7FFF7FFF),
                                         __vmaxu2(raw[h].z & 0x7FFF7FFF, raw[h].w & 0x7FFF7FFF)));
  return max(largest & 0xFFFF, largest >> 16);
}
// The 16 BF16 values of a lane, divided by a power of two of the row, as fp16; returns that power.
__device__ __forceinline__ float to_half(uint4 (&raw)[2], uint32_t largest) {
  const float2 power = power_below(largest);
  uint32_t w[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float2 x = unpack_bf16(w[k]);
    w[k] = pack_half(x.x * power.y, x.y * power.y);
  }
  raw[0] = make_uint4(w[0], w[1], w[2], w[3]), raw[1] = make_uint4(w[4], w[5], w[6], w[7]);
  return power.x;
}

// What warp `warp` of WARPS does to load N heads of q into shared memory as B operand, fp16 if FP8. `scales`: what a
// product with a head is to be multiplied by, in units of log2; `sinks` likewise. `meanwhile` is done between loads
// and stores.
template <int N, int WARPS, typename Meanwhile>
__device__ __forceinline__ void load_q(const Params& p, const Item& item, int warp, int lane, uint8_t* to,
                                       float* scales, float* sinks, const Meanwhile& meanwhile) {
  constexpr int kRows = N / WARPS;
  uint4 raw[kRows][2];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int head = item.head0 + i * WARPS + warp % WARPS;
    const int64_t at = item.token * p.q_token_stride + head * p.q_head_stride + lane * 16;
    if (head >= p.heads) {
      raw[i][0] = raw[i][1] = make_uint4(0, 0, 0, 0);
    } else if (p.q_is_fp8) {
      raw[i][0] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) + at);
    } else {
      const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + at);
      raw[i][0] = from[0], raw[i][1] = from[1];
    }
  }
  meanwhile();
  uint32_t largest[kRows];
  if (p.q_is_fp8)
#pragma unroll
    for (int i = 0; i < kRows; ++i) to_bf16(raw[i]);
#pragma unroll
  for (int i = 0; i < kRows; ++i) largest[i] = largest_of(raw[i]);
#pragma unroll
  for (int i = 0; i < kRows; ++i) largest[i] = __reduce_max_sync(~0u, largest[i]);
  const float scale = p.score_scale();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = i * WARPS + warp % WARPS;
    const float power = to_half(raw[i], largest[i]);
    // Of 16 E4M3 dimensions of a row, a thread's word holds 4t to 4t + 3; they become columns 2t, 2t + 1, 2t + 8 and
    // 2t + 9 of its A fragment, so q is put in that order.
    const uint4 a = raw[i][0], b = raw[i][1];
    const uint4 low = make_uint4(a.x, a.z, b.x, b.z), high = make_uint4(a.y, a.w, b.y, b.w);
    if (lane == 0) scales[row] = scale * power;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int h = j ^ lane >> 2 & 1;  // neighbours write to different banks
      *reinterpret_cast<uint4*>(to + lane / 4 * N * 128 + swizzled(row, lane % 4 * 2 + h)) = h ? high : low;
    }
  }
  const int row = warp % WARPS * 32 + lane;
  if (row < N) sinks[row] = p.sinks && item.head0 + row < p.heads ? p.sinks[item.head0 + row] * kLog2e : -INFINITY;
  fence_async();
}

// ---------------------------------------------------------------- layout

template <bool FP8, int N>
struct Layout {
  static constexpr int kRowBytes = FP8 ? 512 : 1024;
  // The ring has slots of half of a tile's rows or, of BF16, of a quarter of the dimensions of all its rows.
  static constexpr int kSlotsOfTile = FP8 ? 2 : 4;
  static constexpr int kSlotBytes = kTile * kRowBytes / kSlotsOfTile;
  static constexpr int kSlots = FP8 ? (N == 32 ? 8 : 10) : (N == 32 ? 11 : 12);
  // What of rows is in a slot lies in groups of 8: their first 128 bytes, swizzled, then their next.
  static constexpr int kGroupBytes = 8 * (FP8 ? kRowBytes : kRowBytes / 4);
  // One q where a second would cost two slots of the ring, and then those who compute scores fetch it.
  static constexpr int kQBuffers = FP8 ? 2 : 1;
  static constexpr int kTerms = FP8 ? 1 : 2;  // BF16 weights come as high and low part
  static constexpr int kTermBytes = N * kTile * 2;
  static constexpr int kAcc = kTerms * N / 2;  // values of a thread of 64 dimensions, both terms apart
  static constexpr int kQBytes = N * kDim * 2;
  static constexpr int kQ = 0;
  static constexpr int kWeights = kQ + kQBuffers * kQBytes;
  static constexpr int kRing = kWeights + 2 * kTerms * kTermBytes;
  static constexpr int kScale = kRing + kSlots * kSlotBytes;   // [items, even and odd][N]
  static constexpr int kSink = kScale + 2 * N * 4;             // [items, even and odd][N]
  static constexpr int kMaximum = kSink + 2 * N * 4;           // [N]
  static constexpr int kReduce = kMaximum + N * 4;             // [4 warps][N]: largest score, or sum
  static constexpr int kCorrection = kReduce + 4 * N * 4;      // [weights][N]
  static constexpr int kFactor = kCorrection + 2 * N * 4;      // [weights][N]; of partial output: maxima, sums
  static constexpr int kState = kFactor + 2 * N * 4;           // [weights]: whether outputs are to be corrected
  // A bit for every row: [slots][4 warps that fetch], or of quarters [4 tiles][4 warps].
  static constexpr int kRowMasks = kState + 16;
  static constexpr int kTurns = kRowMasks + (FP8 ? kSlots * 4 : 4 * 8);
  static constexpr int kBarriers = kTurns + Turns::kListBytes;
  static constexpr int kTotal = kBarriers + (2 * kSlots + 8) * 8;
  static_assert(!FP8 || kSlots % 2 == 0, "bits of a tile's halves must lie together");
  static_assert(kBarriers % 8 == 0, "barriers must be aligned");
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");
  static_assert(N * kDim * 4 <= kSlots * kSlotBytes, "partial output must fit the ring");
};

// What lies in shared memory.
template <bool FP8, int N>
struct Storage : Pipeline<Params, Layout<FP8, N>> {
  using L = Layout<FP8, N>;
  const Turns turns;

  __device__ __forceinline__ void init() const {
    // A quarter is for one of the two warpgroups.
    Pipeline<Params, L>::init(128 + 4, FP8 ? kOutputThreads : 128);
  }
};

}  // namespace wgmma
}  // namespace mla
