// Sparse MLA for Hopper, few heads: docs/sm90-sparse-mla.md.
//
// An item is one token, 16 of its heads and a share of its keys. A group of consumer warps works on it: all eight, or
// four, in which case a block has two groups. Four producer warps copy rows into a ring of stages. For each stage the
// warps of a group first divide the keys among them: they compute scores (Q K^T, mma.sync) and weigh them against a
// maximum that is seldom raised. Then they divide the dimensions, and add the weighted rows (P V). q and weights are A
// fragments; q stays in registers, but for what these do not hold.
//
// Narrow dimensions, E4M3, are widened to fp16 in registers, on the way from shared memory into either product. The
// transposition that P V needs is done there too, by byte permutation of two rows. Scales never touch a row: a scale
// multiplies the score over its dimensions, in float32, and the weights that meet these dimensions, in fp16. Wide
// dimensions are BF16 throughout.
//
// Split-KV: blocks that share a token's keys form a cluster, push their partial outputs to each other, and add them in
// a fixed order.

#include "mma_outputs.cuh"

namespace mla {
namespace mma {

// ---------------------------------------------------------------- producers

// What one of a group's producer warps does. A lane looks up a row, a stage ahead. Eight lanes copy 128 bytes of a row,
// so that an instruction copies from four rows. EVICT_FIRST: rows leave the L2 cache first.
template <typename S, bool EVICT_FIRST, typename Order>
__device__ __forceinline__ void produce(const RowParams& p, SharedStorage<S>& shared, int warp, int lane,
                                        const Order& turns) {
  constexpr int kWarpRows = S::kKeys / S::kProducerWarps;  // of a stage
  const int my_key = warp * kWarpRows + lane, lane_row = lane / 8, chunk = lane % 8;
  // Where this lane's chunks of its first row come from and go to, kept in registers. These are few here, and what they
  // do not hold is loaded between copies; such a load waits until the copies before it have left.
  uint32_t lane_from = chunk * 16;
  uint32_t lane_to = smem_address(shared.rows) + S::chunk_at(warp * kWarpRows, lane_row, 0, chunk);
  asm volatile("" : "+r"(lane_from), "+r"(lane_to));
  int turn = 0, item = turns[0];
  if (item >= p.items) return;
  // What can be known of the first keys is found before the kernel before has ended: all, if a call has no lengths.
  Keys<S::kKeys> keys(p, item, KeyLengths(INT_MAX, INT_MAX));
  asm volatile("" : "+r"(keys.first), "+r"(keys.keys), "+r"(keys.tiles), "+l"(keys.token));
  wait_for_previous();
  if (p.sources[0].lengths || p.sources[1].lengths) keys = Keys<S::kKeys>(p, item, KeyLengths(p, item));
  const auto look_up = [&](const Keys<S::kKeys>& keys, int tile) {
    return lane < kWarpRows ? keys.index(p, tile * S::kKeys + my_key) : -1;
  };
  int next_index = look_up(keys, 0), stage = 0, parity = 1;
  KeyLengths next_lengths(p, turns[1]);
  while (item < p.items) {
    for (int tile = 0, tiles = keys.tiles; tile < tiles; ++tile) {
      const int index = next_index;
      const Pool& pool = keys.source(p, tile * S::kKeys + my_key).pool;
      if (tile + 1 < tiles) {
        next_index = look_up(keys, tile + 1);
      } else if ((item = turns[++turn]) < p.items) {
        keys = Keys<S::kKeys>(p, item, next_lengths);
        next_lengths = KeyLengths(p, turns[turn + 1]);
        next_index = look_up(keys, 0);
      }
      const Row row(pool, index);
      const unsigned exist = __ballot_sync(~0u, row.exists) >> lane_row;
      // All rows are passed on before the first copy: a shuffle between copies waits until the ones before have left.
      int64_t rows[kWarpRows / 4];
#pragma unroll
      for (int i = 0; i < kWarpRows / 4; ++i)
        rows[i] = __shfl_sync(~0u, reinterpret_cast<int64_t>(row.at), i * 4 + lane_row);
      barrier_wait(smem_address(&shared.empty[stage][S::kStageParts > 1 ? warp : 0]), parity);
      if (lane < kWarpRows) {
        shared.bias[stage][my_key] = row.exists ? 0.f : -INFINITY;
        const uint32_t to = smem_address(&shared.scales[stage][my_key * S::kScaleBytes]);
        if constexpr (S::kScales == Scales::kUe8m0)
          copy8(to, row.page + pool.page.value * (S::kNarrow + 2 * S::kWide) + row.in_page * 8, row.exists ? 8 : 0);
        else if constexpr (S::kScales == Scales::kFloat)
          copy16<EVICT_FIRST, S::kPrefetch>(to, row.at + S::kNarrow, row.exists ? 16 : 0);
      }
      const uint32_t to = smem_address(shared.rows[stage]);
#pragma unroll
      for (int i = 0; i < kWarpRows / 4; ++i) {
        const uint8_t* const from = reinterpret_cast<const uint8_t*>(rows[i]);
        const int bytes = exist >> i * 4 & 1 ? 16 : 0, row8 = warp * kWarpRows + i / 2 * 8;
#pragma unroll
        for (int line = 0; line < S::kLines; ++line) {
          if constexpr (S::kHalf == 0) {
            static_assert(S::kPitch % 128 == 0, "four rows on, chunks lie in the other half of a line");
            copy16<EVICT_FIRST, S::kPrefetch>((lane_to ^ (i % 2 * 64)) + i * 4 * S::kPitch + line * 128,
                                              from + lane_from + S::chunk(line, 0).from, bytes);
          } else {
            const typename S::Chunk c = S::chunk(line, chunk);
            if (c.exists)
              copy16<EVICT_FIRST, S::kPrefetch>(to + S::chunk_at(row8, i % 2 * 4 + lane_row, c.line, c.at),
                                                from + c.from, bytes);
          }
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
  using Base::write_weights, Base::raise_maximum, Base::read_ahead, Base::add_values;
  using Base::write_outputs, Base::merge_halves, Base::push_and_merge;
  using S = typename Base::S;
  static constexpr int kWarpKeys = Base::kWarpKeys, kKeyBlocks = Base::kKeyBlocks, kDimBlocks = Base::kDimBlocks;

  // Finds outputs of an item, which are not yet divided by the sum of weights. For each tile the warps divide the keys
  // among them up to the barrier in weigh(), and then the dimensions.
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
      typename Base::RunFragments ahead;
      read_ahead(ahead, stage);
      float2 inverse[kKeyBlocks];
      finish_scores(s, inverse, stage, weights);
      weigh(s, inverse, weights, tile == 0);
      add_values(stage, weights, ahead);
      if (++stage == S::stages(p)) stage = 0, parity ^= 1;
      buffer ^= 1;
    }
    merge_statistics();
  }

  // Turns products into scores, as exponents of 2; those of missing rows are -inf. Weights over packed rows are times
  // the rows' powers, so their scores include the logarithms of these, and `inverse` gets the inverse powers. The
  // largest scores, if the call asks for them, are without powers.
  __device__ __forceinline__ void finish_scores(float (&s)[kKeyBlocks][4], float2 (&inverse)[kKeyBlocks], int stage,
                                                const Weights<S>& weights) {
    float2 bias[kKeyBlocks];
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const int key = warp * kWarpKeys + n * 8 + 2 * t;
      if constexpr (S::kIsScaled) {
        const float4 two = *reinterpret_cast<const float4*>(&weights.power[key]);
        bias[n] = make_float2(two.x, two.z), inverse[n] = make_float2(two.y, two.w);
      } else {
        bias[n] = *reinterpret_cast<const float2*>(shared.bias[stage] + key);
      }
    }
    if (p.max_logits) {
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if ((i % 2 ? bias[n].y : bias[n].x) != -INFINITY)
            largest[i / 2] = fmaxf(largest[i / 2], s[n][i] * scale[i / 2]);
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = fmaf(s[n][i], scale[i / 2], i % 2 ? bias[n].y : bias[n].x);
  }

  // Writes the weights of this warp's keys, and waits for those of the others. The barrier also carries the vote on
  // whether the maximum is to be raised, which is seldom, but for the first tile.
  __device__ __forceinline__ void weigh(const float (&s)[kKeyBlocks][4], const float2 (&inverse)[kKeyBlocks],
                                        Weights<S>& weights, bool is_first) {
    float tile_sum[2];
    // Groups of four write the first tile's weights in vain, so that the way to the barrier has no branches.
    bool raise = S::kGroupWarps == 8 && is_first;
    if (!raise) {
      bool above = false;
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) above |= s[n][i] > maximum[i / 2] + kSlack;
      write_weights(s, inverse, weights, tile_sum);
      raise = sync_any(1 + group, S::kGroupThreads, above);
    }
    if (raise) {
      raise_maximum(s);
      write_weights(s, inverse, weights, tile_sum);
      sync();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += tile_sum[h];
  }

  // Sums and largest scores: over the four threads of a row, then over the warps that divided the keys.
  __device__ __forceinline__ void merge_statistics() {
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
      for (int i = 0; i < S::kGroupWarps; ++i) sum[h] += shared.row_max[g + h * 8][i];
      if (p.max_logits) {
#pragma unroll
        for (int i = 0; i < S::kGroupWarps; ++i) largest[h] = fmaxf(largest[h], shared.row_largest[g + h * 8][i]);
      }
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
      if constexpr (S::kCanSplit) {
        if (p.splits > 1) {
          push_and_merge(item, token, head0);
          continue;
        }
      }
      if constexpr (BLOCK == MmaBlock::kShared) merge_halves();
      if (BLOCK != MmaBlock::kShared || group == 0) write_outputs(token, head0);
    }
  }
};

// The turns of a group where a block has one token, and each of its groups half of the keys.
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
  const bool is_split = S::kCanSplit && p.splits > 1;
  if (threadIdx.x < S::kConsumerGroups) {
    SharedStorage<S>& mine = groups[threadIdx.x];
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(smem_address(&mine.full[i]), 2 * 32 * S::kProducerWarps);  // each thread, and its copies
      for (int part = 0; part < S::kStageParts; ++part)
        barrier_init(smem_address(&mine.empty[i][part]), S::kGroupThreads);
    }
    if (is_split)
      told_of(groups).init(p, min(kHeads, p.heads - p.head_block_of(blockIdx.x) * kHeads), p.splits,
                           p.share_of(blockIdx.x));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  if (is_split) cluster_arrive();
  touch(p);
  // Only pairs of groups sort items by length. One group takes no more items than there are blocks, or items over BF16
  // rows. Of these V3.2 picks the same number for each token, but for a prompt's first ones; V4's prefills do not.
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
    if (is_split) cluster_wait();  // all threads of a cluster must
  } else {
    take_registers<S::kConsumerRegisters>();
    wait_for_previous();
    const int group = S::kConsumerGroups > 1 ? warp / S::kGroupWarps : 0;
    Consumer<FORMAT, BLOCK> consumer(p, groups[group], warp % S::kGroupWarps, lane, group);
    consumer.consume(order(group));
  }
#endif
}

template <RowFormat FORMAT, MmaBlock BLOCK>
struct Launch {
  static constexpr auto kKernel = sparse_mla_mma_kernel<FORMAT, BLOCK>;
  using S = Shape<FORMAT, BLOCK>;
  static constexpr int kSharedBytes = S::kConsumerGroups * sizeof(SharedStorage<S>) +
                                      (S::kCanSplit && !S::kTellsInRing ? sizeof(Told) : 0);
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

// Calls `with` with the Launch of the kernel for rows of this format.
template <typename With>
cudaError_t choose(RowFormat format, MmaBlock block, const With& with) {
  const auto of_format = [&](auto constant) {
    constexpr RowFormat kFormat = decltype(constant)::value;
    if constexpr (Rows<kFormat>::kNarrow > 0) {
      if (block == MmaBlock::kPaired) return with(Launch<kFormat, MmaBlock::kPaired>());
      if (block == MmaBlock::kShared) return with(Launch<kFormat, MmaBlock::kShared>());
    }
    return with(Launch<kFormat, RowLayout<kFormat>::kIsScaled ? MmaBlock::kHalf : MmaBlock::kWhole>());
  };
  switch (format) {
    case RowFormat::kE4M3: return of_format(std::integral_constant<RowFormat, RowFormat::kE4M3>());
    case RowFormat::kBf16: return of_format(std::integral_constant<RowFormat, RowFormat::kBf16>());
    case RowFormat::kV4: return of_format(std::integral_constant<RowFormat, RowFormat::kV4>());
    case RowFormat::kV32: return of_format(std::integral_constant<RowFormat, RowFormat::kV32>());
    case RowFormat::kBf576: return of_format(std::integral_constant<RowFormat, RowFormat::kBf576>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace mma

cudaError_t launch_sparse_mla_mma(const SparseMlaRows& call, MmaBlock block, int splits, int sms, cudaStream_t stream) {
  return mma::choose(call.format, block, [&](auto kernel) { return kernel.run(call, splits, sms, stream); });
}

int mma_clusters(RowFormat format, MmaBlock block, int size, int device) {
  int found = 0;
  mma::choose(format, block, [&](auto kernel) { return found = kernel.clusters(size, device), cudaSuccess; });
  return found;
}

}  // namespace mla
