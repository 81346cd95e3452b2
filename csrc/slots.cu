// From rows counted within a request to slots of the paged cache. What they are: mla_kernels/slots.py.
//
// A thread has four columns of a token, which are 16 bytes where rows are aligned. It waits twice, for its rows and for
// their blocks; so the blocks of threads are small, and a token of 2048 columns has four, on different SMs.

#include "slots.h"

#include "sm90_ptx.cuh"

namespace mla {
namespace {

constexpr int kThreads = 128, kWidth = 4;

template <bool ALIGNED>
__global__ void __launch_bounds__(kThreads) slots_kernel(const __grid_constant__ Slots p) {
  wait_for_previous();
  const int64_t token = blockIdx.x;
  const uint32_t column = (blockIdx.y * kThreads + threadIdx.x) * kWidth;
  if (column >= p.columns) return;
  const bool whole = ALIGNED && column + kWidth <= p.columns;
  // Not by __ldg: rows may be what is written, and such a load may be moved in front of the wait.
  const int32_t* const from = p.rows + token * p.rows_stride + column;
  int32_t row[kWidth];
  if (whole) {
    const int4 v = *reinterpret_cast<const int4*>(from);
    row[0] = v.x, row[1] = v.y, row[2] = v.z, row[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) row[i] = column + i < p.columns ? from[i] : -1;
  }
  const uint32_t request = static_cast<uint32_t>(p.request_of_token[token]);
  const int32_t prefill = p.prefill_of_token ? p.prefill_of_token[token] : -1;

  int32_t slot[kWidth];
  if (prefill >= 0) {
    const int32_t start = static_cast<uint32_t>(prefill) < p.prefills ? p.workspace_starts[prefill] : -1;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      slot[i] = start >= 0 && row[i] >= 0 ? static_cast<int32_t>(uint32_t(start) + uint32_t(row[i])) : -1;
  } else {
    const uint32_t blocks = request < p.requests ? p.blocks : 0;
    const int32_t* const table = p.block_table + request * p.table_stride;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t block = divided(row[i], p.block_size);
      const int32_t number = row[i] >= 0 && block < blocks ? table[block] : -1;
      const uint32_t moved = uint32_t(row[i]) + (uint32_t(number) - block) * p.block_size.value;
      slot[i] = number >= 0 ? static_cast<int32_t>(moved) : -1;
    }
  }

  int32_t* const to = p.out + token * p.out_stride + column;
  if (whole) {
    *reinterpret_cast<int4*>(to) = make_int4(slot[0], slot[1], slot[2], slot[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (column + i < p.columns) to[i] = slot[i];
  }
}

bool is_aligned(const int32_t* x, int64_t stride) {
  return reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % kWidth == 0;
}

}  // namespace

cudaError_t launch_slots(const Slots& call, cudaStream_t stream) {
  const bool aligned = is_aligned(call.rows, call.rows_stride) && is_aligned(call.out, call.out_stride);
  const dim3 blocks(call.tokens, (call.columns + kThreads * kWidth - 1) / (kThreads * kWidth));
  return launch_overlapping(aligned ? slots_kernel<true> : slots_kernel<false>, call, blocks, kThreads, stream);
}

}  // namespace mla
