// AVX2 without a dot product: byte products in two steps.
#pragma once

#include "kernels/x86_64/avx2/lanes.h"

namespace {

static inline I32 int8_start(int32_t) {
  return zero_i32();
}
static inline I32 dot4(I32 acc, const Int8Weights& w, const int8_t* x4) {
  const __m256i x = broadcast4(x4), ones = _mm256_set1_epi16(1);
  const __m256i pa = _mm256_maddubs_epi16(w.abs_a, _mm256_sign_epi8(x, w.a));
  const __m256i pb = _mm256_maddubs_epi16(w.abs_b, _mm256_sign_epi8(x, w.b));
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(pa, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(pb, ones))};
}

static inline I32 dot8(I32 acc, const Int4Weights& w, const int8_t* x8) {
  const __m256i low = broadcast4(x8), high = broadcast4(x8 + 4), ones = _mm256_set1_epi16(1);
  // Four products of at most 15 * 127 stay far below the 16-bit bound.
  const __m256i pa = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_a, low), _mm256_maddubs_epi16(w.high_a, high));
  const __m256i pb = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_b, low), _mm256_maddubs_epi16(w.high_b, high));
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(pa, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(pb, ones))};
}

}  // namespace
