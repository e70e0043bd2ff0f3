#include "core/placement.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <string>

namespace neoserve {
namespace {

// linux/mempolicy.h, spelled out so that old headers suffice.
constexpr int kPolicyDefault = 0, kPolicyPreferred = 1, kPolicyInterleave = 3, kPolicyLocal = 4;
constexpr int kPolicyModeMask = 0xff;  // above it are flags

struct ThreadPolicy {
  MemoryPolicy policy;
  PlacementOutcome outcome;
};

ThreadPolicy& current() {
  thread_local ThreadPolicy state;
  return state;
}

struct Registry {
  std::mutex lock;
  std::map<uintptr_t, size_t> mappings;
};

// Never destroyed: memory may be freed while the process ends.
Registry& registry() {
  static Registry& live = *new Registry;
  return live;
}

}  // namespace

MemoryCalls system_memory_calls() {
  return {
      [](size_t length) {
        // Without MAP_NORESERVE: the pages are set aside now, or the call fails now, not at first touch by a signal.
        return mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
      },
      [](void* address, size_t length, int mode, const unsigned long* nodes, unsigned long bits) {
        return syscall(SYS_mbind, address, length, mode, nodes, bits, 0u);
      },
      [](int* mode) { return syscall(SYS_get_mempolicy, mode, nullptr, 0ul, nullptr, 0ul); },
      [](void* address, size_t length, int advice) { return madvise(address, length, advice); },
  };
}

MemoryCalls& memory_calls() {
  static MemoryCalls calls = system_memory_calls();
  return calls;
}

void set_memory_policy(MemoryPolicy policy) {
  current() = {std::move(policy), {}};
}

PlacementOutcome reset_memory_policy() {
  return std::exchange(current(), {}).outcome;
}

const MemoryPolicy& memory_policy() {
  return current().policy;
}

void bind_to_nodes(void* address, size_t length) {
  ThreadPolicy& state = current();
  if (state.policy.mode == NodeMode::kDefault || length == 0) return;
  constexpr int kBits = std::numeric_limits<unsigned long>::digits;
  std::vector<unsigned long> mask(static_cast<size_t>(state.policy.nodes.back() / kBits) + 1);
  for (const int node : state.policy.nodes) {
    mask[static_cast<size_t>(node / kBits)] |= 1ul << (node % kBits);
    if (state.policy.mode == NodeMode::kPreferred) break;
  }
  const int mode = state.policy.mode == NodeMode::kPreferred ? kPolicyPreferred : kPolicyInterleave;
  // The kernel reads one bit less than it is told.
  const unsigned long bits = mask.size() * kBits + 1;
  if (memory_calls().bind(address, length, mode, mask.data(), bits) == 0) {
    state.outcome.bound_bytes += length;
  } else if (state.outcome.bind_error == 0) {
    state.outcome.bind_error = errno;
  }
}

size_t reserved_huge_page_size() {
  static const size_t size = [] {
    std::ifstream file("/proc/meminfo");
    for (std::string word; file >> word;) {
      size_t kib = 0;
      if (word == "Hugepagesize:" && file >> kib) return kib * 1024;
    }
    return size_t{0};
  }();
  return size;
}

void* map_reserved(size_t length) {
  ThreadPolicy& state = current();
  if (state.policy.huge_pages != HugePages::kReserved) return nullptr;
  void* const mapping = memory_calls().map_reserved(length);
  if (mapping == MAP_FAILED) {
    if (state.outcome.reserve_error == 0) state.outcome.reserve_error = errno;
    return nullptr;
  }
  state.outcome.reserved_bytes += length;
  return mapping;
}

void advise_huge_pages(void* address, size_t length) {
  // Only advice: a kernel without transparent huge pages refuses it and ordinary pages serve.
  const bool off = current().policy.huge_pages == HugePages::kOff;
  (void)memory_calls().advise(address, length, off ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
}

bool has_inherited_policy() {
  int mode = kPolicyDefault;
  if (memory_calls().policy(&mode) != 0) return false;  // refused in a container: then none could be set either
  mode &= kPolicyModeMask;
  return mode != kPolicyDefault && mode != kPolicyLocal;
}

std::vector<std::pair<uintptr_t, size_t>> memory_mappings() {
  Registry& live = registry();
  const std::lock_guard<std::mutex> guard(live.lock);
  return {live.mappings.begin(), live.mappings.end()};
}

void add_mapping(const void* address, size_t bytes) {
  Registry& live = registry();
  const std::lock_guard<std::mutex> guard(live.lock);
  live.mappings[reinterpret_cast<uintptr_t>(address)] = bytes;
}

void remove_mapping(const void* address) {
  Registry& live = registry();
  const std::lock_guard<std::mutex> guard(live.lock);
  live.mappings.erase(reinterpret_cast<uintptr_t>(address));
}

}  // namespace neoserve
