// Rows and q of sparse_mla_wgmma_rows.cu on their way, which one warpgroup fetches.
#pragma once

#include "wgmma_rows_block.cuh"

namespace mla {
namespace wgmma_rows {

template <RowFormat FORMAT>
struct Fetch : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::empty, Base::q_full;
  using Base::q_empty, Base::turns, Base::opaque_lane, Base::head0;
  using L = Layout<FORMAT>;
  // A slot is prepared when the copies of so many later ones have begun. A slot is free once two tiles of the others
  // are multiplied, so that nobody waits for one that is not prepared.
  static constexpr int kBehind = 2;
  static_assert(L::kSlots >= 4 + kBehind + 1, "or else all wait for each other");

  // A warp has 8 rows of every slot. Eight lanes copy 128 bytes of a row, 16 each, so that a lane has part of rows
  // lane / 8 and 4 further; the lane that has looked up a row, `first_lane` + r, copies its scales.
  struct Addresses {
    const uint8_t *rows[2], *scales;
  };
  // Both are passed on before the first copy: a shuffle after it would wait until the copy has left.
  __device__ __forceinline__ Addresses pass_on(const uint8_t* mine, const uint8_t* scales, int first_lane) const {
    const int lane = opaque_lane();
    Addresses a;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int64_t row = __shfl_sync(~0u, reinterpret_cast<int64_t>(mine), first_lane + lane / 8 + k * 4);
      a.rows[k] = reinterpret_cast<const uint8_t*>(row) + lane % 8 * 16;
      make_opaque(a.rows[k]);
    }
    a.scales = scales;
    return a;
  }
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void copy(const Addresses& from, int slot, int first_lane, unsigned row_mask) const {
    const int lane = opaque_lane();
    uint32_t to = base + L::kRing + slot * L::kSlotBytes + warp % 4 * L::kGroupBytes + swizzled(lane / 8, lane % 8);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint8_t* const row = from.rows[k];
      const int bytes = row_mask >> (lane / 8 + k * 4) & 1 ? 16 : 0;
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
      to = (to ^ 64) + 512;  // rows 4 apart have chunks 4 apart
    }
    if (lane / 8 * 8 == first_lane) {
      const int r = lane % 8;
      const uint32_t at = base + L::kRowScales + (slot * 32 + warp % 4 * 8 + r) * 16;
      if constexpr (L::kHasFloatScales)
        copy16<EVICT_FIRST, L::kPrefetch>(at, from.scales, row_mask >> r & 1 ? 16 : 0);
      else
        copy8(at, from.scales, row_mask >> r & 1 ? 8 : 0);
    }
    copies_commit();
  }

  // Rows that have come, and what this warp has copied of them. Finds the powers of two that values are divided by, so
  // that none reaches 2^15, and the ratios of scales to them.
  __device__ __forceinline__ void prepare(int slot, unsigned row_mask) const {
    const int lane = opaque_lane(), row0 = slot * 32 + warp % 4 * 8;
    const auto ratio = [](float scale, uint32_t power) {
      return __half_as_ushort(__float2half_rn(scale * __uint_as_float((254 - power) << 23)));
    };
    const auto ratio_at = [&](int of, int row) {
      return reinterpret_cast<uint16_t*>(smem + L::kRatios) + (slot * L::kGroups + of) * 32 + warp % 4 * 8 + row;
    };
    if constexpr (L::kHasFloatScales) {
      // A lane has a scale.
      const int row = lane / 4, of = lane % 4;
      const float scale = reinterpret_cast<const float*>(smem + L::kRowScales)[row0 * 4 + lane];
      uint32_t largest = magnitude(scale);
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
      *ratio_at(of, row) = ratio(scale, power_of_row(largest));
    } else {
      // A lane has chunk lane % 8 of the wide parts of rows lane / 8 and 4 further, which it divides too, and one of
      // their scales.
      const int row = lane / 8, of = lane % 8;
      uint8_t* const of_rows = smem + L::kRowScales + (row0 + row) * 16;
      // Rows 4 apart have chunks 4 apart.
      uint8_t* const wide_parts = smem + L::kRing + slot * L::kSlotBytes + warp % 4 * L::kGroupBytes + L::kWideAtGroup;
      uint4* const wide_at[2] = {reinterpret_cast<uint4*>(wide_parts + swizzled(row, of)),
                                 reinterpret_cast<uint4*>(wide_parts + (swizzled(row, of) ^ 64) + 512)};
      // Exponents, of both rows in a word.
      const uint32_t scales = of < L::kGroups ? of_rows[of] | of_rows[64 + of] << 16 : 0;
      const uint4 wide[2] = {*wide_at[0], *wide_at[1]};
      uint32_t largest[2];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        largest[k] = larger_magnitudes(larger_magnitudes(wide[k].x, wide[k].y),
                                       larger_magnitudes(wide[k].z, wide[k].w)) & 0x7FFF7FFF;
      const uint32_t wides = __vmaxu2(__byte_perm(largest[0], largest[1], 0x5410),
                                      __byte_perm(largest[0], largest[1], 0x7632)) >> 7 & 0x00FF00FF;
      // As power_of_row() has it, but for 14.
      uint32_t powers = __vmaxu2(scales + 9 * 0x10001, wides);
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) powers = __vmaxu2(powers, __shfl_xor_sync(~0u, powers, mask));
      powers = __vminu2(__vmaxu2(powers, (14 + 27) * 0x10001), (14 + 227) * 0x10001) - 14 * 0x10001;
      __syncwarp();  // all have read their scales
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t power = powers >> k * 16 & 0xFFFF, by = (254 - power) * 0x00800080;
        const uint16_t mine = ratio(__uint_as_float((scales >> k * 16 & 0xFF) << 23), power);
        reinterpret_cast<uint16_t*>(of_rows + k * 64)[of] = of < L::kGroups ? mine : power;
        if (of < L::kGroups) *ratio_at(of, row + k * 4) = mine;
        *wide_at[k] = make_uint4(scaled_to_half(wide[k].x, by), scaled_to_half(wide[k].y, by),
                                 scaled_to_half(wide[k].z, by), scaled_to_half(wide[k].w, by));
      }
    }
    if (lane == 0) smem[L::kRowMasks + slot * 4 + warp % 4] = static_cast<uint8_t>(row_mask);
    barrier_arrive(full(slot));
  }

  // The next item's q into the L2 cache.
  __device__ __forceinline__ void prefetch_q(int64_t token, int head0) const {
    constexpr int kLines = L::kDims * 2 / 128;
    const int lane = opaque_lane();
    const __nv_bfloat16* const q = static_cast<const __nv_bfloat16*>(p.q) + token * p.q_token_stride + lane % 16 * 64;
#pragma unroll 1
    for (int head = head0 + warp % 4 * 2 + lane / 16; head < min(p.heads, head0 + kHeads); head += 8)
      if (lane % 16 < kLines) asm volatile("prefetch.global.L2 [%0];" ::"l"(q + head * p.q_head_stride));
  }

  template <bool EVICT_FIRST>
  __device__ __forceinline__ void fetch() const {
    constexpr int kQParts = 4;  // that q is loaded in
    using Q = QLoader<FORMAT, 4 * kQParts>;
    const int my_key = (lane / 8 * 4 + warp % 4) * 8 + lane % 8;  // of two tiles, whose rows a lane looks up
    uint32_t begun = 0, prepared = 0, of_last = 0;  // slots, and which rows of the last four there are
    const auto prepare_next = [&] {
      prepare(prepared % L::kSlots, of_last >> (begun - prepared - 1) * 8 & 0xFF);
      ++prepared;
    };
    const auto prepare_all = [&] {
      copies_wait<0>();
      __syncwarp();
#pragma unroll 1
      while (prepared < begun) prepare_next();
    };
    // The `served`th item's q, in parts. The first one's is loaded by those who have nothing else to do yet.
    uint32_t served = 0;
    int parts = kQParts;
    const auto store_q = [&](Q& q) {
      const int buffer = served % 2;
      if (parts == 0) barrier_wait(q_empty(buffer), served / 2 & 1 ^ 1);
      q.store(p, warp % 4 + parts * 4, lane, smem + L::kQ + buffer * L::kQBytes, floats(L::kScale) + buffer * kHeads);
      // Twice: those who load the first q are twice as many.
      if (++parts == kQParts) barrier_arrive(q_full(buffer)), barrier_arrive(q_full(buffer));
    };

    int turn = 0, i = turns[0];
    Item item(p, i, KeyLengths(p, i));
    LaneLengths lengths(p, turns[1], lane);
    int next = item.index(p, my_key);
    while (i < p.items) {
      const int now_at = i;
      i = turns[++turn];
      const Item now = item;
      item = Item(p, i, lengths.of_all());
      const bool is_more = i < p.items;
      if (!is_more) item.keys = 0;
      lengths = LaneLengths(p, turns[turn + 1], lane);
      if (is_more) prefetch_q(item.token, head0(i));
      if (parts < kQParts) {
        prepare_all();
#pragma unroll 1
        while (parts < kQParts) {
          Q q;
          q.load(p, now.token, head0(now_at), warp % 4 + parts * 4, lane);
          store_q(q);
        }
      }
      ++served, parts = 0;
      for (int key0 = 0; key0 < now.tiles * kTile; key0 += 128) {
        const Pool& pool = now.first + key0 + my_key < now.of_first ? p.sources[0].pool : p.sources[1].pool;
        const Row mine(pool, next);
        // UE8M0 scales are behind the rows of a page, 8 bytes for each.
        const uint8_t* const scales =
            L::kHasFloatScales ? mine.at + L::kNarrow : mine.page + int64_t{pool.page.value} * 576 + mine.in_page * 8;
        const unsigned row_mask = __ballot_sync(~0u, mine.exists);
        next = key0 + 128 < now.tiles * kTile ? now.index(p, key0 + 128 + my_key) : item.index(p, my_key);
#pragma unroll 1
        for (int h = 0; h < 4; ++h) {
          if (key0 + h * 32 >= now.tiles * kTile) break;
          const unsigned bits = row_mask >> h * 8 & 0xFF;
          const Addresses from = pass_on(mine.at, scales, h * 8);
          barrier_wait(empty(begun % L::kSlots), begun / L::kSlots & 1 ^ 1);
          copy<EVICT_FIRST>(from, begun % L::kSlots, h * 8, bits);
          of_last = of_last << 8 | bits, ++begun;
          // The next item's q, a part with each of four slots, comes while another slot is prepared.
          const bool is_q = key0 == 128 && is_more;
          Q q;
          if (is_q) q.load(p, item.token, head0(i), warp % 4 + parts * 4, lane);
          if (begun - prepared > kBehind) {
            copies_wait<kBehind>();
            __syncwarp();
            prepare_next();
          }
          if (is_q) store_q(q);
        }
      }
    }
    prepare_all();
  }
};

}  // namespace wgmma_rows
}  // namespace mla
