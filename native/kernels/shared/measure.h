// The machine's ceilings with a folder's own instructions: arithmetic on registers, and streaming reads.
#pragma once

#include "ops/contract.h"

namespace {

// kMeasureSums (simd.h) independent sums hide the latency of an instruction; the operands stay in registers or the
// first cache.
static inline void measure_int8_rate(const neoserve::MeasureArgs& a) {
  constexpr int kSums = kMeasureSums;
  int8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<int8_t>(i);
  const Int8Weights w = load_int8(bytes);
  I32 acc[kSums];
  for (int j = 0; j < kSums; ++j) acc[j] = zero_i32();
  for (size_t done = 0; done < a.amount; done += 64 * kSums) {
    for (int j = 0; j < kSums; ++j) acc[j] = dot4(acc[j], w, bytes + 4 * (j % 16));
    __asm__ volatile("" ::: "memory");
  }
  float lanes[16];
  for (int j = 0; j < kSums; ++j) {
    store(lanes, to_f32(acc[j]));
    *a.sink += lanes[0];
  }
}

static inline void measure_f32_rate(const neoserve::MeasureArgs& a) {
  constexpr int kSums = kMeasureSums;
  F32 acc[kSums];
  for (int j = 0; j < kSums; ++j) acc[j] = set1(static_cast<float>(j));
  const F32 x = set1(0.5f), y = set1(1.0f);
  for (size_t done = 0; done < a.amount; done += 16 * kSums) {
    for (int j = 0; j < kSums; ++j) acc[j] = fma(acc[j], x, y);
  }
  float lanes[16];
  for (int j = 0; j < kSums; ++j) {
    store(lanes, acc[j]);
    *a.sink += lanes[0];
  }
}

static inline void measure_read_rate(const neoserve::MeasureArgs& a) {
  constexpr int kSums = 4;
  const float* data = static_cast<const float*>(a.data);
  F32 acc[kSums];
  for (int j = 0; j < kSums; ++j) acc[j] = zero_f32();
  for (size_t i = 0; i + 16 * kSums <= a.amount / 4; i += 16 * kSums) {
    for (int j = 0; j < kSums; ++j) acc[j] = max(acc[j], load(data + i + 16 * static_cast<size_t>(j)));
  }
  float lanes[16];
  for (int j = 0; j < kSums; ++j) {
    store(lanes, acc[j]);
    *a.sink += lanes[0];
  }
}

}  // namespace
