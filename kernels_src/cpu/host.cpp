// What mkernel/runtime/cpu/scheduler.py calls.
#include <algorithm>
#include <cstring>
#include <new>

#include "model.hpp"

using mkcpu::Scheduler;

namespace {
Scheduler& as_scheduler(void* p) { return *static_cast<Scheduler*>(p); }
size_t give_text(const std::string& text, char* out, size_t capacity) {
  if (capacity > 0) {
    const size_t bytes = std::min(text.size(), capacity - 1);
    memcpy(out, text.data(), bytes);
    out[bytes] = 0;
  }
  return text.size();
}
}  // namespace

void* mkc_create(uint64_t seed, bool virtual_time) { return new (std::nothrow) Scheduler(seed, virtual_time); }
void mkc_destroy(void* s) { delete static_cast<Scheduler*>(s); }
uint64_t mkc_launch(void* s, void (*entry)(const void*), const void* parameters, size_t bytes, uint32_t grid, uint32_t threads,
                    uint32_t shared_bytes, uint32_t cluster, bool apart, bool early, uint32_t rank) {
  if (grid == 0 || threads == 0 || threads > 1024 || shared_bytes > mkcpu::kMaxShared) return 0;
  if (cluster == 0 || grid % cluster != 0) return 0;
  try {
    return as_scheduler(s).launch(entry, parameters, bytes, grid, threads, shared_bytes, cluster, apart, early, rank);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}
void mkc_hold(void* s, uint64_t launch, uint32_t cta, uint32_t copies, uint64_t turns) {
  mkcpu::Launch* l = as_scheduler(s).find(launch);
  if (l == nullptr) return;
  for (const auto& each : l->ctas) {
    if (cta != mkcpu::kEveryCta && cta != each->index) continue;
    each->hold_after = each->copies_until_hold = copies, each->hold_turns = turns;
    if (copies == 0) as_scheduler(s).hold(*each);
  }
}
bool mkc_end_hold(void* s) { return as_scheduler(s).end_hold(); }
int32_t mkc_run(void* s, uint64_t max_turns, uint64_t until_ns) { return as_scheduler(s).run(max_turns, until_ns); }
int32_t mkc_finished(void* s, uint64_t launch) {
  const mkcpu::Launch* l = as_scheduler(s).find(launch);
  return l == nullptr ? mkcpu::kFailed : l->state;
}
void mkc_cancel(void* s, uint64_t launch) {
  mkcpu::Launch* l = as_scheduler(s).find(launch);
  if (l == nullptr || l->state != mkcpu::kRunningLaunch) return;
  as_scheduler(s).fail_launch(*l, "cancelled");
  as_scheduler(s).remove(*l);
}
void mkc_forget(void* s, uint64_t launch) {
  mkc_cancel(s, launch);
  as_scheduler(s).launches.erase(launch);
}
size_t mkc_error(void* s, uint64_t launch, char* text, size_t capacity) {
  const mkcpu::Launch* l = as_scheduler(s).find(launch);
  return give_text(l == nullptr ? std::string() : l->error, text, capacity);
}
size_t mkc_report(void* s, char* text, size_t capacity) { return give_text(as_scheduler(s).report(), text, capacity); }
uint64_t mkc_now(void* s) { return as_scheduler(s).now(); }
void mkc_advance_to(void* s, uint64_t ns) {
  Scheduler& sched = as_scheduler(s);
  if (sched.virtual_time && ns > sched.clock) sched.clock = ns;
}
static uint64_t first_time(const Scheduler& scheduler, bool timer) {
  uint64_t first = mkcpu::kNever;
  for (const mkcpu::Fiber* fiber : scheduler.flag_waiters) {
    if (fiber->waiting.timer == timer) first = std::min(first, fiber->waiting.deadline);
  }
  return first;
}
uint64_t mkc_next_deadline(void* s) { return first_time(as_scheduler(s), false); }
uint64_t mkc_next_timer(void* s) { return first_time(as_scheduler(s), true); }
void mkc_poke(void* s) { __atomic_store_n(&as_scheduler(s).poke, 1, __ATOMIC_RELEASE); }
uint64_t mkc_turns(void* s) { return as_scheduler(s).turn; }
uint64_t mkc_trace(void* s) { return as_scheduler(s).trace; }
void mkc_name(void* s, uint64_t address, uint64_t bytes, const char* name) {
  const std::lock_guard lock(as_scheduler(s).names_lock);
  auto& names = as_scheduler(s).names;
  if (bytes == 0) {
    names.erase(address);
  } else {
    names[address] = {bytes, name};
  }
}

// An engine's copy is not shown to ThreadSanitizer, whose interceptor of memcpy would report it: the order between an engine and a kernel
// is the transport's business, and tested there.
static void copy_bytes(void* dst, const void* src, size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes)::"memory");
#else
  volatile char* d = static_cast<char*>(dst);  // volatile: must not become a call of memcpy
  const volatile char* s = static_cast<const char*>(src);
  while (bytes-- > 0) *d++ = *s++;
#endif
}
void mkc_copy(void* s, void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  if (s != nullptr && as_scheduler(s).running != 0) as_scheduler(s).record_write(dst, bytes, as_scheduler(s).engine_writer(dst));
  copy_bytes(dst, src, bytes);
}
uint64_t mkc_put_begins(void* s, void* dst, const void* src, size_t bytes, const char* name) {
  return as_scheduler(s).put_begins(static_cast<char*>(dst), static_cast<const char*>(src), bytes, name);
}
void mkc_put_lands(void* s, uint64_t put) { as_scheduler(s).put_lands(put); }
void mkc_put_ends(void* s, uint64_t put) { as_scheduler(s).put_ends(put); }
void mkc_signal(uint64_t* flag, uint64_t value) {
  mkcpu::tsan::release(flag);
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}
uint64_t mkc_load(const uint64_t* flag) {
  const uint64_t value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
  mkcpu::tsan::acquire(flag);
  return value;
}
void mkc_engine_acquire(void* s) { mkcpu::tsan::acquire(&as_scheduler(s).published); }
