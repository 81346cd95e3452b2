#pragma once
#define EMU 1
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <climits>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>
#include <algorithm>
#include <random>
#include <type_traits>
#undef __device__
#define __device__
#undef __global__
#define __global__
#undef __forceinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#undef __align__
#define __align__(x)
using std::min; using std::max;
inline unsigned min(unsigned a, int b) { return a < (unsigned)b ? a : (unsigned)b; }
inline unsigned max(unsigned a, int b) { return a > (unsigned)b ? a : (unsigned)b; }
namespace emu {
inline std::mt19937 rng(1);
inline int copy_mode = 2, mma_mode = 2;  // 0 at once, 1 as late as allowed, 2 random
inline int slow[4] = {1, 1, 1, 1};  // of 4 warpgroups: chance 1/slow to run
inline bool coin(int mode) { return mode == 2 ? rng() & 1 : mode == 0; }  // at once?
struct Copy { uint8_t* to; const uint8_t* from; int bytes, size; bool done; };
struct Mma { bool bf16; const uint32_t* a[32]; float* d[32]; uint64_t b; bool add; bool done; };
struct Warp; struct Block;
struct Fiber {
  ucontext_t ctx; std::vector<uint8_t> stack; int tid; Block* block; Warp* warp; bool finished = false;
  std::function<bool()> waits; const char* where = "";
  std::vector<Copy> open; std::vector<std::vector<Copy>> groups;
};
struct Warp {
  int arrived = 0; uint64_t generation = 0; uint64_t in[32]; uint64_t out[32]; uint32_t regs[32][4]; const void* ptr[32]; void* ptr2[32];
  std::vector<Mma> open; std::vector<std::vector<Mma>> groups;
};
struct MBar { int count = 0, pending = 0; uint32_t phase = 0; };
struct Named { int arrived = 0; uint64_t generation = 0; bool any = false, result = false; };
struct Block {
  int index; uint8_t* smem; std::vector<uint8_t> raw; std::map<uint32_t, MBar> bars; Named named[16]; std::vector<Warp> warps;
  std::vector<Fiber> fibers; int cluster_first, cluster_size; std::vector<Block*>* all;
};
inline Fiber* me; inline ucontext_t main_ctx; inline int grid; inline Named cluster_bar[64];
inline uint8_t* smem() { return me->block->smem; }
inline void block_until(const char* where, std::function<bool()> f) {
  if (f()) return;
  me->waits = std::move(f); me->where = where;
  swapcontext(&me->ctx, &main_ctx);
}
// all 32 lanes meet; the last runs `f`
template <typename F> inline void warp_op(const char* where, F f) {
  Warp& w = *me->warp;
  if (++w.arrived == 32) { w.arrived = 0; f(w); ++w.generation; return; }
  const uint64_t g = w.generation;
  block_until(where, [&w, g] { return w.generation != g; });
}
inline void do_copy(Copy& c) { if (c.done) return; c.done = true; if (c.bytes) memcpy(c.to, c.from, c.bytes); if (c.bytes < c.size) memset(c.to + c.bytes, 0, c.size - c.bytes); }
inline uint8_t* at(uint32_t a) { return me->block->smem + a; }
inline void copy(uint32_t to, const void* from, int bytes, int size) {
  if (to % size || (bytes && (uintptr_t)from % size)) { printf("misaligned copy\n"); abort(); }
  if (to + size > me->block->raw.size() - 1024) { printf("copy out of shared memory\n"); abort(); }
  Copy c{at(to), (const uint8_t*)from, bytes, size, false};
  if (coin(copy_mode)) do_copy(c); else memset(c.to, 0xFF, size);
  me->open.push_back(c);
}
inline void commit() { me->groups.push_back(std::move(me->open)); me->open.clear(); }
inline void wait_group(int pending) {
  while ((int)me->groups.size() > pending) { for (auto& c : me->groups[0]) do_copy(c); me->groups.erase(me->groups.begin()); }
}
inline float half(uint16_t h) { __half_raw r; r.x = h; return __half2float(__half(r)); }
inline uint16_t to_half(float f) { return __half_as_ushort(__float2half_rn(f)); }
inline float bf(uint16_t h) { uint32_t u = h << 16; float f; memcpy(&f, &u, 4); return f; }
inline float e4m3(uint8_t v) {
  int e = v >> 3 & 15, m = v & 7; float x = e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
  return v & 0x80 ? -x : x;
}
inline uint32_t e4m3x2(uint32_t v) { return to_half(e4m3(v & 255)) | (uint32_t)to_half(e4m3(v >> 8 & 255)) << 16; }
inline uint16_t to_bf(float f) { __nv_bfloat16 b = __float2bfloat16_rn(f); uint16_t u; memcpy(&u, &b, 2); return u; }
inline uint32_t scaled_bf16(uint32_t x, uint32_t p) { return to_bf(bf(x) * bf(p)) | (uint32_t)to_bf(bf(x >> 16) * bf(p >> 16)) << 16; }
inline uint32_t scaled_to_half(uint32_t x, uint32_t p) { uint32_t y = scaled_bf16(x, p); return to_half(bf(y)) | (uint32_t)to_half(bf(y >> 16)) << 16; }
inline uint32_t larger(uint32_t x, uint32_t y) {
  uint32_t r = 0;
  for (int i = 0; i < 2; ++i) { uint32_t a = x >> 16 * i & 0x7FFF, b = y >> 16 * i & 0x7FFF; r |= max(a, b) << 16 * i; }
  return r;
}
inline MBar& bar(uint32_t a) { if (a % 8) abort(); return me->block->bars[a]; }
inline void bar_init(uint32_t a, int n) { MBar& b = bar(a); b.count = b.pending = n; b.phase = 0; }
inline void bar_arrive(uint32_t a) { MBar& b = bar(a); if (!b.count) abort(); if (--b.pending == 0) b.pending = b.count, ++b.phase; }
inline void bar_wait(uint32_t a, uint32_t parity) {
  MBar* b = &bar(a); if (!b->count) abort();
  block_until("mbarrier", [b, parity] { return (b->phase & 1) != parity; });
}
inline bool named(int id, int threads, bool mine) {
  Named& n = me->block->named[id];
  n.any |= mine;
  if (++n.arrived == threads) { n.arrived = 0; n.result = n.any; n.any = false; ++n.generation; return n.result; }
  const uint64_t g = n.generation; Named* q = &n;
  block_until("named", [q, g] { return q->generation != g; });
  return n.result;  // nobody passes the next one before all have left: the next needs all of them
}
inline void ldmatrix(uint32_t (&r)[4], uint32_t from) {
  const int l = me->tid % 32; Warp& w = *me->warp; w.in[l] = from; w.ptr2[l] = r;
  if (from % 16) abort();
  warp_op("ldmatrix", [](Warp& w) {
    for (int m = 0; m < 4; ++m) for (int l = 0; l < 32; ++l) { uint32_t x; memcpy(&x, at(w.in[m * 8 + l / 4]) + l % 4 * 4, 4); ((uint32_t*)w.ptr2[l])[m] = x; }
  });
}
inline void stmatrix_t(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int l = me->tid % 32; Warp& w = *me->warp; w.in[l] = to; uint32_t v[4] = {a, b, c, d}; memcpy(w.regs[l], v, 16);
  warp_op("stmatrix", [](Warp& w) {
    for (int m = 0; m < 4; ++m) for (int l = 0; l < 32; ++l) for (int i = 0; i < 2; ++i) {
      // transposed: element (row g, column 2t + i) of the fragment goes to row 2t + i, column g
      const int row = l % 4 * 2 + i, col = l / 4; uint16_t x = w.regs[l][m] >> 16 * i; memcpy(at(w.in[m * 8 + row]) + col * 2, &x, 2);
    }
  });
}
inline void do_mma(Mma& x) {
  if (x.done) return; x.done = true;
  float A[16][16], Bm[16][32];
  const auto val = [&](uint16_t h) { return x.bf16 ? bf(h) : half(h); };
  for (int l = 0; l < 32; ++l) for (int r = 0; r < 4; ++r) for (int i = 0; i < 2; ++i) A[l / 4 + r % 2 * 8][l % 4 * 2 + i + r / 2 * 8] = val(x.a[l][r] >> 16 * i);
  const uint32_t start = (x.b & 0x3FFF) << 4, sbo = (x.b >> 32 & 0x3FFF) << 4;
  if (x.b >> 62 != 1) abort();
  for (int n = 0; n < 32; ++n) for (int k = 0; k < 16; ++k) {
    uint32_t a = start + n / 8 * sbo + n % 8 * 128 + k * 2; a ^= (a >> 7 & 7) << 4;
    uint16_t h; memcpy(&h, at(a), 2); Bm[k][n] = val(h);
  }
  for (int l = 0; l < 32; ++l) for (int j = 0; j < 16; ++j) {
    const int m = l / 4 + j / 2 % 2 * 8, n = j / 4 * 8 + l % 4 * 2 + j % 2; double s = x.add ? x.d[l][j] : 0;
    for (int k = 0; k < 16; ++k) s += (double)A[m][k] * Bm[k][n];
    x.d[l][j] = s;
  }
}
template <bool BF16> inline void wgmma(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
  const int l = me->tid % 32; Warp& w = *me->warp; w.ptr[l] = a; w.ptr2[l] = d; w.in[l] = b;
  warp_op("wgmma", [add](Warp& w) {
    Mma x; x.bf16 = BF16; x.b = w.in[0]; x.add = add; x.done = false;
    for (int l = 0; l < 32; ++l) { x.a[l] = (const uint32_t*)w.ptr[l]; x.d[l] = (float*)w.ptr2[l]; if (w.in[l] != x.b) abort(); }
    // in order: at once only if all before are done
    bool before = true; for (auto& g : w.groups) for (auto& y : g) before &= y.done; for (auto& y : w.open) before &= y.done;
    if (before && coin(mma_mode)) do_mma(x);
    w.open.push_back(x);
  });
}
inline void wg_fence() { warp_op("fence", [](Warp&) {}); }
inline void wg_commit() { warp_op("commit", [](Warp& w) { w.groups.push_back(std::move(w.open)); w.open.clear(); }); }
inline void wg_wait(int pending) {
  warp_op("wait", [pending](Warp& w) {
    while ((int)w.groups.size() > pending) { for (auto& x : w.groups[0]) do_mma(x); w.groups.erase(w.groups.begin()); }
  });
}
template <typename T> inline T shfl(T v, int from) {
  static_assert(sizeof(T) <= 8); const int l = me->tid % 32; Warp& w = *me->warp; w.in[l] = 0; memcpy(&w.in[l], &v, sizeof v); w.regs[l][0] = from & 31;
  warp_op("shfl", [](Warp& w) { for (int i = 0; i < 32; ++i) w.out[i] = w.in[w.regs[i][0]]; });
  T r; memcpy(&r, &w.out[l], sizeof r); 
  return r;
}
struct Dim { operator int() const { return 0; } };
struct Tx { struct { operator int() const { return me->tid; } } x; };
struct Bx { struct { operator int() const { return me->block->index; } } x; };
struct Gx { struct { operator int() const { return grid; } } x; };
struct Dx { struct { operator int() const { return 512; } } x; };
template <typename K> inline void entry(K* k) { (*k)(); }
inline std::function<void()> body;
inline void start() { body(); me->finished = true; swapcontext(&me->ctx, &main_ctx); }
template <typename Body> inline void run_blocks(int first, int count, int cluster, int shared, Body b) {
  body = b;
  std::vector<Block*> blocks;
  for (int i = 0; i < count; ++i) {
    Block* k = new Block; k->index = first + i; k->raw.assign(shared + 2048, 0xFF);
    k->smem = (uint8_t*)(((uintptr_t)k->raw.data() + 1023) & ~uintptr_t{1023}); k->cluster_first = i / cluster * cluster; k->cluster_size = cluster; k->all = &blocks;
    k->warps.resize(16); k->fibers.resize(512);
    for (int t = 0; t < 512; ++t) {
      Fiber& f = k->fibers[t]; f.tid = t; f.block = k; f.warp = &k->warps[t / 32]; f.stack.resize(128 << 10);
      getcontext(&f.ctx); f.ctx.uc_stack = {f.stack.data(), 0, f.stack.size()}; f.ctx.uc_link = &main_ctx; makecontext(&f.ctx, start, 0);
    }
    blocks.push_back(k);
  }
  for (auto& n : cluster_bar) n = Named();
  std::vector<std::pair<Block*, int>> order; for (auto* k : blocks) for (int w = 0; w < 16; ++w) order.push_back({k, w});
  size_t left = count * 512; int idle = 0;
  while (left) {
    std::shuffle(order.begin(), order.end(), rng); bool ran = false, skipped = false;
    for (auto& [k, w] : order) {
      if (slow[w / 4] > 1 && rng() % slow[w / 4]) { skipped = true; continue; }
      const int turn = rng() % 32;
      for (int l = 0; l < 32; ++l) {
        Fiber& f = k->fibers[w * 32 + (l + turn) % 32];
        if (f.finished || (f.waits && !f.waits())) continue;
        f.waits = nullptr; me = &f; ran = true; swapcontext(&main_ctx, &f.ctx); if (f.finished) --left;
      }
    }
    if (!ran && !skipped && ++idle > 1) {
      printf("DEADLOCK:\n"); for (auto* k : blocks) for (int w = 0; w < 16; ++w) { auto& f = k->fibers[w * 32]; printf("  block %d warp %d lane 0: %s\n", k->index, w, f.finished ? "finished" : f.where); }
      exit(1);
    }
    if (ran) idle = 0;
  }
  for (auto* k : blocks) { for (auto& n : k->fibers) if (!n.open.empty() || !n.groups.empty()) { printf("copies not waited for, thread %d\n", n.tid); break; } 
    for (auto& [a, b] : k->bars) if (b.pending != b.count) printf("barrier %u left with %d of %d\n", a, b.pending, b.count); delete k; }
}
template <auto KERNEL, typename P> cudaError_t launch(const P& p, int blocks, int threads, int shared, int cluster) {
  grid = blocks; if (threads != 512) abort();
  for (int first = 0; first < blocks; first += cluster) run_blocks(first, cluster, cluster, shared, [&] { KERNEL(p); });
  return cudaSuccess;
}
}  // namespace emu
#define threadIdx emu::Tx()
#define blockIdx emu::Bx()
#define gridDim emu::Gx()
#define blockDim emu::Dx()
template <typename T> T __shfl_sync(unsigned, T v, int from) { return emu::shfl(v, from); }
template <typename T> T __shfl_xor_sync(unsigned, T v, int mask) { return emu::shfl(v, (emu::me->tid % 32) ^ mask); }
template <typename T> T __shfl_up_sync(unsigned, T v, int by) { int l = emu::me->tid % 32; return emu::shfl(v, l >= by ? l - by : l); }
inline unsigned __ballot_sync(unsigned, bool b) {
  const int l = emu::me->tid % 32; auto& w = *emu::me->warp; w.in[l] = b;
  emu::warp_op("ballot", [](emu::Warp& w) { unsigned m = 0; for (int i = 0; i < 32; ++i) m |= unsigned(w.in[i]) << i; for (auto& o : w.out) o = m; });
  return w.out[l];
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  const int l = emu::me->tid % 32; auto& w = *emu::me->warp; w.in[l] = v;
  emu::warp_op("redux", [](emu::Warp& w) { unsigned m = 0; for (int i = 0; i < 32; ++i) m = max(m, unsigned(w.in[i])); for (auto& o : w.out) o = m; });
  return w.out[l];
}
inline void __syncwarp() { emu::warp_op("syncwarp", [](emu::Warp&) {}); }
inline void __syncthreads() { emu::named(0, 512, false); }
inline bool __syncthreads_or(bool b) { return emu::named(0, 512, b); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t x = a | (uint64_t)b << 32; uint32_t r = 0; for (int i = 0; i < 4; ++i) r |= uint32_t(x >> (s >> 4 * i & 7) * 8 & 255) << 8 * i; return r;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
inline uint32_t __vminu2(uint32_t a, uint32_t b) { return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16; }
inline uint32_t __vcmpeq4(uint32_t a, uint32_t b) { uint32_t r = 0; for (int i = 0; i < 4; ++i) if ((a >> 8 * i & 255) == (b >> 8 * i & 255)) r |= 255u << 8 * i; return r; }
inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
inline int atomicAdd(int* a, int b) { int o = *a; *a += b; return o; }
inline size_t __cvta_generic_to_shared(const void* p) { return (const uint8_t*)p - emu::me->block->smem; }
namespace cooperative_groups {
struct cluster_group {
  void sync() const {
    auto& n = emu::cluster_bar[0]; const int all = emu::me->block->cluster_size * 512;
    if (++n.arrived == all) { n.arrived = 0; ++n.generation; return; }
    const uint64_t g = n.generation; emu::Named* q = &n; emu::block_until("cluster", [q, g] { return q->generation != g; });
  }
  template <typename T> T* map_shared_rank(T* p, int r) const {
    auto* b = emu::me->block; return (T*)((uint8_t*)p - b->smem + (*b->all)[b->cluster_first + r]->smem);
  }
};
inline cluster_group this_cluster() { return {}; }
}
