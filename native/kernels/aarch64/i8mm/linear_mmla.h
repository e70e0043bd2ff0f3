// int8 and int4 linear by smmla: a 2 x 8 by 8 x 2 product per instruction, layout k8 (docs/ops.md). Each register
// of results holds two rows x two outputs; a lane still holds one output, and integer sums are exact in any order.
#pragma once

#include "kernels/shared/linear_int.h"

namespace {

constexpr int kPairs = kBlock / 2;

// R pairs of rows; an odd row is paired with itself.
template <int R>
struct RowPairs {
  const int8_t *first[R], *second[R];
  int32_t row[2 * R];
  RowPairs(const LinearArgs& a, int32_t begin, int32_t count) {
    for (int r = 0; r < R; ++r) {
      row[2 * r] = begin + 2 * r;
      row[2 * r + 1] = 2 * r + 1 < count ? begin + 2 * r + 1 : begin + 2 * r;
      first[r] = static_cast<const int8_t*>(a.x) + static_cast<size_t>(row[2 * r]) * a.x_stride;
      second[r] = static_cast<const int8_t*>(a.x) + static_cast<size_t>(row[2 * r + 1]) * a.x_stride;
    }
  }
  int8x16_t load(int r, int32_t k) const { return vcombine_s8(vld1_s8(first[r] + k), vld1_s8(second[r] + k)); }
};

struct PairSums {
  int32x4_t v[kPairs];
};

static inline PairSums zero_pairs() {
  PairSums out;
  for (int i = 0; i < kPairs; ++i) out.v[i] = vdupq_n_s32(0);
  return out;
}

// The sixteen outputs of the pair's first or second row.
static inline I32 unpair(const PairSums& sums, bool second) {
  I32 out;
  for (int i = 0; i < 4; ++i) {
    const int64x2_t a = vreinterpretq_s64_s32(sums.v[2 * i]), b = vreinterpretq_s64_s32(sums.v[2 * i + 1]);
    out.v[i] = vreinterpretq_s32_s64(second ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
  }
  return out;
}

// Adds the products over [k, k + count) of the block whose values start at w.
template <int R>
static inline void sum_int8(const RowPairs<R>& rows, const int8_t* w, int32_t begin, int32_t end, PairSums (&acc)[R]) {
  for (int32_t k = begin; k < end; k += 8) {
    int8x16_t x[R];
    for (int r = 0; r < R; ++r) x[r] = rows.load(r, k);
    const int8_t* wk = w + static_cast<size_t>(k) * kBlock;
    for (int i = 0; i < kPairs; ++i) {
      const int8x16_t wi = vld1q_s8(wk + 16 * i);
      for (int r = 0; r < R; ++r) acc[r].v[i] = vmmlaq_s32(acc[r].v[i], x[r], wi);
    }
  }
}

template <int R>
static inline void sum_int4(const RowPairs<R>& rows, const uint8_t* w, int32_t begin, int32_t end, PairSums (&acc)[R]) {
  for (int32_t k = begin; k < end; k += 16) {
    int8x16_t low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = rows.load(r, k), high[r] = rows.load(r, k + 8);
    const uint8_t* wk = w + static_cast<size_t>(k) * (kBlock / 2);
    for (int i = 0; i < kPairs; ++i) {
      const uint8x16_t bytes = vld1q_u8(wk + 16 * i);
      const int8x16_t wl = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))),
                      wh = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
      for (int r = 0; r < R; ++r) acc[r].v[i] = vmmlaq_s32(vmmlaq_s32(acc[r].v[i], low[r], wl), high[r], wh);
    }
  }
}

template <int R>
static __attribute__((noinline)) void mmla_int8_channel(const LinearArgs& a, int32_t begin, int32_t count,
                                                        int32_t block) {
  const RowPairs<R> rows(a, begin, count);
  const int8_t* w =
      static_cast<const int8_t*>(a.weights) + static_cast<size_t>(block) * static_cast<size_t>(a.k) * kBlock;
  PairSums acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero_pairs();
  sum_int8<R>(rows, w, 0, a.k, acc);
  const F32 scale = load(static_cast<const float*>(a.scales) + static_cast<size_t>(block) * kBlock);
  for (int i = 0; i < count; ++i) {
    const I32 isum = unpair(acc[i / 2], i % 2 != 0);
    const float x_scale = a.x_scales[static_cast<size_t>(begin + i) * a.x_groups];
    store_outputs(a, begin + i, block, mul(to_f32(isum), mul(set1(x_scale), scale)));
  }
}

template <int R, bool IsInt4, ScaleType Type, Offset Kind>
static __attribute__((noinline)) void mmla_group(const LinearArgs& a, int32_t begin, int32_t count, int32_t block) {
  const RowPairs<R> rows(a, begin, count);
  const int32_t group = a.format.group;
  const size_t groups = static_cast<size_t>(a.k / group),
               elements = static_cast<size_t>(block) * static_cast<size_t>(a.k) * kBlock;
  F32 y[2 * R];
  for (int i = 0; i < 2 * R; ++i) y[i] = zero_f32();
  for (size_t g = 0; g < groups; ++g) {
    const int32_t k = static_cast<int32_t>(g) * group;
    PairSums acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero_pairs();
    if constexpr (IsInt4) {
      sum_int4<R>(rows, static_cast<const uint8_t*>(a.weights) + elements / 2, k, k + group, acc);
    } else {
      sum_int8<R>(rows, static_cast<const int8_t*>(a.weights) + elements, k, k + group, acc);
    }
    const size_t index = (static_cast<size_t>(block) * groups + g) * kBlock;
    const F32 scale = load_scales<Type>(a.scales, index);
    for (int i = 0; i < 2 * R; ++i) {
      const size_t x = static_cast<size_t>(rows.row[i]) * a.x_groups + g;
      y[i] = add_group<Type, Kind>(a, y[i], unpair(acc[i / 2], i % 2 != 0), scale, a.x_scales[x], a.x_sums[x], index);
    }
  }
  for (int i = 0; i < count; ++i) store_outputs(a, begin + i, block, y[i]);
}

using MmlaTile = void (*)(const LinearArgs&, int32_t, int32_t, int32_t);

static inline void walk_mmla(const LinearArgs& a, MmlaTile four, MmlaTile two) {
  for (int32_t row = 0; row < a.rows; row += 4) {
    const int32_t count = a.rows - row < 4 ? a.rows - row : 4;
    for (int32_t b = a.block_begin; b < a.block_end; ++b) (count > 2 ? four : two)(a, row, count, b);
  }
}

static inline void walk_mmla_int8_channel(const LinearArgs& a) {
  walk_mmla(a, mmla_int8_channel<2>, mmla_int8_channel<1>);
}

template <bool IsInt4, ScaleType Type>
static inline void walk_mmla_as(const LinearArgs& a) {
  switch (a.format.offset) {
    case Offset::kNone:
      return walk_mmla(a, mmla_group<2, IsInt4, Type, Offset::kNone>, mmla_group<1, IsInt4, Type, Offset::kNone>);
    case Offset::kZero:
      return walk_mmla(a, mmla_group<2, IsInt4, Type, Offset::kZero>, mmla_group<1, IsInt4, Type, Offset::kZero>);
    case Offset::kMinimum:
      return walk_mmla(a, mmla_group<2, IsInt4, Type, Offset::kMinimum>, mmla_group<1, IsInt4, Type, Offset::kMinimum>);
  }
}

template <bool IsInt4>
static inline void walk_mmla_group(const LinearArgs& a) {
  return a.format.scale_type == ScaleType::kF16 ? walk_mmla_as<IsInt4, ScaleType::kF16>(a)
                                                : walk_mmla_as<IsInt4, ScaleType::kF32>(a);
}

}  // namespace
