#include "fiber.hpp"

#include <cstdint>

namespace mkcpu {

// The switch: callee-saved registers go to the old stack, the stack pointer changes, and they come from the new one
#if defined(MKC_UCONTEXT)

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = stack_bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#else

extern "C" void mkc_switch(void** save, void* load) __attribute__((visibility("hidden")));

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl mkc_switch
.hidden mkc_switch
.type mkc_switch, @function
mkc_switch:
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
.size mkc_switch, .-mkc_switch
)");
constexpr size_t kEntryWord = 6, kFrameWords = 8;  // one word of padding: a function starts with rsp % 16 == 8
#else
asm(R"(
.text
.p2align 4
.globl mkc_switch
.hidden mkc_switch
.type mkc_switch, %function
mkc_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
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
  ldp x19, x20, [sp, #0]
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
.size mkc_switch, .-mkc_switch
)");
constexpr size_t kEntryWord = 11, kFrameWords = 20;
#endif

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + stack_bytes) & ~uintptr_t(15);
  uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - kFrameWords;
  for (size_t i = 0; i < kFrameWords; ++i) frame[i] = 0;
  frame[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
  context.stack_pointer = frame;
}
void switch_context(Context& from, Context& to) { mkc_switch(&from.stack_pointer, to.stack_pointer); }

#endif
}  // namespace mkcpu
