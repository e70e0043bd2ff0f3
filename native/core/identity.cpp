#include "core/identity.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace neoserve {
namespace {

void add(std::vector<CoreIdentity>& found, const CoreIdentity& identity) {
  if (std::find(found.begin(), found.end(), identity) == found.end()) found.push_back(identity);
}

bool contains(const std::vector<int>& cpus, int cpu) {
  return std::find(cpus.begin(), cpus.end(), cpu) != cpus.end();
}

// The whole of `text` as a number in C notation; false when it is none.
bool parse_number(const std::string& text, uint64_t& value) {
  char* end = nullptr;
  value = std::strtoull(text.c_str(), &end, 0);
  return end != text.c_str() && *end == '\0';
}

// The affinity mask, however many CPUs the kernel was built for.
[[maybe_unused]] std::vector<int> allowed_cpus() {
  for (int limit = 1024; limit <= 1 << 20; limit *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(limit));
    if (set == nullptr) return {};
    const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(limit));
    CPU_ZERO_S(size, set);
    std::vector<int> cpus;
    const bool known = sched_getaffinity(0, size, set) == 0;
    for (int cpu = 0; known && cpu < limit; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), size, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (known) return cpus;
  }
  return {};
}

std::vector<CoreIdentity> from_sysfs(const std::string& root, const std::vector<int>& cpus) {
  std::vector<CoreIdentity> found;
  for (const int cpu : cpus) {
    std::ifstream file(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/regs/identification/midr_el1");
    std::string text;
    uint64_t midr = 0;
    if (file >> text && parse_number(text, midr) && midr != 0) add(found, from_midr(midr));
  }
  return found;
}

// Lines "processor : N", then "CPU implementer : 0x41" and "CPU part : 0xd0c". Kernels before 3.19 list all processors
// first and describe them once.
std::vector<CoreIdentity> from_cpuinfo(const std::string& root, const std::vector<int>& cpus) {
  std::vector<CoreIdentity> found;
  std::ifstream file(root + "/proc/cpuinfo");
  bool wanted = false, described = false;
  uint64_t implementer = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::string key = line.substr(0, colon), value = line.substr(colon + 1);
    key.erase(key.find_last_not_of(" \t") + 1);
    value.erase(0, value.find_first_not_of(" \t"));
    value.erase(value.find_last_not_of(" \t\r") + 1);
    uint64_t number = 0;
    if (!parse_number(value, number)) continue;
    if (key == "processor") {
      if (described) wanted = false;
      described = false;
      wanted = wanted || contains(cpus, static_cast<int>(number));
    } else if (key == "CPU implementer") {
      implementer = number;
    } else if (key == "CPU part") {
      described = true;
      if (wanted && implementer != 0) add(found, from_midr((implementer & 0xff) << 24 | (number & 0xfff) << 4));
    }
  }
  return found;
}

#if defined(__aarch64__)
// Linux traps the read and answers it when HWCAP_CPUID says so (Documentation/arch/arm64/cpu-feature-registers.rst);
// without the bit the instruction would end the process.
uint64_t midr_register() {
  constexpr unsigned long kHwcapCpuid = 1ul << 11;
  if (!(getauxval(AT_HWCAP) & kHwcapCpuid)) return 0;
  uint64_t value;
  __asm__("mrs %0, MIDR_EL1" : "=r"(value));
  return value;
}
#endif

}  // namespace

std::string CoreIdentity::text() const {
  char numbers[64];
  if (family == 0) {
    std::snprintf(numbers, sizeof numbers, ":%x", model);
  } else {
    std::snprintf(numbers, sizeof numbers, ":%x:%x:%x", family, model, stepping);
  }
  return vendor + numbers;
}

CoreIdentity from_midr(uint64_t midr) {
  char implementer[8];
  std::snprintf(implementer, sizeof implementer, "%x", static_cast<unsigned>(midr >> 24 & 0xff));
  return {implementer, 0, static_cast<uint32_t>(midr >> 4 & 0xfff), 0};
}

CoreIdentity from_cpuid(const std::string& vendor, uint32_t signature) {
  CoreIdentity identity{vendor, signature >> 8 & 15, signature >> 4 & 15, signature & 15};
  if (identity.family == 6 || identity.family == 15) identity.model |= (signature >> 16 & 15) << 4;
  if (identity.family == 15) identity.family += signature >> 20 & 255;
  return identity;
}

std::vector<CoreIdentity> arm_identities(const std::string& root, const std::vector<int>& cpus, uint64_t midr) {
  std::vector<CoreIdentity> found = from_sysfs(root, cpus);
  if (found.empty() && midr != 0) found.push_back(from_midr(midr));
  if (found.empty()) found = from_cpuinfo(root, cpus);
  return found;
}

std::vector<CoreIdentity> core_identities([[maybe_unused]] const std::vector<int>& cpus) {
#if defined(__x86_64__)
  uint32_t a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return {};
  char vendor[13] = {};
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  if (!__get_cpuid(1, &a, &b, &c, &d)) return {};
  return {from_cpuid(vendor, a)};
#elif defined(__aarch64__)
  return arm_identities("", cpus.empty() ? allowed_cpus() : cpus, midr_register());
#else
  return {};
#endif
}

}  // namespace neoserve
