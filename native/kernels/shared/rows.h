// The row table of a folder whose simd.h offers every lane operation.
#pragma once

#include "kernels/shared/attention.h"
#include "kernels/shared/linear_int.h"
#include "kernels/shared/measure.h"

// FOLDER names the feature set; FEATURES are the bits it needs. Plain constant data: no dynamic initialiser.
#define NEOSERVE_ROWS(FOLDER, FEATURES)                                                                                \
  namespace neoserve {                                                                                                 \
  namespace {                                                                                                          \
  constexpr Row kRows_##FOLDER[] = {                                                                                   \
      {Op::kLinear, WeightKind::kF32, Layout::kK1, false, FEATURES, "linear_f32_" #FOLDER, {.linear = walk_tile_f32}}, \
      {Op::kLinear,                                                                                                    \
       WeightKind::kBf16,                                                                                              \
       Layout::kK2,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "linear_bf16_" #FOLDER,                                                                                         \
       {.linear = walk_tile_bf16}},                                                                                    \
      {Op::kLinear,                                                                                                    \
       WeightKind::kInt8Channel,                                                                                       \
       Layout::kK4,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "linear_int8_channel_" #FOLDER,                                                                                 \
       {.linear = walk_int8_channel}},                                                                                 \
      {Op::kLinear,                                                                                                    \
       WeightKind::kInt8Group,                                                                                         \
       Layout::kK4,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "linear_int8_group_" #FOLDER,                                                                                   \
       {.linear = walk_int8_group}},                                                                                   \
      {Op::kLinear,                                                                                                    \
       WeightKind::kInt4Group,                                                                                         \
       Layout::kK4,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "linear_int4_group_" #FOLDER,                                                                                   \
       {.linear = walk_int4_group}},                                                                                   \
      {Op::kRmsNorm,                                                                                                   \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "rms_norm_" #FOLDER,                                                                                            \
       {.rms_norm = rms_norm_rows}},                                                                                   \
      {Op::kQuantizeBf16,                                                                                              \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "quantize_bf16_" #FOLDER,                                                                                       \
       {.quantize = quantize_bf16_rows}},                                                                              \
      {Op::kQuantizeInt8,                                                                                              \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "quantize_int8_" #FOLDER,                                                                                       \
       {.quantize = quantize_int8_rows}},                                                                              \
      {Op::kRope, WeightKind::kF32, Layout::kK1, false, FEATURES, "rope_" #FOLDER, {.rope = rope_rows}},               \
      {Op::kSiluMul,                                                                                                   \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "silu_mul_" #FOLDER,                                                                                            \
       {.gated = gated_rows<silu>}},                                                                                   \
      {Op::kGeluTanhMul,                                                                                               \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "gelu_tanh_mul_" #FOLDER,                                                                                       \
       {.gated = gated_rows<gelu_tanh>}},                                                                              \
      {Op::kAdd, WeightKind::kF32, Layout::kK1, false, FEATURES, "add_" #FOLDER, {.add = add_rows}},                   \
      {Op::kKvWriteF32,                                                                                                \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "kv_write_f32_" #FOLDER,                                                                                        \
       {.kv_write = kv_write_rows<float>}},                                                                            \
      {Op::kKvWriteBf16,                                                                                               \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "kv_write_bf16_" #FOLDER,                                                                                       \
       {.kv_write = kv_write_rows<uint16_t>}},                                                                         \
      {Op::kAttentionF32,                                                                                              \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "attention_f32_" #FOLDER,                                                                                       \
       {.attention = attention_rows<float>}},                                                                          \
      {Op::kAttentionBf16,                                                                                             \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "attention_bf16_" #FOLDER,                                                                                      \
       {.attention = attention_rows<uint16_t>}},                                                                       \
      {Op::kMeasureInt8,                                                                                               \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "measure_int8_" #FOLDER,                                                                                        \
       {.measure = measure_int8_rate}},                                                                                \
      {Op::kMeasureF32,                                                                                                \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "measure_f32_" #FOLDER,                                                                                         \
       {.measure = measure_f32_rate}},                                                                                 \
      {Op::kMeasureRead,                                                                                               \
       WeightKind::kF32,                                                                                               \
       Layout::kK1,                                                                                                    \
       false,                                                                                                          \
       FEATURES,                                                                                                       \
       "measure_read_" #FOLDER,                                                                                        \
       {.measure = measure_read_rate}},                                                                                \
  };                                                                                                                   \
  }                                                                                                                    \
  RowTable FOLDER##_rows() {                                                                                           \
    return {#FOLDER, kRows_##FOLDER, sizeof kRows_##FOLDER / sizeof kRows_##FOLDER[0]};                                \
  }                                                                                                                    \
  }
