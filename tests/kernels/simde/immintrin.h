// TEST ONLY. Stands before the compiler's <immintrin.h> when NEOSERVE_EMULATE is on: the AVX-512, VNNI and AVX-VNNI
// intrinsics that the kernel folders use are SIMDe's, on AVX2. What SIMDe 0.7.4 lacks is below, each from halves of 256
// bits as Intel's guide defines it. This proves the logic of a row, not the instructions a compiler picks for it.
#pragma once

#include_next <immintrin.h>

#ifndef __AVX2__
#error "emulated kernel folders are compiled with -mavx2 -mfma -mf16c"
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace neoserve_emulated {
namespace {

template <class Half>
inline simde__m512i join(Half low, Half high) {
  simde__m512i_private out;
  out.m256i[0] = low;
  out.m256i[1] = high;
  return simde__m512i_from_private(out);
}

inline simde__m512 join_ps(__m256 low, __m256 high) {
  simde__m512_private out;
  out.m256[0] = low;
  out.m256[1] = high;
  return simde__m512_from_private(out);
}

inline __m256i half(simde__m512i x, int index) {
  return simde__m512i_to_private(x).m256i[index];
}
inline __m256 half(simde__m512 x, int index) {
  return simde__m512_to_private(x).m256[index];
}

inline simde__m512 cvtepi32_ps(simde__m512i x) {
  return join_ps(_mm256_cvtepi32_ps(half(x, 0)), _mm256_cvtepi32_ps(half(x, 1)));
}

inline simde__m512i cvtps_epi32(simde__m512 x) {
  return join(_mm256_cvtps_epi32(half(x, 0)), _mm256_cvtps_epi32(half(x, 1)));
}

inline simde__m512i cvtepu16_epi32(__m256i x) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}

inline simde__m512 cvtph_ps(__m256i x) {
  return join_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}

// Both truncate: the low bits of every lane, whatever the rest is.
inline __m256i cvtepi32_epi16(simde__m512i x) {
  int32_t lanes[16];
  int16_t out[16];
  __builtin_memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int16_t>(lanes[i]);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(out));
}

inline __m128i cvtepi32_epi8(simde__m512i x) {
  int32_t lanes[16];
  int8_t out[16];
  __builtin_memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int8_t>(lanes[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(out));
}

}  // namespace
}  // namespace neoserve_emulated

#define _mm512_cvtepi32_ps(x) neoserve_emulated::cvtepi32_ps(x)
#define _mm512_cvtps_epi32(x) neoserve_emulated::cvtps_epi32(x)
#define _mm512_cvtepu16_epi32(x) neoserve_emulated::cvtepu16_epi32(x)
#define _mm512_cvtph_ps(x) neoserve_emulated::cvtph_ps(x)
#define _mm512_cvtepi32_epi16(x) neoserve_emulated::cvtepi32_epi16(x)
#define _mm512_cvtepi32_epi8(x) neoserve_emulated::cvtepi32_epi8(x)
#define _mm256_dpbusd_avx_epi32(sum, u, s) simde_mm256_dpbusd_epi32(sum, u, s)
