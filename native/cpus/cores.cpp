#include "cpus/cores.h"

namespace neoserve {
namespace {

// AArch64: MIDR implementer 0x41 (Arm) or 0xc0 (Ampere) and part number. x86-64: CPUID vendor, family, model.
constexpr Core kCores[] = {
    {"41:d08", "Cortex-A72"},
    {"41:d0c", "Neoverse N1"},
    {"41:d40", "Neoverse V1"},
    {"41:d49", "Neoverse N2"},
    {"41:d4f", "Neoverse V2"},
    {"41:d8e", "Neoverse N3"},
    {"41:d84", "Neoverse V3"},
    {"c0:ac3", "Ampere-1"},
    {"c0:ac4", "Ampere-1A"},
    {"AuthenticAMD:17:31", "AMD EPYC Zen 2 (Rome)"},
    {"AuthenticAMD:19:1", "AMD EPYC Zen 3 (Milan)"},
    {"AuthenticAMD:19:11", "AMD EPYC Zen 4 (Genoa)"},
    {"AuthenticAMD:19:a0", "AMD EPYC Zen 4c (Bergamo)"},
    {"AuthenticAMD:1a:2", "AMD EPYC Zen 5 (Turin)"},
    {"GenuineIntel:6:55", "Intel Xeon Skylake-SP or Cascade Lake"},
    {"GenuineIntel:6:6a", "Intel Xeon Ice Lake-SP"},
    {"GenuineIntel:6:8f", "Intel Xeon Sapphire Rapids"},
    {"GenuineIntel:6:cf", "Intel Xeon Emerald Rapids"},
    {"GenuineIntel:6:ad", "Intel Xeon Granite Rapids"},
};

}  // namespace

const Core* find_core(const std::string& identity) {
  for (const Core& core : kCores) {
    if (identity == core.identity) return &core;
  }
  return nullptr;
}

}  // namespace neoserve
