// Scores and weights of sparse_mla_wgmma_rows.cu, which one warpgroup computes.
#pragma once

#include "wgmma_rows_block.cuh"

namespace mla {
namespace wgmma_rows {

template <RowFormat FORMAT>
struct Scores : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::full, Base::ready;
  using Base::used, Base::q_full, Base::turns, Base::thread, Base::lane_again, Base::head0, Base::token;
  using Base::guess_maximum, Base::raise_maximum, Base::maximum_and_sum;
  using L = Layout<FORMAT>;
  static constexpr int kN = kHeads;

  // Scores of 64 keys, S^T = K Q^T, over the powers of rows.
  __device__ __forceinline__ void scores(float (&s)[kN / 2], uint32_t tile, int q_buffer) const {
    const int slot = tile % L::kSlots;
    uint32_t q_at = base + L::kQ + q_buffer * L::kQBytes, rows_at = base + L::kRing + slot * L::kSlotBytes;
    asm volatile("" : "+r"(q_at), "+r"(rows_at));  // or else ptxas keeps 64 descriptors in registers
    const uint64_t q = descriptor(q_at), rows = descriptor(rows_at);
    barrier_wait(full(slot), tile / L::kSlots & 1);
    products_begin();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint64_t a = rows + ((step / 4 * L::kBlockBytes + step % 4 * 32) >> 4);
      const uint64_t b = q + ((step / 4 * kN * 128 + step % 4 * 32) >> 4);
      if (step == 0)
        half_product<false>(s, a, b);
      else
        half_product<true>(s, a, b);
    }
    if constexpr (L::kHasTail) {
      const uint64_t tail = descriptor(base + L::kTail + slot * L::kBlockBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        product<true>(s, tail + step * 2, q + ((kDim / 64 * kN * 128 + step * 32) >> 4));
    }
    products_commit();
    products_wait<0>();
  }

  // ---------------------------------------------------------------- weights of 64 keys, into shared memory
  // Weights are those of rows times the powers that they were divided by, and so is their maximum.
  __device__ __forceinline__ void weights(float (&s)[kN / 2], float (&sum)[kN / 4], uint32_t tile, bool& started,
                                          int odd) const {
    const int lane = lane_again(), g = lane / 4, t = lane % 4, group_warp = warp % 4, buffer = tile % 2;
    uint32_t there[2], powers[2];  // a tile's rows; the powers of rows g and g + 8 of this warp's sixteen
    read_words(there, smem + L::kThere + tile % L::kSlots * 8);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      powers[h] = smem[L::kPowers + tile % L::kSlots * kTile + group_warp * 16 + h * 8 + g];
    // Of a tile's rows 0 and 8, one.
    const bool any = there[0] | there[1], reference = there[0] & 0x0101;
    const float2* const scale = reinterpret_cast<const float2*>(floats(L::kScale) + odd * kN) + t;
    float2* const maximum = reinterpret_cast<float2*>(floats(L::kMaximum)) + t;
    const float log2[2] = {static_cast<float>(static_cast<int>(powers[0]) - 127),
                           static_cast<float>(static_cast<int>(powers[1]) - 127)};
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const float2 x = scale[n * 4], m = started ? maximum[n * 4] : make_float2(0.f, 0.f);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const of = s + n * 4 + h * 2;
        of[0] *= __uint_as_float(powers[h] << 23), of[1] *= __uint_as_float(powers[h] << 23);
        of[0] = fmaf(of[0], x.x, log2[h] - m.x), of[1] = fmaf(of[1], x.y, log2[h] - m.y);
      }
    }
    const uint32_t mine = (group_warp & 2 ? there[1] : there[0]) >> (group_warp & 1) * 16 & 0xFFFF;
    wgmma::drop_missing(s, mine, g);
    if (!started && reference) guess_maximum(s, maximum, lane);
    float excess = started || reference ? -INFINITY : INFINITY;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) excess = fmaxf(excess, fmaxf(s[i], s[i + 1]));
    const bool raised = any && sync_any(1, 128, excess > kSlack);
    barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
    if (thread() == 0) states()[buffer] = raised && started;
    if (raised) raise_maximum(s, sum, buffer, started || reference, started);
    started |= any;

    const float inverse[2] = {__uint_as_float((254 - powers[0]) << 23), __uint_as_float((254 - powers[1]) << 23)};
    const uint32_t to = base + L::kWeights + buffer * L::kWeightBytes;
    const int row = (lane >> 4) * 8 + (lane & 7), chunk = group_warp * 2 + (lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < kN / 8; n += 2) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2_fast(s[n * 4 + 2 * i]), y = exp2_fast(s[n * 4 + 2 * i + 1]);
        float* const of = sum + n * 2 + i / 2 * 2;
        of[0] = fmaf(x, inverse[i % 2], of[0]), of[1] = fmaf(y, inverse[i % 2], of[1]);
        w[i] = pack_half(x, y);
      }
      stmatrix_transposed(to + swizzled(n * 8 + row, chunk), w[0], w[1], w[2], w[3]);
    }
  }

  // With the last weights of an item goes what its outputs are to be multiplied by.
  __device__ __forceinline__ void finish(float (&sum)[kN / 4], int64_t token, int head0, int buffer,
                                         bool started, float sink) const {
    const int head = thread();
    const auto [largest, total] = maximum_and_sum(sum, started);
    if (head >= kN) return;
    float* const factors = floats(L::kFactor);
    if (p.splits > 1) {
      factors[head] = largest, factors[kN + head] = total;
    } else {
      const float shift = fmaxf(largest, sink), mine = exp2_fast(largest - shift);
      const float all = total * mine + exp2_fast(sink - shift);
      factors[buffer * kN + head] = all > 0.f ? p.bmm2 * mine / all : 0.f;
      if (p.lse && head0 + head < p.heads) write_statistics(p, token, head0 + head, largest, total, largest);
    }
  }

  __device__ __forceinline__ void weigh() const {
    constexpr int kQParts = 4;  // that the next item's q is loaded in, each while a tile is scored
    uint32_t tile = 0;
    LaneLengths lengths(p, turns[0], lane);
    barrier_wait(q_full(0), 0);  // the first item's, which those load who have nothing else to do yet
    int odd = 0;
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn], odd ^= 1) {
      const Item item(p, i, lengths.of_all());
      const int next = turns[turn + 1];
      lengths = LaneLengths(p, next, lane);
      const int head = head0(i) + thread();
      const float sink = p.sinks && thread() < kN && head < p.heads ? p.sinks[head] * kLog2e : -INFINITY;
      float sum[kN / 4] = {};
      bool started = false;  // there is a maximum
      int parts = next < p.items ? 0 : kQParts;
      PartOfQ<FORMAT, 4 * kQParts> q;
      const auto load_q = [&] { q.load(p, token(next), head0(next), warp % 4 + parts * 4, lane); };
      const auto store_q = [&] {
        q.store(p, warp % 4 + parts++ * 4, lane, smem + L::kQ + (odd ^ 1) * L::kQBytes,
                floats(L::kScale) + (odd ^ 1) * kHeads);
      };
      for (int left = item.tiles; left > 0; --left, ++tile) {
        float s[kN / 2];
        const bool is_q = parts < kQParts;
        if (is_q) load_q();
        scores(s, tile, odd);
        weights(s, sum, tile, started, odd);
        if (is_q) store_q();
        if (left == 1) {
          while (parts < kQParts) load_q(), store_q();
          finish(sum, item.token, head0(i), tile % 2, started, sink);  // with barriers: all have stored their q
        }
        fence_async();
        barrier_arrive(ready(tile % 2));
      }
    }
  }
};

}  // namespace wgmma_rows
}  // namespace mla
