// Scalar arithmetic of docs/ops.md. Kernel folders repeat the same steps sixteen lanes wide with these constants.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace neoserve {
namespace {

constexpr float kExpLow = -87.33654f, kExpHigh = 88.0f;
constexpr float kLog2E = 1.44269504f;
// ln 2 in two parts: the first has trailing zero bits, so that n * kLn2High is exact for |n| < 2^10 (Cody and Waite).
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
// exp(r) on [-ln2/2, ln2/2]: Taylor coefficients 1/6!, 1/5!, ... (error below three units in the last place).
constexpr float kExp6 = 1.0f / 720, kExp5 = 1.0f / 120, kExp4 = 1.0f / 24, kExp3 = 1.0f / 6, kExp2 = 0.5f;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to nearest even

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float exp_f32(float x) {
  if (x != x) return x;
  x = x < kExpLow ? kExpLow : x;
  x = x > kExpHigh ? kExpHigh : x;
  const float n = (x * kLog2E + kRoundMagic) - kRoundMagic;
  float r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  float p = kExp6;
  p = std::fma(p, r, kExp5);
  p = std::fma(p, r, kExp4);
  p = std::fma(p, r, kExp3);
  p = std::fma(p, r, kExp2);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  return p * bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

// Nearest even; NaN stays NaN (quiet).
static inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float bf16_to_f32(uint16_t value) {
  return bits_to_float(static_cast<uint32_t>(value) << 16);
}

// Exact widening of IEEE binary16.
static inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = (half >> 10) & 31,
                 mantissa = half & 1023u;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign != 0 ? -subnormal : subnormal;
}

// The fixed tree of the sixteen-lane sum; destroys `lane`.
static inline float sum_lanes(float* lane) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

}  // namespace
}  // namespace neoserve
