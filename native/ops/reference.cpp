#include "ops/reference.h"

#include <limits>

#include "ops/math.h"

// Plain loops in the order of docs/ops.md. Clarity is the point: nothing here is tuned.
namespace neoserve {
namespace {

float scale_value(const void* store, ScaleType type, size_t index) {
  return type == ScaleType::kF16 ? f16_to_f32(static_cast<const uint16_t*>(store)[index])
                                 : static_cast<const float*>(store)[index];
}

struct Position {
  size_t block, lane;
};

Position locate(int32_t n) {
  return {static_cast<size_t>(n / kBlock), static_cast<size_t>(n % kBlock)};
}

float dot_f32(const LinearArgs& a, int32_t row, int32_t n) {
  const float* x =
      reinterpret_cast<const float*>(static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row) * a.x_stride);
  const auto [block, lane] = locate(n);
  const float* w = static_cast<const float*>(a.weights) + block * static_cast<size_t>(a.k) * kBlock;
  float acc = 0;
  for (int32_t k = 0; k < a.k; ++k) acc = std::fma(x[k], w[static_cast<size_t>(k) * kBlock + lane], acc);
  return acc;
}

float dot_bf16(const LinearArgs& a, int32_t row, int32_t n) {
  const uint16_t* x =
      reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row) * a.x_stride);
  const auto [block, lane] = locate(n);
  const uint16_t* w = static_cast<const uint16_t*>(a.weights) + block * static_cast<size_t>(a.k) * kBlock;
  float acc = 0;
  for (size_t k = 0; k < static_cast<size_t>(a.k); ++k) {
    acc = std::fma(bf16_to_f32(x[k]), bf16_to_f32(w[(k / 2 * kBlock + lane) * 2 + k % 2]), acc);
  }
  return acc;
}

int32_t weight_int(const LinearArgs& a, Position at, size_t k) {
  const size_t stride = static_cast<size_t>(a.k) * kBlock;
  if (a.format.kind == WeightKind::kInt4Group) {
    const uint8_t byte =
        static_cast<const uint8_t*>(a.weights)[at.block * stride / 2 + (k / 8 * kBlock + at.lane) * 4 + k % 4];
    return k % 8 < 4 ? byte & 15 : byte >> 4;
  }
  return static_cast<const int8_t*>(a.weights)[at.block * stride + (k / 4 * kBlock + at.lane) * 4 + k % 4];
}

float dot_int(const LinearArgs& a, int32_t row, int32_t n) {
  const int8_t* x = static_cast<const int8_t*>(a.x) + static_cast<size_t>(row) * a.x_stride;
  const Position at = locate(n);
  const bool channel = a.format.kind == WeightKind::kInt8Channel;
  const size_t group = channel ? static_cast<size_t>(a.k) : static_cast<size_t>(a.format.group);
  const size_t groups = static_cast<size_t>(a.k) / group;
  float acc = 0;
  for (size_t g = 0; g < groups; ++g) {
    int32_t isum = 0;
    for (size_t k = g * group; k < (g + 1) * group; ++k) isum += x[k] * weight_int(a, at, k);
    const size_t xg = static_cast<size_t>(row) * a.x_groups + g;
    const float sx = a.x_scales[xg];
    const size_t index = (at.block * groups + g) * kBlock + at.lane;
    const float sw = scale_value(a.scales, a.format.scale_type, index);
    if (channel) return static_cast<float>(isum) * (sx * sw);
    if (a.format.offset == Offset::kZero) isum -= static_cast<const uint8_t*>(a.offsets)[index] * a.x_sums[xg];
    acc = std::fma(static_cast<float>(isum), sx * sw, acc);
    if (a.format.offset == Offset::kMinimum) {
      acc = std::fma(static_cast<float>(a.x_sums[xg]), sx * scale_value(a.offsets, a.format.scale_type, index), acc);
    }
  }
  return acc;
}

template <float (*Dot)(const LinearArgs&, int32_t, int32_t)>
void linear(const LinearArgs& a) {
  const int32_t end = a.block_end * kBlock < a.n ? a.block_end * kBlock : a.n;
  for (int32_t row = 0; row < a.rows; ++row) {
    float* out = a.out + static_cast<size_t>(row) * a.out_stride;
    for (int32_t n = a.block_begin * kBlock; n < end; ++n) {
      float y = Dot(a, row, n);
      if (a.bias != nullptr) y = y + a.bias[n];
      out[n] = a.accumulate ? out[n] + y : y;
    }
  }
}

void rms_norm(const RmsNormArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    for (int32_t first = 0; first < a.columns; first += a.width) {
      const float* x = a.x + static_cast<size_t>(row) * a.x_stride + first;
      float* out = a.out + static_cast<size_t>(row) * a.out_stride + first;
      float lane[kBlock] = {};
      for (int32_t i = 0; i < a.width; ++i) lane[i % kBlock] = std::fma(x[i], x[i], lane[i % kBlock]);
      const float r = 1.0f / std::sqrt(sum_lanes(lane) / static_cast<float>(a.width) + a.epsilon);
      for (int32_t i = 0; i < a.width; ++i) out[i] = (x[i] * r) * a.weight[i];
    }
  }
}

void quantize_bf16(const QuantizeArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* x = a.x + static_cast<size_t>(row) * a.x_stride;
    uint16_t* out = reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(a.out) + static_cast<size_t>(row) * a.out_stride);
    for (int32_t i = 0; i < a.padded_columns; ++i) out[i] = i < a.columns ? f32_to_bf16(x[i]) : 0;
  }
}

int32_t quantize_value(float x, float inverse) {
  float q = x * inverse;
  q = q < -127.0f ? -127.0f : q;
  q = q > 127.0f ? 127.0f : q;
  return static_cast<int32_t>((q + kRoundMagic) - kRoundMagic);
}

void quantize_int8(const QuantizeArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* x = a.x + static_cast<size_t>(row) * a.x_stride;
    int8_t* out = static_cast<int8_t*>(a.out) + static_cast<size_t>(row) * a.out_stride;
    for (size_t g = 0; g < a.groups; ++g) {
      const int32_t begin = static_cast<int32_t>(g) * a.group;
      const int32_t end = begin + a.group < a.columns ? begin + a.group : a.columns;
      float largest = 0;
      bool finite = true;
      for (int32_t i = begin; i < end; ++i) {
        finite = finite && std::isfinite(x[i]);
        largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
      }
      if (!finite) {
        for (int32_t i = begin; i < end; ++i) out[i] = 0;
        a.scales[static_cast<size_t>(row) * a.groups + g] = std::numeric_limits<float>::quiet_NaN();
        a.sums[static_cast<size_t>(row) * a.groups + g] = 0;
        continue;
      }
      const float inverse = largest >= kSmallestQuantized ? 127.0f / largest : 0.0f;
      int32_t sum = 0;
      for (int32_t i = begin; i < end; ++i) {
        const int32_t q = quantize_value(x[i], inverse);
        out[i] = static_cast<int8_t>(q);
        sum += q;
      }
      a.scales[static_cast<size_t>(row) * a.groups + g] = largest / 127.0f;
      a.sums[static_cast<size_t>(row) * a.groups + g] = sum;
    }
    for (int32_t i = a.columns; i < a.padded_columns; ++i) out[i] = 0;
  }
}

void rope(const RopeArgs& a) {
  const int32_t half = a.dim / 2;
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* table = a.table + static_cast<size_t>(row) * static_cast<size_t>(a.dim);
    for (int32_t head = 0; head < a.heads; ++head) {
      float* x =
          a.x + static_cast<size_t>(row) * a.x_stride + static_cast<size_t>(head) * static_cast<size_t>(a.head_dim);
      for (int32_t i = 0; i < half; ++i) {
        const float x0 = x[i], x1 = x[i + half], c = table[i], s = table[i + half];
        x[i] = std::fma(x0, c, -(x1 * s));
        x[i + half] = std::fma(x1, c, x0 * s);
      }
    }
  }
}

float silu(float g) {
  return g / (1.0f + exp_f32(-g));
}

float gelu_tanh(float g) {
  const float u = 0.7978845608f * std::fma(0.044715f * g * g, g, g);
  const float t = 1.0f - 2.0f / (exp_f32(2.0f * u) + 1.0f);
  return (0.5f * g) * (1.0f + t);
}

template <float (*Activation)(float)>
void gated(const GatedArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    const float* gate = a.x + static_cast<size_t>(row) * a.x_stride;
    float* out = a.out + static_cast<size_t>(row) * a.out_stride;
    for (int32_t i = 0; i < a.columns; ++i) out[i] = Activation(gate[i]) * gate[a.columns + i];
  }
}

void add(const AddArgs& a) {
  for (int32_t row = a.row_begin; row < a.row_end; ++row) {
    float* x = a.x + static_cast<size_t>(row) * a.x_stride;
    const float* y = a.y + static_cast<size_t>(row) * a.y_stride;
    for (int32_t i = 0; i < a.columns; ++i) x[i] = x[i] + y[i];
  }
}

// Index of K (d, token) and of V (token, d) in units of elements from the start of the layer's K in a page.
template <class Element>
struct PageView {
  const KvLayerArgs& kv;
  Element* layer(int32_t position) const {
    const size_t page = static_cast<size_t>(kv.block_table[position / kv.page_size]);
    return reinterpret_cast<Element*>(kv.pages + page * kv.page_stride + kv.layer_offset);
  }
  Element& k(int32_t head, int32_t position, int32_t d) const {
    const size_t slot = static_cast<size_t>(position % kv.page_size), dim = static_cast<size_t>(kv.head_dim),
                 at = static_cast<size_t>(d);
    const size_t base =
        static_cast<size_t>(head) * static_cast<size_t>(kv.page_size) * dim + slot / kBlock * kBlock * dim;
    const size_t run = sizeof(Element) == 2 ? 2 : 1;
    return layer(position)[base + (at / run * kBlock + slot % kBlock) * run + at % run];
  }
  Element& v(int32_t head, int32_t position, int32_t d) const {
    const size_t tokens = static_cast<size_t>(kv.page_size), dim = static_cast<size_t>(kv.head_dim);
    const size_t slot = static_cast<size_t>(position % kv.page_size);
    const size_t base = (static_cast<size_t>(kv.kv_heads) + static_cast<size_t>(head)) * tokens * dim;
    return layer(position)[base + slot * dim + static_cast<size_t>(d)];
  }
};

float widen(float value) {
  return value;
}
float widen(uint16_t value) {
  return bf16_to_f32(value);
}
void narrow(float value, float& out) {
  out = value;
}
void narrow(float value, uint16_t& out) {
  out = f32_to_bf16(value);
}

template <class Element>
void kv_write(const KvWriteArgs& a) {
  const PageView<Element> view{a.kv};
  for (int32_t i = 0; i < a.rows; ++i) {
    for (int32_t head = 0; head < a.kv.kv_heads; ++head) {
      const size_t from =
          static_cast<size_t>(i) * a.stride + static_cast<size_t>(head) * static_cast<size_t>(a.kv.head_dim);
      for (int32_t d = 0; d < a.kv.head_dim; ++d) {
        narrow(a.k[from + static_cast<size_t>(d)], view.k(head, a.position + i, d));
        narrow(a.v[from + static_cast<size_t>(d)], view.v(head, a.position + i, d));
      }
    }
  }
}

template <class Element>
float round_query(float q) {
  return sizeof(Element) == 2 ? bf16_to_f32(f32_to_bf16(q)) : q;
}

// One partition's share: returns the maximum, writes the sum of exponentials and the weighted V.
template <class Element>
float attend_partition(const AttentionArgs& a, const PageView<Element>& view, const float* q, int32_t begin,
                       int32_t end, float& sum, float* o) {
  float e[kPartition];
  float lane[kBlock] = {};
  float largest = -std::numeric_limits<float>::infinity();
  for (int32_t p = begin; p < end; ++p) {
    float dot = 0;
    for (int32_t d = 0; d < a.kv.head_dim; ++d)
      dot = std::fma(round_query<Element>(q[d]), widen(view.k(a.kv_head, p, d)), dot);
    e[p - begin] = a.scale * dot;
    largest = e[p - begin] > largest ? e[p - begin] : largest;
  }
  for (int32_t d = 0; d < a.kv.head_dim; ++d) o[d] = 0;
  for (int32_t p = begin; p < end; ++p) {
    const float weight = exp_f32(e[p - begin] - largest);
    lane[p % kBlock] += weight;
    for (int32_t d = 0; d < a.kv.head_dim; ++d) o[d] = std::fma(weight, widen(view.v(a.kv_head, p, d)), o[d]);
  }
  sum = sum_lanes(lane);
  return largest;
}

template <class Element>
void attention(const AttentionArgs& a) {
  const PageView<Element> view{a.kv};
  const int32_t dim = a.kv.head_dim;
  for (int32_t row = 0; row < a.rows; ++row) {
    for (int32_t head = 0; head < a.heads; ++head) {
      const float* q =
          a.q + static_cast<size_t>(row) * a.q_stride + static_cast<size_t>(head) * static_cast<size_t>(dim);
      float* out =
          a.out + static_cast<size_t>(row) * a.out_stride + static_cast<size_t>(head) * static_cast<size_t>(dim);
      float* part = a.scratch;
      const int32_t last = a.position + row;
      const int32_t first = a.window > 0 && last - a.window + 1 > 0 ? last - a.window + 1 : 0;
      float m = 0, l = 0;
      bool started = false;
      for (int32_t j = first / kPartition; j <= last / kPartition; ++j) {
        const int32_t begin = j * kPartition > first ? j * kPartition : first;
        const int32_t end = (j + 1) * kPartition < last + 1 ? (j + 1) * kPartition : last + 1;
        float lj;
        const float mj = attend_partition<Element>(a, view, q, begin, end, lj, started ? part : out);
        if (!started) {
          m = mj, l = lj, started = true;
          continue;
        }
        const float n = m > mj ? m : mj;
        const float old_weight = exp_f32(m - n), new_weight = exp_f32(mj - n);
        l = std::fma(l, old_weight, lj * new_weight);
        for (int32_t d = 0; d < dim; ++d) out[d] = std::fma(out[d], old_weight, part[d] * new_weight);
        m = n;
      }
      for (int32_t d = 0; d < dim; ++d) out[d] = out[d] / l;
    }
  }
}

void measure_int8(const MeasureArgs& a) {
  uint32_t acc[8] = {};
  for (size_t i = 0; i < a.amount; i += 8) {
    for (uint32_t j = 0; j < 8; ++j) acc[j] += static_cast<uint32_t>(i & 127) * (j + 1);
  }
  for (uint32_t value : acc) *a.sink += static_cast<float>(value & 1);
}

void measure_f32(const MeasureArgs& a) {
  float acc[8] = {};
  for (size_t i = 0; i < a.amount; i += 8) {
    for (int j = 0; j < 8; ++j) acc[j] = acc[j] * 0.5f + 1.0f;
  }
  for (float value : acc) *a.sink += value;
}

void measure_read(const MeasureArgs& a) {
  const uint64_t* words = static_cast<const uint64_t*>(a.data);
  uint64_t acc[4] = {};
  for (size_t i = 0; i + 4 <= a.amount / 8; i += 4) {
    for (size_t j = 0; j < 4; ++j) acc[j] ^= words[i + j];
  }
  *a.sink += static_cast<float>((acc[0] ^ acc[1] ^ acc[2] ^ acc[3]) & 1);
}

constexpr WeightKind kNoKind = WeightKind::kF32;
constexpr Layout kNoLayout = Layout::kK1;

constexpr Row kRows[] = {
    {Op::kLinear, WeightKind::kF32, Layout::kK1, false, 0, "linear_f32_reference", {.linear = linear<dot_f32>}},
    {Op::kLinear, WeightKind::kBf16, Layout::kK2, false, 0, "linear_bf16_reference", {.linear = linear<dot_bf16>}},
    {Op::kLinear,
     WeightKind::kInt8Channel,
     Layout::kK4,
     false,
     0,
     "linear_int8_channel_reference",
     {.linear = linear<dot_int>}},
    {Op::kLinear,
     WeightKind::kInt8Group,
     Layout::kK4,
     false,
     0,
     "linear_int8_group_reference",
     {.linear = linear<dot_int>}},
    {Op::kLinear,
     WeightKind::kInt4Group,
     Layout::kK4,
     false,
     0,
     "linear_int4_group_reference",
     {.linear = linear<dot_int>}},
    {Op::kRmsNorm, kNoKind, kNoLayout, false, 0, "rms_norm_reference", {.rms_norm = rms_norm}},
    {Op::kQuantizeBf16, kNoKind, kNoLayout, false, 0, "quantize_bf16_reference", {.quantize = quantize_bf16}},
    {Op::kQuantizeInt8, kNoKind, kNoLayout, false, 0, "quantize_int8_reference", {.quantize = quantize_int8}},
    {Op::kRope, kNoKind, kNoLayout, false, 0, "rope_reference", {.rope = rope}},
    {Op::kSiluMul, kNoKind, kNoLayout, false, 0, "silu_mul_reference", {.gated = gated<silu>}},
    {Op::kGeluTanhMul, kNoKind, kNoLayout, false, 0, "gelu_tanh_mul_reference", {.gated = gated<gelu_tanh>}},
    {Op::kAdd, kNoKind, kNoLayout, false, 0, "add_reference", {.add = add}},
    {Op::kKvWriteF32, kNoKind, kNoLayout, false, 0, "kv_write_f32_reference", {.kv_write = kv_write<float>}},
    {Op::kKvWriteBf16, kNoKind, kNoLayout, false, 0, "kv_write_bf16_reference", {.kv_write = kv_write<uint16_t>}},
    {Op::kAttentionF32, kNoKind, kNoLayout, false, 0, "attention_f32_reference", {.attention = attention<float>}},
    {Op::kAttentionBf16, kNoKind, kNoLayout, false, 0, "attention_bf16_reference", {.attention = attention<uint16_t>}},
    {Op::kMeasureInt8, kNoKind, kNoLayout, false, 0, "measure_int8_reference", {.measure = measure_int8}},
    {Op::kMeasureF32, kNoKind, kNoLayout, false, 0, "measure_f32_reference", {.measure = measure_f32}},
    {Op::kMeasureRead, kNoKind, kNoLayout, false, 0, "measure_read_reference", {.measure = measure_read}},
};

}  // namespace

RowTable reference_rows() {
  return {"reference", kRows, sizeof kRows / sizeof kRows[0]};
}

}  // namespace neoserve
