// Sparse MLA over full-width rows for Hopper, 64 heads a block: docs/sm90-sparse-mla.md.
//
// Heads on M, S = Q K^T and O = P V. One warpgroup makes scores and weights of one tile of 64 keys after another, with
// half of q in registers. Two multiply weights by rows, 256 dimensions each, and widen E4M3 rows to fp16. The fourth
// fetches rows, and q, into a ring of two slots. So nobody does two things in turns, and the next item's q comes like
// any tile.

#include <cuda.h>

#include "sm90_wgmma.cuh"

namespace mla {
namespace m64 {

constexpr int kHeads = 64;
constexpr int kBlockThreads = 512;

#define MLA_D64                                                                                                     \
  MLA_D32                                                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"

// s (64 heads x 64 keys) = q (64 x 16, in registers) times k (64 x 16), plus s if ADD.
template <bool HALF, bool ADD>
__device__ __forceinline__ void score_product(float (&s)[32], const uint32_t (&q)[4], uint64_t k) {
  if constexpr (HALF)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" MLA_D32
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
                 : MLA_F32(s, 0) : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "n"(ADD));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MLA_D32
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
                 : MLA_F32(s, 0) : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "n"(ADD));
}
// The same with q in shared memory.
template <bool HALF>
__device__ __forceinline__ void score_product(float (&s)[32], uint64_t q, uint64_t k) {
  if constexpr (HALF)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" MLA_D32 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : MLA_F32(s, 0) : "l"(q), "l"(k));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MLA_D32 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : MLA_F32(s, 0) : "l"(q), "l"(k));
}
// o (64 heads x 128 dimensions, from o[I]) += p (64 x 16 keys) times v (16 keys x 128).
template <bool HALF, int I>
__device__ __forceinline__ void output_product(float (&o)[128], uint64_t p, uint64_t v) {
  if constexpr (HALF)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" MLA_D64 "}, %64, %65, 1, 1, 1, 0, 1;"
                 : MLA_F32(o, I), MLA_F32(o, I + 32) : "l"(p), "l"(v));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MLA_D64 "}, %64, %65, 1, 1, 1, 0, 1;"
                 : MLA_F32(o, I), MLA_F32(o, I + 32) : "l"(p), "l"(v));
}

// The barrier's phase is complete when so many bytes of copies are there, besides all that arrive.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Operands are blocks of 64 rows by 64 dimensions (or keys), 8 KB: rows of 128 bytes, swizzled.
constexpr int kBlockBytes = 64 * 128;
constexpr int kTileBytes = kDim / 64 * kBlockBytes;

// A row of E4M3, by one instruction; its bytes are counted by the barrier.
template <bool FIRST>
__device__ __forceinline__ void copy_row(uint32_t to, const uint8_t* from, uint32_t barrier) {
  if constexpr (FIRST)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "n"(kDim), "r"(barrier), "l"(evict_first()) : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "n"(kDim), "r"(barrier) : "memory");
}

template <bool FP8>
struct Layout {
  static constexpr int kTerms = FP8 ? 1 : 2;  // BF16 weights come as high and low part
  static constexpr int kSecondQ = 2 * kTileBytes;                     // second half of the dimensions
  static constexpr int kRaw = kSecondQ + kTileBytes / 2;              // [kTile] rows, if E4M3
  static constexpr int kWeights = kRaw + (FP8 ? kTile * kDim : 0);    // [2][kTerms]
  static constexpr int kStage = kWeights + 2 * kTerms * kBlockBytes;  // [8 warps][16 heads][64 dimensions]
  static constexpr int kMaximum = kStage + 8 * 16 * 128;              // [2 weights][kHeads]
  static constexpr int kFactor = kMaximum + 2 * kHeads * 4;           // [items, even and odd][kHeads]
  static constexpr int kKind = kFactor + 2 * kHeads * 4;              // [4 entries]
  static constexpr int kThere = kKind + 4 * 4;                        // [4 entries]: a bit for every row
  static constexpr int kBarriers = kThere + 4 * 8;
  static constexpr int kTotal = kBarriers + 16 * 8;
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");
};

// A call, and q and outputs as tensors of dimensions, heads and tokens: 16 heads of 64 dimensions are one copy, whose
// layout in shared memory is that of an operand. Heads that do not exist come as zeros, and are not written.
struct Call : Params {
  CUtensorMap q_map, out_map;
  bool is_mapped;  // else threads copy both: other rows, E4M3 q, or strides that such a tensor cannot have

  explicit Call(const SparseMla& call) : Params(call, kHeads, 1), q_map{}, out_map{}, is_mapped(false) {
    if (call.q_is_fp8 || !call.rows_are_fp8) return;
    static const auto encode = [] {
      void* function = nullptr;
      cudaDriverEntryPointQueryResult found;
      if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
              cudaSuccess ||
          found != cudaDriverEntryPointSuccess)
        function = nullptr;
      return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const auto map = [&](CUtensorMap& to, const void* at, int64_t token_stride, int64_t head_stride) {
      // Each dimension holds the one before, padded: others are not said to be possible.
      if (head_stride < kDim || token_stride % head_stride || token_stride / head_stride < call.heads) return false;
      const cuuint64_t sizes[] = {kDim, static_cast<cuuint64_t>(call.heads), static_cast<cuuint64_t>(call.tokens)};
      const cuuint64_t strides[] = {static_cast<cuuint64_t>(head_stride) * 2,
                                    static_cast<cuuint64_t>(token_stride) * 2};
      const cuuint32_t box[] = {64, 16, 1}, steps[] = {1, 1, 1};
      return encode(&to, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(at), sizes, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    };
    is_mapped = encode && map(q_map, call.q, call.q_token_stride, call.q_head_stride) &&
                map(out_map, call.out, call.out_token_stride, call.out_head_stride);
  }
};

// 64 dimensions of 16 heads from `head` on; their bytes are counted by the barrier.
template <bool FIRST>
__device__ __forceinline__ void copy_q(uint32_t to, const CUtensorMap& q, int dim, int head, int token,
                                       uint32_t barrier) {
  if constexpr (FIRST)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(&q), "r"(dim), "r"(head), "r"(token), "r"(barrier),
        "l"(evict_first()) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to), "l"(&q), "r"(dim), "r"(head), "r"(token), "r"(barrier) : "memory");
}

// Lengths of an item's token, asked for long before they are needed: even lanes have one, odd lanes the other. Were
// they the same in all lanes, the compiler would wait for them at once.
struct LaneLengths {
  int mine;

  __device__ __forceinline__ LaneLengths(const Params& p, int i, int lane)
      : mine((lane & 1 ? p.topk_lens : p.visible)[min(i, p.items - 1) >> p.head_blocks - 1]) {}
};

// 64 heads of a token. There are 128 heads at most, so head_blocks is 1 or 2, and nothing need be divided.
struct Item {
  int64_t token;
  int head0, window, keys, tiles;

  __device__ __forceinline__ Item(const Params& p, int i, const LaneLengths& lengths) {
    token = i >> p.head_blocks - 1, head0 = (i & p.head_blocks - 1) * kHeads;
    const int visible = __shfl_sync(~0u, lengths.mine, 0), topk = __shfl_sync(~0u, lengths.mine, 1);
    window = max(0, min(visible, kWindow));
    keys = window + (visible > 0 ? max(kWindow, min(topk, p.width)) - kWindow : 0);
    tiles = (keys + kTile - 1) / kTile;
  }
};

// Of two pairs of BF16: the larger magnitudes, with any signs. NaN if either is.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
// BF16 times a power of two, to fp16. The product is exact, or below all that fp16 does not round to zero.
// One after another, since with all products first registers are spilled.
__device__ __forceinline__ uint32_t scaled_to_half(uint32_t x, uint32_t power) {
  uint32_t r;
  asm volatile(
      "{.reg .b32 l, h; mul.rn.bf16x2 h, %1, %2; shl.b32 l, h, 16; and.b32 h, h, 0xFFFF0000;\n"
      "cvt.rn.f16x2.f32 %0, h, l;}" : "=r"(r) : "r"(x), "r"(power));
  return r;
}

// An entry of the ring is q of an item, or one of the tiles that follow it; entry i is in slot i % 2.
enum Kind { kEnd, kQ, kKeys };

template <bool FP8>
struct Block : Thread {
  using L = Layout<FP8>;
  const Call& call;

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

  // ---------------------------------------------------------------- rows, and q, on their way
  // A warp has 16 rows of every tile, and 16 heads of q. BF16 rows go into the ring as soon as a slot is free. E4M3
  // rows go where the warpgroups that multiply will find them when they have done with a slot, and widen them into it.
  template <bool FIRST>
  __device__ __forceinline__ void fetch() const {
    const int quarter = warp % 4, row0 = quarter * 16;
    uint32_t entry = 0;
    // By lane 0 of a warp, with the copies of all lanes.
    const auto arrive = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    const auto announce = [&](Kind kind, unsigned there) {
      if (FP8) barrier_wait(raw_empty(quarter), entry & 1 ^ 1);
      if (lane == 0) {
        *reinterpret_cast<uint16_t*>(smem + L::kThere + entry % 4 * 8 + warp % 4 * 2) = static_cast<uint16_t>(there);
        if (warp % 4 == 0) reinterpret_cast<int*>(smem + L::kKind)[entry % 4] = kind;
      }
    };
    // A lane looks up a row of two tiles, two tiles ahead: its index, -1 where there is none, -2 after the last item.
    const int my_key = lane / 16 * kTile + row0 + lane % 16;
    int i = blockIdx.x, key0 = -2 * kTile;
    Item item(p, i, LaneLengths(p, i, lane));
    LaneLengths next_lengths(p, i + gridDim.x, lane);
    const auto look_up = [&] {
      key0 += 2 * kTile;
      while (key0 >= item.keys) {
        i += gridDim.x;
        if (i >= p.items) return -2;
        item = Item(p, i, next_lengths), key0 = 0;
        next_lengths = LaneLengths(p, i + gridDim.x, lane);
      }
      const int key = key0 + my_key, column = key < item.window ? key : kWindow + key - item.window;
      return key < item.keys ? max(p.indices[item.token * p.indices_stride + column], -1) : -1;
    };
    int index = look_up();
    while (index != -2) {
      const Row mine(key0 + my_key < item.window ? p.swa : p.compressed, index);
      const unsigned there = __ballot_sync(~0u, mine.exists);
      const bool starts = key0 == 0, two = key0 + kTile < item.keys;
      if (starts) {
        announce(kQ, 0);
        if constexpr (FP8) {
          barrier_arrive(raw_full(quarter));
          barrier_wait(raw_empty(quarter), entry & 1);
        } else {
          barrier_wait(empty(entry & 1, quarter), entry / 2 & 1);
        }
        fetch_q<FIRST>(item, entry & 1);
        arrive(q_full());
        ++entry;
      }
#pragma unroll
      for (int t = 0; t < 2; ++t, ++entry) {
        if (t == 1 && !two) break;
        announce(kKeys, there >> t * 16);
        if (!FP8) barrier_wait(empty(entry & 1, quarter), entry / 2 & 1);
        if constexpr (FP8) {
          // A lane copies its row. Missing ones are zeros, so that nothing stale reaches a product.
          const unsigned bits = there >> t * 16 & 0xFFFF;
          const uint32_t to = L::kRaw + row0 * kDim;
          fence_async();  // what was read there, and zeros written there, before the copies
          __syncwarp();
          if (lane == 0) barrier_expect(raw_full(quarter), __popc(bits) * kDim);
          if (lane / 16 == t && mine.exists) copy_row<FIRST>(base + to + lane % 16 * kDim, mine.at, raw_full(quarter));
          for (unsigned missing = ~bits & 0xFFFF; missing; missing &= missing - 1)
            *reinterpret_cast<uint4*>(smem + to + (__ffs(missing) - 1) * kDim + lane * 16) = make_uint4(0, 0, 0, 0);
          __syncwarp();
          barrier_arrive(raw_full(quarter));
        } else {
          const uint32_t to = base + (entry & 1) * kTileBytes + lane / 8 * kBlockBytes + row0 * 128;
#pragma unroll
          for (int r = 0; r < 16; ++r) {
            const int64_t row = __shfl_sync(~0u, reinterpret_cast<int64_t>(mine.at), t * 16 + r) + lane * 16;
            const int bytes = there >> (t * 16 + r) & 1 ? 16 : 0;
#pragma unroll
            for (int c = 0; c < 2; ++c)
              copy16<FIRST>(to + swizzled(r, lane % 8) + c * 4 * kBlockBytes,
                            reinterpret_cast<const uint8_t*>(row) + c * 512, bytes);
          }
          copies_arrive(full(entry & 1));
          arrive(full(entry & 1));
        }
        if (t == two) index = look_up();
      }
    }
    if constexpr (FP8) announce(kEnd, 0), barrier_arrive(raw_full(quarter));
  }

  // 64 heads of q as they are, BF16; E4M3 is widened.
  template <bool FIRST>
  __device__ __forceinline__ void fetch_q(const Item& item, int slot) const {
    const int row0 = warp % 4 * 16, to = slot * kTileBytes;
    const int64_t first = item.token * p.q_token_stride + item.head0 * p.q_head_stride;
    if (FP8 && call.is_mapped) {
      if (lane == 0) {
        fence_async();  // what was read there before, and how
        barrier_expect(q_full(), 16 * kDim * 2);
#pragma unroll
        for (int c = 0; c < kDim / 64; ++c)
          copy_q<FIRST>(base + to + c * kBlockBytes + row0 * 128, call.q_map, c * 64, item.head0 + row0,
                        static_cast<int>(item.token), q_full());
      }
      __syncwarp();
      barrier_arrive(q_full());
    } else if (!p.q_is_fp8) {
#pragma unroll 4
      for (int r = row0; r < row0 + 16; ++r) {
        const bool is = item.head0 + r < p.heads;
        const __nv_bfloat16* const from =
            static_cast<const __nv_bfloat16*>(p.q) + first + (is ? r * p.q_head_stride : 0) + lane * 8;
#pragma unroll
        for (int c = 0; c < 2; ++c)
          copy16<FIRST>(base + to + (c * 4 + lane / 8) * kBlockBytes + swizzled(r, lane % 8), from + c * 256,
                        is ? 16 : 0);
      }
      copies_arrive(q_full());
    } else {
      for (int r = row0; r < row0 + 16; ++r) {
        uint4 raw[2] = {};
        if (item.head0 + r < p.heads)
          raw[0] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) + first + r * p.q_head_stride +
                                                   lane * 16);
        to_bf16(raw);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<uint4*>(smem + to + lane / 4 * kBlockBytes + swizzled(r, lane % 4 * 2 + h)) = raw[h];
      }
      barrier_arrive(q_full());
    }
  }

  // ---------------------------------------------------------------- scores and weights
  __device__ __forceinline__ void weigh() const {
    const int g = lane / 4, t = lane % 4, row = warp % 4 * 16 + g;
    const int lane_row = warp % 4 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
    const float bmm1 = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
    const float bmm2 = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
    uint32_t entry = 0, tile = 0, odd = 0, phases = 0;  // a bit a slot
    LaneLengths lengths(p, blockIdx.x, lane);
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
      const int tiles = Item(p, i, lengths).tiles;
      if (tiles == 0) {
        lengths = LaneLengths(p, i + gridDim.x, lane);
        continue;
      }
      uint32_t q[16][4];  // first half of the dimensions
      float scale[2] = {bmm1, bmm1};
      barrier_wait(q_full(), odd);
      const auto read_q = [&](uint32_t (&to)[4], int step) {
        ldmatrix(to, base + (entry & 1) * kTileBytes + step / 4 * kBlockBytes +
                         swizzled(lane_row, step % 4 * 2 + (lane >> 4)));
      };
#pragma unroll
      for (int step = 0; step < 16; ++step) read_q(q[step], step);
      // Of the second half a quarter waits in registers that scores will need; the rest, for which there are none, is
      // read again.
      constexpr int kKept = FP8 ? 4 : 0;
      uint32_t kept[kKept + 1][4], inverse[2];
      const auto to_half = [&](uint32_t (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = scaled_to_half(x[k], inverse[k % 2]);
      };
      if constexpr (FP8) {
        // The power that q is divided by goes back in with the scale.
        uint32_t largest[2] = {};
        const auto look_at = [&](const uint32_t (&x)[4]) {
#pragma unroll
          for (int k = 0; k < 4; ++k) largest[k % 2] = larger_magnitudes(largest[k % 2], x[k]);
        };
#pragma unroll
        for (int step = 0; step < kKept; ++step) read_q(kept[step], 32 - kKept + step);
#pragma unroll
        for (int step = 0; step < 16; ++step) look_at(q[step]);
#pragma unroll
        for (int step = 0; step < kKept; ++step) look_at(kept[step]);
#pragma unroll
        for (int step = 16; step < 32 - kKept; step += 2) {
          uint32_t x[2][4];
          read_q(x[0], step), read_q(x[1], step + 1);
          look_at(x[0]), look_at(x[1]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          largest[h] &= 0x7FFF7FFF;
          largest[h] = max(largest[h] & 0xFFFF, largest[h] >> 16);
          largest[h] = max(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
          largest[h] = max(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
          const float2 power = power_below(largest[h]);
          scale[h] *= power.x, inverse[h] = __float_as_uint(power.y) >> 16 | __float_as_uint(power.y);
        }
      }
      // The second half of the dimensions goes where there is room for it.
      const auto write_q = [&](uint32_t (&x)[4], int step) {
        if constexpr (FP8) to_half(x);
        stmatrix(base + L::kSecondQ + (step - 16) / 4 * kBlockBytes + swizzled(lane_row, step % 4 * 2 + (lane >> 4)),
                 x[0], x[1], x[2], x[3]);
      };
#pragma unroll 1
      for (int step = 16; step < 32 - kKept; step += 4) {
        uint32_t x[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) read_q(x[j], step + j);
#pragma unroll
        for (int j = 0; j < 4; ++j) write_q(x[j], step + j);
      }
      barrier_arrive(q_read());
      ++entry;
#pragma unroll
      for (int step = 0; step < kKept; ++step) write_q(kept[step], 32 - kKept + step);
      if constexpr (FP8)
#pragma unroll
        for (int step = 0; step < 16; ++step) to_half(q[step]);
      fence_async();
      sync_threads(3, 128);
      const uint64_t second_q = descriptor(base + L::kSecondQ - kTileBytes / 2);
      float sum[2] = {}, maximum[2] = {kNoMaximum, kNoMaximum}, sink[2];
      int weights_row = lane_row;  // addresses of weights are found from here on: nothing of them is kept across q
      asm volatile("" : "+r"(weights_row));
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        float s[32];
        const int slot = entry & 1;
        barrier_wait(full(slot), phases >> slot & 1);
        phases ^= 1 << slot;
        if constexpr (!FP8) fence_async();  // the rows came by copies that wgmma does not see by itself
        const uint64_t k = descriptor(base + slot * kTileBytes);
        if (left == 1) {
          // What the end of the item and the next one need is asked for before the last scores.
          lengths = LaneLengths(p, i + gridDim.x, lane);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int head = (i & p.head_blocks - 1) * kHeads + row + h * 8;
            sink[h] = p.sinks && head < p.heads ? p.sinks[head] : -INFINITY;
          }
        }
        products_begin();
        score_product<FP8, false>(s, q[0], k);
#pragma unroll
        for (int step = 1; step < 32; ++step) {
          const int at_step = (step / 4 * kBlockBytes + step % 4 * 32) >> 4;
          if (step < 16)
            score_product<FP8, true>(s, q[step], k + at_step);
          else
            score_product<FP8>(s, second_q + at_step, k + at_step);
        }
        products_commit();
        const uint2 there = *reinterpret_cast<const uint2*>(smem + L::kThere + entry % 4 * 8);
        products_wait<0>();
        strict_wait(3);

#pragma unroll
        for (int j = 0; j < 32; ++j) s[j] *= scale[j / 2 % 2];
        if ((there.x & there.y) != ~0u) {
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            const int key = j / 4 * 8 + 2 * t + j % 2;
            if (!((key < 32 ? there.x : there.y) >> (key % 32) & 1)) s[j] = -INFINITY;
          }
        }
        const int buffer = tile % 2;
        barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float largest = s[2 * h];
#pragma unroll
          for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
          const float now = largest > maximum[h] + kSlack ? largest : maximum[h];
          if (t == 0) floats(L::kMaximum)[buffer * kHeads + row + h * 8] = now;
          sum[h] *= exp2_fast(maximum[h] - now), maximum[h] = now;
        }
        const uint32_t to = base + L::kWeights + buffer * L::kTerms * kBlockBytes;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t high[4], low[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int j = n * 8 + 2 * k, h = k % 2;
            const float x = exp2_fast(s[j] - maximum[h]), y = exp2_fast(s[j + 1] - maximum[h]);
            sum[h] += x + y;
            if constexpr (FP8)
              high[k] = pack_half(x, y);
            else
              high[k] = pack_bf16(x, y), low[k] = rest_bf16(x, y, high[k]);
          }
          const uint32_t there_to = to + swizzled(weights_row, n * 2 + (lane >> 4));
          stmatrix(there_to, high[0], high[1], high[2], high[3]);
          if constexpr (!FP8) stmatrix(there_to + kBlockBytes, low[0], low[1], low[2], low[3]);
        }
        if (left == 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            const float at = sink[h] * kLog2e;
            const float shift = fmaxf(maximum[h], at), weight = exp2_fast(maximum[h] - shift);
            const float total = sum[h] * weight + exp2_fast(at - shift);
            if (t == 0) floats(L::kFactor)[odd * kHeads + row + h * 8] = total > 0.f ? bmm2 * weight / total : 0.f;
          }
        }
        fence_async();
        barrier_arrive(ready(buffer));
      }
      odd ^= 1;
    }
  }

  // ---------------------------------------------------------------- outputs, 256 dimensions
  // Entry `entry` comes into the slot of the last entry but one, a quarter (16 keys) at a time. take() loads a quarter
  // of this warpgroup's dimensions, also of an entry that is no rows, so that nothing waits for loads before put(),
  // which stores them, widened, once that quarter of the slot is free.
  // A lane has 16 values of a row, and of the row 8 further, whose swizzle is the same; 8 of them are a store. Lanes 4
  // apart, and 8 apart, begin with different ones, so that a warp's stores, and loads, go to different banks.
  struct Fill {
    uint32_t from[2], to[2];  // where rows wait, and in the entry's slot
    uint32_t entry = 0;
    int kind = kEnd;
    uint2 rows[4];

    __device__ __forceinline__ Fill(int warp, int lane) {
      const int row = warp % 4 * 2 + lane / 16, part = lane % 16, begin = (lane >> 2 ^ lane >> 3) & 1;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        from[j] = L::kRaw + row * kDim + warp / 4 * (kDim / 2) + part * 16 + (begin ^ j) * 8;
        to[j] = warp / 4 * (kTileBytes / 2) + part / 4 * kBlockBytes + swizzled(row, part % 4 * 2 + (begin ^ j));
        asm volatile("" : "+r"(from[j]), "+r"(to[j]));  // kept, since it takes long to find out again
      }
    }
  };
  __device__ __forceinline__ void take(Fill& fill, int quarter) const {
    if constexpr (FP8) {
      barrier_wait(raw_full(quarter), fill.entry & 1);
      if (quarter == 0) fill.kind = reinterpret_cast<const int*>(smem + L::kKind)[fill.entry % 4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        fill.rows[k] = *reinterpret_cast<const uint2*>(smem + fill.from[k % 2] + (quarter * 16 + k / 2 * 8) * kDim);
    }
  }
  __device__ __forceinline__ void put(Fill& fill, int quarter) const {
    const int slot = fill.entry & 1;
    if constexpr (!FP8) {
      barrier_arrive(empty(slot, quarter));
      if (quarter == 3) ++fill.entry;
    } else {
      if (fill.kind == kEnd) return;
      if (fill.kind == kKeys) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint2 x = fill.rows[k];
          *reinterpret_cast<uint4*>(smem + fill.to[k % 2] + (quarter * 16 + k / 2 * 8) * 128) =
              make_uint4(e4m3_low(x.x), e4m3_high(x.x), e4m3_low(x.y), e4m3_high(x.y));
        }
        if (quarter == 3) fence_async(), barrier_arrive(full(slot));
      }
      barrier_arrive(raw_empty(quarter));  // what comes next, or q, may come
      if (quarter == 3) ++fill.entry, fill.to[0] ^= kTileBytes, fill.to[1] ^= kTileBytes;
    }
  }
  __device__ __forceinline__ void take_and_put(Fill& fill) const {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) take(fill, quarter), put(fill, quarter);
  }

  __device__ __forceinline__ void multiply() const {
    const int half = warp / 4, row = warp % 4 * 16 + lane / 4;
    const int lane_row = (lane >> 3 & 1) * 8 + (lane & 7);
    uint32_t tile = 0, odd = 0, entry = 0;
    Fill fill(warp, lane);
    take_and_put(fill), take_and_put(fill);
    bool started = false;  // with the item: the entry after its first tile is there
    LaneLengths lengths(p, blockIdx.x, lane);
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
      const int tiles = Item(p, i, lengths).tiles;
      if (tiles == 0) {
        const Item item(p, i, lengths);
        for (int head = warp; head < min(kHeads, p.heads - item.head0); head += 8)
          for (int k = 0; k < 2; ++k)
            reinterpret_cast<uint4*>(out_of(item.token, item.head0 + head))[k * 32 + lane] = make_uint4(0, 0, 0, 0);
        lengths = LaneLengths(p, i + gridDim.x, lane);
        continue;
      }
      // Outputs so far, and the maximum they are relative to.
      float o[128] = {}, relative[2];
      if (!started) barrier_wait(q_read(), odd), take_and_put(fill);
      ++entry;
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        const int buffer = tile % 2;
        barrier_wait(ready(buffer), tile / 2 & 1);
        const float* const maxima = floats(L::kMaximum) + buffer * kHeads + row;
        const float now[2] = {maxima[0], maxima[8]};
        if (left < tiles && __any_sync(~0u, now[0] != relative[0] || now[1] != relative[1])) {
          const float factor[2] = {exp2_fast(relative[0] - now[0]), exp2_fast(relative[1] - now[1])};
#pragma unroll
          for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
        }
        relative[0] = now[0], relative[1] = now[1];
        const uint64_t weights = descriptor(base + L::kWeights + buffer * L::kTerms * kBlockBytes);
        const uint64_t v = transposed(base + (entry & 1) * kTileBytes + half * (kTileBytes / 2), kBlockBytes);
        // Rows are widened while products of the next ones run.
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          products_begin();
#pragma unroll
          for (int term = 0; term < L::kTerms; ++term) {
            const uint64_t w = weights + ((term * kBlockBytes + step * 32) >> 4), rows = v + (step * 16 * 128 >> 4);
            output_product<FP8, 0>(o, w, rows);
            output_product<FP8, 64>(o, w, rows + (2 * kBlockBytes >> 4));
          }
          products_commit();
          if (step > 0) products_wait<1>(), strict_wait(1 + half), put(fill, step - 1);
          take(fill, step);
        }
        products_wait<0>();
        strict_wait(1 + half);
        barrier_arrive(used(buffer));
        put(fill, 3);
      }
      const float* const factors = floats(L::kFactor) + odd * kHeads + row;
      const float factor[2] = {factors[0], factors[8]};
      odd ^= 1;
      const int64_t token = i >> p.head_blocks - 1;
      const int head0 = (i & p.head_blocks - 1) * kHeads + warp % 4 * 16;
      const uint32_t stage = L::kStage + warp * 2048;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (FP8 && c == 2) {
          // The next item's q has been read meanwhile: what follows its first tile need not wait for these outputs.
          started = fill.kind != kEnd;
          if (started) {
            barrier_wait(q_read(), odd);
#pragma unroll
            for (int quarter = 0; quarter < 2; ++quarter) take(fill, quarter), put(fill, quarter);
          }
        }
        if (FP8 && c == 3 && started)
#pragma unroll
          for (int quarter = 2; quarter < 4; ++quarter) take(fill, quarter), put(fill, quarter);
        uint32_t packed[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int j = c * 32 + n * 8 + 2 * k;
            packed[n][k] = pack_bf16(o[j] * factor[k % 2], o[j + 1] * factor[k % 2]);
          }
        if (FP8) {
          hold(packed);  // before the wait
          if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // none, if not mapped
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 4; ++n)
          stmatrix(base + stage + swizzled(lane_row, n * 2 + (lane >> 4)), packed[n][0], packed[n][1], packed[n][2],
                   packed[n][3]);
        if (c == 1) lengths = LaneLengths(p, i + gridDim.x, lane);  // long before its use, where registers are free
        if (FP8 && call.is_mapped) {
          fence_async();
          __syncwarp();
          if (lane == 0)
            asm volatile(
                "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
                "cp.async.bulk.commit_group;" ::"l"(&call.out_map), "r"(half * (kDim / 2) + c * 64), "r"(head0),
                "r"(static_cast<int>(token)), "r"(base + stage)
                : "memory");
          continue;
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 16; r += 4) {
          const int from_row = r + lane / 8, head = head0 + from_row;
          if (head < p.heads)
            reinterpret_cast<uint4*>(out_of(token, head) + half * (kDim / 2) + c * 64)[lane % 8] =
                *reinterpret_cast<const uint4*>(smem + stage + swizzled(from_row, lane % 8));
        }
      }
    }
    // Shared memory stays until it has been read.
    if (FP8 && lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
};

// A kernel for either way of reading rows: with both in one, registers are spilled.
template <bool FP8, bool FIRST>
__global__ void __launch_bounds__(kBlockThreads, 1) sparse_mla_m64_kernel(const __grid_constant__ Call p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  const Block<FP8> block{{p, smem, smem_address(smem), warp, static_cast<int>(threadIdx.x % 32)}, p};
  if (threadIdx.x == 0) {
    block.init();
    if (FP8 && p.is_mapped) asm volatile("prefetch.tensormap [%0];" ::"l"(&p.q_map) : "memory");
  }
  wait_for_previous();
  __syncthreads();
  if (warp >= 12) {
    give_registers<48>();
    block.template fetch<FIRST>();
  } else if (warp >= 8) {
    take_registers<144>();
    block.weigh();
  } else {
    take_registers<160>();
    block.multiply();
  }
#endif
}

template <bool FP8, bool FIRST>
cudaError_t launch(const SparseMla& call, int sms, cudaStream_t stream) {
  const Call p(call);
  return launch_kernel<sparse_mla_m64_kernel<FP8, FIRST>>(p, min(p.items, sms), kBlockThreads, Layout<FP8>::kTotal, 1,
                                                          stream);
}

}  // namespace m64

cudaError_t launch_sparse_mla_m64(const SparseMla& call, int sms, cudaStream_t stream) {
  using m64::launch;
  if (call.keep_outputs)
    return call.rows_are_fp8 ? launch<true, true>(call, sms, stream) : launch<false, true>(call, sms, stream);
  return call.rows_are_fp8 ? launch<true, false>(call, sms, stream) : launch<false, false>(call, sms, stream);
}

}  // namespace mla
