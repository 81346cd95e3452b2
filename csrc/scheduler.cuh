// Which tokens, heads and keys a block works on, for kernels over rows of any format.
#pragma once

#include <climits>

#include "sm90_ptx.cuh"
#include "sparse_mla_rows.h"

namespace mla {

struct RowParams : InItems<SparseMlaRows> {
  Divisor by_splits, by_token;  // of items: the blocks that share keys, all blocks of a token

  RowParams(const SparseMlaRows& call, int heads, int splits)
      : InItems(call, heads, splits), by_splits(splits), by_token(splits * head_blocks) {}
  __device__ __forceinline__ int token_of(int item) const { return divided(item, by_token); }
  // Which share of the keys, and which block of heads.
  __device__ __forceinline__ int share_of(int item) const { return item - divided(item, by_splits) * splits; }
  __device__ __forceinline__ int head_block_of(int item) const {
    return divided(item, by_splits) - divided(item, by_token) * head_blocks;
  }
};

// Lengths of an item's token, which are asked for an item ahead.
struct KeyLengths {
  int of[2];

  __device__ __forceinline__ KeyLengths(const RowParams& p, int item) {
    const int at = divided(p.token_of(min(item, p.items - 1)), p.tokens_per_length);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int32_t* const lengths = p.sources[s].lengths;
      const int length = lengths ? lengths[at] : 0;
      of[s] = lengths ? length : INT_MAX;
    }
  }
  __device__ __forceinline__ KeyLengths(int first, int second) : of{first, second} {}
};

// The same, asked for long before they are needed.
struct LaneLengths : LanePair {
  __device__ __forceinline__ LaneLengths(const RowParams& p, int item, int lane) {
    const int at = divided(p.token_of(min(item, p.items - 1)), p.tokens_per_length);
    const int32_t* const lengths = lane & 1 ? p.sources[1].lengths : p.sources[0].lengths;
    mine = lengths ? lengths[at] : INT_MAX;
  }
  __device__ __forceinline__ KeyLengths of_all() const { return {even(), odd()}; }
};

// The keys of an item, in tiles: of its token, or a share of them; those of the first source first.
template <int TILE>
struct Keys {
  int64_t token;
  int of_first, first, keys, tiles;

  __device__ __forceinline__ Keys(const RowParams& p, int item, const KeyLengths& lengths) {
    token = p.token_of(item);
    const auto count = [&](int s) {
      const KeySource& source = p.sources[s];
      return max(source.offset, min(lengths.of[s], source.width + source.offset)) - source.offset;
    };
    of_first = count(0);
    const int all = of_first + (p.second_needs_first && lengths.of[0] <= 0 ? 0 : count(1));
    const int share = (divided(all + p.splits - 1, p.by_splits) + 15) / 16 * 16;
    first = min(p.share_of(item) * share, all);
    keys = min(share, all - first);
    tiles = (max(keys, 1) + TILE - 1) / TILE;  // an empty tile, rather than none
  }
  // Which source key `key` of the item is from.
  __device__ __forceinline__ const KeySource& source(const RowParams& p, int key) const {
    return p.sources[first + key < of_first ? 0 : 1];
  }
  __device__ __forceinline__ int index(const RowParams& p, int key) const {
    if (key >= keys) return -1;
    // Field by field: constants at an address that is not known wait for each other.
    const bool is_first = first + key < of_first;
    const int32_t* const indices = is_first ? p.sources[0].indices : p.sources[1].indices;
    const int64_t stride = is_first ? p.sources[0].indices_stride : p.sources[1].indices_stride;
    return indices[token * stride + first + key - (is_first ? 0 : of_first)];
  }
};

// The sum is that of 2^(score - maximum).
__device__ __forceinline__ void write_statistics(const RowParams& p, int64_t token, int head, float maximum, float sum,
                                                 float largest) {
  const int64_t at = token * p.heads + head;
  constexpr float kLn2 = 0.6931471805599453f;
  p.lse[at] = sum == 0.f ? INFINITY : (maximum + log2f(sum)) * kLn2;
  if (p.max_logits) p.max_logits[at] = largest * kLn2;
}

}  // namespace mla
