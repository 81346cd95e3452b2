// The operators as torch sees them: checks of the arguments, and CUDA kernels for the schemas that the Python
// package defines. Only torch's stable ABI is used, so that one binary serves several torch versions.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "insert.h"
#include "slots.h"
#include "sparse_mla_rows.h"
#include "topk.h"

// Weak, because a torch without CUDA does not have it: there the library loads, and its checks can be tested.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                     void** stream);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kHeadDim = 512, kRopeDim = 64, kMaxHeads = 128, kWindow = 128;
// Columns of a token: kernels count keys, rounded up to whole tiles and those of two sources together, in 31 bits.
constexpr int64_t kMostColumns = int64_t{1} << 29;

// std::invalid_argument becomes ValueError in Python.
template <typename... Words>
void require(bool condition, const Words&... words) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << words);
  throw std::invalid_argument(message.str());
}

std::string shape(const Tensor& x) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < x.dim(); ++i) out << (i ? ", " : "") << x.size(i);
  out << "]";
  return out.str();
}

bool is_index(const Tensor& x) {
  return x.dim() == 1 && x.is_contiguous() &&
         (x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long);
}

void require_scale(const char* name, const Tensor& x) {
  require(x.numel() == 1 && x.scalar_type() == ScalarType::Float, name, " must be one fp32 element, got ", shape(x),
          ".");
}

// The stride of a block of `cache`, after checking that it holds blocks of `block_size` rows.
int64_t cache_block_stride(const Tensor& cache, int64_t block_size, bool fp8) {
  const ScalarType dtype = cache.scalar_type();
  require(fp8 ? dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Byte : dtype == ScalarType::BFloat16,
          "the cache holds ", fp8 ? "E4M3" : "BF16", " rows and cannot be of another dtype.");
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
          "a block of the cache must be contiguous and alone.");
  require(blocks * block_size <= std::numeric_limits<int32_t>::max(), "a cache of ", blocks, " blocks of ",
          block_size, " has 2^31 rows or more.");
  return cache.stride(0);
}

void require_heads(int64_t heads) {
  require(1 <= heads && heads <= kMaxHeads, "q must have 1 to 128 heads, got ", heads, ".");
}

void require_device(const char* name, const Tensor& x, const Tensor& q) {
  require(x.device() == q.device(), name, " must be on the device of q.");
}

void require_ints(const char* name, const Tensor& x, int64_t length) {
  require(x.dim() == 1 && x.size(0) == length && x.is_contiguous() && x.scalar_type() == ScalarType::Int, name,
          " must be [", length, "] int32, contiguous, got ", shape(x), ".");
}

// What launches: the caller's device is made current, whatever another copy of the runtime thinks is.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_));
    if (before_ != device) check(cudaSetDevice(device));
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("mla_kernels: CUDA error: ") + cudaGetErrorString(error));
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Calls `launch` with the current stream of the GPU that x, the argument `name`, is on.
template <typename Launch>
void on_current_stream(const Tensor& x, const Launch& launch, const char* name = "q") {
  require(x.is_cuda() && aoti_torch_get_current_cuda_stream, name, " must be on a CUDA GPU.");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  OnDevice guard(x.get_device_index());
  OnDevice::check(launch(static_cast<cudaStream_t>(stream)));
}

void insert(const Tensor& q, const Tensor& q_out, const Tensor& kv, const Tensor& k_cache,
            const Tensor& slot_mapping, const Tensor& position_ids, const Tensor& cos_sin_cache, double eps,
            int64_t cache_block_size, std::optional<double> fp8_scale = {},
            std::optional<double> q_fp8_scale_inv = {}) {
  require(q.dim() == 3 && q.size(2) == kHeadDim && q.stride(2) == 1 && q.scalar_type() == ScalarType::BFloat16,
          "q must be [N, H, 512] bf16, got ", shape(q), ".");
  const int64_t num_tokens = q.size(0), num_heads = q.size(1);
  require_heads(num_heads);
  require(num_tokens < (int64_t{1} << 31) / (num_heads + 1), "q has too many tokens: ", num_tokens, ".");
  require(kv.dim() == 2 && kv.size(1) == kHeadDim && kv.stride(1) == 1 && kv.scalar_type() == ScalarType::BFloat16,
          "kv must be [M, 512] bf16, got ", shape(kv), ".");
  require(is_index(slot_mapping), "slot_mapping must be a contiguous int32 or int64 vector.");
  require(is_index(position_ids), "position_ids must be a contiguous int32 or int64 vector.");
  const int64_t num_slots = slot_mapping.size(0);
  require(num_slots <= std::min(num_tokens, kv.size(0)) && position_ids.size(0) >= num_tokens, num_slots,
          " slots need as many rows of kv (got ", kv.size(0), ") and of q (got ", num_tokens,
          "), and q needs as many positions (got ", position_ids.size(0), ").");
  require(cos_sin_cache.dim() == 2 && cos_sin_cache.size(1) == kRopeDim && cos_sin_cache.stride(1) == 1,
          "cos_sin_cache must be [max_position, 64], got ", shape(cos_sin_cache), ".");
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
            "q_fp8 must be ", shape(q), " float8_e4m3fn, got ", shape(q_out), ".");
  }
  if (num_tokens == 0) return;

  mla::Insert call;
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

  on_current_stream(q, [&](cudaStream_t stream) { return mla::launch_insert(call, stream); });
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

void request_rows_to_slots_sm90(Tensor rows, Tensor request_of_token, Tensor block_table, int64_t block_size,
                                std::optional<Tensor> prefill_of_token, std::optional<Tensor> workspace_starts,
                                Tensor out) {
  const auto ints = [&](const char* name, const Tensor& x, int64_t dims) {
    require(x.dim() == dims && x.scalar_type() == ScalarType::Int && (x.size(dims - 1) <= 1 || x.stride(dims - 1) == 1),
            name, " must be int32 of ", dims, " dimensions, the last contiguous, got ", shape(x), ".");
    require(x.device() == rows.device(), name, " must be on the device of rows.");
    return static_cast<int32_t*>(x.data_ptr());
  };
  const auto count = [](const Tensor& x, int64_t dim) {
    return static_cast<uint32_t>(std::min(x.size(dim), int64_t{1} << 31));
  };
  mla::Slots call = {};
  call.rows = ints("rows", rows, 2);
  const int64_t tokens = rows.size(0), columns = rows.size(1);
  require(tokens < int64_t{1} << 31 && columns < int64_t{1} << 24, "rows are too many: ", shape(rows), ".");
  require(1 <= block_size && block_size <= std::numeric_limits<int32_t>::max(),
          "block_size must be 1 to 2^31 - 1, and is ", block_size, ".");
  require(prefill_of_token.has_value() == workspace_starts.has_value(),
          "prefill_of_token and workspace_starts go together.");
  call.request_of_token = ints("request_of_token", request_of_token, 1);
  require(request_of_token.size(0) >= tokens, "request_of_token has ", request_of_token.size(0), " elements for ",
          tokens, " tokens of rows.");
  call.block_table = ints("block_table", block_table, 2);
  call.out = ints("out", out, 2);
  require(out.size(0) == tokens && out.size(1) == columns, "out must be ", shape(rows), ", got ", shape(out), ".");
  if (prefill_of_token) {
    call.prefill_of_token = ints("prefill_of_token", *prefill_of_token, 1);
    require(prefill_of_token->size(0) >= tokens, "prefill_of_token has ", prefill_of_token->size(0), " elements for ",
            tokens, " tokens of rows.");
    call.workspace_starts = ints("workspace_starts", *workspace_starts, 1);
    call.prefills = count(*workspace_starts, 0);
  }
  if (tokens == 0 || columns == 0) return;

  call.rows_stride = rows.stride(0);
  call.table_stride = block_table.stride(0);
  call.requests = count(block_table, 0);
  call.blocks = count(block_table, 1);
  call.block_size = static_cast<int32_t>(block_size);
  call.out_stride = out.stride(0);
  call.tokens = static_cast<uint32_t>(tokens);
  call.columns = static_cast<uint32_t>(columns);
  on_current_stream(rows, [&](cudaStream_t stream) { return mla::launch_slots(call, stream); }, "rows");
}

void indexer_topk_sm90(Tensor scores, Tensor lengths, Tensor out) {
  const auto require_rows = [](const char* name, const Tensor& x, ScalarType dtype, const char* dtype_name) {
    require(x.dim() == 2 && x.scalar_type() == dtype && (x.size(1) <= 1 || x.stride(1) == 1), name, " must be ",
            dtype_name, " of 2 dimensions, the last contiguous, got ", shape(x), ".");
  };
  require_rows("scores", scores, ScalarType::Float, "fp32");
  require_rows("out", out, ScalarType::Int, "int32");
  const int64_t rows = scores.size(0), columns = scores.size(1), k = out.size(1);
  require(columns <= mla::kTopKColumns, "scores have ", columns, " columns, and must have ", mla::kTopKColumns,
          " at most.");
  require(out.size(0) == rows && rows < int64_t{1} << 28 && k <= mla::kTopKMost, "out must be [", rows, ", ",
          mla::kTopKMost, " at most], got ", shape(out), ".");
  require_ints("lengths", lengths, rows);
  require(lengths.device() == scores.device() && out.device() == scores.device(),
          "lengths and out must be on the device of scores.");
  if (rows == 0 || k == 0) return;

  mla::TopK call = {};
  call.scores = static_cast<const float*>(scores.data_ptr());
  call.scores_stride = scores.stride(0);
  call.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  call.out = static_cast<int32_t*>(out.data_ptr());
  call.out_stride = out.stride(0);
  call.rows = static_cast<int32_t>(rows);
  call.columns = static_cast<int32_t>(columns);
  call.k = static_cast<int32_t>(k);
  on_current_stream(scores, [&](cudaStream_t stream) { return mla::launch_topk(call, stream); }, "scores");
}

// `[pages, page, 512]`
mla::Pool pool(const char* name, const Tensor& x, bool fp8) {
  require(x.dim() == 3 && x.size(1) >= 1 && x.size(2) == kHeadDim && x.stride(2) == 1 &&
              x.scalar_type() == (fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16),
          name, " must be [pages, page, 512] bf16 or float8_e4m3fn, as the other is, got ", shape(x), ".");
  const int64_t bytes = fp8 ? 1 : 2, page = x.stride(0) * bytes, row = x.stride(1) * bytes;
  require(page % 16 == 0 && row % 16 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, name,
          " must have rows that start at multiples of 16 bytes.");
  const int64_t rows = std::min(x.size(0) * x.size(1), int64_t{1} << 31);
  return {x.data_ptr(), page, row, static_cast<int32_t>(x.size(1)), static_cast<uint32_t>(rows)};
}

bool is_heads(const Tensor& x) { return x.dim() == 3 && x.size(2) == kHeadDim && x.stride(2) == 1; }

// Whether heads, of so many bytes a value, start at multiples of 16 bytes.
bool is_aligned(const Tensor& x, int64_t bytes) {
  return x.stride(0) * bytes % 16 == 0 && x.stride(1) * bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
}

void sparse_mla_sm90(Tensor q, Tensor swa, Tensor compressed, Tensor indices, Tensor topk_lens, Tensor visible,
                     Tensor out, std::optional<Tensor> sinks, std::optional<Tensor> bmm1_tensor,
                     std::optional<Tensor> bmm2_tensor, double bmm1, double bmm2) {
  require(is_heads(q) && (q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Float8_e4m3fn),
          "q must be [tokens, heads, 512] bf16 or float8_e4m3fn, got ", shape(q), ".");
  const int64_t tokens = q.size(0), heads = q.size(1);
  require(tokens < int64_t{1} << 24, "q has too many tokens: ", tokens, ".");
  require_heads(heads);
  require(is_heads(out) && out.size(0) == tokens && out.size(1) == heads && out.scalar_type() == ScalarType::BFloat16,
          "out must be ", shape(q), " bf16, got ", shape(out), ".");
  require(indices.dim() == 2 && indices.size(0) == tokens && indices.size(1) >= kWindow && indices.size(1) % 4 == 0 &&
              indices.size(1) <= kMostColumns && indices.stride(1) == 1 &&
              indices.scalar_type() == ScalarType::Int,
          "indices must be [", tokens, ", 128 to 2^29, a multiple of 4] int32, got ", shape(indices), ".");
  require_ints("topk_lens", topk_lens, tokens);
  require_ints("visible", visible, tokens);
  require(!sinks || (sinks->dim() == 1 && sinks->size(0) == heads && sinks->is_contiguous() &&
                     sinks->scalar_type() == ScalarType::Float),
          "sinks must be [", heads, "] fp32, contiguous.");
  if (bmm1_tensor) require_scale("bmm1_scale", *bmm1_tensor);
  if (bmm2_tensor) require_scale("bmm2_scale", *bmm2_tensor);
  const auto require_here = [&](const char* name, const Tensor& x) { require_device(name, x, q); };
  require_here("swa", swa);
  require_here("compressed", compressed);
  require_here("indices", indices);
  require_here("topk_lens", topk_lens);
  require_here("visible", visible);
  require_here("out", out);
  if (sinks) require_here("sinks", *sinks);
  if (bmm1_tensor) require_here("bmm1_scale", *bmm1_tensor);
  if (bmm2_tensor) require_here("bmm2_scale", *bmm2_tensor);

  mla::SparseMla call;
  call.q_is_fp8 = q.scalar_type() == ScalarType::Float8_e4m3fn;
  call.rows_are_fp8 = swa.scalar_type() == ScalarType::Float8_e4m3fn;
  require(call.rows_are_fp8 || !call.q_is_fp8, "a float8_e4m3fn q needs float8_e4m3fn pools.");
  require(is_aligned(q, call.q_is_fp8 ? 1 : 2) && is_aligned(out, 2),
          "q and out must have heads that start at multiples of 16 bytes.");
  call.q = q.data_ptr();
  call.q_token_stride = q.stride(0);
  call.q_head_stride = q.stride(1);
  call.out = out.data_ptr();
  call.out_token_stride = out.stride(0);
  call.out_head_stride = out.stride(1);
  call.swa = pool("the SWA pool", swa, call.rows_are_fp8);
  call.compressed = pool("the compressed pool", compressed, call.rows_are_fp8);
  call.indices = static_cast<const int32_t*>(indices.data_ptr());
  call.indices_stride = indices.stride(0);
  call.topk_lens = static_cast<const int32_t*>(topk_lens.data_ptr());
  call.visible = static_cast<const int32_t*>(visible.data_ptr());
  const auto floats = [](const std::optional<Tensor>& x) {
    return x ? static_cast<const float*>(x->data_ptr()) : nullptr;
  };
  call.sinks = floats(sinks);
  call.bmm1_tensor = floats(bmm1_tensor);
  call.bmm2_tensor = floats(bmm2_tensor);
  call.bmm1 = static_cast<float>(bmm1);
  call.bmm2 = static_cast<float>(bmm2);
  call.tokens = static_cast<int32_t>(tokens);
  call.heads = static_cast<int32_t>(heads);
  call.width = static_cast<int32_t>(indices.size(1));

  on_current_stream(q, [&](cudaStream_t stream) { return mla::launch_sparse_mla_sm90(call, stream); });
}

// Bytes of a row of each RowFormat, and dimensions of its key.
struct RowShape {
  int64_t bytes, dims;
  bool is_packed;  // bytes, that is, and not numbers of one dtype
};
constexpr RowShape kRowShapes[] = {
    {512, 512, false}, {1024, 512, false}, {584, 512, true}, {656, 576, true}, {1152, 576, false}};

// The keys of `tokens` tokens that are in `cache`, [blocks, block_size, width].
mla::KeySource key_source(const Tensor& cache, const Tensor& indices, const std::optional<Tensor>& lengths,
                           mla::RowFormat format, int64_t tokens) {
  const RowShape& row = kRowShapes[static_cast<int>(format)];
  const ScalarType dtype = cache.scalar_type();
  const int64_t itemsize = dtype == ScalarType::BFloat16 ? 2 : 1;
  const bool is_bf16 = format == mla::RowFormat::kBf16 || format == mla::RowFormat::kBf576;
  require(cache.dim() == 3 && cache.size(1) >= 1 && cache.size(2) * itemsize == row.bytes && cache.stride(2) == 1 &&
              (is_bf16 ? dtype == ScalarType::BFloat16
                       : dtype == ScalarType::Float8_e4m3fn ||
                             (row.is_packed && (dtype == ScalarType::Byte || dtype == ScalarType::Char))),
          "a cache must be [blocks, block_size, ", row.bytes, " bytes], got ", shape(cache), ".");
  const int64_t block = cache.stride(0) * itemsize, stride = cache.stride(1) * itemsize;
  require(!row.is_packed || cache.size(1) == 1 || stride == row.bytes, "a block of packed rows must be in one piece.");
  require(block % 16 == 0 && (row.is_packed || stride % 16 == 0) &&
              reinterpret_cast<uintptr_t>(cache.data_ptr()) % 16 == 0,
          "a cache must have blocks and rows that start at multiples of 16 bytes.");
  require(indices.dim() == 2 && indices.size(0) == tokens && (indices.stride(1) == 1 || indices.size(1) <= 1) &&
              indices.scalar_type() == ScalarType::Int && indices.size(1) <= kMostColumns,
          "indices must be [", tokens, ", columns, up to 2^29] int32, got ", shape(indices), ".");
  const bool is_v4 = format == mla::RowFormat::kV4;
  // Where in a block the scales of its 584-byte rows are, kernels count in 32 bits.
  require(cache.size(1) < (int64_t{1} << (is_v4 ? 22 : 31)), "a block has too many rows: ", cache.size(1), ".");
  const int64_t rows = std::min(cache.size(0) * cache.size(1), int64_t{1} << 31);
  return {{cache.data_ptr(), block, is_v4 ? 576 : row.is_packed ? row.bytes : stride,
           static_cast<int32_t>(cache.size(1)), static_cast<uint32_t>(rows)},
          static_cast<const int32_t*>(indices.data_ptr()),
          indices.stride(0),
          lengths ? static_cast<const int32_t*>(lengths->data_ptr()) : nullptr,
          0,
          static_cast<int32_t>(indices.size(1))};
}

void sparse_mla_rows_sm90(Tensor q, Tensor cache, Tensor indices, std::optional<Tensor> lengths,
                          std::optional<Tensor> extra_cache, std::optional<Tensor> extra_indices,
                          std::optional<Tensor> extra_lengths, Tensor out, std::optional<Tensor> sinks,
                          std::optional<Tensor> max_logits, std::optional<Tensor> lse, int64_t format, double scale) {
  require(0 <= format && format < static_cast<int64_t>(std::size(kRowShapes)), "there is no row format ", format, ".");
  mla::SparseMlaRows call = {};
  call.format = static_cast<mla::RowFormat>(format);
  const int64_t dims = kRowShapes[format].dims;
  require(q.dim() == 3 && q.size(2) == dims && q.stride(2) == 1 && q.scalar_type() == ScalarType::BFloat16,
          "q must be [tokens, heads, ", dims, "] bf16, got ", shape(q), ".");
  const int64_t tokens = q.size(0), heads = q.size(1);
  require(tokens < int64_t{1} << 24, "q has too many tokens: ", tokens, ".");
  require_heads(heads);
  require(is_heads(out) && out.size(0) == tokens && out.size(1) == heads && out.scalar_type() == ScalarType::BFloat16,
          "out must be [", tokens, ", ", heads, ", 512] bf16, got ", shape(out), ".");
  require(is_aligned(q, 2) && is_aligned(out, 2), "q and out must have heads that start at multiples of 16 bytes.");
  require(extra_cache.has_value() == extra_indices.has_value() && (extra_cache || !extra_lengths),
          "a second cache and its indices go together.");
  // Lengths are those of requests, each of as many tokens.
  int64_t requests = tokens;
  for (const auto* x : {&lengths, &extra_lengths})
    if (*x) requests = (*x)->size(0);
  require(tokens == 0 || (requests > 0 && tokens % requests == 0), "there are lengths for ", requests, " of ", tokens,
          " tokens.");
  const auto require_floats = [&](const char* name, const std::optional<Tensor>& x,
                                  std::initializer_list<int64_t> sizes) {
    require(!x || (x->is_contiguous() && x->scalar_type() == ScalarType::Float &&
                   std::equal(x->sizes().begin(), x->sizes().end(), sizes.begin(), sizes.end())),
            name, " must be contiguous fp32 for each head.");
    if (x) require_device(name, *x, q);
  };
  require_floats("sinks", sinks, {heads});
  require_floats("max_logits", max_logits, {tokens, heads});
  require_floats("lse", lse, {tokens, heads});
  require(lse || !max_logits, "max_logits come with lse.");
  require_device("cache", cache, q);
  require_device("indices", indices, q);
  require_device("out", out, q);
  if (lengths) require_ints("lengths", *lengths, requests), require_device("lengths", *lengths, q);
  if (extra_lengths)
    require_ints("extra_lengths", *extra_lengths, requests), require_device("extra_lengths", *extra_lengths, q);
  call.sources[0] = key_source(cache, indices, lengths, call.format, tokens);
  call.sources[1].pool = call.sources[0].pool;
  if (extra_cache) {
    require_device("extra_cache", *extra_cache, q);
    require_device("extra_indices", *extra_indices, q);
    call.sources[1] = key_source(*extra_cache, *extra_indices, extra_lengths, call.format, tokens);
  }
  const auto floats = [](const std::optional<Tensor>& x) { return x ? static_cast<float*>(x->data_ptr()) : nullptr; };
  call.q = q.data_ptr();
  call.q_token_stride = q.stride(0);
  call.q_head_stride = q.stride(1);
  call.out = out.data_ptr();
  call.out_token_stride = out.stride(0);
  call.out_head_stride = out.stride(1);
  call.tokens_per_length = static_cast<int32_t>(tokens == 0 ? 1 : tokens / requests);
  call.sinks = floats(sinks);
  call.bmm1 = static_cast<float>(scale);
  call.bmm2 = 1.f;
  call.lse = floats(lse);
  call.max_logits = floats(max_logits);
  call.tokens = static_cast<int32_t>(tokens);
  call.heads = static_cast<int32_t>(heads);

  Tensor workspace;  // freed before the kernels have run, for whatever comes after them on the stream
  on_current_stream(q, [&](cudaStream_t stream) {
    int64_t bytes = 0;
    if (const cudaError_t error = mla::sparse_mla_rows_workspace(call, &bytes); error != cudaSuccess) return error;
    if (bytes > 0) {
      workspace = torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
      call.workspace = workspace.data_ptr();
    }
    return mla::launch_sparse_mla_rows(call, stream);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CUDA, library) {
  library.impl("full_cache_bf16_insert", TORCH_BOX(&full_cache_bf16_insert));
  library.impl("full_cache_fp8_insert", TORCH_BOX(&full_cache_fp8_insert));
  library.impl("full_cache_fp8_insert_bf16_q", TORCH_BOX(&full_cache_fp8_insert_bf16_q));
  library.impl("indexer_topk_sm90", TORCH_BOX(&indexer_topk_sm90));
  library.impl("request_rows_to_slots_sm90", TORCH_BOX(&request_rows_to_slots_sm90));
  library.impl("sparse_mla_sm90", TORCH_BOX(&sparse_mla_sm90));
  library.impl("sparse_mla_rows_sm90", TORCH_BOX(&sparse_mla_rows_sm90));
}
