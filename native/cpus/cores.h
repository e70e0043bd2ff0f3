// What is known of particular cores. Data only: kernels are chosen by feature bits, and an unknown core is served by
// those alone.
#pragma once

#include <string>

namespace neoserve {

struct Core {
  const char* identity;  // as core_identity() gives it
  const char* name;
};

// The entry for an identity, or null.
const Core* find_core(const std::string& identity);

}  // namespace neoserve
