#pragma once
#define EMU 1
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <climits>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>
#include <deque>
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
extern "C" { void* __tsan_get_current_fiber(void); void* __tsan_create_fiber(unsigned); void __tsan_destroy_fiber(void*); void __tsan_switch_to_fiber(void*, unsigned); void __tsan_acquire(void*); void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int); void AnnotateIgnoreReadsEnd(const char*, int); void AnnotateIgnoreWritesBegin(const char*, int); void AnnotateIgnoreWritesEnd(const char*, int); void __tsan_write_range(void*, unsigned long); void __tsan_read_range(void*, unsigned long); }
namespace emu {
struct Ignore { Ignore() { AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0); } ~Ignore() { AnnotateIgnoreReadsEnd("", 0); AnnotateIgnoreWritesEnd("", 0); } };
inline void* main_fiber; inline char run_begin, run_end;
struct Rng { uint64_t s = 1; void seed(uint64_t x) { s = x * 0x9E3779B97F4A7C15ull + 77; (*this)(); (*this)(); } using result_type = uint32_t; static constexpr uint32_t min() { return 0; } static constexpr uint32_t max() { return ~0u; }
  uint32_t operator()() { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return uint32_t(s >> 16); } };
inline Rng rng;
inline int copy_mode = 2;   // 0 at once, 1 as late as possible, 2 random
inline int burst_mode = 0;  // 0: one step of a warp at a time, 1: random bursts, 2: until it blocks
inline bool delay_blocks = false, random_slow = false, poison_random = false;
inline int slow_class = -1, slow_by = 1;  // warps w with class: 0 first half of consumers, 1 second half, 2 producers; by: 1/by to run
inline std::function<void(const char*)> on_fail;
[[noreturn]] inline void fail(const char* what) { if (on_fail) on_fail(what); printf("FAIL %s\n", what); fflush(stdout); exit(3); }
constexpr int kStack = 192 << 10;
inline void* guarded(size_t size, int fill, size_t align = 16) {  // ends at a page that nobody may touch; so does its begin
  size_t pages = (size + align + 4095) / 4096 * 4096; uint8_t* m = (uint8_t*)mmap(0, pages + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) { perror("mmap"); exit(4); }
  mprotect(m, 4096, PROT_NONE); mprotect(m + 4096 + pages, 4096, PROT_NONE);
  memset(m + 4096, fill, pages);
  return m + 4096 + pages - (size + align - 1) / align * align;
}
inline void unguard(void* p, size_t size, size_t align = 16) { size_t pages = (size + align + 4095) / 4096 * 4096; uint8_t* end = (uint8_t*)p + (size + align - 1) / align * align; munmap(end - pages - 4096, pages + 8192); }
struct Copy { uint8_t* to; const uint8_t* from; int bytes, size; bool done; };
struct MBar { uint64_t sync[2]; int count = 0, pending = 0; uint32_t phase = 0; };
struct Arrive { std::vector<Copy> copies; MBar* bar; };
struct Warp; struct Block;
enum Kind { kRun, kGeneration, kParity };
struct Fiber {
  void* sp = nullptr; void* tsan = nullptr; int tid; Block* block; Warp* warp; bool finished = false;
  Kind kind = kRun; const uint64_t* gen = nullptr; uint64_t was = 0; const MBar* bar = nullptr; uint32_t parity = 0; const char* where = "";
  std::vector<Copy> open; std::deque<Arrive> late; uint8_t* stack; uint64_t cluster_arrived = 0, cluster_waited = 0; int cluster_ops = 0;
  bool ready() const { return kind == kRun || (kind == kGeneration ? *gen != was : (bar->phase & 1) != parity); }
};
struct Warp { uint64_t sync[2]; int arrived = 0; uint64_t generation = 0; const char* op = ""; uint64_t in[32]; uint64_t out[32]; uint32_t from[32]; const void *pa[32]; void* pd[32]; uint32_t b[32][2]; int slow = 1; int live = 32; };
struct Named { uint64_t sync[2]; int arrived = 0, threads = 0; uint64_t generation = 0; bool any = false, result = false; };
struct Block {
  int index; uint8_t* smem; int size; std::unordered_map<uint32_t, MBar> bars; Named named[16]; Warp warps[12];
  Fiber fibers[384]; int delay = 0, left = 384; bool started = false;
};
inline Fiber* me; inline void* main_sp; inline int grid, threads_of_block = 384; inline std::vector<Block*>* cluster_blocks;
inline struct { uint64_t phase = 1; int arrived = 0; uint64_t sync[2]; } cb;   // cluster barrier: a thread has arrived for `phase`
inline uint64_t late_total = 0;
extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void leave() { __tsan_switch_to_fiber(main_fiber, 1); emu_switch(&me->sp, main_sp); }
inline void until(const char* where, const uint64_t* gen, uint64_t was) { me->kind = kGeneration; me->gen = gen; me->was = was; me->where = where; leave(); }
// all 32 lanes meet; the last runs `f`
template <typename F> inline void warp_op(const char* where, F f) {
  Ignore ignore; Warp& w = *me->warp; const bool orders = !strcmp(where, "syncwarp"); void* const sync = &w.sync[w.generation & 1];
  if (orders) __tsan_release(sync);
  if (w.arrived == 0) w.op = where; else if (w.op != where && strcmp(w.op, where)) { static char t[200]; snprintf(t, 200, "lanes of a warp diverge: %s and %s", w.op, where); fail(t); }
  if (++w.arrived == 32) { w.arrived = 0; f(w); ++w.generation; if (orders) __tsan_acquire(sync); return; }
  until(where, &w.generation, w.generation); if (orders) __tsan_acquire(sync);
}
inline void do_copy(Copy& c) { if (c.done) return; c.done = true; if (c.bytes) memcpy(c.to, c.from, c.bytes); if (c.bytes < c.size) memset(c.to + c.bytes, 0, c.size - c.bytes); }
inline uint8_t* at(uint32_t a) {
  if (a >> 24) fail("an address of the cluster used as one of the block");
  return me->block->smem + a;
}
inline void copy(uint32_t to, const void* from, int bytes, int size) {
  __tsan_write_range(me->block->smem + to, size); Ignore ignore;
  if (to % size || (uintptr_t)from % size) fail("misaligned copy");
  if (to + size > (unsigned)me->block->size) fail("copy out of shared memory");
  if (bytes != 0 && bytes != size) fail("odd copy");
  Copy c{at(to), (const uint8_t*)from, bytes, size, false};
  if (copy_mode == 0 || (copy_mode == 2 && (rng() & 1))) do_copy(c); else memset(c.to, 0xFF, size);
  me->open.push_back(c);
}
inline MBar& bar(uint32_t a) { if (a % 8 || a >> 24) fail("misaligned mbarrier"); return me->block->bars[a]; }
inline void arrive(MBar& b) { if (!b.count) fail("mbarrier not initialised"); if (--b.pending == 0) b.pending = b.count, ++b.phase; }
inline void bar_init(uint32_t a, int n) { Ignore ignore; MBar& b = bar(a); b.count = b.pending = n; b.phase = 0; }
inline void bar_arrive(uint32_t a) { Ignore ignore; MBar& b = bar(a); __tsan_release(&b.sync[b.phase & 1]); arrive(b); }
inline void bar_wait(uint32_t a, uint32_t parity) {
  Ignore ignore; MBar* b = &bar(a); if (!b->count) fail("mbarrier not initialised");
  if ((b->phase & 1) != parity) { __tsan_acquire(&b->sync[parity]); return; }
  me->kind = kParity; me->bar = b; me->parity = parity; me->where = "mbarrier"; leave(); __tsan_acquire(&b->sync[parity]);
}
inline void copies_arrive(uint32_t a) {
  Ignore ignore; Arrive x{std::move(me->open), &bar(a)}; me->open.clear(); __tsan_release(&x.bar->sync[x.bar->phase & 1]);
  bool done = me->late.empty(); for (auto& c : x.copies) done &= c.done;
  if (copy_mode != 1 && done) { arrive(*x.bar); return; }
  me->late.push_back(std::move(x)); ++late_total;
}
inline void land(Fiber& f) {  // the oldest copies of this thread
  Arrive& x = f.late.front(); for (auto& c : x.copies) do_copy(c); arrive(*x.bar); f.late.pop_front(); --late_total;
}
inline bool named(int id, int threads, bool mine) {
  Ignore ignore; Named& n = me->block->named[id]; void* const sync = &n.sync[n.generation & 1]; __tsan_release(sync);
  if (n.arrived == 0) n.threads = threads; else if (n.threads != threads) fail("a named barrier of different sizes");
  n.any |= mine;
  if (++n.arrived == threads) { n.arrived = 0; n.result = n.any; n.any = false; ++n.generation; __tsan_acquire(sync); return n.result; }
  until(id == 0 ? "syncthreads" : id == 1 ? "named 1" : id == 2 ? "named 2" : "named 3", &n.generation, n.generation);
  __tsan_acquire(sync); return n.result;
}
// cluster barrier
inline int cluster_threads() { return cluster_blocks->size() * threads_of_block; }
inline void cluster_check() {
  // complete when all threads that have not exited have arrived
  int need = 0; static bool any_exited; (void)any_exited;
  if (cb.arrived == 0) return;
  int gone = 0; for (auto* k : *cluster_blocks) if (k->left < threads_of_block) for (auto& f : k->fibers) gone += f.finished && f.cluster_arrived != cb.phase;
  if (cb.arrived + gone == cluster_threads()) cb.arrived = 0, ++cb.phase;
}
inline void cluster_arrive(bool relaxed) {
  Ignore ignore; if (!relaxed) __tsan_release(&cb.sync[cb.phase & 1]);
  warp_op("cluster arrive", [](Warp&) {});
  if (me->cluster_arrived != me->cluster_waited) fail("cluster barrier: arrives twice without a wait");
  if (me->cluster_arrived == cb.phase) fail("cluster barrier: arrives twice in a phase");
  me->cluster_arrived = cb.phase; ++cb.arrived; ++me->cluster_ops; cluster_check();
}
inline void cluster_wait() {
  Ignore ignore;
  warp_op("cluster wait", [](Warp&) {});
  if (me->cluster_arrived == me->cluster_waited) fail("cluster barrier: waits without having arrived");
  me->cluster_waited = me->cluster_arrived;
  while (cb.phase == me->cluster_arrived) until("cluster wait", &cb.phase, cb.phase);
  __tsan_acquire(&cb.sync[me->cluster_arrived & 1]);
}
inline uint32_t of_rank(uint32_t a, int rank) { if (a >> 24 || rank < 0 || rank >= (int)cluster_blocks->size()) fail("mapa of a rank that is not"); return a | (rank + 1) << 24; }
inline uint8_t* remote(uint32_t a, int size) {
  Ignore ignore;
  if (!(a >> 24)) fail("an address of the block used as one of the cluster");
  Block* b = (*cluster_blocks)[(a >> 24) - 1]; a &= 0xFFFFFF;
  if (!b->started) fail("shared memory of a block that has not begun"); if (!b->left) fail("shared memory of a block that has left");
  if (a % size || a + size > (unsigned)b->size) fail("remote access misaligned or out of shared memory");
  return b->smem + a;
}
inline float half_table[65536]; inline bool half_ready = [] { for (int i = 0; i < 65536; ++i) { __half_raw r; r.x = i; half_table[i] = __half2float(__half(r)); } return true; }();
inline float half(uint16_t h) { return half_table[h]; }
inline uint16_t to_half(float f) { return __half_as_ushort(__float2half_rn(f)); }
inline float bf(uint16_t h) { uint32_t u = h << 16; float f; memcpy(&f, &u, 4); return f; }
inline float e4m3_slow(uint8_t v) { int e = v >> 3 & 15, m = v & 7; float x = e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9); return v & 0x80 ? -x : x; }
inline float e4m3_table[256]; inline uint16_t e4m3_half[256];
inline bool e4m3_ready = [] { for (int i = 0; i < 256; ++i) { e4m3_table[i] = e4m3_slow(i); e4m3_half[i] = to_half(e4m3_table[i]); } return true; }();
inline float e4m3(uint8_t v) { return e4m3_table[v]; }
inline uint32_t e4m3x2(uint32_t v) { return e4m3_half[v & 255] | (uint32_t)e4m3_half[v >> 8 & 255] << 16; }
inline uint16_t to_bf(float f) { __nv_bfloat16 b = __float2bfloat16_rn(f); uint16_t u; memcpy(&u, &b, 2); return u; }
inline uint32_t mul_half2(uint32_t x, uint32_t y) { return to_half(half(x) * half(y)) | (uint32_t)to_half(half(x >> 16) * half(y >> 16)) << 16; }
inline float ex2(float x) { if (fabsf(x) < 1.17549435e-38f) x = 0; float y = exp2f(x); return y < 1.17549435e-38f ? 0.f : y; }
inline uint64_t mmas = 0;
template <bool HALF> inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Ignore ignore; const int l = me->tid % 32; Warp& w = *me->warp; w.pa[l] = a; w.pd[l] = c; w.b[l][0] = b0, w.b[l][1] = b1;
  warp_op(HALF ? "mma f16" : "mma bf16", [](Warp& w) {
    ++mmas;
    float A[16][16]; alignas(32) float B[16][8], C[16][8];
    const auto val = [&](uint16_t h) { return HALF ? half(h) : bf(h); };
    for (int l = 0; l < 32; ++l) {
      const uint32_t* a = (const uint32_t*)w.pa[l]; const float* c = (const float*)w.pd[l]; const int g = l / 4, t = l % 4;
      for (int i = 0; i < 2; ++i) {
        A[g][2 * t + i] = val(a[0] >> 16 * i); A[g + 8][2 * t + i] = val(a[1] >> 16 * i);
        A[g][2 * t + 8 + i] = val(a[2] >> 16 * i); A[g + 8][2 * t + 8 + i] = val(a[3] >> 16 * i);
        B[2 * t + i][g] = val(w.b[l][0] >> 16 * i); B[2 * t + 8 + i][g] = val(w.b[l][1] >> 16 * i);
        C[g][2 * t + i] = c[i]; C[g + 8][2 * t + i] = c[2 + i];
      }
    }
    for (int m = 0; m < 16; ++m) for (int k = 0; k < 16; ++k) for (int n = 0; n < 8; ++n) C[m][n] += A[m][k] * B[k][n];
    for (int l = 0; l < 32; ++l) { float* c = (float*)w.pd[l]; const int g = l / 4, t = l % 4; for (int i = 0; i < 2; ++i) c[i] = C[g][2 * t + i], c[2 + i] = C[g + 8][2 * t + i]; }
  });
}
template <typename T> inline T shfl(T v, int from) {
  Ignore ignore;
  static_assert(sizeof(T) <= 8); const int l = me->tid % 32; Warp& w = *me->warp; w.in[l] = 0; memcpy(&w.in[l], &v, sizeof v); w.from[l] = from & 31;
  warp_op("shfl", [](Warp& w) { for (int i = 0; i < 32; ++i) w.out[i] = w.in[w.from[i]]; });
  T r; memcpy(&r, &w.out[l], sizeof r); return r;
}
struct Tx { struct { operator int() const { return me->tid; } } x; };
struct Bx { struct { operator int() const { return me->block->index; } } x; };
struct Gx { struct { operator int() const { return grid; } } x; };
struct Dx { struct { operator int() const { return threads_of_block; } } x; };
inline std::function<void()> body;
inline void start() { __tsan_acquire(&run_begin); body(); __tsan_release(&run_end); Ignore* ig = new Ignore; me->finished = true; if (me->cluster_arrived != me->cluster_waited) fail("a thread leaves without its last cluster wait"); --me->block->left; cluster_check(); delete ig; for (;;) leave(); }
inline std::vector<uint8_t*> stacks;
inline void run_cluster(int first, int cluster, int shared) {
  Ignore ignore; main_fiber = __tsan_get_current_fiber();
  std::vector<Block*> blocks; cluster_blocks = &blocks; cb.phase = 1; cb.arrived = 0;
  size_t s = 0;
  for (int i = 0; i < cluster; ++i) {
    Block* k = new Block; k->index = first + i; k->size = shared; k->smem = (uint8_t*)guarded(shared, 0xFF, 128);
    if (poison_random) for (int j = 0; j < shared; j += 4) { uint32_t x = rng(); memcpy(k->smem + j, &x, 4); }
    if (delay_blocks) k->delay = rng() % 3 ? 0 : rng() % 400;
    for (int w = 0; w < 12; ++w) { const int cl = w < 4 ? 0 : w < 8 ? 1 : 2; k->warps[w].slow = cl == slow_class ? slow_by : random_slow ? (rng() % 3 ? 1 : 1 + rng() % 40) : 1; }
    for (int t = 0; t < 384; ++t, ++s) {
      if (s == stacks.size()) { void* m = mmap(0, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); if (m == MAP_FAILED) { perror("stack"); exit(4); } stacks.push_back((uint8_t*)m); }
      Fiber& f = k->fibers[t]; f.tid = t; f.block = k; f.warp = &k->warps[t / 32]; f.stack = stacks[s]; f.tsan = __tsan_create_fiber(0);
      void** sp = (void**)(f.stack + kStack - 64); sp[0] = (void*)start; sp[1] = nullptr; f.sp = sp - 6; for (int i = 1; i <= 6; ++i) sp[-i] = nullptr;
    }
    blocks.push_back(k);
  }
  __tsan_release(&run_begin);
  std::vector<std::pair<Block*, int>> order; for (auto* k : blocks) for (int w = 0; w < 12; ++w) order.push_back({k, w});
  size_t left = cluster * 384; int idle = 0; bool force = false;
  const auto land_one = [&] {  // of a random thread
    for (size_t n = order.size(), i = rng() % n, j = 0; j < n; ++j) { auto [k, w] = order[(i + j) % n]; const int o = rng() % 32; for (int l = 0; l < 32; ++l) { Fiber& f = k->fibers[w * 32 + (l + o) % 32]; if (!f.late.empty()) { land(f); return true; } } }
    return false;
  };
  while (left) {
    for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[rng() % (i + 1)]);
    bool ran = false, skipped = false;
    for (auto [k, w] : order) {
      if (k->delay > 0) { if (w == 0) --k->delay; skipped = true; continue; }
      Warp& warp = k->warps[w];
      if (!warp.live) continue;
      if (force ? ran : warp.slow > 1 && rng() % warp.slow) { skipped = true; continue; }
      int burst = burst_mode == 0 ? 1 : burst_mode == 1 ? 1 + rng() % 60 : 1 << 30;
      for (bool moved = true; moved && burst-- > 0;) {
        moved = false; const int turn = rng() % 32;
        for (int l = 0; l < 32; ++l) {
          Fiber& f = k->fibers[w * 32 + (l + turn) % 32];
          if (f.finished || !f.ready()) continue;
          f.kind = kRun; me = &f; ran = moved = true; k->started = true;
          __tsan_switch_to_fiber(f.tsan, 1); emu_switch(&main_sp, f.sp);
          if (f.finished) { --left; --warp.live; }
          else if (copy_mode == 2 && !f.late.empty() && rng() % 8 == 0) land(f);
        }
      }
    }
    if (late_total && copy_mode == 2) for (int n = rng() % 4 == 0 ? rng() % 64 : 0; n-- > 0 && late_total;) land_one();
    if (!ran && skipped && !force) { force = true; continue; }
    const bool forced = force; force = false;
    if (!ran && forced) { bool any = false; for (auto* k : blocks) if (k->delay > 0) { any = true; k->delay = 0; break; } if (any) continue; }
    if (!ran && (forced || !skipped)) {
      if (late_total) { if (copy_mode == 1) land_one(); else for (int i = 0; i < 32 && late_total; ++i) land_one(); idle = 0; continue; }
      if (++idle > 1) { printf("DEADLOCK:\n"); for (auto* k : blocks) for (int w = 0; w < 12; ++w) { auto& f = k->fibers[w * 32]; printf("  block %d warp %d lane 0: %s\n", k->index, w, f.finished ? "finished" : f.where); } fail("deadlock"); }
    } else if (ran) idle = 0;
  }
  __tsan_acquire(&run_end);
  if (late_total) fail("copies on their way when the block has left");
  const int ops = blocks[0]->fibers[0].cluster_ops;
  for (auto* k : blocks) {
    for (auto& f : k->fibers) { __tsan_destroy_fiber(f.tsan); if (!f.open.empty()) fail("copies not waited for"); if (f.cluster_ops != ops) fail("threads arrived at the cluster barrier a different number of times"); }
    for (auto& [a, b] : k->bars) if (b.pending != b.count) fail("an mbarrier is left in the middle of a phase");
    for (auto& n : k->named) if (n.arrived) fail("a named barrier is left in the middle");
    unguard(k->smem, shared, 128); delete k;
  }
}
inline uint64_t launches = 0; inline int last_cluster = 0, last_grid = 0;
template <auto KERNEL, typename P> cudaError_t launch(const P& p, int blocks, int threads, int shared, int cluster) {
  grid = blocks; last_grid = blocks; last_cluster = cluster; ++launches; if (threads != 384) fail("threads"); if (shared > 227 * 1024) fail("shared memory"); if (cluster < 1 || cluster > 16 || blocks < 1 || blocks % cluster) fail("grid");
  body = [&] { KERNEL(p); };
  for (int first = 0; first < blocks; first += cluster) run_cluster(first, cluster, shared);
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
  emu::Ignore ignore;
  const int l = emu::me->tid % 32; auto& w = *emu::me->warp; w.in[l] = b;
  emu::warp_op("ballot", [](emu::Warp& w) { unsigned m = 0; for (int i = 0; i < 32; ++i) m |= unsigned(w.in[i]) << i; for (auto& o : w.out) o = m; });
  return w.out[l];
}
inline void __syncwarp() { emu::warp_op("syncwarp", [](emu::Warp&) {}); }
inline void __syncthreads() { emu::named(0, 384, false); }
inline bool __syncthreads_or(bool b) { return emu::named(0, 384, b); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  // a set top bit of a selector repeats the sign of that byte
  uint64_t x = a | (uint64_t)b << 32; uint32_t r = 0; for (int i = 0; i < 4; ++i) { uint32_t v = x >> (s >> 4 * i & 7) * 8 & 255; if (s >> 4 * i & 8) v = v & 128 ? 255 : 0; r |= v << 8 * i; } return r;
}
inline uint32_t __vcmpeq4(uint32_t a, uint32_t b) { uint32_t r = 0; for (int i = 0; i < 4; ++i) if ((a >> 8 * i & 255) == (b >> 8 * i & 255)) r |= 255u << 8 * i; return r; }
inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
inline int atomicAdd(int* a, int b) { return __atomic_fetch_add(a, b, __ATOMIC_RELAXED); }
inline size_t __cvta_generic_to_shared(const void* p) {
  const ptrdiff_t d = (const uint8_t*)p - emu::me->block->smem; if (d < 0 || d >= emu::me->block->size) emu::fail("not an address of this block's shared memory"); return d;
}
