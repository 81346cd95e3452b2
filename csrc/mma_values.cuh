// Values of sparse_mla_mma.cu: weights of keys, and their products with values.
#pragma once

#include "mma_scores.cuh"

namespace mla {
namespace mma {

// The same warp, and what it does with weights and values.
template <RowFormat FORMAT, MmaBlock BLOCK>
struct Values : Scores<FORMAT, BLOCK> {
  using Base = Scores<FORMAT, BLOCK>;
  using Base::shared, Base::warp, Base::lane, Base::g, Base::t, Base::sync, Base::Base;
  using S = typename Base::S;
  static constexpr int kKeysWarp = Base::kKeysWarp, kKeyBlocks = Base::kKeyBlocks;
  static constexpr int kDimBlocks = S::kDimsWarp / 8;  // of outputs

  float acc[kDimBlocks][4];
  // Of rows g and g + 8: what weights are relative to, the sum of weights of keys that this thread scored, and their
  // largest score.
  float maximum[2], sum[2], largest[2];

  // Weights of this warp's keys, relative to the maximum; their sums, for which weights are divided by rows' powers.
  __device__ __forceinline__ void write_weights(const float (&s)[kKeyBlocks][4], const float2 (&inverse)[kKeyBlocks],
                                                Weights<S>& weights, float (&sum_tile)[2]) const {
    // The scores of two blocks of 8 keys lie in registers as the weights' A fragment of 16 keys needs them.
    uint32_t high[kKeyBlocks][2], low[kKeyBlocks][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_tile[h] = 0.f;
      const float shift = maximum[h] == -INFINITY ? 0.f : maximum[h];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        float x = exp2_fast(s[n][2 * h] - shift), y = exp2_fast(s[n][2 * h + 1] - shift);
        if constexpr (S::kNarrow)
          high[n][h] = pack_half(x, y);
        else
          high[n][h] = pack_bf16(x, y), low[n][h] = rest_bf16(x, y, high[n][h]);
        if constexpr (S::kIsScaled) x *= inverse[n].x, y *= inverse[n].y;
        sum_tile[h] += x + y;
      }
    }
    const auto put = [&](uint4 (&to)[S::kKeys / 16][32], const uint32_t (&x)[kKeyBlocks][2]) {
      if constexpr (kKeyBlocks == 2)
        to[warp][lane] = make_uint4(x[0][0], x[0][1], x[1][0], x[1][1]);
      else
        reinterpret_cast<uint2*>(&to[warp / 2][lane])[warp % 2] = make_uint2(x[0][0], x[0][1]);
    };
    put(weights.term[0], high);
    if constexpr (S::kTerms == 2) put(weights.term[1], low);
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
      for (int i = 0; i < S::kWarps / 4; ++i) {
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

  // Weights times rows: this warp's dimensions, all keys. In groups of four warps what comes first of rows is widened
  // before the barrier that says that weights are there.
  static constexpr bool kAhead = S::kNarrow > 0 && S::kWarps == 4;
  static constexpr int kRuns = S::kDimsWarp / S::kRun, kRunBlocks = S::kRun / 8;
  using Run = uint32_t[kRunBlocks][2];

  __device__ __forceinline__ void first_values(Run& b, int stage) const {
    if constexpr (kAhead) {
#pragma unroll
      for (int half = 0; half < 2; ++half) narrow_values(b, half, stage, half * 8, warp * S::kDimsWarp);
#pragma unroll
      for (int j = 0; j < kRunBlocks; ++j) asm volatile("" : "+r"(b[j][0]), "+r"(b[j][1]));  // not behind the barrier
    }
  }
  // With a run of wide values in a warp of its own the loop is in parts, which wait for their loads one after another.
  __device__ __forceinline__ void add_values(int stage, const Weights<S>& weights, const Run& first) {
    if constexpr (S::kHasBoth) {
      if (warp < S::kWarps - 1)
        add_runs<false>(stage, weights, first);
      else
        add_runs<true>(stage, weights, first);
    } else {
      add_runs<S::kHasWideValues>(stage, weights, first);
    }
  }
  // Whether the last run is wide.
  template <bool WIDE>
  __device__ __forceinline__ void add_runs(int stage, const Weights<S>& weights, const Run& first) {
    static_assert(S::kNarrow == 0 || kDim - S::kNarrow <= S::kRun, "one run at most is wide");
    constexpr int kStepsPart = S::kKeys / 16 / S::kParts, kWords = S::kKeys / 8;
    // Of this thread's keys, two a word.
    uint32_t ratio[kRuns][S::kIsScaled ? kWords : 1];
    if constexpr (S::kIsScaled) {
#pragma unroll
      for (int run = 0; run < kRuns - WIDE; ++run) {
        const int of = (warp * S::kDimsWarp + run * S::kRun) / S::kGroup;
        const uint4* const from = reinterpret_cast<const uint4*>(weights.ratio[of]) + t * kWords / 4;
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
          const uint4 x = from[i / 4];
          ratio[run][i] = x.x, ratio[run][i + 1] = x.y, ratio[run][i + 2] = x.z, ratio[run][i + 3] = x.w;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < S::kKeys / 16; ++k) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const int dim0 = warp * S::kDimsWarp + run * S::kRun;
        if constexpr (S::kNarrow > 0)
          if (!WIDE || run < kRuns - 1) {
            Run b;
            uint32_t a[4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (kAhead && k == 0 && run == 0)
#pragma unroll
                for (int j = 0; j < kRunBlocks; ++j) b[j][half] = first[j][half];
              else
                narrow_values(b, half, stage, k * 16 + half * 8, dim0);
            unpack(a, weights.term[0][k][lane]);
            if constexpr (S::kIsScaled)
#pragma unroll
              for (int i = 0; i < 4; ++i) a[i] = scaled_half(a[i], ratio[run][k * 2 + i / 2]);
#pragma unroll
            for (int j = 0; j < kRunBlocks; ++j) multiply<true>(acc[run * kRunBlocks + j], a, b[j][0], b[j][1]);
            continue;
          }
        if constexpr (WIDE) {
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
      if (k % kStepsPart == kStepsPart - 1) barrier_arrive(smem_address(&shared.empty[stage][k / kStepsPart]));
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
};

}  // namespace mma
}  // namespace mla
