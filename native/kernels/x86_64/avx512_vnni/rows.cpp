// AVX-512 (F, BW, VL, DQ) with VNNI: every op.
#include "kernels/x86_64/avx512_vnni/simd.h"

#include "kernels/shared/rows.h"

#include "core/feature_bits.h"

NEOSERVE_ROWS(avx512_vnni, (neoserve::kAvx2 | neoserve::kAvx512 | neoserve::kAvx512Vnni))
