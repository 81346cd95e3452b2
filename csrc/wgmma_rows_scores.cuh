// Scores and weights of sparse_mla_wgmma_rows.cu, which one warpgroup computes.
#pragma once

#include "wgmma_rows_block.cuh"

namespace mla {
namespace wgmma_rows {

template <RowFormat FORMAT>
struct Scores : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::ready;
  using Base::used, Base::q_full, Base::q_empty, Base::turns, Base::thread, Base::lane_again, Base::head0, Base::told;
  using Base::guess_maximum, Base::raise_maximum, Base::maximum_and_sum, Base::wait_full;
  using typename Base::Slot;
  using L = Layout<FORMAT>;
  static constexpr int kN = kHeads;
  static constexpr int kNarrowSteps = L::kNarrow / 16;  // of 16 dimensions
  static constexpr int kBatches = kNarrowSteps / 4;
  static_assert(kNarrowSteps % 4 == 0 && L::kWide == 4 * 16, "batches of four steps");

  // What weights are made with, asked for while the last products of scores go on.
  struct Given {
    uint32_t mine, other;                   // which rows there are, of the half that this warp has some of and the other
    float2 scale[kN / 8], maximum[kN / 8];  // of heads 2t and 2t + 1 of each eight
  };

  // Scores of 64 keys, S^T = K Q^T: over the powers of rows, where these are divided by them; and the powers of rows g
  // and g + 8 of this warp's sixteen, as exponents of float32.
  __device__ __forceinline__ void scores(float (&s)[kN / 2], uint32_t (&powers)[2], Given& given, Slot& mine,
                                         Slot& other, uint32_t tile, bool started, int q_buffer) const {
    uint32_t q_at = base + L::kQ + q_buffer * L::kQBytes;
    asm volatile("" : "+r"(q_at));  // or else ptxas keeps 32 descriptors in registers
    const uint64_t q = descriptor(q_at);
    const auto q_of = [&](int step) { return q + ((step / 4 * kN * 128 + step % 4 * 32) >> 4); };
    // A warp has rows of one half. The other's are waited for before it is asked which of them there are.
    wait_full(mine);
    // Matrices of 8 rows by 16 bytes: rows 0 to 7 and 8 to 15 of this warp's 16, then the next 16 bytes of both.
    const uint32_t slot = mine.slot, row = slot * 32 + (warp & 1) * 16 + lane / 4;
    const uint32_t rows = base + L::kRing + slot * L::kSlotBytes + ((warp & 1) * 2 + (lane >> 3 & 1)) * L::kGroupBytes;
    const uint8_t* const of_rows = smem + L::kOfRows + row * 16;  // of row g and, 128 bytes further, g + 8

    // Four steps are begun together: first those of the wide part, whose rows are operands as they are. What comes next
    // is widened between them, for a warp is held up by a product that follows another at once.
    uint32_t a[3][4][4], raw[2][2][4], ratios[2][4];
    const auto read = [&](int batch) {
      if (batch >= kBatches) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = batch * 4 + i * 2;
        ldmatrix(raw[batch % 2][i], rows + chunk / 8 * 1024 + swizzled(lane & 7, chunk % 8 + (lane >> 4)));
      }
    };
    const auto widen = [&](int batch, int i) {
      if (batch >= kBatches) return;
      uint32_t(&to)[4] = a[batch % 3][i];
      const uint32_t x = raw[batch % 2][i / 2][i % 2 * 2], y = raw[batch % 2][i / 2][i % 2 * 2 + 1];
      to[0] = e4m3_low(x), to[1] = e4m3_low(y), to[2] = e4m3_high(x), to[3] = e4m3_high(y);
      if constexpr (!L::kHasFloatScales) {
        static_assert(L::kGroup == 64, "that of a batch");
#pragma unroll
        for (int k = 0; k < 4; ++k)
          to[k] = times(to[k], __byte_perm(ratios[k % 2][batch / 2], 0, batch % 2 ? 0x3232 : 0x1010));
      }
    };
    // Two batches have one scale if that is a float. Their scores are summed apart and multiplied in float32, which is
    // exact.
    static_assert(!L::kHasFloatScales || L::kGroup == 128, "");
    float part[L::kHasFloatScales ? 2 : 1][kN / 2];
    uint32_t largest_scales[2] = {};
    const auto add_part = [&](int of) {
      if constexpr (L::kHasFloatScales) {
        float by[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          by[h] = reinterpret_cast<const float*>(of_rows + h * 128)[of];
          largest_scales[h] = max(largest_scales[h], magnitude(by[h]));
        }
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) s[i] = fmaf(part[of % 2][i], by[i / 2 % 2], s[i]);
      }
    };
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ldmatrix(a[2][i], rows + L::kWideAtGroup + swizzled(lane & 7, i * 2 + (lane >> 4)));
    read(0);
    if constexpr (!L::kHasFloatScales)
#pragma unroll
      for (int h = 0; h < 2; ++h) read_words(ratios[h], of_rows + h * 128), powers[h] = ratios[h][3] >> 16;
#pragma unroll
    for (int batch = -1; batch < kBatches; ++batch) {
      products_begin();
      read(batch + 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t(&from)[4] = a[(batch + 3) % 3][i];
        if (batch < 0 && i == 0)
          wide_product<false>(s, from, q_of(kNarrowSteps + i));
        else if (batch < 0)
          wide_product<true>(s, from, q_of(kNarrowSteps + i));
        else if constexpr (!L::kHasFloatScales)
          product<true>(s, from, q_of(batch * 4 + i));
        else if (batch % 2 == 0 && i == 0)
          product<false>(part[batch / 2 % 2], from, q_of(batch * 4 + i));
        else
          product<true>(part[batch / 2 % 2], from, q_of(batch * 4 + i));
      }
      products_commit();
      // In this place ptxas spreads it over the products; between them in the source, it fences each.
#pragma unroll
      for (int i = 0; i < 4; ++i) widen(batch + 1, i);
      if (batch < kBatches - 1) {
        products_wait<1>();  // registers of the batch before are free
        if (batch > 1 && batch % 2 == 0) add_part(batch / 2 - 1);
      }
    }
    wait_full(other);
    const int t = lane_again() % 4;
    given.mine = *reinterpret_cast<const uint32_t*>(smem + L::kThere + mine.slot * 4);
    given.other = *reinterpret_cast<const uint32_t*>(smem + L::kThere + other.slot * 4);
    mine = mine.next(2), other = other.next(2);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      given.scale[n] = reinterpret_cast<const float2*>(floats(L::kScale) + q_buffer * kN)[n * 4 + t];
      given.maximum[n] = make_float2(0.f, 0.f);
      if (started) given.maximum[n] = reinterpret_cast<const float2*>(floats(L::kMaximum))[n * 4 + t];
    }
    barrier_wait(used(tile % 2), tile / 2 & 1 ^ 1);  // for weights
    products_wait<0>();
    if constexpr (L::kHasFloatScales) {
      add_part(kBatches / 2 - 1);
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

  // ---------------------------------------------------------------- weights of 64 keys, into shared memory
  // Weights are those of rows times the powers that they were divided by, and so is their maximum.
  __device__ __forceinline__ void weights(float (&s)[kN / 2], const uint32_t (&powers)[2], const Given& given,
                                          float (&sum)[kN / 4], uint32_t tile, bool& started) const {
    const int lane = lane_again(), g = lane / 4, t = lane % 4, group_warp = warp % 4, buffer = tile % 2;
    // Of a tile's rows 0 and 8, one.
    const bool any = given.mine | given.other, reference = (group_warp & 2 ? given.other : given.mine) & 0x0101;
    float2* const maximum = reinterpret_cast<float2*>(floats(L::kMaximum)) + t;
    const float log2[2] = {static_cast<float>(static_cast<int>(powers[0]) - 127),
                           static_cast<float>(static_cast<int>(powers[1]) - 127)};
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const float2 x = given.scale[n], m = given.maximum[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const of = s + n * 4 + h * 2;
        if (!L::kHasFloatScales) of[0] *= __uint_as_float(powers[h] << 23), of[1] *= __uint_as_float(powers[h] << 23);
        of[0] = fmaf(of[0], x.x, log2[h] - m.x), of[1] = fmaf(of[1], x.y, log2[h] - m.y);
      }
    }
    wgmma::drop_missing(s, given.mine >> (group_warp & 1) * 16 & 0xFFFF, g);
    if (!started && reference) guess_maximum(s, maximum, lane);
    // The largest is looked for among weights, and so these are there before the barrier; in vain if it is raised.
    float w[kN / 2];
    const auto to_weights = [&] {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) w[i] = exp2_fast(s[i]);
    };
    to_weights();
    float excess = started || reference ? 0.f : INFINITY;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) excess = fmaxf(excess, fmaxf(w[i], w[i + 1]));
    static_assert(kSlack == 15.f, "");
    const bool raised = sync_any(1, 128, any && excess > 0x1p15f);
    if (thread() == 0) states()[buffer] = raised && started;
    if (raised) raise_maximum(s, sum, buffer, started || reference, started), to_weights();
    started |= any;

    const float inverse[2] = {__uint_as_float((254 - powers[0]) << 23), __uint_as_float((254 - powers[1]) << 23)};
    const uint32_t to = base + L::kWeights + buffer * L::kWeightBytes;
    const int row = (lane >> 4) * 8 + (lane & 7), chunk = group_warp * 2 + (lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < kN / 8; n += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = w[n * 4 + 2 * i], y = w[n * 4 + 2 * i + 1];
        float* const of = sum + n * 2 + i / 2 * 2;
        of[0] = fmaf(x, inverse[i % 2], of[0]), of[1] = fmaf(y, inverse[i % 2], of[1]);
        packed[i] = pack_half(x, y);
      }
      stmatrix_transposed(to + swizzled(n * 8 + row, chunk), packed[0], packed[1], packed[2], packed[3]);
    }
  }

  // With the last weights of an item goes what its outputs are to be multiplied by or, if blocks share its keys, sinks.
  // Returns the maximum and the sum of the thread's head, if it has one.
  __device__ __forceinline__ float2 finish(float (&sum)[kN / 4], int64_t token, int head0, int buffer,
                                         bool started, float sink) const {
    const int head = thread();
    const auto [largest, total] = maximum_and_sum(sum, started);
    if (head < kN && p.splits > 1) {
      floats(L::kFactor)[head] = sink;
    } else if (head < kN) {
      const float shift = fmaxf(largest, sink), mine = exp2_fast(largest - shift);
      const float all = total * mine + exp2_fast(sink - shift);
      floats(L::kFactor)[buffer * kN + head] = all > 0.f ? p.bmm2 * mine / all : 0.f;
      if (p.lse && head0 + head < p.heads) write_statistics(p, token, head0 + head, largest, total, largest);
    }
    return make_float2(largest, total);
  }

  __device__ __forceinline__ void weigh() const {
    uint32_t tile = 0, served = 0;
    Slot mine{warp % 4 / 2u}, other{1 - mine.slot};  // halves of a tile
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn], ++served) {
      const Item item(p, i, lengths.of_all());
      lengths = LaneLengths(p, turns[turn + 1], lane);
      const int buffer = served % 2, head = head0(i) + thread();
      const float sink = p.sinks && thread() < kN && head < p.heads ? p.sinks[head] * kLog2e : -INFINITY;
      float2 stats;
      float sum[kN / 4] = {};
      bool started = false;  // there is a maximum
      barrier_wait(q_full(buffer), served / 2 & 1);
      for (int left = item.tiles; left > 0; --left, ++tile) {
        float s[kN / 2];
        uint32_t powers[2];
        Given given;
        scores(s, powers, given, mine, other, tile, started, buffer);
        weights(s, powers, given, sum, tile, started);
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
