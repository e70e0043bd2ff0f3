// int8 per channel, int8 and int4 grouped linear over any folder's simd.h: layout k4 (docs/ops.md).
#pragma once

#include "kernels/shared/linear_float.h"

namespace {

using neoserve::Offset;
using neoserve::ScaleType;

template <ScaleType Type>
static inline F32 load_scales(const void* store, size_t index) {
  if constexpr (Type == ScaleType::kF16) {
    return load_f16(static_cast<const uint16_t*>(store) + index);
  } else {
    return load(static_cast<const float*>(store) + index);
  }
}

static inline I32 load_zeros(const void* store, size_t index) {
  int32_t lanes[kBlock];
  for (int i = 0; i < kBlock; ++i) lanes[i] = static_cast<const uint8_t*>(store)[index + static_cast<size_t>(i)];
  return load_i32(lanes);
}

template <int M>
struct IntRows {
  const int8_t* x[M];
  const float* scales[M];
  const int32_t* sums[M];
  IntRows(const LinearArgs& a, int32_t row) {
    for (int m = 0; m < M; ++m) {
      const size_t index = static_cast<size_t>(row + m);
      x[m] = static_cast<const int8_t*>(a.x) + index * a.x_stride;
      scales[m] = a.x_scales + index * a.x_groups;
      sums[m] = a.x_sums + index * a.x_groups;
    }
  }
};

template <int M>
static __attribute__((noinline)) void tile_int8_channel(const LinearArgs& a, int32_t row, int32_t block) {
  const IntRows<M> rows(a, row);
  const int8_t* w =
      static_cast<const int8_t*>(a.weights) + static_cast<size_t>(block) * static_cast<size_t>(a.k) * kBlock;
  I32 acc[M];
  for (int m = 0; m < M; ++m) acc[m] = int8_start(*rows.sums[m]);
  for (int32_t k = 0; k < a.k; k += 4) {
    const Int8Weights wk = load_int8(w + static_cast<size_t>(k) * kBlock);
    for (int m = 0; m < M; ++m) acc[m] = dot4(acc[m], wk, rows.x[m] + k);
  }
  const F32 scale = load(static_cast<const float*>(a.scales) + static_cast<size_t>(block) * kBlock);
  for (int m = 0; m < M; ++m) store_outputs(a, row + m, block, mul(to_f32(acc[m]), mul(set1(*rows.scales[m]), scale)));
}

// One group's share of the sum: the integer dot product, scaled, and the minimum's part.
template <ScaleType Type, Offset Kind>
static inline F32 add_group(const LinearArgs& a, F32 acc, I32 isum, F32 scale, float x_scale, int32_t x_sum,
                            size_t index) {
  if constexpr (Kind == Offset::kZero) isum = sub(isum, mul(load_zeros(a.offsets, index), set1_i32(x_sum)));
  acc = fma(to_f32(isum), mul(set1(x_scale), scale), acc);
  if constexpr (Kind == Offset::kMinimum) {
    acc = fma(set1(static_cast<float>(x_sum)), mul(set1(x_scale), load_scales<Type>(a.offsets, index)), acc);
  }
  return acc;
}

template <int M, ScaleType Type, Offset Kind>
static __attribute__((noinline)) void tile_int8_group(const LinearArgs& a, int32_t row, int32_t block) {
  const IntRows<M> rows(a, row);
  const int32_t group = a.format.group;
  const size_t groups = static_cast<size_t>(a.k / group);
  const int8_t* w =
      static_cast<const int8_t*>(a.weights) + static_cast<size_t>(block) * static_cast<size_t>(a.k) * kBlock;
  F32 acc[M];
  for (int m = 0; m < M; ++m) acc[m] = zero_f32();
  for (size_t g = 0; g < groups; ++g) {
    const int32_t first = static_cast<int32_t>(g) * group;
    I32 isum[M];
    for (int m = 0; m < M; ++m) isum[m] = int8_start(rows.sums[m][g]);
    for (int32_t k = first; k < first + group; k += 4) {
      const Int8Weights wk = load_int8(w + static_cast<size_t>(k) * kBlock);
      for (int m = 0; m < M; ++m) isum[m] = dot4(isum[m], wk, rows.x[m] + k);
    }
    const size_t index = (static_cast<size_t>(block) * groups + g) * kBlock;
    const F32 scale = load_scales<Type>(a.scales, index);
    for (int m = 0; m < M; ++m) {
      acc[m] = add_group<Type, Kind>(a, acc[m], isum[m], scale, rows.scales[m][g], rows.sums[m][g], index);
    }
  }
  for (int m = 0; m < M; ++m) store_outputs(a, row + m, block, acc[m]);
}

template <int M, ScaleType Type, Offset Kind>
static __attribute__((noinline)) void tile_int4_group(const LinearArgs& a, int32_t row, int32_t block) {
  const IntRows<M> rows(a, row);
  const int32_t group = a.format.group;
  const size_t groups = static_cast<size_t>(a.k / group);
  const uint8_t* w =
      static_cast<const uint8_t*>(a.weights) + static_cast<size_t>(block) * static_cast<size_t>(a.k) * (kBlock / 2);
  F32 acc[M];
  for (int m = 0; m < M; ++m) acc[m] = zero_f32();
  for (size_t g = 0; g < groups; ++g) {
    const int32_t first = static_cast<int32_t>(g) * group;
    I32 isum[M];
    for (int m = 0; m < M; ++m) isum[m] = zero_i32();
    for (int32_t k = first; k < first + group; k += 8) {
      const Int4Weights wk = load_int4(w + static_cast<size_t>(k) * (kBlock / 2));
      for (int m = 0; m < M; ++m) isum[m] = dot8(isum[m], wk, rows.x[m] + k);
    }
    const size_t index = (static_cast<size_t>(block) * groups + g) * kBlock;
    const F32 scale = load_scales<Type>(a.scales, index);
    for (int m = 0; m < M; ++m) {
      acc[m] = add_group<Type, Kind>(a, acc[m], isum[m], scale, rows.scales[m][g], rows.sums[m][g], index);
    }
  }
  for (int m = 0; m < M; ++m) store_outputs(a, row + m, block, acc[m]);
}

struct IntTiles {
  Tile full, two, one;
};

static inline void walk_int(const LinearArgs& a, IntTiles tiles) {
  int32_t row = 0;
  for (; row + kTileRows <= a.rows; row += kTileRows) {
    for (int32_t b = a.block_begin; b < a.block_end; ++b) tiles.full(a, row, b);
  }
  for (; row + 2 <= a.rows; row += 2) {
    for (int32_t b = a.block_begin; b < a.block_end; ++b) tiles.two(a, row, b);
  }
  for (; row < a.rows; ++row) {
    for (int32_t b = a.block_begin; b < a.block_end; ++b) tiles.one(a, row, b);
  }
}

static inline void walk_int8_channel(const LinearArgs& a) {
  walk_int(a, {tile_int8_channel<kTileRows>, tile_int8_channel<2>, tile_int8_channel<1>});
}

template <ScaleType Type, Offset Kind>
static inline void walk_int8_group_as(const LinearArgs& a) {
  walk_int(a, {tile_int8_group<kTileRows, Type, Kind>, tile_int8_group<2, Type, Kind>, tile_int8_group<1, Type, Kind>});
}

template <ScaleType Type, Offset Kind>
static inline void walk_int4_group_as(const LinearArgs& a) {
  walk_int(a, {tile_int4_group<kTileRows, Type, Kind>, tile_int4_group<2, Type, Kind>, tile_int4_group<1, Type, Kind>});
}

#define NEOSERVE_DISPATCH(WALK)                                                                                    \
  static inline void WALK(const LinearArgs& a) {                                                                   \
    const bool half = a.format.scale_type == ScaleType::kF16;                                                      \
    switch (a.format.offset) {                                                                                     \
      case Offset::kNone:                                                                                          \
        return half ? WALK##_as<ScaleType::kF16, Offset::kNone>(a) : WALK##_as<ScaleType::kF32, Offset::kNone>(a); \
      case Offset::kZero:                                                                                          \
        return half ? WALK##_as<ScaleType::kF16, Offset::kZero>(a) : WALK##_as<ScaleType::kF32, Offset::kZero>(a); \
      case Offset::kMinimum:                                                                                       \
        return half ? WALK##_as<ScaleType::kF16, Offset::kMinimum>(a)                                              \
                    : WALK##_as<ScaleType::kF32, Offset::kMinimum>(a);                                             \
    }                                                                                                              \
  }

NEOSERVE_DISPATCH(walk_int8_group)
NEOSERVE_DISPATCH(walk_int4_group)
#undef NEOSERVE_DISPATCH

}  // namespace
