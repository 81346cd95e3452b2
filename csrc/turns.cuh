// Which items a block takes one after another, or each of two groups of its warps. Items of different lengths, a few
// for each block, are dealt out longest first, in turns of alternating direction, so that all end at about the same
// time.
#pragma once

#include "sm90_wgmma.cuh"

namespace mla {

constexpr int kMostTurns = 8;  // more items even out by themselves

struct Turns {
  static constexpr int kSizes = 64;  // of items in tiles; larger ones count as the largest
  static constexpr int kListBytes = kMostTurns * 4;
  const int* list;  // items of the block's turns, the number of all behind the last
  int items, group, groups;
  bool is_sorted;

  // If keys are divided among blocks, each has one item.
  __device__ __forceinline__ Turns(const int* list, int items, int group = 0, int groups = 1)
      : list(list), items(items), group(group), groups(groups) {
    const int blocks = gridDim.x;
    is_sorted = items > blocks && items <= kMostTurns * blocks;
  }
  __device__ __forceinline__ int operator[](int turn) const {
    if (!is_sorted) return blockIdx.x + (turn * groups + group) * gridDim.x;
    const int of_block = groups == 1 ? turn : 2 * turn + (turn % 2 ^ group);
    return of_block < kMostTurns ? list[of_block] : items;
  }
};

// As they are numbered.
struct InOrder {
  __device__ __forceinline__ int operator[](int turn) const { return blockIdx.x + turn * gridDim.x; }
};

// Fills the list of `turns`, by all threads of a block, of which there are at least 32 * kMostTurns. Every block finds
// the same order: by `tiles_of` an item, then by number; as they are numbered if all are of one size. `scratch` is free
// again when all have returned, also for copies.
template <typename TilesOf>
__device__ __forceinline__ void sort_items(const Turns& turns, uint8_t* scratch, int* list, const TilesOf& tiles_of) {
  constexpr int kSizes = Turns::kSizes;
  int* const counts = reinterpret_cast<int*>(scratch);
  uint8_t* const sizes = scratch + kSizes * 4;
  const int items = turns.items, padded = (items + 511) / 512 * 512;  // 32 lanes look at 16 items each
  const auto size_of = [&](int i) { return kSizes - 1 - min(tiles_of(i), kSizes - 1); };
  const int of_first = size_of(0);
  bool differs = false;
  for (int i = threadIdx.x; i < padded; i += blockDim.x) {
    const int size = i < items ? size_of(i) : 255;
    differs |= i < items && size != of_first;
    sizes[i] = static_cast<uint8_t>(size);
  }
  if (threadIdx.x < kSizes) counts[threadIdx.x] = 0;
  if (threadIdx.x < kMostTurns) list[threadIdx.x] = blockIdx.x + threadIdx.x * gridDim.x;
  fence_async();
  if (!__syncthreads_or(differs)) return;
  for (int i = threadIdx.x; i < items; i += blockDim.x) atomicAdd(counts + sizes[i], 1);
  __syncthreads();
  const int turn = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const auto sum_before_lane = [&](int mine) { return sum_up_to_lane(mine, lane) - mine; };
  if (turn < kMostTurns) {
    int found = items;
    if (rank < items) {
      // The item of that rank is the `nth` of its size. A lane has two sizes.
      const int2 of = reinterpret_cast<const int2*>(counts)[lane];
      int nth = rank - sum_before_lane(of.x + of.y), size = 2 * lane;
      const int from = __ffs(__ballot_sync(~0u, nth >= 0 && nth < of.x + of.y)) - 1;
      if (nth >= of.x) nth -= of.x, ++size;
      nth = __shfl_sync(~0u, nth, from), size = __shfl_sync(~0u, size, from);
      for (int first = 0; first < padded; first += 512) {
        const uint4 x = *reinterpret_cast<const uint4*>(sizes + first + lane * 16);
        // A bit for each of the lane's 16 items.
        const auto bits = [&](uint32_t four) {
          return (__vcmpeq4(four, size * 0x01010101u) & 0x08040201u) * 0x01010101u >> 24;
        };
        uint32_t same = bits(x.x) | bits(x.y) << 4 | bits(x.z) << 8 | bits(x.w) << 12;
        const int mine = __popc(same), earlier = sum_before_lane(mine);
        const unsigned has_it = __ballot_sync(~0u, nth >= earlier && nth < earlier + mine);
        if (has_it) {
          for (int n = earlier; n < nth; ++n) same &= same - 1;
          found = __shfl_sync(~0u, first + lane * 16 + __ffs(same) - 1, __ffs(has_it) - 1);
          break;
        }
        nth -= __shfl_sync(~0u, earlier + mine, 31);
      }
    }
    if (lane == 0) list[turn] = found;
  }
  fence_async();
  __syncthreads();
}

}  // namespace mla
