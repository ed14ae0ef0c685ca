// Fibers: a stack each, switched by hand. And the hooks by which ThreadSanitizer follows them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

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

struct Stack {
  char* base = nullptr;  // lowest usable byte; below it lies a guard page
  size_t bytes = 0;
};

// Stacks are mapped in slabs, handed out again and again, and unmapped with the pool.
class StackPool {
 public:
  explicit StackPool(size_t stack_bytes);
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  Stack take();
  void give(Stack stack) { free_.push_back(stack); }
  // If `address` lies in the guard page of a stack: the fiber has overrun it.
  bool guards(const void* address) const;

 private:
  struct Slab {
    char* base;
    size_t bytes;
  };
  void grow();
  size_t stack_bytes_, page_bytes_;
  std::vector<Slab> slabs_;
  std::vector<Stack> free_;
};

void prepare(Context& context, Stack stack, void (*entry)());  // `entry` must never return
void switch_context(Context& from, Context& to);

// ThreadSanitizer. Without its library preloaded, all of this does nothing.
namespace tsan {
bool active();
void* create_fiber();
void destroy_fiber(void* fiber);
void* current_fiber();
void switch_fiber(void* fiber);
void acquire(const void* sync);
void release(const void* sync);

// The scheduler's own memory is shared by all fibers without any order that ThreadSanitizer knows of. So accesses are ignored as long as
// a context runs scheduler code; what kernels do there is then reported by `read` and `write`.
void ignore_begin();
void ignore_end();
void read(const void* p, size_t bytes);   // while exactly one ignore_begin is in force
void write(const void* p, size_t bytes);

class Ignored {
 public:
  Ignored() { ignore_begin(); }
  ~Ignored() { ignore_end(); }
  Ignored(const Ignored&) = delete;
  Ignored& operator=(const Ignored&) = delete;
};

// What an asynchronous operation does happens in a context of its own: ordered after nothing but what it acquires.
class AsyncContext {
 public:
  AsyncContext() {
    if (!active()) return;
    caller_ = current_fiber();
    switch_fiber(own_ = create_fiber());
    ignore_begin();
  }
  ~AsyncContext() {
    if (own_ == nullptr) return;
    ignore_end();
    switch_fiber(caller_);
    destroy_fiber(own_);
  }
  AsyncContext(const AsyncContext&) = delete;
  AsyncContext& operator=(const AsyncContext&) = delete;

 private:
  void* caller_ = nullptr;
  void* own_ = nullptr;
};
}  // namespace tsan

}  // namespace mkcpu
