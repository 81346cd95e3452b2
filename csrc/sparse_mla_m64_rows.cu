// Sparse MLA over the rows of vLLM's own caches for Hopper, 64 heads a block: docs/sm90-sparse-mla.md.
//
// Heads on M, S = Q K^T and O = P V, with a role for each warpgroup, as in sparse_mla_m64.cu. Operands of packed rows
// are fp16. A row is divided by a power of two, so that it and its weights are in range: its narrow part is widened and
// multiplied by its scales, over that power, by the warpgroups that multiply weights by rows; its wide part is small,
// and is converted by the warps that fetch. BF16 rows are operands as they are.

#include <type_traits>

#include "m64_rows_fetch.cuh"
#include "m64_rows_scores.cuh"

namespace mla {
namespace m64_rows {

// What the two output warpgroups do, each with 256 dimensions.
template <RowFormat FORMAT>
struct Outputs : Storage<FORMAT> {
  using Base = Storage<FORMAT>;
  using Base::p, Base::smem, Base::base, Base::warp, Base::lane, Base::floats, Base::full, Base::empty, Base::raw_full;
  using Base::raw_empty, Base::q_read, Base::ready, Base::used, Base::maximum_ready, Base::turns;
  using L = Layout<FORMAT>;
  static constexpr bool kPacked = L::kPacked;

  // How a slot of the ring is refilled. Entry `entry` replaces the last entry but one, a quarter (16 keys) at a time.
  // load_quarter() loads the raw values of a quarter, of this warpgroup's dimensions. store_quarter() stores them,
  // widened, once that quarter of the slot is free. Values are loaded for any kind of entry, so that nothing waits for
  // loads in between. BF16 rows need no widening: for them store_quarter() hands the quarter back to the producer.
  //
  // A lane has 16 values of a row, and of the row 8 further, whose swizzle is the same; 8 of them are a store. Lanes 4
  // apart, and 8 apart, begin with different ones, so that a warp's stores, and loads, go to different banks.
  struct Refill {
    uint32_t from[2], to[2], ratios;  // in the raw rows, in the entry's slot, and in the ratios of raw rows
    uint32_t entry = 0;
    int kind = kEnd;
    bool is_narrow;
    uint2 rows[4];
    uint32_t ratio;  // of both rows

    __device__ __forceinline__ Refill(int warp, int lane) {
      const int row = warp % 4 * 2 + lane / 16, begin = (lane >> 2 ^ lane >> 3) & 1;
      // Of the dimensions that are not narrow nothing is done.
      is_narrow = warp / 4 * (kDim / 2) + lane % 16 * 16 < L::kNarrow;
      const int part = is_narrow ? lane % 16 : 0;
      ratios = L::kRatios + row * 32 + warp / 4 * 16 + part / 4 * 4;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        from[j] = L::kRaw + row * L::kNarrow + warp / 4 * (kDim / 2) + part * 16 + (begin ^ j) * 8;
        to[j] = warp / 4 * (kTileBytes / 2) + part / 4 * kBlockBytes + swizzled(row, part % 4 * 2 + (begin ^ j));
        make_opaque(from[j]), make_opaque(to[j]);  // kept, since it takes long to find out again
      }
    }
  };
  __device__ __forceinline__ void load_quarter(Refill& refill, int quarter) const {
    if constexpr (kPacked) {
      barrier_wait(raw_full(quarter), refill.entry & 1);
      if (quarter == 0) refill.kind = reinterpret_cast<const int*>(smem + L::kKinds)[refill.entry % 4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        refill.rows[k] =
            *reinterpret_cast<const uint2*>(smem + refill.from[k % 2] + (quarter * 16 + k / 2 * 8) * L::kNarrow);
      refill.ratio = *reinterpret_cast<const uint32_t*>(smem + refill.ratios + quarter * 256);
    }
  }
  __device__ __forceinline__ void store_quarter(Refill& refill, int quarter) const {
    const int slot = refill.entry & 1;
    if constexpr (!kPacked) {
      barrier_arrive(empty(slot, quarter));
      if (quarter == 3) ++refill.entry;
    } else {
      if (refill.kind == kEnd) return;
      if (refill.kind == kKeys) {
        if (L::kNarrow == kDim || refill.is_narrow) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint2 x = refill.rows[k];
            const uint32_t by = __byte_perm(refill.ratio, 0, k < 2 ? 0x1010 : 0x3232);
            *reinterpret_cast<uint4*>(smem + refill.to[k % 2] + (quarter * 16 + k / 2 * 8) * 128) =
                make_uint4(times_half(e4m3_low(x.x), by), times_half(e4m3_high(x.x), by),
                           times_half(e4m3_low(x.y), by), times_half(e4m3_high(x.y), by));
          }
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

  // Quarter c of this warpgroup's dimensions: 16 values of each of two heads, divided by a power of two so that fp16
  // holds them, whatever they are.
  __device__ __forceinline__ void write_part(int unit, int c, const float* o) const {
    float largest[2] = {}, inverse[2];
    uint32_t powers[2];
#pragma unroll
    for (int j = 0; j < 32; ++j) largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(o[j]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 power = power_below(__float_as_uint(largest[h]) >> 16);
      powers[h] = __float_as_uint(power.x), inverse[h] = power.y;
    }
    p.powers_of(unit, warp, lane)[c * 32] = __byte_perm(powers[0], powers[1], 0x7632);
    uint4* const to = p.outputs_of(unit, warp, lane) + c * 4 * 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* const x = o + j / 2 * 16 + j % 2 * 2;
      const float by = inverse[j % 2];
      to[j * 32] = make_uint4(pack_half(x[0] * by, x[1] * by), pack_half(x[4] * by, x[5] * by),
                              pack_half(x[8] * by, x[9] * by), pack_half(x[12] * by, x[13] * by));
    }
  }

  // What these two warpgroups do.
  __device__ __forceinline__ void accumulate_items() const {
    const int half = warp / 4, row = warp % 4 * 16 + lane / 4;
    uint32_t tile = 0, item_parity = 0, entry = 0;
    Refill refill(warp, lane);
    refill_quarters(refill, 0, 4), refill_quarters(refill, 0, 4);
    bool is_refilled = false;  // the slot of the item's q, with the entry that follows its first tile
    LaneLengths lengths(p, turns[0], lane);
    for (int turn = 0, unit = turns[0]; unit < p.units; unit = turns[++turn]) {
      const int tiles = Item(p, unit, lengths).tiles();
      float o[128] = {}, maximum[2];  // outputs so far, and what they are relative to
      if (!is_refilled) barrier_wait(q_read(), item_parity), refill_quarters(refill, 0, 4);
      ++entry;
      for (int left = tiles; left > 0; --left, ++tile, ++entry) {
        const int buffer = tile % 2;
        // Over BF16 rows the maximum rises often: outputs are rescaled while weights are made.
        barrier_wait(kPacked ? ready(buffer) : maximum_ready(buffer), tile / 2 & 1);
        const float* const maxima = floats(L::kMaximum) + buffer * kHeads + row;
        const float now[2] = {maxima[0], maxima[8]};
        if (left < tiles && __any_sync(~0u, now[0] != maximum[0] || now[1] != maximum[1])) {
          const float factor[2] = {exp2_fast(maximum[0] - now[0]), exp2_fast(maximum[1] - now[1])};
#pragma unroll
          for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
        }
        maximum[0] = now[0], maximum[1] = now[1];
        if constexpr (!kPacked) barrier_wait(ready(buffer), tile / 2 & 1);
        const uint64_t weights = descriptor(base + L::kWeights + buffer * kBlockBytes);
        const uint64_t v = transposed(base + (entry & 1) * kTileBytes + half * (kTileBytes / 2), kBlockBytes);
        // A k-step is a quarter of the keys. Its slot is refilled while products of the next step run.
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          products_begin();
          const uint64_t w = weights + (step * 32 >> 4), rows = v + (step * 16 * 128 >> 4);
          output_product<kPacked, 0>(o, w, rows);
          output_product<kPacked, 64>(o, w, rows + (2 * kBlockBytes >> 4));
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
      lengths = LaneLengths(p, turns[turn + 1], lane);
      const int head0 = Item::head0(p, unit) + row;
      __nv_bfloat16* const out = output_at(p, Item::token(p, unit), 0) + half * (kDim / 2) + lane % 4 * 8;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (kPacked && c == 2) {
          // The next item's q has been read meanwhile: what follows its first tile need not wait for these outputs.
          is_refilled = refill.kind != kEnd;
          if (is_refilled) {
            barrier_wait(q_read(), item_parity);
            refill_quarters(refill, 0, 2);
          }
        }
        if (kPacked && c == 3 && is_refilled) refill_quarters(refill, 2, 4);
        if (unit >= p.whole) {
          write_part(unit, c, o + c * 32);
          continue;
        }
        uint32_t packed[4][4];  // [head, 32 dimensions][block of 8]
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const int j = c * 32 + n % 2 * 16 + b * 4 + n / 2 * 2;
            packed[n][b] = pack_bf16(o[j] * factor[n / 2], o[j + 1] * factor[n / 2]);
          }
        transpose4(packed, lane);  // a lane then has all of one block
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (head0 + n / 2 * 8 < p.heads)
            *reinterpret_cast<uint4*>(out + (head0 + n / 2 * 8) * p.out_head_stride + c * 64 + n % 2 * 32) =
                as_uint4(packed[n]);
      }
    }
  }
};

template <RowFormat FORMAT, bool EVICT_FIRST>
__global__ void __launch_bounds__(kBlockThreads, 1) sparse_mla_m64_rows_kernel(const __grid_constant__ Call p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  using L = Layout<FORMAT>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same in every lane
  int* const list = reinterpret_cast<int*>(smem + L::kTurns);
  touch(p);
  const Turns turns(list, p.units);
  const Storage<FORMAT> block{p, smem, smem_address(smem), warp, static_cast<int>(threadIdx.x % 32), turns};
  if (threadIdx.x == 0) {
    block.init();
    if (p.is_mapped) asm volatile("prefetch.tensormap [%0];" ::"l"(&p.q_map) : "memory");
  }
  wait_for_previous();
  if (turns.is_sorted)
    sort_items(turns, smem, list, [&](int unit) {
      int lengths[2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int32_t* const from = p.sources[s].lengths;
        lengths[s] = from ? from[divided(Item::token(p, unit), p.tokens_per_length)] : INT_MAX;
      }
      return Item(p, unit, lengths[0], lengths[1]).tiles();
    });
  else
    __syncthreads();
  if (warp >= 12) {
    give_registers<L::kFetchRegisters>();
    Fetch<FORMAT>{block}.template fetch_items<EVICT_FIRST>();
  } else if (warp >= 8) {
    take_registers<L::kScoreRegisters>();
    Scores<FORMAT>{block}.score_items();
  } else {
    take_registers<L::kOutputRegisters>();
    Outputs<FORMAT>{block}.accumulate_items();
  }
#endif
}

// Items whose keys were divided: 256 threads, which have places in an output as those above, for 8 of a thread's 128
// values, which are of one head. A part's statistics are asked for by a warp, a lane for each of the block's 32 heads,
// and the thread's values of all parts before anything is waited for. Parts are added in the order of their keys.
constexpr int kMergeBlocks = 16;  // an item
__global__ void __launch_bounds__(256) sparse_mla_m64_merge_kernel(const __grid_constant__ Call p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(kM64MaxParts == 256 / 32, "a warp for each part");
  __shared__ float maxima[kM64MaxParts][32], sums[kM64MaxParts][32], largest[kM64MaxParts][32];
  touch(p);
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int place = blockIdx.x % kMergeBlocks, h = place % 2;
  const int first = p.whole + blockIdx.x / kMergeBlocks * p.parts;
  const uint4* const outputs = p.outputs_of(first, warp, lane) + place * 32;
  const uint32_t* const powers = p.powers_of(first, warp, lane) + place / 4 * 32;
  const float* const of = p.statistics_of(first + warp) + lane / 8 * 16 + h * 8 + lane % 8;
  const bool has_part = warp < p.parts;
  const float mine[3] = {has_part ? of[0] : kNoMaximum, has_part ? of[kHeads] : 0.f,
                         has_part ? of[2 * kHeads] : -INFINITY};
  uint4 raw[kM64MaxParts] = {};
  uint32_t power[kM64MaxParts] = {};
#pragma unroll
  for (int part = 0; part < kM64MaxParts; ++part)
    if (part < p.parts)
      raw[part] = outputs[part * 8 * Call::kChunks], power[part] = powers[part * 8 * Call::kChunks * 4];
  maxima[warp][lane] = mine[0], sums[warp][lane] = mine[1], largest[warp][lane] = mine[2];
  const int at = warp % 4 * 8 + lane / 4, head = Item::head0(p, first) + warp % 4 * 16 + h * 8 + lane / 4;
  const float sink = p.sinks && head < p.heads ? p.sinks[head] * kLog2e : -INFINITY;
  __syncthreads();
  float maximum = kNoMaximum, most = -INFINITY;
#pragma unroll
  for (int part = 0; part < kM64MaxParts; ++part)
    maximum = fmaxf(maximum, maxima[part][at]), most = fmaxf(most, largest[part][at]);
  const float shift = fmaxf(maximum, sink);
  float total = exp2_fast(sink - shift), keys = 0.f, o[8] = {};
#pragma unroll
  for (int part = 0; part < kM64MaxParts; ++part) {
    const float weight = exp2_fast(maxima[part][at] - shift), sum = sums[part][at];
    const float by = weight * __uint_as_float(power[part] >> h * 16 << 16);
    total = fmaf(weight, sum, total), keys += exp2_fast(maxima[part][at] - maximum) * sum;
    const uint32_t pairs[4] = {raw[part].x, raw[part].y, raw[part].z, raw[part].w};
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(pairs[b]));
      o[b * 2] = fmaf(by, x.x, o[b * 2]), o[b * 2 + 1] = fmaf(by, x.y, o[b * 2 + 1]);
    }
  }
  const float factor = total > 0.f ? p.bmm2 / total : 0.f;
  uint32_t packed[1][4];
#pragma unroll
  for (int b = 0; b < 4; ++b) packed[0][b] = pack_bf16(o[b * 2] * factor, o[b * 2 + 1] * factor);
  transpose4(packed, lane);
  if (head >= p.heads) return;
  const int64_t token = Item::token(p, first);
  __nv_bfloat16* const to = output_at(p, token, head) + warp / 4 * (kDim / 2) + place / 2 * 32 + lane % 4 * 8;
  *reinterpret_cast<uint4*>(to) = as_uint4(packed[0]);
  if (p.lse && place < 2 && warp < 4 && lane % 4 == 0) write_statistics(p, token, head, maximum, keys, most);
#endif
}

template <RowFormat FORMAT>
cudaError_t launch(const SparseMlaRows& call, const M64Division& division, int sms, cudaStream_t stream) {
  using L = Layout<FORMAT>;
  const Call p(call, L::kDims, division);
  const auto launch_with = [&](auto evict_first) {
    return launch_kernel<sparse_mla_m64_rows_kernel<FORMAT, decltype(evict_first)::value>>(
        p, min(p.units, sms), kBlockThreads, L::kTotal, 1, stream);
  };
  const cudaError_t error = call.keep_outputs ? launch_with(std::true_type()) : launch_with(std::false_type());
  if (error != cudaSuccess || p.whole == p.items) return error;
  return launch_kernel<sparse_mla_m64_merge_kernel>(p, (p.items - p.whole) * kMergeBlocks, 256, 0, 1, stream);
}

}  // namespace m64_rows

cudaError_t launch_sparse_mla_m64_rows(const SparseMlaRows& call, const M64Division& division, int sms,
                                       cudaStream_t stream) {
  using m64_rows::launch;
  switch (call.format) {
    case RowFormat::kV4: return launch<RowFormat::kV4>(call, division, sms, stream);
    case RowFormat::kV32: return launch<RowFormat::kV32>(call, division, sms, stream);
    case RowFormat::kBf16: return launch<RowFormat::kBf16>(call, division, sms, stream);
    case RowFormat::kBf576: return launch<RowFormat::kBf576>(call, division, sms, stream);
    case RowFormat::kE4M3: break;  // sparse_mla_m64.cu
  }
  return cudaErrorInvalidValue;
}

}  // namespace mla
