// CPU features found at run time. Baseline code: nothing here may assume more than the build's baseline.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/feature_bits.h"

namespace neoserve {

// Feature bits of this CPU that the operating system also enables (CPUID and XCR0, or HWCAP and HWCAP2).
uint64_t detect_features();

// Names of the set bits, in bit order ("avx2", "dotprod", ...).
std::vector<std::string> feature_names(uint64_t features);

// The bit of a feature name; 0 if there is none.
uint64_t feature_by_name(const std::string& name);

// SVE vector length in bytes, or 0 without SVE.
int sve_vector_bytes();

}  // namespace neoserve
