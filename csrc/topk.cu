// The columns of each row's k largest scores, as an indexer picks them in decode (mla_kernels/indexer.py).
//
// A block takes a row and reads it once: its threads hold the scores in registers, as integers of the same order. It
// finds the k-th largest digit by digit, of 12, 12 and 8 bits. The scores that agree with it so far are counted by
// their next digit in shared memory, and the counts are added up from the largest digit until there are k. Two digits
// tell most scores apart, and then the last is left out. Warps have a part of the row each, from left to right, so
// that counts of what lies to the left place each pick: they come in ascending order, and of equal scores the leftmost
// are taken, whatever threads are first.
//
// Where rows may be long, a cluster of blocks takes one, with a part each. All add their counts to the first's, which
// tells them the digit. Of a row that is short after all the first has all, and the others are done.

#include "topk.h"

#include "sm90_ptx.cuh"

namespace mla {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kWidth = 4;                  // scores of a vector, and bins of a thread
constexpr int kVector = kThreads * kWidth;  // scores of a block's vectors
constexpr int kDigitBits = 12;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int kAlone = 4 * kVector;  // scores of a block that has a row for itself, at most
constexpr int kBlocks = 8;           // that share a longer one
// Of a count, the bits for scores above the k-th; those of its equals follow.
constexpr int kAboveBits = 13;
static_assert(kTopKMost < 1 << kAboveBits && kTopKColumns < 1 << (32 - kAboveBits));
static_assert(1 << kDigitBits == kVector);

// Of the same order as scores, of which -0 is 0; never 0, which is no score.
__device__ uint32_t ordered(float score) {
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.f));
  return max(bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u), 1u);
}

// Stays where it is written, so that it need not wait for what does not decide whether it is made.
__device__ float4 load_vector(const float* from) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}

struct Shared {
  uint4 bins[kThreads];
  uint32_t warps[kWarps], blocks[kBlocks];  // what each has
  uint4 found;  // of the k-th largest score: its digit, its place among the scores of that, and how many these are
};

// Where another block of the cluster has what this one has at `here`.
template <typename T>
__device__ T* in_block(T* here, int block) {
  return static_cast<T*>(__cluster_map_shared_rank(here, block));
}

template <bool CLUSTER>
__device__ void wait_for_all(bool cluster) {
  if (CLUSTER && cluster) {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  } else {
    __syncthreads();
  }
}

template <int VECTORS, bool CLUSTER>
__global__ void __launch_bounds__(kThreads) topk_kernel(const __grid_constant__ TopK p) {
  __shared__ Shared shared;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t row = CLUSTER ? blockIdx.x / kBlocks : blockIdx.x;
  const int block = CLUSTER ? blockIdx.x % kBlocks : 0;
  const float* const scores = p.scores + row * p.scores_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(scores) % sizeof(float4) == 0;
  int32_t* const out = p.out + row * p.out_stride;
  shared.bins[thread] = make_uint4(0, 0, 0, 0);
  wait_for_previous();

  const int length = min(p.lengths[row], p.columns);
  // Of a short row all are read, and not just those within the length, which is not here yet.
  const int readable = VECTORS == 1 ? p.columns : length;
  const int blocks = CLUSTER && length > kAlone ? kBlocks : 1;
  if (block >= blocks) return;
  const int vectors = VECTORS == 1 ? 1 : (length + kVector * blocks - 1) / (kVector * blocks);
  const auto column_of = [&](int v) { return (((block * kWarps + warp) * vectors + v) * 32 + lane) * kWidth; };
  uint32_t keys[VECTORS][kWidth];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    float score[kWidth] = {};
    const int column = column_of(v);
    if (v < vectors && column < readable) {
      if (aligned && column + kWidth <= p.columns) {
        const float4 vector = load_vector(scores + column);
        score[0] = vector.x, score[1] = vector.y, score[2] = vector.z, score[3] = vector.w;
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (column + i < readable) score[i] = scores[column + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) keys[v][i] = v < vectors && column + i < length ? ordered(score[i]) : 0;
  }
  if (length <= p.k) {
    for (int column = thread; column < p.k; column += kThreads) out[column] = column < length ? column : -1;
    return;
  }

  // Of the k-th largest score: its known digits, which bits these are, and its place among the scores that have them.
  uint32_t prefix = 0, mask = 0, missing = p.k;
  wait_for_all<CLUSTER>(blocks > 1);  // bins are 0
#pragma unroll 1
  for (int shift = 32; shift > 0;) {
    const int bits = min(shift, kDigitBits);
    shift -= bits;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      if (v >= vectors) break;
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (keys[v][i] != 0 && (keys[v][i] & mask) == prefix)
          atomicAdd(&reinterpret_cast<uint32_t*>(shared.bins)[keys[v][i] >> shift & ((1 << bits) - 1)], 1u);
    }
    __syncthreads();

    if (CLUSTER && blocks > 1) {
      if (block > 0) {
        const uint4 mine = shared.bins[thread];
        shared.bins[thread] = make_uint4(0, 0, 0, 0);
        uint4* const sum = in_block(&shared.bins[thread], 0);
        if (mine.x) atomicAdd(&sum->x, mine.x);
        if (mine.y) atomicAdd(&sum->y, mine.y);
        if (mine.z) atomicAdd(&sum->z, mine.z);
        if (mine.w) atomicAdd(&sum->w, mine.w);
      }
      wait_for_all<CLUSTER>(true);
    }
    if (block == 0) {
      // The first thread has the largest digits.
      const int last = kThreads - 1 - thread;
      const uint4 bins = shared.bins[last];
      shared.bins[last] = make_uint4(0, 0, 0, 0);  // for the next digit
      const uint32_t counts[kWidth] = {bins.w, bins.z, bins.y, bins.x};
      const uint32_t sum = bins.x + bins.y + bins.z + bins.w, so_far = sum_up_to_lane(sum, lane);
      if (lane == 31) shared.warps[warp] = so_far;
      __syncthreads();
      uint32_t above = __reduce_add_sync(kAll, lane < warp ? shared.warps[lane] : 0) + so_far - sum;
      if (above < missing && above + sum >= missing) {
        uint4 found = {};
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (above < missing && above + counts[i] >= missing)
            found = make_uint4(last * kWidth + kWidth - 1 - i, missing - above, counts[i], 0);
          above += counts[i];
        }
        shared.found = found;
        if constexpr (CLUSTER)
          for (int other = 1; other < blocks; ++other) *in_block(&shared.found, other) = found;
      }
    }
    wait_for_all<CLUSTER>(blocks > 1);
    const uint4 found = shared.found;
    prefix |= found.x << shift;
    mask = kAll << shift;
    missing = found.y;
    if (missing == found.z) break;  // all that have these digits
  }

  const auto counted = [&](uint32_t key) {
    return (key & mask) > prefix ? 1u : (key & mask) == prefix ? 1u << kAboveBits : 0u;
  };
  const auto sum_of = [&](int v) {
    return counted(keys[v][0]) + counted(keys[v][1]) + counted(keys[v][2]) + counted(keys[v][3]);
  };
  uint32_t total = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) total += sum_of(v);
  total = __reduce_add_sync(kAll, total);
  if (lane == 0) shared.warps[warp] = total;
  __syncthreads();
  uint32_t before = __reduce_add_sync(kAll, lane < warp ? shared.warps[lane] : 0);
  if (CLUSTER && blocks > 1) {
    total = __reduce_add_sync(kAll, shared.warps[lane]);
    if (thread < blocks) *in_block(&shared.blocks[block], thread) = total;
    wait_for_all<CLUSTER>(true);
    before += __reduce_add_sync(kAll, lane < block ? shared.blocks[lane] : 0);
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    if (v >= vectors) break;
    const uint32_t sum = sum_of(v), so_far = sum_up_to_lane(sum, lane);
    uint32_t left = before + so_far - sum;
    before += __shfl_sync(kAll, so_far, 31);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t one = counted(keys[v][i]), equals = left >> kAboveBits;
      if (one == 1 || (one != 0 && equals < missing))
        out[(left & ((1 << kAboveBits) - 1)) + min(equals, missing)] = column_of(v) + i;
      left += one;
    }
  }
}

}  // namespace

cudaError_t launch_topk(const TopK& call, cudaStream_t stream) {
  if (call.columns > kAlone) {
    constexpr int kVectors = kTopKColumns / kBlocks / kVector;
    return launch_kernel<topk_kernel<kVectors, true>>(call, call.rows * kBlocks, kThreads, 0, kBlocks, stream);
  }
  const auto kernel = call.columns <= kVector       ? topk_kernel<1, false>
                      : call.columns <= 2 * kVector ? topk_kernel<2, false>
                                                    : topk_kernel<kAlone / kVector, false>;
  return launch_overlapping(kernel, call, call.rows, kThreads, stream);
}

}  // namespace mla
