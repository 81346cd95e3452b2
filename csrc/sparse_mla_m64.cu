// Sparse MLA over full-width rows for Hopper, 64 heads a block: docs/sm90-sparse-mla.md.
//
// Heads on M, S = Q K^T and O = P V. Each warpgroup has one role. One computes scores and weights of one tile of 64
// keys after another, with half of q in registers. Two add weights times rows to the outputs, 256 dimensions each, and
// widen E4M3 rows to fp16. The fourth, the producer, fetches rows and q into a ring of two slots, so that the next
// item's q comes like any tile.

#include "m64_scores.cuh"

namespace mla {
namespace m64 {

template <bool FP8>
struct Block : Scores<FP8> {
  using Base = Scores<FP8>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::empty, Base::raw_full;
  using Base::raw_empty, Base::q_full, Base::q_read, Base::ready, Base::used, Base::call, Base::turns;
  using L = Layout<FP8>;

  // ---------------------------------------------------------------- the producer
  // What this warpgroup does. A warp has 16 rows of every tile, a quarter, and 16 heads of q. BF16 rows go into the
  // ring as soon as a slot is free. E4M3 rows wait as raw rows, from where the output warpgroups widen them into a slot
  // when they are done with it.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void fetch_items() const {
    const int quarter = warp % 4, row0 = quarter * 16;
    uint32_t entry = 0;
    // One arrival of a warp for what its lane 0 has announced, besides those of all lanes for their copies.
    const auto arrive = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    const auto announce = [&](EntryKind kind, unsigned row_mask) {
      if (FP8) barrier_wait(raw_empty(quarter), entry & 1 ^ 1);
      if (lane == 0) {
        *reinterpret_cast<uint16_t*>(smem + L::kRowMasks + entry % 4 * 8 + warp % 4 * 2) =
            static_cast<uint16_t>(row_mask);
        if (warp % 4 == 0) reinterpret_cast<int*>(smem + L::kKinds)[entry % 4] = kind;
      }
    };
    // A lane looks up a row of two tiles, two tiles ahead: its index, -1 where there is none, -2 after the last item.
    const int my_key = lane / 16 * kTile + row0 + lane % 16;
    int turn = 0, i = turns[0], key0 = -2 * kTile;
    Item item(p, i, LaneLengths(p, i, lane));
    LaneLengths next_lengths(p, turns[1], lane);
    const auto look_up = [&] {
      key0 += 2 * kTile;
      while (key0 >= item.keys) {
        i = turns[++turn];
        if (i >= p.items) return -2;
        item = Item(p, i, next_lengths), key0 = 0;
        next_lengths = LaneLengths(p, turns[turn + 1], lane);
      }
      const int key = key0 + my_key, column = key < item.window ? key : kWindow + key - item.window;
      return key < item.keys ? max(p.indices[item.token * p.indices_stride + column], -1) : -1;
    };
    int index = look_up();
    while (index != -2) {
      const Row mine(key0 + my_key < item.window ? p.swa : p.compressed, index);
      const unsigned row_mask = __ballot_sync(~0u, mine.exists);
      const bool starts = key0 == 0, two = key0 + kTile < item.keys;
      if (starts) {
        announce(kQ, 0);
        if constexpr (FP8) {
          barrier_arrive(raw_full(quarter));
          barrier_wait(raw_empty(quarter), entry & 1);
        } else {
          barrier_wait(empty(entry & 1, quarter), entry / 2 & 1);
        }
        fetch_q<EVICT_FIRST>(item, entry & 1);
        arrive(q_full());
        ++entry;
      }
#pragma unroll
      for (int t = 0; t < 2; ++t, ++entry) {
        if (t == 1 && !two) break;
        announce(kKeys, row_mask >> t * 16);
        if (!FP8) barrier_wait(empty(entry & 1, quarter), entry / 2 & 1);
        if constexpr (FP8) {
          // A lane copies its row. Missing ones are zeros, so that nothing stale reaches a product.
          const unsigned bits = row_mask >> t * 16 & 0xFFFF;
          const uint32_t to = L::kRaw + row0 * kDim;
          fence_async();  // what was read there, and zeros written there, before the copies
          __syncwarp();
          if (lane == 0) barrier_expect(raw_full(quarter), __popc(bits) * kDim);
          if (lane / 16 == t && mine.exists)
            copy_row<kDim, EVICT_FIRST>(base + to + lane % 16 * kDim, mine.at, raw_full(quarter));
          for (unsigned missing = ~bits & 0xFFFF; missing; missing &= missing - 1)
            *reinterpret_cast<uint4*>(smem + to + (__ffs(missing) - 1) * kDim + lane * 16) = make_uint4(0, 0, 0, 0);
          __syncwarp();
          barrier_arrive(raw_full(quarter));
        } else {
          const uint32_t to = base + (entry & 1) * kTileBytes + lane / 8 * kBlockBytes + row0 * 128;
#pragma unroll
          for (int r = 0; r < 16; ++r) {
            const int64_t row = __shfl_sync(~0u, reinterpret_cast<int64_t>(mine.at), t * 16 + r) + lane * 16;
            const int bytes = row_mask >> (t * 16 + r) & 1 ? 16 : 0;
#pragma unroll
            for (int c = 0; c < 2; ++c)
              copy16<EVICT_FIRST>(to + swizzled(r, lane % 8) + c * 4 * kBlockBytes,
                            reinterpret_cast<const uint8_t*>(row) + c * 512, bytes);
          }
          copies_arrive(full(entry & 1));
          arrive(full(entry & 1));
        }
        if (t == two) index = look_up();
      }
    }
    if constexpr (FP8) announce(kEnd, 0), barrier_arrive(raw_full(quarter));
  }

  // 64 heads of q as they are, BF16; E4M3 is widened.
  template <bool EVICT_FIRST>
  __device__ __forceinline__ void fetch_q(const Item& item, int slot) const {
    const int row0 = warp % 4 * 16, to = slot * kTileBytes;
    const int64_t first = item.token * p.q_token_stride + item.head0 * p.q_head_stride;
    if (FP8 && call.is_mapped) {
      if (lane == 0) {
        fence_async();  // what was read there before, and how
        barrier_expect(q_full(), 16 * kDim * 2);
#pragma unroll
        for (int c = 0; c < kDim / 64; ++c)
          copy_q<EVICT_FIRST>(base + to + c * kBlockBytes + row0 * 128, call.q_map, c * 64, item.head0 + row0,
                        static_cast<int>(item.token), q_full());
      }
      __syncwarp();
      barrier_arrive(q_full());
    } else if (!p.q_is_fp8) {
#pragma unroll 4
      for (int r = row0; r < row0 + 16; ++r) {
        const bool is = item.head0 + r < p.heads;
        const __nv_bfloat16* const from =
            static_cast<const __nv_bfloat16*>(p.q) + first + (is ? r * p.q_head_stride : 0) + lane * 8;
#pragma unroll
        for (int c = 0; c < 2; ++c)
          copy16<EVICT_FIRST>(base + to + (c * 4 + lane / 8) * kBlockBytes + swizzled(r, lane % 8), from + c * 256,
                        is ? 16 : 0);
      }
      copies_arrive(q_full());
    } else {
      for (int r = row0; r < row0 + 16; ++r) {
        uint4 raw[2] = {};
        if (item.head0 + r < p.heads)
          raw[0] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) + first + r * p.q_head_stride +
                                                   lane * 16);
        to_bf16(raw);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<uint4*>(smem + to + lane / 4 * kBlockBytes + swizzled(r, lane % 4 * 2 + h)) = raw[h];
      }
      barrier_arrive(q_full());
    }
  }

  // ---------------------------------------------------------------- outputs, 256 dimensions
  // How a slot of the ring is refilled. Entry `entry` replaces the last entry but one, a quarter (16 keys) at a time.
  // load_quarter() loads the raw values of a quarter, of this warpgroup's dimensions. store_quarter() stores them,
  // widened, once that quarter of the slot is free. Values are loaded for any kind of entry, so that nothing waits for
  // loads in between. BF16 rows need no widening: for them store_quarter() hands the quarter back to the producer.
  //
  // A lane has 16 values of a row, and of the row 8 further, whose swizzle is the same; 8 of them are a store. Lanes 4
  // apart, and 8 apart, begin with different ones, so that a warp's stores, and loads, go to different banks.
  struct Refill {
    uint32_t from[2], to[2];  // in the raw rows, and in the entry's slot
    uint32_t entry = 0;
    int kind = kEnd;
    uint2 rows[4];

    __device__ __forceinline__ Refill(int warp, int lane) {
      const int row = warp % 4 * 2 + lane / 16, part = lane % 16, begin = (lane >> 2 ^ lane >> 3) & 1;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        from[j] = L::kRaw + row * kDim + warp / 4 * (kDim / 2) + part * 16 + (begin ^ j) * 8;
        to[j] = warp / 4 * (kTileBytes / 2) + part / 4 * kBlockBytes + swizzled(row, part % 4 * 2 + (begin ^ j));
        make_opaque(from[j]), make_opaque(to[j]);  // kept, since it takes long to find out again
      }
    }
  };
  __device__ __forceinline__ void load_quarter(Refill& refill, int quarter) const {
    if constexpr (FP8) {
      barrier_wait(raw_full(quarter), refill.entry & 1);
      if (quarter == 0) refill.kind = reinterpret_cast<const int*>(smem + L::kKinds)[refill.entry % 4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        refill.rows[k] = *reinterpret_cast<const uint2*>(smem + refill.from[k % 2] + (quarter * 16 + k / 2 * 8) * kDim);
    }
  }
  __device__ __forceinline__ void store_quarter(Refill& refill, int quarter) const {
    const int slot = refill.entry & 1;
    if constexpr (!FP8) {
      barrier_arrive(empty(slot, quarter));
      if (quarter == 3) ++refill.entry;
    } else {
      if (refill.kind == kEnd) return;
      if (refill.kind == kKeys) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint2 x = refill.rows[k];
          *reinterpret_cast<uint4*>(smem + refill.to[k % 2] + (quarter * 16 + k / 2 * 8) * 128) =
              make_uint4(e4m3_low(x.x), e4m3_high(x.x), e4m3_low(x.y), e4m3_high(x.y));
        }
        if (quarter == 3) fence_async(), barrier_arrive(full(slot));
      }
      barrier_arrive(raw_empty(quarter));  // what comes next, or q, may come
      if (quarter == 3) ++refill.entry, refill.to[0] ^= kTileBytes, refill.to[1] ^= kTileBytes;
    }
  }
  __device__ __forceinline__ void refill_quarters(Refill& refill, int first, int end) const {
#pragma unroll
    for (int quarter = first; quarter < end; ++quarter) load_quarter(refill, quarter), store_quarter(refill, quarter);
  }

  // What these two warpgroups do.
  __device__ __forceinline__ void accumulate_items() const {
    const int half = warp / 4, row = warp % 4 * 16 + lane / 4;
    const int lane_row = (lane >> 3 & 1) * 8 + (lane & 7);
    uint32_t tile = 0, item_parity = 0, entry = 0;
    Refill refill(warp, lane);
    refill_quarters(refill, 0, 4), refill_quarters(refill, 0, 4);
    bool is_refilled = false;  // the slot of the item's q, with the entry that follows its first tile
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, i = turns[0]; i < p.items; i = turns[++turn]) {
      const int tiles = Item(p, i, lengths).tiles;
      if (tiles == 0) {
        const Item item(p, i, lengths);
        for (int head = warp; head < min(kHeads, p.heads - item.head0); head += 8)
          for (int k = 0; k < 2; ++k)
            reinterpret_cast<uint4*>(output_at(p, item.token, item.head0 + head))[k * 32 + lane] =
                make_uint4(0, 0, 0, 0);
        lengths = LaneLengths(p, turns[turn + 1], lane);
        continue;
      }
      float o[128] = {}, maximum[2];  // outputs so far, and what they are relative to
      if (!is_refilled) barrier_wait(q_read(), item_parity), refill_quarters(refill, 0, 4);
      ++entry;
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        const int buffer = tile % 2;
        barrier_wait(ready(buffer), tile / 2 & 1);
        const float* const maxima = floats(L::kMaximum) + buffer * kHeads + row;
        const float now[2] = {maxima[0], maxima[8]};
        if (left < tiles && __any_sync(~0u, now[0] != maximum[0] || now[1] != maximum[1])) {
          const float factor[2] = {exp2_fast(maximum[0] - now[0]), exp2_fast(maximum[1] - now[1])};
#pragma unroll
          for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
        }
        maximum[0] = now[0], maximum[1] = now[1];
        const uint64_t weights = descriptor(base + L::kWeights + buffer * kBlockBytes);
        const uint64_t v = transposed(base + (entry & 1) * kTileBytes + half * (kTileBytes / 2), kBlockBytes);
        // A k-step is a quarter of the keys. Its slot is refilled while products of the next step run.
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          products_begin();
          const uint64_t w = weights + (step * 32 >> 4), rows = v + (step * 16 * 128 >> 4);
          output_product<FP8, 0>(o, w, rows);
          output_product<FP8, 64>(o, w, rows + (2 * kBlockBytes >> 4));
          products_commit();
          if (step > 0) products_wait<1>(), strict_wait(1 + half), store_quarter(refill, step - 1);
          load_quarter(refill, step);
        }
        products_wait<0>();
        strict_wait(1 + half);
        barrier_arrive(used(buffer));
        store_quarter(refill, 3);
      }
      const float* const factors = floats(L::kFactor) + item_parity * kHeads + row;
      const float factor[2] = {factors[0], factors[8]};
      item_parity ^= 1;
      const int64_t token = i >> p.head_blocks - 1;
      const int head0 = (i & p.head_blocks - 1) * kHeads + warp % 4 * 16;
      const uint32_t staging = L::kStaging + warp * 2048;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (FP8 && c == 2) {
          // The next item's q has been read meanwhile: what follows its first tile need not wait for these outputs.
          is_refilled = refill.kind != kEnd;
          if (is_refilled) {
            barrier_wait(q_read(), item_parity);
            refill_quarters(refill, 0, 2);
          }
        }
        if (FP8 && c == 3 && is_refilled) refill_quarters(refill, 2, 4);
        uint32_t packed[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int j = c * 32 + n * 8 + 2 * k;
            packed[n][k] = pack_bf16(o[j] * factor[k % 2], o[j + 1] * factor[k % 2]);
          }
        if (FP8) {
          hold(packed);  // they are converted before the wait
          if (lane == 0) tensor_stores_wait();  // the staging memory is free; at once, if there are none
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 4; ++n)
          stmatrix(base + staging + swizzled(lane_row, n * 2 + (lane >> 4)), packed[n][0], packed[n][1], packed[n][2],
                   packed[n][3]);
        if (c == 1) lengths = LaneLengths(p, turns[turn + 1], lane);  // long before its use, where registers are free
        if (FP8 && call.is_mapped) {
          fence_async();
          __syncwarp();
          if (lane == 0)
            store_outputs(call.out_map, half * (kDim / 2) + c * 64, head0, static_cast<int>(token), base + staging);
          continue;
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 16; r += 4) {
          const int from_row = r + lane / 8, head = head0 + from_row;
          if (head < p.heads)
            reinterpret_cast<uint4*>(output_at(p, token, head) + half * (kDim / 2) + c * 64)[lane % 8] =
                *reinterpret_cast<const uint4*>(smem + staging + swizzled(from_row, lane % 8));
        }
      }
    }
    if (FP8 && lane == 0) tensor_stores_wait();  // shared memory must stay until it has been read
  }
};

// A kernel for either way of reading rows: with both in one, registers are spilled.
template <bool FP8, bool EVICT_FIRST>
__global__ void __launch_bounds__(kBlockThreads, 1) sparse_mla_m64_kernel(const __grid_constant__ Call p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  int* const list = reinterpret_cast<int*>(smem + Layout<FP8>::kTurns);
  const Turns turns(list, p.items);
  const Block<FP8> block{{{{p, smem, smem_address(smem), warp, static_cast<int>(threadIdx.x % 32)}, p, turns}}};
  if (threadIdx.x == 0) {
    block.init();
    if (FP8 && p.is_mapped) asm volatile("prefetch.tensormap [%0];" ::"l"(&p.q_map) : "memory");
  }
  wait_for_previous();
  if (turns.is_sorted)
    sort_items(turns, smem, list, [&](int i) {
      const int token = i >> p.head_blocks - 1;
      return Item(p, i, p.visible[token], p.topk_lens[token]).tiles;
    });
  else
    __syncthreads();
  if (warp >= 12) {
    give_registers<48>();
    block.template fetch_items<EVICT_FIRST>();
  } else if (warp >= 8) {
    take_registers<144>();
    block.score_items();
  } else {
    take_registers<160>();
    block.accumulate_items();
  }
#endif
}

template <bool FP8, bool EVICT_FIRST>
cudaError_t launch(const SparseMla& call, int sms, cudaStream_t stream) {
  const Call p(call);
  return launch_kernel<sparse_mla_m64_kernel<FP8, EVICT_FIRST>>(p, min(p.items, sms), kBlockThreads,
                                                                Layout<FP8>::kTotal, 1, stream);
}

}  // namespace m64

cudaError_t launch_sparse_mla_m64(const SparseMla& call, int sms, cudaStream_t stream) {
  using m64::launch;
  if (call.keep_outputs)
    return call.rows_are_fp8 ? launch<true, true>(call, sms, stream) : launch<false, true>(call, sms, stream);
  return call.rows_are_fp8 ? launch<true, false>(call, sms, stream) : launch<false, false>(call, sms, stream);
}

}  // namespace mla
