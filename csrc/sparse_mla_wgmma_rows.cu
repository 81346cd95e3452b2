// Sparse MLA over packed rows of vLLM's own caches, more than 16 heads, for Hopper: docs/sm90-sparse-mla.md.
//
// As in sparse_mla_wgmma.cu a block takes 32 heads of one token after another, with rows on M and heads on N of wgmma:
// scores are S^T = K Q^T, outputs O^T = V^T P^T. Each warpgroup has one role: one fetches rows into a ring and finds
// the power of two that each is divided by; one computes scores and weights of a tile of 64 keys; two add it to the
// outputs, each for half of the dimensions. Both products take rows from registers, where E4M3 values become fp16 and
// are multiplied by the ratio of their scale to the row's power: no widened row is ever stored.
// Few tokens: up to eight blocks that share a token's keys form a cluster and merge through each other's shared memory.

#include <cooperative_groups.h>

#include "wgmma_rows_fetch.cuh"
#include "wgmma_rows_scores.cuh"

namespace cg = cooperative_groups;

namespace mla {
namespace wgmma_rows {

// Outputs, 256 dimensions a warpgroup, 64 a warp.
template <RowFormat FORMAT>
struct Outputs : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::out_of, Base::full;
  using Base::empty, Base::ready, Base::used, Base::q_full, Base::turns, Base::head0, Base::write_outputs;
  using L = Layout<FORMAT>;
  static constexpr int kN = kHeads;

  // The first of the 8 dimensions of this thread: rows g and g + 8 of its warp's part of four M = 64 blocks.
  __device__ __forceinline__ int dim0() const { return warp * 64 + lane / 4 * 8; }

  __device__ __forceinline__ void wait_weights(float (&acc)[4][kN / 2], uint32_t tile) const {
    const int t = lane % 4, buffer = tile % 2;
    barrier_wait(ready(buffer), tile / 2 & 1);
    if (states()[buffer])  // the maximum was raised
      wgmma::correct<1>(acc, floats(L::kCorrection) + buffer * kN, t);
  }

  // O^T += V^T P^T of a tile's 64 keys.
  __device__ __forceinline__ void outputs(float (&acc)[4][kN / 2], uint32_t tile) const {
    const uint64_t b = descriptor(base + L::kWeights + tile % 2 * L::kWeightBytes);
    // A step is 16 keys, of which a thread has 2t, 2t + 1, 2t + 8 and 2t + 9, and of each 8 dimensions: narrow ones, or
    // in the last warp, where they are values, wide ones.
    const int t = lane % 4;
    const bool is_wide = L::kHasWideValues && warp == kDim / 64 - 1;
    const int line = (is_wide ? L::kWideLine : warp / 2) * 1024;
    const int chunk = is_wide ? lane / 4 : warp % 2 * 4 + lane / 8, within = is_wide ? 0 : lane / 4 % 2 * 8;
    const int even_row = line + swizzled(2 * t, chunk) + within, odd_row = line + swizzled(2 * t + 1, chunk) + within;
    const int group = is_wide ? 0 : warp * 64 / L::kGroup;
    uint32_t a[2][4][4], raw[4][L::kHasWideValues ? 4 : 2], ratios[2];
    const auto read = [&](int step) {
      const uint32_t count = 2 * tile + step / 2, slot = count % L::kSlots;
      if (step % 2 == 0) barrier_wait(full(slot), count / L::kSlots & 1);
      const uint8_t* const rows = smem + L::kRing + slot * L::kSlotBytes + step % 2 * 2 * L::kGroupBytes;
      const auto row = [&](int k) { return rows + k / 2 * L::kGroupBytes + (k % 2 ? odd_row : even_row); };
      if constexpr (L::kHasWideValues)
        if (is_wide) {
#pragma unroll
          for (int k = 0; k < 4; ++k) read_words(raw[k], row(k));
          return;
        }
#pragma unroll
      for (int k = 0; k < 4; ++k) read_words(reinterpret_cast<uint32_t(&)[2]>(raw[k]), row(k));
#pragma unroll
      for (int k = 0; k < 2; ++k)
        ratios[k] = *reinterpret_cast<const uint32_t*>(
            smem + L::kRatios + ((slot * L::kGroups + group) * 32 + step % 2 * 16 + k * 8 + 2 * t) * 2);
    };
    // Two keys of one dimension to a register.
    const auto to_operand = [&](uint32_t (&to)[4][4]) {
      if constexpr (L::kHasWideValues)
        if (is_wide) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int m = i / 2, k = i % 2;
            to[m][2 * k] = __byte_perm(raw[2 * k][m], raw[2 * k + 1][m], 0x5410);
            to[m][2 * k + 1] = __byte_perm(raw[2 * k][m], raw[2 * k + 1][m], 0x7632);
          }
          return;
        }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = i % 4, k = i / 4;
        const uint32_t pairs = __byte_perm(raw[2 * k][m / 2], raw[2 * k + 1][m / 2], m % 2 ? 0x7362 : 0x5140);
        to[m][2 * k] = times(e4m3_low(pairs), ratios[k]), to[m][2 * k + 1] = times(e4m3_high(pairs), ratios[k]);
      }
    };
    read(0);
    to_operand(a[0]);
    wait_weights(acc, tile);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) barrier_arrive(empty((2 * tile + step / 2) % L::kSlots));  // its rows are in registers
      products_begin();
#pragma unroll
      for (int m = 0; m < 4; ++m) product<true>(acc[m], a[step & 1][m], b + step * 2);
      products_commit();
      if (step < 3) {
        read(step + 1);
        products_wait<1>();
        to_operand(a[step & 1 ^ 1]);
      }
    }
    products_wait<0>();
  }

  __device__ __forceinline__ void multiply() const {
    const int t = lane % 4;
    uint32_t tile = 0;
    KeyLengths lengths(p, turns[0]);
    {
      // The first item's q is loaded here, because there is nothing else to do yet.
      PartOfQ<FORMAT, 8> q;
      q.load(p, Item(p, turns[0], lengths).token, head0(turns[0]), warp, lane);
      q.store(p, warp, lane, smem + L::kQ, floats(L::kScale));
      barrier_arrive(q_full(0));
    }
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const Item item(p, i, lengths);
      lengths = KeyLengths(p, turns[turn + 1]);
      float acc[4][kN / 2] = {};
      for (int left = item.tiles; left > 0; --left, ++tile) {
        outputs(acc, tile);
        if (left > 1) barrier_arrive(used(tile % 2));
      }
      if (p.splits > 1) {
        sync_threads(2, kOutputThreads);
        // Partial outputs take the place of the ring, which everybody has left.
        wgmma::store_partial(floats(L::kRing), acc, dim0(), t);
        return;
      }
      // With the last weights came the factors.
      const int last = (tile + 1) % 2;
      const float* const factors = floats(L::kFactor) + last * kN;
      write_outputs(acc, item.token, head0(i), dim0(), [&](int head) { return factors[head]; });
      barrier_arrive(used(last));
    }
  }

  // ---------------------------------------------------------------- splits are the blocks of a cluster
  // Each adds up its share of the output from everybody's shared memory, in the order of the ranks.
  __device__ __forceinline__ void merge() const {
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    const int64_t token = blockIdx.x / (p.splits * p.head_blocks);
    const int rank = blockIdx.x % p.splits, first = head0(blockIdx.x), heads = min(kN, p.heads - first);
    for (int i = rank * kOutputThreads + warp * 32 + lane; i < heads * (kDim / 4); i += p.splits * kOutputThreads) {
      const int head = i / (kDim / 4), dim = i % (kDim / 4) * 4;
      const float sink = p.sinks ? p.sinks[first + head] * kLog2e : -INFINITY;
      float largest[kMaxSplits], sum[kMaxSplits], maximum = kNoMaximum;
      float4 value[kMaxSplits];
#pragma unroll
      for (int r = 0; r < kMaxSplits; ++r) {
        if (r >= p.splits) continue;
        const float* const stat = cluster.map_shared_rank(floats(L::kFactor), r);
        largest[r] = stat[head], sum[r] = stat[kN + head];
        value[r] = *reinterpret_cast<const float4*>(cluster.map_shared_rank(floats(L::kRing), r) +
                                                    wgmma::partial_at(head, dim));
        maximum = fmaxf(maximum, largest[r]);
      }
      float keys = 0.f;
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < kMaxSplits; ++r) {
        if (r >= p.splits) continue;
        const float weight = exp2_fast(largest[r] - maximum);
        keys += weight * sum[r];
        v.x += weight * value[r].x, v.y += weight * value[r].y, v.z += weight * value[r].z, v.w += weight * value[r].w;
      }
      const float shift = fmaxf(maximum, sink), mine = exp2_fast(maximum - shift);
      const float total = keys * mine + exp2_fast(sink - shift), factor = total > 0.f ? p.bmm2 * mine / total : 0.f;
      *reinterpret_cast<uint2*>(out_of(token, first + head) + dim) =
          make_uint2(pack_bf16(v.x * factor, v.y * factor), pack_bf16(v.z * factor, v.w * factor));
      if (p.lse && dim == 0) write_statistics(p, token, first + head, maximum, keys, maximum);
    }
    cluster.sync();  // nobody leaves while its shared memory is read
  }
};

template <RowFormat FORMAT, bool FIRST>
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
  touch(p);
  wait_for_previous();
  if (turns.is_sorted)
    sort_items(turns, smem, list, [&](int i) { return Item(p, i, KeyLengths(p, i)).tiles; });
  else
    __syncthreads();
  const auto while_merging = [&] {
    if (p.splits > 1) cg::this_cluster().sync(), cg::this_cluster().sync();  // as merge() does
  };
  if (warp >= 12) {
    give_registers<L::kFetchRegisters>();
    Fetch<FORMAT>{block()}.template fetch<FIRST>();
    while_merging();
  } else if (warp >= 8) {
    take_registers<L::kScoreRegisters>();
    Scores<FORMAT>{block()}.weigh();
    while_merging();
  } else {
    take_registers<L::kOutputRegisters>();
    const Outputs<FORMAT> outputs{block()};
    outputs.multiply();
    if (p.splits > 1) outputs.merge();
  }
#endif
}

template <RowFormat FORMAT>
cudaError_t launch(const SparseMlaRows& call, int splits, int sms, cudaStream_t stream) {
  const RowParams p(call, kHeads, splits);
  const int blocks = splits > 1 ? p.items : min(p.items, sms);
  const auto with = [&](auto first) {
    return launch_kernel<sparse_mla_wgmma_rows_kernel<FORMAT, decltype(first)::value>>(
        p, blocks, kThreads, Layout<FORMAT>::kTotal, splits, stream);
  };
  return call.keep_outputs ? with(std::true_type()) : with(std::false_type());
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
