// Scores and weights of sparse_mla_m64_rows.cu, which one warpgroup computes.
#pragma once

#include "m64_rows_block.cuh"

namespace mla {
namespace m64_rows {

template <RowFormat FORMAT>
struct Scores : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::q_full, Base::q_read;
  using Base::tail_empty, Base::ready, Base::used, Base::known, Base::turns;
  using L = Layout<FORMAT>;
  static constexpr bool kPacked = L::kPacked;
  // Of 16 dimensions: those whose q is in registers, 0 to 255 and the tail; q of the rest is in shared memory.
  static constexpr int kTailSteps = L::kHasTail ? 4 : 0;

  __device__ __forceinline__ void weigh() const {
    const int g = lane / 4, t = lane % 4, row = warp % 4 * 16 + g;
    const int lane_row = warp % 4 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
    uint32_t entry = 0, tile = 0, odd = 0, phases = 0;  // a bit a slot
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, i = turns[0]; i < p.units; i = turns[++turn]) {
      const int tiles = Item(p, i, lengths).tiles();
      uint32_t q[16][4], tail[kTailSteps + 1][4];
      float scale[2] = {p.bmm1 * kLog2e, p.bmm1 * kLog2e};
      barrier_wait(q_full(), odd);
      const auto read_q = [&](uint32_t (&to)[4], int step) {
        ldmatrix(to, base + L::block_at(entry & 1, step / 4) + swizzled(lane_row, step % 4 * 2 + (lane >> 4)));
      };
#pragma unroll
      for (int step = 0; step < 16; ++step) read_q(q[step], step);
#pragma unroll
      for (int step = 0; step < kTailSteps; ++step) read_q(tail[step], 32 + step);
      [[maybe_unused]] uint32_t inverse[2];
      const auto to_half = [&](uint32_t (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = scaled_to_half(x[k], inverse[k % 2]);
      };
      if constexpr (kPacked) {
        // The power that q is divided by goes back in with the scale.
        uint32_t largest[2] = {};
        const auto look_at = [&](const uint32_t (&x)[4]) {
#pragma unroll
          for (int k = 0; k < 4; ++k) largest[k % 2] = larger_magnitudes(largest[k % 2], x[k]);
        };
#pragma unroll
        for (int step = 0; step < 16; ++step) look_at(q[step]);
#pragma unroll
        for (int step = 0; step < kTailSteps; ++step) look_at(tail[step]);
#pragma unroll
        for (int step = 16; step < 32; step += 2) {
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
          // q has the sign of the softmax scale, so that a larger product is a larger score.
          scale[h] *= power.x, inverse[h] = __float_as_uint(power.y) >> 16 | __float_as_uint(power.y);
          if (scale[h] < 0.f) scale[h] = -scale[h], inverse[h] ^= 0x80008000;
        }
      }
      // The second half of the dimensions, for which there are no registers, is read again, and goes where there is
      // room.
      const auto write_q = [&](uint32_t (&x)[4], int step) {
        if constexpr (kPacked) to_half(x);
        stmatrix(base + L::kSecondQ + (step - 16) / 4 * kBlockBytes + swizzled(lane_row, step % 4 * 2 + (lane >> 4)),
                 x[0], x[1], x[2], x[3]);
      };
#pragma unroll 1
      for (int step = 16; step < 32; step += 4) {
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
        for (int step = 0; step < 16; ++step) to_half(q[step]);
#pragma unroll
        for (int step = 0; step < kTailSteps; ++step)
#pragma unroll
          for (int k = 0; k < 4; ++k) tail[step][k] = scaled_bf16(tail[step][k], inverse[k % 2]);
      }
      fence_async();
      sync_threads(3, 128);
      const uint64_t second_q = descriptor(base + L::kSecondQ - kTileBytes / 2);
      float sum[2] = {}, maximum[2] = {kNoMaximum, kNoMaximum}, sink[2];
      [[maybe_unused]] float most[2] = {-INFINITY, -INFINITY};  // score, which only calls over BF16 rows ask for
      int weights_row = lane_row;  // addresses of weights are found from here on: nothing of them is kept across q
      asm volatile("" : "+r"(weights_row));
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        float s[32];
        const int slot = entry & 1;
        barrier_wait(full(slot), phases >> slot & 1);
        phases ^= 1 << slot;
        if constexpr (!kPacked) fence_async();  // the rows came by copies that wgmma does not see by itself
        const uint64_t k = descriptor(base + slot * kTileBytes);
        if (left == 1) {
          // What the end of the item and the next one need is asked for before the last scores.
          lengths = LaneLengths(p, turns[turn + 1], lane);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int head = Item::head0(p, i) + row + h * 8;
            sink[h] = p.sinks && head < p.heads ? p.sinks[head] : -INFINITY;
          }
        }
        products_begin();
        score_product<kPacked, false>(s, q[0], k);
#pragma unroll
        for (int step = 1; step < 32; ++step) {
          const int at_step = (step / 4 * kBlockBytes + step % 4 * 32) >> 4;
          if (step < 16)
            score_product<kPacked, true>(s, q[step], k + at_step);
          else
            score_product<kPacked>(s, second_q + at_step, k + at_step);
        }
        if constexpr (L::kHasTail) {
          const uint64_t tail_k = descriptor(base + L::block_at(slot, kDim / 64));
#pragma unroll
          for (int step = 0; step < kTailSteps; ++step)
            score_product<false, true>(s, tail[step], tail_k + (step * 32 >> 4));
        }
        products_commit();
        const uint8_t* const of_rows = smem + L::kPowers + entry % 4 * kTile;
        // A byte for each quarter, or a bit for each row, asked for before the scores are waited for.
        uint32_t there[kPacked ? 1 : 2];
        if constexpr (kPacked)
          there[0] = reinterpret_cast<const uint32_t*>(smem + L::kCommon)[entry % 4];
        else
          read_words(there, of_rows);
        products_wait<0>();
        strict_wait(3);
        if (kPacked && L::kHasTail) barrier_arrive(tail_empty(slot));

        const int buffer = tile % 2;
        const uint32_t to = base + L::kWeights + buffer * kBlockBytes;
        const auto put = [&](int n, const uint32_t (&w)[4]) {
          stmatrix(to + swizzled(weights_row, n * 2 + (lane >> 4)), w[0], w[1], w[2], w[3]);
        };
        const auto raise = [&](int h, float largest) {
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
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
          if ((there[0] & there[1]) != ~0u) {
#pragma unroll
            for (int j = 0; j < 32; ++j) {
              const int key = j / 4 * 8 + 2 * t + j % 2;
              if (!(there[j / 16] >> (key % 32) & 1)) s[j] = -INFINITY;
            }
          }
          barrier_wait(used(buffer), tile / 2 & 1 ^ 1);
          raise_to_scores();
          barrier_arrive(known(buffer));
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
        } else if (has_zero_byte(there[0])) {
          uint32_t powers[4];  // of a lane's 16 keys: those of rows with a power of their own are elsewhere
          const auto read_powers = [&](int n) {
            const uint32_t common = __byte_perm(there[0], 0, n * 0x1111);
            powers[n] = common ? common : reinterpret_cast<const uint32_t*>(of_rows)[t * 4 + n];
          };
#pragma unroll
          for (int n = 0; n < 4; ++n) read_powers(n);
          // As the exponent of a float32, of key 8n + 2t + i.
          const auto power = [&](int n, int i) {
            return __byte_perm(powers[n / 2], 0, 0x0444 | (n % 2 * 2 + i) << 12) >> 1;
          };
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            const uint32_t of = power(j / 4, j % 2);
            const uint32_t number = __byte_perm(powers[j / 8], 0x4B000000, 0x7440 | (j / 4 % 2 * 2 + j % 2));
            const float log2 = of ? __uint_as_float(number) - (8388608.f + 127.f) : -INFINITY;
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
          const auto power = [&](int n) { return __byte_perm(there[0], 0, 0x0444 | n << 12) >> 1; };
          const auto logarithm = [&](int n) {
            return __uint_as_float(__byte_perm(there[0], 0x4B000000, 0x7440 | n)) - (8388608.f + 127.f);
          };
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
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            const float at = sink[h] * kLog2e;
            const float shift = fmaxf(maximum[h], at), weight = exp2_fast(maximum[h] - shift);
            const float total = sum[h] * weight + exp2_fast(at - shift);
            if (t == 0) floats(L::kFactor)[odd * kHeads + row + h * 8] = total > 0.f ? p.bmm2 * weight / total : 0.f;
          }
        }
        fence_async();
        barrier_arrive(ready(buffer));
      }
      if (i >= p.whole) {
        float* const to = p.statistics_of(i) + row;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (t == 0) to[h * 8] = maximum[h], to[kHeads + h * 8] = sum[h], to[2 * kHeads + h * 8] = most[h];
      } else if (p.lse) {
        const int head = Item::head0(p, i) + row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (t == 0 && head + h * 8 < p.heads)
            write_statistics(p, Item::token(p, i), head + h * 8, maximum[h], sum[h], most[h]);
        }
      }
      odd ^= 1;
    }
  }
};

}  // namespace m64_rows
}  // namespace mla
