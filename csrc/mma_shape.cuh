// What a block of sparse_mla_mma.cu works with: sizes, and shared memory.
#pragma once

#include "cluster_merge.cuh"
#include "rows.cuh"
#include "turns.cuh"

namespace mla {
namespace mma {

constexpr int kHeads = 16;  // of an item: the M of mma.sync
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kThreads = kConsumerThreads + kProducerThreads;

template <RowFormat FORMAT, MmaBlock BLOCK>
struct Shape : RowLayout<FORMAT> {
  using R = RowLayout<FORMAT>;
  static constexpr int kWarps = BLOCK == MmaBlock::kPaired || BLOCK == MmaBlock::kShared ? 4 : 8;  // of a group
  static constexpr int kConsumerGroups = kConsumerThreads / 32 / kWarps;
  static constexpr int kGroupThreads = kWarps * 32;
  static constexpr int kProducerWarps = kProducerThreads / 32 / kConsumerGroups;  // of a group
  // Of a stage, handed back one after another: the rows of each warp that fetches, where a ring has few stages.
  static constexpr int kParts = kWarps == 4 ? kProducerWarps : 1;
  static constexpr int kKeysWarp = R::kNarrow && BLOCK != MmaBlock::kHalf ? 16 : 8;
  static constexpr int kKeys = kWarps * kKeysWarp;                                // of a stage
  static constexpr int kRatios = R::kIsScaled ? (R::kGroups + 3) / 4 * 4 : 1;  // of scales, an even share a lane
  // As many as fit.
  static constexpr int kStages = BLOCK == MmaBlock::kHalf ? 4 : R::kPitch == 512 || R::kPitch == 1024 ? 3 : 2;
  // Whether blocks may share a token's keys.
  static constexpr bool kMerges = BLOCK == MmaBlock::kWhole || BLOCK == MmaBlock::kHalf;
  // What they tell each other has no room but in the last stage, which then is none.
  static constexpr bool kTellsInRing = BLOCK == MmaBlock::kWhole && kStages == 3;
  static __device__ __forceinline__ int stages(const RowParams& p) {
    return kTellsInRing && p.splits > 1 ? kStages - 1 : kStages;
  }
  // Of 16 dimensions, in the products with q: four to a 64-byte unit of narrow ones, two to one of wide ones.
  static constexpr int kNarrowUnits = R::kNarrow / 64, kWideUnits = R::kWide / 32;
  static constexpr int kPieces = R::kDims / 64;               // of q, 64 dimensions each
  // Whose q is in registers; the rest is in shared memory. With more of it there, loads of packed rows' scores would come
  // late, for want of registers.
  static constexpr int kHeldSteps = kWarps == 8 ? 32 : R::kIsScaled ? 12 : 16, kHeldPieces = kHeldSteps / 4;
  static constexpr int kQSlots = kWarps + (kWarps == 4 ? 4 - kHeldPieces : 0) + (kPieces > 8 ? 1 : 0);
  // Scores of a warp over packed rows: sums over the dimensions that have one scale, four at a time, in so many rounds.
  static constexpr int kTogether = R::kIsScaled ? 32 / kKeysWarp : 1;
  static constexpr int kRounds = R::kIsScaled ? (R::kGroups + kTogether - 1) / kTogether : kNarrowUnits;
  // In P V a warp has 64 or 128 dimensions of all keys, in runs that have one scale.
  static constexpr int kDimsWarp = kDim / kWarps;
  static constexpr int kRun = kWarps == 4 && R::kNarrow && (!R::kIsScaled || R::kGroup == 128) ? 128 : 64;
  static constexpr int kTerms = R::kNarrow ? 1 : 2;  // of weights: BF16 ones come as high and low part
  static constexpr bool kHasBoth = R::kNarrow && R::kHasWideValues;
  // Of the 168 that 384 threads begin with.
  static constexpr int kProducerRegisters = FORMAT == RowFormat::kV4 && kWarps == 4 ? 56 : 40;
  static constexpr int kConsumerRegisters = kProducerRegisters == 56 ? 224 : 232;
  static_assert(kProducerThreads * kProducerRegisters + kConsumerThreads * kConsumerRegisters <= kThreads * 168,
                "or else the warps that take registers wait for ever");
  static_assert(kKeys / kProducerWarps <= 32, "a lane looks up one row");

  // A row is cut into chunks of 16 bytes, and chunk c of row r lies at c ^ swizzle(r). Eight lanes that read one phase
  // of either product (two rows by four chunks for Q K^T, four rows by two chunks for P V) then hit all banks.
  static __device__ __forceinline__ int swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }
  // Where chunk `c` of 128 bytes, of line `line`, of row `row8` + `row` is in a stage. `row8` is a multiple of 8, apart
  // because swizzles repeat, and addresses of rows 8 apart then differ by constants.
  static __device__ __forceinline__ int chunk_at(int row8, int row, int line, int c) {
    return (row8 + row) * R::kPitch + line * 128 + (c ^ swizzle(row)) * 16;
  }
  // Column 2t + i of block 8 * eight of a warp's dimensions; the seven blocks after it hold the next ones.
  static __device__ __forceinline__ int first_dim(int warp, int t, int i, int eight) {
    return warp * kDimsWarp + (2 * t + i) * (kRun / 8) + eight * (kRun == 128 ? 8 : 64);
  }
};

// Weights of a stage's keys, as A fragments of 16 keys.
template <typename S>
struct Weights {
  uint4 term[S::kTerms][S::kKeys / 16][32];
  alignas(16) __half ratio[S::kRatios][S::kKeys];  // of a scale to its row's power
  alignas(16) RowPower power[S::kIsScaled ? S::kKeys : 1];

  // Of a key's ratio: those that a thread multiplies with, 2t and 2t + 1 of every eight, lie one after another.
  static __device__ __forceinline__ int place_of(int key) {
    return key % 8 / 2 * (S::kKeys / 4) + key / 8 * 2 + key % 2;
  }
};

template <typename S>
struct alignas(128) SharedStorage {
  uint8_t rows[S::kStages][S::kKeys * S::kPitch];
  uint4 q[S::kQSlots * 4][32];  // on its way into fragments, and those that stay here
  Weights<S> weights[2];
  uint8_t scales[S::kStages][S::kIsScaled ? S::kKeys * S::kScaleBytes : 16];
  // Exponents as float32, as scores need them.
  alignas(16) float key_scales[S::kWarps][S::kScales == Scales::kUe8m0 ? S::kRounds : 1][S::kKeysWarp][S::kTogether];
  float bias[S::kStages][S::kKeys];  // 0, or -inf for a missing row
  float row_max[kHeads][S::kGroupThreads / 32];
  float row_largest[kHeads][S::kGroupThreads / 32];
  float row_stat[3][kHeads];  // maximum, sum, largest score
  uint32_t largest_q[kHeads][S::kPieces];
  float q_scale[kHeads];
  float sinks[kHeads], bmm2;
  alignas(8) uint64_t full[S::kStages];
  uint64_t empty[S::kStages][S::kParts];
  int turns[kMostTurns];  // of the block; only in its first group's
};

// What a block that shares its token's keys is told by all of them.
using Told = Received<kHeads, kMmaMaxSplits, 16, true>;
template <typename S>
__device__ __forceinline__ Told& told_of(SharedStorage<S>* groups) {
  static_assert(!S::kTellsInRing || sizeof(Told) <= sizeof(groups->rows[0]), "");
  return *reinterpret_cast<Told*>(S::kTellsInRing ? static_cast<void*>(groups->rows[S::kStages - 1])
                                                  : groups + S::kConsumerGroups);
}

}  // namespace mma
}  // namespace mla
