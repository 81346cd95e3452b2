// Rows of sparse_mla_wgmma_rows.cu on their way, which two warpgroups fetch and widen.
#pragma once

#include "wgmma_rows_block.cuh"

namespace mla {
namespace wgmma_rows {

// A warp has 8 rows of every tile, and four lanes a row. Of each 64 bytes of its parts a lane has 16, which come into
// registers while the tile before is widened.
template <RowFormat FORMAT>
struct Fetch : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::full, Base::empty, Base::turns, Base::lane_again;
  using L = Layout<FORMAT>;
  using KeyScales = RowScales<L::kScales>;
  static constexpr int kNarrowChunks = L::kNarrow / 64, kWideChunks = L::kWide * 2 / 64;  // of a lane

  struct Part {
    uint4 narrow[kNarrowChunks], wide[kWideChunks];
    KeyScales scales;
    unsigned there;  // a bit for each of the warp's rows
  };

  template <bool FIRST>
  __device__ __forceinline__ void ask_for(Part& part, const Pool& pool, int index) const {
    const Row row(pool, index);
    const int lane = lane_again();
    part.there = __ballot_sync(~0u, __shfl_sync(~0u, row.exists, lane % 8 * 4)) & 0xFF;
    // UE8M0 scales are behind the rows of a page, 8 bytes for each.
    if constexpr (L::kHasFloatScales) {
      const uint4 raw = load16<FIRST>(row.at + L::kNarrow, row.exists);
      part.scales.raw = make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                                    __uint_as_float(raw.w));
    } else {
      part.scales.raw = load8(row.page + int64_t{pool.page.value} * 576 + row.in_page * 8, row.exists);
    }
    const uint8_t* const at = row.at + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < kWideChunks; ++i) part.wide[i] = load16<FIRST>(at + L::kWideAt + i * 64, row.exists);
#pragma unroll
    for (int i = 0; i < kNarrowChunks; ++i) part.narrow[i] = load16<FIRST>(at + i * 64, row.exists);
  }

  // The power of two that the row is divided by, so that none of its values reaches 2^15.
  __device__ __forceinline__ uint32_t power_of(const Part& part) const {
    uint32_t largest_scale = 0;
#pragma unroll
    for (int i = 0; i < L::kGroups; ++i) largest_scale = max(largest_scale, magnitude(part.scales.of_group(i)));
    uint32_t power = power_of_row(largest_scale);
    if constexpr (L::kHasWideValues) {
      uint32_t wide = 0;
#pragma unroll
      for (int i = 0; i < kWideChunks; ++i)
        wide = larger_magnitudes(wide, larger_magnitudes(larger_magnitudes(part.wide[i].x, part.wide[i].y),
                                                         larger_magnitudes(part.wide[i].z, part.wide[i].w)));
      wide &= 0x7FFF7FFF;
      wide = max(wide & 0xFFFF, wide >> 16) >> 7;  // an exponent
      wide = max(wide, __shfl_xor_sync(~0u, wide, 1));
      wide = max(wide, __shfl_xor_sync(~0u, wide, 2));
      power = max(power, static_cast<uint32_t>(min(max(static_cast<int>(wide) + 1 - 15, 127 - 100), 127 + 100)));
    }
    return power;
  }

  // Into slot `count` of all, once it is free: values of 64 dimensions are multiplied by the ratio of their scale to
  // the row's power.
  __device__ __forceinline__ void put(const Part& part, uint32_t count) const {
    const int slot = count % L::kSlots, row = warp % 8 * 8 + lane / 4, t = lane % 4;
    const uint32_t power = power_of(part);
    const float inverse = __uint_as_float((254 - power) << 23);
    uint8_t* const to = smem + L::kRing + slot * L::kSlotBytes + row * 128;
    // Chunk c of a row is at c ^ (row % 8).
    const int chunk = (t * 2 ^ row & 7) << 4, wide_chunk = (t ^ row & 7) << 4;
    barrier_wait(empty(slot), count / L::kSlots & 1 ^ 1);
#pragma unroll
    for (int i = 0; i < kNarrowChunks; ++i) {
      const uint32_t ratio = __half_as_ushort(__float2half_rn(part.scales.of_group(i * 64 / L::kGroup) * inverse));
      const uint32_t by = ratio * 0x10001;
      const uint4 x = part.narrow[i];
      uint8_t* const block = to + i * L::kBlockBytes;
      *reinterpret_cast<uint4*>(block + chunk) =
          make_uint4(times(e4m3_low(x.x), by), times(e4m3_high(x.x), by), times(e4m3_low(x.y), by),
                     times(e4m3_high(x.y), by));
      *reinterpret_cast<uint4*>(block + (chunk ^ 16)) =
          make_uint4(times(e4m3_low(x.z), by), times(e4m3_high(x.z), by), times(e4m3_low(x.w), by),
                     times(e4m3_high(x.w), by));
    }
    const uint32_t by = (254 - power) * 0x00800080;  // BF16, twice
#pragma unroll
    for (int i = 0; i < kWideChunks; ++i) {
      const auto divided = [&](uint32_t x) { return L::kHasWideValues ? scaled_to_half(x, by) : scaled_bf16(x, by); };
      uint8_t* const block = L::kHasWideValues ? to + kNarrowChunks * L::kBlockBytes
                                               : smem + L::kTail + slot * L::kBlockBytes + row * 128;
      const uint4 x = part.wide[i];
      *reinterpret_cast<uint4*>(block + (wide_chunk ^ i * 64)) =
          make_uint4(divided(x.x), divided(x.y), divided(x.z), divided(x.w));
    }
    if (t == 0) smem[L::kPowers + slot * kTile + row] = static_cast<uint8_t>(power);
    if (lane == 0) smem[L::kThere + slot * 8 + warp % 8] = static_cast<uint8_t>(part.there);
    fence_async();
    barrier_arrive(full(slot));
  }

  template <bool FIRST>
  __device__ __forceinline__ void fetch() const {
    const int my_row = warp % 8 * 8 + lane / 4;
    int turn = 0, i = turns[0], tile = 0;
    Item item(p, i, KeyLengths(p, i));
    LaneLengths lengths(p, turns[1], lane);
    // Of the next tile, a lane's row.
    int index = item.index(p, my_row);
    bool is_first = item.first + my_row < item.of_first, is_more = true;
    const auto look_up = [&] {
      if (++tile == item.tiles) {
        i = turns[++turn], tile = 0;
        if (!(is_more = i < p.items)) return;
        item = Item(p, i, lengths.of_all());
        lengths = LaneLengths(p, turns[turn + 1], lane);
      }
      const int key = tile * kTile + my_row;
      index = item.index(p, key), is_first = item.first + key < item.of_first;
    };
    const auto ask_for_next = [&](Part& part) {
      ask_for<FIRST>(part, is_first ? p.sources[0].pool : p.sources[1].pool, index);
      look_up();
    };
    // Puts one tile while the one after it comes; false after the last.
    uint32_t count = 0;
    const auto put_one = [&](const Part& now, Part& after) {
      const bool was_last = !is_more;
      if (!was_last) ask_for_next(after);
      put(now, count++);
      return !was_last;
    };
    Part even, odd;
    ask_for_next(even);
    while (put_one(even, odd) && put_one(odd, even)) {
    }
  }
};

}  // namespace wgmma_rows
}  // namespace mla
