// The operators of slots.cu and topk.cu, what an indexer picks and where that is, as torch sees them.

#include <algorithm>
#include <limits>
#include <optional>

#include "slots.h"
#include "topk.h"
#include "torch_ops.h"

namespace mla::torch_ops {
namespace {

void request_rows_to_slots_sm90(Tensor rows, Tensor request_of_token, Tensor block_table, int64_t block_size,
                                std::optional<Tensor> prefill_of_token, std::optional<Tensor> workspace_starts,
                                Tensor out) {
  const auto ints = [&](const char* name, const Tensor& x, int64_t dims) {
    require(x.dim() == dims && x.scalar_type() == ScalarType::Int && (x.size(dims - 1) <= 1 || x.stride(dims - 1) == 1),
            name, " must be int32 of ", dims, " dimensions, the last contiguous, got ", described(x), ".");
    require(x.device() == rows.device(), name, " must be on the device of rows.");
    return static_cast<int32_t*>(x.data_ptr());
  };
  const auto count = [](const Tensor& x, int64_t dim) {
    return static_cast<uint32_t>(std::min(x.size(dim), int64_t{1} << 31));
  };
  Slots call = {};
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
  on_current_stream(rows, [&](cudaStream_t stream) { return launch_slots(call, stream); }, "rows");
}

void indexer_topk_sm90(Tensor scores, Tensor lengths, Tensor out) {
  const auto require_rows = [](const char* name, const Tensor& x, ScalarType dtype, const char* dtype_name) {
    require(x.dim() == 2 && x.scalar_type() == dtype && (x.size(1) <= 1 || x.stride(1) == 1), name, " must be ",
            dtype_name, " of 2 dimensions, the last contiguous, got ", described(x), ".");
  };
  require_rows("scores", scores, ScalarType::Float, "fp32");
  require_rows("out", out, ScalarType::Int, "int32");
  const int64_t rows = scores.size(0), columns = scores.size(1), k = out.size(1);
  require(columns <= kTopKColumns, "scores have ", columns, " columns, and must have ", kTopKColumns,
          " at most.");
  require(out.size(0) == rows && rows < int64_t{1} << 28 && k <= kTopKMost, "out must be [", rows, ", ",
          kTopKMost, " at most], got ", shape(out), ".");
  require_ints("lengths", lengths, rows);
  require(lengths.device() == scores.device() && out.device() == scores.device(),
          "lengths and out must be on the device of scores.");
  if (rows == 0 || k == 0) return;

  TopK call = {};
  call.scores = static_cast<const float*>(scores.data_ptr());
  call.scores_stride = scores.stride(0);
  call.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  call.out = static_cast<int32_t*>(out.data_ptr());
  call.out_stride = out.stride(0);
  call.rows = static_cast<int32_t>(rows);
  call.columns = static_cast<int32_t>(columns);
  call.k = static_cast<int32_t>(k);
  on_current_stream(scores, [&](cudaStream_t stream) { return launch_topk(call, stream); }, "scores");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CUDA, library) {
  library.impl("indexer_topk_sm90", TORCH_BOX(&indexer_topk_sm90));
  library.impl("request_rows_to_slots_sm90", TORCH_BOX(&request_rows_to_slots_sm90));
}

}  // namespace mla::torch_ops
