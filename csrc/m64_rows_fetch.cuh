// Rows and q of sparse_mla_m64_rows.cu on their way, which one warpgroup fetches.
#pragma once

#include "m64_rows_block.cuh"

namespace mla {
namespace m64_rows {

template <RowFormat FORMAT>
struct Fetch : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::full, Base::empty, Base::raw_full;
  using Base::raw_empty, Base::q_full, Base::tail_empty, Base::turns;
  using L = Layout<FORMAT>;
  static constexpr bool kPacked = L::kPacked, kIsV4 = L::kIsV4;
  static constexpr int kSpread = 16;

  // Besides the narrow parts of the 16 rows that a warp has of a packed tile, a lane has chunk lane % 8, of 16 bytes,
  // of the wide parts of rows lane / 8, and 4, 8 and 12 further, and their scales of dimensions 64 (lane % 8) on.
  __device__ __forceinline__ const uint8_t* row_of(const uint8_t* mine, int lane_of_row) const {
    return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<int64_t>(mine), lane_of_row));
  }
  // What follows from the lane is found again for each tile, since registers are few.
  __device__ __forceinline__ int opaque_lane() const {
    int again = lane;
    make_opaque(again);
    return again;
  }
  // V4's wide parts, of row lane / 8 + 4k, and scales come a tile ahead, by copies: the compiler waits for loads at the
  // end of a loop. Wide parts stay here, divided, until the slot of their entry is free. `buffer`: of every other tile.
  __device__ __forceinline__ int waiting_at(int buffer, int k) const {
    return L::kWaiting + buffer * kBlockBytes + (warp % 4 * 4 + k) * 512 + lane * 16;
  }
  __device__ __forceinline__ uint4& waiting(int buffer, int k) const {
    return *reinterpret_cast<uint4*>(smem + waiting_at(buffer, k));
  }
  __device__ __forceinline__ int scales_at(int buffer, int row) const {
    return L::kScales + ((buffer * 4 + warp % 4) * 16 + row) * 8;
  }
  // `mine` is where a lane's row is, and `to_scales` how many times 8 bytes further its scales are.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void copy_ahead(int buffer, const uint8_t* mine, uint32_t to_scales, unsigned row_mask,
                                             int first_lane) const {
    const int lane = opaque_lane();
    const uint8_t* rows[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) rows[k] = row_of(mine, first_lane + k * 4 + lane / 8) + L::kWideAt + lane % 8 * 16;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      copy16<EVICT_FIRST, L::kPrefetch>(base + waiting_at(buffer, k), rows[k],
                                        row_mask >> (k * 4 + lane / 8) & 1 ? 16 : 0);
    if (lane / 16 * 16 == first_lane)
      copy8(base + scales_at(buffer, lane % 16), mine + int64_t{to_scales} * 8, row_mask >> lane % 16 & 1 ? 8 : 0);
    copies_commit();
  }
  // What a lane has of 16 rows: scales as they are, then ratios of both rows 8 apart; wide parts as they are, then as
  // they go into the slot.
  struct Lanes {
    uint32_t scales[4], ratios[2];
    uint4 wide[4];
  };
  // Of V4, what came a tile ahead.
  __device__ __forceinline__ void look_at(Lanes& x, int buffer) const {
    const int lane = opaque_lane();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x.scales[k] = lane % 8 < L::kGroups ? smem[scales_at(buffer, k * 4 + lane / 8) + lane % 8] : 0;
      x.wide[k] = waiting(buffer, k);
    }
  }
  // Of V3.2. All addresses come before the first load: a shuffle waits for loads before it.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void ask_for(Lanes& x, const uint8_t* mine, unsigned row_mask, int first_lane) const {
    const int lane = opaque_lane();
    const uint8_t* rows[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) rows[k] = row_of(mine, first_lane + k * 4 + lane / 8);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool exists = row_mask >> (k * 4 + lane / 8) & 1;
      x.scales[k] = load_scale(rows[k] + L::kNarrow + lane % 8 / 2 * 4, exists);
      x.wide[k] = load_wide<EVICT_FIRST>(rows[k] + L::kWideAt + lane % 8 * 16, exists);
    }
  }
  // Finds the powers of two that rows are divided by, so that no value reaches 2^15. The 16 rows have the same if all
  // are there and the largest bounds of their values are within kSpread of each other: then fp16 still holds, of the
  // smallest of them, what lies 2^22 below its bound. Else every row has its own. Divides scales and wide parts.
  __device__ __forceinline__ void prepare(Lanes& x, unsigned row_mask, uint32_t entry) const {
    const int quarter = warp % 4, lane = opaque_lane();
    int powers[4], largest_power = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kIsV4) x.scales[k] <<= 23;
      // E4M3 is below 2^9, a scale below 2 to its exponent plus 1.
      powers[k] = static_cast<int>(x.scales[k] >> 23 & 0xFF) + 1 + 9 - 15;
      if constexpr (kIsV4) {
        uint32_t largest = larger_magnitudes(larger_magnitudes(x.wide[k].x, x.wide[k].y),
                                             larger_magnitudes(x.wide[k].z, x.wide[k].w)) & 0x7FFF7FFF;
        largest = max(largest & 0xFFFF, largest >> 16);
        powers[k] = max(powers[k], static_cast<int>(largest >> 7) + 1 - 15);
      }
      largest_power = max(largest_power, powers[k]);
    }
    largest_power = __reduce_max_sync(~0u, largest_power);
    bool is_common = row_mask == 0xFFFF;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      is_common = is_common && !has_zero_byte(__ballot_sync(~0u, powers[k] >= largest_power - kSpread));
    const auto limited = [](int power) { return min(max(power, 127 - 100), 127 + 100); };
    if (lane == 0)
      smem[L::kCommon + entry % 4 * 4 + quarter] = static_cast<uint8_t>(is_common ? limited(largest_power) : 0);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (is_common) {
        powers[k] = limited(largest_power);
      } else {
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2) powers[k] = max(powers[k], __shfl_xor_sync(~0u, powers[k], mask));
        powers[k] = limited(powers[k]);
        const int row = k * 4 + lane / 8;
        if (lane % 8 == 0)
          smem[L::kPowers + entry % 4 * kTile + row % 8 / 2 * 16 + (quarter * 2 + row / 8) * 2 + row % 2] =
              static_cast<uint8_t>(row_mask >> row & 1 ? powers[k] : 0);
      }
    const auto inverse = [&](int k) { return __int_as_float((254 - powers[k]) << 23); };
#pragma unroll
    for (int k = 0; k < 2; ++k)
      x.ratios[k] = pack_half(__uint_as_float(x.scales[k]) * inverse(k),
                              __uint_as_float(x.scales[k + 2]) * inverse(k + 2));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto divided = [&](uint32_t two) {
        const uint32_t by = (254 - powers[k]) * 0x00800080;
        return kIsV4 ? scaled_to_half(two, by) : scaled_bf16(two, by);
      };
      x.wide[k] = make_uint4(divided(x.wide[k].x), divided(x.wide[k].y), divided(x.wide[k].z), divided(x.wide[k].w));
    }
  }
  // Rows 4 apart have chunks 4 apart: swizzled(row, lane % 8) for all four.
  __device__ __forceinline__ void put_wide(int k, uint32_t entry, const uint4& values) const {
    const int lane = opaque_lane(), at = L::wide_at(entry & 1) + warp % 4 * 16 * 128 + swizzled(lane / 8, lane % 8);
    *reinterpret_cast<uint4*>(smem + (at ^ k % 2 * 64) + k * 512) = values;
  }
  __device__ __forceinline__ void wide_is_put(uint32_t entry) const { fence_async(), barrier_arrive(full(entry & 1)); }
  // A warp has 16 rows of every tile, and 16 heads of q. BF16 rows go into the ring as soon as a slot is free. Narrow
  // parts go where the warpgroups that multiply will find them when they have done with a slot, and widen them into it;
  // wide parts wait for the same slot.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void fetch_items() const {
    const int quarter = warp % 4, row0 = quarter * 16;
    uint32_t entry = 0;
    int buffer = 0;           // of what comes a tile ahead
    bool is_waiting = false;  // the wide part of the entry before
    // By lane 0 of a warp, with the copies of all lanes.
    const auto arrive = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    const auto announce = [&](EntryKind kind, unsigned row_mask) {
      if constexpr (kPacked) {
        barrier_wait(raw_empty(quarter), entry & 1 ^ 1);
        if (is_waiting) {
#pragma unroll
          for (int k = 0; k < 4; ++k) put_wide(k, entry - 1, waiting(buffer ^ 1, k));
          wide_is_put(entry - 1), is_waiting = false;
        }
        if (quarter == 0 && lane == 0) reinterpret_cast<int*>(smem + L::kKinds)[entry % 4] = kind;
      } else if (lane == 0) {
        *reinterpret_cast<uint16_t*>(smem + L::kPowers + entry % 4 * kTile + quarter * 2) =
            static_cast<uint16_t>(row_mask);
      }
    };
    // An entry that is no rows.
    const auto no_rows = [&] { barrier_arrive(raw_full(quarter)), barrier_arrive(raw_full(quarter)); };
    // A lane looks up a row of two tiles, two tiles ahead; false after the last item. What is no index of a row, as a
    // negative one, is that of a missing row.
    const int my_key = lane / 16 * kTile + row0 + lane % 16;
    int turn = 0, i = turns[0], key0 = -2 * kTile, index;
    Item item(p, i, LaneLengths(p, i, lane));
    LaneLengths next_lengths(p, turns[1], lane);
    const auto look_up = [&] {
      key0 += 2 * kTile;
      if (key0 >= item.tiles() * kTile) {
        i = turns[++turn];
        if (i >= p.units) return false;
        item = Item(p, i, next_lengths), key0 = 0;
        next_lengths = LaneLengths(p, turns[turn + 1], lane);
      }
      const int key = key0 + my_key;
      index = -1;
      if (key < item.keys) {
        const bool is_first = key < item.of_first;
        const int32_t* const indices = is_first ? p.sources[0].indices : p.sources[1].indices;
        const int64_t stride = is_first ? p.sources[0].indices_stride : p.sources[1].indices_stride;
        index = indices[Item::token(p, i) * stride + key + (is_first ? item.first : -item.of_first)];
      }
      return true;
    };
    const uint8_t* at;   // this lane's row of two tiles
    uint32_t to_scales;  // of V4's rows, in 8 bytes: behind a page's rows of 576 bytes are 8 for each
    unsigned row_mask;
    const auto find_rows = [&] {
      const Pool& pool = key0 + my_key < item.of_first ? p.sources[0].pool : p.sources[1].pool;
      const Row mine(pool, index);
      at = mine.at;
      to_scales = (pool.page.value - mine.in_page) * 72 + mine.in_page;
      row_mask = __ballot_sync(~0u, mine.exists);
    };
    bool is_more = look_up();
    if (is_more) {
      find_rows();
      if constexpr (kIsV4) copy_ahead<EVICT_FIRST>(buffer, at, to_scales, row_mask & 0xFFFF, 0);
    }
    while (is_more) {
      const bool starts = key0 == 0, two = key0 + kTile < item.tiles() * kTile;
      const auto copy_q_of_item = [&] {
        // Done long ago, but a phase must not go by without a wait.
        if (kPacked && L::kHasTail) barrier_wait(tail_empty(entry & 1), entry / 2 & 1 ^ 1);
        fetch_q<EVICT_FIRST>(Item::token(p, i), Item::head0(p, i), entry & 1);
        arrive(q_full());
        ++entry;
      };
      if (!kPacked && starts) {
        announce(kQ, 0);
        barrier_wait(empty(entry & 1, quarter), entry / 2 & 1);
        copy_q_of_item();
      }
      // V4's unrolled: the compiler would wait at the loop's end for what look_up() has asked for. Others would spill.
#pragma unroll(kIsV4 ? 2 : 1)
      for (int t = 0; t < 2; ++t, ++entry) {
        if (t == 1 && !two) break;
        const unsigned bits = row_mask >> t * 16 & 0xFFFF;
        if constexpr (kPacked) {
          if (t == 0 && starts) {
            announce(kQ, 0), no_rows();
            barrier_wait(raw_empty(quarter), entry & 1);
            copy_q_of_item();
          }
          announce(kKeys, bits);
          copy_narrow<EVICT_FIRST>(at, bits, t * 16);
          copies_arrive(raw_full(quarter));
          Lanes x;
          if constexpr (kIsV4) {
            copies_commit();
            copies_wait<1>();  // all but the narrow parts
            __syncwarp();
            look_at(x, buffer);
          } else {
            ask_for<EVICT_FIRST>(x, at, bits, t * 16);
          }
          prepare(x, bits, entry);
#pragma unroll
          for (int k = 0; k < 2; ++k)
            reinterpret_cast<uint32_t*>(smem + L::kRatios)[quarter * 64 + k * 32 + lane] = x.ratios[k];
          barrier_arrive(raw_full(quarter));
          if constexpr (L::kHasTail) {
            // Only scores need it: it goes where it is needed as soon as those of the last entry but one are done.
            barrier_wait(tail_empty(entry & 1), entry / 2 & 1 ^ 1);
#pragma unroll
            for (int k = 0; k < 4; ++k) put_wide(k, entry, x.wide[k]);
            wide_is_put(entry);
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) waiting(buffer, k) = x.wide[k];
            is_waiting = true;
            buffer ^= 1;
            if (t == 0 && two) copy_ahead<EVICT_FIRST>(buffer, at, to_scales, row_mask >> 16, 16);
          }
        } else {
          announce(kKeys, bits);
          copy_bf16<EVICT_FIRST>(at, bits, t * 16, entry);
          copies_arrive(full(entry & 1));
          arrive(full(entry & 1));
        }
        if (t == 0) is_more = look_up();
      }
      if (is_more) {
        find_rows();
        if constexpr (kIsV4) copy_ahead<EVICT_FIRST>(buffer, at, to_scales, row_mask & 0xFFFF, 0);
      }
    }
    if constexpr (kPacked) announce(kEnd, 0), no_rows();
  }
  // Narrow parts, to where they are widened from; missing ones are zeros. Eight lanes copy 128 bytes of a row, of rows
  // lane / 8 and 4, 8 and 12 further. All addresses come before the first copy, for which a shuffle would wait.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void copy_narrow(const uint8_t* mine, unsigned row_mask, int first_lane) const {
    const int lane = opaque_lane();
    const uint8_t* from[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) from[k] = row_of(mine, first_lane + k * 4 + lane / 8) + lane % 8 * 16;
    const uint32_t to = base + L::kRaw + (warp % 4 * 16 + lane / 8) * L::kNarrow + lane % 8 * 16;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int bytes = row_mask >> (k * 4 + lane / 8) & 1 ? 16 : 0;
#pragma unroll
      for (int line = 0; line < (L::kNarrow + 127) / 128; ++line)
        if (line * 128 + 128 <= L::kNarrow || lane % 8 < L::kNarrow % 128 / 16)
          copy16<EVICT_FIRST, L::kPrefetch>(to + k * 4 * L::kNarrow + line * 128, from[k] + line * 128, bytes);
    }
  }
  // Eight rows at a time: a shuffle waits until the copies before it have left.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void copy_bf16(const uint8_t* mine, unsigned row_mask, int first_lane,
                                            uint32_t entry) const {
    const int row0 = warp % 4 * 16, slot = entry & 1;
    const uint32_t to = base + slot * kTileBytes + lane / 8 * kBlockBytes + row0 * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint8_t* from[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) from[r] = row_of(mine, first_lane + half * 8 + r) + lane * 16;
      if (half == 0) barrier_wait(empty(slot, warp % 4), entry / 2 & 1);
#pragma unroll
      for (int r = 0; r < 8; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          copy16<EVICT_FIRST>(to + half * 1024 + swizzled(r, lane % 8) + c * 4 * kBlockBytes, from[r] + c * 512,
                        row_mask >> (half * 8 + r) & 1 ? 16 : 0);
    }
    if constexpr (L::kHasTail) {
      const uint8_t* from[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        from[k] = row_of(mine, first_lane + k * 4 + lane / 8) + kDim * 2 + lane % 8 * 16;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int r = k * 4 + lane / 8;
        copy16<EVICT_FIRST>(base + L::block_at(slot, kDim / 64) + swizzled(row0 + r, lane % 8), from[k],
                      row_mask >> r & 1 ? 16 : 0);
      }
    }
  }

  // 64 heads of q as they are.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void fetch_q(int token, int head0, int slot) const {
    const int row0 = warp % 4 * 16;
    if (p.is_mapped) {
      if (lane == 0) {
        fence_async();  // what was read there before, and how
        barrier_expect(q_full(), 16 * L::kDims * 2);
#pragma unroll
        for (int c = 0; c < L::kDims / 64; ++c)
          copy_q<EVICT_FIRST>(base + L::block_at(slot, c) + row0 * 128, p.q_map, c * 64, head0 + row0, token,
                        q_full());
      }
      __syncwarp();
      barrier_arrive(q_full());
    } else {
      const int64_t first = token * p.q_token_stride + head0 * p.q_head_stride;
#pragma unroll 1
      for (int r = row0 + lane / 8; r < row0 + 16; r += 4) {
        const bool is = head0 + r < p.heads;
        const __nv_bfloat16* const from =
            static_cast<const __nv_bfloat16*>(p.q) + first + (is ? r * p.q_head_stride : 0) + lane % 8 * 8;
#pragma unroll
        for (int c = 0; c < L::kDims / 64; ++c)
          copy16<EVICT_FIRST>(base + L::block_at(slot, c) + swizzled(r, lane % 8), from + c * 64, is ? 16 : 0);
      }
      copies_arrive(q_full());
    }
  }
};

}  // namespace m64_rows
}  // namespace mla
