// Sparse MLA for Hopper, few heads: docs/sm90-sparse-mla.md.
//
// An item is one token, 16 of its heads and a share of its keys, on which a group of eight consumer warps works, or of
// four, in which case a block has two groups; q is in registers, as A fragments. Four producer warps copy rows into a
// ring of stages. For each stage the warps of a group divide the keys among them and compute scores (Q K^T, mma.sync),
// weigh them against a maximum that is seldom raised, then divide the dimensions and add the weighted rows (P V).
//
// Narrow dimensions, E4M3, are widened to fp16 in registers, on the way from shared memory into either product; the
// transposition that P V needs is done there too, by byte permutation of two rows. Scales never touch a row: a scale
// multiplies the score over its dimensions, in float32, and the weights that meet these dimensions, in fp16. Wide
// dimensions are BF16 throughout.
//
// The blocks of a token that share its keys form a cluster, tell each other their outputs, and add in a fixed order.

#include "mma_outputs.cuh"

namespace mla {
namespace mma {

// ---------------------------------------------------------------- producer
// A lane looks up a row, a stage ahead; eight lanes copy 128 bytes at a time. What can be known of the first keys before
// the kernel before has ended is found out before: all, if a call has no lengths.

template <typename S, bool FIRST, typename Order>
__device__ __forceinline__ void produce(const RowParams& p, SharedStorage<S>& shared, int warp, int lane,
                                        const Order& turns) {
  constexpr int kRows = S::kKeys / S::kProducerWarps;  // of a stage, by this warp
  const int my_key = warp * kRows + lane, eighth = lane / 8, chunk = lane % 8;
  // Where this lane's chunks of its first row come from and go to, kept: what the few registers here do not hold is
  // loaded between copies, and waits until the copies before it have left.
  uint32_t lane_from = chunk * 16, lane_to = smem_address(shared.rows) + S::chunk_at(warp * kRows, eighth, 0, chunk);
  asm volatile("" : "+r"(lane_from), "+r"(lane_to));
  int turn = 0, item = turns[0];
  if (item >= p.items) return;
  Keys<S::kKeys> k(p, item, KeyLengths(INT_MAX, INT_MAX));
  asm volatile("" : "+r"(k.first), "+r"(k.keys), "+r"(k.tiles), "+l"(k.token));
  wait_for_previous();
  if (p.sources[0].lengths || p.sources[1].lengths) k = Keys<S::kKeys>(p, item, KeyLengths(p, item));
  const auto look_up = [&](const Keys<S::kKeys>& k, int tile) {
    return lane < kRows ? k.index(p, tile * S::kKeys + my_key) : -1;
  };
  int next_index = look_up(k, 0), stage = 0, parity = 1;
  KeyLengths next_lengths(p, turns[1]);
  while (item < p.items) {
    for (int tile = 0, tiles = k.tiles; tile < tiles; ++tile) {
      const int index = next_index;
      const Pool& pool = k.source(p, tile * S::kKeys + my_key).pool;
      if (tile + 1 < tiles) {
        next_index = look_up(k, tile + 1);
      } else if ((item = turns[++turn]) < p.items) {
        k = Keys<S::kKeys>(p, item, next_lengths);
        next_lengths = KeyLengths(p, turns[turn + 1]);
        next_index = look_up(k, 0);
      }
      const Row row(pool, index);
      const unsigned exist = __ballot_sync(~0u, row.exists) >> eighth;
      // All rows are passed on before the first copy: a shuffle between copies waits until the ones before have left.
      int64_t rows[kRows / 4];
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i)
        rows[i] = __shfl_sync(~0u, reinterpret_cast<int64_t>(row.at), i * 4 + eighth);
      barrier_wait(smem_address(&shared.empty[stage][S::kParts > 1 ? warp : 0]), parity);
      if (lane < kRows) {
        shared.bias[stage][my_key] = row.exists ? 0.f : -INFINITY;
        const uint32_t to = smem_address(&shared.scales[stage][my_key * S::kScaleBytes]);
        if constexpr (S::kScales == Scales::kUe8m0)
          copy8(to, row.page + pool.page.value * (S::kNarrow + 2 * S::kWide) + row.in_page * 8, row.exists ? 8 : 0);
        else if constexpr (S::kScales == Scales::kFloat)
          copy16<FIRST, S::kPrefetch>(to, row.at + S::kNarrow, row.exists ? 16 : 0);
      }
      const uint32_t to = smem_address(shared.rows[stage]);
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int bytes = exist >> i * 4 & 1 ? 16 : 0, row8 = warp * kRows + i / 2 * 8, to_row = i % 2 * 4 + eighth;
#pragma unroll
        for (int line = 0; line < S::kLines; ++line) {
          if constexpr (S::kHalf == 0) {
            static_assert(S::kPitch % 128 == 0, "four rows on, chunks lie in the other half of a line");
            copy16<FIRST, S::kPrefetch>((lane_to ^ (i % 2 * 64)) + i * 4 * S::kPitch + line * 128,
                                        reinterpret_cast<const uint8_t*>(rows[i]) + lane_from + S::chunk(line, 0).from,
                                        bytes);
            continue;
          }
          const typename S::Chunk c = S::chunk(line, chunk);
          if (c.exists)
            copy16<FIRST, S::kPrefetch>(to + S::chunk_at(row8, to_row, c.line, c.at),
                                        reinterpret_cast<const uint8_t*>(rows[i]) + c.from, bytes);
        }
      }
      barrier_arrive(smem_address(&shared.full[stage]));  // the bias is there
      copies_arrive(smem_address(&shared.full[stage]));
      lane_to += sizeof(shared.rows[0]);
      if (++stage == S::stages(p)) lane_to -= stage * sizeof(shared.rows[0]), stage = 0, parity ^= 1;
    }
  }
}

// ---------------------------------------------------------------- consumers

template <RowFormat FORMAT, MmaBlock BLOCK>
struct Consumer : Outputs<FORMAT, BLOCK> {
  using Base = Outputs<FORMAT, BLOCK>;
  using Base::p, Base::shared, Base::warp, Base::group, Base::g, Base::t, Base::sync, Base::Base, Base::acc;
  using Base::maximum, Base::sum, Base::largest, Base::scale, Base::load_q, Base::prefetch_q, Base::scores;
  using Base::write_weights, Base::raise_maximum, Base::first_values, Base::add_values;
  using Base::write_outputs, Base::merge_halves, Base::push_and_merge;
  using S = typename Base::S;
  static constexpr int kKeysWarp = Base::kKeysWarp, kKeyBlocks = Base::kKeyBlocks, kDimBlocks = Base::kDimBlocks;

  __device__ __forceinline__ void attend(int tiles, int& stage, int& parity, int& buffer) {
#pragma unroll
    for (int j = 0; j < kDimBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = largest[h] = -INFINITY, sum[h] = 0.f;
    for (int tile = 0; tile < tiles; ++tile) {
      Weights<S>& weights = shared.weights[buffer];
      barrier_wait(smem_address(&shared.full[stage]), parity);
      float s[kKeyBlocks][4];
      scores(s, stage, weights);
      typename Base::Run first;
      first_values(first, stage);
      float2 bias[kKeyBlocks], inverse[kKeyBlocks];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        const int key = warp * kKeysWarp + n * 8 + 2 * t;
        // Weights are those of rows times their power, and so is their maximum.
        if constexpr (S::kIsScaled) {
          const float4 two = *reinterpret_cast<const float4*>(&weights.power[key]);
          bias[n] = make_float2(two.x, two.z), inverse[n] = make_float2(two.y, two.w);
        } else {
          bias[n] = *reinterpret_cast<const float2*>(shared.bias[stage] + key);
        }
      }
      if (p.max_logits)
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if ((i % 2 ? bias[n].y : bias[n].x) != -INFINITY)
              largest[i / 2] = fmaxf(largest[i / 2], s[n][i] * scale[i / 2]);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = fmaf(s[n][i], scale[i / 2], i % 2 ? bias[n].y : bias[n].x);
      float sum_tile[2];
      // In groups of four the first tile's weights are written too, so that the way to the barrier has no branches.
      bool raise = S::kWarps == 8 && tile == 0;
      if (!raise) {
        bool above = false;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) above |= s[n][i] > maximum[i / 2] + kSlack;
        write_weights(s, inverse, weights, sum_tile);
        raise = sync_any(1 + group, S::kGroupThreads, above);
      }
      if (raise) {
        raise_maximum(s);
        write_weights(s, inverse, weights, sum_tile);
        sync();
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] += sum_tile[h];
      add_values(stage, weights, first);
      if (++stage == S::stages(p)) stage = 0, parity ^= 1;
      buffer ^= 1;
    }
    // Over the four threads of a row, then over the warps that shared the keys.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], mask);
        if (p.max_logits) largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], mask));
      }
      if (t == 0) shared.row_max[g + h * 8][warp] = sum[h];
      if (t == 0 && p.max_logits) shared.row_largest[g + h * 8][warp] = largest[h];
    }
    sync();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = 0.f;
#pragma unroll
      for (int i = 0; i < S::kWarps; ++i) sum[h] += shared.row_max[g + h * 8][i];
      if (p.max_logits)
#pragma unroll
        for (int i = 0; i < S::kWarps; ++i) largest[h] = fmaxf(largest[h], shared.row_largest[g + h * 8][i]);
    }
  }

  template <typename Order>
  __device__ __forceinline__ void consume(const Order& turns) {
    int stage = 0, parity = 0, buffer = 0;
    for (int turn = 0, item = turns[0]; item < p.items; item = turns[++turn]) {
      const KeyLengths lengths(p, item);
      const int64_t token = p.token_of(item);
      const int head0 = p.head_block_of(item) * kHeads;
      load_q(token, head0);
      prefetch_q(turns[turn + 1]);
      attend(Keys<S::kKeys>(p, item, lengths).tiles, stage, parity, buffer);
      if constexpr (S::kMerges)
        if (p.splits > 1) {
          push_and_merge(item, token, head0);
          continue;
        }
      if constexpr (BLOCK == MmaBlock::kShared) merge_halves();
      if (BLOCK != MmaBlock::kShared || group == 0) write_outputs(token, head0);
    }
  }
};

// Of the one item of a block, each group has half of the keys.
struct Halves {
  int items, group;

  __device__ __forceinline__ int operator[](int turn) const { return turn == 0 ? 2 * blockIdx.x + group : items; }
};

template <RowFormat FORMAT, MmaBlock BLOCK>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_mma_kernel(const __grid_constant__ RowParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  using S = Shape<FORMAT, BLOCK>;
  extern __shared__ __align__(128) uint8_t smem[];
  SharedStorage<S>* const groups = reinterpret_cast<SharedStorage<S>*>(smem);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  const int lane = threadIdx.x % 32;
  const bool merges = S::kMerges && p.splits > 1;
  if (threadIdx.x < S::kConsumerGroups) {
    SharedStorage<S>& mine = groups[threadIdx.x];
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(smem_address(&mine.full[i]), 2 * 32 * S::kProducerWarps);
      for (int part = 0; part < S::kParts; ++part)
        barrier_init(smem_address(&mine.empty[i][part]), S::kGroupThreads);
    }
    if (merges)
      told_of(groups).init(p, min(kHeads, p.heads - p.head_block_of(blockIdx.x) * kHeads), p.splits,
                           p.share_of(blockIdx.x));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  if (merges) cluster_arrive();
  touch(p);
  // One group takes no more items than there are blocks, or items over BF16 rows, of which V3.2 picks as many each
  // time.
  const auto order = [&](int group) {
    if constexpr (BLOCK == MmaBlock::kShared)
      return Halves{p.items, group};
    else if constexpr (S::kConsumerGroups > 1)
      return Turns(groups[0].turns, p.items, group, S::kConsumerGroups);
    else
      return InOrder();
  };
  bool is_sorted = false;
  if constexpr (BLOCK == MmaBlock::kPaired) {
    const Turns turns = order(0);
    is_sorted = turns.is_sorted;
    if (is_sorted) {
      wait_for_previous();
      sort_items(turns, groups[0].rows[0], groups[0].turns,
                 [&](int i) { return Keys<S::kKeys>(p, i, KeyLengths(p, i)).tiles; });
    }
  }
  if (!is_sorted) __syncthreads();
  if (warp >= kConsumerThreads / 32) {
    give_registers<S::kProducerRegisters>();
    const int group = S::kConsumerGroups > 1 ? (warp - kConsumerThreads / 32) / S::kProducerWarps : 0;
    if (p.keep_outputs)
      produce<S, true>(p, groups[group], warp % S::kProducerWarps, lane, order(group));
    else
      produce<S, false>(p, groups[group], warp % S::kProducerWarps, lane, order(group));
    if (merges) cluster_wait();  // as those who merge do
  } else {
    take_registers<S::kConsumerRegisters>();
    wait_for_previous();
    const int group = S::kConsumerGroups > 1 ? warp / S::kWarps : 0;
    Consumer<FORMAT, BLOCK> consumer(p, groups[group], warp % S::kWarps, lane, group);
    consumer.consume(order(group));
  }
#endif
}

template <RowFormat FORMAT, MmaBlock BLOCK>
struct Launch {
  static constexpr auto kKernel = sparse_mla_mma_kernel<FORMAT, BLOCK>;
  using S = Shape<FORMAT, BLOCK>;
  static constexpr int kSharedBytes = S::kConsumerGroups * sizeof(SharedStorage<S>) +
                                      (S::kMerges && !S::kTellsInRing ? sizeof(Told) : 0);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block may have");

  static cudaError_t run(const SparseMlaRows& call, int splits, int sms, cudaStream_t stream) {
    const RowParams p(call, kHeads, splits);
    if (BLOCK == MmaBlock::kShared)
      return launch_kernel<kKernel>(p, p.items / 2, kThreads, kSharedBytes, 1, stream);
    const int blocks = splits > 1 ? p.items : min(p.items, sms);
    return launch_kernel<kKernel>(p, blocks, kThreads, kSharedBytes, splits, stream);
  }
  static int clusters(int size, int device) {
    return clusters_at_once<kKernel>(kThreads, kSharedBytes, size, device);
  }
};

// Calls `with` with the Launch of a kernel.
template <typename With>
cudaError_t choose(RowFormat format, MmaBlock block, const With& with) {
  const auto of = [&](auto constant) {
    constexpr RowFormat kFormat = decltype(constant)::value;
    if constexpr (Rows<kFormat>::kNarrow > 0) {
      if (block == MmaBlock::kPaired) return with(Launch<kFormat, MmaBlock::kPaired>());
      if (block == MmaBlock::kShared) return with(Launch<kFormat, MmaBlock::kShared>());
    }
    return with(Launch<kFormat, RowLayout<kFormat>::kIsScaled ? MmaBlock::kHalf : MmaBlock::kWhole>());
  };
  switch (format) {
    case RowFormat::kE4M3: return of(std::integral_constant<RowFormat, RowFormat::kE4M3>());
    case RowFormat::kBf16: return of(std::integral_constant<RowFormat, RowFormat::kBf16>());
    case RowFormat::kV4: return of(std::integral_constant<RowFormat, RowFormat::kV4>());
    case RowFormat::kV32: return of(std::integral_constant<RowFormat, RowFormat::kV32>());
    case RowFormat::kBf576: return of(std::integral_constant<RowFormat, RowFormat::kBf576>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace mma

cudaError_t launch_sparse_mla_mma(const SparseMlaRows& call, MmaBlock block, int splits, int sms, cudaStream_t stream) {
  return mma::choose(call.format, block, [&](auto of) { return of.run(call, splits, sms, stream); });
}

int mma_clusters(RowFormat format, MmaBlock block, int size, int device) {
  int found = 0;
  mma::choose(format, block, [&](auto of) { return found = of.clusters(size, device), cudaSuccess; });
  return found;
}

}  // namespace mla
