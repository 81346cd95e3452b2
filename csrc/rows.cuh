// Row formats: how a row of a cache becomes operands. A row has up to two parts: narrow, E4M3, which is widened to fp16
// on its way into a product, and wide, BF16. Each is a key's dimensions, narrow first; values are the first 512.
#pragma once

#include "sm90_ptx.cuh"
#include "sparse_mla_rows.h"

namespace mla {

enum class Scales { kNone, kUe8m0, kFloat };

template <RowFormat FORMAT>
struct Rows;

template <>
struct Rows<RowFormat::kE4M3> {
  static constexpr int kNarrow = 512, kWide = 0, kGroup = 0;
  static constexpr Scales kScales = Scales::kNone;
};
template <>
struct Rows<RowFormat::kBf16> {
  static constexpr int kNarrow = 0, kWide = 512, kGroup = 0;
  static constexpr Scales kScales = Scales::kNone;
};
template <>
struct Rows<RowFormat::kV4> {
  static constexpr int kNarrow = 448, kWide = 64, kGroup = 64;  // dimensions that a scale is for
  static constexpr Scales kScales = Scales::kUe8m0;
};
template <>
struct Rows<RowFormat::kV32> {
  static constexpr int kNarrow = 512, kWide = 64, kGroup = 128;
  static constexpr Scales kScales = Scales::kFloat;
};
template <>
struct Rows<RowFormat::kBf576> {
  static constexpr int kNarrow = 0, kWide = 576, kGroup = 0;
  static constexpr Scales kScales = Scales::kNone;
};

// What follows from that for the kernels.
template <RowFormat FORMAT>
struct RowLayout : Rows<FORMAT> {
  using R = Rows<FORMAT>;
  static constexpr bool kIsScaled = R::kScales != Scales::kNone;
  static constexpr int kDims = R::kNarrow + R::kWide;            // of a key
  static constexpr bool kHasWideValues = R::kNarrow < kDim;      // and these are the last of the 512
  static constexpr int kGroups = kIsScaled ? R::kNarrow / R::kGroup : 0;
  static constexpr int kScaleBytes = R::kScales == Scales::kUe8m0 ? 8 : R::kScales == Scales::kFloat ? 16 : 0;
  // Packed rows do not begin where lines of 128 bytes do, of which whole ones would be read for the ends of a row.
  static constexpr int kPrefetch = kIsScaled ? 64 : 128;
  // In global memory, where float scales lie between the parts.
  static constexpr int kWideAt = R::kNarrow + (R::kScales == Scales::kFloat ? kScaleBytes : 0);
  // In shared memory both parts are lines of 128 bytes, of which the last of the narrow part may be half empty.
  static constexpr int kWideLine = (R::kNarrow + 127) / 128, kPitch = kWideLine * 128 + R::kWide * 2;

  // A chunk of 16 bytes, of which eight lanes copy a line at a time: from where in a row, to which chunk of which line.
  struct Chunk {
    bool exists;
    int from, line, at;
  };
  static constexpr int kHalf = R::kNarrow % 128 / 16;  // chunks in the last narrow line
  static constexpr int kLines = (R::kNarrow + R::kWide * 2 + 127) / 128;
  static __device__ __forceinline__ Chunk chunk(int line, int lane) {
    static_assert(kHalf == 0 || kHalf == 4, "a half line of either part is copied at once");
    const bool is_wide = line > R::kNarrow / 128 || (line == R::kNarrow / 128 && lane >= kHalf);
    const int from = line * 128 + lane * 16 + (is_wide ? kWideAt - R::kNarrow : 0);
    if (kHalf == 0) return {true, from, line, lane};
    // The wide part begins in the middle of a line that is copied, and ends so.
    return {line < kLines - 1 || lane < kHalf, from, is_wide && lane >= kHalf ? line + 1 : line,
            is_wide ? lane ^ kHalf : lane};
  }
};

// The float32 scales of a row, from shared memory, where the rows' lie one after another; nothing for other formats.
template <Scales SCALES>
struct RowScales {};
template <>
struct RowScales<Scales::kFloat> {
  float4 raw;
  RowScales() = default;
  __device__ __forceinline__ RowScales(const uint8_t* scales, int row)
      : raw(*reinterpret_cast<const float4*>(scales + row * 16)) {}
  __device__ __forceinline__ float of_group(int i) const {
    return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
  }
};

// A power of two above the scales of a row, as its logarithm and its inverse: weights are multiplied by it, and scales
// divided, so that products with fp16 weights stay in range. Within 2^100, where float32 holds sums of either.
struct RowPower {
  float log2, inverse;
};
__device__ __forceinline__ RowPower row_power(float largest_scale) {
  const int e = min(max((__float_as_int(largest_scale) >> 23) + 1, 127 - 100), 127 + 100);
  return {static_cast<float>(e - 127), __int_as_float((254 - e) << 23)};
}

}  // namespace mla
