// Advanced SIMD with the dot product instructions (Neoverse N1).
#pragma once

#include "kernels/aarch64/neon/lanes.h"

namespace {

static inline I32 dot4(I32 acc, const Int8Weights& w, const int8_t* x4) {
  const int8x16_t x = broadcast4(x4);
  for (int i = 0; i < 4; ++i) acc.v[i] = vdotq_s32(acc.v[i], w.v[i], x);
  return acc;
}

static inline I32 dot8(I32 acc, const Int4Weights& w, const int8_t* x8) {
  return dot4(dot4(acc, w.low, x8), w.high, x8 + 4);
}

}  // namespace
