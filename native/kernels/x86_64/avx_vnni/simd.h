// AVX2 lanes with AVX-VNNI's vpdpbusd (unsigned by signed bytes): |w| times (x with w's sign).
#pragma once

#include "kernels/x86_64/avx2/lanes.h"

namespace {

static inline I32 int8_start(int32_t) {
  return zero_i32();
}
static inline I32 dot4(I32 acc, const Int8Weights& w, const int8_t* x4) {
  const __m256i x = broadcast4(x4);
  return {_mm256_dpbusd_avx_epi32(acc.a, w.abs_a, _mm256_sign_epi8(x, w.a)),
          _mm256_dpbusd_avx_epi32(acc.b, w.abs_b, _mm256_sign_epi8(x, w.b))};
}
static inline I32 dot8(I32 acc, const Int4Weights& w, const int8_t* x8) {
  const __m256i low = broadcast4(x8), high = broadcast4(x8 + 4);
  return {_mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(acc.a, w.low_a, low), w.high_a, high),
          _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(acc.b, w.low_b, low), w.high_b, high)};
}

}  // namespace
