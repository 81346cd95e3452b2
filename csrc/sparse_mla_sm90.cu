// Which of the Hopper kernels serves a call, and how it is divided: docs/sm90-sparse-mla.md.

#include <algorithm>

#include "sparse_mla_rows.h"

namespace mla {
namespace {

int divide(int x, int by) { return (x + by - 1) / by; }

// What the choice depends on, besides the call.
struct Gpu {
  int device = 0, sms = 0, l2_bytes = 0;

  cudaError_t ask() {
    int major = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return error;
    // What is compiled for other GPUs is empty, and would leave the output as it was.
    return major == 9 ? cudaSuccess : cudaErrorNoKernelImageForDevice;
  }
  // Rows and q are read once, outputs by the next kernel: these are kept where they fit. In a larger call it is rows of
  // one token that may still be there for others.
  bool keeps_outputs(int tokens, int heads) const { return int64_t{tokens} * heads * 1024 <= l2_bytes / 2; }
};

// The full-width call as keys of two pools. The window is the first 128 columns, and what is picked follows it.
SparseMlaRows as_rows(const SparseMla& call) {
  constexpr int kWindow = 128;
  SparseMlaRows rows = {};
  rows.format = call.rows_are_fp8 ? RowFormat::kE4M3 : RowFormat::kBf16;
  rows.q = call.q, rows.q_token_stride = call.q_token_stride, rows.q_head_stride = call.q_head_stride;
  rows.q_is_fp8 = call.q_is_fp8;
  rows.out = call.out, rows.out_token_stride = call.out_token_stride, rows.out_head_stride = call.out_head_stride;
  rows.sources[0] = {call.swa, call.indices, call.indices_stride, call.visible, 0, kWindow};
  rows.sources[1] = {call.compressed, call.indices + kWindow, call.indices_stride, call.topk_lens, kWindow,
                     call.width - kWindow};
  rows.tokens_per_length = 1;
  rows.second_needs_first = true;
  rows.sinks = call.sinks;
  rows.bmm1_tensor = call.bmm1_tensor, rows.bmm2_tensor = call.bmm2_tensor;
  rows.bmm1 = call.bmm1, rows.bmm2 = call.bmm2;
  rows.tokens = call.tokens, rows.heads = call.heads;
  rows.keep_outputs = call.keep_outputs;
  return rows;
}

// How many blocks share a token's keys as a cluster, up to `most`: as many as find SMs at the same time, of which the
// driver knows (`held` says how many clusters of a size), and have fewer tiles each than with one block less.
template <typename Held>
int cluster_splits(int blocks, int tiles, int most, int sms, const Held& held) {
  for (int splits = std::min({tiles, most, sms / blocks}); splits > 1; --splits)
    if (divide(tiles, splits) < divide(tiles, splits - 1) && held(splits) >= blocks) return splits;
  return 1;
}

// What a block of the mma.sync kernel takes at a time, and how many share a token's keys.
struct MmaDivision {
  MmaBlock block = MmaBlock::kWhole;
  int splits = 1;

  // Of `columns` keys for each of so many blocks of heads.
  MmaDivision(RowFormat format, int blocks, int columns, const Gpu& gpu) {
    const bool is_wide = format == RowFormat::kBf16 || format == RowFormat::kBf576;
    // Two items at a time on an SM, one computing while the other waits, as soon as keys are not split among SMs; or
    // the halves of one.
    if (!is_wide && 2 * blocks > gpu.sms) {
      block = blocks > gpu.sms ? MmaBlock::kPaired : MmaBlock::kShared;
      splits = blocks > gpu.sms ? 1 : 2;
      return;
    }
    const bool is_packed = format == RowFormat::kV4 || format == RowFormat::kV32;
    if (is_packed) block = MmaBlock::kHalf;
    const int tiles = divide(columns, is_wide || is_packed ? 64 : 128);
    splits = cluster_splits(blocks, tiles, kMmaMaxSplits, gpu.sms,
                            [&](int splits) { return mma_clusters(format, block, splits, gpu.device); });
  }
};

int tiles_of(const SparseMlaRows& call) {
  return std::max(1, divide(call.sources[0].width + call.sources[1].width, 64));
}

// Whether 64 heads on M, in parts, are faster than twice 32 on N, over 584-byte rows. Measured, as below.
bool is_in_parts(const SparseMlaRows& call) {
  return call.format == RowFormat::kV4 && call.heads > 32 && call.heads <= 64 && call.tokens >= 17 &&
         call.tokens <= 24 && tiles_of(call) >= 10;
}

// Whether the kernel with heads on N over packed rows serves a call. Measured: docs/sm90-sparse-mla.md.
bool has_heads_on_n(const SparseMlaRows& call, int sms) {
  const bool is_v4 = call.format == RowFormat::kV4;
  if ((!is_v4 && call.format != RowFormat::kV32) || call.heads <= 16 || call.max_logits) return false;
  const int tiles = tiles_of(call), blocks = call.tokens * divide(call.heads, 32);
  if (11 * blocks < sms && blocks * tiles < 256) return false;  // so little that 16 heads an item are faster
  // Or an SM an item, whose halves share its keys; or two SMs, where clusters of four of 32 heads on N find few.
  const int items16 = call.tokens * divide(call.heads, 16);
  const bool two_sms = call.heads <= 64 && tiles >= 10 && 5 * items16 > 2 * sms;
  if (is_v4 && items16 <= sms && (two_sms || 2 * items16 > sms)) return false;
  if (call.heads <= 32) return true;
  if (is_in_parts(call)) return false;
  // Two blocks a token read its rows twice: only where 64 heads on M have too little to do.
  return blocks <= sms && (tiles < 16 || call.tokens * divide(call.heads, 64) * tiles < 400);
}

// Items beyond those that fill all SMs some times leave SMs idle, so their keys are divided, into as many parts as take
// the least time. In tiles, a part takes some more than its own for q and its outputs, and merging what it has to read.
M64Division m64_division(int items, int tiles, int sms) {
  const int rest = items % sms;
  const auto time = [&](int parts) {
    const int blocks = rest * parts;
    return divide(blocks, sms) * (divide(tiles, parts) + 2.5) + (parts > 1 ? 2 + 1.5 * blocks / sms : 0);
  };
  int best = 1;
  for (int parts = 2; parts <= std::min(kM64MaxParts, tiles); ++parts)
    if (time(parts) < 0.95 * time(best)) best = parts;
  return {best > 1 ? items - rest : items, best};
}

// Whether the kernel with 64 heads on M serves a call over rows, and how it is divided there.
struct M64Choice {
  bool is_it;
  M64Division division;

  M64Choice(const SparseMlaRows& call, int sms) : is_it(false), division{} {
    const int tiles = tiles_of(call), items = call.tokens * divide(call.heads, 64);
    const bool is_wide = call.format == RowFormat::kBf16 || call.format == RowFormat::kBf576;
    // It takes packed rows without the largest score, which no call over them asks for.
    if (call.format == RowFormat::kE4M3 || (!is_wide && call.max_logits)) return;
    // With less to do than this, 16 heads an item are faster (measured: docs/sm90-sparse-mla.md).
    const int most = call.format == RowFormat::kV4 && tiles < 10 ? sms / 2 : sms / 4;
    const int least = call.heads <= 32 ? 400 : 200;
    // Prefills over BF16 rows of 512 take it with few heads too, which cost it no more than 64.
    const bool is_prefill = call.format == RowFormat::kBf16 && items > 8 * sms;
    is_it = (call.heads > (is_wide ? 16 : 32) || is_prefill) && !has_heads_on_n(call, sms) &&
            (items > most || (tiles >= 16 && items * tiles >= least) || is_in_parts(call));
    division = m64_division(items, tiles, sms);
  }
};

cudaError_t run_mma(const SparseMlaRows& call, const Gpu& gpu, cudaStream_t stream) {
  const int columns = call.sources[0].width + call.sources[1].width;
  const MmaDivision division(call.format, call.tokens * divide(call.heads, 16), columns, gpu);
  return launch_sparse_mla_mma(call, division.block, division.splits, gpu.sms, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_sm90(SparseMla call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  Gpu gpu;
  if (const cudaError_t error = gpu.ask(); error != cudaSuccess) return error;
  const int sms = gpu.sms;
  call.keep_outputs = gpu.keeps_outputs(call.tokens, call.heads);
  // Blocks of the grid if a block takes so many heads.
  const auto blocks = [&](int heads) { return call.tokens * divide(call.heads, heads); };

  const bool few_heads = call.heads <= 16 && (call.rows_are_fp8 || blocks(16) < sms / 2);
  if (few_heads || blocks(16) * (call.rows_are_fp8 ? 4 : 8) <= sms) {
    return run_mma(as_rows(call), gpu, stream);
  }
  if (call.heads <= 16) return launch_sparse_mla_wgmma(call, 16, false, sms, stream);
  for (const int heads : {16, 32})
    if (2 * blocks(heads) <= sms) return launch_sparse_mla_wgmma(call, heads, true, sms, stream);
  if (call.heads <= 32 || (call.rows_are_fp8 && blocks(32) <= sms))
    return launch_sparse_mla_wgmma(call, 32, false, sms, stream);
  return launch_sparse_mla_m64(call, sms, stream);
}

cudaError_t sparse_mla_rows_workspace(const SparseMlaRows& call, int64_t* bytes) {
  *bytes = 0;
  if (call.tokens == 0) return cudaSuccess;
  Gpu gpu;
  if (const cudaError_t error = gpu.ask(); error != cudaSuccess) return error;
  const M64Choice m64(call, gpu.sms);
  const int items = call.tokens * divide(call.heads, 64);
  if (m64.is_it) *bytes = int64_t{items - m64.division.whole} * m64.division.parts * kM64PartBytes;
  return cudaSuccess;
}

cudaError_t launch_sparse_mla_rows(SparseMlaRows call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  Gpu gpu;
  if (const cudaError_t error = gpu.ask(); error != cudaSuccess) return error;
  call.keep_outputs = gpu.keeps_outputs(call.tokens, call.heads);
  if (has_heads_on_n(call, gpu.sms)) {
    const int blocks = call.tokens * divide(call.heads, 32);
    const int splits = cluster_splits(blocks, tiles_of(call), kWgmmaRowsMaxSplits, gpu.sms, [&](int splits) {
      return wgmma_rows_clusters(call.format, splits, gpu.device);
    });
    return launch_sparse_mla_wgmma_rows(call, splits, gpu.sms, stream);
  }
  if (const M64Choice m64(call, gpu.sms); m64.is_it)
    return launch_sparse_mla_m64_rows(call, m64.division, gpu.sms, stream);
  return run_mma(call, gpu, stream);
}

}  // namespace mla
