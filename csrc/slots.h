// Launch of the conversion of a request's rows to slots (slots.cu), free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sparse_mla_sm90.h"

namespace mla {

// One call. Names and meaning: mla_kernels/slots.py. Strides are in elements, counts 2^31 at most.
struct Slots {
  const int32_t* rows;
  int64_t rows_stride;
  const int32_t* request_of_token;
  const int32_t* block_table;
  int64_t table_stride;
  uint32_t requests, blocks;        // of block_table
  Divisor block_size;
  const int32_t* prefill_of_token;  // null if no row is in the workspace
  const int32_t* workspace_starts;
  uint32_t prefills;
  int32_t* out;  // may be rows
  int64_t out_stride;
  uint32_t tokens, columns;  // one of each at least, and below 2^24 columns
};

cudaError_t launch_slots(const Slots& call, cudaStream_t stream);

}  // namespace mla
