// Where anonymous memory is put: NUMA nodes and huge pages (docs/machine.md). System calls without libnuma, which a
// small container image does not have; a refused one costs speed and is reported, never an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace neoserve {

enum class NodeMode : uint8_t {
  kDefault,     // the system's choice: the node of the CPU that touches a page first
  kPreferred,   // the first node of the list; others when it is full
  kInterleave,  // page by page over the nodes of the list
};

enum class HugePages : uint8_t {
  kAdvise,    // transparent huge pages are asked for
  kOff,       // transparent huge pages are declined
  kReserved,  // from the pool that an administrator has reserved (hugetlb), else as kAdvise
};

struct MemoryPolicy {
  NodeMode mode = NodeMode::kDefault;
  std::vector<int> nodes;  // ascending, not empty unless the mode is kDefault
  HugePages huge_pages = HugePages::kAdvise;
};

// What became of the mappings made under a policy. Errors are errno values of the first refusal, 0 without one.
struct PlacementOutcome {
  size_t bound_bytes = 0;     // given to the nodes of the policy
  size_t reserved_bytes = 0;  // from the hugetlb pool
  int bind_error = 0;
  int reserve_error = 0;
};

// The calling thread's policy for every Memory that it makes from now on; the outcome starts anew.
void set_memory_policy(MemoryPolicy policy);
// Back to the default policy; returns the outcome since set_memory_policy.
PlacementOutcome reset_memory_policy();
const MemoryPolicy& memory_policy();

// Applies the nodes of the calling thread's policy to untouched memory, whoever touches it later.
void bind_to_nodes(void* address, size_t length);
// `length` bytes, a multiple of reserved_huge_page_size(), from the hugetlb pool if the calling thread's policy asks
// for them and there are enough; else null.
void* map_reserved(size_t length);
// Bytes of a page of the hugetlb pool; 0 when the kernel has none.
size_t reserved_huge_page_size();
// Asks for, or declines, transparent huge pages as the calling thread's policy says.
void advise_huge_pages(void* address, size_t length);

// Whether the process was started under a memory policy of its own (numactl --membind, --interleave, ...), which then
// stays.
bool has_inherited_policy();

// The system calls, so that tests can show refusals. Each returns as the call does, with errno.
struct MemoryCalls {
  void* (*map_reserved)(size_t length);
  long (*bind)(void* address, size_t length, int mode, const unsigned long* nodes, unsigned long bits);
  long (*policy)(int* mode);
  int (*advise)(void* address, size_t length, int advice);
};
MemoryCalls& memory_calls();
MemoryCalls system_memory_calls();

// Every live Memory: (address, bytes).
std::vector<std::pair<uintptr_t, size_t>> memory_mappings();
void add_mapping(const void* address, size_t bytes);
void remove_mapping(const void* address);

}  // namespace neoserve
