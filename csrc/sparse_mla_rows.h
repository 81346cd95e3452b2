// Sparse MLA over rows as vLLM's caches hold them, behind FlashMLA's two calls: sparse_mla_mma.cu,
// sparse_mla_wgmma_rows.cu and sparse_mla_m64_rows.cu. Free of torch.
#pragma once

#include "sparse_mla_sm90.h"

namespace mla {

// How a row's bytes become a key and a value. Values are the first 512 dimensions of the key.
enum class RowFormat : int32_t {
  kE4M3,   // 512 bytes: 512 E4M3
  kBf16,   // 1024: 512 BF16
  kV4,     // 584: 448 E4M3 and 64 BF16; a page's rows, then 8 bytes for each: 7 UE8M0 scales of 64 values, 1 unused
  kV32,    // 656: 512 E4M3, 4 float32 scales of 128 values, 64 BF16
  kBf576,  // 1152: 576 BF16
};

// The keys of a token that are in one pool. Token t has `lengths[t / tokens_per_length] - offset` of them, or `width`,
// and `width` at most: the rows that its first indices name.
struct KeySource {
  Pool pool;
  const int32_t* indices;
  int64_t indices_stride;
  const int32_t* lengths;  // or null
  int32_t offset, width;
};

// One call. Strides are in elements, but for those of pools. `out` is BF16, [tokens, heads, 512].
struct SparseMlaRows {
  RowFormat format;
  const void* q;  // BF16 or, with kE4M3, E4M3; [tokens, heads, 512 or 576]
  int64_t q_token_stride, q_head_stride;
  void* out;
  int64_t out_token_stride, out_head_stride;
  KeySource sources[2];
  Divisor tokens_per_length;
  bool second_needs_first;   // a token whose first length is not above 0 has no keys at all
  const float* sinks;        // [heads], or null
  const float* bmm1_tensor;  // or null, and then the value below counts
  const float* bmm2_tensor;
  float bmm1, bmm2;
  // [tokens, heads], natural logarithm of the sum of exp(score), +inf without keys; the largest score, -inf without
  // keys. Both, only lse, or none: null.
  float *lse, *max_logits;
  int32_t tokens, heads;
  bool q_is_fp8;
  bool keep_outputs = false;  // in the L2 cache
  void* workspace = nullptr;  // of as many bytes as sparse_mla_rows_workspace() says; 16-byte aligned
};

// How many bytes a call needs besides, 0 of most. It follows from shapes and the GPU alone.
cudaError_t sparse_mla_rows_workspace(const SparseMlaRows& call, int64_t* bytes);

// Limits: 1 to 128 heads, tokens below 2^24. Sets `keep_outputs`.
cudaError_t launch_sparse_mla_rows(SparseMlaRows call, cudaStream_t stream);

// What a block of the mma.sync kernel, 16 heads an item, takes at a time. Over BF16 rows there is kWhole alone.
enum class MmaBlock {
  kWhole,   // 128 keys of an item (BF16 rows: 64)
  kHalf,    // 64, as packed rows come in place of kWhole
  kPaired,  // 64 each of two items
  kShared,  // 64 of each half of an item's keys
};
constexpr int kMmaMaxSplits = 16;

// So many blocks share a token's keys, as a cluster. With kPaired 1; with kShared 2, which are the halves of a block.
cudaError_t launch_sparse_mla_mma(const SparseMlaRows& call, MmaBlock block, int splits, int sms, cudaStream_t stream);

// How many clusters of `size` such blocks the GPU, `device`, holds at once; 0 if none. Likewise below.
int mma_clusters(RowFormat format, MmaBlock block, int size, int device);

constexpr int kWgmmaRowsMaxSplits = 8;

// 32 heads an item, heads on N, of kV4 and kV32; one block an SM, or several share a token's keys as a cluster. Of
// calls whose sources have no offsets, whose scales are not in memory, and that do not ask for the largest score.
cudaError_t launch_sparse_mla_wgmma_rows(const SparseMlaRows& call, int splits, int sms, cudaStream_t stream);
int wgmma_rows_clusters(RowFormat format, int size, int device);

// Items (a token and 64 of its heads) as the kernel with 64 heads on M takes them: the first `whole`, and of each of
// the others' keys so many parts, which the workspace holds.
struct M64Division {
  int whole, parts;
};
constexpr int kM64MaxParts = 8;
constexpr int64_t kM64PartBytes = 64 * (512 * 2 + 512 / 16 * 2 + 3 * 4);

// 64 heads a block, heads on M; one block an SM. Not of kE4M3, nor of calls whose sources have offsets, whose scales
// are in memory or, over packed rows, that ask for the largest score.
cudaError_t launch_sparse_mla_m64_rows(const SparseMlaRows& call, const M64Division& division, int sms,
                                       cudaStream_t stream);

}  // namespace mla
