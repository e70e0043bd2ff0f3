// Sixteen lanes on AVX-512 with VNNI: one 512-bit register. Unnamed namespace: each folder has its own copy.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 8;      // rows per micro-tile: 8 accumulators hide the latency of a dot product
constexpr int kMeasureSums = 12;  // two ports, five cycles of latency

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};

static inline F32 zero_f32() {
  return {_mm512_setzero_ps()};
}
static inline F32 set1(float x) {
  return {_mm512_set1_ps(x)};
}
static inline F32 load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
static inline void store(float* p, F32 x) {
  _mm512_storeu_ps(p, x.v);
}
static inline F32 fma(F32 x, F32 y, F32 z) {
  return {_mm512_fmadd_ps(x.v, y.v, z.v)};
}
static inline F32 add(F32 x, F32 y) {
  return {_mm512_add_ps(x.v, y.v)};
}
static inline F32 sub(F32 x, F32 y) {
  return {_mm512_sub_ps(x.v, y.v)};
}
static inline F32 mul(F32 x, F32 y) {
  return {_mm512_mul_ps(x.v, y.v)};
}
static inline F32 div(F32 x, F32 y) {
  return {_mm512_div_ps(x.v, y.v)};
}
static inline F32 max(F32 x, F32 y) {
  return {_mm512_max_ps(x.v, y.v)};
}
static inline F32 min(F32 x, F32 y) {
  return {_mm512_min_ps(x.v, y.v)};
}
static inline F32 neg(F32 x) {
  return {_mm512_castsi512_ps(
      _mm512_xor_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(static_cast<int32_t>(0x80000000u))))};
}
static inline F32 abs(F32 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)))};
}

static inline I32 zero_i32() {
  return {_mm512_setzero_si512()};
}
static inline I32 set1_i32(int32_t x) {
  return {_mm512_set1_epi32(x)};
}
static inline I32 load_i32(const int32_t* p) {
  return {_mm512_loadu_si512(p)};
}
static inline void store_i32(int32_t* p, I32 x) {
  _mm512_storeu_si512(p, x.v);
}
static inline I32 add(I32 x, I32 y) {
  return {_mm512_add_epi32(x.v, y.v)};
}
static inline I32 sub(I32 x, I32 y) {
  return {_mm512_sub_epi32(x.v, y.v)};
}
static inline I32 mul(I32 x, I32 y) {
  return {_mm512_mullo_epi32(x.v, y.v)};
}
static inline F32 to_f32(I32 x) {
  return {_mm512_cvtepi32_ps(x.v)};
}
static inline I32 to_i32(F32 x) {
  return {_mm512_cvtps_epi32(x.v)};
}  // nearest even
static inline F32 pow2(I32 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}

// Lane i keeps x where first <= i < last, else takes y.
static inline F32 keep_lanes(F32 x, F32 y, int first, int last) {
  const unsigned below_last = last >= 16 ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1;
  const unsigned below_first = first >= 16 ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below_last & ~below_first), y.v, x.v)};
}

static inline __m256 upper(__m512 x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}

static inline float largest_lane(F32 x) {
  const __m256 m = _mm256_max_ps(_mm512_castps512_ps256(x.v), upper(x.v));
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  h = _mm_max_ss(h, _mm_movehdup_ps(h));
  return _mm_cvtss_f32(h);
}

// lane[i] += lane[i + 8], then 4, 2, 1: the fixed tree.
static inline float sum_tree(F32 x) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x.v), upper(x.v));
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  h = _mm_add_ss(h, _mm_movehdup_ps(h));
  return _mm_cvtss_f32(h);
}

static inline __m256i load_words(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline F32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(load_words(p))};
}
static inline F32 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16))};
}

// p: [16][2] bf16; even gets element 0 of each pair, odd element 1.
static inline void load_bf16_pairs(const uint16_t* p, F32& even, F32& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))))};
}

// One pair of bf16 in every lane, widened: even holds p[0], odd p[1].
static inline void broadcast_bf16_pair(const uint16_t* p, F32& even, F32& odd) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  const __m512i pair = _mm512_set1_epi32(bits);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))))};
}

static inline void store_bf16(uint16_t* p, F32 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(chosen));
}

// Values already within int8.
static inline void store_i8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}

static inline __m512i broadcast4(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}

// Sixteen outputs x four k of signed weights. vpdpbusd multiplies unsigned by signed bytes: the weights are raised
// by 128, and the sum starts at -128 times the sum of x, which the quantiser provides.
struct Int8Weights {
  __m512i raised;
};
static inline Int8Weights load_int8(const int8_t* p) {
  return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int32_t>(0x80808080u)))};
}
static inline I32 int8_start(int32_t x_sum) {
  return set1_i32(-128 * x_sum);
}
static inline I32 dot4(I32 acc, const Int8Weights& w, const int8_t* x4) {
  return {_mm512_dpbusd_epi32(acc.v, w.raised, broadcast4(x4))};
}

// Sixteen outputs x eight k of int4 (unsigned 0..15): low nibbles k..k+3, high nibbles k+4..k+7.
struct Int4Weights {
  __m512i low, high;
};
static inline Int4Weights load_int4(const uint8_t* p) {
  const __m512i bytes = _mm512_loadu_si512(p), mask = _mm512_set1_epi32(0x0f0f0f0f);
  return {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi32(bytes, 4), mask)};
}
static inline I32 dot8(I32 acc, const Int4Weights& w, const int8_t* x8) {
  return {_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc.v, w.low, broadcast4(x8)), w.high, broadcast4(x8 + 4))};
}

}  // namespace
