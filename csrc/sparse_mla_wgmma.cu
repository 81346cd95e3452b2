// Sparse MLA over full-width rows for Hopper: docs/sm90-sparse-mla.md.
//
// A block takes 16 or 32 heads of one token after another, with rows on M and heads on N of wgmma, so that few heads
// do not pay for 64: scores are S^T = K Q^T, outputs O^T = V^T P^T. Each warpgroup has one role: one fetches rows into
// a ring, by tiles of 64 keys; one computes scores and weights of a tile; two add it to the outputs, each for half of
// the dimensions. E4M3 rows are widened to fp16 in registers on their way into either product, and V^T is made there by
// byte permutation of two rows: neither a widened nor a transposed row is ever stored.
// Few tokens: two blocks that share a token's keys form a cluster and merge through each other's shared memory.

#include <cooperative_groups.h>

#include "sm90_wgmma.cuh"

namespace cg = cooperative_groups;

namespace mla {
namespace wgmma {

inline constexpr int kThreads = 512, kOutputThreads = 256;  // then 128 for scores and weights, and 128 that fetch
constexpr int kSplits = 2;  // blocks that share a token's keys, where they do
// Weights are relative to a guess of the maximum: the larger of the first two scores, and a margin.
inline constexpr float kMargin = 4.f;

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

// Of four lanes, whose numbers end in t: word i of lane t and word t of lane i change places.
__device__ __forceinline__ void transpose4(uint32_t (&x)[4], int t) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, t & 1 ? x[i] : x[i + 1], 1);
    (t & 1 ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, t & 2 ? x[i] : x[i + 2], 2);
    (t & 2 ? x[i] : x[i + 2]) = other;
  }
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
  const float scale = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
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
  static constexpr int kThere = kState + 16;
  static constexpr int kBarriers = kThere + (FP8 ? kSlots * 4 : 4 * 8);
  static constexpr int kTotal = kBarriers + (2 * kSlots + 8) * 8;
  static_assert(!FP8 || kSlots % 2 == 0, "bits of a tile's halves must lie together");
  static_assert(kBarriers % 8 == 0, "barriers must be aligned");
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");
  static_assert(N * kDim * 4 <= kSlots * kSlotBytes, "partial output must fit the ring");
};

template <bool FP8, int N>
struct Block : Thread {
  using L = Layout<FP8, N>;

  __device__ __forceinline__ int* states() const { return reinterpret_cast<int*>(smem + L::kState); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + L::kBarriers + i * 8; }
  // Rows, weights and q: they are there; everybody is done with them.
  __device__ __forceinline__ uint32_t full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ uint32_t empty(int slot) const { return barrier(L::kSlots + slot); }
  __device__ __forceinline__ uint32_t ready(int buffer) const { return barrier(2 * L::kSlots + buffer); }
  __device__ __forceinline__ uint32_t used(int buffer) const { return barrier(2 * L::kSlots + 2 + buffer); }
  __device__ __forceinline__ uint32_t q_full(int buffer) const { return barrier(2 * L::kSlots + 4 + buffer); }
  __device__ __forceinline__ uint32_t q_empty(int buffer) const { return barrier(2 * L::kSlots + 6 + buffer); }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < L::kSlots; ++i) {
      barrier_init(full(i), 128 + 4);
      barrier_init(empty(i), FP8 ? kOutputThreads : 128);  // a quarter is for one of the two warpgroups
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(ready(i), 128), barrier_init(used(i), kOutputThreads);
      barrier_init(q_full(i), kOutputThreads), barrier_init(q_empty(i), 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // ---------------------------------------------------------------- four warps: rows, and fp16 q, on their way
  // A warp copies 8 rows of every half of a tile, or 16 rows of every quarter; its lanes look up those of two tiles,
  // ahead of time.
  template <bool FIRST>
  __device__ __forceinline__ void produce() const {
    constexpr int kRows = FP8 ? 8 : 16, kQParts = 4;  // that fp16 q is loaded in
    const int my_key = (lane / kRows * 4 + warp % 4) * kRows + lane % kRows;
    uint32_t count = 0, served = 0;
    int i = blockIdx.x;
    Item item(p, i, N, Lengths(p, i));
    // Where slot `count` of all is, once it is free.
    const auto slot_of = [&](uint32_t count) {
      barrier_wait(empty(count % L::kSlots), count / L::kSlots & 1 ^ 1);
      return base + L::kRing + count % L::kSlots * L::kSlotBytes;
    };
    const auto on_their_way = [&](uint32_t count) {
      copies_arrive(full(count % L::kSlots));
      if (lane == 0) barrier_arrive(full(count % L::kSlots));  // for what it stored itself
    };
    const auto look_up = [&](const Item& item, int key0) {
      const int key = key0 + my_key, column = item.first + key;
      const int at = column < item.window ? column : kWindow + column - item.window;
      return key < item.keys ? p.indices[item.token * p.indices_stride + at] : -1;
    };
    // A part of an item's q; `meanwhile` is done while it is on its way. That of the first item is loaded by those who
    // have nothing else to do yet.
    const auto fetch_q = [&](const Item& of, int part, const auto& meanwhile) {
      const int buffer = served % L::kQBuffers;
      load_q<N, 4 * kQParts>(p, of, warp % 4 + part * 4, lane, smem + L::kQ + buffer * L::kQBytes,
                             floats(L::kScale) + served % 2 * N, floats(L::kSink) + served % 2 * N, [&] {
                               meanwhile();
                               if (part == 0) barrier_wait(q_empty(buffer), served / L::kQBuffers & 1 ^ 1);
                             });
      // Twice: those who load the first q are twice as many. All who wrote arrive, since racecheck does not follow an
      // order that goes through a named barrier first.
      if (part == kQParts - 1) barrier_arrive(q_full(buffer)), barrier_arrive(q_full(buffer));
    };
    Lengths lengths(p, i + gridDim.x);
    int next = look_up(item, 0), parts = item.tiles > 0 ? kQParts : 0;  // of q that are there
    while (i < p.items) {
      i += gridDim.x;
      const Item now = item;
      item = Item(p, i, N, lengths);
      if (i >= p.items) item.keys = item.tiles = 0;
      lengths = Lengths(p, i + gridDim.x);
      if (FP8 && item.tiles > 0) prefetch_q(p, item, N);
      const auto rest_of_q = [&] {
#pragma unroll 1
        for (; parts < kQParts; ++parts) fetch_q(now, parts, [] {});
        ++served, parts = 0;
      };
      if (FP8 && now.tiles > 0) rest_of_q();
      for (int key0 = 0; key0 < now.tiles * kTile; key0 += 128) {
        const int index = next;
        const Row mine(now.first + key0 + my_key < now.window ? p.swa : p.compressed, index);
        const unsigned there = __ballot_sync(~0u, mine.exists);
        next = key0 + 128 < now.tiles * kTile ? look_up(now, key0 + 128) : look_up(item, 0);
#pragma unroll 1
        for (int h = 0; h < 32 / kRows; ++h) {
          if (key0 + h * 4 * kRows >= now.tiles * kTile) break;
          const unsigned bits = there >> (h * kRows);
          // All rows are passed on before the first copy: a shuffle after it would wait until the copy has left. Two
          // rows' parts of a quarter are copied at once.
          const int second = FP8 ? 0 : lane / 16;
          const uint8_t* rows[8];
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            const int64_t row =
                __shfl_sync(~0u, reinterpret_cast<int64_t>(mine.at), h * kRows + r * (kRows / 8) + second);
            rows[r] = reinterpret_cast<const uint8_t*>(row) + lane % (FP8 ? 32 : 16) * 16;
            asm volatile("" : "+l"(rows[r]));
          }
          if constexpr (FP8) {
            const auto copy = [&] {
              const uint32_t to = slot_of(count) + warp % 4 * L::kGroupBytes + lane / 8 * 1024;
#pragma unroll
              for (int r = 0; r < 8; ++r) copy16<FIRST>(to + swizzled(r, lane % 8), rows[r], bits >> r & 1 ? 16 : 0);
              if (lane == 0) smem[L::kThere + count % L::kSlots * 4 + warp % 4] = bits;
              on_their_way(count++);
            };
            // The next item's q, around rows: now that the item before this one has been scored, its q is free.
            if (key0 == 128 && item.tiles > 0)
              fetch_q(item, parts++, copy);
            else
              copy();
          } else {
#pragma unroll 1
            for (int quarter = 0; quarter < 4; ++quarter) {
              const uint32_t to = slot_of(count) + warp % 4 * 2 * L::kGroupBytes + lane / 8 % 2 * 1024;
#pragma unroll
              for (int r = 0; r < 8; ++r)
                copy16<FIRST>(to + r / 4 * L::kGroupBytes + swizzled(r % 4 * 2 + second, lane % 8),
                              rows[r] + quarter * 256, bits >> (r * 2 + second) & 1 ? 16 : 0);
              if (quarter == 0 && lane == 0)
                *reinterpret_cast<uint16_t*>(smem + L::kThere + count / 4 % 4 * 8 + warp % 4 * 2) = bits;
              on_their_way(count++);
            }
          }
        }
      }
      if (now.tiles == 0) next = look_up(item, 0);
    }
  }

  // ---------------------------------------------------------------- scores of 64 keys, S^T = K Q^T
  __device__ __forceinline__ void scores(float (&s)[N / 2], uint32_t tile, int q_buffer) const {
    uint32_t q_at = base + L::kQ + q_buffer * L::kQBytes;
    asm volatile("" : "+r"(q_at));  // or else ptxas keeps 32 descriptors in registers
    const uint64_t q = descriptor(q_at);
    if constexpr (!FP8) {
      // A quarter of the dimensions is multiplied as soon as it is there.
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const uint32_t count = 4 * tile + quarter;
        const uint64_t rows = descriptor(base + L::kRing + count % L::kSlots * L::kSlotBytes, L::kGroupBytes);
        barrier_wait(full(count % L::kSlots), count / L::kSlots & 1);
        fence_async();  // the rows came by copies that wgmma does not see by itself
        products_begin();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint64_t a = rows + ((i / 4 * 1024 + i % 4 * 32) >> 4);
          const uint64_t b = q + (((quarter * 2 + i / 4) * N * 128 + i % 4 * 32) >> 4);
          if (quarter == 0 && i == 0)
            product<false>(s, a, b);
          else
            product<true>(s, a, b);
        }
        products_commit();
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) barrier_wait(full((2 * tile + h) % L::kSlots), (2 * tile + h) / L::kSlots & 1);
      // Matrices of 8 rows by 16 bytes: rows 0 to 7 and 8 to 15 of this warp's 16, then the next 16 bytes of both.
      const uint32_t rows = base + L::kRing + (2 * tile + (warp % 4 >> 1)) % L::kSlots * L::kSlotBytes +
                            ((warp & 1) * 2 + (lane >> 3 & 1)) * L::kGroupBytes;
      // Rows are read while products of the batch before go on, and widened once those of the batch whose registers
      // they take are done.
      constexpr int kSteps = 8, kBuffers = 2;  // of 16 dimensions, in a batch; batches
      uint32_t a[kBuffers][kSteps][4], raw[kSteps / 2][4];
      const auto read = [&](int batch) {
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const int chunk = (batch * kSteps / 2 + i) * 2;
          ldmatrix(raw[i], rows + chunk / 8 * 1024 + swizzled(lane & 7, chunk % 8 + (lane >> 4)));
        }
      };
      const auto widen = [&](uint32_t (&to)[kSteps][4]) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint32_t x = raw[i / 2][i % 2 * 2], y = raw[i / 2][i % 2 * 2 + 1];
          to[i][0] = e4m3_low(x), to[i][1] = e4m3_low(y), to[i][2] = e4m3_high(x), to[i][3] = e4m3_high(y);
        }
      };
      read(0);
      widen(a[0]);
#pragma unroll
      for (int batch = 0; batch < 32 / kSteps; ++batch) {
        products_begin();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = batch * kSteps + i;
          const uint64_t b = q + ((step / 4 * N * 128 + step % 4 * 32) >> 4);
          if (step == 0)
            product<false>(s, a[batch % kBuffers][i], b);
          else
            product<true>(s, a[batch % kBuffers][i], b);
        }
        products_commit();
        if (batch < 32 / kSteps - 1) {
          read(batch + 1);
          products_wait<kBuffers - 1>();
          hold(raw);
          widen(a[(batch + 1) % kBuffers]);
        }
      }
    }
    products_wait<0>();
  }

  // ---------------------------------------------------------------- weights of 64 keys, into shared memory
  __device__ __forceinline__ void weights(float (&s)[N / 2], float (&sum)[N / 4], uint32_t tile, bool& started, int odd,
                                          bool is_last) const {
    const int g = lane / 4, t = lane % 4, group_warp = warp % 4, buffer = tile % 2;
    const int there_at = FP8 ? 2 * tile % L::kSlots * 4 : tile % 4 * 8;
    const uint2 there = *reinterpret_cast<const uint2*>(smem + L::kThere + there_at);
    // Of a tile's rows 0 and 8, one.
    const bool any = there.x | there.y, reference = there.x & 0x0101;
    const float2* const scale = reinterpret_cast<const float2*>(floats(L::kScale) + odd * N) + t;
    float2* const maximum = reinterpret_cast<float2*>(floats(L::kMaximum)) + t;
    const auto lower = [&](const float2* by) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        s[n * 4] -= by[n * 4].x, s[n * 4 + 1] -= by[n * 4].y, s[n * 4 + 2] -= by[n * 4].x, s[n * 4 + 3] -= by[n * 4].y;
    };
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 x = scale[n * 4], m = started ? maximum[n * 4] : make_float2(0.f, 0.f);
      s[n * 4] = fmaf(s[n * 4], x.x, -m.x), s[n * 4 + 1] = fmaf(s[n * 4 + 1], x.y, -m.y);
      s[n * 4 + 2] = fmaf(s[n * 4 + 2], x.x, -m.x), s[n * 4 + 3] = fmaf(s[n * 4 + 3], x.y, -m.y);
    }
    const uint32_t mine = (group_warp & 2 ? there.y : there.x) >> (group_warp & 1) * 16 & 0xFFFF;
    if (mine != 0xFFFF) {
      const bool low = mine >> g & 1, high = mine >> (8 + g) & 1;
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        if (!(i & 2 ? high : low)) s[i] = -INFINITY;
    }
    if (!started && reference) {
      // What the first two scores suggest; a real maximum is searched for when a score is far above it.
      if (group_warp == 0 && g == 0)
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
          maximum[n * 4] =
              make_float2(fmaxf(s[n * 4], s[n * 4 + 2]) + kMargin, fmaxf(s[n * 4 + 1], s[n * 4 + 3]) + kMargin);
      sync_threads(1, 128);
      lower(maximum);
    }
    float excess = started || reference ? -INFINITY : INFINITY;
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) excess = fmaxf(excess, fmaxf(s[i], s[i + 1]));
    const bool raised = any && sync_any(1, 128, excess > kSlack);
    barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
    if (threadIdx.x % 128 == 0) states()[buffer] = raised && started;
    if (raised) {
      float* const reduce = floats(L::kReduce);
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float largest = fmaxf(s[n * 4 + e], s[n * 4 + 2 + e]);
#pragma unroll
          for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
          if (g == 0) reduce[group_warp * N + n * 8 + t * 2 + e] = largest;
        }
      sync_threads(1, 128);
      const int head = threadIdx.x % 128;
      if (head < N) {
        const float largest =
            fmaxf(fmaxf(reduce[head], reduce[N + head]), fmaxf(reduce[2 * N + head], reduce[3 * N + head]));
        float* const to = floats(L::kMaximum) + head;
        const float old = started || reference ? *to : 0.f, now = started ? fmaxf(largest, 0.f) + old : largest + old;
        *to = now;
        reduce[head] = now - old;
        floats(L::kCorrection)[buffer * N + head] = exp2_fast(old - now);
      }
      sync_threads(1, 128);
      lower(reinterpret_cast<const float2*>(reduce) + t);
      if (started)
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          const float2 x = reinterpret_cast<const float2*>(floats(L::kCorrection) + buffer * N)[n * 4 + t];
          sum[n * 2] *= x.x, sum[n * 2 + 1] *= x.y;
        }
    }
    started |= any;

    const uint32_t to = base + L::kWeights + buffer * L::kTerms * L::kTermBytes;
    const int row = (lane >> 4) * 8 + (lane & 7), chunk = group_warp * 2 + (lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2_fast(s[n * 4 + 2 * i]), y = exp2_fast(s[n * 4 + 2 * i + 1]);
        sum[n * 2 + i / 2 * 2] += x, sum[n * 2 + i / 2 * 2 + 1] += y;
        if constexpr (FP8) {
          high[i] = pack_half(x, y);
        } else {
          high[i] = pack_bf16(x, y), low[i] = rest_bf16(x, y, high[i]);
        }
      }
      const uint32_t at = to + swizzled(n * 8 + row, chunk);
      stmatrix_transposed(at, high[0], high[1], high[2], high[3]);
      if constexpr (L::kTerms == 2) stmatrix_transposed(at + L::kTermBytes, low[0], low[1], low[2], low[3]);
    }
    if (is_last) finish(sum, buffer, started, odd);
    fence_async();
    barrier_arrive(ready(buffer));
  }

  // With the last weights of an item goes what its outputs are to be multiplied by.
  __device__ __forceinline__ void finish(float (&sum)[N / 4], int buffer, bool started, int odd) const {
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum[n] += __shfl_xor_sync(~0u, sum[n], mask);
    }
    const int g = lane / 4, t = lane % 4, group_warp = warp % 4;
    float* const sums = floats(L::kReduce);
    sync_threads(1, 128);  // nobody reads what else was here any more
    if (g == 0)
#pragma unroll
      for (int n = 0; n < N / 4; ++n) sums[group_warp * N + n / 2 * 8 + t * 2 + n % 2] = sum[n];
    const int head = threadIdx.x % 128;
    // Before the barrier: after it, other lanes write the next item's.
    const float largest = head < N && started ? floats(L::kMaximum)[head] : kNoMaximum;
    sync_threads(1, 128);
    if (head < N) {
      float total = sums[head] + sums[N + head] + sums[2 * N + head] + sums[3 * N + head];
      float* const factors = floats(L::kFactor);
      if (p.splits > 1) {
        factors[head] = largest, factors[N + head] = total;
      } else {
        const float bmm2 = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
        const float sink = floats(L::kSink)[odd * N + head];
        const float shift = fmaxf(largest, sink), mine = exp2_fast(largest - shift);
        total = total * mine + exp2_fast(sink - shift);
        factors[buffer * N + head] = total > 0.f ? bmm2 * mine / total : 0.f;
      }
    }
  }

  // q as it is, BF16, on its way: `heads` heads (or N) from `q` on.
  __device__ __forceinline__ void copy_q(const __nv_bfloat16* q, int heads) const {
    int row0 = warp % 4, lane = this->lane;
    asm volatile("" : "+r"(row0), "+r"(lane));  // or else ptxas keeps addresses in registers, tile after tile
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int row = i * 4 + row0;
      const __nv_bfloat16* const from = q + (row < heads ? row : 0) * p.q_head_stride + lane * 8;
#pragma unroll
      for (int c = 0; c < 2; ++c)
        copy16<true>(base + L::kQ + (c * 4 + lane / 8) * N * 128 + swizzled(row, lane % 8), from + c * 256,
                     row < heads ? 16 : 0);
    }
  }

  __device__ __forceinline__ void weigh() const {
    uint32_t tile = 0, served = 0;
    Lengths lengths(p, blockIdx.x);
    // BF16 q is fetched here, and the sink of the head that is this thread's.
    const int my_head = threadIdx.x % 128;
    const __nv_bfloat16* q = nullptr;
    int heads = 0;
    float sink = 0.f;
    bool q_comes = false;
    const auto look_ahead = [&](const Item& item) {
      q = static_cast<const __nv_bfloat16*>(p.q) + item.token * p.q_token_stride + item.head0 * p.q_head_stride;
      heads = p.heads - item.head0;
      sink = my_head < N && my_head < heads && p.sinks ? p.sinks[item.head0 + my_head] : -INFINITY;
    };
    const float scale = FP8 ? 0.f : (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
      const Item item(p, i, N, lengths);
      if (!FP8 && item.tiles > 0) {
        // The last item's q is read by nobody any more: finish() has barriers.
        if (!q_comes) look_ahead(item), copy_q(q, heads);
        const int at = served % 2 * N + my_head;
        if (my_head < N) floats(L::kScale)[at] = scale, floats(L::kSink)[at] = sink * kLog2e;
        copies_wait();
        fence_async();
        sync_threads(1, 128);
      }
      lengths = Lengths(p, i + gridDim.x);
      if (item.tiles == 0) {
        const int head = threadIdx.x % 128;
        if (p.splits > 1 && head < N) floats(L::kFactor)[head] = kNoMaximum, floats(L::kFactor)[N + head] = 0.f;
        continue;
      }
      const int buffer = served % L::kQBuffers;
      float sum[N / 4] = {};
      bool started = false;  // there is a maximum
      if (FP8) barrier_wait(q_full(buffer), served / L::kQBuffers & 1);
      for (int left = item.tiles; left > 0; --left, ++tile) {
        float s[N / 2];
        if (!FP8 && left == 1) look_ahead(Item(p, i + gridDim.x, N, lengths));  // while the last rows are waited for
        scores(s, tile, buffer);
        if (!FP8 && left == 1) {
          // The next item's q comes while the last weights are computed. It has keys if one is visible.
          q_comes = i + gridDim.x < p.items && lengths.visible > 0;
          sync_threads(1, 128);  // all have read this item's
          if (q_comes) copy_q(q, heads);
        }
        weights(s, sum, tile, started, served & 1, left == 1);
        if (FP8 && left == 1) barrier_arrive(q_empty(buffer));  // its scales are read until here
      }
      ++served;
    }
  }

  // E4M3: the first of the 8 dimensions of this thread: rows g and g + 8 of its warp's part of four M = 64 blocks.
  __device__ __forceinline__ int dim0() const { return warp * 64 + lane / 4 * 8; }
  // BF16: dimension of row 8 * half + g of this warp's part of block m.
  __device__ __forceinline__ int dim_of(int m, int half, int g) const {
    return (warp / 4 * 4 + m) * 64 + warp % 4 * 16 + half * 8 + g;
  }

  // ---------------------------------------------------------------- outputs, O^T += V^T P^T
  __device__ __forceinline__ void wait_weights(float (&acc)[4][L::kAcc], uint32_t tile) const {
    const int t = lane % 4, buffer = tile % 2;
    barrier_wait(ready(buffer), tile / 2 & 1);
    if (states()[buffer]) {  // the maximum was raised
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        const float2 x = reinterpret_cast<const float2*>(floats(L::kCorrection) + buffer * N)[n * 4 + t];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int h = 0; h < 2 * L::kTerms; ++h) {
            float* const at = acc[m] + h / 2 * N / 2 + n * 4 + h % 2 * 2;
            at[0] *= x.x, at[1] *= x.y;
          }
      }
    }
  }

  __device__ __forceinline__ void outputs(float (&acc)[4][L::kAcc], uint32_t tile) const {
    const int t = lane % 4, buffer = tile % 2;
    const uint64_t b = descriptor(base + L::kWeights + buffer * L::kTerms * L::kTermBytes);
    if constexpr (!FP8) {
      // V^T is read from the ring, across its rows: of two quarters. Both terms of the weights are columns of one
      // product.
      wait_weights(acc, tile);
      uint32_t slot[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t count = 4 * tile + warp / 4 * 2 + h;
        slot[h] = count % L::kSlots;
        barrier_wait(full(slot[h]), count / L::kSlots & 1);
      }
      fence_async();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint64_t rows = descriptor(base + L::kRing + slot[h] * L::kSlotBytes, L::kGroupBytes);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int m = 0; m < 2; ++m)
            product<true, true>(acc[h * 2 + m], rows + ((step * 2 * L::kGroupBytes + m * 1024) >> 4), b + step * 2);
        products_commit();
      }
      products_wait<1>();
      barrier_arrive(empty(slot[0]));
      products_wait<0>();
      barrier_arrive(empty(slot[1]));
    } else {
      // A step is 16 keys, of which a thread has 2t, 2t + 1, 2t + 8 and 2t + 9, and of each 8 dimensions.
      const int block = warp / 2, chunk = warp % 2 * 4 + lane / 8;
      const int even_row = block * 1024 + swizzled(2 * t, chunk) + lane / 4 % 2 * 8;
      const int odd_row = block * 1024 + swizzled(2 * t + 1, chunk) + lane / 4 % 2 * 8;
      uint32_t a[2][4][4], raw[4][2];
      const auto read = [&](int step) {
        const uint32_t count = 2 * tile + step / 2, slot = count % L::kSlots;
        if (step % 2 == 0) barrier_wait(full(slot), count / L::kSlots & 1);
        const uint8_t* const rows = smem + L::kRing + slot * L::kSlotBytes + step % 2 * 2 * L::kGroupBytes;
#pragma unroll
        for (int k = 0; k < 4; ++k) read_words(raw[k], rows + k / 2 * L::kGroupBytes + (k % 2 ? odd_row : even_row));
      };
      const auto widen = [&](uint32_t (&to)[4][4]) {  // two keys of one dimension to a register
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const uint32_t pairs = __byte_perm(raw[2 * k][m / 2], raw[2 * k + 1][m / 2], m % 2 ? 0x7362 : 0x5140);
            to[m][2 * k] = e4m3_low(pairs), to[m][2 * k + 1] = e4m3_high(pairs);
          }
      };
      read(0);
      widen(a[0]);
      wait_weights(acc, tile);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step % 2 == 1) barrier_arrive(empty((2 * tile + step / 2) % L::kSlots));
        products_begin();
#pragma unroll
        for (int m = 0; m < 4; ++m) product<true>(acc[m], a[step & 1][m], b + step * 2);
        products_commit();
        if (step < 3) {
          read(step + 1);
          products_wait<1>();
          widen(a[step & 1 ^ 1]);
        }
      }
      products_wait<0>();
    }
  }

  __device__ __forceinline__ void multiply() const {
    const int g = lane / 4, t = lane % 4;
    uint32_t tile = 0;
    Lengths lengths(p, blockIdx.x);
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
      const Item item(p, i, N, lengths);
      lengths = Lengths(p, i + gridDim.x);
      if (FP8 && i == blockIdx.x && item.tiles > 0) {
        load_q<N, 8>(p, item, warp, lane, smem + L::kQ, floats(L::kScale), floats(L::kSink), [] {});
        barrier_arrive(q_full(0));
      }
      float acc[4][L::kAcc] = {};
      for (int left = item.tiles; left > 0; --left, ++tile) {
        outputs(acc, tile);
        if (left > 1) barrier_arrive(used(tile % 2));
      }
      if constexpr (L::kTerms == 2)
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int j = 0; j < N / 2; ++j) acc[m][j] += acc[m][N / 2 + j];
      if (p.splits > 1) {
        sync_threads(2, kOutputThreads);
        // Partial outputs take the place of the ring, which everybody has left.
        float* const partial = floats(L::kRing);  // [N][512]
#pragma unroll
        for (int n = 0; n < N / 4; ++n) {
          const int row = n / 2 * 8 + t * 2 + n % 2, at = n / 2 * 4 + n % 2;
          if constexpr (FP8) {
            float4* const to = reinterpret_cast<float4*>(partial + partial_at(row, dim0()));
            to[0] = make_float4(acc[0][at], acc[0][at + 2], acc[1][at], acc[1][at + 2]);
            to[1] = make_float4(acc[2][at], acc[2][at + 2], acc[3][at], acc[3][at + 2]);
          } else {
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
              for (int h = 0; h < 2; ++h) partial[partial_at(row, dim_of(m, h, g))] = acc[m][at + 2 * h];
          }
        }
        return;
      }
      // With the last weights came the factors; without a key all is 0.
      const int last = (tile + 1) % 2;
      const float* const factors = floats(L::kFactor) + last * N;
      if constexpr (!FP8) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          float2 factor = make_float2(0.f, 0.f);
          if (item.tiles > 0) factor = reinterpret_cast<const float2*>(factors)[n * 4 + t];
          const int head = item.head0 + n * 8 + g;
          const bool is = head < p.heads;
          __nv_bfloat16* const to = out_of(item.token, is ? head : 0);
          // Of four blocks of 8 dimensions, the four lanes of a head have two of each, and then eight of one each.
#pragma unroll
          for (int m = 0; m < 4; m += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float* const x = acc[m + k / 2] + n * 4 + k % 2 * 2;
              packed[k] = transposed8(pack_bf16(x[0] * factor.x, x[1] * factor.y));
            }
            transpose4(packed, t);
            if (is)
              *reinterpret_cast<uint4*>(to + dim_of(m + t / 2, t % 2, 0)) =
                  make_uint4(packed[0], packed[1], packed[2], packed[3]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < N / 4; ++n) {
          const int row = n / 2 * 8 + t * 2 + n % 2, at = n / 2 * 4 + n % 2;
          const float factor = item.tiles == 0 ? 0.f : factors[row];
          uint32_t packed[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) packed[m] = pack_bf16(acc[m][at] * factor, acc[m][at + 2] * factor);
          if (item.head0 + row < p.heads)
            *reinterpret_cast<uint4*>(out_of(item.token, item.head0 + row) + dim0()) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
      }
      if (item.tiles > 0) barrier_arrive(used(last));
    }
  }

  // Where a partial output is, in floats: heads that a warp writes at once lie in different banks.
  static __device__ __forceinline__ int partial_at(int row, int dim) {
    return row * kDim + (dim ^ (row >> 1 & 3) << 3);
  }

  // ---------------------------------------------------------------- splits are the blocks of a cluster
  // Each adds up its share of the output from everybody's shared memory, in the order of the ranks.
  __device__ __forceinline__ void merge() const {
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    const int64_t token = blockIdx.x / (p.splits * p.head_blocks);
    const int head0 = blockIdx.x / p.splits % p.head_blocks * N;
    const float bmm2 = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
    const int rows = min(N, p.heads - head0);
    for (int i = blockIdx.x % p.splits * kOutputThreads + threadIdx.x; i < rows * (kDim / 4);
         i += p.splits * kOutputThreads) {
      const int row = i / (kDim / 4), head = head0 + row;
      const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
      float largest[kSplits], sum[kSplits], shift = fmaxf(sink, kNoMaximum);
      float4 value[kSplits];
#pragma unroll
      for (int r = 0; r < kSplits; ++r) {
        const float* const stat = cluster.map_shared_rank(floats(L::kFactor), r);
        largest[r] = stat[row], sum[r] = stat[N + row];
        value[r] = *reinterpret_cast<const float4*>(cluster.map_shared_rank(floats(L::kRing), r) +
                                                    partial_at(row, i % (kDim / 4) * 4));
        shift = fmaxf(shift, largest[r]);
      }
      float total = exp2_fast(sink - shift);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < kSplits; ++r) {
        const float weight = exp2_fast(largest[r] - shift);
        total += weight * sum[r];
        v.x += weight * value[r].x, v.y += weight * value[r].y, v.z += weight * value[r].z, v.w += weight * value[r].w;
      }
      const float factor = total > 0.f ? bmm2 / total : 0.f;
      *reinterpret_cast<uint2*>(out_of(token, head) + i % (kDim / 4) * 4) =
          make_uint2(pack_bf16(v.x * factor, v.y * factor), pack_bf16(v.z * factor, v.w * factor));
    }
    cluster.sync();  // nobody leaves while its shared memory is read
  }
};

template <bool FP8, int N>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_wgmma_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  const Block<FP8, N> block{{p, smem, smem_address(smem), warp, static_cast<int>(threadIdx.x % 32)}};
  if (threadIdx.x == 0) block.init();
  wait_for_previous();
  __syncthreads();
  if (warp >= 12) {
    give_registers<80>();
    p.keep_outputs ? block.template produce<true>() : block.template produce<false>();
    if (p.splits > 1) cg::this_cluster().sync(), cg::this_cluster().sync();  // as merge() does
  } else if (warp >= 8) {
    // Of the 128 registers that a thread begins with; outputs of two terms take more.
    if constexpr (FP8)
      take_registers<144>();
    else
      give_registers<112>();
    block.weigh();
    if (p.splits > 1) cg::this_cluster().sync(), cg::this_cluster().sync();
  } else {
    take_registers<FP8 ? 144 : 160>();
    block.multiply();
    if (p.splits > 1) block.merge();
  }
#endif
}

template <bool FP8, int N>
cudaError_t launch(const SparseMla& call, bool split, int sms, cudaStream_t stream) {
  const Params p(call, N, split ? kSplits : 1);
  const int blocks = split ? p.items : min(p.items, sms);
  return launch_kernel<sparse_mla_wgmma_kernel<FP8, N>>(p, blocks, kThreads, Layout<FP8, N>::kTotal, p.splits, stream);
}

}  // namespace wgmma

cudaError_t launch_sparse_mla_wgmma(const SparseMla& call, int heads, bool split, int sms, cudaStream_t stream) {
  using wgmma::launch;
  if (heads == 16)
    return call.rows_are_fp8 ? launch<true, 16>(call, split, sms, stream) : launch<false, 16>(call, split, sms, stream);
  return call.rows_are_fp8 ? launch<true, 32>(call, split, sms, stream) : launch<false, 32>(call, split, sms, stream);
}

}  // namespace mla
