#include "cpus/cores.h"

namespace neoserve {
namespace {

bool contains(const Range& range, uint32_t value) {
  return range.first <= value && value <= range.last;
}

}  // namespace

const Core* find_core(const CoreIdentity& identity) {
  for (const CoreTable& table : {aarch64_cores(), x86_64_cores()}) {
    for (size_t i = 0; i < table.count; ++i) {
      const Core& core = table.cores[i];
      if (identity.vendor == core.vendor && identity.family == core.family && contains(core.models, identity.model) &&
          contains(core.steppings, identity.stepping)) {
        return &core;
      }
    }
  }
  return nullptr;
}

}  // namespace neoserve
