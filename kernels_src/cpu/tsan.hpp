// The hooks by which ThreadSanitizer follows fibers and what they agree on. Without its library preloaded, all of this does nothing.
#pragma once
#include <cstddef>

namespace mkcpu {

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
void read(const void* p, size_t bytes);  // while exactly one ignore_begin is in force
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
