// Scores of sparse_mla_mma.cu: q becomes A fragments, which are multiplied with keys.
#pragma once

#include "mma_shape.cuh"

namespace mla {
namespace mma {

// c += a b, 16 x 8 x 16: operands are fp16 if HALF, and else BF16.
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
#undef MLA_MMA
__device__ __forceinline__ void unpack(uint32_t (&r)[4], const uint4& x) {
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
// Byte `i` of a word of UE8M0 scales, as float32. 2^-127, which float32 has only as a subnormal number, becomes 0.
__device__ __forceinline__ float ue8m0_to_float(uint32_t scales, int i) {
  return __uint_as_float((i < 3 ? scales << 23 - 8 * i : scales >> 1) & 0x7F800000);
}

// A consumer warp, and what it does with q and keys. Thread 4g + t of a warp has heads (rows of fragments) g and g + 8.
template <RowFormat FORMAT, MmaBlock BLOCK>
struct Scores {
  using S = Shape<FORMAT, BLOCK>;
  static constexpr int kWarpKeys = S::kWarpKeys, kKeyBlocks = kWarpKeys / 8;  // of 8 keys: the N of mma.sync
  static constexpr bool kScalesQ = S::kNarrow > 0;                            // divides it by a power of two
  static constexpr int kSums = S::kIsScaled ? 1 : S::kChains;                 // scores are the sum of these

  const RowParams& p;
  SharedStorage<S>& shared;
  const int warp, lane, group, g, t, thread;

  float scale[2];  // of rows g and g + 8: what a product with q is to be multiplied by
  uint32_t q[S::kRegisterSteps][4];

  __device__ __forceinline__ Scores(const RowParams& p, SharedStorage<S>& shared, int warp, int lane, int group)
      : p(p), shared(shared), warp(warp), lane(lane), group(group), g(lane / 4), t(lane % 4),
        thread(warp * 32 + lane) {}

  __device__ __forceinline__ void sync() const { sync_threads(1 + group, S::kGroupThreads); }

  // ---------------------------------------------------------------- q
  // A warp loads every kGroupWarps-th piece of q, one in each round: of rows g and g + 8 a thread has 16 values, in two
  // chunks of 8. They are one run of 16 if narrow.
  static constexpr int kQRounds = (S::kQPieces + S::kGroupWarps - 1) / S::kGroupWarps;
  using LoadedQ = uint4[kQRounds][2][2];

  static __device__ __forceinline__ bool is_narrow(int piece) { return piece < S::kNarrow / 64; }
  // Where a piece is in shared memory. Those of the second round take the places of pieces that are in registers by
  // then; from kFirstExtra on they have their own.
  static __device__ __forceinline__ int slot(int piece) {
    if (piece >= 8) return S::kQSlots - 1;
    constexpr int kFirstExtra = S::kGroupWarps + S::kRegisterPieces;
    return kFirstExtra < 8 && piece >= kFirstExtra ? piece - S::kRegisterPieces : piece % S::kGroupWarps;
  }

  // By all warps of the group.
  __device__ __forceinline__ void load_q(int64_t token, int head0) {
    LoadedQ raw;
    read_q(raw, token, head0);
    // The epilogue's parameters are asked for together with q.
    float for_epilogue = -INFINITY;
    if (thread == kHeads)
      for_epilogue = p.output_scale();
    else if (thread < min(kHeads, p.heads - head0) && p.sinks)
      for_epilogue = p.sinks[head0 + thread] * kLog2e;
    if constexpr (kScalesQ) write_largest_q(raw);
    sync();  // all warps are also done with the item before
    if (thread < kHeads) shared.sinks[thread] = for_epilogue;
    if (thread == kHeads) shared.bmm2 = for_epilogue;
    if constexpr (kScalesQ) {
      if (thread < kHeads) {
        uint32_t most = 0;
#pragma unroll
        for (int piece = 0; piece < S::kQPieces; ++piece) most = max(most, shared.largest_q[thread][piece]);
        shared.q_scale[thread] = power_below(most).x;
      }
    }
    sync();
    // All warps get q as A fragments, through shared memory. Dimensions are permuted within a row so that a thread's
    // chunk of a key holds what it needs of four (wide: two) k-steps: the order of a sum over dimensions is free as
    // long as q follows.
    constexpr int kRoundSteps = S::kGroupWarps * 4;
#pragma unroll
    for (int round = 0; round < kQRounds; ++round) {
      const int piece = warp + round * S::kGroupWarps;
      uint32_t pairs[2][8];  // of a row
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float inverse = kScalesQ ? __int_as_float(0x7F000000 - __float_as_int(shared.q_scale[g + h * 8])) : 1.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t w[4];
          unpack(w, raw[round][h][i]);
#pragma unroll
          for (int k = 0; k < 4; ++k) pairs[h][i * 4 + k] = to_operand(w[k], inverse, piece);
        }
      }
      if (piece < S::kQPieces) {
#pragma unroll
        for (int u = 0; u < 4; ++u)
          shared.q[slot(piece) * 4 + u][lane] =
              make_uint4(pairs[0][2 * u], pairs[1][2 * u], pairs[0][2 * u + 1], pairs[1][2 * u + 1]);
      }
      sync();
#pragma unroll
      for (int i = 0; i < kRoundSteps; ++i)
        if (round * kRoundSteps + i < S::kRegisterSteps) unpack(q[round * kRoundSteps + i], shared.q[i][lane]);
      // The next round's pieces, if any, take the places of those that are in registers now.
      if (round * kRoundSteps < S::kRegisterSteps && (round + 1) * S::kGroupWarps < min(8, S::kQPieces)) sync();
    }
    const float bmm1 = p.score_scale();
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = bmm1 * (kScalesQ ? shared.q_scale[g + h * 8] : 1.f);
  }

  __device__ __forceinline__ void read_q(LoadedQ& raw, int64_t token, int head0) const {
    const bool is_fp8 = FORMAT == RowFormat::kE4M3 && p.q_is_fp8;
    const uint8_t* row_of_q[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t at = (token * p.q_token_stride + (head0 + g + h * 8) * p.q_head_stride) * (is_fp8 ? 1 : 2);
      asm("" : "+l"(at));  // or else the compiler multiplies by the strides again for each piece
      row_of_q[h] = static_cast<const uint8_t*>(p.q) + at;
    }
#pragma unroll
    for (int round = 0; round < kQRounds; ++round) {
      const int piece = warp + round * S::kGroupWarps;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = head0 + g + h * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int dim = piece * 64 + (is_narrow(piece) ? t * 16 + i * 8 : i * 32 + t * 8);
          uint4& to = raw[round][h][i];
          if (head >= p.heads || piece >= S::kQPieces) {
            to = make_uint4(0, 0, 0, 0);
          } else if (is_fp8) {
            const uint2 w = *reinterpret_cast<const uint2*>(row_of_q[h] + dim);
            to = make_uint4(half_to_bf16(e4m3_low(w.x)), half_to_bf16(e4m3_high(w.x)), half_to_bf16(e4m3_low(w.y)),
                            half_to_bf16(e4m3_high(w.y)));
          } else {
            to = *reinterpret_cast<const uint4*>(row_of_q[h] + dim * 2);
          }
        }
      }
    }
  }

  // fp16 holds q / 2^e whatever q is: 2^e is found from the largest value of the row, and goes back in with the scale.
  // Wide dimensions are divided too, which BF16 does exactly.
  __device__ __forceinline__ void write_largest_q(const LoadedQ& raw) const {
#pragma unroll
    for (int round = 0; round < kQRounds; ++round)
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
        const int piece = warp + round * S::kGroupWarps;
        if (t == 0 && piece < S::kQPieces) shared.largest_q[g + h * 8][piece] = most;
      }
  }

  // Two dimensions as an operand has them.
  static __device__ __forceinline__ uint32_t to_operand(uint32_t pair, float inverse, int piece) {
    if constexpr (!kScalesQ) return pair;
    const float2 x = unpack_bf16(pair);
    return is_narrow(piece) ? pack_half(x.x * inverse, x.y * inverse) : pack_bf16(x.x * inverse, x.y * inverse);
  }

  __device__ __forceinline__ void fragment_of_q(uint32_t (&a)[4], int step) const {
    if (step < S::kRegisterSteps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[min(step, S::kRegisterSteps - 1)][i];
    } else {
      unpack(a, shared.q[slot(step / 4) * 4 + step % 4][lane]);
    }
  }

  // The next item's q, into the L2 cache.
  __device__ __forceinline__ void prefetch_q(int item) const {
    if (item >= p.items) return;
    const int64_t token = p.token_of(item);
    const int head = p.head_block_of(item) * kHeads + thread / 8;
    if (thread < kHeads * 8 && head < p.heads) {
      const int64_t at = token * p.q_token_stride + head * p.q_head_stride + thread % 8 * 64;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(p.q) + at * (p.q_is_fp8 ? 1 : 2)));
    }
  }

  // ---------------------------------------------------------------- scores

  // Products of q with this warp's keys, times the scales of packed rows, but not yet times those of q.
  __device__ __forceinline__ void scores(float (&s)[kKeyBlocks][4], int stage, Weights<S>& weights) const {
    const uint8_t* const rows = shared.rows[stage];
    float sums[kSums][kKeyBlocks][4] = {};
    RowScales<S::kScales> scales[kKeyBlocks][2];
    if constexpr (S::kScales == Scales::kFloat) {
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[n][i] = {shared.scales[stage], warp * kWarpKeys + n * 8 + 2 * t + i};
    }
    // Wide dimensions come first, or else the end would wait for their products after those of the last narrow ones.
    add_wide(sums, rows);
#pragma unroll
    for (int i = 0; i < S::kRounds; ++i) {
      // If the last round lacks a group it comes first, beside the wide products.
      const int round = S::kGroups % S::kRoundGroups == 0 ? i : i == 0 ? S::kRounds - 1 : i - 1;
      float part[S::kRoundGroups][kKeyBlocks][4] = {};
      add_round(sums, part, rows, round);
      // Beside products that go on; UE8M0 scales are needed at the end of the first round.
      if (i == (S::kScales == Scales::kUe8m0 ? 0 : S::kRounds - 1)) prepare_scales(stage, weights);
      if constexpr (S::kIsScaled) add_scaled(sums[0], part, scales, round);
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = sums[0][n][i];
#pragma unroll
        for (int j = 1; j < kSums; ++j) s[n][i] += sums[j][n][i];
      }
  }

  __device__ __forceinline__ void add_wide(float (&sums)[kSums][kKeyBlocks][4], const uint8_t* rows) const {
#pragma unroll
    for (int slice = 0; slice < S::kWideSlices; ++slice) {
      uint32_t b[kKeyBlocks][4];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
        read_words(b[n], rows + S::chunk_at(warp * kWarpKeys + n * 8, g, S::kWideLine + slice / 2, slice % 2 * 4 + t));
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t a[4];
        const int step = S::kNarrow / 16 + slice * 2 + u;
        fragment_of_q(a, step);
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) multiply<false>(sums[step % kSums][n], a, b[n][2 * u], b[n][2 * u + 1]);
      }
    }
  }

  // The j-th scale group of a round. Groups of a round are far apart, so that one's q is in registers and another's in
  // shared memory.
  static __device__ __forceinline__ int group_of(int round, int j) { return round + j * S::kRounds; }

  // Narrow products of a round: of packed rows each group has a sum of its own, in `part`, until it is scaled.
  __device__ __forceinline__ void add_round(float (&sums)[kSums][kKeyBlocks][4],
                                            float (&part)[S::kRoundGroups][kKeyBlocks][4], const uint8_t* rows,
                                            int round) const {
    constexpr int kGroupSlices = S::kIsScaled ? S::kGroup / 64 : 1;
#pragma unroll
    for (int of_group = 0; of_group < kGroupSlices; ++of_group) {
      uint32_t b[S::kRoundGroups][kKeyBlocks][8];
#pragma unroll
      for (int j = 0; j < S::kRoundGroups; ++j)
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
          const int slice = group_of(round, j) * kGroupSlices + of_group;
          if (slice >= S::kNarrowSlices) continue;
          uint32_t w[4];
          read_words(w, rows + S::chunk_at(warp * kWarpKeys + n * 8, g, slice / 2, slice % 2 * 4 + t));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[j][n][2 * i] = e4m3_low(w[i]), b[j][n][2 * i + 1] = e4m3_high(w[i]);
        }
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int j = 0; j < S::kRoundGroups; ++j) {
          const int slice = group_of(round, j) * kGroupSlices + of_group;
          if (slice >= S::kNarrowSlices) continue;
          uint32_t a[4];
          fragment_of_q(a, slice * 4 + u);
#pragma unroll
          for (int n = 0; n < kKeyBlocks; ++n)
            multiply<true>(S::kIsScaled ? part[j][n] : sums[u % kSums][n], a, b[j][n][2 * u], b[j][n][2 * u + 1]);
        }
    }
  }

  // Adds a round's scores of packed rows, each times its scale: in float32, which is exact.
  __device__ __forceinline__ void add_scaled(float (&sum)[kKeyBlocks][4],
                                             const float (&part)[S::kRoundGroups][kKeyBlocks][4],
                                             const RowScales<S::kScales> (&scales)[kKeyBlocks][2], int round) const {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int j = 0; j < S::kRoundGroups; ++j) {
        if (group_of(round, j) >= S::kGroups) continue;
        float by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (S::kScales == Scales::kUe8m0)
            by[i] = shared.float_scales[warp][round][n * 8 + 2 * t + i][j];
          else
            by[i] = scales[n][i].of_group(group_of(round, j));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(part[j][n][i], by[i % 2], sum[n][i]);
      }
  }

  // Finds what weights of this warp's keys need: each row's power, and the ratios of its scales to that. UE8M0 scales
  // become float32 here, once. Lanes share the groups of a key, and none branches, so that products go on meanwhile.
  __device__ __forceinline__ void prepare_scales(int stage, Weights<S>& weights) const {
    if constexpr (S::kIsScaled) {
      constexpr int kKeyLanes = 32 / kWarpKeys, kLaneGroups = S::kPaddedGroups / kKeyLanes;
      const int warp_key = lane % kWarpKeys, key = warp * kWarpKeys + warp_key;
      const int part = lane / kWarpKeys, group0 = part * kLaneGroups;
      const float bias = shared.bias[stage][key];
      float scales[kLaneGroups], largest = 0.f;
      if constexpr (S::kScales == Scales::kUe8m0) {
        static_assert(kLaneGroups == S::kRounds && kKeyLanes == S::kRoundGroups, "group_of(i, part) is group0 + i");
        uint32_t x = reinterpret_cast<const uint32_t*>(shared.scales[stage])[key * 2 + group0 / 4];
        if (group0 + kLaneGroups == S::kPaddedGroups) x &= 0xFFFFFF;  // the eighth byte is no scale
        if constexpr (kLaneGroups < 4) x >>= group0 % 4 * 8;
#pragma unroll
        for (int i = 0; i < kLaneGroups; ++i) {
          scales[i] = ue8m0_to_float(x, i);
          shared.float_scales[warp][i][warp_key][part] = scales[i];
        }
      } else {
        const float* const from = reinterpret_cast<const float*>(shared.scales[stage]) + key * 4 + group0;
#pragma unroll
        for (int i = 0; i < kLaneGroups; ++i) scales[i] = from[i];
      }
#pragma unroll
      for (int i = 0; i < kLaneGroups; ++i) largest = fmaxf(largest, fabsf(scales[i]));
#pragma unroll
      for (int mask = kWarpKeys; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      const RowPower power = row_power(largest);
#pragma unroll
      for (int i = 0; i < kLaneGroups; ++i)
        weights.ratio[group0 + i][Weights<S>::ratio_at(key)] = __float2half_rn(scales[i] * power.inverse);
      if (lane < kWarpKeys) weights.power[key] = {power.log2 + bias, power.inverse};
      __syncwarp();
    }
  }
};

}  // namespace mma
}  // namespace mla
