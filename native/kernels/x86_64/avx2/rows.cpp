// AVX2 with FMA and F16C: every op.
#include "kernels/x86_64/avx2/simd.h"

#include "kernels/shared/rows.h"

#include "core/feature_bits.h"

NEOSERVE_ROWS(avx2, neoserve::kAvx2)
