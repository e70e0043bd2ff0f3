// Sixteen lanes on Advanced SIMD: four 128-bit registers. Unnamed namespace: each folder has its own copy.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 4;     // rows per micro-tile: 16 accumulators, 4 weight registers, the rest temporaries
constexpr int kMeasureSums = 4;  // sixteen registers of sums

struct F32 {
  float32x4_t v[4];
};
struct I32 {
  int32x4_t v[4];
};

// Applies an intrinsic to the four registers.
#define NEOSERVE_MAP1(NAME, FUNCTION)                                                  \
  static inline F32 NAME(F32 x) {                                                      \
    return {{FUNCTION(x.v[0]), FUNCTION(x.v[1]), FUNCTION(x.v[2]), FUNCTION(x.v[3])}}; \
  }
#define NEOSERVE_MAP2(TYPE, NAME, FUNCTION)                                                                            \
  static inline TYPE NAME(TYPE x, TYPE y) {                                                                            \
    return {{FUNCTION(x.v[0], y.v[0]), FUNCTION(x.v[1], y.v[1]), FUNCTION(x.v[2], y.v[2]), FUNCTION(x.v[3], y.v[3])}}; \
  }
NEOSERVE_MAP1(neg, vnegq_f32)
NEOSERVE_MAP1(abs, vabsq_f32)
NEOSERVE_MAP2(F32, add, vaddq_f32)
NEOSERVE_MAP2(F32, sub, vsubq_f32)
NEOSERVE_MAP2(F32, mul, vmulq_f32)
NEOSERVE_MAP2(F32, div, vdivq_f32)
NEOSERVE_MAP2(F32, max, vmaxq_f32)
NEOSERVE_MAP2(F32, min, vminq_f32)
NEOSERVE_MAP2(I32, add, vaddq_s32)
NEOSERVE_MAP2(I32, sub, vsubq_s32)
NEOSERVE_MAP2(I32, mul, vmulq_s32)
#undef NEOSERVE_MAP1
#undef NEOSERVE_MAP2

static inline F32 set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
static inline F32 zero_f32() {
  return set1(0);
}
static inline F32 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
static inline void store(float* p, F32 x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
static inline F32 fma(F32 x, F32 y, F32 z) {
  return {{vfmaq_f32(z.v[0], x.v[0], y.v[0]), vfmaq_f32(z.v[1], x.v[1], y.v[1]), vfmaq_f32(z.v[2], x.v[2], y.v[2]),
           vfmaq_f32(z.v[3], x.v[3], y.v[3])}};
}

static inline I32 set1_i32(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {{v, v, v, v}};
}
static inline I32 zero_i32() {
  return set1_i32(0);
}
static inline I32 load_i32(const int32_t* p) {
  return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
static inline void store_i32(int32_t* p, I32 x) {
  for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]);
}
static inline F32 to_f32(I32 x) {
  return {{vcvtq_f32_s32(x.v[0]), vcvtq_f32_s32(x.v[1]), vcvtq_f32_s32(x.v[2]), vcvtq_f32_s32(x.v[3])}};
}
static inline I32 to_i32(F32 x) {  // nearest even
  return {{vcvtnq_s32_f32(x.v[0]), vcvtnq_s32_f32(x.v[1]), vcvtnq_s32_f32(x.v[2]), vcvtnq_s32_f32(x.v[3])}};
}
static inline F32 pow2(I32 n) {
  F32 out;
  for (int i = 0; i < 4; ++i) out.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23));
  return out;
}

// Lane i keeps x where first <= i < last, else takes y.
static inline F32 keep_lanes(F32 x, F32 y, int first, int last) {
  static const int32_t start[4] = {0, 1, 2, 3};
  F32 out;
  for (int i = 0; i < 4; ++i) {
    const int32x4_t lane = vaddq_s32(vld1q_s32(start), vdupq_n_s32(4 * i));
    const uint32x4_t keep = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
    out.v[i] = vbslq_f32(keep, x.v[i], y.v[i]);
  }
  return out;
}

static inline float largest_lane(F32 x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}

// lane[i] += lane[i + 8], then 4, 2, 1: the fixed tree.
static inline float sum_tree(F32 x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

static inline F32 load_f16(const uint16_t* p) {
  F32 out;
  for (int i = 0; i < 4; ++i) out.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return out;
}

static inline F32 load_bf16(const uint16_t* p) {
  F32 out;
  for (int i = 0; i < 4; ++i) out.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return out;
}

// p: [16][2] bf16; even gets element 0 of each pair, odd element 1.
static inline void load_bf16_pairs(const uint16_t* p, F32& even, F32& odd) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t pair = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    even.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(pair, 16));
    odd.v[i] = vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff0000u)));
  }
}

// One pair of bf16 in every lane, widened: even holds p[0], odd p[1].
static inline void broadcast_bf16_pair(const uint16_t* p, F32& even, F32& odd) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  const uint32x4_t pair = vdupq_n_u32(bits);
  const float32x4_t low = vreinterpretq_f32_u32(vshlq_n_u32(pair, 16)),
                    high = vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff0000u)));
  even = {{low, low, low, low}};
  odd = {{high, high, high, high}};
}

static inline void store_bf16(uint16_t* p, F32 x) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x.v[i]);
    const uint32x4_t lsb = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(lsb, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
    const uint32x4_t number = vceqq_f32(x.v[i], x.v[i]);
    vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(number, rounded, quiet)));
  }
}

// Values already within int8.
static inline void store_i8(int8_t* p, I32 x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

// Sixteen outputs x four k of signed weights.
struct Int8Weights {
  int8x16_t v[4];
};
static inline Int8Weights load_int8(const int8_t* p) {
  return {{vld1q_s8(p), vld1q_s8(p + 16), vld1q_s8(p + 32), vld1q_s8(p + 48)}};
}

// Sixteen outputs x eight k of int4 (unsigned 0..15): low nibbles k..k+3, high nibbles k+4..k+7.
struct Int4Weights {
  Int8Weights low, high;
};
static inline Int4Weights load_int4(const uint8_t* p) {
  Int4Weights w;
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t bytes = vld1q_u8(p + 16 * i);
    w.low.v[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
    w.high.v[i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
  }
  return w;
}

static inline int8x16_t broadcast4(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}

static inline I32 int8_start(int32_t) {
  return zero_i32();
}

}  // namespace
