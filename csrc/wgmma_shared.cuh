// What the two kernels with heads on N share: sparse_mla_wgmma.cu and sparse_mla_wgmma_rows.cu.
#pragma once

#include "sm90_wgmma.cuh"

namespace mla {
namespace wgmma {

inline constexpr int kOutputThreads = 256;
// Weights are relative to a guess of the maximum: the larger score of a tile's rows 0 and 8, and a margin.
inline constexpr float kMargin = 4.f;

// Scores are of rows g and g + 8 of the warp's sixteen: of each eight heads, numbered n, a thread has those of heads 2t
// and 2t + 1 in s[n * 4] and the next, and of row g + 8 in the two after.

// Rows whose bit of the sixteen is not set are missing.
template <int N>
__device__ __forceinline__ void drop_missing(float (&s)[N], uint32_t row_mask, int g) {
  if (row_mask == 0xFFFF) return;
  const bool low = row_mask >> g & 1, high = row_mask >> (8 + g) & 1;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (!(i & 2 ? high : low)) s[i] = -INFINITY;
}

// Scores relative to another maximum, `by` higher: [heads], from the thread's first head on.
template <int N>
__device__ __forceinline__ void lower(float (&s)[N], const float2* by) {
#pragma unroll
  for (int i = 0; i < N; i += 4) s[i] -= by[i].x, s[i + 1] -= by[i].y, s[i + 2] -= by[i].x, s[i + 3] -= by[i].y;
}

// ---------------------------------------------------------------- outputs, of 64 dimensions, four times

// Outputs of TERMS terms after the maximum was raised.
template <int TERMS, int N>
__device__ __forceinline__ void correct(float (&acc)[4][N], const float* correction, int t) {
  constexpr int kHeads = 2 * N / TERMS;
#pragma unroll
  for (int n = 0; n < kHeads / 8; ++n) {
    const float2 x = reinterpret_cast<const float2*>(correction)[n * 4 + t];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int h = 0; h < 2 * TERMS; ++h) {
        float* const at = acc[m] + h / 2 * kHeads / 2 + n * 4 + h % 2 * 2;
        at[0] *= x.x, at[1] *= x.y;
      }
  }
}

// Where a partial output is, in floats: heads that a warp writes at once lie in different banks.
__device__ __forceinline__ int partial_at(int row, int dim) { return row * kDim + (dim ^ (row >> 1 & 3) << 3); }

// Outputs of E4M3 rows, of which a thread has eight dimensions from `dim` on, into [heads][512].
template <int N>
__device__ __forceinline__ void store_partial(float* to, const float (&acc)[4][N], int dim, int t) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    const int at = n / 2 * 4 + n % 2;
    float4* const eight = reinterpret_cast<float4*>(to + partial_at(n / 2 * 8 + t * 2 + n % 2, dim));
    eight[0] = make_float4(acc[0][at], acc[0][at + 2], acc[1][at], acc[1][at + 2]);
    eight[1] = make_float4(acc[2][at], acc[2][at + 2], acc[3][at], acc[3][at + 2]);
  }
}

// ---------------------------------------------------------------- of a block, with LAYOUT's places in shared memory

template <typename PARAMS, typename LAYOUT>
struct Pipeline : Thread<PARAMS> {
  using Base = Thread<PARAMS>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats;

  __device__ __forceinline__ int* states() const { return reinterpret_cast<int*>(smem + LAYOUT::kState); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + LAYOUT::kBarriers + i * 8; }
  // Rows, weights and q: they are there; everybody is done with them.
  __device__ __forceinline__ uint32_t full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ uint32_t empty(int slot) const { return barrier(LAYOUT::kSlots + slot); }
  __device__ __forceinline__ uint32_t ready(int buffer) const { return barrier(2 * LAYOUT::kSlots + buffer); }
  __device__ __forceinline__ uint32_t used(int buffer) const { return barrier(2 * LAYOUT::kSlots + 2 + buffer); }
  __device__ __forceinline__ uint32_t q_full(int buffer) const { return barrier(2 * LAYOUT::kSlots + 4 + buffer); }
  __device__ __forceinline__ uint32_t q_empty(int buffer) const { return barrier(2 * LAYOUT::kSlots + 6 + buffer); }

  // With so many arrivals at those of a slot.
  __device__ __forceinline__ void init(int arrivals_full, int arrivals_empty) const {
    for (int i = 0; i < LAYOUT::kSlots; ++i) {
      barrier_init(full(i), arrivals_full);
      barrier_init(empty(i), arrivals_empty);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(ready(i), 128), barrier_init(used(i), kOutputThreads);
      barrier_init(q_full(i), kOutputThreads), barrier_init(q_empty(i), 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }  // of its warpgroup

  // ---------------------------------------------------------------- the maximum, by the warpgroup of the scores

  // What the scores of rows 0 and 8 suggest, of which one at least exists; a real maximum is searched for when a score
  // is far above it.
  template <int N>
  __device__ __forceinline__ void guess_maximum(float (&s)[N], float2* maximum, int lane) const {
    if (warp % 4 == 0 && lane / 4 == 0)
#pragma unroll
      for (int i = 0; i < N; i += 4)
        maximum[i] = make_float2(fmaxf(s[i], s[i + 2]) + kMargin, fmaxf(s[i + 1], s[i + 3]) + kMargin);
    sync_threads(1, 128);
    lower(s, maximum);
  }

  // The true maximum of what there is, `relative` to the one before, of which sums and outputs are to be corrected if
  // weights have been `started`.
  template <int N>
  __device__ __forceinline__ void raise_maximum(float (&s)[N], float (&sum)[N / 2], int buffer, bool relative,
                                                bool started) const {
    constexpr int kHeads = 2 * N;
    const int g = lane / 4, t = lane % 4;
    float* const reduce = floats(LAYOUT::kReduce);
#pragma unroll
    for (int i = 0; i < N; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float largest = fmaxf(s[i + e], s[i + 2 + e]);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
        if (g == 0) reduce[warp % 4 * kHeads + i * 2 + t * 2 + e] = largest;
      }
    sync_threads(1, 128);
    if (const int head = thread(); head < kHeads) {
      const float largest = fmaxf(fmaxf(reduce[head], reduce[kHeads + head]),
                                  fmaxf(reduce[2 * kHeads + head], reduce[3 * kHeads + head]));
      float* const to = floats(LAYOUT::kMaximum) + head;
      const float old = relative ? *to : 0.f, now = started ? fmaxf(largest, 0.f) + old : largest + old;
      *to = now;
      reduce[head] = now - old;
      floats(LAYOUT::kCorrection)[buffer * kHeads + head] = exp2_fast(old - now);
    }
    sync_threads(1, 128);
    lower(s, reinterpret_cast<const float2*>(reduce) + t);
    if (started)
#pragma unroll
      for (int i = 0; i < N / 2; i += 2) {
        const float2 x = reinterpret_cast<const float2*>(floats(LAYOUT::kCorrection) + buffer * kHeads)[i * 2 + t];
        sum[i] *= x.x, sum[i + 1] *= x.y;
      }
  }

  // Of the head that is the thread's, if it is one: the maximum, or kNoMaximum, and the sum of all weights.
  template <int N>
  __device__ __forceinline__ float2 maximum_and_sum(float (&sum)[N], bool started) const {
    constexpr int kHeads = 4 * N;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], mask);
    float* const sums = floats(LAYOUT::kReduce);
    sync_threads(1, 128);  // nobody reads what else was here any more
    if (lane / 4 == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) sums[warp % 4 * kHeads + i / 2 * 8 + lane * 2 + i % 2] = sum[i];
    const int head = thread();
    // Before the barrier: after it, other lanes write the next item's.
    const float maximum = head < kHeads && started ? floats(LAYOUT::kMaximum)[head] : kNoMaximum;
    sync_threads(1, 128);
    if (head >= kHeads) return make_float2(kNoMaximum, 0.f);
    return make_float2(maximum, sums[head] + sums[kHeads + head] + sums[2 * kHeads + head] + sums[3 * kHeads + head]);
  }

  // ---------------------------------------------------------------- outputs

  // Those of a token, of which a thread has eight dimensions from `dim` on, times their heads' factors.
  template <int N, typename Factor>
  __device__ __forceinline__ void write_outputs(const float (&acc)[4][N], int64_t token, int head0, int dim,
                                                const Factor& factor_of) const {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      const int head = n / 2 * 8 + lane % 4 * 2 + n % 2, at = n / 2 * 4 + n % 2;
      const float factor = factor_of(head);
      uint32_t packed[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) packed[m] = pack_bf16(acc[m][at] * factor, acc[m][at + 2] * factor);
      if (head0 + head < p.heads)
        *reinterpret_cast<uint4*>(output_at(p, token, head0 + head) + dim) = as_uint4(packed);
    }
  }
};

}  // namespace wgmma
}  // namespace mla
