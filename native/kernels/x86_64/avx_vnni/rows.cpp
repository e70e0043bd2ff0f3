// int8 and int4 products by AVX-VNNI. Everything else is served by the avx2 folder.
#include "kernels/x86_64/avx_vnni/simd.h"

#include "kernels/shared/linear_int.h"
#include "kernels/shared/measure.h"

#include "core/feature_bits.h"

namespace neoserve {
namespace {
constexpr uint64_t kNeeds = kAvx2 | kAvxVnni;
constexpr Row kRows[] = {
    {Op::kLinear,
     WeightKind::kInt8Channel,
     Layout::kK4,
     false,
     kNeeds,
     "linear_int8_channel_avx_vnni",
     {.linear = walk_int8_channel}},
    {Op::kLinear,
     WeightKind::kInt8Group,
     Layout::kK4,
     false,
     kNeeds,
     "linear_int8_group_avx_vnni",
     {.linear = walk_int8_group}},
    {Op::kLinear,
     WeightKind::kInt4Group,
     Layout::kK4,
     false,
     kNeeds,
     "linear_int4_group_avx_vnni",
     {.linear = walk_int4_group}},
    {Op::kMeasureInt8,
     WeightKind::kF32,
     Layout::kK1,
     false,
     kNeeds,
     "measure_int8_avx_vnni",
     {.measure = measure_int8_rate}},
};
}  // namespace
RowTable avx_vnni_rows() {
  return {"avx_vnni", kRows, sizeof kRows / sizeof kRows[0]};
}
}  // namespace neoserve
