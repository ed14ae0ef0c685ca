#include "fiber.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include <sys/mman.h>
#include <unistd.h>

namespace mkcpu {

// ---- stacks
namespace {
constexpr size_t kStacksPerSlab = 64;
}

StackPool::StackPool(size_t stack_bytes) : page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  stack_bytes_ = (stack_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
}

StackPool::~StackPool() {
  for (const Slab& slab : slabs_) munmap(slab.base, slab.bytes);
}

void StackPool::grow() {
  const size_t pitch = stack_bytes_ + page_bytes_, bytes = kStacksPerSlab * pitch;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  slabs_.push_back(Slab{static_cast<char*>(base), bytes});
  for (size_t i = kStacksPerSlab; i-- > 0;) {
    char* guard = static_cast<char*>(base) + i * pitch;
    // Fails only when the process has too many mappings; the stacks then work without their guard.
    (void)mprotect(guard, page_bytes_, PROT_NONE);
    free_.push_back(Stack{guard + page_bytes_, stack_bytes_});
  }
}

Stack StackPool::take() {
  if (free_.empty()) grow();
  const Stack stack = free_.back();
  free_.pop_back();
  return stack;
}

bool StackPool::guards(const void* address) const {
  const char* p = static_cast<const char*>(address);
  for (const Slab& slab : slabs_) {
    if (p >= slab.base && p < slab.base + slab.bytes) return static_cast<size_t>(p - slab.base) % (stack_bytes_ + page_bytes_) < page_bytes_;
  }
  return false;
}

// ---- the switch: callee-saved registers go to the old stack, the stack pointer changes, and they come from the new one
#if defined(MKC_UCONTEXT)

void prepare(Context& context, Stack stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack.base;
  context.state.uc_stack.ss_size = stack.bytes;
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

void prepare(Context& context, Stack stack, void (*entry)()) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack.base) + stack.bytes) & ~uintptr_t(15);
  uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - kFrameWords;
  for (size_t i = 0; i < kFrameWords; ++i) frame[i] = 0;
  frame[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
  context.stack_pointer = frame;
}
void switch_context(Context& from, Context& to) { mkc_switch(&from.stack_pointer, to.stack_pointer); }

#endif
}  // namespace mkcpu

// ---- ThreadSanitizer's interface, present only when its library is preloaded
extern "C" {
void* __tsan_get_current_fiber() __attribute__((weak));
void* __tsan_create_fiber(unsigned flags) __attribute__((weak));
void __tsan_destroy_fiber(void* fiber) __attribute__((weak));
void __tsan_switch_to_fiber(void* fiber, unsigned flags) __attribute__((weak));
void __tsan_acquire(void* sync) __attribute__((weak));
void __tsan_release(void* sync) __attribute__((weak));
void __tsan_read_range(void* p, unsigned long bytes) __attribute__((weak));
void __tsan_write_range(void* p, unsigned long bytes) __attribute__((weak));
void AnnotateIgnoreReadsBegin(const char* file, int line) __attribute__((weak));
void AnnotateIgnoreReadsEnd(const char* file, int line) __attribute__((weak));
void AnnotateIgnoreWritesBegin(const char* file, int line) __attribute__((weak));
void AnnotateIgnoreWritesEnd(const char* file, int line) __attribute__((weak));
}

namespace mkcpu::tsan {
namespace {
constexpr unsigned kNoSync = 1;  // a switch orders nothing: only barriers, flags and the like do
}
bool active() { return __tsan_create_fiber != nullptr; }
void* create_fiber() { return active() ? __tsan_create_fiber(0) : nullptr; }
void destroy_fiber(void* fiber) {
  if (fiber != nullptr) __tsan_destroy_fiber(fiber);
}
void* current_fiber() { return active() ? __tsan_get_current_fiber() : nullptr; }
void switch_fiber(void* fiber) {
  if (fiber != nullptr) __tsan_switch_to_fiber(fiber, kNoSync);
}
void acquire(const void* sync) {
  if (active()) __tsan_acquire(const_cast<void*>(sync));
}
void release(const void* sync) {
  if (active()) __tsan_release(const_cast<void*>(sync));
}
void ignore_begin() {
  if (!active()) return;
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
void ignore_end() {
  if (!active()) return;
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
void read(const void* p, size_t bytes) {
  if (!active()) return;
  ignore_end();
  __tsan_read_range(const_cast<void*>(p), bytes);
  ignore_begin();
}
void write(const void* p, size_t bytes) {
  if (!active()) return;
  ignore_end();
  __tsan_write_range(const_cast<void*>(p), bytes);
  ignore_begin();
}
}  // namespace mkcpu::tsan
