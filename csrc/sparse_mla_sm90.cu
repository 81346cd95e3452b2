// Sparse MLA over full-width rows for Hopper: docs/sm90-sparse-mla.md.
//
// A block serves one token, 16, 32 or 64 of its heads and a share of its keys. Rows are copied asynchronously into a
// ring of tiles. For each tile the warps divide the keys among them and compute scores (Q K^T, fp16 or BF16
// mma.sync), agree on the new maximum of every head, then divide the dimensions and add the weighted rows (P V).
// E4M3 rows are widened to fp16 in registers, on the way from shared memory into either product; the transposition
// that P V needs is done there too, by byte permutation of two rows. The blocks of a token that share its keys form a
// cluster and merge through each other's shared memory, in a fixed order.

#include "sparse_mla_sm90.h"

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace cg = cooperative_groups;

namespace dsv4 {
namespace {

constexpr int kDim = 512;
constexpr int kWindow = 128;
constexpr int kPieces = 8;  // q is brought in pieces of 64 dimensions
constexpr float kLog2e = 1.4426950408889634f;

struct Params : SparseMla {
  int head_blocks, splits;
};

// ---------------------------------------------------------------- PTX

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
  // Zero-fills where there is no row, so that stale bytes never reach a product.
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// E4M3 in either half of a word, two values, to fp16 (exact).
__device__ __forceinline__ uint32_t e4m3_low(uint32_t v) {
  uint32_t r;
  asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ uint32_t e4m3_high(uint32_t v) {
  uint32_t r;
  asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(v));
  return r;
}

struct Half {
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
struct Bfloat {
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <int N>
__device__ __forceinline__ void read_words(uint32_t (&w)[N], const uint8_t* from) {
  if constexpr (N == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else {
    static_assert(N == 2, "");
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    w[0] = v.x, w[1] = v.y;
  }
}

// ---------------------------------------------------------------- layout

// A row is cut into 16-byte chunks, and chunk c of row r lies at c ^ swizzle(r). Eight lanes that read one phase
// of either product (two rows by four chunks for q k, four rows by two chunks for p v) then hit all banks.
__device__ __forceinline__ int swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }

template <bool FP8, int MT, int WARPS>
struct Layout {
  static constexpr int kWarps = WARPS;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBlocksSM = 8 / WARPS;
  static constexpr int kStageBytes = kWarps * 8 * 1024;
  static constexpr int kDimsWarp = kDim / kWarps;         // in p v
  static constexpr int kBlocksJ = kDimsWarp / 8;
  static constexpr int kRun = FP8 ? kBlocksJ : 8;         // dimensions of one read, one for each block
  static constexpr int kRowBytes = FP8 ? 512 : 1024;
  static constexpr int kKeys = kStageBytes / kRowBytes;   // keys of one tile
  static constexpr int kStages = MT == 4 ? 2 : 3;
  static constexpr bool kQInRegisters = MT < 4;
  static constexpr int kWarpsM = MT == 1 ? 1 : 2;         // warps along the heads, in q k
  static constexpr int kGroups = kWarps / kWarpsM;        // warps along the keys
  static constexpr int kTilesM = MT / kWarpsM;            // head tiles of one warp, in q k
  static constexpr int kKeysWarp = kKeys / kGroups;
  static constexpr int kBlocksN = kKeysWarp / 8;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kPTerms = FP8 ? 1 : 2;             // BF16 weights come as high and low part
  static constexpr int kPTerm = MT * (kKeys / 16) * 512;   // bytes of one term, in fragment order
  static constexpr int kPBytes = kPTerm * kPTerms;
  static constexpr int kQBytes = kQInRegisters ? 0 : MT * kSteps * 32 * 16;
  static constexpr int kRing = 0;
  static constexpr int kQ = kRing + kStages * kStageBytes;
  static constexpr int kP = kQ + kQBytes;
  static constexpr int kBias = kP + kPBytes;
  static constexpr int kMax = kBias + kStages * kKeys * 4;
  static constexpr int kRowStat = kMax + MT * 16 * kGroups * 4;
  static constexpr int kScale = kRowStat + 2 * MT * 16 * 4;
  static constexpr int kTotal = kScale + MT * 16 * 4;
};

template <bool FP8, int MT, int WARPS>
__global__ void __launch_bounds__(Layout<FP8, MT, WARPS>::kThreads, Layout<FP8, MT, WARPS>::kBlocksSM) sparse_mla_kernel(const __grid_constant__ Params p) {
  using L = Layout<FP8, MT, WARPS>;
  constexpr int kWarps = L::kWarps, kThreads = L::kThreads, kStageBytes = L::kStageBytes;
  using Mma = typename std::conditional<FP8, Half, Bfloat>::type;
  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t base = smem_address(smem);
  float* const row_max = reinterpret_cast<float*>(smem + L::kMax);       // [rows][groups]
  float* const row_stat = reinterpret_cast<float*>(smem + L::kRowStat);  // [2][rows]: maximum, sum
  float* const q_scale = reinterpret_cast<float*>(smem + L::kScale);     // [rows]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x % p.splits;
  const int head0 = (blockIdx.x / p.splits) % p.head_blocks * (MT * 16);
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
  uint4 raw[kPieces / kWarps][MT][2][2];  // 16 values of rows g and g + 8: one run of 16, or two of 8 in BF16
#pragma unroll
  for (int piece = 0; piece < kPieces / kWarps; ++piece)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = head0 + m * 16 + g + h * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int dim = (warp + piece * kWarps) * 64 + (FP8 ? t * 16 + i * 8 : i * 32 + t * 8);
          const int64_t at = token * p.q_token_stride + head * p.q_head_stride + dim;
          uint4& to = raw[piece][m][h][i];
          if (head >= p.heads) {
            to = make_uint4(0, 0, 0, 0);
          } else if (p.q_is_fp8) {  // to BF16, exactly
            const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(p.q) + at);
            const uint32_t x[4] = {e4m3_low(w.x), e4m3_high(w.x), e4m3_low(w.y), e4m3_high(w.y)};
            uint32_t y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const __nv_bfloat162 v = __float22bfloat162_rn(__half22float2(reinterpret_cast<const __half2&>(x[k])));
              y[k] = reinterpret_cast<const uint32_t&>(v);
            }
            to = make_uint4(y[0], y[1], y[2], y[3]);
          } else {
            to = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + at);
          }
        }
      }

  // ---- rows on their way: a warp copies kKeys / kWarps rows of a tile, a lane one chunk (two in BF16) of each.
  constexpr int kRowsWarp = L::kKeys / kWarps;
  auto fetch_index = [&](int tile) -> int {
    const int key = tile * L::kKeys + warp * kRowsWarp + lane;
    if (lane >= kRowsWarp || key >= keys) return -1;
    const int column = first + key;
    return index_row[column < window ? column : kWindow + column - window];
  };
  auto load_tile = [&](int tile, int index) {
    const int stage = tile % L::kStages;
    const int row0 = warp * kRowsWarp;
    const uint8_t* from = static_cast<const uint8_t*>(p.swa.rows);  // read by nobody where there is no row
    if (index >= 0) {
      const Pool& pool = first + tile * L::kKeys + row0 + lane < window ? p.swa : p.compressed;
      const unsigned page = pool.page, i = index;
      from = static_cast<const uint8_t*>(pool.rows) + i / page * pool.page_stride + i % page * pool.row_stride;
    }
    const unsigned there = __ballot_sync(~0u, index >= 0);
    if (lane < kRowsWarp)
      reinterpret_cast<float*>(smem + L::kBias)[stage * L::kKeys + row0 + lane] = index >= 0 ? 0.f : -INFINITY;
    const uint32_t to = base + L::kRing + stage * kStageBytes + row0 * L::kRowBytes;
#pragma unroll
    for (int r = 0; r < kRowsWarp; ++r) {
      const int64_t row = __shfl_sync(~0u, reinterpret_cast<int64_t>(from), r) + lane * 16;
      const int bytes = there >> r & 1 ? 16 : 0;
#pragma unroll
      for (int c = 0; c < L::kRowBytes / 512; ++c)
        copy16(to + r * L::kRowBytes + ((c * 32 + lane) ^ swizzle(r)) * 16, reinterpret_cast<const uint8_t*>(row) + c * 512, bytes);
    }
  };
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
  constexpr int kPerChunk = FP8 ? 16 : 8;
  const int warp_m = warp % L::kWarpsM, group = warp / L::kWarpsM;
  uint32_t q_reg[L::kQInRegisters ? L::kSteps : 1][4];
  {
    // In place of the stage that is loaded last, where q ends up in registers.
    uint8_t* const fragments = smem + (L::kQInRegisters ? (L::kStages - 1) * kStageBytes : L::kQ);
    if constexpr (FP8) {
      // fp16 holds q / 2^e whatever q is; 2^e, from the largest value of the row, goes back in with the scale.
      uint32_t* const largest_of = reinterpret_cast<uint32_t*>(smem + L::kP);  // [rows][pieces], BF16 bits
#pragma unroll
      for (int piece = 0; piece < kPieces / kWarps; ++piece)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint4 v = raw[piece][m][h][i];
              const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
              for (int k = 0; k < 4; ++k) largest = max(largest, max(w[k] & 0x7FFF, (w[k] >> 16) & 0x7FFF));
            }
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            if (t == 0) largest_of[(m * 16 + g + h * 8) * kPieces + warp + piece * kWarps] = largest;
          }
      __syncthreads();
      if (threadIdx.x < MT * 16) {
        uint32_t largest = 0;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) largest = max(largest, largest_of[threadIdx.x * kPieces + piece]);
        q_scale[threadIdx.x] = __int_as_float((largest << 16) & 0x7F800000);
      }
      __syncthreads();
    }
#pragma unroll
    for (int piece = 0; piece < kPieces / kWarps; ++piece)
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t half[2][8];  // [row][pair]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float inverse = FP8 ? __int_as_float(0x7F000000 - __float_as_int(q_scale[m * 16 + g + h * 8])) : 1.f;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 v = raw[piece][m][h][i];
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if constexpr (FP8) {
                const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(w[k]));
                const __half2 y = __floats2half2_rn(x.x * inverse, x.y * inverse);
                half[h][i * 4 + k] = reinterpret_cast<const uint32_t&>(y);
              } else {
                half[h][i * 4 + k] = w[k];
              }
            }
          }
        }
#pragma unroll
        for (int u = 0; u < 4; ++u)
          *reinterpret_cast<uint4*>(fragments + ((m * L::kSteps + (warp + piece * kWarps) * 4 + u) * 32 + lane) * 16) =
              make_uint4(half[0][2 * u], half[1][2 * u], half[0][2 * u + 1], half[1][2 * u + 1]);
      }
    __syncthreads();
    if constexpr (L::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < L::kSteps; ++step) {
        const uint4 v = *reinterpret_cast<const uint4*>(fragments + ((warp_m * L::kSteps + step) * 32 + lane) * 16);
        q_reg[step][0] = v.x, q_reg[step][1] = v.y, q_reg[step][2] = v.z, q_reg[step][3] = v.w;
      }
    }
  }

  const float bmm1 = (p.bmm1_tensor ? *p.bmm1_tensor : p.bmm1) * kLog2e;
  float acc[MT][L::kBlocksJ][4];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int j = 0; j < L::kBlocksJ; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][j][i] = 0.f;
  float max_pv[MT][2];  // running maximum of the rows this thread accumulates
  float sum[L::kTilesM][2];
#pragma unroll
  for (int m = 0; m < MT; ++m) max_pv[m][0] = max_pv[m][1] = -INFINITY;
#pragma unroll
  for (int m = 0; m < L::kTilesM; ++m) sum[m][0] = sum[m][1] = 0.f;
  float scale[L::kTilesM][2];
  __syncthreads();
#pragma unroll
  for (int m = 0; m < L::kTilesM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      scale[m][h] = bmm1 * (FP8 ? q_scale[(warp_m * L::kTilesM + m) * 16 + g + h * 8] : 1.f);

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % L::kStages;
    const uint8_t* const rows = smem + L::kRing + stage * kStageBytes;
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
    float s[L::kTilesM][L::kBlocksN][4];
#pragma unroll
    for (int m = 0; m < L::kTilesM; ++m)
#pragma unroll
      for (int n = 0; n < L::kBlocksN; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
    constexpr int kStepsChunk = kPerChunk / 4;
    constexpr int kChunks = L::kSteps / kStepsChunk;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t b[L::kBlocksN][2 * kStepsChunk];
#pragma unroll
      for (int n = 0; n < L::kBlocksN; ++n) {
        const int row = group * L::kKeysWarp + n * 8 + g;
        const uint4 v = *reinterpret_cast<const uint4*>(rows + row * L::kRowBytes + ((c * 4 + t) ^ swizzle(row)) * 16);
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
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
      for (int u = 0; u < kStepsChunk; ++u) {
        const int step = c * kStepsChunk + u;
#pragma unroll
        for (int m = 0; m < L::kTilesM; ++m) {
          uint32_t a[4];
          if constexpr (L::kQInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = q_reg[step][i];
          } else {
            const uint4 v = *reinterpret_cast<const uint4*>(smem + L::kQ + (((warp_m * L::kTilesM + m) * L::kSteps + step) * 32 + lane) * 16);
            a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
          }
#pragma unroll
          for (int n = 0; n < L::kBlocksN; ++n) Mma::mma(s[m][n], a, b[n][2 * u], b[n][2 * u + 1]);
        }
      }
    }
    const float* const bias = reinterpret_cast<const float*>(smem + L::kBias) + stage * L::kKeys + group * L::kKeysWarp;
#pragma unroll
    for (int m = 0; m < L::kTilesM; ++m) {
      float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int n = 0; n < L::kBlocksN; ++n) {
        const float2 key_bias = *reinterpret_cast<const float2*>(bias + n * 8 + 2 * t);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[m][n][2 * h] = fmaf(s[m][n][2 * h], scale[m][h], key_bias.x);
          s[m][n][2 * h + 1] = fmaf(s[m][n][2 * h + 1], scale[m][h], key_bias.y);
          largest[h] = fmaxf(largest[h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
        if (t == 0) row_max[((warp_m * L::kTilesM + m) * 16 + g + h * 8) * L::kGroups + group] = largest[h];
      }
    }
    __syncthreads();

    // ---- new maxima, for the rows this thread accumulates; weights of the rows it scored
    float correction[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4* const all = reinterpret_cast<const float4*>(row_max + (m * 16 + g + h * 8) * L::kGroups);
        float largest = max_pv[m][h];
#pragma unroll
        for (int i = 0; i < L::kGroups / 4; ++i) {
          const float4 v = all[i];
          largest = fmaxf(largest, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
        }
        correction[m][h] = largest == -INFINITY ? 1.f : exp2_fast(max_pv[m][h] - largest);
        max_pv[m][h] = largest;
      }
#pragma unroll
    for (int m = 0; m < L::kTilesM; ++m) {
      float shift[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // warp_m is a run-time value; selecting keeps max_pv in registers.
        float factor = correction[m][h];
        shift[h] = max_pv[m][h];
#pragma unroll
        for (int w = 1; w < L::kWarpsM; ++w)
          if (warp_m == w) shift[h] = max_pv[w * L::kTilesM + m][h], factor = correction[w * L::kTilesM + m][h];
        if (shift[h] == -INFINITY) shift[h] = 0.f;
        sum[m][h] *= factor;
      }
      // The scores of two blocks of 8 keys lie in registers as the weights' A fragment of 16 keys needs them.
#pragma unroll
      for (int n = 0; n < L::kBlocksN; ++n) {
        const int block = group * L::kBlocksN + n;
        uint8_t* const to = smem + L::kP + (((warp_m * L::kTilesM + m) * (L::kKeys / 16) + block / 2) * 32 + lane) * 16 + block % 2 * 8;
        uint32_t high[2], low[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = exp2_fast(s[m][n][2 * h] - shift[h]), y = exp2_fast(s[m][n][2 * h + 1] - shift[h]);
          sum[m][h] += x + y;
          if constexpr (FP8) {
            const __half2 v = __floats2half2_rn(x, y);
            high[h] = reinterpret_cast<const uint32_t&>(v);
          } else {
            const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
            const float2 back = __bfloat1622float2(v);
            const __nv_bfloat162 rest = __floats2bfloat162_rn(x - back.x, y - back.y);
            high[h] = reinterpret_cast<const uint32_t&>(v), low[h] = reinterpret_cast<const uint32_t&>(rest);
          }
        }
        *reinterpret_cast<uint2*>(to) = make_uint2(high[0], high[1]);
        if constexpr (!FP8) *reinterpret_cast<uint2*>(to + L::kPTerm) = make_uint2(low[0], low[1]);
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int j = 0; j < L::kBlocksJ; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][j][i] *= correction[m][i / 2];
    __syncthreads();

    // ---- weights times rows: this warp's dimensions, all heads and keys. Column n of block j is
    // dimension kRun * n + j, so that a thread reads the dimensions of all its blocks at once.
#pragma unroll
    for (int k = 0; k < L::kKeys / 16; ++k) {
      uint32_t b[L::kBlocksJ][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Two keys, kRun dimensions of each; a register takes one dimension of both.
        const int row = k * 16 + half * 8 + 2 * t;
        const uint8_t* const at = rows + row * L::kRowBytes;
        if constexpr (FP8) {
          constexpr int kWords = L::kRun / 4;
          const int chunk = (warp * L::kDimsWarp + g * L::kRun) / 16, within = g * L::kRun % 16;
          uint32_t x[kWords], y[kWords];
          read_words<kWords>(x, at + (chunk ^ swizzle(row)) * 16 + within);
          read_words<kWords>(y, at + L::kRowBytes + (chunk ^ swizzle(row + 1)) * 16 + within);
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            const uint32_t low = __byte_perm(x[w], y[w], 0x5140), high = __byte_perm(x[w], y[w], 0x7362);
            b[w * 4][half] = e4m3_low(low), b[w * 4 + 1][half] = e4m3_high(low);
            b[w * 4 + 2][half] = e4m3_low(high), b[w * 4 + 3][half] = e4m3_high(high);
          }
        } else {
#pragma unroll
          for (int q = 0; q < L::kBlocksJ / 8; ++q) {
            const int chunk = (warp * L::kDimsWarp + q * 64) / 8 + g;
            uint32_t x[4], y[4];
            read_words<4>(x, at + (chunk ^ swizzle(row)) * 16);
            read_words<4>(y, at + L::kRowBytes + (chunk ^ swizzle(row + 1)) * 16);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              b[q * 8 + 2 * w][half] = __byte_perm(x[w], y[w], 0x5410);
              b[q * 8 + 2 * w + 1][half] = __byte_perm(x[w], y[w], 0x7632);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int term = 0; term < L::kPTerms; ++term) {
          const uint4 v = *reinterpret_cast<const uint4*>(smem + L::kP + term * L::kPTerm + ((m * (L::kKeys / 16) + k) * 32 + lane) * 16);
          const uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int j = 0; j < L::kBlocksJ; ++j) Mma::mma(acc[m][j], a, b[j][0], b[j][1]);
        }
    }
  }

  // ---- denominators: over the four threads of a row, then over the warps that shared the keys
  wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < L::kTilesM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[m][h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (t == 0) row_max[((warp_m * L::kTilesM + m) * 16 + g + h * 8) * L::kGroups + group] = total;
    }
  if (warp == 0 && t == 0)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) row_stat[m * 16 + g + h * 8] = max_pv[m][h];
  __syncthreads();
  if (threadIdx.x < MT * 16) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < L::kGroups; ++i) total += row_max[threadIdx.x * L::kGroups + i];
    row_stat[MT * 16 + threadIdx.x] = total;
  }
  const float bmm2 = p.bmm2_tensor ? *p.bmm2_tensor : p.bmm2;
  // Dimension of column 2t + i of block 8q; the blocks up to 8q + 7 hold the next ones.
  auto first_dim = [&](int i, int q) {
    return warp * L::kDimsWarp + (2 * t + i) * L::kRun + (L::kRun == 16 ? q * 8 : q * 64);
  };

  if (p.splits == 1) {
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m * 16 + g + h * 8, head = head0 + row;
        if (head >= p.heads) continue;
        const float largest = row_stat[row], sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
        float shift = fmaxf(largest, sink);
        if (shift == -INFINITY) shift = 0.f;
        const float mine = exp2_fast(largest - shift);
        const float total = row_stat[MT * 16 + row] * mine + exp2_fast(sink - shift);
        const float factor = total > 0.f ? bmm2 * mine / total : 0.f;
        __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int q = 0; q < L::kBlocksJ / 8; ++q) {
            uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const __nv_bfloat162 two = __floats2bfloat162_rn(acc[m][q * 8 + 2 * j][2 * h + i] * factor,
                                                               acc[m][q * 8 + 2 * j + 1][2 * h + i] * factor);
              packed[j] = reinterpret_cast<const uint32_t&>(two);
            }
            *reinterpret_cast<uint4*>(to + first_dim(i, q)) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
          }
      }
    return;
  }

  // ---- splits are the blocks of a cluster: each adds up its share of the output from everybody's shared memory
  float* const partial = reinterpret_cast<float*>(smem);  // [rows][512], in place of the ring
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int q = 0; q < L::kBlocksJ / 8; ++q) {
          float4* const to = reinterpret_cast<float4*>(partial + (m * 16 + g + h * 8) * kDim + first_dim(i, q));
#pragma unroll
          for (int j = 0; j < 2; ++j)
            to[j] = make_float4(acc[m][q * 8 + 4 * j][2 * h + i], acc[m][q * 8 + 4 * j + 1][2 * h + i],
                                acc[m][q * 8 + 4 * j + 2][2 * h + i], acc[m][q * 8 + 4 * j + 3][2 * h + i]);
        }
    }
  cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  const int rows_here = min(MT * 16, p.heads - head0);
  for (int i = split * kThreads + threadIdx.x; i < rows_here * (kDim / 4); i += p.splits * kThreads) {
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
      total += weight * stat[MT * 16 + row];
      const float4 v = reinterpret_cast<const float4*>(cluster.map_shared_rank(partial, r))[i];
      value.x += weight * v.x, value.y += weight * v.y, value.z += weight * v.z, value.w += weight * v.w;
    }
    const float factor = total > 0.f ? bmm2 / total : 0.f;
    const __nv_bfloat162 x = __floats2bfloat162_rn(value.x * factor, value.y * factor);
    const __nv_bfloat162 y = __floats2bfloat162_rn(value.z * factor, value.w * factor);
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + i % (kDim / 4) * 4) =
        make_uint2(reinterpret_cast<const uint32_t&>(x), reinterpret_cast<const uint32_t&>(y));
  }
  cluster.sync();  // nobody leaves while its shared memory is read
}

template <bool FP8, int MT, int WARPS>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  using L = Layout<FP8, MT, WARPS>;
  static_assert(L::kBlocksSM * (L::kTotal + 1024) <= 228 * 1024, "more shared memory than an SM has");
  static_assert(MT * 16 * kDim * 4 <= L::kStages * L::kStageBytes, "partial output must fit the ring");
  auto* const kernel = sparse_mla_kernel<FP8, MT, WARPS>;
  static const cudaError_t configured =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kTotal);
  if (configured != cudaSuccess) return configured;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.tokens * p.head_blocks * p.splits));
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kTotal;
  config.stream = stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(p.splits), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// How many blocks share a token's keys: 1, 2, 4 or 8, a function of the shapes alone. A cluster of several blocks
// must fit into one group of SMs (16 or 18 on an H200), so that large ones leave some SMs without work.
int key_splits(int blocks, int width, bool paired) {
  int splits = 1;
  while (splits < 8 && 2 * splits * blocks <= (paired ? 264 : 66) && 64 * splits < width) splits *= 2;
  return splits == 1 && 2 * blocks <= 132 && width > 64 ? 2 : splits;
}

template <bool FP8>
cudaError_t dispatch(const SparseMla& call, cudaStream_t stream) {
  Params p;
  static_cast<SparseMla&>(p) = call;
  const int rows = p.heads <= 16 ? 16 : p.heads <= 32 ? 32 : 64;
  p.head_blocks = (p.heads + rows - 1) / rows;
  const int blocks = p.tokens * p.head_blocks;
  // Two small blocks an SM, one computing while the other waits, are faster where there is work for all SMs.
  const bool paired = rows == 16 && blocks > 32;
  p.splits = key_splits(blocks, p.width, paired);
  if (paired) return launch<FP8, 1, 4>(p, stream);
  if (rows == 16) return launch<FP8, 1, 8>(p, stream);
  if (rows == 32) return launch<FP8, 2, 8>(p, stream);
  return launch<FP8, 4, 8>(p, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_sm90(const SparseMla& call, cudaStream_t stream) {
  return call.rows_are_fp8 ? dispatch<true>(call, stream) : dispatch<false>(call, stream);
}

}  // namespace dsv4
