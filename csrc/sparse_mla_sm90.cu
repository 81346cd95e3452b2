// Which of the three Hopper kernels serves a call, and how it is divided: docs/sm90-sparse-mla.md.

#include <algorithm>

#include "sparse_mla_sm90.h"

namespace dsv4 {
namespace {

int divide(int x, int by) { return (x + by - 1) / by; }

// How many blocks share a token's keys in the mma.sync kernel: as many as have a tile each and find an SM at the same
// time. Larger clusters do not: some groups of SMs are a few short of 16, so about a quarter is left out.
int mma_splits(int blocks, int tiles, int sms) {
  const int splits = std::min({8, tiles, sms * 3 / 4 / blocks});
  if (splits > 1) return splits;
  return 2 * blocks <= sms && tiles > 1 ? 2 : 1;
}

}  // namespace

cudaError_t launch_sparse_mla_sm90(SparseMla call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  int device = 0, sms = 0, major = 0, l2_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  // What is compiled for other GPUs is empty, and would leave the output as it was.
  if (major != 9) return cudaErrorNoKernelImageForDevice;
  // Rows and q are read once, outputs by the next kernel: these are kept where they fit. In a larger call it is rows of
  // one token that may still be there for others.
  call.keep_outputs = int64_t{call.tokens} * call.heads * 1024 <= l2_bytes / 2;
  // Blocks of the grid if a block takes so many heads.
  const auto blocks = [&](int heads) { return call.tokens * divide(call.heads, heads); };
  const int key_bytes = call.rows_are_fp8 ? 512 : 1024, mma_tile = (64 << 10) / key_bytes;

  const bool few_heads = call.heads <= 16 && (call.rows_are_fp8 || blocks(16) < sms / 2);
  if (few_heads || blocks(16) * (call.rows_are_fp8 ? 4 : 8) <= sms) {
    // Two items at a time on an SM, one computing while the other waits, as soon as keys are not split: with fewer
    // items than SMs too, since a tile of half the keys is there sooner.
    const bool paired = call.rows_are_fp8 && 2 * blocks(16) > sms;
    const int splits = paired ? 1 : mma_splits(blocks(16), divide(call.width, mma_tile), sms);
    return launch_sparse_mla_mma(call, paired, splits, sms, stream);
  }
  if (call.heads <= 16) return launch_sparse_mla_wgmma(call, 16, false, sms, stream);
  for (const int heads : {16, 32})
    if (2 * blocks(heads) <= sms) return launch_sparse_mla_wgmma(call, heads, true, sms, stream);
  if (call.heads <= 32 || (call.rows_are_fp8 && blocks(32) <= sms))
    return launch_sparse_mla_wgmma(call, 32, false, sms, stream);
  return launch_sparse_mla_m64(call, sms, stream);
}

}  // namespace dsv4
