// Sizes and shared memory of a block of sparse_mla_mma.cu.
#pragma once

#include "cluster_merge.cuh"
#include "rows.cuh"
#include "turns.cuh"

namespace mla {
namespace mma {

constexpr int kHeads = 16;  // of an item: the M of mma.sync
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kThreads = kConsumerThreads + kProducerThreads;

// The consumer warps are one group of eight or two groups of four. A group has its own shared memory, with a ring of
// stages, and its own producer warps.
template <RowFormat FORMAT, MmaBlock BLOCK>
struct Shape : RowLayout<FORMAT> {
  using R = RowLayout<FORMAT>;
  static constexpr int kGroupWarps = BLOCK == MmaBlock::kPaired || BLOCK == MmaBlock::kShared ? 4 : 8;
  static constexpr int kGroupThreads = kGroupWarps * 32;
  static constexpr int kConsumerGroups = kConsumerThreads / kGroupThreads;
  static constexpr int kProducerWarps = kProducerThreads / 32 / kConsumerGroups;  // of a group

  static constexpr int kWarpKeys = R::kNarrow && BLOCK != MmaBlock::kHalf ? 16 : 8;  // whose scores a warp computes
  static constexpr int kKeys = kGroupWarps * kWarpKeys;                              // of a stage
  // As many as fit.
  static constexpr int kStages = BLOCK == MmaBlock::kHalf ? 4 : R::kPitch == 512 || R::kPitch == 1024 ? 3 : 2;
  // Groups of four have few and small stages. They release a stage in parts, the rows of each producer warp, so that
  // the first of these warps copies while values of the others' rows are still read.
  static constexpr int kStageParts = kGroupWarps == 4 ? kProducerWarps : 1;

  // Split-KV: whether blocks may share a token's keys.
  static constexpr bool kCanSplit = BLOCK == MmaBlock::kWhole || BLOCK == MmaBlock::kHalf;
  // There may be no room for what they tell each other but the last stage, which the ring then does without.
  static constexpr bool kTellsInRing = BLOCK == MmaBlock::kWhole && kStages == 3;
  static __device__ __forceinline__ int stages(const RowParams& p) {
    return kTellsInRing && p.splits > 1 ? kStages - 1 : kStages;
  }

  // In Q K^T four lanes read a slice of a key at once: 64 bytes, four k-steps of narrow dimensions or two of wide ones.
  static constexpr int kNarrowSlices = R::kNarrow / 64, kWideSlices = R::kWide / 32;
  // q is loaded in pieces of 64 dimensions, four k-steps.
  static constexpr int kQPieces = R::kDims / 64;
  // Fragments of q stay in registers for the first k-steps, and in shared memory for the others. With more of them in
  // registers, packed rows had too few left to load rows ahead of their products.
  static constexpr int kRegisterSteps = kGroupWarps == 8 ? 32 : R::kIsScaled ? 12 : 16;
  static constexpr int kRegisterPieces = kRegisterSteps / 4;
  // Places for pieces in shared memory: Scores::slot().
  static constexpr int kQSlots = kGroupWarps + (kGroupWarps == 4 ? 4 - kRegisterPieces : 0) + (kQPieces > 8 ? 1 : 0);
  // The tensor core starts four products in the time that one takes, so a warp has four independent sums: so many for
  // each 8 of its keys.
  static constexpr int kChains = 4 / (kWarpKeys / 8);
  // Over packed rows these are sums over different scale groups, so many in each round. Other rows have one slice a
  // round.
  static constexpr int kRoundGroups = R::kIsScaled ? kChains : 1;
  static constexpr int kRounds = R::kIsScaled ? (R::kGroups + kRoundGroups - 1) / kRoundGroups : kNarrowSlices;
  static constexpr int kFloatScaleRounds = R::kScales == Scales::kUe8m0 ? kRounds : 1;
  static constexpr int kPaddedGroups = R::kIsScaled ? (R::kGroups + 3) / 4 * 4 : 1;  // so that lanes have equal shares

  // In P V a warp has 64 or 128 dimensions of all keys, in runs that have one scale.
  static constexpr int kWarpDims = kDim / kGroupWarps;
  static constexpr int kRunDims = kGroupWarps == 4 && R::kNarrow && (!R::kIsScaled || R::kGroup == 128) ? 128 : 64;
  static constexpr int kTerms = R::kNarrow ? 1 : 2;  // of weights: BF16 ones come as high and low part
  static constexpr bool kHasMixedValues = R::kNarrow && R::kHasWideValues;

  // The 168 that each of 384 threads begins with are shared out anew.
  static constexpr int kProducerRegisters = FORMAT == RowFormat::kV4 && kGroupWarps == 4 ? 56 : 40;
  static constexpr int kConsumerRegisters = kProducerRegisters == 56 ? 224 : 232;
  static_assert(kProducerThreads * kProducerRegisters + kConsumerThreads * kConsumerRegisters <= kThreads * 168,
                "or else the warps that take registers wait for ever");
  static_assert(kKeys / kProducerWarps <= 32, "a lane looks up one row");

  // A row is cut into chunks of 16 bytes, and chunk c of row r lies at c ^ swizzle(r). Eight lanes that read one phase
  // of either product (two rows by four chunks for Q K^T, four rows by two chunks for P V) then hit all banks.
  static __device__ __forceinline__ int swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }
  // Where chunk `c` of line `line` of row `row8` + `row` is in a stage. `row8` is a multiple of 8: swizzles repeat
  // after 8 rows, so that addresses of different `row8` differ by constants.
  static __device__ __forceinline__ int chunk_at(int row8, int row, int line, int c) {
    return (row8 + row) * R::kPitch + line * 128 + (c ^ swizzle(row)) * 16;
  }
  // A thread has columns 2t and 2t + 1 of each block of 8 columns of outputs. Dimensions are dealt to columns so that
  // column 2t + i of blocks 8 * eight to 8 * eight + 7 has 8 neighbouring ones, of which this is the first.
  static __device__ __forceinline__ int first_dim(int warp, int t, int i, int eight) {
    return warp * kWarpDims + (2 * t + i) * (kRunDims / 8) + eight * (kRunDims == 128 ? 8 : 64);
  }
};

// Weights of a stage's keys, and what belongs to them.
template <typename S>
struct Weights {
  uint4 term[S::kTerms][S::kKeys / 16][32];              // A fragments of 16 keys
  alignas(16) __half ratio[S::kPaddedGroups][S::kKeys];  // of each scale to its row's power, at ratio_at()
  alignas(16) RowPower power[S::kIsScaled ? S::kKeys : 1];

  // A thread multiplies with the ratios of keys 2t and 2t + 1 of every eight. These lie one after another.
  static __device__ __forceinline__ int ratio_at(int key) {
    return key % 8 / 2 * (S::kKeys / 4) + key / 8 * 2 + key % 2;
  }
};

// Of a group.
template <typename S>
struct alignas(128) SharedStorage {
  uint8_t rows[S::kStages][S::kKeys * S::kPitch];
  uint4 q[S::kQSlots * 4][32];  // fragments, on their way into registers or to stay
  Weights<S> weights[2];
  uint8_t scales[S::kStages][S::kIsScaled ? S::kKeys * S::kScaleBytes : 16];  // as they come
  // UE8M0 scales as float32, by which scores are multiplied.
  alignas(16) float float_scales[S::kGroupWarps][S::kFloatScaleRounds][S::kWarpKeys][S::kRoundGroups];
  float bias[S::kStages][S::kKeys];  // 0, or -inf for a missing row
  float row_max[kHeads][S::kGroupWarps];  // of each warp; at an item's end, sums
  float row_largest[kHeads][S::kGroupWarps];
  float row_stat[3][kHeads];  // maximum, sum, largest score
  uint32_t largest_q[kHeads][S::kQPieces];
  float q_scale[kHeads];
  float sinks[kHeads], bmm2;
  alignas(8) uint64_t full[S::kStages];
  uint64_t empty[S::kStages][S::kStageParts];
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
