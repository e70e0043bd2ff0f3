// Which cores this process runs on. Baseline code; nothing here decides what instructions may be used
// (core/features.h does).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace neoserve {

struct CoreIdentity {
  std::string vendor;     // CPUID vendor ("GenuineIntel"); on AArch64 the implementer of MIDR_EL1, as "41"
  uint32_t family = 0;    // CPUID, with the extended family added; 0 on AArch64
  uint32_t model = 0;     // CPUID, with the extended model; on AArch64 the part number of MIDR_EL1
  uint32_t stepping = 0;  // CPUID; 0 on AArch64

  bool operator==(const CoreIdentity&) const = default;

  // "vendor:family:model:stepping" or "implementer:part", all numbers hexadecimal.
  std::string text() const;
};

// The different cores among `cpus` (empty: the affinity mask of the calling thread), in order of CPU number: more
// than one on machines with large and small cores. Empty when the system tells nothing.
std::vector<CoreIdentity> core_identities(const std::vector<int>& cpus);

// The same for AArch64, from the files under `root` ("/" on a real machine) and `midr`, the register as the calling
// CPU reads it, or 0 when it cannot. In order: MIDR_EL1 of each CPU in sysfs; `midr`; /proc/cpuinfo. Compiled on
// every architecture, so that it is tested on any.
std::vector<CoreIdentity> arm_identities(const std::string& root, const std::vector<int>& cpus, uint64_t midr);

// Implementer and part number of a MIDR_EL1 (Arm Architecture Reference Manual, D24.2 "MIDR_EL1").
CoreIdentity from_midr(uint64_t midr);

// Family, model and stepping of CPUID leaf 1, EAX (AMD APM volume 3, "Function 1"; Intel SDM volume 2, "CPUID").
CoreIdentity from_cpuid(const std::string& vendor, uint32_t signature);

}  // namespace neoserve
