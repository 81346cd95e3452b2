// Sparse MLA over full-width rows for Hopper: docs/sm90-sparse-mla.md.
//
// A block takes 16 or 32 heads of one token after another, with rows on M and heads on N of wgmma, so that few heads
// do not pay for 64: scores are S^T = K Q^T, outputs O^T = V^T P^T. Each warpgroup has one role: one fetches rows into
// a ring, by tiles of 64 keys; one computes scores and weights of a tile; two add it to the outputs, each for half of
// the dimensions. E4M3 rows are widened to fp16 in registers on their way into either product, and V^T is made there by
// byte permutation of two rows: neither a widened nor a transposed row is ever stored.
// Few tokens: two blocks that share a token's keys form a cluster and merge through each other's shared memory.

#include <cooperative_groups.h>

#include "wgmma_scores.cuh"

namespace cg = cooperative_groups;

namespace mla {
namespace wgmma {

template <bool FP8, int N>
struct Block : Scores<FP8, N> {
  using Base = Scores<FP8, N>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::states, Base::full;
  using Base::empty, Base::ready, Base::used, Base::q_full, Base::q_empty, Base::turns, Base::write_outputs;
  using L = Layout<FP8, N>;

  // ---------------------------------------------------------------- four warps: rows, and fp16 q, on their way
  // A warp copies 8 rows of every half of a tile, or 16 rows of every quarter; its lanes look up those of two tiles,
  // ahead of time.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void produce() const {
    constexpr int kRows = FP8 ? 8 : 16, kQParts = 4;  // that fp16 q is loaded in
    const int my_key = (lane / kRows * 4 + warp % 4) * kRows + lane % kRows;
    uint32_t count = 0, served = 0;
    int turn = 0, i = turns[0];
    Item item(p, i, N, Lengths(p, i));
    // Where slot `count` of all is, once it is free.
    const auto slot_of = [&](uint32_t count) {
      barrier_wait(empty(count % L::kSlots), count / L::kSlots & 1 ^ 1);
      return base + L::kRing + count % L::kSlots * L::kSlotBytes;
    };
    const auto on_their_way = [&](uint32_t count) {
      copies_arrive(full(count % L::kSlots));
      if (lane == 0) barrier_arrive(full(count % L::kSlots));  // for what it stored itself
    };
    const auto look_up = [&](const Item& item, int key0) {
      const int key = key0 + my_key, column = item.first + key;
      const int at = column < item.window ? column : kWindow + column - item.window;
      return key < item.keys ? p.indices[item.token * p.indices_stride + at] : -1;
    };
    // A part of an item's q; `meanwhile` is done while it is on its way. That of the first item is loaded by those who
    // have nothing else to do yet.
    const auto fetch_q = [&](const Item& of, int part, const auto& meanwhile) {
      const int buffer = served % L::kQBuffers;
      load_q<N, 4 * kQParts>(p, of, warp % 4 + part * 4, lane, smem + L::kQ + buffer * L::kQBytes,
                             floats(L::kScale) + served % 2 * N, floats(L::kSink) + served % 2 * N, [&] {
                               meanwhile();
                               if (part == 0) barrier_wait(q_empty(buffer), served / L::kQBuffers & 1 ^ 1);
                             });
      // Twice: those who load the first q are twice as many. All who wrote arrive, since racecheck does not follow an
      // order that goes through a named barrier first.
      if (part == kQParts - 1) barrier_arrive(q_full(buffer)), barrier_arrive(q_full(buffer));
    };
    Lengths lengths(p, turns[1]);
    int next = look_up(item, 0), parts = item.tiles > 0 ? kQParts : 0;  // of q that are there
    while (i < p.items) {
      i = turns[++turn];
      const Item now = item;
      item = Item(p, i, N, lengths);
      if (i >= p.items) item.keys = item.tiles = 0;
      lengths = Lengths(p, turns[turn + 1]);
      if (FP8 && item.tiles > 0) prefetch_q(p, item, N);
      const auto rest_of_q = [&] {
#pragma unroll 1
        for (; parts < kQParts; ++parts) fetch_q(now, parts, [] {});
        ++served, parts = 0;
      };
      if (FP8 && now.tiles > 0) rest_of_q();
      for (int key0 = 0; key0 < now.tiles * kTile; key0 += 128) {
        const int index = next;
        const Row mine(now.first + key0 + my_key < now.window ? p.swa : p.compressed, index);
        const unsigned row_mask = __ballot_sync(~0u, mine.exists);
        next = key0 + 128 < now.tiles * kTile ? look_up(now, key0 + 128) : look_up(item, 0);
#pragma unroll 1
        for (int h = 0; h < 32 / kRows; ++h) {
          if (key0 + h * 4 * kRows >= now.tiles * kTile) break;
          const unsigned bits = row_mask >> (h * kRows);
          // All rows are passed on before the first copy: a shuffle after it would wait until the copy has left. Two
          // rows' parts of a quarter are copied at once.
          const int second = FP8 ? 0 : lane / 16;
          const uint8_t* rows[8];
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            const int64_t row =
                __shfl_sync(~0u, reinterpret_cast<int64_t>(mine.at), h * kRows + r * (kRows / 8) + second);
            rows[r] = reinterpret_cast<const uint8_t*>(row) + lane % (FP8 ? 32 : 16) * 16;
            make_opaque(rows[r]);
          }
          if constexpr (FP8) {
            const auto copy = [&] {
              const uint32_t to = slot_of(count) + warp % 4 * L::kGroupBytes + lane / 8 * 1024;
#pragma unroll
              for (int r = 0; r < 8; ++r)
                copy16<EVICT_FIRST>(to + swizzled(r, lane % 8), rows[r], bits >> r & 1 ? 16 : 0);
              if (lane == 0) smem[L::kRowMasks + count % L::kSlots * 4 + warp % 4] = bits;
              on_their_way(count++);
            };
            // The next item's q, around rows: now that the item before this one has been scored, its q is free.
            if (key0 == 128 && item.tiles > 0)
              fetch_q(item, parts++, copy);
            else
              copy();
          } else {
#pragma unroll 1
            for (int quarter = 0; quarter < 4; ++quarter) {
              const uint32_t to = slot_of(count) + warp % 4 * 2 * L::kGroupBytes + lane / 8 % 2 * 1024;
#pragma unroll
              for (int r = 0; r < 8; ++r)
                copy16<EVICT_FIRST>(to + r / 4 * L::kGroupBytes + swizzled(r % 4 * 2 + second, lane % 8),
                              rows[r] + quarter * 256, bits >> (r * 2 + second) & 1 ? 16 : 0);
              if (quarter == 0 && lane == 0)
                *reinterpret_cast<uint16_t*>(smem + L::kRowMasks + count / 4 % 4 * 8 + warp % 4 * 2) = bits;
              on_their_way(count++);
            }
          }
        }
      }
      if (now.tiles == 0) next = look_up(item, 0);
    }
  }

  // E4M3: the first of the 8 dimensions of this thread: rows g and g + 8 of its warp's part of four M = 64 blocks.
  __device__ __forceinline__ int dim0() const { return warp * 64 + lane / 4 * 8; }
  // BF16: dimension of row 8 * half + g of this warp's part of block m.
  __device__ __forceinline__ int dim_of(int m, int half, int g) const {
    return (warp / 4 * 4 + m) * 64 + warp % 4 * 16 + half * 8 + g;
  }

  // ---------------------------------------------------------------- outputs, O^T += V^T P^T
  __device__ __forceinline__ void wait_weights(float (&acc)[4][L::kAcc], uint32_t tile) const {
    const int t = lane % 4, buffer = tile % 2;
    barrier_wait(ready(buffer), tile / 2 & 1);
    if (states()[buffer]) correct<L::kTerms>(acc, floats(L::kCorrection) + buffer * N, t);  // the maximum was raised
  }

  __device__ __forceinline__ void outputs(float (&acc)[4][L::kAcc], uint32_t tile) const {
    const int t = lane % 4, buffer = tile % 2;
    const uint64_t b = descriptor(base + L::kWeights + buffer * L::kTerms * L::kTermBytes);
    if constexpr (!FP8) {
      // V^T is read from the ring, across its rows: of two quarters. Both terms of the weights are columns of one
      // product.
      wait_weights(acc, tile);
      uint32_t slot[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t count = 4 * tile + warp / 4 * 2 + h;
        slot[h] = count % L::kSlots;
        barrier_wait(full(slot[h]), count / L::kSlots & 1);
      }
      fence_async();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint64_t rows = descriptor(base + L::kRing + slot[h] * L::kSlotBytes, L::kGroupBytes);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int m = 0; m < 2; ++m)
            product<true, true>(acc[h * 2 + m], rows + ((step * 2 * L::kGroupBytes + m * 1024) >> 4), b + step * 2);
        products_commit();
      }
      products_wait<1>();
      barrier_arrive(empty(slot[0]));
      products_wait<0>();
      barrier_arrive(empty(slot[1]));
    } else {
      // A step is 16 keys, of which a thread has 2t, 2t + 1, 2t + 8 and 2t + 9, and of each 8 dimensions.
      const int block = warp / 2, chunk = warp % 2 * 4 + lane / 8;
      const int even_row = block * 1024 + swizzled(2 * t, chunk) + lane / 4 % 2 * 8;
      const int odd_row = block * 1024 + swizzled(2 * t + 1, chunk) + lane / 4 % 2 * 8;
      uint32_t a[2][4][4], raw[4][2];
      const auto read = [&](int step) {
        const uint32_t count = 2 * tile + step / 2, slot = count % L::kSlots;
        if (step % 2 == 0) barrier_wait(full(slot), count / L::kSlots & 1);
        const uint8_t* const rows = smem + L::kRing + slot * L::kSlotBytes + step % 2 * 2 * L::kGroupBytes;
#pragma unroll
        for (int k = 0; k < 4; ++k) read_words(raw[k], rows + k / 2 * L::kGroupBytes + (k % 2 ? odd_row : even_row));
      };
      const auto widen = [&](uint32_t (&to)[4][4]) {  // two keys of one dimension to a register
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const uint32_t pairs = __byte_perm(raw[2 * k][m / 2], raw[2 * k + 1][m / 2], m % 2 ? 0x7362 : 0x5140);
            to[m][2 * k] = e4m3_low(pairs), to[m][2 * k + 1] = e4m3_high(pairs);
          }
      };
      read(0);
      widen(a[0]);
      wait_weights(acc, tile);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step % 2 == 1) barrier_arrive(empty((2 * tile + step / 2) % L::kSlots));
        products_begin();
#pragma unroll
        for (int m = 0; m < 4; ++m) product<true>(acc[m], a[step & 1][m], b + step * 2);
        products_commit();
        if (step < 3) {
          read(step + 1);
          products_wait<1>();
          widen(a[step & 1 ^ 1]);
        }
      }
      products_wait<0>();
    }
  }

  __device__ __forceinline__ void multiply() const {
    const int g = lane / 4, t = lane % 4;
    uint32_t tile = 0;
    Lengths lengths(p, turns[0]);
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const Item item(p, i, N, lengths);
      lengths = Lengths(p, turns[turn + 1]);
      if (FP8 && turn == 0 && item.tiles > 0) {
        load_q<N, 8>(p, item, warp, lane, smem + L::kQ, floats(L::kScale), floats(L::kSink), [] {});
        barrier_arrive(q_full(0));
      }
      float acc[4][L::kAcc] = {};
      for (int left = item.tiles; left > 0; --left, ++tile) {
        outputs(acc, tile);
        if (left > 1) barrier_arrive(used(tile % 2));
      }
      if constexpr (L::kTerms == 2)
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int j = 0; j < N / 2; ++j) acc[m][j] += acc[m][N / 2 + j];
      if (p.splits > 1) {
        sync_threads(2, kOutputThreads);
        // Partial outputs take the place of the ring, which everybody has left.
        float* const partial = floats(L::kRing);  // [N][512]
        if constexpr (FP8) {
          store_partial(partial, acc, dim0(), t);
        } else {
#pragma unroll
          for (int n = 0; n < N / 4; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
              for (int h = 0; h < 2; ++h)
                partial[partial_at(n / 2 * 8 + t * 2 + n % 2, dim_of(m, h, g))] = acc[m][n / 2 * 4 + n % 2 + 2 * h];
        }
        return;
      }
      // With the last weights came the factors; without a key all is 0.
      const int last = (tile + 1) % 2;
      const float* const factors = floats(L::kFactor) + last * N;
      if constexpr (!FP8) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          float2 factor = make_float2(0.f, 0.f);
          if (item.tiles > 0) factor = reinterpret_cast<const float2*>(factors)[n * 4 + t];
          const int head = item.head0 + n * 8 + g;
          const bool is = head < p.heads;
          __nv_bfloat16* const to = output_at(p, item.token, is ? head : 0);
          // Of four blocks of 8 dimensions, the four lanes of a head have two of each, and then eight of one each.
#pragma unroll
          for (int m = 0; m < 4; m += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float* const x = acc[m + k / 2] + n * 4 + k % 2 * 2;
              packed[k] = transposed8(pack_bf16(x[0] * factor.x, x[1] * factor.y));
            }
            transpose4(packed, t);
            if (is)
              *reinterpret_cast<uint4*>(to + dim_of(m + t / 2, t % 2, 0)) = as_uint4(packed);
          }
        }
      } else {
        write_outputs(acc, item.token, item.head0, dim0(),
                            [&](int head) { return item.tiles == 0 ? 0.f : factors[head]; });
      }
      if (item.tiles > 0) barrier_arrive(used(last));
    }
  }

  // ---------------------------------------------------------------- splits are the blocks of a cluster
  // Each adds up its share of the output from everybody's shared memory, in the order of the ranks.
  __device__ __forceinline__ void merge() const {
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    const int64_t token = blockIdx.x / (p.splits * p.head_blocks);
    const int head0 = blockIdx.x / p.splits % p.head_blocks * N;
    const float bmm2 = p.output_scale();
    const int rows = min(N, p.heads - head0);
    for (int i = blockIdx.x % p.splits * kOutputThreads + threadIdx.x; i < rows * (kDim / 4);
         i += p.splits * kOutputThreads) {
      const int row = i / (kDim / 4), head = head0 + row;
      const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
      float largest[kSplits], sum[kSplits], shift = fmaxf(sink, kNoMaximum);
      float4 value[kSplits];
#pragma unroll
      for (int r = 0; r < kSplits; ++r) {
        const float* const stat = cluster.map_shared_rank(floats(L::kFactor), r);
        largest[r] = stat[row], sum[r] = stat[N + row];
        value[r] = *reinterpret_cast<const float4*>(cluster.map_shared_rank(floats(L::kRing), r) +
                                                    partial_at(row, i % (kDim / 4) * 4));
        shift = fmaxf(shift, largest[r]);
      }
      float total = exp2_fast(sink - shift);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < kSplits; ++r) {
        const float weight = exp2_fast(largest[r] - shift);
        total += weight * sum[r];
        v.x += weight * value[r].x, v.y += weight * value[r].y, v.z += weight * value[r].z, v.w += weight * value[r].w;
      }
      const float factor = total > 0.f ? bmm2 / total : 0.f;
      *reinterpret_cast<uint2*>(output_at(p, token, head) + i % (kDim / 4) * 4) =
          make_uint2(pack_bf16(v.x * factor, v.y * factor), pack_bf16(v.z * factor, v.w * factor));
    }
    cluster.sync();  // nobody leaves while its shared memory is read
  }
};

template <bool FP8, int N>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_wgmma_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  int* const list = reinterpret_cast<int*>(smem + Layout<FP8, N>::kTurns);
  const Turns turns(list, p.items);
  const Block<FP8, N> block{{{{p, smem, smem_address(smem), warp, static_cast<int>(threadIdx.x % 32)}, turns}}};
  if (threadIdx.x == 0) block.init();
  wait_for_previous();
  if (turns.is_sorted)
    sort_items(turns, smem, list, [&](int i) { return Item(p, i, N, Lengths(p, i)).tiles; });
  else
    __syncthreads();
  if (warp >= 12) {
    give_registers<80>();
    p.keep_outputs ? block.template produce<true>() : block.template produce<false>();
    if (p.splits > 1) cg::this_cluster().sync(), cg::this_cluster().sync();  // as merge() does
  } else if (warp >= 8) {
    // Of the 128 registers that a thread begins with; outputs of two terms take more.
    if constexpr (FP8)
      take_registers<144>();
    else
      give_registers<112>();
    block.weigh();
    if (p.splits > 1) cg::this_cluster().sync(), cg::this_cluster().sync();
  } else {
    take_registers<FP8 ? 144 : 160>();
    block.multiply();
    if (p.splits > 1) block.merge();
  }
#endif
}

template <bool FP8, int N>
cudaError_t launch(const SparseMla& call, bool split, int sms, cudaStream_t stream) {
  const Params p(call, N, split ? kSplits : 1);
  const int blocks = split ? p.items : min(p.items, sms);
  return launch_kernel<sparse_mla_wgmma_kernel<FP8, N>>(p, blocks, kThreads, Layout<FP8, N>::kTotal, p.splits, stream);
}

}  // namespace wgmma

cudaError_t launch_sparse_mla_wgmma(const SparseMla& call, int heads, bool split, int sms, cudaStream_t stream) {
  using wgmma::launch;
  if (heads == 16)
    return call.rows_are_fp8 ? launch<true, 16>(call, split, sms, stream) : launch<false, 16>(call, split, sms, stream);
  return call.rows_are_fp8 ? launch<true, 32>(call, split, sms, stream) : launch<false, 32>(call, split, sms, stream);
}

}  // namespace mla
