// Sparse MLA for Hopper, few heads: docs/sm90-sparse-mla.md.
//
// An item is one token, 16 of its heads and a share of its keys, on which a group of eight consumer warps works, or of
// four, in which case a block has two groups; q is in registers, as A fragments. Four producer warps copy rows into a
// ring of stages. For each stage the warps of a group divide the keys among them and compute scores (Q K^T, mma.sync),
// weigh them against a maximum that is seldom raised, then divide the dimensions and add the weighted rows (P V).
//
// Narrow dimensions, E4M3, are widened to fp16 in registers, on the way from shared memory into either product; the
// transposition that P V needs is done there too, by byte permutation of two rows. Scales never touch a row: a scale
// multiplies the score over its dimensions, in float32, and the weights that meet these dimensions, in fp16. Wide
// dimensions are BF16 throughout.
//
// The blocks of a token that share its keys form a cluster and merge through each other's shared memory, in a fixed
// order.

#include <climits>
#include <type_traits>

#include "rows.cuh"
#include "sm90_wgmma.cuh"

namespace mla {
namespace mma {

constexpr int kHeads = 16;  // of an item: the M of mma.sync
constexpr int kMaxSplits = 8;
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kThreads = kConsumerThreads + kProducerThreads;

struct Params : SparseMlaRows {
  int head_blocks, splits, items;

  Params(const SparseMlaRows& call, int splits)
      : SparseMlaRows(call),
        head_blocks((call.heads + kHeads - 1) / kHeads),
        splits(splits),
        items(call.tokens * head_blocks * splits) {}
};

// ---------------------------------------------------------------- shared memory

template <RowFormat FORMAT, int WARPS>
struct Shape : RowLayout<FORMAT> {
  using R = RowLayout<FORMAT>;
  static constexpr int kConsumerGroups = kConsumerThreads / 32 / WARPS;
  static constexpr int kGroupThreads = WARPS * 32;
  static constexpr int kProducerWarps = kProducerThreads / 32 / kConsumerGroups;  // of a group
  static constexpr int kKeys = WARPS * (R::kNarrow ? 16 : 8);                     // of a stage
  static constexpr int kStages = R::kPitch == 512 || R::kPitch == 1024 ? 3 : 2;   // as many as fit
  // Of 16 dimensions, in the products with q: four to a 64-byte unit of narrow ones, two to one of wide ones.
  static constexpr int kNarrowUnits = R::kNarrow / 64, kWideUnits = R::kWide / 32;
  static constexpr int kPieces = R::kDims / 64;               // of q, 64 dimensions each
  static constexpr int kHeldSteps = WARPS == 4 ? 16 : 32;     // whose q is in registers; the rest is in shared memory
  static constexpr int kQSlots = WARPS + (kPieces > 8 ? 1 : 0);
  // In P V a warp has 64 or 128 dimensions of all keys, in runs that have one scale.
  static constexpr int kDimsWarp = kDim / WARPS;
  static constexpr int kRun = WARPS == 4 && R::kNarrow && (!R::kIsScaled || R::kGroup == 128) ? 128 : 64;
  static constexpr int kTerms = R::kNarrow ? 1 : 2;  // of weights: BF16 ones come as high and low part
  static constexpr bool kHasBoth = R::kNarrow && R::kHasWideValues;
  // Of the 168 that 384 threads begin with.
  static constexpr int kProducerRegisters = FORMAT == RowFormat::kV4 && WARPS == 4 ? 56 : 40;
  static constexpr int kConsumerRegisters = kProducerRegisters == 56 ? 224 : 232;
  static_assert(kProducerThreads * kProducerRegisters + kConsumerThreads * kConsumerRegisters <= kThreads * 168,
                "or else the warps that take registers wait for ever");
  static_assert(kKeys / kProducerWarps <= 32, "a lane looks up one row");

  // A row is cut into chunks of 16 bytes, and chunk c of row r lies at c ^ swizzle(r). Eight lanes that read one phase
  // of either product (two rows by four chunks for Q K^T, four rows by two chunks for P V) then hit all banks.
  static __device__ __forceinline__ int swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }
  // Where chunk `c` of 128 bytes, of line `line`, of row `row8` + `row` is in a stage. `row8` is a multiple of 8, apart
  // because swizzles repeat, and addresses of rows 8 apart then differ by constants.
  static __device__ __forceinline__ int chunk_at(int row8, int row, int line, int c) {
    return (row8 + row) * R::kPitch + line * 128 + (c ^ swizzle(row)) * 16;
  }
  // Column 2t + i of block 8 * eight of a warp's dimensions; the seven blocks after it hold the next ones.
  static __device__ __forceinline__ int first_dim(int warp, int t, int i, int eight) {
    return warp * kDimsWarp + (2 * t + i) * (kRun / 8) + eight * (kRun == 128 ? 8 : 64);
  }
};

// Weights of a stage's keys, as A fragments of 16 keys.
template <typename S>
struct Weights {
  uint4 term[S::kTerms][S::kKeys / 16][32];
  __half ratio[S::kIsScaled ? S::kGroups : 1][S::kKeys];  // of a scale to its row's power
  RowPower power[S::kIsScaled ? S::kKeys : 1];
};

template <typename S>
struct alignas(128) SharedStorage {
  uint8_t rows[S::kStages][S::kKeys * S::kPitch];
  uint4 q[S::kQSlots * 4][32];  // on its way into fragments, and those that stay here
  Weights<S> weights[2];
  uint8_t scales[S::kStages][S::kIsScaled ? S::kKeys * S::kScaleBytes : 16];
  float bias[S::kStages][S::kKeys];  // 0, or -inf for a missing row
  float row_max[kHeads][S::kGroupThreads / 32];
  float row_largest[kHeads][S::kGroupThreads / 32];
  float row_stat[3][kHeads];  // maximum, sum, largest score
  uint32_t largest_q[kHeads][S::kPieces];
  float q_scale[kHeads];
  float sinks[kHeads], bmm2;
  alignas(8) uint64_t full[S::kStages];
  uint64_t empty[S::kStages];
  float stats[S::kConsumerGroups == 1 ? kMaxSplits : 1][3][kHeads];  // of the blocks of a cluster
};

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

#define MLA_MMA(type)                                                                                     \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
      "{%0,%1,%2,%3};"                                                                                     \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool HALF>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (HALF)
    MLA_MMA("f16");
  else
    MLA_MMA("bf16");
}
__device__ __forceinline__ void unpack(uint32_t (&r)[4], const uint4& x) {
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
__device__ __forceinline__ uint32_t scaled_half(uint32_t x, uint32_t by) {
  const __half2 r = __hmul2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(by));
  return reinterpret_cast<const uint32_t&>(r);
}

// ---------------------------------------------------------------- scheduler

// Lengths of an item's token, which are asked for an item ahead.
struct Lengths {
  int of[2];

  __device__ __forceinline__ Lengths(const Params& p, int item) {
    const int at = divided(min(item, p.items - 1) / (p.splits * p.head_blocks), p.tokens_per_length);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int32_t* const lengths = p.sources[s].lengths;
      const int length = lengths ? lengths[at] : 0;
      of[s] = lengths ? length : INT_MAX;
    }
  }
};

// The keys of an item: of its token, or a share of them; those of the first source first.
template <typename S>
struct Keys {
  int64_t token;
  int of_first, first, keys, tiles;

  __device__ __forceinline__ Keys(const Params& p, int item, const Lengths& lengths) {
    token = item / (p.splits * p.head_blocks);
    const auto count = [&](int s) {
      const KeySource& source = p.sources[s];
      return max(source.offset, min(lengths.of[s], source.width + source.offset)) - source.offset;
    };
    of_first = count(0);
    const int all = of_first + (p.second_needs_first && lengths.of[0] <= 0 ? 0 : count(1));
    const int share = ((all + p.splits - 1) / p.splits + 15) / 16 * 16;
    first = min(item % p.splits * share, all);
    keys = min(share, all - first);
    tiles = (max(keys, 1) + S::kKeys - 1) / S::kKeys;  // an empty tile, rather than none
  }
  // Which source key `key` of the item is from.
  __device__ __forceinline__ const KeySource& source(const Params& p, int key) const {
    return p.sources[first + key < of_first ? 0 : 1];
  }
  __device__ __forceinline__ int index(const Params& p, int key) const {
    if (key >= keys) return -1;
    // Field by field: constants at an address that is not known wait for each other.
    const bool is_first = first + key < of_first;
    const int32_t* const indices = is_first ? p.sources[0].indices : p.sources[1].indices;
    const int64_t stride = is_first ? p.sources[0].indices_stride : p.sources[1].indices_stride;
    return indices[token * stride + first + key - (is_first ? 0 : of_first)];
  }
};

// ---------------------------------------------------------------- producer
// A lane looks up a row, a stage ahead; eight lanes copy 128 bytes at a time.

template <typename S, bool FIRST>
__device__ __forceinline__ void produce(const Params& p, SharedStorage<S>& shared, int warp, int lane, int item,
                                        int step) {
  constexpr int kRows = S::kKeys / S::kProducerWarps;  // of a stage, by this warp
  const int my_key = warp * kRows + lane, eighth = lane / 8, chunk = lane % 8;
  if (item >= p.items) return;
  const auto look_up = [&](const Keys<S>& k, int tile) {
    return lane < kRows ? k.index(p, tile * S::kKeys + my_key) : -1;
  };
  Keys<S> k(p, item, Lengths(p, item));
  Lengths next_lengths(p, item + step);
  int next_index = look_up(k, 0), stage = 0, parity = 1;
  while (item < p.items) {
    for (int tile = 0, tiles = k.tiles; tile < tiles; ++tile) {
      const int index = next_index;
      const Pool& pool = k.source(p, tile * S::kKeys + my_key).pool;
      if (tile + 1 < tiles) {
        next_index = look_up(k, tile + 1);
      } else if ((item += step) < p.items) {
        k = Keys<S>(p, item, next_lengths);
        next_lengths = Lengths(p, item + step);
        next_index = look_up(k, 0);
      }
      const Row row(pool, index);
      const unsigned exist = __ballot_sync(~0u, row.exists) >> eighth;
      // All rows are passed on before the first copy: a shuffle between copies waits until the ones before have left.
      int64_t rows[kRows / 4];
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i)
        rows[i] = __shfl_sync(~0u, reinterpret_cast<int64_t>(row.at), i * 4 + eighth);
      barrier_wait(smem_address(&shared.empty[stage]), parity);
      if (lane < kRows) {
        shared.bias[stage][my_key] = row.exists ? 0.f : -INFINITY;
        const uint32_t to = smem_address(&shared.scales[stage][my_key * S::kScaleBytes]);
        if constexpr (S::kScales == Scales::kUe8m0)
          copy8(to, row.page + pool.page.value * (S::kNarrow + 2 * S::kWide) + row.in_page * 8, row.exists ? 8 : 0);
        else if constexpr (S::kScales == Scales::kFloat)
          copy16<FIRST>(to, row.at + S::kNarrow, row.exists ? 16 : 0);
      }
      const uint32_t to = smem_address(shared.rows[stage]);
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int bytes = exist >> i * 4 & 1 ? 16 : 0, row8 = warp * kRows + i / 2 * 8, to_row = i % 2 * 4 + eighth;
#pragma unroll
        for (int line = 0; line < S::kLines; ++line) {
          const typename S::Chunk c = S::chunk(line, chunk);
          if (c.exists)
            copy16<FIRST>(to + S::chunk_at(row8, to_row, c.line, c.at),
                          reinterpret_cast<const uint8_t*>(rows[i]) + c.from, bytes);
        }
      }
      barrier_arrive(smem_address(&shared.full[stage]));  // the bias is there
      copies_arrive(smem_address(&shared.full[stage]));
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
}

// ---------------------------------------------------------------- consumers

template <RowFormat FORMAT, int WARPS>
struct Consumer {
  using S = Shape<FORMAT, WARPS>;
  static constexpr int kKeysWarp = S::kKeys / WARPS, kKeyBlocks = kKeysWarp / 8;  // whose scores a warp computes
  static constexpr int kDimBlocks = S::kDimsWarp / 8;                             // of outputs
  static constexpr int kRounds = (S::kPieces + WARPS - 1) / WARPS;                // of pieces of q
  static constexpr bool kNarrowQ = S::kNarrow > 0;                                // q is scaled, and fp16
  using KeyScales = RowScales<S::kScales>;

  const Params& p;
  SharedStorage<S>& shared;
  const int warp, lane, group, g, t, thread;

  uint32_t q[S::kHeldSteps][4];
  float acc[kDimBlocks][4];
  // Of rows g and g + 8: what weights are relative to, the sum of weights of keys that this thread scored, their
  // largest score, and what a product with q is to be multiplied by.
  float maximum[2], sum[2], largest[2], scale[2];

  __device__ __forceinline__ Consumer(const Params& p, SharedStorage<S>& shared, int warp, int lane, int group)
      : p(p), shared(shared), warp(warp), lane(lane), group(group), g(lane / 4), t(lane % 4),
        thread(warp * 32 + lane) {}

  __device__ __forceinline__ void sync() const { sync_threads(1 + group, S::kGroupThreads); }

  // Of q, a piece is 64 dimensions. A warp brings every WARPS-th.
  static __device__ __forceinline__ bool is_narrow(int piece) { return piece < S::kNarrow / 64; }
  static __device__ __forceinline__ int slot(int piece) { return piece < 8 ? piece % WARPS : WARPS; }

  __device__ __forceinline__ void load_q(int64_t token, int head0) {
    // What the end needs of memory is asked for now.
    float for_end = -INFINITY;
    if (thread == kHeads)
      for_end = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
    else if (thread < min(kHeads, p.heads - head0) && p.sinks)
      for_end = p.sinks[head0 + thread] * kLog2e;

    uint4 raw[kRounds][2][2];  // 16 values of rows g and g + 8: one run of 16, or two of 8 if wide
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int piece = warp + round * WARPS;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = head0 + g + h * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int dim = piece * 64 + (is_narrow(piece) ? t * 16 + i * 8 : i * 32 + t * 8);
          const int64_t at = token * p.q_token_stride + head * p.q_head_stride + dim;
          uint4& to = raw[round][h][i];
          if (head >= p.heads || piece >= S::kPieces) {
            to = make_uint4(0, 0, 0, 0);
          } else if (FORMAT == RowFormat::kE4M3 && p.q_is_fp8) {
            const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(p.q) + at);
            to = make_uint4(half_to_bf16(e4m3_low(w.x)), half_to_bf16(e4m3_high(w.x)), half_to_bf16(e4m3_low(w.y)),
                            half_to_bf16(e4m3_high(w.y)));
          } else {
            to = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + at);
          }
        }
      }
    }
    // fp16 holds q / 2^e whatever q is; 2^e, from the largest value of the row, goes back in with the scale. What is
    // wide is divided too, which BF16 does exactly.
    if constexpr (kNarrowQ)
#pragma unroll
      for (int round = 0; round < kRounds; ++round)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t most = 0;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t w[4];
            unpack(w, raw[round][h][i]);
#pragma unroll
            for (int k = 0; k < 4; ++k) most = max(most, max(w[k] & 0x7FFF, (w[k] >> 16) & 0x7FFF));
          }
          most = max(most, __shfl_xor_sync(~0u, most, 1));
          most = max(most, __shfl_xor_sync(~0u, most, 2));
          if (t == 0 && warp + round * WARPS < S::kPieces) shared.largest_q[g + h * 8][warp + round * WARPS] = most;
        }
    sync();  // everybody has done with the last item's, too
    if (thread < kHeads) shared.sinks[thread] = for_end;
    if (thread == kHeads) shared.bmm2 = for_end;
    if constexpr (kNarrowQ)
      if (thread < kHeads) {
        uint32_t most = 0;
#pragma unroll
        for (int piece = 0; piece < S::kPieces; ++piece) most = max(most, shared.largest_q[thread][piece]);
        shared.q_scale[thread] = power_below(most).x;
      }
    sync();
    // As A fragments. Dimensions are permuted within a row so that a thread's chunk of a key holds what it needs of
    // four (wide: two) steps; the order of a sum over dimensions is free as long as q follows.
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int piece = warp + round * WARPS;
      uint32_t pairs[2][8];  // of a row
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float inverse = kNarrowQ ? __int_as_float(0x7F000000 - __float_as_int(shared.q_scale[g + h * 8])) : 1.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t w[4];
          unpack(w, raw[round][h][i]);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (kNarrowQ) {
              const float2 x = unpack_bf16(w[k]);
              pairs[h][i * 4 + k] = is_narrow(piece) ? pack_half(x.x * inverse, x.y * inverse)
                                                     : pack_bf16(x.x * inverse, x.y * inverse);
            } else {
              pairs[h][i * 4 + k] = w[k];
            }
          }
        }
      }
      if (piece < S::kPieces)
#pragma unroll
        for (int u = 0; u < 4; ++u)
          shared.q[slot(piece) * 4 + u][lane] =
              make_uint4(pairs[0][2 * u], pairs[1][2 * u], pairs[0][2 * u + 1], pairs[1][2 * u + 1]);
      sync();
#pragma unroll
      for (int i = 0; i < WARPS * 4; ++i)
        if (round * WARPS * 4 + i < S::kHeldSteps) unpack(q[round * WARPS * 4 + i], shared.q[i][lane]);
      if ((round + 1) * WARPS * 4 <= S::kHeldSteps && (round + 1) * WARPS < min(8, S::kPieces)) sync();
    }
    const float bmm1 = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = bmm1 * (kNarrowQ ? shared.q_scale[g + h * 8] : 1.f);
  }

  __device__ __forceinline__ void fragment_of_q(uint32_t (&a)[4], int step) const {
    if (step < S::kHeldSteps)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[min(step, S::kHeldSteps - 1)][i];
    else
      unpack(a, shared.q[slot(step / 4) * 4 + step % 4][lane]);
  }

  // The next item's q, into the L2 cache.
  __device__ __forceinline__ void prefetch_q(int item) const {
    if (item >= p.items) return;
    const int64_t token = item / (p.splits * p.head_blocks);
    const int head = item / p.splits % p.head_blocks * kHeads + thread / 8;
    if (thread < kHeads * 8 && head < p.heads) {
      const int64_t at = token * p.q_token_stride + head * p.q_head_stride + thread % 8 * 64;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(p.q) + at * (p.q_is_fp8 ? 1 : 2)));
    }
  }

  // Scales of this warp's keys, a lane a key: what rows' weights are multiplied by, and scales divided.
  __device__ __forceinline__ void prepare_scales(int stage, Weights<S>& weights) const {
    if constexpr (S::kIsScaled) {
      const int key = warp * kKeysWarp + lane % kKeysWarp;
      const KeyScales scales(shared.scales[stage], key);
      float most = 0.f;
#pragma unroll
      for (int of = 0; of < S::kGroups; ++of) most = fmaxf(most, fabsf(scales.of_group(of)));
      const RowPower power = row_power(most);
      if (lane < kKeysWarp) {
#pragma unroll
        for (int of = 0; of < S::kGroups; ++of)
          weights.ratio[of][key] = __float2half_rn(scales.of_group(of) * power.inverse);
        weights.power[key] = {power.log2 + shared.bias[stage][key], power.inverse};
      }
      __syncwarp();
    }
  }

  // Products of q with this warp's keys; with scales, and without that of q.
  __device__ __forceinline__ void scores(float (&s)[kKeyBlocks][4], int stage) const {
    const uint8_t* const rows = shared.rows[stage];
    // A product takes four times as long as the tensor core needs for it: several sums at a time.
    constexpr int kChains = 4 / kKeyBlocks;
    float chains[kChains][kKeyBlocks][4] = {};
    KeyScales scales[kKeyBlocks][2];
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[n][i] = KeyScales(shared.scales[stage], warp * kKeysWarp + n * 8 + 2 * t + i);
    constexpr int kTogether = S::kIsScaled ? kChains : 1;  // units, each with a sum of its own until it is scaled
#pragma unroll
    for (int unit0 = 0; unit0 < S::kNarrowUnits; unit0 += kTogether) {
      float part[kTogether][kKeyBlocks][4] = {};
      uint32_t b[kTogether][kKeyBlocks][8];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
          const int unit = unit0 + j;
          if (unit >= S::kNarrowUnits) continue;
          uint32_t w[4];
          read_words(w, rows + S::chunk_at(warp * kKeysWarp + n * 8, g, unit / 2, unit % 2 * 4 + t));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[j][n][2 * i] = e4m3_low(w[i]), b[j][n][2 * i + 1] = e4m3_high(w[i]);
        }
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (unit0 + j >= S::kNarrowUnits) continue;
          uint32_t a[4];
          fragment_of_q(a, (unit0 + j) * 4 + u);
#pragma unroll
          for (int n = 0; n < kKeyBlocks; ++n)
            multiply<true>(S::kIsScaled ? part[j][n] : chains[u % kChains][n], a, b[j][n][2 * u], b[j][n][2 * u + 1]);
        }
      if constexpr (S::kIsScaled)
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
#pragma unroll
          for (int n = 0; n < kKeyBlocks; ++n) {
            if (unit0 + j >= S::kNarrowUnits) continue;
            const int of = (unit0 + j) * 64 / S::kGroup;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              chains[0][n][i] = fmaf(part[j][n][i], scales[n][i % 2].of_group(of), chains[0][n][i]);
          }
    }
#pragma unroll
    for (int unit = 0; unit < S::kWideUnits; ++unit) {
      uint32_t b[kKeyBlocks][4];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
        read_words(b[n], rows + S::chunk_at(warp * kKeysWarp + n * 8, g, S::kWideLine + unit / 2, unit % 2 * 4 + t));
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t a[4];
        const int step = S::kNarrow / 16 + unit * 2 + u;
        fragment_of_q(a, step);
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
          multiply<false>(chains[step % kChains][n], a, b[n][2 * u], b[n][2 * u + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = chains[0][n][i];
#pragma unroll
        for (int j = 1; j < kChains; ++j) s[n][i] += chains[j][n][i];
      }
  }

  // Weights of this warp's keys, relative to the maximum; their sums.
  __device__ __forceinline__ void write_weights(const float (&s)[kKeyBlocks][4], Weights<S>& weights,
                                                float (&sum_tile)[2]) const {
    // The scores of two blocks of 8 keys lie in registers as the weights' A fragment of 16 keys needs them.
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_tile[h] = 0.f;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const int block = warp * kKeyBlocks + n;
      const auto put = [&](uint4 (&to)[32], const uint32_t (&x)[2]) {
        reinterpret_cast<uint2*>(&to[lane])[block % 2] = make_uint2(x[0], x[1]);
      };
      uint32_t high[2], low[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = maximum[h] == -INFINITY ? 0.f : maximum[h];
        float x = exp2_fast(s[n][2 * h] - shift), y = exp2_fast(s[n][2 * h + 1] - shift);
        if constexpr (S::kNarrow)
          high[h] = pack_half(x, y);
        else
          high[h] = pack_bf16(x, y), low[h] = rest_bf16(x, y, high[h]);
        if constexpr (S::kIsScaled) {
          const int key = warp * kKeysWarp + n * 8 + 2 * t;
          x *= weights.power[key].inverse, y *= weights.power[key + 1].inverse;
        }
        sum_tile[h] += x + y;
      }
      put(weights.term[0][block / 2], high);
      if constexpr (S::kTerms == 2) put(weights.term[1][block / 2], low);
    }
  }

  // By all warps of the group, which first tell each other their maxima.
  __device__ __forceinline__ void raise_maximum(const float (&s)[kKeyBlocks][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (t == 0) shared.row_max[g + h * 8][warp] = most;
    }
    sync();
    float correction[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = maximum[h];
#pragma unroll
      for (int i = 0; i < WARPS / 4; ++i) {
        const float4 v = reinterpret_cast<const float4*>(shared.row_max[g + h * 8])[i];
        now = fmaxf(now, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
      }
      correction[h] = now == -INFINITY ? 1.f : exp2_fast(maximum[h] - now);
      maximum[h] = now;
      sum[h] *= correction[h];
    }
#pragma unroll
    for (int j = 0; j < kDimBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] *= correction[i / 2];
  }

  // Weights times rows: this warp's dimensions, all keys.
  __device__ __forceinline__ void add_values(int stage, const Weights<S>& weights) {
    constexpr int kRuns = S::kDimsWarp / S::kRun, kRunBlocks = S::kRun / 8;
#pragma unroll
    for (int k = 0; k < S::kKeys / 16; ++k)
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const int dim0 = warp * S::kDimsWarp + run * S::kRun;
        if (!S::kHasWideValues || (S::kNarrow > 0 && dim0 < S::kNarrow)) {
          if constexpr (S::kNarrow > 0) {
            uint32_t b[kRunBlocks][2], a[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) narrow_values(b, half, stage, k * 16 + half * 8, dim0);
            unpack(a, weights.term[0][k][lane]);
            if constexpr (S::kIsScaled) {
              const __half* const ratio = weights.ratio[dim0 / S::kGroup] + k * 16 + 2 * t;
              const uint32_t by[2] = {*reinterpret_cast<const uint32_t*>(ratio),
                                      *reinterpret_cast<const uint32_t*>(ratio + 8)};
#pragma unroll
              for (int i = 0; i < 4; ++i) a[i] = scaled_half(a[i], by[i / 2]);
            }
#pragma unroll
            for (int j = 0; j < kRunBlocks; ++j) multiply<true>(acc[run * kRunBlocks + j], a, b[j][0], b[j][1]);
          }
        } else if constexpr (S::kHasWideValues) {
          uint32_t b[8][2];
#pragma unroll
          for (int half = 0; half < 2; ++half) wide_values(b, half, stage, k * 16 + half * 8, dim0 - S::kNarrow);
#pragma unroll
          for (int term = 0; term < S::kTerms; ++term) {
            uint32_t a[4];
            unpack(a, weights.term[term][k][lane]);
            if constexpr (S::kHasBoth) to_wide_weights(a, weights, k);
#pragma unroll
            for (int j = 0; j < 8; ++j) multiply<false>(acc[run * 8 + j], a, b[j][0], b[j][1]);
          }
        }
      }
  }
  // Of two keys, row8 + 2t and the next, the dimensions of a run that are columns g; a register takes one of both keys.
  __device__ __forceinline__ void narrow_values(uint32_t (&b)[S::kRun / 8][2], int half, int stage, int row8,
                                                unsigned dim0) const {
    constexpr int kWords = S::kRun / 32;
    const uint8_t* const rows = shared.rows[stage];
    const unsigned at = dim0 + g * (S::kRun / 8), chunk = at / 16 % 8, within = at % 16;
    uint32_t x[kWords], y[kWords];
    read_words(x, rows + S::chunk_at(row8, 2 * t, at / 128, chunk) + within);
    read_words(y, rows + S::chunk_at(row8, 2 * t + 1, at / 128, chunk) + within);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t low = __byte_perm(x[w], y[w], 0x5140), high = __byte_perm(x[w], y[w], 0x7362);
      b[w * 4][half] = e4m3_low(low), b[w * 4 + 1][half] = e4m3_high(low);
      b[w * 4 + 2][half] = e4m3_low(high), b[w * 4 + 3][half] = e4m3_high(high);
    }
  }
  // Weights of 16 keys for wide values beside narrow ones: BF16, and not those of rows' powers. One term is enough
  // where it meets an eighth of the dimensions.
  __device__ __forceinline__ void to_wide_weights(uint32_t (&a)[4], const Weights<S>& weights, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowPower* const power = weights.power + k * 16 + i / 2 * 8 + 2 * t;
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(a[i]));
      a[i] = pack_bf16(x.x * power[0].inverse, x.y * power[1].inverse);
    }
  }
  __device__ __forceinline__ void wide_values(uint32_t (&b)[8][2], int half, int stage, int row8, unsigned dim0) const {
    const uint8_t* const rows = shared.rows[stage];
    uint32_t x[4], y[4];
    read_words(x, rows + S::chunk_at(row8, 2 * t, S::kWideLine + dim0 / 64, g));
    read_words(y, rows + S::chunk_at(row8, 2 * t + 1, S::kWideLine + dim0 / 64, g));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      b[2 * w][half] = __byte_perm(x[w], y[w], 0x5410);
      b[2 * w + 1][half] = __byte_perm(x[w], y[w], 0x7632);
    }
  }

  __device__ __forceinline__ void attend(int tiles, int& stage, int& parity, int& buffer) {
#pragma unroll
    for (int j = 0; j < kDimBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = largest[h] = -INFINITY, sum[h] = 0.f;
    for (int tile = 0; tile < tiles; ++tile) {
      Weights<S>& weights = shared.weights[buffer];
      barrier_wait(smem_address(&shared.full[stage]), parity);
      float s[kKeyBlocks][4];
      scores(s, stage);
      prepare_scales(stage, weights);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        const int key = warp * kKeysWarp + n * 8 + 2 * t;
        // Weights are those of rows times their power, and so is their maximum.
        const float2 bias = S::kIsScaled ? make_float2(weights.power[key].log2, weights.power[key + 1].log2)
                                         : *reinterpret_cast<const float2*>(shared.bias[stage] + key);
        if (p.max_logits)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if ((i % 2 ? bias.y : bias.x) != -INFINITY) largest[i / 2] = fmaxf(largest[i / 2], s[n][i] * scale[i / 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = fmaf(s[n][i], scale[i / 2], i % 2 ? bias.y : bias.x);
      }
      float sum_tile[2];
      bool raise = tile == 0;
      if (!raise) {
        bool above = false;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) above |= s[n][i] > maximum[i / 2] + kSlack;
        write_weights(s, weights, sum_tile);
        raise = sync_any(1 + group, S::kGroupThreads, above);
      }
      if (raise) {
        raise_maximum(s);
        write_weights(s, weights, sum_tile);
        sync();
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] += sum_tile[h];
      add_values(stage, weights);
      barrier_arrive(smem_address(&shared.empty[stage]));
      if (++stage == S::kStages) stage = 0, parity ^= 1;
      buffer ^= 1;
    }
    // Over the four threads of a row, then over the warps that shared the keys.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], mask);
        if (p.max_logits) largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], mask));
      }
      if (t == 0) shared.row_max[g + h * 8][warp] = sum[h];
      if (t == 0 && p.max_logits) shared.row_largest[g + h * 8][warp] = largest[h];
    }
    sync();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum[h] += shared.row_max[g + h * 8][i];
      if (p.max_logits)
#pragma unroll
        for (int i = 0; i < WARPS; ++i) largest[h] = fmaxf(largest[h], shared.row_largest[g + h * 8][i]);
    }
  }

  __device__ __forceinline__ __nv_bfloat16* out_of(int64_t token, int head) const {
    return static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
  }
  // The sum is that of 2^(score - maximum).
  __device__ __forceinline__ void write_statistics(int64_t token, int head, float maximum, float sum,
                                                   float largest) const {
    const int64_t at = token * p.heads + head;
    constexpr float kLn2 = 0.6931471805599453f;
    p.lse[at] = sum == 0.f ? INFINITY : (maximum + log2f(sum)) * kLn2;
    if (p.max_logits) p.max_logits[at] = largest * kLn2;
  }

  __device__ __forceinline__ void write_outputs(int64_t token, int head0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = g + h * 8, head = head0 + row;
      if (head >= p.heads) continue;
      const float sink = shared.sinks[row];
      float shift = fmaxf(maximum[h], sink);
      if (shift == -INFINITY) shift = 0.f;
      const float mine = exp2_fast(maximum[h] - shift);
      const float total = sum[h] * mine + exp2_fast(sink - shift);
      const float factor = total > 0.f ? shared.bmm2 * mine / total : 0.f;
      if (p.lse && warp == 0 && t == 0)
        write_statistics(token, head, maximum[h], sum[h], largest[h]);
      __nv_bfloat16* const to = out_of(token, head);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int eight = 0; eight < kDimBlocks / 8; ++eight) {
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            packed[j] = pack_bf16(acc[eight * 8 + 2 * j][2 * h + i] * factor,
                                  acc[eight * 8 + 2 * j + 1][2 * h + i] * factor);
          *reinterpret_cast<uint4*>(to + S::first_dim(warp, t, i, eight)) =
              make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
  }

  // The blocks of a cluster have a share of the keys each. Each tells all others its maxima and sums, then adds up its
  // share of the output from everybody's shared memory, all of which it asks for at once.
  __device__ __forceinline__ void merge(int item, int64_t token, int head0) const {
    const int split = item % p.splits;
    // Partial outputs of plain E4M3 rows are divided by their own sum: averages of rows, at most 448, which fp16 holds.
    constexpr bool kHalf = FORMAT == RowFormat::kE4M3;
    using Partial = std::conditional_t<kHalf, __half, float>;
    constexpr int kRun16 = 16 / sizeof(Partial), kRuns = kDim / kRun16;  // values in 16 bytes
    static_assert(kHeads * kDim * sizeof(Partial) <= sizeof(shared.rows), "partial output must fit the ring");
    Partial* const partial = reinterpret_cast<Partial*>(shared.rows);  // [rows][512]
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
      if (warp == 0 && t == 0)
        shared.row_stat[0][g + h * 8] = maximum[h], shared.row_stat[1][g + h * 8] = sum[h],
        shared.row_stat[2][g + h * 8] = largest[h];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int eight = 0; eight < kDimBlocks / 8; ++eight) {
          uint4* const to = reinterpret_cast<uint4*>(partial + (g + h * 8) * kDim + S::first_dim(warp, t, i, eight));
          float x[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] = acc[eight * 8 + j][2 * h + i];
          if constexpr (kHalf) {
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
    sync_threads(1, S::kGroupThreads);
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks have begun: their shared memory is there
    const auto tell_all = [&](int stat, int row, int rank) {
      write_remote(of_rank(smem_address(&shared.stats[split][stat][row]), rank), shared.row_stat[stat][row]);
    };
    for (int i = thread; i < p.splits * 2 * kHeads; i += S::kGroupThreads)
      tell_all(i / kHeads % 2, i % kHeads, i / (2 * kHeads));
    if (p.max_logits)
      for (int i = thread; i < p.splits * kHeads; i += S::kGroupThreads) tell_all(2, i % kHeads, i / kHeads);
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int runs = min(kHeads, p.heads - head0) * kRuns;
    for (int i = split * S::kGroupThreads + thread; i < runs; i += p.splits * S::kGroupThreads) {
      uint4 raw[kMaxSplits];
#pragma unroll
      for (int r = 0; r < kMaxSplits; ++r)
        if (r < p.splits) raw[r] = read_remote(of_rank(smem_address(shared.rows) + i * 16, r));
      const int row = i / kRuns, head = head0 + row;
      const float sink = shared.sinks[row];
      float shift = sink;
#pragma unroll
      for (int r = 0; r < kMaxSplits; ++r)
        if (r < p.splits) shift = fmaxf(shift, shared.stats[r][0][row]);
      if (shift == -INFINITY) shift = 0.f;
      float total = exp2_fast(sink - shift), value[kRun16] = {};
#pragma unroll
      for (int r = 0; r < kMaxSplits; ++r) {
        if (r >= p.splits) break;
        const float weight = exp2_fast(shared.stats[r][0][row] - shift), share = weight * shared.stats[r][1][row];
        total += share;
        uint32_t w[4];
        unpack(w, raw[r]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kHalf) {
            const float2 x = __half22float2(reinterpret_cast<const __half2&>(w[j]));
            value[2 * j] += share * x.x, value[2 * j + 1] += share * x.y;
          } else {
            value[j] += weight * __uint_as_float(w[j]);
          }
        }
      }
      const float factor = total > 0.f ? shared.bmm2 / total : 0.f;
      if (p.lse && i % kRuns == 0) {  // of keys alone: a sink can be far above them
        float top = -INFINITY, most = -INFINITY, keys = 0.f;
        for (int r = 0; r < p.splits; ++r)
          top = fmaxf(top, shared.stats[r][0][row]), most = fmaxf(most, shared.stats[r][2][row]);
        for (int r = 0; r < p.splits; ++r)
          if (shared.stats[r][1][row] != 0.f)
            keys += exp2_fast(shared.stats[r][0][row] - top) * shared.stats[r][1][row];
        write_statistics(token, head, top, keys, most);
      }
      uint32_t packed[kRun16 / 2];
#pragma unroll
      for (int j = 0; j < kRun16 / 2; ++j) packed[j] = pack_bf16(value[2 * j] * factor, value[2 * j + 1] * factor);
      __nv_bfloat16* const to = out_of(token, head) + i % kRuns * kRun16;
      if constexpr (kHalf)
        *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
    }
    __syncwarp();
    // Nobody leaves while its shared memory is read.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
  }

  __device__ __forceinline__ void consume(int item, int step) {
    int stage = 0, parity = 0, buffer = 0;
    for (; item < p.items; item += step) {
      const Lengths lengths(p, item);
      const int64_t token = item / (p.splits * p.head_blocks);
      const int head0 = item / p.splits % p.head_blocks * kHeads;
      load_q(token, head0);
      prefetch_q(item + step);
      attend(Keys<S>(p, item, lengths).tiles, stage, parity, buffer);
      if (S::kConsumerGroups > 1 || p.splits == 1)
        write_outputs(token, head0);
      else if constexpr (S::kConsumerGroups == 1)
        merge(item, token, head0);
    }
  }
};

template <RowFormat FORMAT, int WARPS>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_mma_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  using S = Shape<FORMAT, WARPS>;
  extern __shared__ __align__(128) uint8_t smem[];
  SharedStorage<S>* const groups = reinterpret_cast<SharedStorage<S>*>(smem);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  const int lane = threadIdx.x % 32;
  const bool merges = S::kConsumerGroups == 1 && p.splits > 1;
  if (merges) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // waited for before the first push
  if (threadIdx.x < S::kConsumerGroups) {
    SharedStorage<S>& mine = groups[threadIdx.x];
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(smem_address(&mine.full[i]), 2 * 32 * S::kProducerWarps);
      barrier_init(smem_address(&mine.empty[i]), S::kGroupThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  touch(p);
  __syncthreads();
  const int step = gridDim.x * S::kConsumerGroups;
  if (warp >= kConsumerThreads / 32) {
    give_registers<S::kProducerRegisters>();
    wait_for_previous();
    const int group = S::kConsumerGroups > 1 ? (warp - kConsumerThreads / 32) / S::kProducerWarps : 0;
    const int first = blockIdx.x + group * gridDim.x;
    if (p.keep_outputs)
      produce<S, true>(p, groups[group], warp % S::kProducerWarps, lane, first, step);
    else
      produce<S, false>(p, groups[group], warp % S::kProducerWarps, lane, first, step);
    if (merges) {  // as merge() does
      __syncwarp();
      for (int i = 0; i < 2; ++i)
        asm volatile("barrier.cluster.wait.aligned;\n barrier.cluster.arrive.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
  } else {
    take_registers<S::kConsumerRegisters>();
    wait_for_previous();
    const int group = S::kConsumerGroups > 1 ? warp / WARPS : 0;
    Consumer<FORMAT, WARPS> consumer(p, groups[group], warp % WARPS, lane, group);
    consumer.consume(blockIdx.x + group * gridDim.x, step);
  }
#endif
}

template <RowFormat FORMAT, int WARPS>
cudaError_t launch(const SparseMlaRows& call, int splits, int sms, cudaStream_t stream) {
  using S = Shape<FORMAT, WARPS>;
  constexpr int kSharedBytes = S::kConsumerGroups * sizeof(SharedStorage<S>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block may have");
  const Params p(call, splits);
  const int blocks = splits > 1 ? p.items : min(p.items, sms);
  return launch_kernel<sparse_mla_mma_kernel<FORMAT, WARPS>>(p, blocks, kThreads, kSharedBytes, splits, stream);
}

}  // namespace mma

cudaError_t launch_sparse_mla_mma(const SparseMlaRows& call, bool paired, int splits, int sms, cudaStream_t stream) {
  using mma::launch;
  switch (call.format) {
    case RowFormat::kE4M3:
      return paired ? launch<RowFormat::kE4M3, 4>(call, splits, sms, stream)
                    : launch<RowFormat::kE4M3, 8>(call, splits, sms, stream);
    case RowFormat::kV4:
      return paired ? launch<RowFormat::kV4, 4>(call, splits, sms, stream)
                    : launch<RowFormat::kV4, 8>(call, splits, sms, stream);
    case RowFormat::kV32:
      return paired ? launch<RowFormat::kV32, 4>(call, splits, sms, stream)
                    : launch<RowFormat::kV32, 8>(call, splits, sms, stream);
    case RowFormat::kBf16: return launch<RowFormat::kBf16, 8>(call, splits, sms, stream);
    case RowFormat::kBf576: return launch<RowFormat::kBf576, 8>(call, splits, sms, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mla
