#include "core/placement.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "bind/bindings.h"
#include "core/memory.h"

namespace neoserve::bind {
namespace {

namespace nb = nanobind;

NodeMode parse_mode(const std::string& name) {
  if (name == "default") return NodeMode::kDefault;
  if (name == "preferred") return NodeMode::kPreferred;
  if (name == "interleave") return NodeMode::kInterleave;
  throw std::invalid_argument("mode is \"" + name + "\"; it must be default, preferred or interleave");
}

HugePages parse_huge_pages(const std::string& name) {
  if (name == "auto") return HugePages::kAdvise;
  if (name == "off") return HugePages::kOff;
  if (name == "hugetlb") return HugePages::kReserved;
  throw std::invalid_argument("huge_pages is \"" + name + "\"; it must be auto, off or hugetlb");
}

void set_policy(const std::string& mode, std::vector<int> nodes, const std::string& huge_pages) {
  constexpr int kMostNodes = 1 << 16;
  std::sort(nodes.begin(), nodes.end());
  const MemoryPolicy policy{parse_mode(mode), std::move(nodes), parse_huge_pages(huge_pages)};
  if (policy.mode != NodeMode::kDefault && policy.nodes.empty()) throw std::invalid_argument("nodes are missing");
  if (!policy.nodes.empty() && (policy.nodes.front() < 0 || policy.nodes.back() >= kMostNodes)) {
    throw std::invalid_argument("nodes must be in [0, 65536)");
  }
  set_memory_policy(policy);
}

nb::dict reset_policy() {
  const PlacementOutcome outcome = reset_memory_policy();
  nb::dict out;
  out["bound_bytes"] = outcome.bound_bytes;
  out["reserved_bytes"] = outcome.reserved_bytes;
  out["bind_error"] = outcome.bind_error;
  out["reserve_error"] = outcome.reserve_error;
  return out;
}

// What tests put in place of the system calls: every call is noted, and answered with an errno value or, for 0, with
// success.
struct Fakes {
  std::mutex lock;
  int bind_error = 0, map_error = 0, policy_error = 0, policy_mode = 0;
  std::vector<std::tuple<int, std::vector<int>, size_t>> bound;  // mode, nodes, bytes
  std::vector<std::pair<int, size_t>> advised;                   // advice, bytes
};

Fakes& fakes() {
  static Fakes state;
  return state;
}

long answer(int error) {
  errno = error;
  return error == 0 ? 0 : -1;
}

long fake_bind(void*, size_t length, int mode, const unsigned long* nodes, unsigned long bits) {
  Fakes& state = fakes();
  const std::lock_guard<std::mutex> guard(state.lock);
  std::vector<int> listed;
  for (unsigned long bit = 0; bit + 1 < bits; ++bit) {
    if (nodes[bit / 64] >> (bit % 64) & 1) listed.push_back(static_cast<int>(bit));
  }
  state.bound.emplace_back(mode, listed, length);
  return answer(state.bind_error);
}

void* fake_map(size_t length) {
  const int error = fakes().map_error;
  if (error == 0) return mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  errno = error;
  return MAP_FAILED;
}

long fake_policy(int* mode) {
  *mode = fakes().policy_mode;
  return answer(fakes().policy_error);
}

int fake_advise(void*, size_t length, int advice) {
  Fakes& state = fakes();
  const std::lock_guard<std::mutex> guard(state.lock);
  state.advised.emplace_back(advice, length);
  return 0;
}

void fake_calls(int bind_error, int map_error, int policy_error, int policy_mode) {
  Fakes& state = fakes();
  const std::lock_guard<std::mutex> guard(state.lock);
  state.bound.clear();
  state.advised.clear();
  state.bind_error = bind_error;
  state.map_error = map_error;
  state.policy_error = policy_error;
  state.policy_mode = policy_mode;
  memory_calls() = {fake_map, fake_bind, fake_policy, fake_advise};
}

nb::dict noted_calls() {
  nb::list bound, advised;
  for (const auto& [mode, nodes, bytes] : fakes().bound) bound.append(nb::make_tuple(mode, nodes, bytes));
  for (const auto& [advice, bytes] : fakes().advised) advised.append(nb::make_tuple(advice, bytes));
  nb::dict out;
  out["bound"] = bound;
  out["advised"] = advised;
  return out;
}

}  // namespace

void bind_placement(nb::module_& m) {
  m.def("page_size", &system_page_size, "Page size of the system in bytes.");
  m.def(
      "mapping_layout",
      [](size_t bytes, size_t page) {
        const MappingLayout layout = mapping_layout(bytes, page);
        return nb::make_tuple(layout.alignment, layout.length, layout.mapped);
      },
      nb::arg("bytes"), nb::arg("page"),
      "(alignment, length, mapped) in bytes of a block with pages of `page` bytes. MemoryError on overflow.");
  m.def("set_memory_policy", &set_policy, nb::arg("mode"), nb::arg("nodes") = std::vector<int>{},
        nb::arg("huge_pages") = "auto",
        "Where this thread's weights, KV pools and arenas go from now on: default, preferred or interleave.");
  m.def("reset_memory_policy", &reset_policy,
        "Ends the policy; what became of it: bound_bytes, reserved_bytes, and the first bind_error and reserve_error "
        "(errno, 0 without one).");
  m.def("has_inherited_policy", &has_inherited_policy, "Whether the process was started under a NUMA memory policy.");
  m.def("memory_mappings", &memory_mappings, "(address, bytes) of every live weight, KV pool and arena.");
  m.def("fake_memory_calls", &fake_calls, nb::arg("bind_error") = 0, nb::arg("map_error") = 0,
        nb::arg("policy_error") = 0, nb::arg("policy_mode") = 0,
        "Tests only: replaces the system calls of placement by ones that note what is asked and answer so.");
  m.def("noted_memory_calls", &noted_calls, "Tests only: what the fakes were asked, as bound and advised.");
  m.def("real_memory_calls", [] { memory_calls() = system_memory_calls(); }, "Tests only: the system calls again.");
}

}  // namespace neoserve::bind
