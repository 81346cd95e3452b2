// Scores and weights of sparse_mla_m64.cu, which one warpgroup computes.
#pragma once

#include "m64_block.cuh"

namespace mla {
namespace m64 {

template <bool FP8>
struct Scores : Storage<FP8> {
  using Base = Storage<FP8>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::q_full, Base::q_read;
  using Base::ready, Base::used, Base::turns;
  using L = Layout<FP8>;

  __device__ __forceinline__ void weigh() const {
    const int g = lane / 4, t = lane % 4, row = warp % 4 * 16 + g;
    const int lane_row = warp % 4 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
    const float bmm1 = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
    const float bmm2 = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
    uint32_t entry = 0, tile = 0, odd = 0, phases = 0;  // a bit a slot
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const int tiles = Item(p, i, lengths).tiles;
      if (tiles == 0) {
        lengths = LaneLengths(p, turns[turn + 1], lane);
        continue;
      }
      uint32_t q[16][4];  // first half of the dimensions
      float scale[2] = {bmm1, bmm1};
      barrier_wait(q_full(), odd);
      const auto read_q = [&](uint32_t (&to)[4], int step) {
        ldmatrix(to, base + (entry & 1) * kTileBytes + step / 4 * kBlockBytes +
                         swizzled(lane_row, step % 4 * 2 + (lane >> 4)));
      };
#pragma unroll
      for (int step = 0; step < 16; ++step) read_q(q[step], step);
      // Of the second half a quarter waits in registers that scores will need; the rest, for which there are none, is
      // read again.
      constexpr int kKept = FP8 ? 4 : 0;
      uint32_t kept[kKept + 1][4], inverse[2];
      const auto to_half = [&](uint32_t (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = scaled_to_half(x[k], inverse[k % 2]);
      };
      if constexpr (FP8) {
        // The power that q is divided by goes back in with the scale.
        uint32_t largest[2] = {};
        const auto look_at = [&](const uint32_t (&x)[4]) {
#pragma unroll
          for (int k = 0; k < 4; ++k) largest[k % 2] = larger_magnitudes(largest[k % 2], x[k]);
        };
#pragma unroll
        for (int step = 0; step < kKept; ++step) read_q(kept[step], 32 - kKept + step);
#pragma unroll
        for (int step = 0; step < 16; ++step) look_at(q[step]);
#pragma unroll
        for (int step = 0; step < kKept; ++step) look_at(kept[step]);
#pragma unroll
        for (int step = 16; step < 32 - kKept; step += 2) {
          uint32_t x[2][4];
          read_q(x[0], step), read_q(x[1], step + 1);
          look_at(x[0]), look_at(x[1]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          largest[h] &= 0x7FFF7FFF;
          largest[h] = max(largest[h] & 0xFFFF, largest[h] >> 16);
          largest[h] = max(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
          largest[h] = max(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
          const float2 power = power_below(largest[h]);
          scale[h] *= power.x, inverse[h] = __float_as_uint(power.y) >> 16 | __float_as_uint(power.y);
        }
      }
      // The second half of the dimensions goes where there is room for it.
      const auto write_q = [&](uint32_t (&x)[4], int step) {
        if constexpr (FP8) to_half(x);
        stmatrix(base + L::kSecondQ + (step - 16) / 4 * kBlockBytes + swizzled(lane_row, step % 4 * 2 + (lane >> 4)),
                 x[0], x[1], x[2], x[3]);
      };
#pragma unroll 1
      for (int step = 16; step < 32 - kKept; step += 4) {
        uint32_t x[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) read_q(x[j], step + j);
#pragma unroll
        for (int j = 0; j < 4; ++j) write_q(x[j], step + j);
      }
      barrier_arrive(q_read());
      ++entry;
#pragma unroll
      for (int step = 0; step < kKept; ++step) write_q(kept[step], 32 - kKept + step);
      if constexpr (FP8)
#pragma unroll
        for (int step = 0; step < 16; ++step) to_half(q[step]);
      fence_async();
      sync_threads(3, 128);
      const uint64_t second_q = descriptor(base + L::kSecondQ - kTileBytes / 2);
      float sum[2] = {}, maximum[2] = {kNoMaximum, kNoMaximum}, sink[2];
      int weights_row = lane_row;  // addresses of weights are found from here on: nothing of them is kept across q
      asm volatile("" : "+r"(weights_row));
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        float s[32];
        const int slot = entry & 1;
        barrier_wait(full(slot), phases >> slot & 1);
        phases ^= 1 << slot;
        if constexpr (!FP8) fence_async();  // the rows came by copies that wgmma does not see by itself
        const uint64_t k = descriptor(base + slot * kTileBytes);
        if (left == 1) {
          // What the end of the item and the next one need is asked for before the last scores.
          lengths = LaneLengths(p, turns[turn + 1], lane);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int head = (i & p.head_blocks - 1) * kHeads + row + h * 8;
            sink[h] = p.sinks && head < p.heads ? p.sinks[head] : -INFINITY;
          }
        }
        products_begin();
        score_product<FP8, false>(s, q[0], k);
#pragma unroll
        for (int step = 1; step < 32; ++step) {
          const int at_step = (step / 4 * kBlockBytes + step % 4 * 32) >> 4;
          if (step < 16)
            score_product<FP8, true>(s, q[step], k + at_step);
          else
            score_product<FP8>(s, second_q + at_step, k + at_step);
        }
        products_commit();
        const uint2 there = *reinterpret_cast<const uint2*>(smem + L::kThere + entry % 4 * 8);
        products_wait<0>();
        strict_wait(3);

#pragma unroll
        for (int j = 0; j < 32; ++j) s[j] *= scale[j / 2 % 2];
        if ((there.x & there.y) != ~0u) {
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            const int key = j / 4 * 8 + 2 * t + j % 2;
            if (!((key < 32 ? there.x : there.y) >> (key % 32) & 1)) s[j] = -INFINITY;
          }
        }
        const int buffer = tile % 2;
        barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float largest = s[2 * h];
#pragma unroll
          for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
          const float now = largest > maximum[h] + kSlack ? largest : maximum[h];
          if (t == 0) floats(L::kMaximum)[buffer * kHeads + row + h * 8] = now;
          sum[h] *= exp2_fast(maximum[h] - now), maximum[h] = now;
        }
        const uint32_t to = base + L::kWeights + buffer * kBlockBytes;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t w[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int j = n * 8 + 2 * k, h = k % 2;
            const float x = exp2_fast(s[j] - maximum[h]), y = exp2_fast(s[j + 1] - maximum[h]);
            w[k] = FP8 ? pack_half(x, y) : pack_bf16(x, y);
            // Of BF16 weights as they were rounded: what rounding adds to a large one it then adds to their sum too.
            const float2 weight = FP8 ? make_float2(x, y) : unpack_bf16(w[k]);
            sum[h] += weight.x + weight.y;
          }
          stmatrix(to + swizzled(weights_row, n * 2 + (lane >> 4)), w[0], w[1], w[2], w[3]);
        }
        if (left == 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            const float at = sink[h] * kLog2e;
            const float shift = fmaxf(maximum[h], at), weight = exp2_fast(maximum[h] - shift);
            const float total = sum[h] * weight + exp2_fast(at - shift);
            if (t == 0) floats(L::kFactor)[odd * kHeads + row + h * 8] = total > 0.f ? bmm2 * weight / total : 0.f;
          }
        }
        fence_async();
        barrier_arrive(ready(buffer));
      }
      odd ^= 1;
    }
  }
};

}  // namespace m64
}  // namespace mla
