// Fibers: a stack each, switched by hand.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(MKC_UCONTEXT)
#define MKC_UCONTEXT 1
#endif
#if defined(MKC_UCONTEXT)
#include <ucontext.h>
#endif

namespace mkcpu {

struct Context {
#if defined(MKC_UCONTEXT)
  ucontext_t state;
#else
  void* stack_pointer = nullptr;
#endif
};

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)());  // `entry` must never return
void switch_context(Context& from, Context& to);

}  // namespace mkcpu
