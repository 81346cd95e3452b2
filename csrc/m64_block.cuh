// What a block of sparse_mla_m64.cu works on and with: items, products, and shared memory.
#pragma once

#include <cuda.h>

#include "turns.cuh"

namespace mla {
namespace m64 {

constexpr int kHeads = 64;
constexpr int kBlockThreads = 512;

#define MLA_D64                                                                                                     \
  MLA_D32                                                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"

// Products of one k-step. Operands are fp16 if HALF, and else BF16; k, v and p are in shared memory.

// s (64 heads x 64 keys) = q (64 x 16, in registers) times k (64 x 16), plus s if ADD.
template <bool HALF, bool ADD>
__device__ __forceinline__ void score_product(float (&s)[32], const uint32_t (&q)[4], uint64_t k) {
#define MLA_SCORE_PRODUCT(type)                                                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                 \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" MLA_D32  \
               "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"                                 \
               : MLA_F32(s, 0) : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "n"(ADD))
  if constexpr (HALF)
    MLA_SCORE_PRODUCT("f16");
  else
    MLA_SCORE_PRODUCT("bf16");
#undef MLA_SCORE_PRODUCT
}
// s += q k, with q in shared memory.
template <bool HALF>
__device__ __forceinline__ void score_product(float (&s)[32], uint64_t q, uint64_t k) {
#define MLA_SCORE_PRODUCT(type)                                                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" MLA_D32 "}, %32, %33, 1, 1, 1, 0, 0;" \
               : MLA_F32(s, 0) : "l"(q), "l"(k))
  if constexpr (HALF)
    MLA_SCORE_PRODUCT("f16");
  else
    MLA_SCORE_PRODUCT("bf16");
#undef MLA_SCORE_PRODUCT
}
// o (64 heads x 128 dimensions, from o[I] on) += p (64 x 16 keys) times v (16 keys x 128).
template <bool HALF, int I>
__device__ __forceinline__ void output_product(float (&o)[128], uint64_t p, uint64_t v) {
#define MLA_OUTPUT_PRODUCT(type)                                                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" MLA_D64 "}, %64, %65, 1, 1, 1, 0, 1;" \
               : MLA_F32(o, I), MLA_F32(o, I + 32) : "l"(p), "l"(v))
  if constexpr (HALF)
    MLA_OUTPUT_PRODUCT("f16");
  else
    MLA_OUTPUT_PRODUCT("bf16");
#undef MLA_OUTPUT_PRODUCT
}

// Of scores and outputs a thread has two rows (heads), g and g + 8 of its warp's 16: s[j] is of row j / 2 % 2 of these.
// The four lanes of a row share it. These are the maximum and the sum over them.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// Missing rows of a tile of 64 keys, whose bits are not set, get no weight.
__device__ __forceinline__ void drop_missing(float (&s)[32], uint32_t row_mask0, uint32_t row_mask1, int t) {
  if ((row_mask0 & row_mask1) == ~0u) return;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int key = j / 4 * 8 + 2 * t + j % 2;
    if (!((key < 32 ? row_mask0 : row_mask1) >> (key % 32) & 1)) s[j] = -INFINITY;
  }
}
// The power of two that a row of q is divided by, so that fp16 holds it, and its inverse. `largest` has the larger
// magnitudes of what this lane has of the row.
__device__ __forceinline__ float2 power_of_q(uint32_t largest) {
  largest &= 0x7FFF7FFF;
  largest = max(largest & 0xFFFF, largest >> 16);
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  return power_below(largest);
}
// A power of two as a pair of BF16. The low half of its float32 is 0.
__device__ __forceinline__ uint32_t bf16_pair(float power) {
  return __float_as_uint(power) >> 16 | __float_as_uint(power);
}

// The barrier's phase is complete when so many bytes of copies are there, besides all that arrive.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Operands are blocks of 64 rows by 64 dimensions (or keys), 8 KB: rows of 128 bytes, swizzled.
constexpr int kBlockBytes = 64 * 128;
constexpr int kTileBytes = kDim / 64 * kBlockBytes;

// Steps of 16 dimensions: q of the first half stays in registers, q of the second half goes into shared memory.
constexpr int kRegisterSteps = 16, kSteps = 32;

// s = q k^T of all dimensions, 64 heads and the 64 keys of a tile. `second_q` is where q of the first half would begin.
template <bool HALF>
__device__ __forceinline__ void score_products(float (&s)[32], const uint32_t (&q)[kRegisterSteps][4],
                                               uint64_t second_q, uint64_t k) {
  score_product<HALF, false>(s, q[0], k);
#pragma unroll
  for (int step = 1; step < kSteps; ++step) {
    const int at_step = (step / 4 * kBlockBytes + step % 4 * 32) >> 4;
    if (step < kRegisterSteps)
      score_product<HALF, true>(s, q[step], k + at_step);
    else
      score_product<HALF>(s, second_q + at_step, k + at_step);
  }
}

// A row's E4M3 values, by one instruction; its bytes are counted by the barrier.
template <int BYTES, bool EVICT_FIRST>
__device__ __forceinline__ void copy_row(uint32_t to, const uint8_t* from, uint32_t barrier) {
  if constexpr (EVICT_FIRST)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "n"(BYTES), "r"(barrier), "l"(evict_first()) : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "n"(BYTES), "r"(barrier) : "memory");
}

template <bool FP8>
struct Layout {
  static constexpr int kSecondQ = 2 * kTileBytes;                   // second half of the dimensions
  static constexpr int kRaw = kSecondQ + kTileBytes / 2;            // [kTile] rows, if E4M3
  static constexpr int kWeights = kRaw + (FP8 ? kTile * kDim : 0);  // [2]
  static constexpr int kStaging = kWeights + 2 * kBlockBytes;       // [8 warps][16 heads][64 dimensions], outputs
  static constexpr int kMaximum = kStaging + 8 * 16 * 128;          // [2 weights][kHeads]
  static constexpr int kFactor = kMaximum + 2 * kHeads * 4;         // [items, even and odd][kHeads]
  static constexpr int kKinds = kFactor + 2 * kHeads * 4;           // [4 entries]
  static constexpr int kRowMasks = kKinds + 4 * 4;                  // [4 entries]: a bit for every row
  static constexpr int kTurns = kRowMasks + 4 * 8;
  static constexpr int kBarriers = kTurns + Turns::kListBytes;
  static constexpr int kTotal = kBarriers + 16 * 8;
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");
};

// q or outputs as a tensor of dimensions, heads and tokens: 16 heads of 64 dimensions are one copy, whose layout in
// shared memory is that of an operand. Heads that do not exist come as zeros, and are not written. False of strides (in
// elements) that such a tensor cannot have.
inline bool map_heads(CUtensorMap& to, const void* at, int dims, int heads, int tokens, int64_t token_stride,
                      int64_t head_stride) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  // Each dimension holds the one before, padded: others are not said to be possible.
  if (!encode || head_stride < dims || token_stride % head_stride || token_stride / head_stride < heads) return false;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(dims), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(head_stride) * 2, static_cast<cuuint64_t>(token_stride) * 2};
  const cuuint32_t box[] = {64, 16, 1}, steps[] = {1, 1, 1};
  return encode(&to, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(at), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

struct Call : Params {
  CUtensorMap q_map, out_map;
  bool is_mapped;  // else threads copy both: other rows, E4M3 q, or strides that such a tensor cannot have

  explicit Call(const SparseMla& call) : Params(call, kHeads, 1), q_map{}, out_map{}, is_mapped(false) {
    if (call.q_is_fp8 || !call.rows_are_fp8) return;
    is_mapped = map_heads(q_map, call.q, kDim, call.heads, call.tokens, call.q_token_stride, call.q_head_stride) &&
                map_heads(out_map, call.out, kDim, call.heads, call.tokens, call.out_token_stride,
                          call.out_head_stride);
  }
};

// 64 dimensions of 16 heads from `head` on; their bytes are counted by the barrier.
template <bool EVICT_FIRST>
__device__ __forceinline__ void copy_q(uint32_t to, const CUtensorMap& q, int dim, int head, int token,
                                       uint32_t barrier) {
  if constexpr (EVICT_FIRST)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(&q), "r"(dim), "r"(head), "r"(token), "r"(barrier),
        "l"(evict_first()) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to), "l"(&q), "r"(dim), "r"(head), "r"(token), "r"(barrier) : "memory");
}

// The same of outputs, from shared memory, and the wait until all that this thread has stored so have been read there.
__device__ __forceinline__ void store_outputs(const CUtensorMap& out, int dim, int head, int token, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(&out), "r"(dim), "r"(head), "r"(token), "r"(from) : "memory");
}
__device__ __forceinline__ void tensor_stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Lengths of an item's token, asked for long before they are needed: `visible`, then `topk`.
struct LaneLengths : LanePair {
  __device__ __forceinline__ LaneLengths(const Params& p, int i, int lane)
      : LanePair{(lane & 1 ? p.topk_lens : p.visible)[min(i, p.items - 1) >> p.head_blocks - 1]} {}
};

// 64 heads of a token. There are 128 heads at most, so head_blocks is 1 or 2, and nothing need be divided.
struct Item {
  int64_t token;
  int head0, window, keys, tiles;

  __device__ __forceinline__ Item(const Params& p, int i, const LaneLengths& lengths) {
    *this = Item(p, i, lengths.even(), lengths.odd());
  }
  __device__ __forceinline__ Item(const Params& p, int i, int visible, int topk) {
    token = i >> p.head_blocks - 1, head0 = (i & p.head_blocks - 1) * kHeads;
    window = max(0, min(visible, kWindow));
    keys = window + (visible > 0 ? max(kWindow, min(topk, p.width)) - kWindow : 0);
    tiles = (keys + kTile - 1) / kTile;
  }
};

// An entry of the ring is q of an item, or one of the tiles that follow it; entry i is in slot i % 2.
enum EntryKind { kEnd, kQ, kKeys };

// What lies in shared memory.
template <bool FP8>
struct Storage : Thread<Params> {
  using L = Layout<FP8>;
  const Call& call;
  const Turns turns;

  __device__ __forceinline__ uint32_t barrier(int i) const { return base + L::kBarriers + i * 8; }
  __device__ __forceinline__ uint32_t full(int slot) const { return barrier(slot); }  // with a tile
  // Of a quarter of a slot (BF16) or of the rows on their way (E4M3), 16 keys each.
  __device__ __forceinline__ uint32_t empty(int slot, int quarter) const { return barrier(2 + slot * 4 + quarter); }
  __device__ __forceinline__ uint32_t raw_full(int quarter) const { return barrier(2 + quarter); }
  __device__ __forceinline__ uint32_t raw_empty(int quarter) const { return barrier(6 + quarter); }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(10); }
  __device__ __forceinline__ uint32_t q_read() const { return barrier(11); }
  // Of the weights of a tile: there, and used.
  __device__ __forceinline__ uint32_t ready(int buffer) const { return barrier(12 + buffer); }
  __device__ __forceinline__ uint32_t used(int buffer) const { return barrier(14 + buffer); }

  __device__ __forceinline__ void init() const {
    constexpr int kFetched = 128 + 4;
    for (int i = 0; i < 2; ++i) barrier_init(full(i), FP8 ? 256 : kFetched);
    for (int i = 0; i < 4; ++i)
      if (FP8)
        barrier_init(raw_full(i), 32), barrier_init(raw_empty(i), 256);
      else
        barrier_init(empty(0, i), 256), barrier_init(empty(1, i), 256);
    barrier_init(q_full(), kFetched), barrier_init(q_read(), 128);
    for (int i = 0; i < 2; ++i) barrier_init(ready(i), 128), barrier_init(used(i), 256);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

}  // namespace m64
}  // namespace mla
