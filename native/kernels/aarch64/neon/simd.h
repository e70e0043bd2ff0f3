// Advanced SIMD baseline (Armv8.0): no dot product; widening multiplies and pairwise sums.
#pragma once

#include "kernels/aarch64/neon/lanes.h"

namespace {

static inline I32 dot4(I32 acc, const Int8Weights& w, const int8_t* x4) {
  const int8x16_t x = broadcast4(x4);
  for (int i = 0; i < 4; ++i) {
    // A product is at most 128 * 127, so sums of pairs are taken at 32 bits.
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w.v[i]), vget_low_s8(x)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(w.v[i], x));
    acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(low, high));
  }
  return acc;
}

static inline I32 dot8(I32 acc, const Int4Weights& w, const int8_t* x8) {
  return dot4(dot4(acc, w.low, x8), w.high, x8 + 4);
}

}  // namespace
