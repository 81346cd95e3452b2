// What all kernels share: instructions by name, most of them Hopper's, and how kernels are launched.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cstdint>

#include "sparse_mla_sm90.h"

namespace mla {

constexpr int kDim = 512;
constexpr int kWindow = 128;
constexpr float kLog2e = 1.4426950408889634f;
// The running maximum is raised only when a score (log2) is more than this above it. fp16 holds weights up to 2^15 as
// well as weights up to 1, and so outputs are hardly ever rescaled.
constexpr float kSlack = 15.f;

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// The cache policy of copies whose source is to leave the L2 cache first.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
// An asynchronous copy of 16 bytes, or zeros if `bytes` is 0, so that stale rows never reach a product. EVICT_FIRST:
// what is read leaves the L2 cache first. PREFETCH: how many bytes around it come into that cache.
template <bool EVICT_FIRST, int PREFETCH = 128>
__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
#define MLA_COPY16(size)                                                                                         \
  if constexpr (EVICT_FIRST)                                                                                     \
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::" size " [%0], [%1], 16, %2, %3;" ::"r"(to),      \
                 "l"(from), "r"(bytes), "l"(evict_first()) : "memory");                                          \
  else                                                                                                           \
    asm volatile("cp.async.cg.shared.global.L2::" size " [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)   \
                 : "memory")
  if constexpr (PREFETCH == 64) {
    MLA_COPY16("64B");
  } else {
    static_assert(PREFETCH == 128, "");
    MLA_COPY16("128B");
  }
#undef MLA_COPY16
}
// The same of 8 bytes.
__device__ __forceinline__ void copy8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// x / by, of x below 2^31.
__device__ __forceinline__ uint32_t divided(uint32_t x, const Divisor& by) {
  return __umulhi(by.magic, x) + x >> by.shift;
}
// Where a row of a pool is, by its index. An index that is no row's gets the pool's first row, a valid address for
// copies of no bytes.
struct Row {
  bool exists;
  uint32_t in_page;
  const uint8_t *page, *at;

  __device__ __forceinline__ Row(const Pool& pool, uint32_t index) : exists(index < pool.count) {
    const uint32_t row = exists ? index : 0, number = divided(row, pool.page);
    in_page = row - number * pool.page.value;
    page = static_cast<const uint8_t*>(pool.rows) + number * pool.page_stride;
    at = page + in_page * pool.row_stride;
  }
};
// Where the outputs of a head are.
template <typename Call>
__device__ __forceinline__ __nv_bfloat16* output_at(const Call& p, int64_t token, int head) {
  return static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
}
// The compiler no longer knows where the value comes from. So it neither computes it again nor keeps what follows from
// it longer than until here.
template <typename T>
__device__ __forceinline__ void make_opaque(T& x) {
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(x));
  else
    asm volatile("" : "+r"(x));
}
// The sum over this lane and those before it.
template <typename T>
__device__ __forceinline__ T sum_up_to_lane(T x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}
// Two numbers, loaded long before they are needed: even lanes have one, odd lanes the other. Were they the same in all
// lanes, the compiler would move them to uniform registers, and wait for them at once.
struct LanePair {
  int mine;

  __device__ __forceinline__ int even() const { return __shfl_sync(~0u, mine, 0); }
  __device__ __forceinline__ int odd() const { return __shfl_sync(~0u, mine, 1); }
};
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The two E4M3 values in the low or high half of a word, as fp16. That is exact.
__device__ __forceinline__ uint32_t e4m3_low(uint32_t v) {
  uint32_t r;
  asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ uint32_t e4m3_high(uint32_t v) {
  uint32_t r;
  asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(v));
  return r;
}
// Two fp16 values as BF16. That is exact for values that were E4M3.
__device__ __forceinline__ uint32_t half_to_bf16(uint32_t v) {
  const __nv_bfloat162 r = __float22bfloat162_rn(__half22float2(reinterpret_cast<const __half2&>(v)));
  return reinterpret_cast<const uint32_t&>(r);
}
// Products of two pairs of fp16.
__device__ __forceinline__ uint32_t times_half(uint32_t x, uint32_t by) {
  const __half2 r = __hmul2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(by));
  return reinterpret_cast<const uint32_t&>(r);
}
__device__ __forceinline__ uint32_t pack_half(float x, float y) {
  const __half2 r = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(r);
}
__device__ __forceinline__ uint32_t pack_bf16(float x, float y) {
  const __nv_bfloat162 r = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(r);
}
__device__ __forceinline__ float2 unpack_bf16(uint32_t v) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(v));
}
// What is left of two values when their BF16 ones, `packed`, are subtracted.
__device__ __forceinline__ uint32_t rest_bf16(float x, float y, uint32_t packed) {
  const float2 back = unpack_bf16(packed);
  return pack_bf16(x - back.x, y - back.y);
}
// BF16 times a power of two.
__device__ __forceinline__ uint32_t scaled_bf16(uint32_t x, uint32_t power) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(power));
  return r;
}
// Of two pairs of BF16 the larger magnitudes, with any sign; NaN if either is.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
// BF16 times a power of two, to fp16. The product is exact, or so small that fp16 rounds it to zero. The assembly is
// volatile, so that each product is converted before the next one is made: else registers are spilled.
__device__ __forceinline__ uint32_t scaled_to_half(uint32_t x, uint32_t power) {
  uint32_t r;
  asm volatile(
      "{.reg .b32 l, h; mul.rn.bf16x2 h, %1, %2; shl.b32 l, h, 16; and.b32 h, h, 0xFFFF0000;\n"
      "cvt.rn.f16x2.f32 %0, h, l;}" : "=r"(r) : "r"(x), "r"(power));
  return r;
}

__device__ __forceinline__ uint4 as_uint4(const uint32_t (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }
template <int N>
__device__ __forceinline__ void read_words(uint32_t (&w)[N], const uint8_t* from) {
  if constexpr (N == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else {
    static_assert(N == 2, "");
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    w[0] = v.x, w[1] = v.y;
  }
}

// Asks for all lines of a launch's parameters. They are in no cache yet, and each would be waited for when it is first
// read.
template <typename Params>
__device__ __forceinline__ void touch(const Params& p) {
  int any = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Params)); i += 64)
    any |= *reinterpret_cast<const int*>(reinterpret_cast<const char*>(&p) + i);
  // An instruction that needs them, or else ptxas leaves the loads out.
  asm volatile("{.reg .pred none; setp.eq.s32 none, %0, 0; @none nanosleep.u32 0;}" ::"r"(any));
}

// Programmatic dependent launch: a kernel may begin while the one before still runs, so it reads nothing of memory
// before this. Then it lets the next one begin.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// A call, divided into items: some heads of a token and, with split-KV, a share of its keys.
template <typename Call>
struct InItems : Call {
  int head_blocks, splits, items;

  InItems(const Call& call, int heads, int splits)
      : Call(call),
        head_blocks((call.heads + heads - 1) / heads),
        splits(splits),
        items(call.tokens * head_blocks * splits) {}
  // What products of q and keys are multiplied by, to be scores in units of log2; and outputs in the end.
  __device__ __forceinline__ float score_scale() const {
    return (this->bmm1_tensor ? *this->bmm1_tensor : this->bmm1) * kLog2e;
  }
  __device__ __forceinline__ float output_scale() const {
    return this->bmm2_tensor ? *this->bmm2_tensor : this->bmm2;
  }
};

// Sets what a kernel needs to be launched. That is kept for each GPU of a process, so it is set at every launch.
template <auto KERNEL>
cudaError_t configure(int shared_bytes, int cluster) {
  const cudaError_t error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  constexpr int kPortableCluster = 8;
  if (error != cudaSuccess || cluster <= kPortableCluster) return error;
  return cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// How many clusters of `size` such blocks the GPU `device` holds at once, 0 if none or after an error. The driver answers once.
template <auto KERNEL>
int clusters_at_once(int threads, int shared_bytes, int size, int device) {
  constexpr int kDevices = 64, kSizes = 17;
  static std::atomic<int> answers[kDevices][kSizes];  // plus 1; 0 as long as the driver has not been asked
  const bool is_kept = device < kDevices && size < kSizes;
  int found = is_kept ? answers[device][size].load(std::memory_order_relaxed) - 1 : -1;
  if (found >= 0) return found;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(size));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (configure<KERNEL>(shared_bytes, size) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&found, KERNEL, &config) != cudaSuccess) {
    cudaGetLastError();  // forgets it: this call uses smaller clusters, and the next asks again
    return 0;
  }
  if (is_kept) answers[device][size].store(found + 1, std::memory_order_relaxed);
  return found;
}

// Launches clusters of `cluster` blocks, each with `shared_bytes` of shared memory.
template <auto KERNEL, typename Params>
cudaError_t launch_kernel(const Params& p, int blocks, int threads, int shared_bytes, int cluster,
                          cudaStream_t stream) {
  if (const cudaError_t error = configure<KERNEL>(shared_bytes, cluster)) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, KERNEL, p);
}

// Launches a kernel that may begin while the one before still runs, and waits by itself.
template <typename Kernel, typename Params>
cudaError_t launch_overlapping(Kernel* kernel, const Params& p, dim3 blocks, dim3 threads, cudaStream_t stream) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace mla
