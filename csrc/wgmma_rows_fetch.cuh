// Rows and q of sparse_mla_wgmma_rows.cu on their way, which one warpgroup fetches.
#pragma once

#include "wgmma_rows_block.cuh"

namespace mla {
namespace wgmma_rows {

// Two warps copy rows, two prepare those that have come, so that neither waits for what the others wait for. Each has
// 16 of the 32 rows of a slot.
template <RowFormat FORMAT>
struct Fetch : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::empty, Base::q_full;
  using Base::q_empty, Base::turns, Base::opaque_lane, Base::head0, Base::copied;
  using typename Base::Position;
  using L = Layout<FORMAT>;
  static constexpr int kWarpRows = 16;

  // The next item's q comes in parts of eight heads, one with each of some tiles: every warp loads two.
  static constexpr int kQParts = kHeads / 8;
  // About when this tile of an item is copied, the item before has its scores, and its q is free.
  static constexpr int kFirstQTile = L::kSlots / 2 - 1;
  using Q = QLoader<FORMAT, 4 * kQParts>;

  // The next item's q into the L2 cache.
  __device__ __forceinline__ void prefetch_q(int64_t token, int head0) const {
    constexpr int kLines = L::kDims * 2 / 128;
    const int lane = opaque_lane();
    const __nv_bfloat16* const q = static_cast<const __nv_bfloat16*>(p.q) + token * p.q_token_stride + lane % 16 * 64;
#pragma unroll 1
    for (int head = head0 + warp % 4 * 2 + lane / 16; head < min(p.heads, head0 + kHeads); head += 8)
      if (lane % 16 < kLines) asm volatile("prefetch.global.L2 [%0];" ::"l"(q + head * p.q_head_stride));
  }

  // ---------------------------------------------------------------- copies

  // A row that a lane has looked up.
  struct Found {
    const uint8_t *at, *scales;
    unsigned exist;  // of all lanes
  };
  __device__ __forceinline__ Found find(const Item& item, int key, int index) const {
    const Pool& pool = item.first + key < item.of_first ? p.sources[0].pool : p.sources[1].pool;
    const Row row(pool, index);
    // UE8M0 scales are behind the rows of a page, 8 bytes for each.
    const uint8_t* const scales =
        L::kHasFloatScales ? row.at + L::kNarrow : row.page + int64_t{pool.page.value} * 576 + row.in_page * 8;
    return {row.at, scales, __ballot_sync(~0u, row.exists)};
  }

  // Half of a tile, into a slot. Eight lanes copy 128 bytes of a row, 16 each, so that a lane has part of rows lane / 8
  // and 4, 8 and 12 further, which are `rows`; the lane that has looked up a row copies its scales.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void copy(const uint8_t* const (&rows)[4], const Found& found, int slot, int half) const {
    const int lane = opaque_lane();
    const unsigned exist = found.exist >> half * kWarpRows;
    uint32_t to = base + L::kRing + slot * L::kSlotBytes + warp % 2 * 2 * L::kGroupBytes + swizzled(lane / 8, lane % 8);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint8_t* const row = rows[k];
      const int bytes = exist >> (lane / 8 + k * 4) & 1 ? 16 : 0;
#pragma unroll
      for (int line = 0; line < L::kNarrow / 128; ++line)
        copy16<EVICT_FIRST, L::kPrefetch>(to + line * 1024, row + line * 128, bytes);
      if constexpr (L::kNarrow % 128 == 0) {
        copy16<EVICT_FIRST, L::kPrefetch>(to + L::kWideAtGroup, row + L::kWideAt, bytes);
      } else {
        // The wide part begins in the middle of 128 bytes, and ends so: a lane has its chunk lane % 8 ^ 4.
        constexpr int kLine = L::kNarrow / 128;
        static_assert(L::kNarrow % 128 == 64 && L::kWideAt == L::kNarrow, "a half line, and nothing behind it");
        const uint32_t wide = (to ^ 64) + L::kWideAtGroup;
        copy16<EVICT_FIRST, L::kPrefetch>(lane % 8 < 4 ? to + kLine * 1024 : wide, row + kLine * 128, bytes);
        if (lane % 8 < 4) copy16<EVICT_FIRST, L::kPrefetch>(wide, row + (kLine + 1) * 128, bytes);
      }
      // Rows 4 apart have chunks 4 apart.
      to = (to ^ 64) + (k % 2 ? L::kGroupBytes - 512 : 512);
    }
    if (lane / kWarpRows == half) {
      const int r = lane % kWarpRows;
      const uint32_t at = base + L::kRowScales + (slot * 32 + warp % 2 * kWarpRows + r) * 16;
      if constexpr (L::kHasFloatScales)
        copy16<EVICT_FIRST, L::kPrefetch>(at, found.scales, exist >> r & 1 ? 16 : 0);
      else
        copy8(at, found.scales, exist >> r & 1 ? 8 : 0);
    }
    if (lane == 0) {
      reinterpret_cast<uint16_t*>(smem + L::kRowMasks)[slot * 2 + warp % 2] = static_cast<uint16_t>(exist);
      barrier_arrive(copied(slot));
    }
    copies_arrive(copied(slot));
  }

  // A tile, into two slots. All rows are passed on before the first copy: a shuffle after it would wait until the copy
  // has left.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void copy_tile(const Found& found, Position at) const {
    const uint8_t* rows[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t row = __shfl_sync(~0u, reinterpret_cast<int64_t>(found.at), h * kWarpRows + k * 4 + lane / 8);
        rows[h][k] = reinterpret_cast<const uint8_t*>(row) + lane % 8 * 16;
        make_opaque(rows[h][k]);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h, at = at.next()) {
      barrier_wait(empty(at.slot), at.parity ^ 1);
      copy<EVICT_FIRST>(rows[h], found, at.slot, h);
    }
  }

  // ---------------------------------------------------------------- preparation

  // Rows that have come. Finds the powers of two that values are divided by, so that none reaches 2^15, and the ratios
  // of scales to them.
  __device__ __forceinline__ void prepare(int slot) const {
    const int lane = opaque_lane(), row0 = slot * 32 + warp % 2 * kWarpRows;
    const auto ratio = [](float scale, uint32_t power) {
      return __half_as_ushort(__float2half_rn(scale * __uint_as_float((254 - power) << 23)));
    };
    uint16_t* const ratios =
        reinterpret_cast<uint16_t*>(smem + L::kRatios) + slot * L::kGroups * 32 + warp % 2 * kWarpRows;
    if constexpr (L::kHasFloatScales) {
      // A lane has a scale of two rows, 8 apart.
      const int row = lane / 4, of = lane % 4;
      float scale[2];
      uint32_t largest[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        scale[k] = reinterpret_cast<const float*>(smem + L::kRowScales)[(row0 + k * 8) * 4 + lane];
        largest[k] = magnitude(scale[k]);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
        for (int k = 0; k < 2; ++k) largest[k] = max(largest[k], __shfl_xor_sync(~0u, largest[k], mask));
#pragma unroll
      for (int k = 0; k < 2; ++k) ratios[of * 32 + row + k * 8] = ratio(scale[k], power_of_row(largest[k]));
    } else {
      // A lane has chunk lane % 8 of the wide parts of rows lane / 8 and 4, 8 and 12 further, which it divides too, and
      // one of their scales.
      const int row = lane / 8, of = lane % 8;
      uint8_t* const of_rows = smem + L::kRowScales + (row0 + row) * 16;
      uint8_t* const wide_parts =
          smem + L::kRing + slot * L::kSlotBytes + warp % 2 * 2 * L::kGroupBytes + L::kWideAtGroup;
      // Rows 4 apart have chunks 4 apart.
      const int first = swizzled(row, of), second = (first ^ 64) + 512;
      const auto wide_at = [&](int k) {
        return reinterpret_cast<uint4*>(wide_parts + k / 2 * L::kGroupBytes + (k % 2 ? second : first));
      };
      uint4 wide[4];
      uint32_t scales[2], powers[2];  // exponents, of two rows in a word
#pragma unroll
      for (int k = 0; k < 4; ++k) wide[k] = *wide_at(k);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        scales[j] = of < L::kGroups ? of_rows[j * 128 + of] | of_rows[j * 128 + 64 + of] << 16 : 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t largest[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint4& x = wide[2 * j + k];
          largest[k] = larger_magnitudes(larger_magnitudes(x.x, x.y), larger_magnitudes(x.z, x.w)) & 0x7FFF7FFF;
        }
        const uint32_t wides = __vmaxu2(__byte_perm(largest[0], largest[1], 0x5410),
                                        __byte_perm(largest[0], largest[1], 0x7632)) >> 7 & 0x00FF00FF;
        // As power_of_row() has it, but for 14.
        powers[j] = __vmaxu2(scales[j] + 9 * 0x10001, wides);
      }
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2)
#pragma unroll
        for (int j = 0; j < 2; ++j) powers[j] = __vmaxu2(powers[j], __shfl_xor_sync(~0u, powers[j], mask));
      __syncwarp();  // all have read their scales
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t both =
            __vminu2(__vmaxu2(powers[k / 2], (14 + 27) * 0x10001), (14 + 227) * 0x10001) - 14 * 0x10001;
        const uint32_t power = both >> k % 2 * 16 & 0xFFFF, by = (254 - power) * 0x00800080;
        const uint16_t mine = ratio(__uint_as_float((scales[k / 2] >> k % 2 * 16 & 0xFF) << 23), power);
        reinterpret_cast<uint16_t*>(of_rows + k * 64)[of] = of < L::kGroups ? mine : power;
        if (of < L::kGroups) ratios[of * 32 + row + k * 4] = mine;
        *wide_at(k) = make_uint4(scaled_to_half(wide[k].x, by), scaled_to_half(wide[k].y, by),
                                 scaled_to_half(wide[k].z, by), scaled_to_half(wide[k].w, by));
      }
    }
    barrier_arrive(full(slot));
  }

  // What this warpgroup does. It is one loop for both kinds of warps, and has each thing once: the loops of all
  // warpgroups must fit the instruction cache together.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void fetch() const {
    const bool is_copier = warp % 4 < 2;
    const int my_key = lane / kWarpRows * 32 + warp % 2 * kWarpRows + lane % kWarpRows;  // of a tile
    Position at;
    uint32_t served = 0;  // items
    int parts = kQParts;  // of the next one's q; the first one's is loaded by those who have nothing else to do yet
    int turn = 0, i = turns[0];
    Item item(p, i, KeyLengths(p, i));
    LaneLengths lengths(p, turns[1], lane);
    Found found = find(item, my_key, item.index(p, my_key));
    while (i < p.items) {
      const int now_at = i;
      i = turns[++turn];
      const Item now = item;
      item = Item(p, i, lengths.of_all());
      const bool is_more = i < p.items;
      if (!is_more) item.keys = 0;
      lengths = LaneLengths(p, turns[turn + 1], lane);
      if (is_more) prefetch_q(item.token, head0(i));
      // Before the first tile comes what is left of this item's own q.
#pragma unroll 1
      for (int tile = parts - kQParts; tile < now.tiles; ++tile) {
        if (tile == 0) ++served, parts = 0;
        const bool is_tile = tile >= 0, is_q = !is_tile || (is_more && tile >= kFirstQTile && parts < kQParts);
        Q q;
        if (is_q) q.load(p, is_tile ? item.token : now.token, head0(is_tile ? i : now_at), warp % 4 + parts * 4, lane);
        if (is_tile && is_copier) {
          // The next tile's rows are asked for here and found below: ptxas waits for all loads at the end of a loop.
          const bool is_last = tile + 1 == now.tiles;
          Item of = now;  // and field by field, or else both are put into memory
          if (is_last) of.token = item.token, of.first = item.first, of.of_first = item.of_first, of.keys = item.keys;
          const int key = is_last ? my_key : (tile + 1) * kTile + my_key, index = of.index(p, key);
          copy_tile<EVICT_FIRST>(found, at);
          found = find(of, key, index);
        } else if (is_tile) {
          Position half = at;
#pragma unroll 1
          for (int h = 0; h < 2; ++h, half = half.next()) {
            barrier_wait(copied(half.slot), half.parity);
            prepare(half.slot);
          }
        }
        if (is_tile) at = at.next(2);
        if (is_q) {
          const int buffer = served % 2;
          if (parts == 0) barrier_wait(q_empty(buffer), served / 2 & 1 ^ 1);
          q.store(p, warp % 4 + parts * 4, lane, smem + L::kQ + buffer * L::kQBytes,
                  floats(L::kScale) + buffer * kHeads);
          // Twice: those who load the first q are twice as many.
          if (++parts == kQParts) barrier_arrive(q_full(buffer)), barrier_arrive(q_full(buffer));
        }
      }
    }
  }
};

}  // namespace wgmma_rows
}  // namespace mla
