// Sparse MLA over packed rows of vLLM's own caches, more than 16 heads, for Hopper: docs/sm90-sparse-mla.md.
//
// As in sparse_mla_wgmma.cu a block takes 32 heads of one token after another, with rows on M and heads on N of wgmma:
// scores are S^T = K Q^T, outputs O^T = V^T P^T. Each warpgroup has one role: one fetches rows into a ring and finds
// the power of two that each is divided by; one computes scores and weights of a tile of 64 keys; two add it to the
// outputs, each for half of the dimensions. Both products take rows from registers, where E4M3 values become fp16. No
// widened row is ever stored. Values are multiplied there by the ratio of their scale to the row's power, and so are
// keys of 584 bytes; scores of 656-byte rows are multiplied by the scales instead.
//
// Split-KV, for few tokens: up to eight blocks that share a token's keys form a cluster, and push their partial outputs
// to each other.

#include "wgmma_rows_fetch.cuh"
#include "wgmma_rows_scores.cuh"

namespace mla {
namespace wgmma_rows {

// Outputs, 256 dimensions a warpgroup, 64 a warp.
template <RowFormat FORMAT>
struct Outputs : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states;
  using Base::empty, Base::ready, Base::used, Base::q_full, Base::turns, Base::head0, Base::write_outputs, Base::told;
  using Base::wait_full;
  using typename Base::Position;
  using L = Layout<FORMAT>;
  static constexpr int kN = kHeads;

  // The first of the 8 dimensions of this thread: rows g and g + 8 of its warp's part of four M = 64 blocks.
  __device__ __forceinline__ int dim0() const { return warp * 64 + lane / 4 * 8; }

  // Waits for a tile's weights, and corrects the outputs if the maximum was raised for them.
  __device__ __forceinline__ void wait_weights(float (&acc)[4][kN / 2], uint32_t tile) const {
    const int t = lane % 4, buffer = tile % 2;
    barrier_wait(ready(buffer), tile / 2 & 1);
    if (states()[buffer])
      wgmma::correct<1>(acc, floats(L::kCorrection) + buffer * kN, t);
  }

  // O^T += V^T P^T of a tile's 64 keys, whose halves are in two slots of the ring. A k-step is 16 keys, of which a
  // thread has 2t, 2t + 1, 2t + 8 and 2t + 9, and of each of them 8 dimensions. These are narrow but in the last warp,
  // whose dimensions are the wide part if that has values.
  __device__ __forceinline__ void outputs(float (&acc)[4][kN / 2], uint32_t tile, const Position& first) const {
    const uint64_t b = descriptor(base + L::kWeights + tile % 2 * L::kWeightBytes);
    const int t = lane % 4;
    const bool is_wide = L::kHasWideValues && warp == kDim / 64 - 1;
    const int line = (is_wide ? L::kWideLine : warp / 2) * 1024;
    const int chunk = is_wide ? lane / 4 : warp % 2 * 4 + lane / 8, within = is_wide ? 0 : lane / 4 % 2 * 8;
    const int even_row = line + swizzled(2 * t, chunk) + within, odd_row = line + swizzled(2 * t + 1, chunk) + within;
    const int scale_group = is_wide ? 0 : warp * 64 / L::kGroup;
    uint32_t a[2][4][4], raw[4][L::kHasWideValues ? 4 : 2], ratios[2];
    const Position second = first.next();
    const auto read = [&](int step) {
      const Position& half = step < 2 ? first : second;
      const uint32_t slot = half.slot;
      if (step % 2 == 0) wait_full(half);
      const uint8_t* const rows = smem + L::kRing + slot * L::kSlotBytes + step % 2 * 2 * L::kGroupBytes;
      const auto row = [&](int k) { return rows + k / 2 * L::kGroupBytes + (k % 2 ? odd_row : even_row); };
      if constexpr (L::kHasWideValues) {
        if (is_wide) {
#pragma unroll
          for (int k = 0; k < 4; ++k) read_words(raw[k], row(k));
          return;
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) read_words(reinterpret_cast<uint32_t(&)[2]>(raw[k]), row(k));
#pragma unroll
      for (int k = 0; k < 2; ++k)
        ratios[k] = *reinterpret_cast<const uint32_t*>(
            smem + L::kRatios + ((slot * L::kGroups + scale_group) * 32 + step % 2 * 16 + k * 8 + 2 * t) * 2);
    };
    // A fragments of four M = 64 blocks. A register has one dimension of two keys, so this interleaves two rows.
    const auto to_fragments = [&](uint32_t (&to)[4][4]) {
      if constexpr (L::kHasWideValues) {
        if (is_wide) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int m = i / 2, k = i % 2;
            to[m][2 * k] = __byte_perm(raw[2 * k][m], raw[2 * k + 1][m], 0x5410);
            to[m][2 * k + 1] = __byte_perm(raw[2 * k][m], raw[2 * k + 1][m], 0x7632);
          }
          return;
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = i % 4, k = i / 4;
        const uint32_t pairs = __byte_perm(raw[2 * k][m / 2], raw[2 * k + 1][m / 2], m % 2 ? 0x7362 : 0x5140);
        to[m][2 * k] = times_half(e4m3_low(pairs), ratios[k]);
        to[m][2 * k + 1] = times_half(e4m3_high(pairs), ratios[k]);
      }
    };
    // A step's fragments are made while products of the step before go on; the first step's, before there are weights.
    read(0);
    to_fragments(a[0]);
    wait_weights(acc, tile);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) barrier_arrive(empty((step < 2 ? first : second).slot));  // its rows are in registers
      products_begin();
#pragma unroll
      for (int m = 0; m < 4; ++m) product<true>(acc[m], a[step & 1][m], b + step * 2);
      products_commit();
      if (step < 3) {
        read(step + 1);
        products_wait<1>();  // fragments of the step before are free
        to_fragments(a[step & 1 ^ 1]);
      }
    }
    products_wait<0>();
  }

  // What these two warpgroups do.
  __device__ __forceinline__ void accumulate_items() const {
    uint32_t tile = 0;
    Position position;
    KeyLengths lengths(p, turns[0]);
    {
      // The first item's q is loaded here, because there is nothing else to do yet.
      QLoader<FORMAT, kOutputThreads / 32> q;
      q.load(p, Item(p, turns[0], lengths).token, head0(turns[0]), warp, lane);
      q.store(p, warp, lane, smem + L::kQ, floats(L::kScale));
      barrier_arrive(q_full(0));
    }
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const Item item(p, i, lengths);
      lengths = KeyLengths(p, turns[turn + 1]);
      float acc[4][kN / 2] = {};
      for (int left = item.tiles; left > 0; --left, ++tile, position = position.next(2)) {
        outputs(acc, tile, position);
        if (left > 1) barrier_arrive(used(tile % 2));
      }
      if (p.splits > 1) {
        push_and_merge(acc, i, item.token);
        return;
      }
      // With the last weights came the factors.
      const int last = (tile + 1) % 2;
      const float* const factors = floats(L::kFactor) + last * kN;
      write_outputs(acc, item.token, head0(i), dim0(), [&](int head) { return factors[head]; });
      barrier_arrive(used(last));
    }
  }

  // Split-KV: each block of a cluster has a share of the keys, and writes a share of the outputs. It pushes the units
  // of its partial outputs, the dimensions of a warp for one head, to those who write them. Neighbouring heads have a
  // unit's runs of 8 dimensions in different orders, so that they are written to different banks.
  __device__ __forceinline__ void push_and_merge(const float (&acc)[4][kN / 2], int item, int64_t token) const {
    static_assert(Told::kUnitsHead * 32 == kOutputThreads, "a unit is the dimensions of a warp");
    const int g = lane / 4, t = lane % 4, block = p.share_of(item);
    uint32_t most[kN / 8];  // of heads 2t and 2t + 1 of each eight, as BF16
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      float of[2] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) of[i % 2] = fmaxf(of[i % 2], fabsf(acc[i / 4][n * 4 + i % 4]));
      most[n] = __byte_perm(__float_as_uint(of[0]), __float_as_uint(of[1]), 0x7632);
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) most[n] = __vmaxu2(most[n], __shfl_xor_sync(~0u, most[n], mask));
    cluster_wait();
    Told& told = this->told();
    const Told::Places places = told.places_of(block);
#pragma unroll
    for (int n = 0; n < kN / 4; ++n) {
      const int head = n / 2 * 8 + t * 2 + n % 2, at = n / 2 * 4 + n % 2;
      const float2 power = power_below(n % 2 ? most[n / 2] >> 16 : most[n / 2]);
      uint32_t packed[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) packed[m] = pack_half(acc[m][at] * power.y, acc[m][at + 2] * power.y);
      const Told::Place place = places[warp * kN + head];
      told.tell(place, g ^ t * 2, packed);
      if (g == n) told.tell_power(place, power.x);
    }
    told.merge(p, kN, p.splits, block, warp * 32 + lane, kOutputThreads, token, head0(item), floats(L::kFactor), p.bmm2,
               [](int unit, int run) {
                 const int head = unit % kN;
                 return make_int2(head, unit / kN * 64 + (run ^ (head / 2 % 4) * 2) * 8);
               });
  }
};

// EVICT_FIRST: rows leave the L2 cache first.
template <RowFormat FORMAT, bool EVICT_FIRST>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_wgmma_rows_kernel(const __grid_constant__ RowParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  using L = Layout<FORMAT>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  int* const list = reinterpret_cast<int*>(smem + L::kTurns);
  const Turns turns(list, p.items);
  // The lane is asked for in each role, or else one that lacks registers puts it into memory for all.
  const auto block = [&] {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return Storage<FORMAT>{p, smem, smem_address(smem), warp, lane, turns};
  };
  if (threadIdx.x == 0) block().init();
  if (p.splits > 1) cluster_arrive();
  touch(p);
  wait_for_previous();
  if (turns.is_sorted)
    sort_items(turns, smem, list, [&](int i) { return Item(p, i, KeyLengths(p, i)).tiles; });
  else
    __syncthreads();
  if (warp >= 12) {
    give_registers<L::kFetchRegisters>();
    Fetch<FORMAT>{block()}.template fetch<EVICT_FIRST>();
    if (p.splits > 1) cluster_wait();  // all threads of a cluster must
  } else if (warp >= 8) {
    take_registers<L::kScoreRegisters>();
    Scores<FORMAT>{block()}.score_items();
  } else {
    take_registers<L::kOutputRegisters>();
    Outputs<FORMAT>{block()}.accumulate_items();
  }
#endif
}

template <RowFormat FORMAT>
cudaError_t launch(const SparseMlaRows& call, int splits, int sms, cudaStream_t stream) {
  const RowParams p(call, kHeads, splits);
  const int blocks = splits > 1 ? p.items : min(p.items, sms);
  const auto launch_with = [&](auto evict_first) {
    return launch_kernel<sparse_mla_wgmma_rows_kernel<FORMAT, decltype(evict_first)::value>>(
        p, blocks, kThreads, Layout<FORMAT>::kTotal, splits, stream);
  };
  return call.keep_outputs ? launch_with(std::true_type()) : launch_with(std::false_type());
}

template <RowFormat FORMAT>
int clusters(int size, int device) {
  return clusters_at_once<sparse_mla_wgmma_rows_kernel<FORMAT, true>>(kThreads, Layout<FORMAT>::kTotal, size, device);
}

}  // namespace wgmma_rows

cudaError_t launch_sparse_mla_wgmma_rows(const SparseMlaRows& call, int splits, int sms, cudaStream_t stream) {
  using wgmma_rows::launch;
  switch (call.format) {
    case RowFormat::kV4: return launch<RowFormat::kV4>(call, splits, sms, stream);
    case RowFormat::kV32: return launch<RowFormat::kV32>(call, splits, sms, stream);
    default: return cudaErrorInvalidValue;
  }
}

int wgmma_rows_clusters(RowFormat format, int size, int device) {
  return format == RowFormat::kV4 ? wgmma_rows::clusters<RowFormat::kV4>(size, device)
                                  : wgmma_rows::clusters<RowFormat::kV32>(size, device);
}

}  // namespace mla
