// What is known of particular cores. Data only: kernels are chosen by feature bits, and an unknown core is served by
// those alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/identity.h"

namespace neoserve {

// Inclusive.
struct Range {
  uint32_t first, last;
};

struct Core {
  const char* vendor;  // of CoreIdentity
  uint32_t family;     // of CoreIdentity
  Range models;        // AArch64: part numbers
  Range steppings;     // AArch64: {0, 0}
  const char* name;
  const char* products;  // what is sold with this core, for people who know the product's name only; may be ""
};

// The entry of a core, or null.
const Core* find_core(const CoreIdentity& identity);

struct CoreTable {
  const Core* cores;
  size_t count;
};

// One table for each architecture (cpus/aarch64.cpp, cpus/x86_64.cpp), all in every build.
CoreTable aarch64_cores();
CoreTable x86_64_cores();

}  // namespace neoserve
