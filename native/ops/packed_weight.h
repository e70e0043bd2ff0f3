// A weight matrix in the packed layout of the row that was chosen for it.
#pragma once

#include <string>

#include "core/memory.h"
#include "ops/contract.h"

namespace neoserve {

// Rows of a canonical weight as Python hands them over; null where the format has none.
struct CanonicalRows {
  int32_t row_begin, rows;
  const void* values;  // [rows][k]: f32, bf16 (uint16), int8, or uint8 0..15
  const void* scales;  // [rows] or [rows][groups]
  const void* minimums;
  const uint8_t* zeros;
};

class PackedWeight {
 public:
  // Throws std::invalid_argument when k and the group do not fit, std::bad_alloc when memory is short.
  PackedWeight(WeightFormat format, int32_t n, int32_t k, const Row* row);

  // Packs rows [row_begin, row_begin + rows); each row is written once. Different rows may be packed concurrently
  // when they lie in different blocks of 16.
  void put(const CanonicalRows& rows);

  // out[k] = dequantised row n times scale (scale 1 leaves the value untouched).
  void gather(int32_t n, float scale, float* out) const;

  // Fills the weight pointers of `args`.
  void fill(LinearArgs& args) const;

  const WeightFormat& format() const { return format_; }
  const Row* row() const { return row_; }
  int32_t n() const { return n_; }
  int32_t k() const { return k_; }
  int32_t padded_k() const { return padded_k_; }
  int32_t groups() const { return groups_; }
  size_t bytes() const { return values_.size() + scales_.size() + offsets_.size(); }
  // Bytes that one block of 16 outputs streams.
  size_t block_bytes() const { return bytes() / static_cast<size_t>(blocks_); }

 private:
  size_t value_index(int32_t n, int32_t k) const;  // element or, for int4, nibble index
  size_t group_index(int32_t n, int32_t g) const;
  float scale_at(const Memory& store, size_t index) const;

  WeightFormat format_;
  const Row* row_;
  int32_t n_, k_, padded_k_, groups_, blocks_, k_run_;
  Memory values_, scales_, offsets_;
};

}  // namespace neoserve
