// Scores of sparse_mla_mma.cu: q on its way into A fragments, and its products with keys.
#pragma once

#include "mma_shape.cuh"

namespace mla {
namespace mma {

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

// A warp of a group, and what it does with q and with keys.
template <RowFormat FORMAT, MmaBlock BLOCK>
struct Scores {
  using S = Shape<FORMAT, BLOCK>;
  static constexpr int kWarps = S::kWarps;
  static constexpr int kKeysWarp = S::kKeysWarp, kKeyBlocks = kKeysWarp / 8;  // whose scores a warp computes
  static constexpr int kRounds = (S::kPieces + kWarps - 1) / kWarps;          // of pieces of q
  static constexpr bool kNarrowQ = S::kNarrow > 0;                            // q is scaled, and fp16
  using KeyScales = RowScales<S::kScales>;

  const RowParams& p;
  SharedStorage<S>& shared;
  const int warp, lane, group, g, t, thread;

  float scale[2];  // of rows g and g + 8: what a product with q is to be multiplied by
  uint32_t q[S::kHeldSteps][4];

  __device__ __forceinline__ Scores(const RowParams& p, SharedStorage<S>& shared, int warp, int lane, int group)
      : p(p), shared(shared), warp(warp), lane(lane), group(group), g(lane / 4), t(lane % 4),
        thread(warp * 32 + lane) {}

  __device__ __forceinline__ void sync() const { sync_threads(1 + group, S::kGroupThreads); }

  // Of q, a piece is 64 dimensions. A warp brings every kWarps-th.
  static __device__ __forceinline__ bool is_narrow(int piece) { return piece < S::kNarrow / 64; }
  // Where it is in shared memory: of those not in registers some are where one was that is.
  static __device__ __forceinline__ int slot(int piece) {
    if (piece >= 8) return S::kQSlots - 1;
    return kWarps + S::kHeldPieces < 8 && piece >= kWarps + S::kHeldPieces ? piece - S::kHeldPieces : piece % kWarps;
  }

  __device__ __forceinline__ void load_q(int64_t token, int head0) {
    // The same address for all pieces of a row: else the compiler multiplies strides for each.
    const bool is_fp8 = FORMAT == RowFormat::kE4M3 && p.q_is_fp8;
    const uint8_t* row_of_q[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t at = (token * p.q_token_stride + (head0 + g + h * 8) * p.q_head_stride) * (is_fp8 ? 1 : 2);
      asm("" : "+l"(at));
      row_of_q[h] = static_cast<const uint8_t*>(p.q) + at;
    }
    uint4 raw[kRounds][2][2];  // 16 values of rows g and g + 8: one run of 16, or two of 8 if wide
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int piece = warp + round * kWarps;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = head0 + g + h * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int dim = piece * 64 + (is_narrow(piece) ? t * 16 + i * 8 : i * 32 + t * 8);
          uint4& to = raw[round][h][i];
          if (head >= p.heads || piece >= S::kPieces) {
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
    // What the end needs of memory is asked for now, too.
    float for_end = -INFINITY;
    if (thread == kHeads)
      for_end = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
    else if (thread < min(kHeads, p.heads - head0) && p.sinks)
      for_end = p.sinks[head0 + thread] * kLog2e;
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
          if (t == 0 && warp + round * kWarps < S::kPieces) shared.largest_q[g + h * 8][warp + round * kWarps] = most;
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
      const int piece = warp + round * kWarps;
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
      for (int i = 0; i < kWarps * 4; ++i)
        if (round * kWarps * 4 + i < S::kHeldSteps) unpack(q[round * kWarps * 4 + i], shared.q[i][lane]);
      if (round * kWarps * 4 < S::kHeldSteps && (round + 1) * kWarps < min(8, S::kPieces)) sync();
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
    const int64_t token = p.token_of(item);
    const int head = p.head_block_of(item) * kHeads + thread / 8;
    if (thread < kHeads * 8 && head < p.heads) {
      const int64_t at = token * p.q_token_stride + head * p.q_head_stride + thread % 8 * 64;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(p.q) + at * (p.q_is_fp8 ? 1 : 2)));
    }
  }

  // Scales of this warp's keys: what rows' weights are multiplied by, and scales divided. A lane has a share of a key's
  // groups, and none branches, so that this is done beside products. Exponents become float32 here, once.
  __device__ __forceinline__ void prepare_scales(int stage, Weights<S>& weights) const {
    if constexpr (S::kIsScaled) {
      constexpr int kShares = 32 / kKeysWarp, kOf = S::kRatios / kShares;
      const int of_warp = lane % kKeysWarp, key = warp * kKeysWarp + of_warp, first = lane / kKeysWarp * kOf;
      const float bias = shared.bias[stage][key];
      float mine[kOf], most = 0.f;
      if constexpr (S::kScales == Scales::kUe8m0) {
        static_assert(kOf == S::kRounds && kShares == S::kTogether, "a lane has those of a sum");
        uint32_t x = reinterpret_cast<const uint32_t*>(shared.scales[stage])[key * 2 + first / 4];
        if (first + kOf == S::kRatios) x &= 0xFFFFFF;  // there are seven
        if constexpr (kOf < 4) x >>= first % 4 * 8;
#pragma unroll
        for (int i = 0; i < kOf; ++i) {
          mine[i] = __uint_as_float((i < 3 ? x << 23 - 8 * i : x >> 1) & 0x7F800000);
          shared.key_scales[warp][i][of_warp][lane / kKeysWarp] = mine[i];
        }
      } else {
        const float* const from = reinterpret_cast<const float*>(shared.scales[stage]) + key * 4 + first;
#pragma unroll
        for (int i = 0; i < kOf; ++i) mine[i] = from[i];
      }
#pragma unroll
      for (int i = 0; i < kOf; ++i) most = fmaxf(most, fabsf(mine[i]));
#pragma unroll
      for (int mask = kKeysWarp; mask < 32; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
      const RowPower power = row_power(most);
#pragma unroll
      for (int i = 0; i < kOf; ++i)
        weights.ratio[first + i][Weights<S>::place_of(key)] = __float2half_rn(mine[i] * power.inverse);
      if (lane < kKeysWarp) weights.power[key] = {power.log2 + bias, power.inverse};
      __syncwarp();
    }
  }

  // Products of q with this warp's keys; with scales, and without that of q.
  __device__ __forceinline__ void scores(float (&s)[kKeyBlocks][4], int stage, Weights<S>& weights) const {
    const uint8_t* const rows = shared.rows[stage];
    // A product takes four times as long as the tensor core needs for it: several sums at a time.
    constexpr int kChains = 4 / kKeyBlocks, kSums = S::kIsScaled ? 1 : kChains;  // what is scaled has others besides
    float sums[kSums][kKeyBlocks][4] = {};
    KeyScales scales[kKeyBlocks][2];
    if constexpr (S::kScales == Scales::kFloat)
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[n][i] = KeyScales(shared.scales[stage], warp * kKeysWarp + n * 8 + 2 * t + i);
    // What is wide comes first: the end then waits for the last products of what is narrow, and not for others after it.
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
          multiply<false>(sums[step % kSums][n], a, b[n][2 * u], b[n][2 * u + 1]);
      }
    }
    // Groups of dimensions that have a scale, several together, each with a sum of its own until it is scaled: of one the q
    // is in registers, of another in shared memory. If one is missing, that is in the first round, beside wide products.
    constexpr int kSpan = S::kIsScaled ? S::kGroup / 64 : 1;
#pragma unroll
    for (int i_round = 0; i_round < S::kRounds; ++i_round) {
      const int round = S::kGroups % S::kTogether == 0 ? i_round : i_round == 0 ? S::kRounds - 1 : i_round - 1;
      const auto unit_of = [&](int j, int of_span) { return (round + j * S::kRounds) * kSpan + of_span; };
      float part[S::kTogether][kKeyBlocks][4] = {};
#pragma unroll
      for (int of_span = 0; of_span < kSpan; ++of_span) {
        uint32_t b[S::kTogether][kKeyBlocks][8];
#pragma unroll
        for (int j = 0; j < S::kTogether; ++j)
#pragma unroll
          for (int n = 0; n < kKeyBlocks; ++n) {
            const int unit = unit_of(j, of_span);
            if (unit >= S::kNarrowUnits) continue;
            uint32_t w[4];
            read_words(w, rows + S::chunk_at(warp * kKeysWarp + n * 8, g, unit / 2, unit % 2 * 4 + t));
#pragma unroll
            for (int i = 0; i < 4; ++i) b[j][n][2 * i] = e4m3_low(w[i]), b[j][n][2 * i + 1] = e4m3_high(w[i]);
          }
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
          for (int j = 0; j < S::kTogether; ++j) {
            const int unit = unit_of(j, of_span);
            if (unit >= S::kNarrowUnits) continue;
            uint32_t a[4];
            fragment_of_q(a, unit * 4 + u);
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n)
              multiply<true>(S::kIsScaled ? part[j][n] : sums[u % kSums][n], a, b[j][n][2 * u], b[j][n][2 * u + 1]);
          }
      }
      if (i_round == (S::kScales == Scales::kUe8m0 ? 0 : S::kRounds - 1)) prepare_scales(stage, weights);
      if constexpr (S::kIsScaled)
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int j = 0; j < S::kTogether; ++j) {
            if (unit_of(j, 0) >= S::kNarrowUnits) continue;
            float by[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if constexpr (S::kScales == Scales::kUe8m0)
                by[i] = shared.key_scales[warp][round][n * 8 + 2 * t + i][j];
              else
                by[i] = scales[n][i].of_group(round + j * S::kRounds);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][n][i] = fmaf(part[j][n][i], by[i % 2], sums[0][n][i]);
          }
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
};

}  // namespace mma
}  // namespace mla
