// Cooperative threads whose whole state is bytes: a stack in static memory with all saved registers on it. A copy of
// the bytes between `stack_pointer` and the top of the stack is a snapshot, and can be put back any number of times.
#pragma once

#include <cstddef>
#include <cstdint>

// Saves the registers that a call keeps on the stack, stores the stack pointer in `*save`, and goes on at `load`.
extern "C" void model_switch_stack(void** save, void* load);

namespace model {

constexpr size_t kStackBytes = 16384;

struct alignas(64) Fiber {
  uint8_t stack[kStackBytes];
  void* stack_pointer;

  uint8_t* top() { return stack + kStackBytes; }
  size_t used() const { return static_cast<size_t>(stack + kStackBytes - static_cast<uint8_t*>(stack_pointer)); }
  // The next switch to this fiber calls `entry`, which must not return.
  void start(void (*entry)());
  // Dead bytes below the stack pointer would make equal states look different when frames grow over them.
  void clear_dead_bytes();
};

}  // namespace model
