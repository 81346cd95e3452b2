// The operators of insert.cu as torch sees them: checks of the arguments, and the launch.

#include <algorithm>
#include <limits>
#include <optional>

#include "insert.h"
#include "torch_ops.h"

namespace mla::torch_ops {
namespace {

constexpr int64_t kRopeDim = 64;

bool is_index(const Tensor& x) {
  return x.dim() == 1 && x.is_contiguous() &&
         (x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long);
}

// The stride of a block of `cache`, after checking that it holds blocks of `block_size` rows.
int64_t cache_block_stride(const Tensor& cache, int64_t block_size, bool fp8) {
  const ScalarType dtype = cache.scalar_type();
  require(fp8 ? dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Byte : dtype == ScalarType::BFloat16,
          "the cache holds ", fp8 ? "E4M3" : "BF16", " rows and cannot be ", torch::headeronly::toString(dtype), ".");
  int64_t block = 1;
  bool contiguous = true;
  for (int64_t i = cache.dim() - 1; i >= 1; --i) {
    contiguous &= cache.size(i) == 1 || cache.stride(i) == block;
    block *= cache.size(i);
  }
  require(block_size >= 1 && cache.dim() >= 2 && block == block_size * kHeadDim, "a cache of shape ", shape(cache),
          " does not hold blocks of ", block_size, " x 512.");
  const int64_t blocks = cache.size(0);
  require(blocks == 0 || (contiguous && (blocks == 1 || cache.stride(0) >= block)),
          "a block of the cache must be contiguous and alone, got ", described(cache), ".");
  require(blocks * block_size <= std::numeric_limits<int32_t>::max(), "a cache of ", blocks, " blocks of ",
          block_size, " has 2^31 rows or more.");
  return cache.stride(0);
}

void insert(const Tensor& q, const Tensor& q_out, const Tensor& kv, const Tensor& k_cache,
            const Tensor& slot_mapping, const Tensor& position_ids, const Tensor& cos_sin_cache, double eps,
            int64_t cache_block_size, std::optional<double> fp8_scale = {},
            std::optional<double> q_fp8_scale_inv = {}) {
  require(q.dim() == 3 && q.size(2) == kHeadDim && q.stride(2) == 1 && q.scalar_type() == ScalarType::BFloat16,
          "q must be [N, H, 512] bf16, got ", described(q), ".");
  const int64_t num_tokens = q.size(0), num_heads = q.size(1);
  require_heads(num_heads);
  require(num_tokens < (int64_t{1} << 31) / (num_heads + 1), "q has too many tokens: ", num_tokens, ".");
  require(kv.dim() == 2 && kv.size(1) == kHeadDim && kv.stride(1) == 1 && kv.scalar_type() == ScalarType::BFloat16,
          "kv must be [M, 512] bf16, got ", described(kv), ".");
  require(is_index(slot_mapping), "slot_mapping must be a contiguous int32 or int64 vector.");
  require(is_index(position_ids), "position_ids must be a contiguous int32 or int64 vector.");
  const int64_t num_slots = slot_mapping.size(0);
  require(num_slots <= std::min(num_tokens, kv.size(0)) && position_ids.size(0) >= num_tokens, num_slots,
          " slots need as many rows of kv (got ", kv.size(0), ") and of q (got ", num_tokens,
          "), and q needs as many positions (got ", position_ids.size(0), ").");
  require(cos_sin_cache.dim() == 2 && cos_sin_cache.size(1) == kRopeDim && cos_sin_cache.stride(1) == 1,
          "cos_sin_cache must be [max_position, 64], got ", described(cos_sin_cache), ".");
  const ScalarType cos_sin_dtype = cos_sin_cache.scalar_type();
  require(cos_sin_dtype == ScalarType::Float || cos_sin_dtype == ScalarType::BFloat16,
          "cos_sin_cache must be fp32 or bf16.");
  const int64_t block_stride = cache_block_stride(k_cache, cache_block_size, fp8_scale.has_value());

  const auto require_here = [&](const char* name, const Tensor& x) { require_device(name, x, q); };
  require_here("kv", kv);
  require_here("k_cache", k_cache);
  require_here("slot_mapping", slot_mapping);
  require_here("position_ids", position_ids);
  require_here("cos_sin_cache", cos_sin_cache);
  if (q_fp8_scale_inv) {
    require_here("q_fp8", q_out);
    require(q_out.dim() == 3 && std::equal(q.sizes().begin(), q.sizes().end(), q_out.sizes().begin()) &&
                q_out.scalar_type() == ScalarType::Float8_e4m3fn && q_out.stride(2) == 1,
            "q_fp8 must be ", shape(q), " float8_e4m3fn, got ", described(q_out), ".");
  }
  if (num_tokens == 0) return;

  Insert call;
  call.q = q.data_ptr();
  call.q_token_stride = q.stride(0);
  call.q_head_stride = q.stride(1);
  call.q_out = q_out.data_ptr();
  call.q_out_token_stride = q_out.stride(0);
  call.q_out_head_stride = q_out.stride(1);
  call.kv = kv.data_ptr();
  call.kv_stride = kv.stride(0);
  call.k_cache = k_cache.data_ptr();
  call.k_cache_block_stride = block_stride;
  call.slot_mapping = slot_mapping.data_ptr();
  call.position_ids = position_ids.data_ptr();
  call.slots_are_int64 = slot_mapping.scalar_type() == ScalarType::Long;
  call.positions_are_int64 = position_ids.scalar_type() == ScalarType::Long;
  call.cos_sin_cache = cos_sin_cache.data_ptr();
  call.cos_sin_stride = cos_sin_cache.stride(0);
  call.num_positions = static_cast<uint32_t>(cos_sin_cache.size(0));
  call.cos_sin_is_bf16 = cos_sin_dtype == ScalarType::BFloat16;
  call.cache_is_fp8 = fp8_scale.has_value();
  call.q_is_fp8 = q_fp8_scale_inv.has_value();
  call.fp8_scale = static_cast<float>(fp8_scale.value_or(1.0));
  call.q_fp8_scale_inv = static_cast<float>(q_fp8_scale_inv.value_or(1.0));
  call.eps = static_cast<float>(eps);
  call.cache_block_size = static_cast<uint32_t>(cache_block_size);
  call.num_tokens = static_cast<uint32_t>(num_tokens);
  call.num_heads = static_cast<uint32_t>(num_heads);
  call.num_slots = static_cast<uint32_t>(num_slots);
  call.num_rows = static_cast<uint32_t>(k_cache.size(0) * cache_block_size);

  on_current_stream(q, [&](cudaStream_t stream) { return launch_insert(call, stream); });
}

void full_cache_bf16_insert(Tensor q, Tensor kv, Tensor k_cache, Tensor slot_mapping, Tensor position_ids,
                            Tensor cos_sin_cache, double eps, int64_t cache_block_size) {
  insert(q, q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size);
}

void full_cache_fp8_insert(Tensor q, Tensor kv, Tensor q_fp8, Tensor k_cache, Tensor slot_mapping,
                           Tensor position_ids, Tensor cos_sin_cache, double fp8_scale, double q_fp8_scale_inv,
                           double eps, int64_t cache_block_size) {
  insert(q, q_fp8, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size, fp8_scale,
         q_fp8_scale_inv);
}

void full_cache_fp8_insert_bf16_q(Tensor q, Tensor kv, Tensor k_cache, Tensor slot_mapping, Tensor position_ids,
                                  Tensor cos_sin_cache, double fp8_scale, double eps, int64_t cache_block_size) {
  insert(q, q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size, fp8_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CUDA, library) {
  library.impl("full_cache_bf16_insert", TORCH_BOX(&full_cache_bf16_insert));
  library.impl("full_cache_fp8_insert", TORCH_BOX(&full_cache_fp8_insert));
  library.impl("full_cache_fp8_insert_bf16_q", TORCH_BOX(&full_cache_fp8_insert_bf16_q));
}

}  // namespace mla::torch_ops
