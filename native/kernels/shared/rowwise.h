// Norm, quantisation, rope, gated activations and addition over any folder's simd.h (docs/ops.md).
#pragma once

#include "ops/contract.h"

namespace {

using neoserve::kBlock;

// Lanes [0, count) from p, the rest zero.
static inline F32 load_some(const float* p, int count) {
  if (count >= kBlock) return load(p);
  float lanes[kBlock] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

static inline void store_some(float* p, F32 x, int count) {
  if (count >= kBlock) return store(p, x);
  float lanes[kBlock];
  store(lanes, x);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

static inline F32 exp(F32 x) {
  // The second operand survives where one is NaN (x86's rule), so NaN stays NaN.
  x = max(set1(-87.33654f), x);
  x = min(set1(88.0f), x);
  const F32 magic = set1(12582912.0f);
  const F32 n = sub(add(mul(x, set1(1.44269504f)), magic), magic);
  F32 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F32 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, pow2(to_i32(n)));
}

static inline void rms_norm_rows(const neoserve::RmsNormArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    for (int32_t first = 0; first < a.columns; first += a.width) {
      const float* x = a.x + static_cast<size_t>(row) * a.x_stride + first;
      float* out = a.out + static_cast<size_t>(row) * a.out_stride + first;
      F32 acc = zero_f32();
      for (int32_t i = 0; i < a.width; i += kBlock) {
        const F32 value = load_some(x + i, a.width - i);
        acc = fma(value, value, acc);
      }
      const float root = __builtin_sqrtf(sum_tree(acc) / static_cast<float>(a.width) + a.epsilon);
      const F32 r = set1(1.0f / root);
      for (int32_t i = 0; i < a.width; i += kBlock) {
        const F32 value = mul(mul(load_some(x + i, a.width - i), r), load_some(a.weight + i, a.width - i));
        store_some(out + i, value, a.width - i);
      }
    }
  }
}

static inline void quantize_bf16_rows(const neoserve::QuantizeArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* x = a.x + static_cast<size_t>(row) * a.x_stride;
    uint16_t* out = reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(a.out) + static_cast<size_t>(row) * a.out_stride);
    for (int32_t i = 0; i < a.padded_columns; i += kBlock) {
      const F32 value = i < a.columns ? load_some(x + i, a.columns - i) : zero_f32();
      if (i + kBlock <= a.padded_columns) {
        store_bf16(out + i, value);
        continue;
      }
      uint16_t lanes[kBlock];
      store_bf16(lanes, value);
      for (int32_t j = i; j < a.padded_columns; ++j) out[j] = lanes[j - i];
    }
  }
}

static inline void quantize_int8_rows(const neoserve::QuantizeArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* x = a.x + static_cast<size_t>(row) * a.x_stride;
    int8_t* out = static_cast<int8_t*>(a.out) + static_cast<size_t>(row) * a.out_stride;
    for (size_t g = 0; g < a.groups; ++g) {
      const int32_t begin = static_cast<int32_t>(g) * a.group;
      const int32_t end = begin + a.group < a.columns ? begin + a.group : a.columns;
      F32 extremes = zero_f32(), residue = zero_f32();
      for (int32_t i = begin; i < end; i += kBlock) {
        const F32 value = load_some(x + i, end - i);
        extremes = max(extremes, abs(value));
        residue = add(residue, sub(value, value));  // NaN as soon as a value is not finite
      }
      if (sum_tree(residue) != 0.0f) {
        for (int32_t i = begin; i < end; ++i) out[i] = 0;
        a.scales[static_cast<size_t>(row) * a.groups + g] = __builtin_nanf("");
        a.sums[static_cast<size_t>(row) * a.groups + g] = 0;
        continue;
      }
      const float largest = largest_lane(extremes);
      const F32 inverse = set1(largest >= neoserve::kSmallestQuantized ? 127.0f / largest : 0.0f);
      I32 sums = zero_i32();
      for (int32_t i = begin; i < end; i += kBlock) {
        F32 value = mul(load_some(x + i, end - i), inverse);
        value = min(max(value, set1(-127.0f)), set1(127.0f));
        const I32 q = to_i32(value);
        sums = add(sums, q);
        if (i + kBlock <= end) {
          store_i8(out + i, q);
          continue;
        }
        int8_t lanes[kBlock];
        store_i8(lanes, q);
        for (int32_t j = i; j < end; ++j) out[j] = lanes[j - i];
      }
      int32_t lanes[kBlock], sum = 0;
      store_i32(lanes, sums);
      for (int i = 0; i < kBlock; ++i) sum += lanes[i];
      a.scales[static_cast<size_t>(row) * a.groups + g] = largest / 127.0f;
      a.sums[static_cast<size_t>(row) * a.groups + g] = sum;
    }
    for (int32_t i = a.columns; i < a.padded_columns; ++i) out[i] = 0;
  }
}

static inline void rope_rows(const neoserve::RopeArgs& a) {
  const int32_t half = a.dim / 2;
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* table = a.table + static_cast<size_t>(row) * static_cast<size_t>(a.dim);
    for (int32_t head = 0; head < a.heads; ++head) {
      float* x =
          a.x + static_cast<size_t>(row) * a.x_stride + static_cast<size_t>(head) * static_cast<size_t>(a.head_dim);
      for (int32_t i = 0; i < half; i += kBlock) {
        const int count = half - i;
        const F32 x0 = load_some(x + i, count), x1 = load_some(x + i + half, count);
        const F32 c = load_some(table + i, count), s = load_some(table + i + half, count);
        store_some(x + i, fma(x0, c, neg(mul(x1, s))), count);
        store_some(x + i + half, fma(x1, c, mul(x0, s)), count);
      }
    }
  }
}

static inline F32 silu(F32 g) {
  return div(g, add(set1(1.0f), exp(neg(g))));
}

static inline F32 gelu_tanh(F32 g) {
  const F32 one = set1(1.0f);
  const F32 cubic = fma(mul(mul(set1(0.044715f), g), g), g, g);
  const F32 u = mul(set1(0.7978845608f), cubic);
  const F32 t = sub(one, div(set1(2.0f), add(exp(mul(set1(2.0f), u)), one)));
  return mul(mul(set1(0.5f), g), add(one, t));
}

template <F32 (*Activation)(F32)>
static inline void gated_rows(const neoserve::GatedArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* gate = a.x + static_cast<size_t>(row) * a.x_stride;
    const float* up = gate + a.columns;
    float* out = a.out + static_cast<size_t>(row) * a.out_stride;
    for (int32_t i = 0; i < a.columns; i += kBlock) {
      const int count = a.columns - i;
      store_some(out + i, mul(Activation(load_some(gate + i, count)), load_some(up + i, count)), count);
    }
  }
}

static inline void add_rows(const neoserve::AddArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    float* x = a.x + static_cast<size_t>(row) * a.x_stride;
    const float* y = a.y + static_cast<size_t>(row) * a.y_stride;
    for (int32_t i = 0; i < a.columns; i += kBlock) {
      store_some(x + i, add(load_some(x + i, a.columns - i), load_some(y + i, a.columns - i)), a.columns - i);
    }
  }
}

}  // namespace
