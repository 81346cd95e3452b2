// How blocks that share a token's keys, a cluster, merge their outputs: each writes a share of these, and is told by
// all what they have of it. Nobody reads from another block, or waits for others to have read.
#pragma once

#include "scheduler.cuh"
#include "sm90_wgmma.cuh"

namespace mla {

// Every thread of a cluster arrives, and later waits: all blocks have begun, and their barriers are there. Those who
// have initialised them have a fence behind that.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// What is here, in another block.
__device__ __forceinline__ uint32_t of_rank(const void* here, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem_address(here)), "r"(rank));
  return r;
}
// A barrier beside it counts the bytes when they are there: nobody need wait for them with a fence.
#define MLA_SEND(vector) "st.async.shared::cluster.mbarrier::complete_tx::bytes" vector " "
__device__ __forceinline__ void send(uint32_t to, float x, uint32_t barrier) {
  asm volatile(MLA_SEND(".f32") "[%0], %1, [%2];" ::"r"(to), "f"(x), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send(uint32_t to, float x, float y, uint32_t barrier) {
  asm volatile(MLA_SEND(".v2.f32") "[%0], {%1, %2}, [%3];" ::"r"(to), "f"(x), "f"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send(uint32_t to, const uint32_t (&x)[4], uint32_t barrier) {
  asm volatile(MLA_SEND(".v4.b32") "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3]), "r"(barrier) : "memory");
}
#undef MLA_SEND
__device__ __forceinline__ void wait_for_all(uint32_t barrier) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;}" ::"r"(barrier) : "memory");
}

// What a block is told, in its shared memory. A unit is DIMS dimensions of a head, as fp16: they are divided by a power
// of two, so that any are in range. Of all units each block writes a share. LARGEST: it may be told largest scores too.
template <int HEADS, int BLOCKS, int DIMS, bool LARGEST>
struct Received {
  static constexpr int kUnitsHead = kDim / DIMS, kRuns = DIMS / 8;
  static constexpr int kUnits = HEADS * kUnitsHead + BLOCKS - 1;
  uint4 values[kUnits][kRuns];
  float power[kUnits];
  float2 stats[BLOCKS][HEADS];  // maximum and sum
  float largest[LARGEST ? BLOCKS * HEADS : 1];
  int share, inverse;           // units of a block, and what a number of a unit is multiplied by to divide by it
  alignas(8) uint64_t arrived;  // completes when all have told what they have

  // By one thread, before anybody tells anything.
  __device__ __forceinline__ void init(const RowParams& p, int heads, int blocks, int block) {
    const int all = heads * kUnitsHead;
    share = (all + blocks - 1) / blocks;
    inverse = (1 << 20) / share + 1;
    const int mine = max(0, min(share, all - block * share));
    const int bytes = blocks * (mine * (DIMS * 2 + 4) + heads * (LARGEST && p.max_logits ? 12 : 8));
    barrier_init(smem_address(&arrived), 1);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&arrived)), "r"(bytes)
                 : "memory");
  }

  // Of block `block`, to block `rank`: what of a head is relative to `maximum`, and how much that is.
  __device__ __forceinline__ void tell(int rank, int block, int head, float maximum, float sum) {
    send(of_rank(&stats[block][head], rank), maximum, sum, of_rank(&arrived, rank));
  }
  // To whom, and at which place, a block tells a unit.
  struct Place {
    int rank, at;
  };
  struct Places {
    int block, share, inverse;
    __device__ __forceinline__ Place operator[](int unit) const {
      const int rank = unit * inverse >> 20;
      return {rank, (block - rank) * share + unit};
    }
  };
  __device__ __forceinline__ Places places_of(int block) const { return {block, share, inverse}; }
  __device__ __forceinline__ void tell_power(const Place& place, float x) {
    send(of_rank(&power[place.at], place.rank), x, of_rank(&arrived, place.rank));
  }
  __device__ __forceinline__ void tell(const Place& place, int run, const uint32_t (&x)[4]) {
    send(of_rank(&values[place.at][run], place.rank), x, of_rank(&arrived, place.rank));
  }

  // Adds up and writes this block's share of `heads` heads, by `threads` threads. `where(unit, run)`: the head, and the
  // first of the 8 dimensions.
  template <typename Where>
  __device__ __forceinline__ void merge(const RowParams& p, int heads, int blocks, int block, int thread, int threads,
                                        int64_t token, int head0, const float* sinks, float bmm2,
                                        const Where& where) const {
    wait_for_all(smem_address(&arrived));
    const int share = this->share, first = block * share, mine = min(share, heads * kUnitsHead - first);
    for (int n = thread; n < kRuns * mine; n += threads) {
      const int run = n % kRuns, at = n / kRuns;
      const int2 head_and_dim = where(first + at, run);
      const int row = head_and_dim.x, dim = head_and_dim.y;
      if (head0 + row >= p.heads) continue;
      const float sink = sinks[row];
      float top = -INFINITY;
#pragma unroll 4
      for (int r = 0; r < blocks; ++r) top = fmaxf(top, stats[r][row].x);
      float shift = fmaxf(top, sink);
      if (shift == -INFINITY) shift = 0.f;
      float total = exp2_fast(sink - shift), value[8] = {};
#pragma unroll 4
      for (int r = 0; r < blocks; ++r) {
        const float2 of = stats[r][row];
        const float weight = exp2_fast(of.x - shift), by = weight * power[r * share + at];
        total = fmaf(weight, of.y, total);
        const uint4 raw = values[r * share + at][run];
        const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 x = __half22float2(reinterpret_cast<const __half2&>(w[j]));
          value[2 * j] = fmaf(by, x.x, value[2 * j]), value[2 * j + 1] = fmaf(by, x.y, value[2 * j + 1]);
        }
      }
      const float factor = total > 0.f ? bmm2 / total : 0.f;
      if (p.lse && dim == 0) {  // of keys alone: a sink can be far above them
        float most = -INFINITY, keys = 0.f;
#pragma unroll 1
        for (int r = 0; r < blocks; ++r) {
          if (LARGEST && p.max_logits) most = fmaxf(most, largest[r * HEADS + row]);
          if (stats[r][row].y != 0.f) keys += exp2_fast(stats[r][row].x - top) * stats[r][row].y;
        }
        write_statistics(p, token, head0 + row, top, keys, most);
      }
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = pack_bf16(value[2 * j] * factor, value[2 * j + 1] * factor);
      *reinterpret_cast<uint4*>(output_at(p, token, head0 + row) + dim) = as_uint4(packed);
    }
  }
};

}  // namespace mla
