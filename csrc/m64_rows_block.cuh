// What a block of sparse_mla_m64_rows.cu works on and with: items, and shared memory.
#pragma once

#include "m64_block.cuh"
#include "rows.cuh"
#include "scheduler.cuh"

namespace mla {
namespace m64_rows {

using m64::barrier_expect;
using m64::bf16_pair;
using m64::copy_q;
using m64::copy_row;
using m64::drop_missing;
using m64::EntryKind;
using m64::kBlockBytes;
using m64::kBlockThreads;
using m64::kEnd;
using m64::kHeads;
using m64::kKeys;
using m64::kQ;
using m64::kRegisterSteps;
using m64::kSteps;
using m64::kTileBytes;
using m64::map_heads;
using m64::output_product;
using m64::power_of_q;
using m64::quad_max;
using m64::quad_sum;
using m64::score_product;
using m64::score_products;

template <RowFormat FORMAT>
struct Layout : RowLayout<FORMAT> {
  using R = RowLayout<FORMAT>;
  static constexpr bool kPacked = R::kNarrow > 0;     // operands are fp16, and else BF16
  static constexpr bool kHasTail = R::kDims > kDim;   // 64 dimensions of keys alone, BF16
  static constexpr bool kIsV4 = FORMAT == RowFormat::kV4;  // whose scales and wide parts come a tile ahead
  static constexpr int kOutputRegisters = 160;
  static constexpr int kScoreRegisters = !kPacked ? 152 : kHasTail ? 144 : 128;
  static constexpr int kFetchRegisters = 512 - 2 * kOutputRegisters - kScoreRegisters;
  static constexpr int kTail = 2 * kTileBytes;        // [2 slots]
  static constexpr int kSecondQ = kTail + (kHasTail ? 2 * kBlockBytes : 0);  // dimensions 256 to 511
  static constexpr int kRaw = kSecondQ + kTileBytes / 2;                     // [kTile] narrow parts of rows
  static constexpr int kWeights = kRaw + kTile * R::kNarrow;                 // [2]
  static constexpr int kMaximum = kWeights + 2 * kBlockBytes;                // [2 weights][kHeads]
  static constexpr int kFactor = kMaximum + 2 * kHeads * 4;                  // [items, even and odd][kHeads]
  // [4 quarters][8 rows][8], fp16: by what 64 dimensions of a row, and of the row 8 further, are multiplied.
  static constexpr int kRatios = kFactor + 2 * kHeads * 4;
  // Wide parts that are values, [2][4 warps][4][32 lanes], and scales, [2][4 warps][16 rows][8].
  static constexpr int kWaiting = kRatios + (kPacked ? 4 * 8 * 8 * 4 : 0);
  static constexpr int kScales = kWaiting + (kIsV4 ? 2 * kBlockBytes : 0);
  // [4 entries][4][8][2], a byte for each row, 8n + 2t + i at [t][n][i]: the power of two that it was divided by, as
  // the exponent of a float32; 0 of a missing row. Only of those that have no common one. Of BF16 rows [4 entries], a
  // bit for every row.
  static constexpr int kPowers = kScales + (kIsV4 ? 2 * kTile * 8 : 0);
  // [4 entries][4 quarters], a byte each: the power if all 16 rows have the same, and else 0.
  static constexpr int kCommon = kPowers + 4 * kTile;
  static constexpr int kKinds = kCommon + 4 * 4;  // [4 entries]
  static constexpr int kTurns = kKinds + 4 * 4;
  static constexpr int kBarriers = kTurns + Turns::kListBytes;
  static constexpr int kTotal = kBarriers + 18 * 8;
  static_assert(kWeights % 1024 == 0, "an operand begins at a multiple of 1024 bytes");
  static_assert(kTotal <= 227 * 1024, "more shared memory than a block can have");

  // Where 64 dimensions of an entry are, those of keys alone behind the slots: so slots differ in one bit.
  static __device__ __forceinline__ int block_at(int slot, int block) {
    return block < kDim / 64 ? slot * kTileBytes + block * kBlockBytes : kTail + slot * kBlockBytes;
  }
  // Of the BF16 part of a packed row.
  static __device__ __forceinline__ int wide_at(int slot) { return block_at(slot, R::kNarrow / 64); }
};

// An item is a token and 64 of its heads. What blocks take is a unit: one of the first `whole` items, or a part of the
// keys of one of the others.
struct Call : RowParams {
  CUtensorMap q_map;
  bool is_mapped;  // else threads copy it: strides that such a tensor cannot have
  int whole, units;
  uint32_t parts, inverse_parts;  // 2^32 over it, rounded up; of 1 part not, and then no item is divided

  Call(const SparseMlaRows& call, int dims, const M64Division& division)
      : RowParams(call, kHeads, 1), q_map{}, is_mapped(false), whole(division.whole), parts(division.parts) {
    inverse_parts = static_cast<uint32_t>(((uint64_t{1} << 32) + parts - 1) / parts);
    units = whole + (items - whole) * division.parts;
    is_mapped = map_heads(q_map, call.q, dims, call.heads, call.tokens, call.q_token_stride, call.q_head_stride);
  }
  __device__ __forceinline__ int item(int unit) const {
    return unit < whole ? unit : whole + in_parts(unit - whole);
  }
  // x over the parts, of x below 2^28. Not by __umulhi, which the uniform registers have not.
  __device__ __forceinline__ int in_parts(uint32_t x) const {
    return static_cast<int>(uint64_t{x} * inverse_parts >> 32);
  }
  // Of units that are parts, in the workspace: sums of weights times values, as the threads of the two output
  // warpgroups have them, [units][8 warps][4 times 64 dimensions][2 halves][2 heads][32 lanes] 8 values, fp16; behind
  // those of a warp the powers of two that they were divided by, [4][32 lanes][2 heads], BF16; and behind those of all
  // units maxima, sums of weights and largest scores, [units][3][kHeads].
  static constexpr int kOutputChunks = 4 * 2 * 2 * 32, kChunks = kOutputChunks + 4 * 32 * 4 / 16;  // a warp's, 16 bytes
  __device__ __forceinline__ uint4* outputs_of(int unit, int warp, int lane) const {
    return static_cast<uint4*>(workspace) + (static_cast<int64_t>(unit - whole) * 8 + warp) * kChunks + lane;
  }
  __device__ __forceinline__ uint32_t* powers_of(int unit, int warp, int lane) const {
    return reinterpret_cast<uint32_t*>(outputs_of(unit, warp, kOutputChunks)) + lane;
  }
  __device__ __forceinline__ float* statistics_of(int unit) const {
    return reinterpret_cast<float*>(outputs_of(units, 0, 0)) + static_cast<int64_t>(unit - whole) * 3 * kHeads;
  }
};

// Lengths of a unit's token, asked for long before they are needed.
struct LaneLengths : LanePair {
  __device__ __forceinline__ LaneLengths(const Call& p, int i, int lane) {
    const int32_t* const lengths = lane & 1 ? p.sources[1].lengths : p.sources[0].lengths;
    mine = lengths ? lengths[divided(p.item(min(i, p.units - 1)) >> p.head_blocks - 1, p.tokens_per_length)] : INT_MAX;
  }
};

// The keys of a unit, those of the first source first: `keys` from key `first` of its token on, of which those below
// `of_first`, which may be negative, are of the first source. There are 128 heads at most, so head_blocks is 1 or 2,
// and nothing need be divided by it. Calls over such rows have no offsets.
struct Item {
  int of_first, keys, first = 0;

  __device__ __forceinline__ Item(const Call& p, int unit, const LaneLengths& lengths) {
    *this = Item(p, unit, lengths.even(), lengths.odd());
  }
  __device__ __forceinline__ Item(const Call& p, int unit, int first_length, int second_length) {
    of_first = max(0, min(first_length, p.sources[0].width));
    keys = of_first + max(0, min(second_length, p.sources[1].width));
    if (unit >= p.whole) {
      const uint32_t part = unit - p.whole - p.in_parts(unit - p.whole) * p.parts, all = tiles();
      first = p.in_parts(all * part) * kTile;
      keys = max(0, min(keys, p.in_parts(all * (part + 1)) * kTile) - first);
      of_first -= first;
    }
  }
  __device__ __forceinline__ int tiles() const { return (max(keys, 1) + kTile - 1) / kTile; }  // at least an empty one
  static __device__ __forceinline__ int token(const Call& p, int i) { return p.item(i) >> p.head_blocks - 1; }
  static __device__ __forceinline__ int head0(const Call& p, int i) {
    return (p.item(i) & p.head_blocks - 1) * kHeads;
  }
};

// Asked for here, and not where it is needed; 0 if not.
template <bool EVICT_FIRST>
__device__ __forceinline__ uint4 load_wide(const uint8_t* from, bool is_asked) {
  uint4 x;
  if constexpr (EVICT_FIRST)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %6, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(from), "l"(evict_first()), "r"(static_cast<int>(is_asked)) : "memory");
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(from), "r"(static_cast<int>(is_asked)) : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_scale(const uint8_t* from, bool is_asked) {
  uint32_t x;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.u32 %0, [%1];}"
               : "=&r"(x) : "l"(from), "r"(static_cast<int>(is_asked)) : "memory");
  return x;
}
// Byte i of a word, an exponent as float32 has it: the bits of that power of two, and its logarithm. With the byte as
// its last, 0x4B000000 is the float32 of 2^23 plus the byte.
__device__ __forceinline__ uint32_t power_of_byte(uint32_t word, int i) {
  return __byte_perm(word, 0, 0x0444 | i << 12) >> 1;
}
__device__ __forceinline__ float log2_of_byte(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 | i)) - (8388608.f + 127.f);
}
__device__ __forceinline__ bool has_zero_byte(uint32_t x) { return (x - 0x01010101u & ~x & 0x80808080u) != 0; }

// What lies in shared memory. An entry of the ring is q of an item, or one of the tiles that follow it; entry i is in
// slot i % 2.
template <RowFormat FORMAT>
struct Storage : Thread<Call> {
  using L = Layout<FORMAT>;
  const Turns turns;

  __device__ __forceinline__ uint32_t barrier(int i) const { return base + L::kBarriers + i * 8; }
  __device__ __forceinline__ uint32_t full(int slot) const { return barrier(slot); }  // with a tile
  // Of a quarter of a slot (BF16) or of the narrow parts on their way, 16 keys each.
  __device__ __forceinline__ uint32_t empty(int slot, int quarter) const { return barrier(2 + slot * 4 + quarter); }
  __device__ __forceinline__ uint32_t raw_full(int quarter) const { return barrier(2 + quarter); }
  __device__ __forceinline__ uint32_t raw_empty(int quarter) const { return barrier(6 + quarter); }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(10); }
  __device__ __forceinline__ uint32_t q_read() const { return barrier(11); }
  __device__ __forceinline__ uint32_t tail_empty(int slot) const { return barrier(16 + slot); }  // of packed rows
  // Of the weights of a tile: there, and used; and, over BF16 rows, their maximum is known.
  __device__ __forceinline__ uint32_t ready(int buffer) const { return barrier(12 + buffer); }
  __device__ __forceinline__ uint32_t used(int buffer) const { return barrier(14 + buffer); }
  __device__ __forceinline__ uint32_t maximum_ready(int buffer) const { return barrier(16 + buffer); }

  __device__ __forceinline__ void init() const {
    constexpr int kFetched = 128 + 4;
    for (int i = 0; i < 2; ++i) barrier_init(full(i), L::kPacked ? 256 + 128 : kFetched);
    for (int i = 0; i < 4; ++i)
      if (L::kPacked)
        barrier_init(raw_full(i), 64), barrier_init(raw_empty(i), 256);
      else
        barrier_init(empty(0, i), 256), barrier_init(empty(1, i), 256);
    barrier_init(q_full(), kFetched), barrier_init(q_read(), 128);
    for (int i = 0; i < 2; ++i)
      barrier_init(ready(i), 128), barrier_init(used(i), 256), barrier_init(tail_empty(i), 128);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

}  // namespace m64_rows
}  // namespace mla
