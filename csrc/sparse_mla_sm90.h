// Launch of sparse MLA for Hopper (sparse_mla_sm90.cu), free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla {

// A number that numbers below 2^31 are divided by, with what replaces the division: Granlund and Montgomery, Division
// by Invariant Integers using Multiplication (1994), figure 4.1.
struct Divisor {
  uint32_t value = 1, magic = 1;
  int32_t shift = 0;

  Divisor() = default;
  Divisor(int32_t by) : value(by) {
    while (uint64_t{1} << shift < value) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - value) << 32) / value + 1);
  }
};

// A pool of rows; strides in bytes, rows 16-byte aligned.
struct Pool {
  const void* rows;
  int64_t page_stride, row_stride;
  Divisor page;    // rows of a page
  uint32_t count;  // of rows, 2^31 at most: an index that is not below it, as no negative one is, is no row
};

// One call. Names and meaning: SparseMLACall in mla_kernels/interface.py. Strides are in elements.
struct SparseMla {
  const void* q;  // BF16, or E4M3
  int64_t q_token_stride, q_head_stride;
  void* out;
  int64_t out_token_stride, out_head_stride;
  Pool swa, compressed;
  const int32_t* indices;
  int64_t indices_stride;
  const int32_t* topk_lens;
  const int32_t* visible;
  const float* sinks;        // or null
  const float* bmm1_tensor;  // or null, and then the value below counts
  const float* bmm2_tensor;
  float bmm1, bmm2;
  int32_t tokens, heads, width;
  bool q_is_fp8, rows_are_fp8;
  bool keep_outputs = false;  // in the L2 cache; set by launch_sparse_mla_sm90
};

// Limits: 1 to 128 heads, tokens below 2^24. Picks one of the two below, or launch_sparse_mla_mma() of
// sparse_mla_rows.h.
cudaError_t launch_sparse_mla_sm90(SparseMla call, cudaStream_t stream);

// 16 or 32 heads a block, heads on N; one block an SM, or `split`: two blocks share a token's keys.
cudaError_t launch_sparse_mla_wgmma(const SparseMla& call, int heads, bool split, int sms, cudaStream_t stream);

// 64 heads a block, heads on M; one block an SM.
cudaError_t launch_sparse_mla_m64(const SparseMla& call, int sms, cudaStream_t stream);

}  // namespace mla
