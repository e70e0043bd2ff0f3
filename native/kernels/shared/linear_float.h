// f32 and bf16 linear over any folder's simd.h (included before this file). See docs/ops.md.
#pragma once

#include "ops/contract.h"

namespace {

using neoserve::kBlock;
using neoserve::LinearArgs;

// Bias, accumulation and the last, partial block.
static inline void store_outputs(const LinearArgs& a, int32_t row, int32_t block, F32 y) {
  const int32_t n = block * kBlock;
  float* out = a.out + static_cast<size_t>(row) * a.out_stride + n;
  if (n + kBlock <= a.n) {
    if (a.bias != nullptr) y = add(y, load(a.bias + n));
    if (a.accumulate) y = add(load(out), y);
    store(out, y);
    return;
  }
  float lanes[kBlock];
  store(lanes, y);
  for (int32_t i = 0; i < a.n - n; ++i) {
    float value = lanes[i];
    if (a.bias != nullptr) value = value + a.bias[n + i];
    out[i] = a.accumulate ? out[i] + value : value;
  }
}

// M rows x NB blocks of 16 outputs, accumulated over k in order.
template <int M, int NB>
static __attribute__((noinline)) void tile_f32(const LinearArgs& a, int32_t row, int32_t block) {
  const size_t block_stride = static_cast<size_t>(a.k) * kBlock;
  const float* w = static_cast<const float*>(a.weights) + static_cast<size_t>(block) * block_stride;
  const float* x[M];
  for (int m = 0; m < M; ++m) {
    x[m] = reinterpret_cast<const float*>(static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row + m) * a.x_stride);
  }
  F32 acc[M][NB];
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < NB; ++b) acc[m][b] = zero_f32();
  }
  for (int32_t k = 0; k < a.k; ++k) {
    F32 wk[NB];
    for (int b = 0; b < NB; ++b)
      wk[b] = load(w + static_cast<size_t>(b) * block_stride + static_cast<size_t>(k) * kBlock);
    for (int m = 0; m < M; ++m) {
      const F32 xk = set1(x[m][k]);
      for (int b = 0; b < NB; ++b) acc[m][b] = fma(xk, wk[b], acc[m][b]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < NB; ++b) store_outputs(a, row + m, block + b, acc[m][b]);
  }
}

template <int M, int NB>
static __attribute__((noinline)) void tile_bf16(const LinearArgs& a, int32_t row, int32_t block) {
  const size_t block_stride = static_cast<size_t>(a.k) * kBlock;
  const uint16_t* w = static_cast<const uint16_t*>(a.weights) + static_cast<size_t>(block) * block_stride;
  const uint16_t* x[M];
  for (int m = 0; m < M; ++m) {
    x[m] =
        reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row + m) * a.x_stride);
  }
  F32 acc[M][NB];
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < NB; ++b) acc[m][b] = zero_f32();
  }
  for (int32_t k = 0; k < a.k; k += 2) {
    F32 even[NB], odd[NB];
    for (int b = 0; b < NB; ++b) {
      load_bf16_pairs(w + static_cast<size_t>(b) * block_stride + static_cast<size_t>(k) * kBlock, even[b], odd[b]);
    }
    for (int m = 0; m < M; ++m) {
      F32 x_even, x_odd;
      broadcast_bf16_pair(x[m] + k, x_even, x_odd);
      for (int b = 0; b < NB; ++b) acc[m][b] = fma(x_odd, odd[b], fma(x_even, even[b], acc[m][b]));
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < NB; ++b) store_outputs(a, row + m, block + b, acc[m][b]);
  }
}

using Tile = void (*)(const LinearArgs&, int32_t, int32_t);

// Full tiles of kTileRows rows; the rest by smaller ones. One or two rows take several blocks at once to cover
// the latency of fused multiply-add.
#define NEOSERVE_WALK(TILE)                                                                \
  static inline void walk_##TILE(const LinearArgs& a) {                                    \
    int32_t row = 0;                                                                       \
    for (; row + kTileRows <= a.rows; row += kTileRows) {                                  \
      for (int32_t b = a.block_begin; b < a.block_end; ++b) TILE<kTileRows, 1>(a, row, b); \
    }                                                                                      \
    for (; row + 2 <= a.rows; row += 2) {                                                  \
      int32_t b = a.block_begin;                                                           \
      for (; b + 2 <= a.block_end; b += 2) TILE<2, 2>(a, row, b);                          \
      for (; b < a.block_end; ++b) TILE<2, 1>(a, row, b);                                  \
    }                                                                                      \
    for (; row < a.rows; ++row) {                                                          \
      int32_t b = a.block_begin;                                                           \
      for (; b + 4 <= a.block_end; b += 4) TILE<1, 4>(a, row, b);                          \
      for (; b < a.block_end; ++b) TILE<1, 1>(a, row, b);                                  \
    }                                                                                      \
  }

NEOSERVE_WALK(tile_f32)
NEOSERVE_WALK(tile_bf16)
#undef NEOSERVE_WALK

}  // namespace
