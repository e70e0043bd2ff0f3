// int8 and int4 products by sdot. Everything else is served by the neon folder.
#include "kernels/aarch64/dotprod/simd.h"

#include "kernels/shared/linear_int.h"
#include "kernels/shared/measure.h"

#include "core/feature_bits.h"

namespace neoserve {
namespace {
constexpr uint64_t kNeeds = kNeon | kDotprod;
constexpr Row kRows[] = {
    {Op::kLinear,
     WeightKind::kInt8Channel,
     Layout::kK4,
     false,
     kNeeds,
     "linear_int8_channel_dotprod",
     {.linear = walk_int8_channel}},
    {Op::kLinear,
     WeightKind::kInt8Group,
     Layout::kK4,
     false,
     kNeeds,
     "linear_int8_group_dotprod",
     {.linear = walk_int8_group}},
    {Op::kLinear,
     WeightKind::kInt4Group,
     Layout::kK4,
     false,
     kNeeds,
     "linear_int4_group_dotprod",
     {.linear = walk_int4_group}},
    {Op::kMeasureInt8,
     WeightKind::kF32,
     Layout::kK1,
     false,
     kNeeds,
     "measure_int8_dotprod",
     {.measure = measure_int8_rate}},
};
}  // namespace
RowTable dotprod_rows() {
  return {"dotprod", kRows, sizeof kRows / sizeof kRows[0]};
}
}  // namespace neoserve
