// The only boundary between Python and C++.
#include <nanobind/nanobind.h>

#include "bind/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "NeoServe's native executor: packed weights, bound programs, kernel rows, and the machine as it is.";
  neoserve::bind::bind_machine(m);
  neoserve::bind::bind_placement(m);
  neoserve::bind::bind_model(m);
}
