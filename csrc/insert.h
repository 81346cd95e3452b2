// Launch of the fused insert kernel (insert.cu), free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla {

// One call. Names, shapes and the order of operations: mla_kernels/insert.py. Strides are in elements.
struct Insert {
  const void* q;
  int64_t q_token_stride, q_head_stride;
  void* q_out;  // q itself, or E4M3 if q_is_fp8
  int64_t q_out_token_stride, q_out_head_stride;
  const void* kv;
  int64_t kv_stride;
  void* k_cache;  // E4M3 if cache_is_fp8
  int64_t k_cache_block_stride;
  const void* slot_mapping;
  const void* position_ids;
  bool slots_are_int64, positions_are_int64;
  const void* cos_sin_cache;
  int64_t cos_sin_stride;
  bool cos_sin_is_bf16;
  bool cache_is_fp8, q_is_fp8;       // q only with the cache
  float fp8_scale, q_fp8_scale_inv;  // read where these say so
  float eps;
  uint32_t cache_block_size, num_tokens, num_heads, num_slots;
  uint32_t num_positions;  // rows of cos_sin_cache
  uint32_t num_rows;       // of the cache: a slot that is not below it, as no negative one is, stores nothing
};

// Limits: num_tokens * (num_heads + 1) and num_rows are below 2^31.
cudaError_t launch_insert(const Insert& call, cudaStream_t stream);

}  // namespace mla
