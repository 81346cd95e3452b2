// Values of sparse_mla_mma.cu: weights of keys, and their products with values.
#pragma once

#include "mma_scores.cuh"

namespace mla {
namespace mma {

// The same warp, and what it does with weights and values. In P V it has kWarpDims dimensions of all keys of a stage.
template <RowFormat FORMAT, MmaBlock BLOCK>
struct Values : Scores<FORMAT, BLOCK> {
  using Base = Scores<FORMAT, BLOCK>;
  using Base::shared, Base::warp, Base::lane, Base::g, Base::t, Base::sync, Base::Base;
  using S = typename Base::S;
  static constexpr int kWarpKeys = Base::kWarpKeys, kKeyBlocks = Base::kKeyBlocks;
  static constexpr int kDimBlocks = S::kWarpDims / 8;  // of outputs

  float acc[kDimBlocks][4];
  // Of rows g and g + 8: what weights are relative to, the sum of weights of keys that this thread scored, and their
  // largest score.
  float maximum[2], sum[2], largest[2];

  // ---------------------------------------------------------------- weights

  // Weights of this warp's keys, relative to the maximum, and their sums. Of packed rows, weights are times the rows'
  // powers, and `inverse` takes these out of the sums again.
  __device__ __forceinline__ void write_weights(const float (&s)[kKeyBlocks][4], const float2 (&inverse)[kKeyBlocks],
                                                Weights<S>& weights, float (&tile_sum)[2]) const {
    // The scores of two blocks of 8 keys lie in registers as the weights' A fragment of 16 keys needs them.
    uint32_t high[kKeyBlocks][2], low[kKeyBlocks][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tile_sum[h] = 0.f;
      const float shift = maximum[h] == -INFINITY ? 0.f : maximum[h];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        float x = exp2_fast(s[n][2 * h] - shift), y = exp2_fast(s[n][2 * h + 1] - shift);
        if constexpr (S::kNarrow)
          high[n][h] = pack_half(x, y);
        else
          high[n][h] = pack_bf16(x, y), low[n][h] = rest_bf16(x, y, high[n][h]);
        if constexpr (S::kIsScaled) x *= inverse[n].x, y *= inverse[n].y;
        tile_sum[h] += x + y;
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

  // Takes the larger of the maximum and these scores, of all warps of the group, and corrects sums and outputs.
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
      for (int i = 0; i < S::kGroupWarps / 4; ++i) {
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

  // ---------------------------------------------------------------- values
  // B fragments of a k-step, 16 keys, and a run of dimensions: [..][0] of the first eight keys, [..][1] of the others.
  static constexpr int kRuns = S::kWarpDims / S::kRunDims, kRunBlocks = S::kRunDims / 8;
  using RunFragments = uint32_t[kRunBlocks][2];
  static_assert(S::kNarrow == 0 || kDim - S::kNarrow <= S::kRunDims, "at most the last run is wide");

  // Groups of four read and widen a stage's first fragments before the barrier that says that weights are written, so
  // that they do not wait for shared memory after it.
  static constexpr bool kReadsAhead = S::kNarrow > 0 && S::kGroupWarps == 4;

  __device__ __forceinline__ void read_ahead(RunFragments& b, int stage) const {
    if constexpr (kReadsAhead) {
#pragma unroll
      for (int half = 0; half < 2; ++half) read_narrow(b, half, stage, half * 8, warp * S::kWarpDims);
#pragma unroll
      for (int j = 0; j < kRunBlocks; ++j) asm volatile("" : "+r"(b[j][0]), "+r"(b[j][1]));  // not behind the barrier
    }
  }

  // Adds weights times values of a stage, and releases the stage.
  __device__ __forceinline__ void add_values(int stage, const Weights<S>& weights, const RunFragments& ahead) {
    if constexpr (S::kHasMixedValues) {
      // Only the last warp has a wide run. One loop for all warps would have a branch, and so parts that wait for their
      // loads one after another.
      if (warp < S::kGroupWarps - 1)
        add_runs<false>(stage, weights, ahead);
      else
        add_runs<true>(stage, weights, ahead);
    } else {
      add_runs<S::kHasWideValues>(stage, weights, ahead);
    }
  }

  template <bool LAST_IS_WIDE>
  __device__ __forceinline__ void add_runs(int stage, const Weights<S>& weights, const RunFragments& ahead) {
    constexpr int kSteps = S::kKeys / 16, kPartSteps = kSteps / S::kStageParts;
    constexpr int kNarrowRuns = S::kNarrow == 0 ? 0 : LAST_IS_WIDE ? kRuns - 1 : kRuns;
    Ratios ratios[kRuns];
    if constexpr (S::kIsScaled) {
#pragma unroll
      for (int run = 0; run < kNarrowRuns; ++run) read_ratios(ratios[run], weights, run);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        if (run < kNarrowRuns)
          add_narrow_run(stage, weights, ratios[run], ahead, run, k);
        else
          add_wide_run(stage, weights, run, k);
      }
      if (k % kPartSteps == kPartSteps - 1) barrier_arrive(smem_address(&shared.empty[stage][k / kPartSteps]));
    }
  }

  // Of the scales of a run, for this thread's keys: two a word.
  static constexpr int kRatioWords = S::kKeys / 8;
  using Ratios = uint32_t[S::kIsScaled ? kRatioWords : 1];
  __device__ __forceinline__ void read_ratios(Ratios& ratios, const Weights<S>& weights, int run) const {
    const int scale_group = (warp * S::kWarpDims + run * S::kRunDims) / S::kGroup;
    const uint4* const from = reinterpret_cast<const uint4*>(weights.ratio[scale_group]) + t * kRatioWords / 4;
#pragma unroll
    for (int i = 0; i < kRatioWords; i += 4) {
      const uint4 x = from[i / 4];
      ratios[i] = x.x, ratios[i + 1] = x.y, ratios[i + 2] = x.z, ratios[i + 3] = x.w;
    }
  }

  __device__ __forceinline__ void add_narrow_run(int stage, const Weights<S>& weights, const Ratios& ratios,
                                                 const RunFragments& ahead, int run, int k) {
    RunFragments b;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kReadsAhead && k == 0 && run == 0) {
#pragma unroll
        for (int j = 0; j < kRunBlocks; ++j) b[j][half] = ahead[j][half];
      } else {
        read_narrow(b, half, stage, k * 16 + half * 8, warp * S::kWarpDims + run * S::kRunDims);
      }
    }
    uint32_t a[4];
    unpack(a, weights.term[0][k][lane]);
    if constexpr (S::kIsScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = times_half(a[i], ratios[k * 2 + i / 2]);
    }
#pragma unroll
    for (int j = 0; j < kRunBlocks; ++j) multiply<true>(acc[run * kRunBlocks + j], a, b[j][0], b[j][1]);
  }

  // Reads and widens keys row8 + 2t and the next: those dimensions of a run that are column g of its blocks. A register
  // takes a dimension of both keys, so this transposes them.
  __device__ __forceinline__ void read_narrow(RunFragments& b, int half, int stage, int row8, unsigned dim0) const {
    constexpr int kWords = S::kRunDims / 32;
    const uint8_t* const rows = shared.rows[stage];
    const unsigned at = dim0 + g * (S::kRunDims / 8), chunk = at / 16 % 8, within = at % 16;
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

  __device__ __forceinline__ void add_wide_run(int stage, const Weights<S>& weights, int run, int k) {
    uint32_t b[8][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      read_wide(b, half, stage, k * 16 + half * 8, warp * S::kWarpDims + run * S::kRunDims - S::kNarrow);
#pragma unroll
    for (int term = 0; term < S::kTerms; ++term) {
      uint32_t a[4];
      unpack(a, weights.term[term][k][lane]);
      if constexpr (S::kHasMixedValues) to_wide_weights(a, weights, k);
#pragma unroll
      for (int j = 0; j < 8; ++j) multiply<false>(acc[run * 8 + j], a, b[j][0], b[j][1]);
    }
  }

  // The same of wide dimensions, from dim0 of these on.
  __device__ __forceinline__ void read_wide(uint32_t (&b)[8][2], int half, int stage, int row8, unsigned dim0) const {
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

  // Wide values beside narrow ones need weights in BF16, and without the rows' powers. One term is enough where it
  // meets an eighth of the dimensions.
  __device__ __forceinline__ void to_wide_weights(uint32_t (&a)[4], const Weights<S>& weights, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowPower* const power = weights.power + k * 16 + i / 2 * 8 + 2 * t;
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(a[i]));
      a[i] = pack_bf16(x.x * power[0].inverse, x.y * power[1].inverse);
    }
  }
};

}  // namespace mma
}  // namespace mla
