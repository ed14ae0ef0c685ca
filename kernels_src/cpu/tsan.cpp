#include "tsan.hpp"

// ThreadSanitizer's interface, present only when its library is preloaded.
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
