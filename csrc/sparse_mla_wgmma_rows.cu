// Sparse MLA over packed rows of vLLM's own caches, more than 16 heads, for Hopper: docs/sm90-sparse-mla.md.
//
// As in sparse_mla_wgmma.cu a block takes 32 heads of one token after another, with rows on M and heads on N of wgmma:
// scores are S^T = K Q^T, outputs O^T = V^T P^T. Rows become fp16 once, divided by a power of two, in shared memory,
// and both products take them from there. Each warpgroup has a role: two fetch rows into registers and widen them into
// a ring of two tiles of 64 keys; one computes scores and weights of a tile; one adds it to the outputs.
// Few tokens: up to eight blocks that share a token's keys form a cluster and merge through each other's shared memory.

#include <cooperative_groups.h>

#include "wgmma_rows_fetch.cuh"
#include "wgmma_rows_scores.cuh"

namespace cg = cooperative_groups;

namespace mla {
namespace wgmma_rows {

// Outputs, all 512 dimensions.
template <RowFormat FORMAT>
struct Outputs : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::out_of, Base::full;
  using Base::empty, Base::ready, Base::used, Base::q_full, Base::turns, Base::head0, Base::token;
  using L = Layout<FORMAT>;
  static constexpr int kN = kHeads, kBlocks = kDim / 64;

  // O^T += V^T P^T of a tile's 64 keys. V^T is read across its rows, of which a block is 64 dimensions.
  __device__ __forceinline__ void outputs(float (&acc)[kBlocks][kN / 2], uint32_t tile) const {
    const int slot = tile % L::kSlots, buffer = tile % 2;
    uint32_t rows_at = base + L::kRing + slot * L::kSlotBytes;
    asm volatile("" : "+r"(rows_at));
    const uint64_t rows = descriptor(rows_at), weights = descriptor(base + L::kWeights + buffer * L::kWeightBytes);
    barrier_wait(full(slot), tile / L::kSlots & 1);
    barrier_wait(ready(buffer), tile / 2 & 1);
    if (states()[buffer])  // the maximum was raised
      wgmma::correct<1>(acc, floats(L::kCorrection) + buffer * kN, lane % 4);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
        half_product<true, true>(acc[m], rows + ((m * L::kBlockBytes + step * 16 * 128) >> 4), weights + step * 2);
    products_commit();
    products_wait<0>();
    barrier_arrive(empty(slot));
  }

  __device__ __forceinline__ void multiply() const {
    const int g = lane / 4, t = lane % 4;
    uint32_t tile = 0;
    KeyLengths lengths(p, turns[0]);
    {
      // The first item's q is loaded here, because there is nothing else to do yet.
      PartOfQ<FORMAT, 8> q[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) q[k].load(p, token(turns[0]), head0(turns[0]), warp + k * 4, lane);
#pragma unroll
      for (int k = 0; k < 2; ++k) q[k].store(p, warp + k * 4, lane, smem + L::kQ, floats(L::kScale));
      barrier_arrive(q_full(0));
    }
    // The dimension of row 8 * half + g of this warp's part of block m.
    const auto dim_of = [&](int m, int half, int g) { return m * 64 + warp * 16 + half * 8 + g; };
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const Item item(p, i, lengths);
      lengths = KeyLengths(p, turns[turn + 1]);
      float acc[kBlocks][kN / 2] = {};
      for (int left = item.tiles; left > 0; --left, ++tile) {
        outputs(acc, tile);
        if (left > 1) barrier_arrive(used(tile % 2));
      }
      if (p.splits > 1) {
        sync_threads(2, kOutputThreads);
        // Partial outputs take the place of the ring, which everybody has left.
        float* const partial = floats(L::kRing);  // [heads][512]
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
#pragma unroll
          for (int j = 0; j < kN / 2; ++j)
            partial[wgmma::partial_at(j / 4 * 8 + t * 2 + j % 2, dim_of(m, j / 2 % 2, g))] = acc[m][j];
        return;
      }
      // With the last weights came the factors.
      const int last = (tile + 1) % 2;
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        const float2 factor = reinterpret_cast<const float2*>(floats(L::kFactor) + last * kN)[n * 4 + t];
        const int head = head0(i) + n * 8 + g;
        __nv_bfloat16* const to = out_of(item.token, min(head, p.heads - 1));
        // Of four blocks of 8 dimensions, the four lanes of a head have two of each, and then eight of one each.
#pragma unroll
        for (int m = 0; m < kBlocks; m += 2) {
          uint32_t packed[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float* const x = acc[m + k / 2] + n * 4 + k % 2 * 2;
            packed[k] = transposed8(pack_bf16(x[0] * factor.x, x[1] * factor.y));
          }
          wgmma::transpose4(packed, t);
          if (head < p.heads)
            *reinterpret_cast<uint4*>(to + dim_of(m + t / 2, t % 2, 0)) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
      }
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
  if (warp >= 8) {
    give_registers<L::kFetchRegisters>();
    Fetch<FORMAT>{block()}.template fetch<FIRST>();
    while_merging();
  } else if (warp >= 4) {
    give_registers<L::kScoreRegisters>();
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
