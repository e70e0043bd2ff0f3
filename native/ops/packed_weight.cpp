#include "ops/packed_weight.h"

#include <cstring>
#include <stdexcept>

#include "ops/math.h"

namespace neoserve {
namespace {

bool grouped(const WeightFormat& format) {
  return format.kind == WeightKind::kInt8Group || format.kind == WeightKind::kInt4Group;
}

int32_t run_length(Layout layout) {
  switch (layout) {
    case Layout::kK1:
      return 1;
    case Layout::kK2:
      return 2;
    case Layout::kK4:
      return 4;
    case Layout::kK8:
      return 8;
  }
  return 1;
}

size_t scale_bytes(const WeightFormat& format) {
  return format.scale_type == ScaleType::kF16 ? 2 : 4;
}

size_t value_bytes(const WeightFormat& format, size_t count) {
  switch (format.kind) {
    case WeightKind::kF32:
      return count * 4;
    case WeightKind::kBf16:
      return count * 2;
    case WeightKind::kInt4Group:
      return count / 2;
    default:
      return count;
  }
}

}  // namespace

PackedWeight::PackedWeight(WeightFormat format, int32_t n, int32_t k, const Row* row)
    : format_(format), row_(row), n_(n), k_(k), k_run_(run_length(row->layout)) {
  const std::string shape = "weight [" + std::to_string(n) + ", " + std::to_string(k) + "]";
  if (n < 1 || k < 1) throw std::invalid_argument(shape + ": both sizes must be positive");
  const int32_t multiple = format.kind == WeightKind::kInt4Group ? 2 * k_run_ : k_run_;
  padded_k_ = static_cast<int32_t>(round_up(static_cast<size_t>(k), static_cast<size_t>(multiple)));
  groups_ = 0;
  if (grouped(format)) {
    if (format.group < 16 || format.group % 16 != 0 || k % format.group != 0) {
      throw std::invalid_argument(shape + " in groups of " + std::to_string(format.group) +
                                  ": K must be a multiple of the group, and the group of 16");
    }
    groups_ = k / format.group;
  }
  blocks_ = (n + kBlock - 1) / kBlock;
  const size_t columns = static_cast<size_t>(blocks_) * kBlock;
  values_ = Memory(value_bytes(format, columns * static_cast<size_t>(padded_k_)));
  if (format.kind == WeightKind::kInt8Channel) scales_ = Memory(columns * 4);
  if (groups_ > 0) {
    const size_t count = columns * static_cast<size_t>(groups_);
    scales_ = Memory(count * scale_bytes(format));
    if (format.offset == Offset::kMinimum) offsets_ = Memory(count * scale_bytes(format));
    if (format.offset == Offset::kZero) offsets_ = Memory(count);
  }
}

size_t PackedWeight::value_index(int32_t n, int32_t k) const {
  const size_t run = static_cast<size_t>(k_run_);
  const size_t block = static_cast<size_t>(n / kBlock), lane = static_cast<size_t>(n % kBlock),
               index = static_cast<size_t>(k);
  const size_t base = block * static_cast<size_t>(padded_k_) * kBlock;
  if (format_.kind == WeightKind::kInt4Group) {
    // A byte holds k (low nibble) and k + run (high nibble): two runs make one stripe.
    const size_t stripe = index / (2 * run), inside = index % (2 * run);
    const size_t byte = base / 2 + (stripe * kBlock + lane) * run + inside % run;
    return byte * 2 + inside / run;
  }
  return base + (index / run * kBlock + lane) * run + index % run;
}

size_t PackedWeight::group_index(int32_t n, int32_t g) const {
  return (static_cast<size_t>(n / kBlock) * static_cast<size_t>(groups_) + static_cast<size_t>(g)) * kBlock +
         static_cast<size_t>(n % kBlock);
}

void PackedWeight::put(const CanonicalRows& rows) {
  if (rows.row_begin < 0 || rows.rows < 0 || rows.row_begin > n_ - rows.rows)
    throw std::out_of_range("rows outside the weight");
  const size_t step = scale_bytes(format_);
  for (int32_t i = 0; i < rows.rows; ++i) {
    const int32_t n = rows.row_begin + i;
    const size_t source = static_cast<size_t>(i) * static_cast<size_t>(k_);
    const size_t run = static_cast<size_t>(k_run_);
    switch (format_.kind) {
      case WeightKind::kF32:
        for (int32_t k = 0; k < k_; ++k) {
          std::memcpy(values_.data() + value_index(n, k) * 4, static_cast<const float*>(rows.values) + source + k, 4);
        }
        break;
      case WeightKind::kBf16:
        for (int32_t k = 0; k < k_; ++k) {
          std::memcpy(values_.data() + value_index(n, k) * 2, static_cast<const uint16_t*>(rows.values) + source + k,
                      2);
        }
        break;
      case WeightKind::kInt4Group: {
        const uint8_t* values = static_cast<const uint8_t*>(rows.values) + source;
        for (int32_t k = 0; k < k_; k += 2 * k_run_) {
          uint8_t* target = values_.data() + value_index(n, k) / 2;
          for (size_t j = 0; j < run; ++j)
            target[j] = static_cast<uint8_t>((values[k + j] & 15) | (values[k + run + j] << 4));
        }
        break;
      }
      default: {
        const int8_t* values = static_cast<const int8_t*>(rows.values) + source;
        for (int32_t k = 0; k < k_; k += k_run_) {
          const int32_t count = k_ - k < k_run_ ? k_ - k : k_run_;
          std::memcpy(values_.data() + value_index(n, k), values + k, static_cast<size_t>(count));
        }
      }
    }
    if (format_.kind == WeightKind::kInt8Channel) {
      std::memcpy(scales_.data() + static_cast<size_t>(n) * 4, static_cast<const float*>(rows.scales) + i, 4);
    }
    for (int32_t g = 0; g < groups_; ++g) {
      const size_t to = group_index(n, g),
                   from = static_cast<size_t>(i) * static_cast<size_t>(groups_) + static_cast<size_t>(g);
      std::memcpy(scales_.data() + to * step, static_cast<const uint8_t*>(rows.scales) + from * step, step);
      if (format_.offset == Offset::kMinimum) {
        std::memcpy(offsets_.data() + to * step, static_cast<const uint8_t*>(rows.minimums) + from * step, step);
      }
      if (format_.offset == Offset::kZero) offsets_.data()[to] = rows.zeros[from];
    }
  }
}

float PackedWeight::scale_at(const Memory& store, size_t index) const {
  if (format_.scale_type == ScaleType::kF16) {
    uint16_t half;
    std::memcpy(&half, store.data() + index * 2, 2);
    return f16_to_f32(half);
  }
  float value;
  std::memcpy(&value, store.data() + index * 4, 4);
  return value;
}

void PackedWeight::gather(int32_t n, float scale, float* out) const {
  for (int32_t k = 0; k < k_; ++k) {
    const size_t index = value_index(n, k);
    float value = 0;
    switch (format_.kind) {
      case WeightKind::kF32:
        std::memcpy(&value, values_.data() + index * 4, 4);
        break;
      case WeightKind::kBf16: {
        uint16_t half;
        std::memcpy(&half, values_.data() + index * 2, 2);
        value = bf16_to_f32(half);
        break;
      }
      case WeightKind::kInt8Channel:
        value =
            static_cast<float>(static_cast<int8_t>(values_.data()[index])) * scale_at(scales_, static_cast<size_t>(n));
        break;
      default: {
        const uint8_t byte = values_.data()[format_.kind == WeightKind::kInt4Group ? index / 2 : index];
        const int32_t q =
            format_.kind == WeightKind::kInt8Group ? static_cast<int8_t>(byte) : (index % 2 ? byte >> 4 : byte & 15);
        const size_t g = group_index(n, k / format_.group);
        const float s = scale_at(scales_, g);
        if (format_.offset == Offset::kMinimum) {
          value = std::fma(static_cast<float>(q), s, scale_at(offsets_, g));
        } else {
          value = static_cast<float>(format_.offset == Offset::kZero ? q - offsets_.data()[g] : q) * s;
        }
      }
    }
    out[k] = scale == 1.0f ? value : value * scale;
  }
}

void PackedWeight::fill(LinearArgs& args) const {
  args.format = format_;
  args.weights = values_.data();
  args.scales = scales_.data();
  args.offsets = offsets_.data();
  args.n = n_;
  args.k = padded_k_;
}

}  // namespace neoserve
