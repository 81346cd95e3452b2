// Epilogue of sparse_mla_mma.cu: outputs are merged, if a token's keys are split, and written.
#pragma once

#include "mma_values.cuh"

namespace mla {
namespace mma {

// The same warp, and what it does with outputs.
template <RowFormat FORMAT, MmaBlock BLOCK>
struct Outputs : Values<FORMAT, BLOCK> {
  using Base = Values<FORMAT, BLOCK>;
  using Base::p, Base::shared, Base::warp, Base::group, Base::g, Base::t, Base::thread, Base::acc;
  using Base::maximum, Base::sum, Base::largest, Base::Base;
  using S = typename Base::S;
  static constexpr int kDimBlocks = Base::kDimBlocks;

  __device__ __forceinline__ void write_outputs(int64_t token, int head0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = g + h * 8, head = head0 + row;
      if (head >= p.heads) continue;
      const float sink = shared.sinks[row];
      float shift = fmaxf(maximum[h], sink);
      if (shift == -INFINITY) shift = 0.f;
      const float mine = exp2_fast(maximum[h] - shift);
      const float total = sum[h] * mine + exp2_fast(sink - shift);
      const float factor = total > 0.f ? shared.bmm2 * mine / total : 0.f;
      if (p.lse && warp == 0 && t == 0)
        write_statistics(p, token, head, maximum[h], sum[h], largest[h]);
      __nv_bfloat16* const to = output_at(p, token, head);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int eight = 0; eight < kDimBlocks / 8; ++eight) {
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            packed[j] = pack_bf16(acc[eight * 8 + 2 * j][2 * h + i] * factor,
                                  acc[eight * 8 + 2 * j + 1][2 * h + i] * factor);
          *reinterpret_cast<uint4*>(to + S::first_dim(warp, t, i, eight)) =
              make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
  }

  // The two groups of a block (kShared) have half of an item's keys each, and the same heads and dimensions in each
  // thread. The second gives the first what it has, through its ring, which nobody reads any more.
  __device__ __forceinline__ void merge_halves() {
    SharedStorage<S>& second = group ? shared : (&shared)[1];
    static_assert(kHeads * kDim * sizeof(float) <= sizeof(second.rows), "outputs must fit the ring");
    float4* const theirs = reinterpret_cast<float4*>(second.rows) + thread;
    if (group) {
#pragma unroll
      for (int j = 0; j < kDimBlocks; ++j)
        theirs[j * S::kGroupThreads] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
      if (warp == 0 && t == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          shared.row_stat[0][g + h * 8] = maximum[h];
          shared.row_stat[1][g + h * 8] = sum[h];
          shared.row_stat[2][g + h * 8] = largest[h];
        }
      }
    }
    sync_threads(3, kConsumerThreads);
    if (group) return;
    float mine[2], other[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float their_maximum = second.row_stat[0][g + h * 8], most = fmaxf(maximum[h], their_maximum);
      const float shift = most == -INFINITY ? 0.f : most;
      mine[h] = exp2_fast(maximum[h] - shift), other[h] = exp2_fast(their_maximum - shift);
      maximum[h] = most;
      sum[h] = mine[h] * sum[h] + other[h] * second.row_stat[1][g + h * 8];
      largest[h] = fmaxf(largest[h], second.row_stat[2][g + h * 8]);
    }
#pragma unroll
    for (int j = 0; j < kDimBlocks; ++j) {
      const float4 x = theirs[j * S::kGroupThreads];
      acc[j][0] = mine[0] * acc[j][0] + other[0] * x.x, acc[j][1] = mine[0] * acc[j][1] + other[0] * x.y;
      acc[j][2] = mine[1] * acc[j][2] + other[1] * x.z, acc[j][3] = mine[1] * acc[j][3] + other[1] * x.w;
    }
  }

  // Split-KV: each block of a cluster has a share of the keys, and writes a share of the outputs. It pushes the units
  // of its partial outputs to those who write them. A thread has a unit, 16 dimensions, of each of its two rows.
  static constexpr int kRowUnits = kDim / 16;
  __device__ __forceinline__ void push_and_merge(int item, int64_t token, int head0) {
    static_assert(S::kConsumerGroups == 1 && kDimBlocks == 8, "a warp has 64 dimensions");
    const int blocks = p.splits, block = p.share_of(item), unit = warp * 4 + t;
    Told& told = told_of(&shared);
    const int rows = min(kHeads, p.heads - head0);
    cluster_wait();
    const Told::Places places = told.places_of(block);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = g + h * 8;
      if (row >= rows) continue;
      if (unit < blocks) {  // of a row's threads, one tells each block
        told.tell(unit, block, row, maximum[h], sum[h]);
        if (p.max_logits)
          send(of_rank(&told.largest[block * kHeads + row], unit), largest[h], of_rank(&told.arrived, unit));
      }
      float most = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) most = fmaxf(most, fabsf(acc[j][2 * h + i]));
      const float2 power = power_below(__float_as_uint(most) >> 16);
      const Told::Place place = places[row * kRowUnits + unit];
      told.tell_power(place, power.x);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          packed[j] = pack_half(acc[2 * j][2 * h + i] * power.y, acc[2 * j + 1][2 * h + i] * power.y);
        told.tell(place, i, packed);
      }
    }
    told.merge(p, rows, blocks, block, thread, kConsumerThreads, token, head0, shared.sinks, shared.bmm2,
               [](int unit, int i) {
                 const int of_row = unit % kRowUnits;
                 return make_int2(unit / kRowUnits, S::first_dim(of_row / 4, of_row % 4, i, 0));
               });
  }
};

}  // namespace mma
}  // namespace mla
