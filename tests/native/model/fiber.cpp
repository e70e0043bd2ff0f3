#include "fiber.h"

#include <cstring>

#if defined(__x86_64__)
// System V ABI: rbx, rbp, r12 to r15.
asm(R"(
.text
.globl model_switch_stack
.type model_switch_stack, @function
model_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size model_switch_stack, .-model_switch_stack
)");
constexpr size_t kReturnWord = 6, kFrameWords = 8;
#elif defined(__aarch64__)
// AAPCS64: x19 to x30, d8 to d15.
asm(R"(
.text
.globl model_switch_stack
.type model_switch_stack, %function
model_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size model_switch_stack, .-model_switch_stack
)");
constexpr size_t kReturnWord = 11, kFrameWords = 20;
#else
#error "fiber.cpp: processor not supported"
#endif

namespace model {

void Fiber::start(void (*entry)()) {
  std::memset(stack, 0, kStackBytes);
  // x86-64: `ret` takes the entry's address and leaves the stack as after a call (8 bytes below a multiple of 16).
  auto* frame = reinterpret_cast<uint64_t*>(top()) - kFrameWords;
  frame[kReturnWord] = reinterpret_cast<uint64_t>(entry);
  stack_pointer = frame;
}

void Fiber::clear_dead_bytes() {
  constexpr size_t kReach = 768;
  std::memset(static_cast<uint8_t*>(stack_pointer) - kReach, 0, kReach);
}

}  // namespace model
