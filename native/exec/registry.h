// Every kernel row of this build, in order of preference, and the choice among them (design D4).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/contract.h"

namespace neoserve {

const char* op_name(Op op);

// One row's verdict for an op: `reason` is empty for the row that was chosen.
struct Verdict {
  const Row* row;
  const char* folder;
  std::string reason;
};

// What the force knob asks for: nothing, a feature-set folder ("avx2", "reference") or the name of one row.
struct Force {
  std::string name;
};

// Throws std::invalid_argument when `name` is neither a folder nor a row of this build, or needs a feature that the CPU
// lacks.
Force parse_force(const std::string& name);

// The best row for an op (and weight kind, for linear): rows in order of preference, the first whose features are
// present and that `force` admits. A forced row is used wherever it applies; a forced folder excludes all folders that
// are preferred to it. The choice depends on features and the force knob alone, never on a timing.
const Row* choose_row(Op op, WeightKind kind, const Force& force);

// All rows of an op with the reason why each was not chosen.
std::vector<Verdict> explain_rows(Op op, WeightKind kind, const Force& force);

// Every row of the build with its folder, most preferred first.
std::vector<Verdict> all_rows();

}  // namespace neoserve
