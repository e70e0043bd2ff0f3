// Implementers and part numbers of MIDR_EL1: Linux 6.12, arch/arm64/include/asm/cputype.h; Ampere-1B: GCC 14,
// config/aarch64/aarch64-cores.def.
#include "cpus/cores.h"

namespace neoserve {
namespace {

constexpr Core part(const char* implementer, uint32_t number, const char* name, const char* products = "") {
  return {implementer, 0, {number, number}, {0, 0}, name, products};
}

constexpr Core kCores[] = {
    // Arm, servers
    part("41", 0xd0c, "Neoverse N1", "AWS Graviton2, Ampere Altra"),
    part("41", 0xd40, "Neoverse V1", "AWS Graviton3"),
    part("41", 0xd49, "Neoverse N2", "Alibaba Yitian 710"),
    part("41", 0xd4f, "Neoverse V2", "AWS Graviton4, Google Axion, NVIDIA Grace"),
    part("41", 0xd8e, "Neoverse N3", "Google Axion N4A"),
    part("41", 0xd84, "Neoverse V3", "AWS Graviton5, Azure Cobalt 200"),
    part("41", 0xd83, "Neoverse V3AE", "NVIDIA Thor"),
    // Arm, small servers and boards; machines with large and small cores have two or three of these
    part("41", 0xd03, "Cortex-A53"),
    part("41", 0xd05, "Cortex-A55"),
    part("41", 0xd07, "Cortex-A57"),
    part("41", 0xd08, "Cortex-A72", "AWS Graviton, Raspberry Pi 4"),
    part("41", 0xd09, "Cortex-A73"),
    part("41", 0xd0a, "Cortex-A75"),
    part("41", 0xd0b, "Cortex-A76", "Raspberry Pi 5"),
    part("41", 0xd0d, "Cortex-A77"),
    part("41", 0xd41, "Cortex-A78"),
    part("41", 0xd42, "Cortex-A78AE", "NVIDIA Orin"),
    part("41", 0xd4b, "Cortex-A78C"),
    part("41", 0xd46, "Cortex-A510"),
    part("41", 0xd80, "Cortex-A520"),
    part("41", 0xd47, "Cortex-A710"),
    part("41", 0xd4d, "Cortex-A715"),
    part("41", 0xd81, "Cortex-A720"),
    part("41", 0xd87, "Cortex-A725"),
    part("41", 0xd44, "Cortex-X1"),
    part("41", 0xd48, "Cortex-X2"),
    part("41", 0xd4e, "Cortex-X3"),
    part("41", 0xd82, "Cortex-X4"),
    part("41", 0xd85, "Cortex-X925"),
    // Others
    part("6d", 0xd49, "Neoverse N2", "Azure Cobalt 100"),
    part("c0", 0xac3, "Ampere-1", "AmpereOne"),
    part("c0", 0xac4, "Ampere-1A", "AmpereOne"),
    part("c0", 0xac5, "Ampere-1B", "AmpereOne"),
    part("48", 0xd01, "TSV110", "Huawei Kunpeng 920"),
    part("48", 0xd02, "HIP09", "Huawei Kunpeng"),
    part("4e", 0x004, "Carmel", "NVIDIA Xavier"),
    part("4e", 0x010, "Olympus", "NVIDIA Vera"),
    part("46", 0x001, "A64FX", "Fujitsu A64FX"),
    part("43", 0x0af, "ThunderX2"),
};

}  // namespace

CoreTable aarch64_cores() {
  return {kCores, sizeof kCores / sizeof *kCores};
}

}  // namespace neoserve
