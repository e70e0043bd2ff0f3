// int8 and int4 products by smmla (Neoverse V1, N2, V2 and later). Everything else is served by other folders.
#include "kernels/aarch64/dotprod/simd.h"

#include "kernels/aarch64/i8mm/linear_mmla.h"

#include "core/feature_bits.h"

namespace neoserve {
namespace {

// Eight independent smmla chains.
void measure_int8_mmla(const MeasureArgs& a) {
  PairSums acc = zero_pairs();
  const int8x16_t x = vdupq_n_s8(3), w = vdupq_n_s8(5);
  for (size_t done = 0; done < a.amount; done += 32 * kPairs) {
    for (int i = 0; i < kPairs; ++i) acc.v[i] = vmmlaq_s32(acc.v[i], x, w);
    __asm__ volatile("" ::: "memory");
  }
  for (int i = 0; i < kPairs; ++i) *a.sink += static_cast<float>(vgetq_lane_s32(acc.v[i], 0));
}

constexpr uint64_t kNeeds = kNeon | kDotprod | kI8mm;
constexpr Row kRows[] = {
    {Op::kLinear,
     WeightKind::kInt8Channel,
     Layout::kK8,
     false,
     kNeeds,
     "linear_int8_channel_i8mm",
     {.linear = walk_mmla_int8_channel}},
    {Op::kLinear,
     WeightKind::kInt8Group,
     Layout::kK8,
     false,
     kNeeds,
     "linear_int8_group_i8mm",
     {.linear = walk_mmla_group<false>}},
    {Op::kLinear,
     WeightKind::kInt4Group,
     Layout::kK8,
     false,
     kNeeds,
     "linear_int4_group_i8mm",
     {.linear = walk_mmla_group<true>}},
    {Op::kMeasureInt8,
     WeightKind::kF32,
     Layout::kK1,
     false,
     kNeeds,
     "measure_int8_i8mm",
     {.measure = measure_int8_mmla}},
};
}  // namespace
RowTable i8mm_rows() {
  return {"i8mm", kRows, sizeof kRows / sizeof kRows[0]};
}
}  // namespace neoserve
