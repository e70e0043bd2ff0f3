// Advanced SIMD baseline: every op.
#include "kernels/aarch64/neon/simd.h"

#include "kernels/shared/rows.h"

#include "core/feature_bits.h"

NEOSERVE_ROWS(neon, neoserve::kNeon)
