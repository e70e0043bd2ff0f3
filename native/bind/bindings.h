#pragma once

#include <nanobind/nanobind.h>

namespace neoserve::bind {
void bind_machine(nanobind::module_& m);
void bind_placement(nanobind::module_& m);
void bind_model(nanobind::module_& m);
}  // namespace neoserve::bind
