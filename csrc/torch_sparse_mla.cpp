// The operators of sparse_mla_sm90.cu as torch sees them: checks of the arguments, and the launch.

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <optional>

#include "sparse_mla_rows.h"
#include "torch_ops.h"

namespace mla::torch_ops {
namespace {

constexpr int64_t kWindow = 128;
// Columns of a token: kernels count keys, rounded up to whole tiles and those of two sources together, in 31 bits.
constexpr int64_t kMostColumns = int64_t{1} << 29;

void require_scale(const char* name, const Tensor& x) {
  require(x.numel() == 1 && x.scalar_type() == ScalarType::Float, name, " must be one fp32 element, got ", described(x),
          ".");
}

bool is_heads(const Tensor& x) { return x.dim() == 3 && x.size(2) == kHeadDim && x.stride(2) == 1; }

// Whether heads, of so many bytes a value, start at multiples of 16 bytes.
bool is_aligned(const Tensor& x, int64_t bytes) {
  return x.stride(0) * bytes % 16 == 0 && x.stride(1) * bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
}

// Of a SparseMla or a SparseMlaRows.
template <typename Call>
void set_q_and_out(Call& call, const Tensor& q, const Tensor& out) {
  call.q = q.data_ptr();
  call.q_token_stride = q.stride(0);
  call.q_head_stride = q.stride(1);
  call.out = out.data_ptr();
  call.out_token_stride = out.stride(0);
  call.out_head_stride = out.stride(1);
  call.tokens = static_cast<int32_t>(q.size(0));
  call.heads = static_cast<int32_t>(q.size(1));
}

float* floats(const std::optional<Tensor>& x) { return x ? static_cast<float*>(x->data_ptr()) : nullptr; }

// `[pages, page, 512]`
Pool pool(const char* name, const Tensor& x, bool fp8) {
  require(x.dim() == 3 && x.size(1) >= 1 && x.size(2) == kHeadDim && x.stride(2) == 1 &&
              x.scalar_type() == (fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16),
          name, " must be [pages, page, 512] bf16 or float8_e4m3fn, as the other is, got ", described(x), ".");
  const int64_t bytes = fp8 ? 1 : 2, page = x.stride(0) * bytes, row = x.stride(1) * bytes;
  require(page % 16 == 0 && row % 16 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, name,
          " must have rows that start at multiples of 16 bytes.");
  const int64_t rows = std::min(x.size(0) * x.size(1), int64_t{1} << 31);
  return {x.data_ptr(), page, row, static_cast<int32_t>(x.size(1)), static_cast<uint32_t>(rows)};
}

void sparse_mla_sm90(Tensor q, Tensor swa, Tensor compressed, Tensor indices, Tensor topk_lens, Tensor visible,
                     Tensor out, std::optional<Tensor> sinks, std::optional<Tensor> bmm1_tensor,
                     std::optional<Tensor> bmm2_tensor, double bmm1, double bmm2) {
  require(is_heads(q) && (q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Float8_e4m3fn),
          "q must be [tokens, heads, 512] bf16 or float8_e4m3fn, got ", described(q), ".");
  const int64_t tokens = q.size(0), heads = q.size(1);
  require(tokens < int64_t{1} << 24, "q has too many tokens: ", tokens, ".");
  require_heads(heads);
  require(is_heads(out) && out.size(0) == tokens && out.size(1) == heads && out.scalar_type() == ScalarType::BFloat16,
          "out must be ", shape(q), " bf16, got ", described(out), ".");
  require(indices.dim() == 2 && indices.size(0) == tokens && indices.size(1) >= kWindow && indices.size(1) % 4 == 0 &&
              indices.size(1) <= kMostColumns && indices.stride(1) == 1 &&
              indices.scalar_type() == ScalarType::Int,
          "indices must be [", tokens, ", 128 to 2^29, a multiple of 4] int32, got ", described(indices), ".");
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

  SparseMla call;
  call.q_is_fp8 = q.scalar_type() == ScalarType::Float8_e4m3fn;
  call.rows_are_fp8 = swa.scalar_type() == ScalarType::Float8_e4m3fn;
  require(call.rows_are_fp8 || !call.q_is_fp8, "a float8_e4m3fn q needs float8_e4m3fn pools.");
  require(is_aligned(q, call.q_is_fp8 ? 1 : 2) && is_aligned(out, 2),
          "q and out must have heads that start at multiples of 16 bytes.");
  set_q_and_out(call, q, out);
  call.swa = pool("the SWA pool", swa, call.rows_are_fp8);
  call.compressed = pool("the compressed pool", compressed, call.rows_are_fp8);
  call.indices = static_cast<const int32_t*>(indices.data_ptr());
  call.indices_stride = indices.stride(0);
  call.topk_lens = static_cast<const int32_t*>(topk_lens.data_ptr());
  call.visible = static_cast<const int32_t*>(visible.data_ptr());
  call.sinks = floats(sinks);
  call.bmm1_tensor = floats(bmm1_tensor);
  call.bmm2_tensor = floats(bmm2_tensor);
  call.bmm1 = static_cast<float>(bmm1);
  call.bmm2 = static_cast<float>(bmm2);
  call.width = static_cast<int32_t>(indices.size(1));

  on_current_stream(q, [&](cudaStream_t stream) { return launch_sparse_mla_sm90(call, stream); });
}

// Bytes of a row of each RowFormat, and dimensions of its key.
struct RowShape {
  int64_t bytes, dims;
  bool is_packed;  // bytes, that is, and not numbers of one dtype
};
constexpr RowShape kRowShapes[] = {
    {512, 512, false}, {1024, 512, false}, {584, 512, true}, {656, 576, true}, {1152, 576, false}};

// The keys of `tokens` tokens that are in `cache`, [blocks, block_size, width].
KeySource key_source(const Tensor& cache, const Tensor& indices, const std::optional<Tensor>& lengths,
                     RowFormat format, int64_t tokens) {
  const RowShape& row = kRowShapes[static_cast<int>(format)];
  const ScalarType dtype = cache.scalar_type();
  const int64_t itemsize = dtype == ScalarType::BFloat16 ? 2 : 1;
  const bool is_bf16 = format == RowFormat::kBf16 || format == RowFormat::kBf576;
  require(cache.dim() == 3 && cache.size(1) >= 1 && cache.size(2) * itemsize == row.bytes && cache.stride(2) == 1 &&
              (is_bf16 ? dtype == ScalarType::BFloat16
                       : dtype == ScalarType::Float8_e4m3fn ||
                             (row.is_packed && (dtype == ScalarType::Byte || dtype == ScalarType::Char))),
          "a cache must be [blocks, block_size, ", row.bytes, " bytes], got ", described(cache), ".");
  const int64_t block = cache.stride(0) * itemsize, stride = cache.stride(1) * itemsize;
  require(!row.is_packed || cache.size(1) == 1 || stride == row.bytes, "a block of packed rows must be in one piece.");
  require(block % 16 == 0 && (row.is_packed || stride % 16 == 0) &&
              reinterpret_cast<uintptr_t>(cache.data_ptr()) % 16 == 0,
          "a cache must have blocks and rows that start at multiples of 16 bytes.");
  require(indices.dim() == 2 && indices.size(0) == tokens && (indices.stride(1) == 1 || indices.size(1) <= 1) &&
              indices.scalar_type() == ScalarType::Int && indices.size(1) <= kMostColumns,
          "indices must be [", tokens, ", columns, up to 2^29] int32, got ", described(indices), ".");
  const bool is_v4 = format == RowFormat::kV4;
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
  SparseMlaRows call = {};
  call.format = static_cast<RowFormat>(format);
  const int64_t dims = kRowShapes[format].dims;
  require(q.dim() == 3 && q.size(2) == dims && q.stride(2) == 1 && q.scalar_type() == ScalarType::BFloat16,
          "q must be [tokens, heads, ", dims, "] bf16, got ", described(q), ".");
  const int64_t tokens = q.size(0), heads = q.size(1);
  require(tokens < int64_t{1} << 24, "q has too many tokens: ", tokens, ".");
  require_heads(heads);
  require(is_heads(out) && out.size(0) == tokens && out.size(1) == heads && out.scalar_type() == ScalarType::BFloat16,
          "out must be [", tokens, ", ", heads, ", 512] bf16, got ", described(out), ".");
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
  set_q_and_out(call, q, out);
  call.tokens_per_length = static_cast<int32_t>(tokens == 0 ? 1 : tokens / requests);
  call.sinks = floats(sinks);
  call.bmm1 = static_cast<float>(scale);
  call.bmm2 = 1.f;
  call.lse = floats(lse);
  call.max_logits = floats(max_logits);

  Tensor workspace;  // freed before the kernels have run, for whatever comes after them on the stream
  on_current_stream(q, [&](cudaStream_t stream) {
    int64_t bytes = 0;
    if (const cudaError_t error = sparse_mla_rows_workspace(call, &bytes); error != cudaSuccess) return error;
    if (bytes > 0) {
      workspace = torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
      call.workspace = workspace.data_ptr();
    }
    return launch_sparse_mla_rows(call, stream);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CUDA, library) {
  library.impl("sparse_mla_sm90", TORCH_BOX(&sparse_mla_sm90));
  library.impl("sparse_mla_rows_sm90", TORCH_BOX(&sparse_mla_rows_sm90));
}

}  // namespace mla::torch_ops
