// bf16 products by bfdot: each lane holds one output and adds two products per instruction, k ascending. The
// instruction rounds in its own way (no subnormals, rounding to odd inside), so this row is `relaxed`: its bits are
// the same for any batch, chunk and thread count, but not those of the reference.
#include "kernels/aarch64/neon/lanes.h"

#include "kernels/shared/linear_float.h"

#include "core/feature_bits.h"

namespace {

template <int M, int NB>
static __attribute__((noinline)) void tile_bfdot(const LinearArgs& a, int32_t row, int32_t block) {
  const size_t block_stride = static_cast<size_t>(a.k) * kBlock;
  const uint16_t* w = static_cast<const uint16_t*>(a.weights) + static_cast<size_t>(block) * block_stride;
  F32 acc[M][NB];
  const uint8_t* x[M];
  for (int m = 0; m < M; ++m) {
    x[m] = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row + m) * a.x_stride;
    for (int b = 0; b < NB; ++b) acc[m][b] = zero_f32();
  }
  for (int32_t k = 0; k < a.k; k += 2) {
    bfloat16x8_t xk[M];
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x[m] + static_cast<size_t>(k) * 2, 4);
      xk[m] = vreinterpretq_bf16_s32(vdupq_n_s32(pair));
    }
    for (int b = 0; b < NB; ++b) {
      const uint16_t* wk = w + static_cast<size_t>(b) * block_stride + static_cast<size_t>(k) * kBlock;
      for (int i = 0; i < 4; ++i) {
        const bfloat16x8_t wi = vreinterpretq_bf16_u16(vld1q_u16(wk + 8 * i));
        for (int m = 0; m < M; ++m) acc[m][b].v[i] = vbfdotq_f32(acc[m][b].v[i], wi, xk[m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < NB; ++b) store_outputs(a, row + m, block + b, acc[m][b]);
  }
}

static void walk_bfdot(const LinearArgs& a) {
  int32_t row = 0;
  for (; row + kTileRows <= a.rows; row += kTileRows) {
    for (int32_t b = a.block_begin; b < a.block_end; ++b) tile_bfdot<kTileRows, 1>(a, row, b);
  }
  for (; row < a.rows; ++row) {
    int32_t b = a.block_begin;
    for (; b + 2 <= a.block_end; b += 2) tile_bfdot<1, 2>(a, row, b);
    for (; b < a.block_end; ++b) tile_bfdot<1, 1>(a, row, b);
  }
}

}  // namespace

namespace neoserve {
namespace {
constexpr Row kRows[] = {
    {Op::kLinear, WeightKind::kBf16, Layout::kK2, true, kNeon | kNeonBf16, "linear_bf16_bf16", {.linear = walk_bfdot}},
};
}  // namespace
RowTable bf16_rows() {
  return {"bf16", kRows, sizeof kRows / sizeof kRows[0]};
}
}  // namespace neoserve
