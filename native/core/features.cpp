#include "core/features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace neoserve {
namespace {

struct FeatureName {
  uint64_t bit;
  const char* name;
};

constexpr FeatureName kNames[] = {
    {kAvx2, "avx2"},
    {kAvxVnni, "avx_vnni"},
    {kAvx512, "avx512"},
    {kAvx512Vnni, "avx512_vnni"},
    {kAvx512Bf16, "avx512_bf16"},
    {kAvx512Fp16, "avx512_fp16"},
    {kAmxInt8, "amx_int8"},
    {kAmxBf16, "amx_bf16"},
    {kNeon, "neon"},
    {kNeonFp16, "fp16"},
    {kDotprod, "dotprod"},
    {kI8mm, "i8mm"},
    {kNeonBf16, "bf16"},
    {kSve, "sve"},
    {kSve2, "sve2"},
    {kSveI8mm, "sve_i8mm"},
    {kSveBf16, "sve_bf16"},
};

#if defined(__x86_64__)

uint64_t xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

uint64_t detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool osxsave = c & (1u << 27);
  const bool fma = c & (1u << 12);
  const bool f16c = c & (1u << 29);
  if (!osxsave) return 0;
  const uint64_t enabled = xcr0();
  const bool ymm = (enabled & 0x6) == 0x6;
  const bool zmm = (enabled & 0xe6) == 0xe6;
  const bool tile = (enabled & 0x60000) == 0x60000;
  uint32_t b7, c7, d7, a71 = 0, unused_b, unused_c, unused_d;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &unused_b, &unused_c, &unused_d);
  uint64_t found = 0;
  if (ymm && fma && f16c && (b7 & (1u << 5))) found |= kAvx2;
  if ((found & kAvx2) && (a71 & (1u << 4))) found |= kAvxVnni;
  const uint32_t avx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  if (zmm && (found & kAvx2) && (b7 & avx512) == avx512) {
    found |= kAvx512;
    if (c7 & (1u << 11)) found |= kAvx512Vnni;
    if (a71 & (1u << 5)) found |= kAvx512Bf16;
    if (d7 & (1u << 23)) found |= kAvx512Fp16;
  }
  if (tile && (d7 & (1u << 25))) found |= kAmxInt8;
  if (tile && (d7 & (1u << 22))) found |= kAmxBf16;
#ifdef NEOSERVE_EMULATED_FEATURES  // a test build whose rows of these features are compiled for AVX2
  if (found & kAvx2) found |= NEOSERVE_EMULATED_FEATURES;
#endif
  return found;
}

#elif defined(__aarch64__)

// Values of the Linux user ABI (arch/arm64 uapi hwcap.h), spelled out so that old headers suffice.
constexpr unsigned long kHwcapAsimd = 1ul << 1, kHwcapAsimdHp = 1ul << 10, kHwcapAsimdDp = 1ul << 20,
                        kHwcapSve = 1ul << 22;
constexpr unsigned long kHwcap2Sve2 = 1ul << 1, kHwcap2SveI8mm = 1ul << 9, kHwcap2SveBf16 = 1ul << 12,
                        kHwcap2I8mm = 1ul << 13, kHwcap2Bf16 = 1ul << 14;

uint64_t detect() {
  const unsigned long one = getauxval(AT_HWCAP), two = getauxval(AT_HWCAP2);
  uint64_t found = 0;
  if (one & kHwcapAsimd) found |= kNeon;
  if (one & kHwcapAsimdHp) found |= kNeonFp16;
  if (one & kHwcapAsimdDp) found |= kDotprod;
  if (two & kHwcap2I8mm) found |= kI8mm;
  if (two & kHwcap2Bf16) found |= kNeonBf16;
  if (one & kHwcapSve) found |= kSve;
  if (two & kHwcap2Sve2) found |= kSve2;
  if (two & kHwcap2SveI8mm) found |= kSveI8mm;
  if (two & kHwcap2SveBf16) found |= kSveBf16;
  return found;
}

#else
uint64_t detect() {
  return 0;
}
#endif

}  // namespace

uint64_t detect_features() {
  static const uint64_t found = detect();
  return found;
}

std::vector<std::string> feature_names(uint64_t features) {
  std::vector<std::string> names;
  for (const FeatureName& entry : kNames) {
    if (features & entry.bit) names.emplace_back(entry.name);
  }
  return names;
}

uint64_t feature_by_name(const std::string& name) {
  for (const FeatureName& entry : kNames) {
    if (name == entry.name) return entry.bit;
  }
  return 0;
}

int sve_vector_bytes() {
#if defined(__aarch64__)
  if (detect_features() & kSve) {
    const int value = prctl(51 /* PR_SVE_GET_VL */, 0, 0, 0, 0);
    if (value > 0) return value & 0xffff;
  }
#endif
  return 0;
}

}  // namespace neoserve
