// Feature bits alone: kernel folders include this and no standard library.
#pragma once

#include <cstdint>

namespace neoserve {

// One bit per instruction-set extension that some kernel folder needs.
enum Feature : uint64_t {
  kAvx2 = 1ull << 0,  // with FMA and F16C
  kAvxVnni = 1ull << 1,
  kAvx512 = 1ull << 2,  // F, BW, VL, DQ
  kAvx512Vnni = 1ull << 3,
  kAvx512Bf16 = 1ull << 4,
  kAvx512Fp16 = 1ull << 5,
  kAmxInt8 = 1ull << 6,
  kAmxBf16 = 1ull << 7,
  kNeon = 1ull << 16,
  kNeonFp16 = 1ull << 17,
  kDotprod = 1ull << 18,
  kI8mm = 1ull << 19,
  kNeonBf16 = 1ull << 20,
  kSve = 1ull << 21,
  kSve2 = 1ull << 22,
  kSveI8mm = 1ull << 23,
  kSveBf16 = 1ull << 24,
};

}  // namespace neoserve
