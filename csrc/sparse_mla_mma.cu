// Sparse MLA over full-width rows for Hopper, few heads: docs/sm90-sparse-mla.md.
//
// A block serves one token, 16 of its heads and a share of its keys; it holds q in registers, as A fragments. Rows are
// copied asynchronously into a ring of tiles. For each tile the warps divide the keys among them and compute scores
// (Q K^T, fp16 or BF16 mma.sync), agree on the new maximum of every head, then divide the dimensions and add the
// weighted rows (P V). E4M3 rows are widened to fp16 in registers, on the way from shared memory into either product;
// the transposition that P V needs is done there too, by byte permutation of two rows. The blocks of a token that
// share its keys form a cluster and merge through each other's shared memory, in a fixed order.

#include <cooperative_groups.h>

#include "sm90_ptx.cuh"

namespace cg = cooperative_groups;

namespace dsv4 {
namespace {

constexpr int kHeads = 16;  // of a block: the M of mma.sync

struct Params : SparseMla {
  int head_blocks, splits;
};

// ---------------------------------------------------------------- PTX

template <int N>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

#define DSV4_MMA(type)                                                                                     \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
      "{%0,%1,%2,%3};"                                                                                     \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool HALF>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (HALF)
    DSV4_MMA("f16");
  else
    DSV4_MMA("bf16");
}

// ---------------------------------------------------------------- layout

template <bool FP8, int WARPS>
struct Layout {
  static constexpr int kThreads = WARPS * 32;
  static constexpr int kBlocksSM = 8 / WARPS;
  static constexpr int kStageBytes = WARPS * 8 * 1024;
  static constexpr int kStages = 3;
  static constexpr int kRowBytes = FP8 ? 512 : 1024;
  static constexpr int kKeys = kStageBytes / kRowBytes;  // keys of one tile
  static constexpr int kPTerms = FP8 ? 1 : 2;            // BF16 weights come as high and low part
  static constexpr int kPTerm = kKeys / 16 * 512;        // bytes of one term, in fragment order
  static constexpr int kRing = 0;
  static constexpr int kP = kRing + kStages * kStageBytes;
  static constexpr int kBias = kP + kPTerm * kPTerms;
  static constexpr int kMax = kBias + kStages * kKeys * 4;
  static constexpr int kRowStat = kMax + kHeads * WARPS * 4;
  static constexpr int kScale = kRowStat + 2 * kHeads * 4;
  static constexpr int kTotal = kScale + kHeads * 4;
  static_assert(kBlocksSM * (kTotal + 1024) <= 228 * 1024, "more shared memory than an SM has");
  static_assert(kHeads * kDim * 4 <= kStages * kStageBytes, "partial output must fit the ring");

  // A row is cut into 16-byte chunks, and chunk c of row r lies at c ^ swizzle(r). Eight lanes that read one phase
  // of either product (two rows by four chunks for q k, four rows by two chunks for p v) then hit all banks.
  static __device__ __forceinline__ int swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }
};

template <bool FP8, int WARPS>
__global__ void __launch_bounds__(Layout<FP8, WARPS>::kThreads, Layout<FP8, WARPS>::kBlocksSM)
    sparse_mla_mma_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // called on Hopper alone
  using L = Layout<FP8, WARPS>;
  constexpr int kPieces = 8;                   // q is brought in pieces of 64 dimensions
  constexpr int kKeysWarp = L::kKeys / WARPS;  // a warp copies them and computes their scores
  constexpr int kBlocksN = kKeysWarp / 8;
  constexpr int kSteps = kDim / 16;
  constexpr int kDimsWarp = kDim / WARPS;      // in p v
  constexpr int kBlocksJ = kDimsWarp / 8;
  constexpr int kRun = FP8 ? kBlocksJ : 8;     // dimensions of one read, one for each block
  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t base = smem_address(smem);
  float* const row_max = reinterpret_cast<float*>(smem + L::kMax);       // [rows][warps]
  float* const row_stat = reinterpret_cast<float*>(smem + L::kRowStat);  // [2][rows]: maximum, sum
  float* const q_scale = reinterpret_cast<float*>(smem + L::kScale);     // [rows]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x % p.splits;
  const int head0 = (blockIdx.x / p.splits) % p.head_blocks * kHeads;
  const int64_t token = blockIdx.x / (p.splits * p.head_blocks);

  const int visible = p.visible[token];
  const int window = max(0, min(visible, kWindow));
  const int picked = visible > 0 ? max(0, min(p.topk_lens[token], p.width) - kWindow) : 0;
  // Each split takes a run of keys; window first, then the picked rows.
  const int keys_all = window + picked;
  const int keys_split = ((keys_all + p.splits - 1) / p.splits + 15) / 16 * 16;
  const int first = min(split * keys_split, keys_all);
  const int keys = min(keys_split, keys_all - first);
  const int tiles = (keys + L::kKeys - 1) / L::kKeys;
  const int32_t* const index_row = p.indices + token * p.indices_stride;

  // ---- q, first on its way: each warp brings 64 dimensions (or twice that) of all heads
  uint4 raw[kPieces / WARPS][2][2];  // 16 values of rows g and g + 8: one run of 16, or two of 8 in BF16
#pragma unroll
  for (int piece = 0; piece < kPieces / WARPS; ++piece)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = head0 + g + h * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int dim = (warp + piece * WARPS) * 64 + (FP8 ? t * 16 + i * 8 : i * 32 + t * 8);
        const int64_t at = token * p.q_token_stride + head * p.q_head_stride + dim;
        uint4& to = raw[piece][h][i];
        if (head >= p.heads) {
          to = make_uint4(0, 0, 0, 0);
        } else if (p.q_is_fp8) {
          const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(p.q) + at);
          to = make_uint4(half_to_bf16(e4m3_low(w.x)), half_to_bf16(e4m3_high(w.x)), half_to_bf16(e4m3_low(w.y)),
                          half_to_bf16(e4m3_high(w.y)));
        } else {
          to = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + at);
        }
      }
    }

  // ---- rows on their way: a warp copies kKeysWarp rows of a tile, a lane one chunk (two in BF16) of each
  auto fetch_index = [&](int tile) -> int {
    const int key = tile * L::kKeys + warp * kKeysWarp + lane;
    if (lane >= kKeysWarp || key >= keys) return -1;
    const int column = first + key;
    return index_row[column < window ? column : kWindow + column - window];
  };
  auto load_tile = [&](int tile, int index) {
    const int stage = tile % L::kStages;
    const int row0 = warp * kKeysWarp;
    const uint8_t* from = static_cast<const uint8_t*>(p.swa.rows);  // read by nobody where there is no row
    if (index >= 0) from = row_of(first + tile * L::kKeys + row0 + lane < window ? p.swa : p.compressed, index);
    const unsigned there = __ballot_sync(~0u, index >= 0);
    if (lane < kKeysWarp)
      reinterpret_cast<float*>(smem + L::kBias)[stage * L::kKeys + row0 + lane] = index >= 0 ? 0.f : -INFINITY;
    const uint32_t to = base + L::kRing + stage * L::kStageBytes + row0 * L::kRowBytes;
#pragma unroll
    for (int r = 0; r < kKeysWarp; ++r) {
      const int64_t row = __shfl_sync(~0u, reinterpret_cast<int64_t>(from), r) + lane * 16;
      const int bytes = there >> r & 1 ? 16 : 0;
#pragma unroll
      for (int c = 0; c < L::kRowBytes / 512; ++c)
        copy16(to + r * L::kRowBytes + ((c * 32 + lane) ^ L::swizzle(r)) * 16,
               reinterpret_cast<const uint8_t*>(row) + c * 512, bytes);
    }
  };
  auto commit = [] { asm volatile("cp.async.commit_group;"); };
  int next_index = fetch_index(0);
#pragma unroll
  for (int i = 0; i < L::kStages - 1; ++i) {
    const int index = next_index;
    next_index = i + 1 < tiles ? fetch_index(i + 1) : -1;
    if (i < tiles) load_tile(i, index);
    commit();
  }

  // ---- q as A fragments. Dimensions are permuted within a row so that a thread's chunk of a key holds what it
  // needs of four (BF16: two) steps; the order of a sum over dimensions is free as long as q follows.
  uint32_t q[kSteps][4];
  {
    uint8_t* const fragments = smem + L::kRing + (L::kStages - 1) * L::kStageBytes;  // the stage that is loaded last
    if constexpr (FP8) {
      // fp16 holds q / 2^e whatever q is; 2^e, from the largest value of the row, goes back in with the scale.
      uint32_t* const largest_of = reinterpret_cast<uint32_t*>(smem + L::kP);  // [rows][pieces], BF16 bits
#pragma unroll
      for (int piece = 0; piece < kPieces / WARPS; ++piece)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t largest = 0;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 v = raw[piece][h][i];
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) largest = max(largest, max(w[k] & 0x7FFF, (w[k] >> 16) & 0x7FFF));
          }
          largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
          if (t == 0) largest_of[(g + h * 8) * kPieces + warp + piece * WARPS] = largest;
        }
      __syncthreads();
      if (threadIdx.x < kHeads) {
        uint32_t largest = 0;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          largest = max(largest, largest_of[threadIdx.x * kPieces + piece]);
        q_scale[threadIdx.x] = __int_as_float((largest << 16) & 0x7F800000);
      }
      __syncthreads();
    }
#pragma unroll
    for (int piece = 0; piece < kPieces / WARPS; ++piece) {
      uint32_t pairs[2][8];  // of a row
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float inverse = FP8 ? __int_as_float(0x7F000000 - __float_as_int(q_scale[g + h * 8])) : 1.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = raw[piece][h][i];
          const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (FP8) {
              const float2 x = unpack_bf16(w[k]);
              pairs[h][i * 4 + k] = pack_half(x.x * inverse, x.y * inverse);
            } else {
              pairs[h][i * 4 + k] = w[k];
            }
          }
        }
      }
#pragma unroll
      for (int u = 0; u < 4; ++u)
        *reinterpret_cast<uint4*>(fragments + (((warp + piece * WARPS) * 4 + u) * 32 + lane) * 16) =
            make_uint4(pairs[0][2 * u], pairs[1][2 * u], pairs[0][2 * u + 1], pairs[1][2 * u + 1]);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) read_words(q[step], fragments + (step * 32 + lane) * 16);
  }

  const float bmm1 = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
  float acc[kBlocksJ][4];
#pragma unroll
  for (int j = 0; j < kBlocksJ; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
  // Of rows g and g + 8. The maximum is that of all keys so far, the sum that of the keys this thread scored.
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, scale[2];
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) scale[h] = bmm1 * (FP8 ? q_scale[g + h * 8] : 1.f);

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % L::kStages;
    const uint8_t* const rows = smem + L::kRing + stage * L::kStageBytes;
    wait<L::kStages - 2>();
    __syncthreads();  // the tile is there, and everybody has left the stage that is loaded next
    {
      const int ahead = tile + L::kStages - 1;
      const int index = next_index;
      next_index = ahead + 1 < tiles ? fetch_index(ahead + 1) : -1;
      if (ahead < tiles) load_tile(ahead, index);
      commit();
    }

    // ---- scores of this warp's keys
    float s[kBlocksN][4];
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
    constexpr int kStepsChunk = FP8 ? 4 : 2;
#pragma unroll
    for (int c = 0; c < kSteps / kStepsChunk; ++c) {
      uint32_t b[kBlocksN][2 * kStepsChunk];
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        const int row = warp * kKeysWarp + n * 8 + g;
        uint32_t w[4];
        read_words(w, rows + row * L::kRowBytes + ((c * 4 + t) ^ L::swizzle(row)) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (FP8) {
            b[n][2 * i] = e4m3_low(w[i]), b[n][2 * i + 1] = e4m3_high(w[i]);
          } else {
            b[n][i] = w[i];
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kStepsChunk; ++u)
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) mma<FP8>(s[n], q[c * kStepsChunk + u], b[n][2 * u], b[n][2 * u + 1]);
    }
    const float* const bias = reinterpret_cast<const float*>(smem + L::kBias) + stage * L::kKeys + warp * kKeysWarp;
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      const float2 key_bias = *reinterpret_cast<const float2*>(bias + n * 8 + 2 * t);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[n][2 * h] = fmaf(s[n][2 * h], scale[h], key_bias.x);
        s[n][2 * h + 1] = fmaf(s[n][2 * h + 1], scale[h], key_bias.y);
        largest[h] = fmaxf(largest[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
      if (t == 0) row_max[(g + h * 8) * WARPS + warp] = largest[h];
    }
    __syncthreads();

    // ---- new maxima, and weights of this warp's keys
    float correction[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4* const all = reinterpret_cast<const float4*>(row_max + (g + h * 8) * WARPS);
      float now = maximum[h];
#pragma unroll
      for (int i = 0; i < WARPS / 4; ++i) {
        const float4 v = all[i];
        now = fmaxf(now, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
      }
      correction[h] = now == -INFINITY ? 1.f : exp2_fast(maximum[h] - now);
      maximum[h] = now;
      shift[h] = now == -INFINITY ? 0.f : now;
      sum[h] *= correction[h];
    }
    // The scores of two blocks of 8 keys lie in registers as the weights' A fragment of 16 keys needs them.
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      const int block = warp * kBlocksN + n;
      uint8_t* const to = smem + L::kP + (block / 2 * 32 + lane) * 16 + block % 2 * 8;
      uint32_t high[2], low[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = exp2_fast(s[n][2 * h] - shift[h]), y = exp2_fast(s[n][2 * h + 1] - shift[h]);
        sum[h] += x + y;
        if constexpr (FP8)
          high[h] = pack_half(x, y);
        else
          high[h] = pack_bf16(x, y), low[h] = rest_bf16(x, y, high[h]);
      }
      *reinterpret_cast<uint2*>(to) = make_uint2(high[0], high[1]);
      if constexpr (!FP8) *reinterpret_cast<uint2*>(to + L::kPTerm) = make_uint2(low[0], low[1]);
    }
#pragma unroll
    for (int j = 0; j < kBlocksJ; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] *= correction[i / 2];
    __syncthreads();

    // ---- weights times rows: this warp's dimensions, all keys. Column n of block j is dimension kRun * n + j, so
    // that a thread reads the dimensions of all its blocks at once.
#pragma unroll
    for (int k = 0; k < L::kKeys / 16; ++k) {
      uint32_t b[kBlocksJ][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Two keys, kRun dimensions of each; a register takes one dimension of both.
        const int row = k * 16 + half * 8 + 2 * t;
        const uint8_t* const at = rows + row * L::kRowBytes;
        if constexpr (FP8) {
          constexpr int kWords = kRun / 4;
          const int chunk = (warp * kDimsWarp + g * kRun) / 16, within = g * kRun % 16;
          uint32_t x[kWords], y[kWords];
          read_words(x, at + (chunk ^ L::swizzle(row)) * 16 + within);
          read_words(y, at + L::kRowBytes + (chunk ^ L::swizzle(row + 1)) * 16 + within);
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            const uint32_t low = __byte_perm(x[w], y[w], 0x5140), high = __byte_perm(x[w], y[w], 0x7362);
            b[w * 4][half] = e4m3_low(low), b[w * 4 + 1][half] = e4m3_high(low);
            b[w * 4 + 2][half] = e4m3_low(high), b[w * 4 + 3][half] = e4m3_high(high);
          }
        } else {
#pragma unroll
          for (int run = 0; run < kBlocksJ / 8; ++run) {
            const int chunk = (warp * kDimsWarp + run * 64) / 8 + g;
            uint32_t x[4], y[4];
            read_words(x, at + (chunk ^ L::swizzle(row)) * 16);
            read_words(y, at + L::kRowBytes + (chunk ^ L::swizzle(row + 1)) * 16);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              b[run * 8 + 2 * w][half] = __byte_perm(x[w], y[w], 0x5410);
              b[run * 8 + 2 * w + 1][half] = __byte_perm(x[w], y[w], 0x7632);
            }
          }
        }
      }
#pragma unroll
      for (int term = 0; term < L::kPTerms; ++term) {
        uint32_t a[4];
        read_words(a, smem + L::kP + term * L::kPTerm + (k * 32 + lane) * 16);
#pragma unroll
        for (int j = 0; j < kBlocksJ; ++j) mma<FP8>(acc[j], a, b[j][0], b[j][1]);
      }
    }
  }

  // ---- denominators: over the four threads of a row, then over the warps that shared the keys
  wait<0>();
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = sum[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) row_max[(g + h * 8) * WARPS + warp] = total;
  }
  if (warp == 0 && t == 0)
#pragma unroll
    for (int h = 0; h < 2; ++h) row_stat[g + h * 8] = maximum[h];
  __syncthreads();
  if (threadIdx.x < kHeads) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += row_max[threadIdx.x * WARPS + i];
    row_stat[kHeads + threadIdx.x] = total;
  }
  const float bmm2 = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
  // Dimension of column 2t + i of block 8 * eight; the seven blocks after it hold the next ones.
  auto first_dim = [&](int i, int eight) {
    return warp * kDimsWarp + (2 * t + i) * kRun + eight * (kRun == 16 ? 8 : 64);
  };

  if (p.splits == 1) {
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = g + h * 8, head = head0 + row;
      if (head >= p.heads) continue;
      const float largest = row_stat[row], sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
      float shift = fmaxf(largest, sink);
      if (shift == -INFINITY) shift = 0.f;
      const float mine = exp2_fast(largest - shift);
      const float total = row_stat[kHeads + row] * mine + exp2_fast(sink - shift);
      const float factor = total > 0.f ? bmm2 * mine / total : 0.f;
      __nv_bfloat16* const to =
          static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int eight = 0; eight < kBlocksJ / 8; ++eight) {
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            packed[j] = pack_bf16(acc[eight * 8 + 2 * j][2 * h + i] * factor,
                                  acc[eight * 8 + 2 * j + 1][2 * h + i] * factor);
          *reinterpret_cast<uint4*>(to + first_dim(i, eight)) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
    return;
  }

  // ---- splits are the blocks of a cluster: each adds up its share of the output from everybody's shared memory
  float* const partial = reinterpret_cast<float*>(smem + L::kRing);  // [rows][512]
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int eight = 0; eight < kBlocksJ / 8; ++eight) {
        float4* const to = reinterpret_cast<float4*>(partial + (g + h * 8) * kDim + first_dim(i, eight));
#pragma unroll
        for (int j = 0; j < 2; ++j)
          to[j] = make_float4(acc[eight * 8 + 4 * j][2 * h + i], acc[eight * 8 + 4 * j + 1][2 * h + i],
                              acc[eight * 8 + 4 * j + 2][2 * h + i], acc[eight * 8 + 4 * j + 3][2 * h + i]);
      }
  cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  const int rows_here = min(kHeads, p.heads - head0);
  for (int i = split * L::kThreads + threadIdx.x; i < rows_here * (kDim / 4); i += p.splits * L::kThreads) {
    const int row = i / (kDim / 4), head = head0 + row;
    const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
    float shift = sink;
    for (int r = 0; r < p.splits; ++r) shift = fmaxf(shift, cluster.map_shared_rank(row_stat, r)[row]);
    if (shift == -INFINITY) shift = 0.f;
    float total = exp2_fast(sink - shift);
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int r = 0; r < p.splits; ++r) {
      const float* const stat = cluster.map_shared_rank(row_stat, r);
      const float weight = exp2_fast(stat[row] - shift);
      total += weight * stat[kHeads + row];
      const float4 v = reinterpret_cast<const float4*>(cluster.map_shared_rank(partial, r))[i];
      value.x += weight * v.x, value.y += weight * v.y, value.z += weight * v.z, value.w += weight * v.w;
    }
    const float factor = total > 0.f ? bmm2 / total : 0.f;
    __nv_bfloat16* const to =
        static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
    *reinterpret_cast<uint2*>(to + i % (kDim / 4) * 4) =
        make_uint2(pack_bf16(value.x * factor, value.y * factor), pack_bf16(value.z * factor, value.w * factor));
  }
  cluster.sync();  // nobody leaves while its shared memory is read
#endif
}

template <bool FP8, int WARPS>
cudaError_t launch(const SparseMla& call, int splits, cudaStream_t stream) {
  using L = Layout<FP8, WARPS>;
  Params p;
  static_cast<SparseMla&>(p) = call;
  p.head_blocks = (p.heads + kHeads - 1) / kHeads;
  p.splits = splits;
  const int blocks = p.tokens * p.head_blocks * p.splits;
  return launch_kernel<sparse_mla_mma_kernel<FP8, WARPS>>(p, blocks, L::kThreads, L::kTotal, p.splits, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_mma(const SparseMla& call, bool paired, int splits, cudaStream_t stream) {
  if (!call.rows_are_fp8) return launch<false, 8>(call, splits, stream);
  return paired ? launch<true, 4>(call, splits, stream) : launch<true, 8>(call, splits, stream);
}

}  // namespace dsv4
