// CPUID families and models: Linux 6.12, arch/x86/include/asm/intel-family.h (Intel; the steppings of model 0x55 are in
// a comment there) and arch/x86/kernel/cpu/amd.c, bsp_init_amd (AMD; ranges of models of one generation).
#include "cpus/cores.h"

namespace neoserve {
namespace {

constexpr Range kAny{0, 15};

constexpr Core intel(uint32_t model, const char* name, Range steppings = kAny) {
  return {"GenuineIntel", 6, {model, model}, steppings, name, ""};
}

constexpr Core amd(uint32_t family, Range models, const char* name, const char* products = "") {
  return {"AuthenticAMD", family, models, kAny, name, products};
}

constexpr Core kCores[] = {
    intel(0x3f, "Haswell-EP"),
    intel(0x4f, "Broadwell-EP"),
    intel(0x55, "Skylake-SP", {0, 4}),
    intel(0x55, "Cascade Lake", {5, 7}),
    intel(0x55, "Cooper Lake", {10, 11}),
    intel(0x6a, "Ice Lake-SP"),
    intel(0x6c, "Ice Lake-D"),
    intel(0x8f, "Sapphire Rapids"),
    intel(0xcf, "Emerald Rapids"),
    intel(0xad, "Granite Rapids"),
    intel(0xae, "Granite Rapids-D"),
    intel(0xaf, "Sierra Forest"),
    intel(0xdd, "Clearwater Forest"),
    {"GenuineIntel", 19, {0x01, 0x01}, kAny, "Diamond Rapids", ""},
    amd(0x17, {0x01, 0x01}, "Zen 1", "EPYC Naples"),
    amd(0x17, {0x00, 0x2f}, "Zen 1"),
    amd(0x17, {0x50, 0x5f}, "Zen 1"),
    amd(0x17, {0x31, 0x31}, "Zen 2", "EPYC Rome"),
    amd(0x17, {0x30, 0x4f}, "Zen 2"),
    amd(0x17, {0x60, 0x7f}, "Zen 2"),
    amd(0x17, {0x90, 0x91}, "Zen 2"),
    amd(0x17, {0xa0, 0xaf}, "Zen 2"),
    amd(0x19, {0x01, 0x01}, "Zen 3", "EPYC Milan"),
    amd(0x19, {0x00, 0x0f}, "Zen 3"),
    amd(0x19, {0x20, 0x5f}, "Zen 3"),
    amd(0x19, {0x11, 0x11}, "Zen 4", "EPYC Genoa"),
    amd(0x19, {0xa0, 0xaf}, "Zen 4c", "EPYC Bergamo"),
    amd(0x19, {0x10, 0x1f}, "Zen 4"),
    amd(0x19, {0x60, 0xaf}, "Zen 4"),
    amd(0x1a, {0x02, 0x02}, "Zen 5", "EPYC Turin"),
    amd(0x1a, {0x11, 0x11}, "Zen 5c", "EPYC Turin Dense"),
    amd(0x1a, {0x00, 0x2f}, "Zen 5"),
    amd(0x1a, {0x40, 0x4f}, "Zen 5"),
    amd(0x1a, {0x60, 0x7f}, "Zen 5"),
    amd(0x1a, {0xd0, 0xd7}, "Zen 5"),
};

}  // namespace

CoreTable x86_64_cores() {
  return {kCores, sizeof kCores / sizeof *kCores};
}

}  // namespace neoserve
