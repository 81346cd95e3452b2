// Scores and weights of sparse_mla_wgmma_rows.cu, which one warpgroup computes.
#pragma once

#include "wgmma_rows_block.cuh"

namespace mla {
namespace wgmma_rows {

// A tile is 64 keys on M, of which a warp of the warpgroup has 16. These lie in one half of the tile; each half is a
// slot of the ring.
template <RowFormat FORMAT>
struct Scores : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::ready;
  using Base::used, Base::q_full, Base::q_empty, Base::turns, Base::thread, Base::opaque_lane, Base::head0, Base::told;
  using Base::guess_maximum, Base::raise_maximum, Base::maximum_and_sum, Base::wait_full;
  using typename Base::Position;
  using L = Layout<FORMAT>;
  static constexpr int kN = kHeads;
  // K-steps are of 16 dimensions. Four of them are a batch: 64 dimensions.
  static constexpr int kNarrowSteps = L::kNarrow / 16, kNarrowBatches = kNarrowSteps / 4;
  static_assert(kNarrowSteps % 4 == 0 && L::kWide == 64, "whole batches, of which one is wide");
  // UE8M0 scales are for a batch, whose fragments they multiply; float32 scales are for two, whose sum they multiply.
  static_assert(L::kGroup == (L::kHasFloatScales ? 128 : 64), "");

  // What weights() needs besides, asked for while the last products of scores go on.
  struct WeightInputs {
    uint32_t own_half, other_half;          // which rows exist, of the half that has this warp's and of the other
    float2 scale[kN / 8], maximum[kN / 8];  // of heads 2t and 2t + 1 of each eight
  };

  // Scores of 64 keys, S^T = K Q^T. 584-byte rows are divided by their powers of two, and so are their scores. `powers`
  // gets the powers of rows g and g + 8 of this warp's sixteen, as exponents of float32.
  __device__ __forceinline__ void scores(float (&s)[kN / 2], uint32_t (&powers)[2], WeightInputs& inputs, Position& own,
                                         Position& other, uint32_t tile, bool started, int q_buffer) const {
    uint32_t q_at = base + L::kQ + q_buffer * L::kQBytes;
    make_opaque(q_at);  // or else ptxas keeps 32 descriptors in registers
    const uint64_t q = descriptor(q_at);
    const auto q_of = [&](int step) { return q + ((step / 4 * kN * 128 + step % 4 * 32) >> 4); };
    wait_full(own);
    // The matrices of an ldmatrix are 8 rows by 16 bytes: rows 0 to 7 and 8 to 15 of this warp's 16, then the next 16
    // bytes of both.
    const uint32_t slot = own.slot, row = slot * 32 + (warp & 1) * 16 + lane / 4;
    const uint32_t rows = base + L::kRing + slot * L::kSlotBytes + ((warp & 1) * 2 + (lane >> 3 & 1)) * L::kGroupBytes;
    const uint8_t* const row_scales = smem + L::kRowScales + row * 16;  // of row g; of g + 8 128 bytes further

    // Three batches have fragments: one whose products go on, one whose products are issued, and one that is widened.
    // Two have rows in `raw`: the last of these, and the next. The wide batch comes first, since its rows are operands
    // as they are.
    constexpr int kWideBatch = -1;
    uint32_t a[3][4][4], raw[2][2][4], ratios[2][4];
    const auto read = [&](int batch) {
      if (batch >= kNarrowBatches) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = batch * 4 + i * 2;
        ldmatrix(raw[batch % 2][i], rows + chunk / 8 * 1024 + swizzled(lane & 7, chunk % 8 + (lane >> 4)));
      }
    };
    const auto widen = [&](int batch) {
      if (batch >= kNarrowBatches) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t(&to)[4] = a[batch % 3][i];
        const uint32_t x = raw[batch % 2][i / 2][i % 2 * 2], y = raw[batch % 2][i / 2][i % 2 * 2 + 1];
        to[0] = e4m3_low(x), to[1] = e4m3_low(y), to[2] = e4m3_high(x), to[3] = e4m3_high(y);
        if constexpr (!L::kHasFloatScales) {
#pragma unroll
          for (int k = 0; k < 4; ++k)
            to[k] = times_half(to[k], __byte_perm(ratios[k % 2][batch / 2], 0, batch % 2 ? 0x3232 : 0x1010));
        }
      }
    };
    // If scales are float32, each scale group has a sum of its own. It is multiplied by its scale in float32, which is
    // exact, while the next group's products go on.
    float part[L::kHasFloatScales ? 2 : 1][kN / 2];
    uint32_t largest_scales[2] = {};
    const auto add_scaled = [&](int group) {
      if constexpr (L::kHasFloatScales) {
        float by[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          by[h] = reinterpret_cast<const float*>(row_scales + h * 128)[group];
          largest_scales[h] = max(largest_scales[h], magnitude(by[h]));
        }
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) s[i] = fmaf(part[group % 2][i], by[i / 2 % 2], s[i]);
      }
    };
    const auto multiply = [&](int batch) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t(&from)[4] = a[(batch + 3) % 3][i];
        if (batch == kWideBatch && i == 0)
          wide_product<false>(s, from, q_of(kNarrowSteps + i));
        else if (batch == kWideBatch)
          wide_product<true>(s, from, q_of(kNarrowSteps + i));
        else if constexpr (!L::kHasFloatScales)
          product<true>(s, from, q_of(batch * 4 + i));
        else if (batch % 2 == 0 && i == 0)
          product<false>(part[batch / 2 % 2], from, q_of(batch * 4 + i));
        else
          product<true>(part[batch / 2 % 2], from, q_of(batch * 4 + i));
      }
    };
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ldmatrix(a[(kWideBatch + 3) % 3][i], rows + L::kWideAtGroup + swizzled(lane & 7, i * 2 + (lane >> 4)));
    read(0);
    if constexpr (!L::kHasFloatScales) {
#pragma unroll
      for (int h = 0; h < 2; ++h) read_words(ratios[h], row_scales + h * 128), powers[h] = ratios[h][3] >> 16;
    }
#pragma unroll
    for (int batch = kWideBatch; batch < kNarrowBatches; ++batch) {
      products_begin();
      read(batch + 2);
      multiply(batch);
      products_commit();
      // A product that follows another at once holds up the warp, so the next batch is widened between products: ptxas
      // spreads what is here over them. If it is between them in the source, ptxas fences each product.
      widen(batch + 1);
      if (batch < kNarrowBatches - 1) {
        products_wait<1>();  // the batch before is done, and its registers are free
        if (batch > 1 && batch % 2 == 0) add_scaled(batch / 2 - 1);
      }
    }
    wait_full(other);  // before its rows' bits are read
    const int t = opaque_lane() % 4;
    inputs.own_half = *reinterpret_cast<const uint32_t*>(smem + L::kRowMasks + own.slot * 4);
    inputs.other_half = *reinterpret_cast<const uint32_t*>(smem + L::kRowMasks + other.slot * 4);
    own = own.next(2), other = other.next(2);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      inputs.scale[n] = reinterpret_cast<const float2*>(floats(L::kScale) + q_buffer * kN)[n * 4 + t];
      inputs.maximum[n] = make_float2(0.f, 0.f);
      if (started) inputs.maximum[n] = reinterpret_cast<const float2*>(floats(L::kMaximum))[n * 4 + t];
    }
    barrier_wait(used(tile % 2), tile / 2 & 1 ^ 1);  // for weights
    products_wait<0>();
    if constexpr (L::kHasFloatScales) {
      add_scaled(L::kGroups - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) powers[h] = power_of_row(largest_scales[h]);
    }
  }

  template <bool ADD>
  static __device__ __forceinline__ void wide_product(float (&s)[kN / 2], const uint32_t (&a)[4], uint64_t q) {
    if constexpr (L::kHasTail)
      bf16_product<ADD>(s, a, q);
    else
      product<ADD>(s, a, q);
  }

  // Writes the weights of 64 keys into shared memory. They are times the rows' powers, and so is their maximum; `sum`
  // is without powers. `started`: whether the item has a maximum yet.
  __device__ __forceinline__ void weights(float (&s)[kN / 2], const uint32_t (&powers)[2], const WeightInputs& inputs,
                                          float (&sum)[kN / 4], uint32_t tile, bool& started) const {
    const int lane = opaque_lane(), g = lane / 4, t = lane % 4, group_warp = warp % 4, buffer = tile % 2;
    const bool any_row = inputs.own_half | inputs.other_half;
    // Rows 0 and 8 of the tile, if one of them exists, are what the maximum is guessed from.
    const bool can_guess = (group_warp & 2 ? inputs.other_half : inputs.own_half) & 0x0101;
    float2* const maximum = reinterpret_cast<float2*>(floats(L::kMaximum)) + t;
    const float log2[2] = {static_cast<float>(static_cast<int>(powers[0]) - 127),
                           static_cast<float>(static_cast<int>(powers[1]) - 127)};
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const float2 scale = inputs.scale[n], shift = inputs.maximum[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const x = s + n * 4 + h * 2;
        if (!L::kHasFloatScales) x[0] *= __uint_as_float(powers[h] << 23), x[1] *= __uint_as_float(powers[h] << 23);
        x[0] = fmaf(x[0], scale.x, log2[h] - shift.x), x[1] = fmaf(x[1], scale.y, log2[h] - shift.y);
      }
    }
    wgmma::drop_missing(s, inputs.own_half >> (group_warp & 1) * 16 & 0xFFFF, g);
    if (!started && can_guess) guess_maximum(s, maximum, lane);
    // The vote on raising the maximum looks at weights, not scores, so that they are there when it ends. They are
    // computed again if the maximum is raised.
    float w[kN / 2];
    const auto to_weights = [&] {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) w[i] = exp2_fast(s[i]);
    };
    to_weights();
    float excess = started || can_guess ? 0.f : INFINITY;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) excess = fmaxf(excess, fmaxf(w[i], w[i + 1]));
    static_assert(kSlack == 15.f, "");
    const bool raised = sync_any(1, 128, any_row && excess > 0x1p15f);
    if (thread() == 0) states()[buffer] = raised && started;
    if (raised) raise_maximum(s, sum, buffer, started || can_guess, started), to_weights();
    started |= any_row;

    const float inverse[2] = {__uint_as_float((254 - powers[0]) << 23), __uint_as_float((254 - powers[1]) << 23)};
    const uint32_t to = base + L::kWeights + buffer * L::kWeightBytes;
    const int row = (lane >> 4) * 8 + (lane & 7), chunk = group_warp * 2 + (lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < kN / 8; n += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = w[n * 4 + 2 * i], y = w[n * 4 + 2 * i + 1];
        float* const to_sum = sum + n * 2 + i / 2 * 2;
        to_sum[0] = fmaf(x, inverse[i % 2], to_sum[0]), to_sum[1] = fmaf(y, inverse[i % 2], to_sum[1]);
        packed[i] = pack_half(x, y);
      }
      stmatrix_transposed(to + swizzled(n * 8 + row, chunk), packed[0], packed[1], packed[2], packed[3]);
    }
  }

  // Hands over, with the last weights of an item, what its outputs are to be multiplied by or, if blocks share its
  // keys, the sinks. Returns the maximum and the sum of the thread's head, if it has one.
  __device__ __forceinline__ float2 finish(float (&sum)[kN / 4], int64_t token, int head0, int buffer,
                                         bool started, float sink) const {
    const int head = thread();
    const auto [maximum, total] = maximum_and_sum(sum, started);
    if (head < kN && p.splits > 1) {
      floats(L::kFactor)[head] = sink;
    } else if (head < kN) {
      const float shift = fmaxf(maximum, sink), mine = exp2_fast(maximum - shift);
      const float all = total * mine + exp2_fast(sink - shift);
      floats(L::kFactor)[buffer * kN + head] = all > 0.f ? p.bmm2 * mine / all : 0.f;
      if (p.lse && head0 + head < p.heads) write_statistics(p, token, head0 + head, maximum, total, maximum);
    }
    return make_float2(maximum, total);
  }

  // What this warpgroup does.
  __device__ __forceinline__ void score_items() const {
    uint32_t tile = 0, served = 0;
    Position own{warp % 4 / 2u}, other{1 - own.slot};  // of the halves of a tile
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn], ++served) {
      const Item item(p, i, lengths.of_all());
      lengths = LaneLengths(p, turns[turn + 1], lane);
      const int buffer = served % 2, head = head0(i) + thread();
      const float sink = p.sinks && thread() < kN && head < p.heads ? p.sinks[head] * kLog2e : -INFINITY;
      float sum[kN / 4] = {};
      bool started = false;
      barrier_wait(q_full(buffer), served / 2 & 1);
      float2 stats;
      for (int left = item.tiles; left > 0; --left, ++tile) {
        float s[kN / 2];
        uint32_t powers[2];
        WeightInputs inputs;
        scores(s, powers, inputs, own, other, tile, started, buffer);
        weights(s, powers, inputs, sum, tile, started);
        if (left == 1) stats = finish(sum, item.token, head0(i), tile % 2, started, sink);
        fence_async();
        barrier_arrive(ready(tile % 2));
      }
      barrier_arrive(q_empty(buffer));  // its scales are read until here
      if (p.splits > 1) {
        cluster_wait();
#pragma unroll
        for (int rank = 0; rank < kMaxSplits; ++rank)
          if (thread() < kN && rank < p.splits) told().tell(rank, p.share_of(i), thread(), stats.x, stats.y);
      }
    }
  }
};

}  // namespace wgmma_rows
}  // namespace mla
