// Scores and weights of sparse_mla_m64_rows.cu, which one warpgroup computes.
#pragma once

#include "m64_rows_block.cuh"

namespace mla {
namespace m64_rows {

template <RowFormat FORMAT>
struct Scores : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::q_full, Base::q_read;
  using Base::tail_empty, Base::ready, Base::used, Base::maximum_ready, Base::turns;
  using L = Layout<FORMAT>;
  static constexpr bool kPacked = L::kPacked;
  static constexpr int kTailSteps = L::kHasTail ? 4 : 0;  // their q stays in registers too

  // The 16 bytes of a k-step that this lane addresses in ldmatrix and stmatrix, in a block of 64 dimensions or keys.
  __device__ __forceinline__ int matrix_chunk(int step) const { return step % 4 * 2 + (lane >> 4); }

  // Takes an item's q from entry `entry` of the ring, and goes on to the next entry: the first half of the dimensions
  // and the tail to registers, the second half to shared memory. With packed rows it is divided by a power of two on
  // the way, which goes back in with `scale`, and becomes fp16, but for the tail. `row` is what this lane addresses in
  // ldmatrix and stmatrix.
  __device__ __forceinline__ void load_q(uint32_t (&q)[kRegisterSteps][4], uint32_t (&tail)[kTailSteps + 1][4],
                                         float (&scale)[2], uint32_t& entry, int row) const {
    const auto read_q = [&](uint32_t (&to)[4], int step) {
      ldmatrix(to, base + L::block_at(entry & 1, step / 4) + swizzled(row, matrix_chunk(step)));
    };
#pragma unroll
    for (int step = 0; step < kRegisterSteps; ++step) read_q(q[step], step);
#pragma unroll
    for (int step = 0; step < kTailSteps; ++step) read_q(tail[step], kSteps + step);
    [[maybe_unused]] uint32_t inverse[2];
    const auto to_half = [&](uint32_t (&x)[4]) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = scaled_to_half(x[k], inverse[k % 2]);
    };
    if constexpr (kPacked) {
      uint32_t largest[2] = {};
      const auto look_at = [&](const uint32_t (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) largest[k % 2] = larger_magnitudes(largest[k % 2], x[k]);
      };
#pragma unroll
      for (int step = 0; step < kRegisterSteps; ++step) look_at(q[step]);
#pragma unroll
      for (int step = 0; step < kTailSteps; ++step) look_at(tail[step]);
#pragma unroll
      for (int step = kRegisterSteps; step < kSteps; step += 2) {
        uint32_t x[2][4];
        read_q(x[0], step), read_q(x[1], step + 1);
        look_at(x[0]), look_at(x[1]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 power = power_of_q(largest[h]);
        scale[h] *= power.x, inverse[h] = bf16_pair(power.y);
        // q takes the sign of the softmax scale, so that a larger product is a larger score.
        if (scale[h] < 0.f) scale[h] = -scale[h], inverse[h] ^= 0x80008000;
      }
    }
    const auto write_q = [&](uint32_t (&x)[4], int step) {
      if constexpr (kPacked) to_half(x);
      stmatrix(base + L::kSecondQ + (step - kRegisterSteps) / 4 * kBlockBytes + swizzled(row, matrix_chunk(step)), x[0],
               x[1], x[2], x[3]);
    };
    // The second half was read to find the largest value, and is read again: there are no registers for it.
#pragma unroll 1
    for (int step = kRegisterSteps; step < kSteps; step += 4) {
      uint32_t x[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) read_q(x[j], step + j);
#pragma unroll
      for (int j = 0; j < 4; ++j) write_q(x[j], step + j);
    }
    barrier_arrive(q_read());
    if (kPacked && L::kHasTail) barrier_arrive(tail_empty(entry & 1));
    ++entry;
    if constexpr (kPacked) {
#pragma unroll
      for (int step = 0; step < kRegisterSteps; ++step) to_half(q[step]);
#pragma unroll
      for (int step = 0; step < kTailSteps; ++step)
#pragma unroll
        for (int k = 0; k < 4; ++k) tail[step][k] = scaled_bf16(tail[step][k], inverse[k % 2]);
    }
    fence_async();
    sync_threads(3, 128);
  }

  // Issues the products of a tile's scores, S = Q K^T.
  __device__ __forceinline__ void issue_scores(float (&s)[32], const uint32_t (&q)[kRegisterSteps][4],
                                               const uint32_t (&tail)[kTailSteps + 1][4], uint64_t second_q, uint64_t k,
                                               int slot) const {
    products_begin();
    score_products<kPacked>(s, q, second_q, k);
    if constexpr (L::kHasTail) {
      const uint64_t tail_k = descriptor(base + L::block_at(slot, kDim / 64));
#pragma unroll
      for (int step = 0; step < kTailSteps; ++step)
        score_product<false, true>(s, tail[step], tail_k + (step * 32 >> 4));
    }
    products_commit();
  }

  // What this warpgroup does.
  __device__ __forceinline__ void score_items() const {
    const int g = lane / 4, t = lane % 4, row = warp % 4 * 16 + g;
    const int lane_row = warp % 4 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
    uint32_t entry = 0, tile = 0, item_parity = 0, full_parities = 0;  // the last with a bit for each slot
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, unit = turns[0]; unit < p.units; unit = turns[++turn]) {
      const int tiles = Item(p, unit, lengths).tiles();
      uint32_t q[kRegisterSteps][4], tail[kTailSteps + 1][4];
      float scale[2] = {p.bmm1 * kLog2e, p.bmm1 * kLog2e};
      barrier_wait(q_full(), item_parity);
      load_q(q, tail, scale, entry, lane_row);
      const uint64_t second_q = descriptor(base + L::kSecondQ - kTileBytes / 2);
      float sum[2] = {}, maximum[2] = {kNoMaximum, kNoMaximum}, sink[2];
      [[maybe_unused]] float most[2] = {-INFINITY, -INFINITY};  // score, which only calls over BF16 rows ask for
      int weights_row = lane_row;
      make_opaque(weights_row);  // so that no address of weights is kept in a register while q is loaded
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        float s[32];
        const int slot = entry & 1;
        barrier_wait(full(slot), full_parities >> slot & 1);
        full_parities ^= 1 << slot;
        if constexpr (!kPacked) fence_async();  // the rows came by copies that wgmma does not see by itself
        const uint64_t k = descriptor(base + slot * kTileBytes);
        if (left == 1) {
          // What the end of the item and the next one need is asked for before the last scores.
          lengths = LaneLengths(p, turns[turn + 1], lane);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int head = Item::head0(p, unit) + row + h * 8;
            sink[h] = p.sinks && head < p.heads ? p.sinks[head] : -INFINITY;
          }
        }
        issue_scores(s, q, tail, second_q, k, slot);
        const uint8_t* const of_rows = smem + L::kPowers + entry % 4 * kTile;
        // Of packed rows the powers of the quarters, a byte each; of BF16 rows a mask of those that exist. It is asked
        // for before the scores are waited for.
        uint32_t row_info[kPacked ? 1 : 2];
        if constexpr (kPacked)
          row_info[0] = reinterpret_cast<const uint32_t*>(smem + L::kCommon)[entry % 4];
        else
          read_words(row_info, of_rows);
        products_wait<0>();
        strict_wait(3);
        if (kPacked && L::kHasTail) barrier_arrive(tail_empty(slot));

        const int buffer = tile % 2;
        const uint32_t to = base + L::kWeights + buffer * kBlockBytes;
        const auto put = [&](int n, const uint32_t (&w)[4]) {
          stmatrix(to + swizzled(weights_row, matrix_chunk(n)), w[0], w[1], w[2], w[3]);
        };
        const auto raise = [&](int h, float largest) {
          largest = quad_max(largest);
          if (!kPacked) most[h] = fmaxf(most[h], largest);
          // A weight of 1 is exact in BF16, so there the largest one is always 1.
          const float now = largest > maximum[h] + (kPacked ? kSlack : 0.f) ? largest : maximum[h];
          if (t == 0) floats(L::kMaximum)[buffer * kHeads + row + h * 8] = now;
          sum[h] *= exp2_fast(maximum[h] - now), maximum[h] = now;
        };
        const auto raise_to_scores = [&] {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float largest = s[2 * h];
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
            raise(h, largest);
          }
        };
        // Weights are those of rows times the power that they were divided by, and so is their maximum.
        if constexpr (!kPacked) {
#pragma unroll
          for (int j = 0; j < 32; ++j) s[j] *= scale[j / 2 % 2];
          drop_missing(s, row_info[0], row_info[1], t);
          barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
          raise_to_scores();
          barrier_arrive(maximum_ready(buffer));
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t w[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int j = n * 8 + 2 * k, h = k % 2;
              const float x = exp2_fast(s[j] - maximum[h]), y = exp2_fast(s[j + 1] - maximum[h]);
              sum[h] += x + y, w[k] = pack_bf16(x, y);
            }
            put(n, w);
          }
        } else if (has_zero_byte(row_info[0])) {
          // In some quarter rows have powers of their own, or are missing: key by key. `powers` has a byte for each of
          // this lane's 16 keys.
          uint32_t powers[4];
          const auto read_powers = [&](int n) {
            const uint32_t common = __byte_perm(row_info[0], 0, n * 0x1111);
            powers[n] = common ? common : reinterpret_cast<const uint32_t*>(of_rows)[t * 4 + n];
          };
#pragma unroll
          for (int n = 0; n < 4; ++n) read_powers(n);
          // As the exponent of a float32, of key 8n + 2t + i.
          const auto power = [&](int n, int i) { return power_of_byte(powers[n / 2], n % 2 * 2 + i); };
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            const uint32_t of = power(j / 4, j % 2);
            const float log2 = of ? log2_of_byte(powers[j / 8], j / 4 % 2 * 2 + j % 2) : -INFINITY;
            s[j] = fmaf(s[j] * __uint_as_float(of), scale[j / 2 % 2], log2);
          }
          barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
          raise_to_scores();
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t w[4];
            read_powers(n);  // again, since registers are few
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int j = n * 8 + 2 * k, h = k % 2;
              const float x = exp2_fast(s[j] - maximum[h]), y = exp2_fast(s[j + 1] - maximum[h]);
              sum[h] = fmaf(x, __uint_as_float(0x7F000000 - power(n * 2 + k / 2, 0)), sum[h]);
              sum[h] = fmaf(y, __uint_as_float(0x7F000000 - power(n * 2 + k / 2, 1)), sum[h]);
              w[k] = pack_half(x, y);
            }
            put(n, w);
          }
        } else {
          // The 16 rows of each quarter have a common power.
          const auto power = [&](int n) { return power_of_byte(row_info[0], n); };
          const auto logarithm = [&](int n) { return log2_of_byte(row_info[0], n); };
          float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float* const x = s + n * 8 + 2 * h;
              const float of_quarter = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[4], x[5]));
              largest[h] = fmaxf(largest[h], fmaf(of_quarter, scale[h] * __uint_as_float(power(n)), logarithm(n)));
            }
          barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
          raise(0, largest[0]), raise(1, largest[1]);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t w[4];
            float by[2], plus[2], all[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
              by[h] = scale[h] * __uint_as_float(power(n)), plus[h] = logarithm(n) - maximum[h], all[h] = 0.f;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int j = n * 8 + 2 * k, h = k % 2;
              const float x = exp2_fast(fmaf(s[j], by[h], plus[h])), y = exp2_fast(fmaf(s[j + 1], by[h], plus[h]));
              all[h] += x + y, w[k] = pack_half(x, y);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[h] = fmaf(all[h], __uint_as_float(0x7F000000 - power(n)), sum[h]);
            put(n, w);
          }
        }
        if (left == 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sum[h] = quad_sum(sum[h]);
            const float sink_log2 = sink[h] * kLog2e;
            const float shift = fmaxf(maximum[h], sink_log2), weight = exp2_fast(maximum[h] - shift);
            const float total = sum[h] * weight + exp2_fast(sink_log2 - shift);
            float* const factors = floats(L::kFactor) + item_parity * kHeads;
            if (t == 0) factors[row + h * 8] = total > 0.f ? p.bmm2 * weight / total : 0.f;
          }
        }
        fence_async();
        barrier_arrive(ready(buffer));
      }
      if (unit >= p.whole) {
        float* const to = p.statistics_of(unit) + row;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (t == 0) to[h * 8] = maximum[h], to[kHeads + h * 8] = sum[h], to[2 * kHeads + h * 8] = most[h];
      } else if (p.lse) {
        const int head = Item::head0(p, unit) + row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (t == 0 && head + h * 8 < p.heads)
            write_statistics(p, Item::token(p, unit), head + h * 8, maximum[h], sum[h], most[h]);
        }
      }
      item_parity ^= 1;
    }
  }
};

}  // namespace m64_rows
}  // namespace mla
