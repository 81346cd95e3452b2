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
  // The 16 bytes of a k-step that this lane addresses in ldmatrix and stmatrix, in a block of 64 dimensions or keys.
  __device__ __forceinline__ int matrix_chunk(int step) const { return step % 4 * 2 + (lane >> 4); }

  // Takes an item's q from entry `entry` of the ring, and goes on to the next entry: the first half of the dimensions
  // to registers, the second to shared memory. With E4M3 rows it becomes fp16 on the way, divided by a power of two
  // that goes back in with `scale`. `row` is what this lane addresses in ldmatrix and stmatrix.
  __device__ __forceinline__ void load_q(uint32_t (&q)[kRegisterSteps][4], float (&scale)[2], uint32_t& entry,
                                         int row) const {
    const auto read_q = [&](uint32_t (&to)[4], int step) {
      ldmatrix(to, base + (entry & 1) * kTileBytes + step / 4 * kBlockBytes + swizzled(row, matrix_chunk(step)));
    };
#pragma unroll
    for (int step = 0; step < kRegisterSteps; ++step) read_q(q[step], step);
    // The second half is read twice, to find the largest value and to convert it: there are no registers for it. Only
    // its last quarter is kept meanwhile, in registers that scores will need.
    constexpr int kKept = FP8 ? 4 : 0;
    uint32_t kept[kKept + 1][4], inverse[2];
    const auto to_half = [&](uint32_t (&x)[4]) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = scaled_to_half(x[k], inverse[k % 2]);
    };
    if constexpr (FP8) {
      uint32_t largest[2] = {};
      const auto look_at = [&](const uint32_t (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) largest[k % 2] = larger_magnitudes(largest[k % 2], x[k]);
      };
#pragma unroll
      for (int step = 0; step < kKept; ++step) read_q(kept[step], kSteps - kKept + step);
#pragma unroll
      for (int step = 0; step < kRegisterSteps; ++step) look_at(q[step]);
#pragma unroll
      for (int step = 0; step < kKept; ++step) look_at(kept[step]);
#pragma unroll
      for (int step = kRegisterSteps; step < kSteps - kKept; step += 2) {
        uint32_t x[2][4];
        read_q(x[0], step), read_q(x[1], step + 1);
        look_at(x[0]), look_at(x[1]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 power = power_of_q(largest[h]);
        scale[h] *= power.x, inverse[h] = bf16_pair(power.y);
      }
    }
    const auto write_q = [&](uint32_t (&x)[4], int step) {
      if constexpr (FP8) to_half(x);
      stmatrix(base + L::kSecondQ + (step - kRegisterSteps) / 4 * kBlockBytes + swizzled(row, matrix_chunk(step)), x[0],
               x[1], x[2], x[3]);
    };
#pragma unroll 1
    for (int step = kRegisterSteps; step < kSteps - kKept; step += 4) {
      uint32_t x[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) read_q(x[j], step + j);
#pragma unroll
      for (int j = 0; j < 4; ++j) write_q(x[j], step + j);
    }
    barrier_arrive(q_read());
    ++entry;
#pragma unroll
    for (int step = 0; step < kKept; ++step) write_q(kept[step], kSteps - kKept + step);
    if constexpr (FP8) {
#pragma unroll
      for (int step = 0; step < kRegisterSteps; ++step) to_half(q[step]);
    }
    fence_async();
    sync_threads(3, 128);
  }

  // What this warpgroup does.
  __device__ __forceinline__ void score_items() const {
    const int g = lane / 4, t = lane % 4, row = warp % 4 * 16 + g;
    const int lane_row = warp % 4 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
    const float score_scale = p.score_scale(), output_scale = p.output_scale();
    uint32_t entry = 0, tile = 0, item_parity = 0, full_parities = 0;  // the last with a bit for each slot
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const int tiles = Item(p, i, lengths).tiles;
      if (tiles == 0) {
        lengths = LaneLengths(p, turns[turn + 1], lane);
        continue;
      }
      uint32_t q[kRegisterSteps][4];
      float scale[2] = {score_scale, score_scale};
      barrier_wait(q_full(), item_parity);
      load_q(q, scale, entry, lane_row);
      const uint64_t second_q = descriptor(base + L::kSecondQ - kTileBytes / 2);
      float sum[2] = {}, maximum[2] = {kNoMaximum, kNoMaximum}, sink[2];
      int weights_row = lane_row;
      make_opaque(weights_row);  // so that no address of weights is kept in a register while q is loaded
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        float s[32];
        const int slot = entry & 1;
        barrier_wait(full(slot), full_parities >> slot & 1);
        full_parities ^= 1 << slot;
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
        score_products<FP8>(s, q, second_q, k);
        products_commit();
        const uint2 row_mask = *reinterpret_cast<const uint2*>(smem + L::kRowMasks + entry % 4 * 8);
        products_wait<0>();
        strict_wait(3);

#pragma unroll
        for (int j = 0; j < 32; ++j) s[j] *= scale[j / 2 % 2];
        drop_missing(s, row_mask.x, row_mask.y, t);
        const int buffer = tile % 2;
        barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
        // The maximum is raised where a score is far above it, which the output warpgroups are told.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float largest = s[2 * h];
#pragma unroll
          for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
          largest = quad_max(largest);
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
            // BF16 weights are added up as rounded: what rounding adds to a large one it then adds to the sum too.
            const float2 weight = FP8 ? make_float2(x, y) : unpack_bf16(w[k]);
            sum[h] += weight.x + weight.y;
          }
          stmatrix(to + swizzled(weights_row, matrix_chunk(n)), w[0], w[1], w[2], w[3]);
        }
        if (left == 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sum[h] = quad_sum(sum[h]);
            const float sink_log2 = sink[h] * kLog2e;
            const float shift = fmaxf(maximum[h], sink_log2), weight = exp2_fast(maximum[h] - shift);
            const float total = sum[h] * weight + exp2_fast(sink_log2 - shift);
            float* const factors = floats(L::kFactor) + item_parity * kHeads;
            if (t == 0) factors[row + h * 8] = total > 0.f ? output_scale * weight / total : 0.f;
          }
        }
        fence_async();
        barrier_arrive(ready(buffer));
      }
      item_parity ^= 1;
    }
  }
};

}  // namespace m64
}  // namespace mla
