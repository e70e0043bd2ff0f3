// Python's description of an instruction -> exec's Instruction.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "exec/model.h"

namespace neoserve::bind {

namespace nb = nanobind;

WeightFormat parse_format(const std::string& kind, int32_t group, const std::string& scale_type,
                          const std::string& offset);

// Operands as in neoserve/program/native.py: the output first (("none",) if there is none), then the inputs.
Instruction parse_instruction(Model& model, const std::vector<std::shared_ptr<PackedWeight>>& weights,
                              const std::string& op, const nb::list& operands, const nb::dict& attributes,
                              const std::string& label);

}  // namespace neoserve::bind
