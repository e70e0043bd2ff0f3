// Sixteen lanes on AVX2 with FMA and F16C: two 256-bit registers. Unnamed namespace: each folder has its own copy.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 4;     // rows per micro-tile: 8 accumulators, 4 weight registers, 4 temporaries
constexpr int kMeasureSums = 5;  // ten registers of sums

struct F32 {
  __m256 a, b;
};
struct I32 {
  __m256i a, b;
};

static inline F32 zero_f32() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
static inline F32 set1(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
static inline F32 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static inline void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline F32 fma(F32 x, F32 y, F32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline F32 add(F32 x, F32 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline F32 sub(F32 x, F32 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
static inline F32 mul(F32 x, F32 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline F32 div(F32 x, F32 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
static inline F32 max(F32 x, F32 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
static inline F32 min(F32 x, F32 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
static inline F32 neg(F32 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
}
static inline F32 abs(F32 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

static inline I32 zero_i32() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
static inline I32 set1_i32(int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
static inline I32 load_i32(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
static inline void store_i32(int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
static inline I32 add(I32 x, I32 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
static inline I32 sub(I32 x, I32 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
static inline I32 mul(I32 x, I32 y) {
  return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
static inline F32 to_f32(I32 x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
static inline I32 to_i32(F32 x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}  // nearest even
static inline F32 pow2(I32 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}

// Lane i keeps x where first <= i < last, else takes y.
static inline F32 keep_lanes(F32 x, F32 y, int first, int last) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  const __m256i from = _mm256_set1_epi32(first - 1), to = _mm256_set1_epi32(last);
  const __m256i ma = _mm256_and_si256(_mm256_cmpgt_epi32(low, from), _mm256_cmpgt_epi32(to, low));
  const __m256i mb = _mm256_and_si256(_mm256_cmpgt_epi32(high, from), _mm256_cmpgt_epi32(to, high));
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(ma)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(mb))};
}

static inline float largest_lane(F32 x) {
  const __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  h = _mm_max_ss(h, _mm_movehdup_ps(h));
  return _mm_cvtss_f32(h);
}

// lane[i] += lane[i + 8], then 4, 2, 1: the fixed tree.
static inline float sum_tree(F32 x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  h = _mm_add_ss(h, _mm_movehdup_ps(h));
  return _mm_cvtss_f32(h);
}

static inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

static inline F32 load_bf16(const uint16_t* p) {
  const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}

// p: [16][2] bf16; even gets element 0 of each pair, odd element 1.
static inline void load_bf16_pairs(const uint16_t* p, F32& even, F32& odd) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))};
}

// One pair of bf16 in every lane, widened: even holds p[0], odd p[1].
static inline void broadcast_bf16_pair(const uint16_t* p, F32& even, F32& odd) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  const __m256i pair = _mm256_set1_epi32(bits);
  const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
  const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  even = {low, low};
  odd = {high, high};
}

static inline __m256i bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}

static inline void store_bf16(uint16_t* p, F32 x) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}

// Values already within int8.
static inline void store_i8(int8_t* p, I32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// Sixteen outputs x four k of signed weights. AVX2 multiplies unsigned by signed bytes with saturation at 16 bits:
// with |w| <= 128 and |x| <= 127 a pair sums to at most 32512, so |w| times (x with w's sign) is exact.
struct Int8Weights {
  __m256i a, b, abs_a, abs_b;
};
static inline Int8Weights load_int8(const int8_t* p) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  return {a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)};
}
static inline __m256i broadcast4(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return _mm256_set1_epi32(bits);
}
// Sixteen outputs x eight k of int4 (unsigned 0..15): low nibbles k..k+3, high nibbles k+4..k+7.
struct Int4Weights {
  __m256i low_a, low_b, high_a, high_b;
};
static inline Int4Weights load_int4(const uint8_t* p) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask), _mm256_and_si256(_mm256_srli_epi16(a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
}  // namespace
