// What the kernels share: barriers, wgmma and its operands in shared memory, q in fp16.
#pragma once

#include "sm90_ptx.cuh"

namespace mla {

constexpr int kTile = 64;  // keys

// Below every score, and finite, so that it can be subtracted from the -inf of a missing key.
inline constexpr float kNoMaximum = -3.402823466e38f;

struct Params : InItems<SparseMla> {
  using InItems::InItems;
};

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
// Named barrier of `threads` threads: 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ bool sync_any(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
      : "=r"(any) : "r"(static_cast<uint32_t>(mine)), "r"(id), "r"(threads) : "memory");
  return any;
}
// Orders this thread's stores to shared memory before later reads by wgmma.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// This thread arrives when the copies it has begun are there.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// The copies that this thread has begun are there.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The same by groups: those begun since the last one are a group; all but the last `PENDING` groups are there.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void stmatrix_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
// 8 x 8 values of 16 bits, rows and columns exchanged.
__device__ __forceinline__ uint32_t transposed8(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
// Of four lanes, whose numbers end in t: word i of lane t and word t of lane i change places.
__device__ __forceinline__ void transpose4(uint32_t (&x)[4], int t) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, t & 1 ? x[i] : x[i + 1], 1);
    (t & 1 ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, t & 2 ? x[i] : x[i + 2], 2);
    (t & 2 ? x[i] : x[i + 2]) = other;
  }
}
// The same of N fours of words at once, since a shuffle is waited for.
template <int N>
__device__ __forceinline__ void transpose4(uint32_t (&x)[N][4], int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? x[n][i] : x[n][i + 1], 1);
      (lane & 1 ? x[n][i] : x[n][i + 1]) = other;
    }
  const bool is_upper = lane & 2;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? x[n][i] : x[n][i + 2], 2);
      (is_upper ? x[n][i] : x[n][i + 2]) = other;
    }
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// Keeps the compiler from using these registers' values further up.
template <int I, int J>
__device__ __forceinline__ void hold(uint32_t (&r)[I][J]) {
#pragma unroll
  for (int i = 0; i < I; ++i)
#pragma unroll
    for (int j = 0; j < J; ++j) asm volatile("" : "+r"(r[i][j])::"memory");
}
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Before a warp stores over operands of products that it has waited for, in a build that takes that wait as the warp's
// own and not as its warpgroup's: "Waits" in docs/sm90-sparse-mla.md. `id`: of the warpgroup's named barrier.
__device__ __forceinline__ void strict_wait(int id) {
#ifdef MLA_STRICT_WAIT
  sync_threads(id, 128);
#endif
}

// Operands of inline assembly: outputs from d[i], and the numbers of so many registers.
#define MLA_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_F8(d, i) MLA_F4(d, i), MLA_F4(d, i + 4)
#define MLA_F16(d, i) MLA_F8(d, i), MLA_F8(d, i + 8)
#define MLA_F32(d, i) MLA_F16(d, i), MLA_F16(d, i + 16)
#define MLA_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MLA_D16 MLA_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MLA_D32 MLA_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"

// An operand in shared memory: rows of 128 bytes, chunk c of row r at c ^ (r % 8); 8 rows after `group` bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int group = 1024) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | static_cast<uint64_t>(group >> 4) << 32 |
         uint64_t{1} << 62;
}
// The same read along its rows: 64 columns, the next 64 after `block` bytes.
__device__ __forceinline__ uint64_t transposed(uint32_t address, int block) {
  return descriptor(address) & ~(uint64_t{0x3FFF} << 16) | static_cast<uint64_t>(block >> 4) << 16;
}
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row & 7) << 4); }

struct Lengths {
  int visible, topk;

  __device__ __forceinline__ Lengths(const Params& p, int i) {
    const int token = min(i, p.items - 1) / (p.splits * p.head_blocks);
    visible = p.visible[token], topk = p.topk_lens[token];
  }
};

// fp16 holds q / 2^e whatever q is: 2^e and its inverse, from the largest magnitude of a row of q as the bits of BF16.
// Both are normal numbers: of 2^126 at most, since fp16 holds four times what is needed, and of 2^-126 at least.
__device__ __forceinline__ float2 power_below(uint32_t largest) {
  const uint32_t power = min(max(largest << 16 & 0x7F800000, 0x00800000), 0x7E800000);
  return make_float2(__int_as_float(power), __int_as_float(0x7F000000 - power));
}

// Where a thread is, and what it works on.
template <typename PARAMS>
struct Thread {
  const PARAMS& p;
  uint8_t* const smem;
  const uint32_t base;
  const int warp, lane;

  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(smem + offset); }
};

// The 16 values of a lane as BF16, from E4M3.
__device__ __forceinline__ void to_bf16(uint4 (&raw)[2]) {
  uint32_t w[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
  for (int k = 3; k >= 0; --k) {
    const uint32_t x = w[k];
    w[2 * k] = half_to_bf16(e4m3_low(x)), w[2 * k + 1] = half_to_bf16(e4m3_high(x));
  }
  raw[0] = make_uint4(w[0], w[1], w[2], w[3]), raw[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

}  // namespace mla
