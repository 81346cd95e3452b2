// Sparse MLA over full-width rows for Hopper, few heads: docs/sm90-sparse-mla.md.
//
// An item is one token, 16 of its heads and a share of its keys, on which a group of eight warps works, or of four,
// in which case a block has two; q is in registers, as A fragments. Four more warps copy rows into a ring of tiles.
// For each tile the warps of a group divide the keys among them and compute scores (Q K^T, fp16 or BF16 mma.sync),
// weigh them against a maximum that is seldom raised, then divide the dimensions and add the weighted rows (P V).
// E4M3 rows are widened to fp16 in registers, on the way from shared memory into either product; the transposition
// that P V needs is done there too, by byte permutation of two rows. The blocks of a token that share its keys form
// a cluster and merge through each other's shared memory, in a fixed order.

#include <type_traits>

#include "sm90_wgmma.cuh"

namespace dsv4 {
namespace {

constexpr int kHeads = 16;  // of a block: the M of mma.sync
constexpr int kMaxSplits = 8;
constexpr int kConsumers = 256, kProducers = 128, kThreads = kConsumers + kProducers;

// ---------------------------------------------------------------- PTX

[[maybe_unused]] __device__ __forceinline__ uint32_t of_rank(uint32_t address, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
[[maybe_unused]] __device__ __forceinline__ void write_remote(uint32_t to, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
[[maybe_unused]] __device__ __forceinline__ uint4 read_remote(uint32_t from) {
  uint4 r;
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(from));
  return r;
}

#define DSV4_MMA(type)                                                                                     \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
      "{%0,%1,%2,%3};"                                                                                     \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool HALF>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (HALF)
    DSV4_MMA("f16");
  else
    DSV4_MMA("bf16");
}

// ---------------------------------------------------------------- layout

// Eight warps compute: as one group of eight, or two groups of four, each with its own items, ring and the rest of
// this.
template <bool FP8, int WARPS>
struct Layout {
  static constexpr int kGroups = kConsumers / 32 / WARPS;
  static constexpr int kThreadsGroup = WARPS * 32;                // that compute
  static constexpr int kWarpsFetch = kProducers / 32 / kGroups;
  static constexpr int kStageBytes = WARPS * 8 * 1024;
  static constexpr int kStages = 3;
  static constexpr int kRowBytes = FP8 ? 512 : 1024;
  static constexpr int kKeys = kStageBytes / kRowBytes;  // keys of one tile
  static constexpr int kPTerms = FP8 ? 1 : 2;            // BF16 weights come as high and low part
  static constexpr int kPTerm = kKeys / 16 * 512;        // bytes of one term, in fragment order
  static constexpr int kRing = 0;
  static constexpr int kQ = kRing + kStages * kStageBytes;  // q on its way into fragments, WARPS pieces of 8 at a time
  static constexpr int kP = kQ + WARPS * 2048;              // two buffers
  static constexpr int kBias = kP + 2 * kPTerm * kPTerms;
  static constexpr int kMax = kBias + kStages * kKeys * 4;
  static constexpr int kRowStat = kMax + kHeads * WARPS * 4;
  static constexpr int kScale = kRowStat + 2 * kHeads * 4;
  static constexpr int kSink = kScale + kHeads * 4;    // of rows, and the output's scale
  static constexpr int kBarriers = kSink + kHeads * 8;
  static constexpr int kStats = kBarriers + 64;        // [ranks][2][rows], by their blocks; one group alone
  static constexpr int kGroupBytes = kStats + (kGroups == 1 ? kMaxSplits * 2 * kHeads * 4 : 0);
  static constexpr int kTotal = kGroups * kGroupBytes;
  static_assert(kGroupBytes % 128 == 0, "groups are aligned");
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block may have");
  static_assert(kThreadsGroup * kGroups == kConsumers && kWarpsFetch * 32 * kGroups == kProducers, "all have work");
  static_assert(kHeads * kDim * 4 <= kStages * kStageBytes, "partial output must fit the ring");

  static __device__ __forceinline__ uint32_t full(uint32_t base, int stage) { return base + kBarriers + stage * 8; }
  static __device__ __forceinline__ uint32_t empty(uint32_t base, int stage) { return full(base, kStages + stage); }

  // In p v a warp has so many dimensions, in blocks of 8 columns: column n of block j is dimension kRun * n + j (of
  // each kRun * 8), so that a thread reads the dimensions of all its blocks at once.
  static constexpr int kDimsWarp = kDim / WARPS;
  static constexpr int kRun = FP8 ? kDimsWarp / 8 : 8;
  static_assert(kDimsWarp % (kRun * 8) == 0, "a warp has whole runs");
  // Dimension of column 2t + i of block 8 * eight; the seven blocks after it hold the next ones.
  static __device__ __forceinline__ int first_dim(int warp, int t, int i, int eight) {
    return warp * kDimsWarp + (2 * t + i) * kRun + eight * (kRun == 16 ? 8 : 64);
  }

  // A row is cut into 16-byte chunks, and chunk c of row r lies at c ^ swizzle(r). Eight lanes that read one phase
  // of either product (two rows by four chunks for q k, four rows by two chunks for p v) then hit all banks.
  static __device__ __forceinline__ int swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }
};

// What a group works on: the keys of a token, or a share of them; the window first, then the picked rows.
template <int KEYS>
struct Keys {
  const int32_t* indices;
  int window, first, keys, tiles;

  __device__ __forceinline__ Keys(const Params& p, int item, const Lengths& lengths) {
    indices = p.indices + item / (p.splits * p.head_blocks) * p.indices_stride;
    window = max(0, min(lengths.visible, kWindow));
    const int picked = lengths.visible > 0 ? max(0, min(lengths.topk, p.width) - kWindow) : 0;
    const int all = window + picked, share = ((all + p.splits - 1) / p.splits + 15) / 16 * 16;
    first = min(item % p.splits * share, all);
    keys = min(share, all - first);
    tiles = (max(keys, 1) + KEYS - 1) / KEYS;  // an empty tile, rather than none
  }
};

// The warps that fetch: a lane looks up a row, a tile ahead; eight lanes copy 128 bytes at a time.
template <bool FP8, int WARPS, bool FIRST>
__device__ __forceinline__ void produce(const Params& p, uint8_t* smem, int warp, int lane, int item, int step) {
  using L = Layout<FP8, WARPS>;
  using Share = Keys<L::kKeys>;
  constexpr int kRows = L::kKeys / L::kWarpsFetch;  // of a tile, by this warp
  static_assert(kRows <= 32, "a lane looks up one row");
  const uint32_t base = smem_address(smem);
  const int row0 = warp * kRows;
  if (item >= p.items) return;
  const int eighth = lane / 8, chunk = lane % 8;
  const auto fetch_index = [&](const Share& k, int tile) -> int {
    const int key = tile * L::kKeys + row0 + lane, at = k.first + key;
    if (lane >= kRows || key >= k.keys) return -1;
    return k.indices[at < k.window ? at : kWindow + at - k.window];
  };
  Share k(p, item, Lengths(p, item));
  Lengths next_lengths(p, item + step);
  int next_index = fetch_index(k, 0), stage = 0, parity = 1;
  while (item < p.items) {
    for (int tile = 0, tiles = k.tiles; tile < tiles; ++tile) {
      const int index = next_index;
      const bool from_window = k.first + tile * L::kKeys + row0 + lane < k.window;
      if (tile + 1 < tiles) {
        next_index = fetch_index(k, tile + 1);
      } else if ((item += step) < p.items) {
        k = Share(p, item, next_lengths);
        next_lengths = Lengths(p, item + step);
        next_index = fetch_index(k, 0);
      }
      const Row row(from_window ? p.swa : p.compressed, index);
      const unsigned there = __ballot_sync(~0u, row.exists) >> eighth;
      // All rows are passed on before the first copy: a shuffle between copies waits until the ones before have left.
      int64_t rows[kRows / 4];
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i)
        rows[i] = __shfl_sync(~0u, reinterpret_cast<int64_t>(row.at), i * 4 + eighth) + chunk * 16;
      barrier_wait(L::empty(base, stage), parity);
      if (lane < kRows)
        reinterpret_cast<float*>(smem + L::kBias)[stage * L::kKeys + row0 + lane] = row.exists ? 0.f : -INFINITY;
      const uint32_t to = base + L::kRing + stage * L::kStageBytes + (row0 + eighth) * L::kRowBytes;
      const uint32_t at[2] = {to + (chunk ^ L::swizzle(eighth)) * 16, to + (chunk ^ L::swizzle(eighth + 4)) * 16};
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int bytes = there >> i * 4 & 1 ? 16 : 0;
#pragma unroll
        for (int c = 0; c < L::kRowBytes; c += 128)
          copy16<FIRST>(at[i % 2] + i * 4 * L::kRowBytes + c, reinterpret_cast<const uint8_t*>(rows[i]) + c, bytes);
      }
      barrier_arrive(L::full(base, stage));  // the bias is there
      copies_arrive(L::full(base, stage));
      if (++stage == L::kStages) stage = 0, parity ^= 1;
    }
  }
}

// The blocks of a cluster have a share of the keys each. Each tells all others its maxima and sums, then adds up its
// share of the output from everybody's shared memory, all of which it asks for at once.
template <bool FP8, int J>
__device__ __forceinline__ void merge(const Params& p, uint8_t* smem, int warp, int lane, int item,
                                      const float (&acc)[J][4], const float (&maximum)[2], const float (&sum)[2]) {
  using L = Layout<FP8, 8>;
  const uint32_t base = smem_address(smem);
  const int g = lane / 4, t = lane % 4, thread = warp * 32 + lane;
  const int split = item % p.splits, head0 = item / p.splits % p.head_blocks * kHeads;
  const int64_t token = item / (p.splits * p.head_blocks);
  float* const row_stat = reinterpret_cast<float*>(smem + L::kRowStat);  // [2][rows]: maximum, sum
  const float* const sinks = reinterpret_cast<const float*>(smem + L::kSink);
  const float bmm2 = sinks[kHeads];
  // Partial outputs of E4M3 rows are divided by their own sum: averages of rows, at most 448, which fp16 holds.
  using Partial = std::conditional_t<FP8, __half, float>;
  constexpr int kRun16 = 16 / sizeof(Partial), kRuns = kDim / kRun16;  // values in 16 bytes
  Partial* const partial = reinterpret_cast<Partial*>(smem + L::kRing);  // [rows][512]
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
    if (warp == 0 && t == 0) row_stat[g + h * 8] = maximum[h], row_stat[kHeads + g + h * 8] = sum[h];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int eight = 0; eight < J / 8; ++eight) {
        uint4* const to = reinterpret_cast<uint4*>(partial + (g + h * 8) * kDim + L::first_dim(warp, t, i, eight));
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = acc[eight * 8 + j][2 * h + i];
        if constexpr (FP8) {
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) packed[j] = pack_half(x[2 * j] * inverse, x[2 * j + 1] * inverse);
          to[0] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        } else {
          reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
          reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
        }
      }
  }
  sync_threads(1, L::kThreadsGroup);
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks have begun: their shared memory is there
  for (int i = thread; i < p.splits * 2 * kHeads; i += L::kThreadsGroup)
    write_remote(of_rank(base + L::kStats + (split * 2 * kHeads + i % (2 * kHeads)) * 4, i / (2 * kHeads)),
                 row_stat[i % (2 * kHeads)]);
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
  const float* const stats = reinterpret_cast<const float*>(smem + L::kStats);
  const int runs = min(kHeads, p.heads - head0) * kRuns;
  for (int i = split * L::kThreadsGroup + thread; i < runs; i += p.splits * L::kThreadsGroup) {
    uint4 raw[kMaxSplits];
#pragma unroll
    for (int r = 0; r < kMaxSplits; ++r)
      if (r < p.splits) raw[r] = read_remote(of_rank(base + L::kRing + i * 16, r));
    const int row = i / kRuns, head = head0 + row;
    const float sink = sinks[row];
    float shift = sink;
#pragma unroll
    for (int r = 0; r < kMaxSplits; ++r)
      if (r < p.splits) shift = fmaxf(shift, stats[r * 2 * kHeads + row]);
    if (shift == -INFINITY) shift = 0.f;
    float total = exp2_fast(sink - shift), value[kRun16] = {};
#pragma unroll
    for (int r = 0; r < kMaxSplits; ++r) {
      if (r >= p.splits) break;
      const float mine = exp2_fast(stats[r * 2 * kHeads + row] - shift);
      const float weight = mine * stats[(r * 2 + 1) * kHeads + row];
      total += weight;
      const uint32_t w[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (FP8) {
          const float2 x = __half22float2(reinterpret_cast<const __half2&>(w[j]));
          value[2 * j] += weight * x.x, value[2 * j + 1] += weight * x.y;
        } else {
          value[j] += mine * __uint_as_float(w[j]);
        }
      }
    }
    const float factor = total > 0.f ? bmm2 / total : 0.f;
    uint32_t packed[kRun16 / 2];
#pragma unroll
    for (int j = 0; j < kRun16 / 2; ++j) packed[j] = pack_bf16(value[2 * j] * factor, value[2 * j + 1] * factor);
    __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride +
                              head * p.out_head_stride + i % kRuns * kRun16;
    if constexpr (FP8)
      *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    else
      *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
  }
  __syncwarp();
  // Nobody leaves while its shared memory is read.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

template <bool FP8, int WARPS>
__device__ __forceinline__ void consume(const Params& p, uint8_t* smem, int warp, int lane, int group, int item,
                                        int step) {
  using L = Layout<FP8, WARPS>;
  constexpr int kPieces = 8;                   // q is brought in pieces of 64 dimensions
  constexpr int kKeysWarp = L::kKeys / WARPS;  // whose scores a warp computes
  constexpr int kBlocksN = kKeysWarp / 8;
  constexpr int kSteps = kDim / 16;
  constexpr int kStepsHeld = WARPS == 4 ? 16 : kSteps;  // whose q is in registers; what is left, in shared memory
  constexpr int kDimsWarp = L::kDimsWarp, kBlocksJ = kDimsWarp / 8, kRun = L::kRun;
  const uint32_t base = smem_address(smem);
  const int g = lane / 4, t = lane % 4, thread = warp * 32 + lane;
  float* const row_max = reinterpret_cast<float*>(smem + L::kMax);       // [rows][warps]
  float* const q_scale = reinterpret_cast<float*>(smem + L::kScale);     // [rows]
  float* const sinks = reinterpret_cast<float*>(smem + L::kSink);        // [rows], then the output's scale
  const auto sync = [&] { sync_threads(1 + group, L::kThreadsGroup); };
  int stage = 0, parity = 0, buffer = 0;
  for (; item < p.items; item += step) {
    const int head0 = item / p.splits % p.head_blocks * kHeads;
    const int64_t token = item / (p.splits * p.head_blocks);
    const int tiles = Keys<L::kKeys>(p, item, Lengths(p, item)).tiles;

    // What the end needs of memory is asked for now.
    float for_end = -INFINITY;
    if (thread == kHeads)
      for_end = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
    else if (thread < min(kHeads, p.heads - head0) && p.sinks)
      for_end = p.sinks[head0 + thread] * kLog2e;

    // ---- q, first on its way: each warp brings 64 dimensions (or twice that) of all heads
    uint4 raw[kPieces / WARPS][2][2];  // 16 values of rows g and g + 8: one run of 16, or two of 8 in BF16
#pragma unroll
    for (int piece = 0; piece < kPieces / WARPS; ++piece)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = head0 + g + h * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int dim = (warp + piece * WARPS) * 64 + (FP8 ? t * 16 + i * 8 : i * 32 + t * 8);
          const int64_t at = token * p.q_token_stride + head * p.q_head_stride + dim;
          uint4& to = raw[piece][h][i];
          if (head >= p.heads) {
            to = make_uint4(0, 0, 0, 0);
          } else if (p.q_is_fp8) {
            const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(p.q) + at);
            to = make_uint4(half_to_bf16(e4m3_low(w.x)), half_to_bf16(e4m3_high(w.x)), half_to_bf16(e4m3_low(w.y)),
                            half_to_bf16(e4m3_high(w.y)));
          } else {
            to = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + at);
          }
        }
      }

    // ---- q as A fragments. Dimensions are permuted within a row so that a thread's chunk of a key holds what it
    // needs of four (BF16: two) steps; the order of a sum over dimensions is free as long as q follows.
    uint32_t q[kStepsHeld][4];
    {
      uint32_t* const largest_of = reinterpret_cast<uint32_t*>(smem + L::kP);  // [rows][pieces], BF16 bits
      if constexpr (FP8) {
        // fp16 holds q / 2^e whatever q is; 2^e, from the largest value of the row, goes back in with the scale.
#pragma unroll
        for (int piece = 0; piece < kPieces / WARPS; ++piece)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint4 v = raw[piece][h][i];
              const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
              for (int k = 0; k < 4; ++k) largest = max(largest, max(w[k] & 0x7FFF, (w[k] >> 16) & 0x7FFF));
            }
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            if (t == 0) largest_of[(g + h * 8) * kPieces + warp + piece * WARPS] = largest;
          }
      }
      sync();  // everybody has done with the last item's, too
      if (thread <= kHeads) sinks[thread] = for_end;
      if constexpr (FP8)
        if (thread < kHeads) {
          uint32_t largest = 0;
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) largest = max(largest, largest_of[thread * kPieces + piece]);
          q_scale[thread] = power_below(largest).x;
        }
      sync();
#pragma unroll
      for (int piece = 0; piece < kPieces / WARPS; ++piece) {
        uint32_t pairs[2][8];  // of a row
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float inverse = FP8 ? __int_as_float(0x7F000000 - __float_as_int(q_scale[g + h * 8])) : 1.f;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 v = raw[piece][h][i];
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if constexpr (FP8) {
                const float2 x = unpack_bf16(w[k]);
                pairs[h][i * 4 + k] = pack_half(x.x * inverse, x.y * inverse);
              } else {
                pairs[h][i * 4 + k] = w[k];
              }
            }
          }
        }
#pragma unroll
        for (int u = 0; u < 4; ++u)
          *reinterpret_cast<uint4*>(smem + L::kQ + ((warp * 4 + u) * 32 + lane) * 16) =
              make_uint4(pairs[0][2 * u], pairs[1][2 * u], pairs[0][2 * u + 1], pairs[1][2 * u + 1]);
        sync();
#pragma unroll
        for (int i = 0; i < WARPS * 4; ++i)
          if (piece * WARPS * 4 + i < kStepsHeld)
            read_words(q[piece * WARPS * 4 + i], smem + L::kQ + (i * 32 + lane) * 16);
        if (piece + 1 < kPieces / WARPS) sync();
      }
    }

    const float bmm1 = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
    float acc[kBlocksJ][4];
#pragma unroll
    for (int j = 0; j < kBlocksJ; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
    // Of rows g and g + 8: what weights are relative to, the maximum of the first tile or a later one, and the sum of
    // the keys this thread scored.
    float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = bmm1 * (FP8 ? q_scale[g + h * 8] : 1.f);

    if (item + step < p.items) {  // the next q, into the L2 cache
      const int64_t next = (item + step) / p.head_blocks;
      const int head = (item + step) % p.head_blocks * kHeads + thread / 8;
      if (thread < kHeads * 8 && head < p.heads) {
        const int64_t at = next * p.q_token_stride + head * p.q_head_stride + thread % 8 * 64;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(p.q) + at * (p.q_is_fp8 ? 1 : 2)));
      }
    }

    for (int tile = 0; tile < tiles; ++tile) {
      const uint8_t* const rows = smem + L::kRing + stage * L::kStageBytes;
      uint8_t* const weights = smem + L::kP + buffer * L::kPTerms * L::kPTerm;
      barrier_wait(L::full(base, stage), parity);

      // ---- scores of this warp's keys
      // A product takes four times as long as the tensor core needs for it: four sums at a time, not one after another.
      constexpr int kChains = 4 / kBlocksN;
      float chains[kChains][kBlocksN][4] = {};
      constexpr int kStepsChunk = FP8 ? 4 : 2;
#pragma unroll
      for (int c = 0; c < kSteps / kStepsChunk; ++c) {
        uint32_t b[kBlocksN][2 * kStepsChunk];
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) {
          const int row = warp * kKeysWarp + n * 8 + g;
          uint32_t w[4];
          read_words(w, rows + row * L::kRowBytes + c / 2 * 128 + ((c % 2 * 4 + t) ^ L::swizzle(row)) * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (FP8) {
              b[n][2 * i] = e4m3_low(w[i]), b[n][2 * i + 1] = e4m3_high(w[i]);
            } else {
              b[n][i] = w[i];
            }
          }
        }
#pragma unroll
        for (int u = 0; u < kStepsChunk; ++u) {
          const int step = c * kStepsChunk + u;
          uint32_t a[4];
          if (step < kStepsHeld)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = q[min(step, kStepsHeld - 1)][i];
          else
            read_words(a, smem + L::kQ + (step % (WARPS * 4) * 32 + lane) * 16);
#pragma unroll
          for (int n = 0; n < kBlocksN; ++n) mma<FP8>(chains[step % kChains][n], a, b[n][2 * u], b[n][2 * u + 1]);
        }
      }
      float s[kBlocksN][4];
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = chains[0][n][i];
#pragma unroll
          for (int j = 1; j < kChains; ++j) s[n][i] += chains[j][n][i];
        }
      const float* const bias = reinterpret_cast<const float*>(smem + L::kBias) + stage * L::kKeys + warp * kKeysWarp;
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        const float2 key_bias = *reinterpret_cast<const float2*>(bias + n * 8 + 2 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = fmaf(s[n][i], scale[i / 2], i % 2 ? key_bias.y : key_bias.x);
      }

      // ---- weights of this warp's keys, relative to the maximum known so far unless a score is far above it
      float sum_tile[2];
      auto write_weights = [&] {
        // The scores of two blocks of 8 keys lie in registers as the weights' A fragment of 16 keys needs them.
#pragma unroll
        for (int h = 0; h < 2; ++h) sum_tile[h] = 0.f;
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) {
          const int block = warp * kBlocksN + n;
          uint8_t* const to = weights + (block / 2 * 32 + lane) * 16 + block % 2 * 8;
          uint32_t high[2], low[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float shift = maximum[h] == -INFINITY ? 0.f : maximum[h];
            const float x = exp2_fast(s[n][2 * h] - shift), y = exp2_fast(s[n][2 * h + 1] - shift);
            sum_tile[h] += x + y;
            if constexpr (FP8)
              high[h] = pack_half(x, y);
            else
              high[h] = pack_bf16(x, y), low[h] = rest_bf16(x, y, high[h]);
          }
          *reinterpret_cast<uint2*>(to) = make_uint2(high[0], high[1]);
          if constexpr (!FP8) *reinterpret_cast<uint2*>(to + L::kPTerm) = make_uint2(low[0], low[1]);
        }
      };
      bool raise = tile == 0;
      if (!raise) {
        bool above = false;
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) above |= s[n][i] > maximum[i / 2] + kSlack;
        write_weights();
        raise = sync_any(1 + group, L::kThreadsGroup, above);
      }
      if (raise) {  // by all warps, which first tell each other their maxima
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float largest = -INFINITY;
#pragma unroll
          for (int n = 0; n < kBlocksN; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
          if (t == 0) row_max[(g + h * 8) * WARPS + warp] = largest;
        }
        sync();
        float correction[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float4* const all = reinterpret_cast<const float4*>(row_max + (g + h * 8) * WARPS);
          float now = maximum[h];
#pragma unroll
          for (int i = 0; i < WARPS / 4; ++i) {
            const float4 v = all[i];
            now = fmaxf(now, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
          }
          correction[h] = now == -INFINITY ? 1.f : exp2_fast(maximum[h] - now);
          maximum[h] = now;
          sum[h] *= correction[h];
        }
#pragma unroll
        for (int j = 0; j < kBlocksJ; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[j][i] *= correction[i / 2];
        write_weights();
        sync();
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] += sum_tile[h];

      // ---- weights times rows: this warp's dimensions, all keys
#pragma unroll
      for (int k = 0; k < L::kKeys / 16; ++k) {
        uint32_t b[kBlocksJ][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Two keys, kRun dimensions of each; a register takes one dimension of both.
          const int row = k * 16 + half * 8 + 2 * t;
          const uint8_t* const at = rows + row * L::kRowBytes;
          if constexpr (FP8) {
            constexpr int kWords = kRun / 4;
            const int chunk = (warp * kDimsWarp + g * kRun) / 16, within = g * kRun % 16;
            uint32_t x[kWords], y[kWords];
            read_words(x, at + (chunk ^ L::swizzle(row)) * 16 + within);
            read_words(y, at + L::kRowBytes + (chunk ^ L::swizzle(row + 1)) * 16 + within);
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
              const uint32_t low = __byte_perm(x[w], y[w], 0x5140), high = __byte_perm(x[w], y[w], 0x7362);
              b[w * 4][half] = e4m3_low(low), b[w * 4 + 1][half] = e4m3_high(low);
              b[w * 4 + 2][half] = e4m3_low(high), b[w * 4 + 3][half] = e4m3_high(high);
            }
          } else {
#pragma unroll
            for (int run = 0; run < kBlocksJ / 8; ++run) {
              const int chunk = (warp * kDimsWarp + run * 64) / 8 + g;
              uint32_t x[4], y[4];
              read_words(x, at + (chunk ^ L::swizzle(row)) * 16);
              read_words(y, at + L::kRowBytes + (chunk ^ L::swizzle(row + 1)) * 16);
#pragma unroll
              for (int w = 0; w < 4; ++w) {
                b[run * 8 + 2 * w][half] = __byte_perm(x[w], y[w], 0x5410);
                b[run * 8 + 2 * w + 1][half] = __byte_perm(x[w], y[w], 0x7632);
              }
            }
          }
        }
#pragma unroll
        for (int term = 0; term < L::kPTerms; ++term) {
          uint32_t a[4];
          read_words(a, weights + term * L::kPTerm + (k * 32 + lane) * 16);
#pragma unroll
          for (int j = 0; j < kBlocksJ; ++j) mma<FP8>(acc[j], a, b[j][0], b[j][1]);
        }
      }
      barrier_arrive(L::empty(base, stage));
      if (++stage == L::kStages) stage = 0, parity ^= 1;
      buffer ^= 1;
    }

    // ---- denominators: over the four threads of a row, then over the warps that shared the keys
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (t == 0) row_max[(g + h * 8) * WARPS + warp] = total;
    }
    sync();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum[h] += row_max[(g + h * 8) * WARPS + i];
    }
    const float bmm2 = sinks[kHeads];
    if (L::kGroups > 1 || p.splits == 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = g + h * 8, head = head0 + row;
        if (head >= p.heads) continue;
        const float largest = maximum[h], sink = sinks[row];
        float shift = fmaxf(largest, sink);
        if (shift == -INFINITY) shift = 0.f;
        const float mine = exp2_fast(largest - shift);
        const float total = sum[h] * mine + exp2_fast(sink - shift);
        const float factor = total > 0.f ? bmm2 * mine / total : 0.f;
        __nv_bfloat16* const to =
            static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int eight = 0; eight < kBlocksJ / 8; ++eight) {
            uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
              packed[j] = pack_bf16(acc[eight * 8 + 2 * j][2 * h + i] * factor,
                                    acc[eight * 8 + 2 * j + 1][2 * h + i] * factor);
            *reinterpret_cast<uint4*>(to + L::first_dim(warp, t, i, eight)) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
          }
      }
      continue;
    }

    if constexpr (L::kGroups == 1) merge<FP8>(p, smem, warp, lane, item, acc, maximum, sum);
  }
}

template <bool FP8, int WARPS>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_mma_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  using L = Layout<FP8, WARPS>;
  extern __shared__ __align__(128) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  const int lane = threadIdx.x % 32;
  const bool merges = L::kGroups == 1 && p.splits > 1;
  if (merges) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // waited for before the first push
  if (threadIdx.x < L::kGroups) {
    const uint32_t base = smem_address(smem) + threadIdx.x * L::kGroupBytes;
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(L::full(base, i), 2 * 32 * L::kWarpsFetch);
      barrier_init(L::empty(base, i), L::kThreadsGroup);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int step = gridDim.x * L::kGroups;
  if (warp >= kConsumers / 32) {
    give_registers<40>();
    wait_for_previous();
    const int group = (warp - kConsumers / 32) / L::kWarpsFetch;
    const int first = blockIdx.x + group * gridDim.x;
    uint8_t* const part = smem + group * L::kGroupBytes;
    if (p.keep_outputs)
      produce<FP8, WARPS, true>(p, part, warp % L::kWarpsFetch, lane, first, step);
    else
      produce<FP8, WARPS, false>(p, part, warp % L::kWarpsFetch, lane, first, step);
    if (merges) {  // as merge() does
      __syncwarp();
      for (int i = 0; i < 2; ++i)
        asm volatile("barrier.cluster.wait.aligned;\n barrier.cluster.arrive.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
  } else {
    take_registers<232>();
    wait_for_previous();
    const int group = warp / WARPS;
    const int first = blockIdx.x + group * gridDim.x;
    consume<FP8, WARPS>(p, smem + group * L::kGroupBytes, warp % WARPS, lane, group, first, step);
  }
#endif
}

template <bool FP8, int WARPS>
cudaError_t launch(const SparseMla& call, int splits, int sms, cudaStream_t stream) {
  using L = Layout<FP8, WARPS>;
  const Params p(call, kHeads, splits);
  const int blocks = splits > 1 ? p.items : min(p.items, sms);
  return launch_kernel<sparse_mla_mma_kernel<FP8, WARPS>>(p, blocks, kThreads, L::kTotal, splits, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_mma(const SparseMla& call, bool paired, int splits, int sms, cudaStream_t stream) {
  if (!call.rows_are_fp8) return launch<false, 8>(call, splits, sms, stream);
  return paired ? launch<true, 4>(call, splits, sms, stream) : launch<true, 8>(call, splits, sms, stream);
}

}  // namespace dsv4
