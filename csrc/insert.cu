// Fused insertion of a token: Q norm and RoPE, KV RoPE, and the store of one full-width cache row.
//
// The bits of the results are defined in mla_kernels/insert.py, by the order of fp32 operations. Arithmetic is
// written with the __f*_rn intrinsics, which the compiler never contracts or reorders, whatever the flags.
//
// A warp takes one KV row, or the same one or two heads of a token. Lane l holds elements 8l..8l+7 and
// 256+8l..256+8l+7 of a row: two 16-byte loads, and the first levels of the sum stay in the lane. The rotated
// elements, 448 on, are in the second half of lanes 24 to 31.

#include "insert.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "sm90_ptx.cuh"

// From how many heads in all a warp takes two: half the warps, and positions and cosines are read once for both.
#ifndef MLA_INSERT_PAIRS_FROM
#define MLA_INSERT_PAIRS_FROM 32768
#endif

namespace mla {
namespace {

constexpr int kHeadDim = 512, kHalf = 256;
constexpr int kFirstRotatedLane = 24;
constexpr int kWarps = 4;  // of a block
constexpr int kEarlyBlocks = 1024;  // so many may be there before the kernel before has ended

// n / divisor for 0 <= n < 2^31 as a product and a shift. The multiplier is rounded up by less than
// 2^shift / 2^31 of a divisor, which cannot reach the next quotient.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  static Divisor of(uint32_t divisor) {
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < divisor) ++log2;
    const uint64_t power = uint64_t{1} << (31 + log2);
    return {divisor, static_cast<uint32_t>((power + divisor - 1) / divisor), 31 + log2};
  }

  __device__ uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n} * multiplier) >> shift);
  }
};

struct Params : Insert {
  uint32_t q_work;  // warps for Q
  Divisor q_work_per_token, rows_per_block;
};

struct Row {
  float low[8], high[8];
};

// ------------------------------------------------------------------------------------------- memory

// Eight bf16, which are read once and so not kept in L1.
template <bool kAligned>
__device__ uint4 load8(const uint16_t* from) {
  uint4 v;
  if constexpr (kAligned) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  } else {
    v.x = from[0] | uint32_t{from[1]} << 16;
    v.y = from[2] | uint32_t{from[3]} << 16;
    v.z = from[4] | uint32_t{from[5]} << 16;
    v.w = from[6] | uint32_t{from[7]} << 16;
  }
  return v;
}

__device__ void widen(uint4 v, float (&x)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <bool kAligned>
__device__ void store8_bf16(uint16_t* to, const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

// Saturates at +-448, keeps NaN: the conversion instruction does both.
template <bool kAligned>
__device__ void store8_e4m3(uint8_t* to, const float (&x)[8]) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t first =
        __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i], x[4 * i + 1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t second =
        __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i + 2], x[4 * i + 3]), __NV_SATFINITE, __NV_E4M3);
    words[i] = first | second << 16;
  }
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
  }
}

template <bool kFp8, bool kAligned>
__device__ void store_row(void* base, int64_t offset, const Row& row) {
  if constexpr (kFp8) {
    uint8_t* to = static_cast<uint8_t*>(base) + offset;
    store8_e4m3<kAligned>(to, row.low);
    store8_e4m3<kAligned>(to + kHalf, row.high);
  } else {
    uint16_t* to = static_cast<uint16_t*>(base) + offset;
    store8_bf16<kAligned>(to, row.low);
    store8_bf16<kAligned>(to + kHalf, row.high);
  }
}

// Loads that the compiler leaves where they are written, before the next __syncwarp(): it would put those whose
// results only some lanes use into the branch of these, behind the wait for a row.
__device__ int load_word(const void* from) {
  int v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ uint4 load_words(const float* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Indices are read as words of 32 bits, without a branch: a position or a row fits into one, and the other of a
// 64-bit slot is then 0.
__device__ const int* position_at(const Params& p, uint32_t token) {
  return static_cast<const int*>(p.position_ids) + (uint64_t{token} << p.positions_are_int64);
}

__device__ const int* slot_at(const Params& p, uint32_t token) {
  return static_cast<const int*>(p.slot_mapping) + (uint64_t{token} << p.slots_are_int64);
}

struct Slot {
  int row, high;  // the other word of 64 bits; of 32, the same again
};

__device__ Slot load_slot(const Params& p, uint32_t token) {
  const int* const from = slot_at(p, token);
  return {load_word(from), load_word(from + p.slots_are_int64)};
}

// Into L2, where all meet: no harm is done if the kernel before this one still writes there.
__device__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ------------------------------------------------------------------------------------------- RoPE

struct Rotation {
  float cos[4], sin[4];
};

template <bool kAligned>
__device__ void load4(const void* from, int64_t offset, bool is_bf16, float (&x)[4]) {
  if (is_bf16) {
    const uint16_t* at = static_cast<const uint16_t*>(from) + offset;
    uint2 v;
    if constexpr (kAligned) {
      v = __ldg(reinterpret_cast<const uint2*>(at));
    } else {
      v = make_uint2(at[0] | uint32_t{at[1]} << 16, at[2] | uint32_t{at[3]} << 16);
    }
    x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
  } else {
    const float* at = static_cast<const float*>(from) + offset;
    if constexpr (kAligned) {
      const uint4 v = load_words(at);
      x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
      x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __ldg(at + i);
    }
  }
}

template <bool kAligned>
__device__ Rotation load_rotation(const Params& p, int position, int lane) {
  Rotation r;  // of other lanes, not read: zeros would have to wait for the loads
  if (lane >= kFirstRotatedLane) {
    const int64_t offset = position * p.cos_sin_stride + 4 * (lane - kFirstRotatedLane);
    load4<kAligned>(p.cos_sin_cache, offset, p.cos_sin_is_bf16, r.cos);
    load4<kAligned>(p.cos_sin_cache, offset + 32, p.cos_sin_is_bf16, r.sin);
  }
  return r;
}

__device__ void rotate(float (&x)[8], const Rotation& r, int lane) {
  if (lane < kFirstRotatedLane) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = __fsub_rn(__fmul_rn(a, r.cos[i]), __fmul_rn(b, r.sin[i]));
    x[2 * i + 1] = __fadd_rn(__fmul_rn(b, r.cos[i]), __fmul_rn(a, r.sin[i]));
  }
}

// ------------------------------------------------------------------------------------------- arithmetic

// 1 / the root mean square of a head, the same in all lanes.
__device__ float norm_factor(const Row& row, float eps) {
  float u[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u[i] = __fadd_rn(__fmul_rn(row.low[i], row.low[i]), __fmul_rn(row.high[i], row.high[i]));
  }
  float sum = __fadd_rn(__fadd_rn(__fadd_rn(u[0], u[4]), __fadd_rn(u[2], u[6])),
                        __fadd_rn(__fadd_rn(u[1], u[5]), __fadd_rn(u[3], u[7])));
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fmul_rn(sum, 1.0f / kHeadDim), eps)));
}

__device__ void multiply(float (&x)[8], float factor) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], factor);
}

// x / scale, as E4M3 sees the IEEE quotient. For scales of usual size it is the product with the reciprocal
// after two corrections, as the compiler divides, but with one reciprocal for all: exact wherever E4M3 can tell
// (quotients from 2^-12 to 512), and without the corrections, which could overflow or lose a sign, elsewhere.
__device__ void divide(float (&x)[8], float scale) {
  if (fabsf(scale) >= 0x1p-60f && fabsf(scale) <= 0x1p60f) {
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float near = __fmul_rn(x[i], reciprocal);
      float quotient = __fmaf_rn(__fmaf_rn(-near, scale, x[i]), reciprocal, near);
      quotient = __fmaf_rn(__fmaf_rn(-quotient, scale, x[i]), reciprocal, quotient);
      x[i] = fabsf(near) >= 0x1p-12f && fabsf(near) <= 512.0f ? quotient : near;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fdiv_rn(x[i], scale);
  }
}

// ------------------------------------------------------------------------------------------- the kernel

template <bool kFp8, bool kAligned>
__device__ void insert_kv(const Params& p, uint32_t token, int lane) {
  const Slot slot = load_slot(p, token);
  const int position = load_word(position_at(p, token));
  const uint16_t* source = static_cast<const uint16_t*>(p.kv) + token * p.kv_stride + 8 * lane;
  const uint4 low = load8<kAligned>(source), high = load8<kAligned>(source + kHalf);
  const Rotation rotation = load_rotation<kAligned>(p, position, lane);
  __syncwarp();  // all loads are on their way
  if ((p.slots_are_int64 && slot.high != 0) || static_cast<uint32_t>(slot.row) >= p.num_rows) return;
  const uint32_t block = p.rows_per_block.quotient(static_cast<uint32_t>(slot.row));
  const uint32_t row_in_block = static_cast<uint32_t>(slot.row) - block * p.cache_block_size;
  Row row;
  widen(low, row.low);
  widen(high, row.high);
  rotate(row.high, rotation, lane);
  if constexpr (kFp8) {
    divide(row.low, p.fp8_scale);
    divide(row.high, p.fp8_scale);
  }
  const int64_t offset = block * p.k_cache_block_stride + int64_t{row_in_block} * kHeadDim + 8 * lane;
  store_row<kFp8, kAligned>(p.k_cache, offset, row);
}

template <bool kFp8, int kHeads, bool kAligned>
__device__ void insert_q(const Params& p, uint32_t work, int lane) {
  const uint32_t token = p.q_work_per_token.quotient(work);
  const uint32_t head = (work - token * p.q_work_per_token.divisor) * kHeads;
  const int position = load_word(position_at(p, token));
  const uint16_t* source =
      static_cast<const uint16_t*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + 8 * lane;
  uint4 low[kHeads], high[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    low[i] = load8<kAligned>(source + i * p.q_head_stride);
    high[i] = load8<kAligned>(source + i * p.q_head_stride + kHalf);
  }
  const Rotation rotation = load_rotation<kAligned>(p, position, lane);
  __syncwarp();  // all loads are on their way
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    Row row;
    widen(low[i], row.low);
    widen(high[i], row.high);
    const float factor = norm_factor(row, p.eps);
    multiply(row.low, factor);
    multiply(row.high, factor);
    rotate(row.high, rotation, lane);
    if constexpr (kFp8) {
      multiply(row.low, p.q_fp8_scale_inv);
      multiply(row.high, p.q_fp8_scale_inv);
    }
    const int64_t offset = token * p.q_out_token_stride + (head + i) * p.q_out_head_stride + 8 * lane;
    store_row<kFp8, kAligned>(p.q_out, offset, row);
  }
}

// What the loads of a token wait for one after another, into L2: its slot, its position and the cosines of that.
__device__ void prefetch_lookups(const Params& p, uint32_t token, int lane) {
  if (lane == 0) prefetch(slot_at(p, token));
  // Perhaps not this call's position yet, so good for a hint alone, and not to be kept in L1.
  uint32_t position;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(position) : "l"(position_at(p, token)));
  const int bytes = p.cos_sin_is_bf16 ? 2 : 4;
  if (position < p.num_positions && 32 * lane < 64 * bytes) {
    prefetch(static_cast<const char*>(p.cos_sin_cache) + position * p.cos_sin_stride * bytes + 32 * lane);
  }
}

template <bool kQFp8, bool kCacheFp8, int kHeads, bool kAligned>
__global__ void __launch_bounds__(32 * kWarps) insert_kernel(const __grid_constant__ Params p) {
  const int lane = threadIdx.x;
  const uint32_t work = blockIdx.x * kWarps + threadIdx.y;
  if (blockIdx.x < kEarlyBlocks && work < p.num_slots) prefetch_lookups(p, work, lane);
  // Launched while the kernel before still ran (see launch_overlapping()): its results are there from here on. The kernel
  // after this one may do the same.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (work < p.num_slots) {
    insert_kv<kCacheFp8, kAligned>(p, work, lane);
  } else if (work - p.num_slots < p.q_work) {
    insert_q<kQFp8, kHeads, kAligned>(p, work - p.num_slots, lane);
  }
}

// Whether every row of `base` that has these strides begins at a multiple of `bytes`.
bool aligned(const void* base, int64_t bytes, int64_t element_size, int64_t stride, int64_t other_stride = 0) {
  return reinterpret_cast<uintptr_t>(base) % bytes == 0 && stride * element_size % bytes == 0 &&
         other_stride * element_size % bytes == 0;
}

template <bool kQFp8, bool kCacheFp8>
cudaError_t launch(Params& p, cudaStream_t stream) {
  const bool is_aligned =
      aligned(p.q, 16, 2, p.q_token_stride, p.q_head_stride) && aligned(p.kv, 16, 2, p.kv_stride) &&
      aligned(p.q_out, kQFp8 ? 8 : 16, kQFp8 ? 1 : 2, p.q_out_token_stride, p.q_out_head_stride) &&
      aligned(p.k_cache, kCacheFp8 ? 8 : 16, kCacheFp8 ? 1 : 2, p.k_cache_block_stride) &&
      aligned(p.cos_sin_cache, p.cos_sin_is_bf16 ? 8 : 16, p.cos_sin_is_bf16 ? 2 : 4, p.cos_sin_stride);
  const bool pairs = is_aligned && p.num_heads % 2 == 0 && p.num_tokens * p.num_heads >= MLA_INSERT_PAIRS_FROM;
  const uint32_t per_token = p.num_heads / (pairs ? 2 : 1);
  p.q_work = p.num_tokens * per_token;
  p.q_work_per_token = Divisor::of(per_token);
  p.rows_per_block = Divisor::of(p.cache_block_size);
  const auto kernel = pairs        ? insert_kernel<kQFp8, kCacheFp8, 2, true>
                      : is_aligned ? insert_kernel<kQFp8, kCacheFp8, 1, true>
                                   : insert_kernel<kQFp8, kCacheFp8, 1, false>;
  const dim3 blocks((p.num_slots + p.q_work + kWarps - 1) / kWarps);
  return launch_overlapping(kernel, p, blocks, dim3(32, kWarps), stream);
}

}  // namespace

cudaError_t launch_insert(const Insert& call, cudaStream_t stream) {
  Params p{call, 0, {}, {}};
  if (!p.cache_is_fp8) return launch<false, false>(p, stream);
  return p.q_is_fp8 ? launch<true, true>(p, stream) : launch<false, true>(p, stream);
}

}  // namespace mla
