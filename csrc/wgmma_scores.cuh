// Scores and weights of sparse_mla_wgmma.cu, which one warpgroup computes.
#pragma once

#include "wgmma_block.cuh"

namespace mla {
namespace wgmma {

template <bool FP8, int N>
struct Scores : Storage<FP8, N> {
  using Base = Storage<FP8, N>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::full, Base::ready;
  using Base::used, Base::q_full, Base::q_empty, Base::turns, Base::thread, Base::guess_maximum, Base::raise_maximum;
  using Base::maximum_and_sum;
  using L = Layout<FP8, N>;

  // Scores of 64 keys, S^T = K Q^T.
  __device__ __forceinline__ void scores(float (&s)[N / 2], uint32_t tile, int q_buffer) const {
    uint32_t q_at = base + L::kQ + q_buffer * L::kQBytes;
    make_opaque(q_at);  // or else ptxas keeps 32 descriptors in registers
    const uint64_t q = descriptor(q_at);
    if constexpr (!FP8) {
      // A quarter of the dimensions is multiplied as soon as it is there.
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const uint32_t count = 4 * tile + quarter;
        const uint64_t rows = descriptor(base + L::kRing + count % L::kSlots * L::kSlotBytes, L::kGroupBytes);
        barrier_wait(full(count % L::kSlots), count / L::kSlots & 1);
        fence_async();  // the rows came by copies that wgmma does not see by itself
        products_begin();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint64_t a = rows + ((i / 4 * 1024 + i % 4 * 32) >> 4);
          const uint64_t b = q + (((quarter * 2 + i / 4) * N * 128 + i % 4 * 32) >> 4);
          if (quarter == 0 && i == 0)
            product<false>(s, a, b);
          else
            product<true>(s, a, b);
        }
        products_commit();
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) barrier_wait(full((2 * tile + h) % L::kSlots), (2 * tile + h) / L::kSlots & 1);
      // Matrices of 8 rows by 16 bytes: rows 0 to 7 and 8 to 15 of this warp's 16, then the next 16 bytes of both.
      const uint32_t rows = base + L::kRing + (2 * tile + (warp % 4 >> 1)) % L::kSlots * L::kSlotBytes +
                            ((warp & 1) * 2 + (lane >> 3 & 1)) * L::kGroupBytes;
      // Rows are read while products of the batch before go on, and widened once those of the batch whose registers
      // they take are done.
      constexpr int kSteps = 8, kBuffers = 2;  // of 16 dimensions, in a batch; batches
      uint32_t a[kBuffers][kSteps][4], raw[kSteps / 2][4];
      const auto read = [&](int batch) {
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const int chunk = (batch * kSteps / 2 + i) * 2;
          ldmatrix(raw[i], rows + chunk / 8 * 1024 + swizzled(lane & 7, chunk % 8 + (lane >> 4)));
        }
      };
      const auto widen = [&](uint32_t (&to)[kSteps][4]) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint32_t x = raw[i / 2][i % 2 * 2], y = raw[i / 2][i % 2 * 2 + 1];
          to[i][0] = e4m3_low(x), to[i][1] = e4m3_low(y), to[i][2] = e4m3_high(x), to[i][3] = e4m3_high(y);
        }
      };
      read(0);
      widen(a[0]);
#pragma unroll
      for (int batch = 0; batch < 32 / kSteps; ++batch) {
        products_begin();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = batch * kSteps + i;
          const uint64_t b = q + ((step / 4 * N * 128 + step % 4 * 32) >> 4);
          if (step == 0)
            product<false>(s, a[batch % kBuffers][i], b);
          else
            product<true>(s, a[batch % kBuffers][i], b);
        }
        products_commit();
        if (batch < 32 / kSteps - 1) {
          read(batch + 1);
          products_wait<kBuffers - 1>();
          hold(raw);
          widen(a[(batch + 1) % kBuffers]);
        }
      }
    }
    products_wait<0>();
  }

  // ---------------------------------------------------------------- weights of 64 keys, into shared memory
  __device__ __forceinline__ void weights(float (&s)[N / 2], float (&sum)[N / 4], uint32_t tile, bool& started, int odd,
                                          bool is_last) const {
    const int g = lane / 4, t = lane % 4, group_warp = warp % 4, buffer = tile % 2;
    const int there_at = FP8 ? 2 * tile % L::kSlots * 4 : tile % 4 * 8;
    const uint2 row_mask = *reinterpret_cast<const uint2*>(smem + L::kRowMasks + there_at);
    // Of a tile's rows 0 and 8, one.
    const bool any = row_mask.x | row_mask.y, reference = row_mask.x & 0x0101;
    const float2* const scale = reinterpret_cast<const float2*>(floats(L::kScale) + odd * N) + t;
    float2* const maximum = reinterpret_cast<float2*>(floats(L::kMaximum)) + t;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 x = scale[n * 4], m = started ? maximum[n * 4] : make_float2(0.f, 0.f);
      s[n * 4] = fmaf(s[n * 4], x.x, -m.x), s[n * 4 + 1] = fmaf(s[n * 4 + 1], x.y, -m.y);
      s[n * 4 + 2] = fmaf(s[n * 4 + 2], x.x, -m.x), s[n * 4 + 3] = fmaf(s[n * 4 + 3], x.y, -m.y);
    }
    const uint32_t mine = (group_warp & 2 ? row_mask.y : row_mask.x) >> (group_warp & 1) * 16 & 0xFFFF;
    drop_missing(s, mine, g);
    if (!started && reference) guess_maximum(s, maximum, lane);
    float excess = started || reference ? -INFINITY : INFINITY;
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) excess = fmaxf(excess, fmaxf(s[i], s[i + 1]));
    const bool raised = any && sync_any(1, 128, excess > kSlack);
    barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
    if (thread() == 0) states()[buffer] = raised && started;
    if (raised) raise_maximum(s, sum, buffer, started || reference, started);
    started |= any;

    const uint32_t to = base + L::kWeights + buffer * L::kTerms * L::kTermBytes;
    const int row = (lane >> 4) * 8 + (lane & 7), chunk = group_warp * 2 + (lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2_fast(s[n * 4 + 2 * i]), y = exp2_fast(s[n * 4 + 2 * i + 1]);
        sum[n * 2 + i / 2 * 2] += x, sum[n * 2 + i / 2 * 2 + 1] += y;
        if constexpr (FP8) {
          high[i] = pack_half(x, y);
        } else {
          high[i] = pack_bf16(x, y), low[i] = rest_bf16(x, y, high[i]);
        }
      }
      const uint32_t at = to + swizzled(n * 8 + row, chunk);
      stmatrix_transposed(at, high[0], high[1], high[2], high[3]);
      if constexpr (L::kTerms == 2) stmatrix_transposed(at + L::kTermBytes, low[0], low[1], low[2], low[3]);
    }
    if (is_last) finish(sum, buffer, started, odd);
    fence_async();
    barrier_arrive(ready(buffer));
  }

  // With the last weights of an item goes what its outputs are to be multiplied by.
  __device__ __forceinline__ void finish(float (&sum)[N / 4], int buffer, bool started, int odd) const {
    const int head = thread();
    auto [largest, total] = maximum_and_sum(sum, started);
    if (head < N) {
      float* const factors = floats(L::kFactor);
      if (p.splits > 1) {
        factors[head] = largest, factors[N + head] = total;
      } else {
        const float bmm2 = p.output_scale();
        const float sink = floats(L::kSink)[odd * N + head];
        const float shift = fmaxf(largest, sink), mine = exp2_fast(largest - shift);
        total = total * mine + exp2_fast(sink - shift);
        factors[buffer * N + head] = total > 0.f ? bmm2 * mine / total : 0.f;
      }
    }
  }

  // q as it is, BF16, on its way: `heads` heads (or N) from `q` on.
  __device__ __forceinline__ void copy_q(const __nv_bfloat16* q, int heads) const {
    int row0 = warp % 4, lane = this->lane;
    make_opaque(row0), make_opaque(lane);  // or else ptxas keeps addresses in registers, tile after tile
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int row = i * 4 + row0;
      const __nv_bfloat16* const from = q + (row < heads ? row : 0) * p.q_head_stride + lane * 8;
#pragma unroll
      for (int c = 0; c < 2; ++c)
        copy16<true>(base + L::kQ + (c * 4 + lane / 8) * N * 128 + swizzled(row, lane % 8), from + c * 256,
                     row < heads ? 16 : 0);
    }
  }

  __device__ __forceinline__ void weigh() const {
    uint32_t tile = 0, served = 0;
    Lengths lengths(p, turns[0]);
    // BF16 q is fetched here, and the sink of the head that is this thread's.
    const int my_head = threadIdx.x % 128;
    const __nv_bfloat16* q = nullptr;
    int heads = 0;
    float sink = 0.f;
    bool q_comes = false;
    const auto look_ahead = [&](const Item& item) {
      q = static_cast<const __nv_bfloat16*>(p.q) + item.token * p.q_token_stride + item.head0 * p.q_head_stride;
      heads = p.heads - item.head0;
      sink = my_head < N && my_head < heads && p.sinks ? p.sinks[item.head0 + my_head] : -INFINITY;
    };
    const float scale = FP8 ? 0.f : p.score_scale();
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const Item item(p, i, N, lengths);
      if (!FP8 && item.tiles > 0) {
        // The last item's q is read by nobody any more: finish() has barriers.
        if (!q_comes) look_ahead(item), copy_q(q, heads);
        const int at = served % 2 * N + my_head;
        if (my_head < N) floats(L::kScale)[at] = scale, floats(L::kSink)[at] = sink * kLog2e;
        copies_wait();
        fence_async();
        sync_threads(1, 128);
      }
      const int next = turns[turn + 1];
      lengths = Lengths(p, next);
      if (item.tiles == 0) {
        const int head = threadIdx.x % 128;
        if (p.splits > 1 && head < N) floats(L::kFactor)[head] = kNoMaximum, floats(L::kFactor)[N + head] = 0.f;
        continue;
      }
      const int buffer = served % L::kQBuffers;
      float sum[N / 4] = {};
      bool started = false;  // there is a maximum
      if (FP8) barrier_wait(q_full(buffer), served / L::kQBuffers & 1);
      for (int left = item.tiles; left > 0; --left, ++tile) {
        float s[N / 2];
        if (!FP8 && left == 1) look_ahead(Item(p, next, N, lengths));  // while the last rows are waited for
        scores(s, tile, buffer);
        if (!FP8 && left == 1) {
          // The next item's q comes while the last weights are computed. It has keys if one is visible.
          q_comes = next < p.items && lengths.visible > 0;
          sync_threads(1, 128);  // all have read this item's
          if (q_comes) copy_q(q, heads);
        }
        weights(s, sum, tile, started, served & 1, left == 1);
        if (FP8 && left == 1) barrier_arrive(q_empty(buffer));  // its scales are read until here
      }
      ++served;
    }
  }
};

}  // namespace wgmma
}  // namespace mla
