// Launch of the indexer's picks (topk.cu), free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla {

// The most columns and picks of a row.
constexpr int kTopKColumns = 262144, kTopKMost = 8191;

// One call. Names and meaning: indexer_topk in mla_kernels/indexer.py. Strides are in elements.
struct TopK {
  const float* scores;
  int64_t scores_stride;
  const int32_t* lengths;
  int32_t* out;
  int64_t out_stride;
  int32_t rows, columns, k;  // one row and a k of one at least; rows below 2^28
};

cudaError_t launch_topk(const TopK& call, cudaStream_t stream);

}  // namespace mla
