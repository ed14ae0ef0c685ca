// The run: which thread goes on next, when asynchronous copies happen, when a launch ends, and who waits for what when nothing moves.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include "model.hpp"

namespace mkcpu {

namespace {
constexpr uint64_t kTurnNs = 5;              // virtual time of one turn
constexpr uint64_t kFlagPollTurns = 256;     // how often flags are looked at that others may have written
constexpr uint64_t kTimeCheckTurns = 64;
constexpr uint64_t kStallCheckTurns = 512;
constexpr uint64_t kLongestStall = 4096;     // turns
constexpr uint64_t kLongestFocus = 256;      // turns
constexpr uint64_t kPollsPerFiber = 16;      // without progress, before the run counts as idle
constexpr uint32_t kYieldRounds = 64;        // process mode: rounds of sched_yield before it sleeps
constexpr uint64_t kShortSleepNs = 50'000, kLongSleepNs = 200'000;
constexpr uint64_t kLookAgainNs = 1'000'000;   // process mode: abort words are looked at this often
constexpr uint64_t kLongestIdleNs = 20'000'000;  // process mode: run returns, so that the host sees signals
constexpr size_t kStackBytes = 64 * 1024, kTsanStackBytes = 512 * 1024;  // a race report is formatted on the fiber's stack
constexpr size_t kLongestThreadList = 60;    // characters, in a report
constexpr int kPoison = 0xff;                // NaN in either 16-bit format

thread_local Scheduler* t_scheduler = nullptr;

uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000u + uint64_t(t.tv_nsec);
}
void sleep_ns(uint64_t ns) {
  const timespec t{0, static_cast<long>(ns)};
  nanosleep(&t, nullptr);
}
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

void fiber_main() {
  Scheduler& s = scheduler();
  Fiber& fiber = *s.current;
  Launch& launch = *fiber.cta->launch;
  tsan::acquire(&launch);
  launch.entry(launch.parameters);
  {
    const Call call;
    finish_thread(s, fiber);
  }
  tsan::release(&launch.state);
  fiber.finished = true;
  tsan::switch_fiber(s.main_tsan);
  switch_context(fiber.context, s.main);
  std::abort();  // a finished fiber is never resumed
}

std::string format_list(const char* text, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  const int size = vsnprintf(nullptr, 0, text, again);
  va_end(again);
  std::string result(static_cast<size_t>(size > 0 ? size : 0), '\0');
  vsnprintf(result.data(), result.size() + 1, text, arguments);
  return result;
}
}  // namespace

Scheduler& scheduler() { return *t_scheduler; }
Fiber& self() { return *t_scheduler->current; }

std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string result = format_list(text, arguments);
  va_end(arguments);
  return result;
}

Scheduler::Scheduler(uint64_t seed, bool virtual_time_)
    : virtual_time(virtual_time_), rng(mix(seed + 0x9e3779b97f4a7c15ull)), stacks(new StackPool(tsan::active() ? kTsanStackBytes : kStackBytes)) {}

Scheduler::~Scheduler() {
  while (!launches.empty()) {
    remove(*launches.begin()->second);
    launches.erase(launches.begin());
  }
}

uint64_t Scheduler::random() { return mix(rng += 0x9e3779b97f4a7c15ull); }
uint64_t Scheduler::now() const { return virtual_time ? clock : monotonic_ns(); }

// ---- launches

uint64_t Scheduler::launch(void (*entry)(const void*), const void* parameters, size_t bytes, uint32_t grid, uint32_t threads, uint32_t shared_bytes,
                           uint32_t rank) {
  auto owned = std::make_unique<Launch>();
  Launch& l = *owned;
  l.id = next_launch++, l.begin = turn, l.rank = rank, l.grid = grid, l.threads = threads, l.entry = entry, l.parameter_bytes = bytes;
  l.parameters = std::aligned_alloc(kSharedAlignment, (bytes / kSharedAlignment + 1) * kSharedAlignment);
  if (l.parameters == nullptr) throw std::bad_alloc();
  memcpy(l.parameters, parameters, bytes);
  l.live_ctas = grid;
  for (uint32_t index = 0; index < grid; ++index) {
    l.ctas.push_back(std::make_unique<Cta>());
    Cta& cta = *l.ctas.back();
    cta.launch = &l, cta.index = index, cta.live = threads, cta.shared_bytes = shared_bytes;
    const size_t room = (shared_bytes / kSharedAlignment + 1) * kSharedAlignment;
    cta.shared = static_cast<char*>(std::aligned_alloc(kSharedAlignment, room));
    if (cta.shared == nullptr) throw std::bad_alloc();
    memset(cta.shared, kPoison, room);
    cta.dirty_owner.resize(shared_bytes / kChunkBytes + 1);
    cta.warps.resize((threads + kLanes - 1) / kLanes);
    cta.warpgroups.resize((threads + kWarpgroupThreads - 1) / kWarpgroupThreads);
    cta.fibers = std::make_unique<Fiber[]>(threads);
    for (uint32_t t = 0; t < threads; ++t) {
      Fiber& fiber = cta.fibers[t];
      fiber.cta = &cta, fiber.thread = t;
      fiber.stack = stacks->take();
      fiber.tsan = tsan::create_fiber();
      prepare(fiber.context, fiber.stack, fiber_main);
      make_runnable(&fiber);
    }
  }
  tsan::release(&l);
  const uint64_t id = l.id;
  launches.emplace(id, std::move(owned));
  ++running;
  return id;
}

Launch* Scheduler::find(uint64_t id) {
  const auto it = launches.find(id);
  return it == launches.end() ? nullptr : it->second.get();
}

void Scheduler::finish_launch(Launch& launch, int32_t state) {
  remove(launch);
  launch.state = state;
  ended = true;
}

void Scheduler::remove(Launch& launch) {
  if (launch.state != kRunningLaunch) return;
  launch.state = kFailed;
  if (--running == 0) written.clear();
  const auto of_launch = [&](const Fiber* fiber) { return fiber->cta->launch == &launch; };
  std::erase_if(flag_waiters, of_launch);
  const auto copy_of_launch = [&](const std::unique_ptr<AsyncCopy>& copy) { return copy->cta->launch == &launch; };
  std::erase_if(eager, copy_of_launch);
  std::erase_if(lazy, copy_of_launch);
  void* here = tsan::current_fiber();
  for (auto& cta : launch.ctas) {
    runnable -= cta->runnable.size();
    if (!cta->runnable.empty()) not_ready(*cta);
    for (uint32_t t = 0; t < launch.threads; ++t) {
      Fiber& fiber = cta->fibers[t];
      stacks->give(fiber.stack);  // not earlier: who gets it next must come after all that this launch did
      if (fiber.finished) continue;
      if (fiber.tsan != nullptr) {  // a context may not end while it ignores
        tsan::switch_fiber(fiber.tsan);
        while (fiber.calls-- > 0) tsan::ignore_end();
        tsan::switch_fiber(here);
        tsan::destroy_fiber(fiber.tsan);
      }
    }
    std::free(cta->shared);
  }
  tsan::acquire(&launch.state);
  launch.ctas.clear();
  std::free(launch.parameters);
  launch.parameters = nullptr;
}

void Scheduler::fail_launch(Launch& launch, const std::string& what) {
  if (launch.error.empty()) launch.error = what;
}

void Scheduler::fail_fiber(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  Fiber& fiber = *current;
  Launch& launch = *fiber.cta->launch;
  fail_launch(launch, format("rank %u, CTA %u, thread %u: ", launch.rank, fiber.cta->index, fiber.thread) + format_list(text, arguments));
  va_end(arguments);
  tsan::switch_fiber(main_tsan);
  switch_context(fiber.context, main);
  std::abort();  // a failed launch is removed before its fibers could go on
}

// ---- threads

void Scheduler::make_runnable(Fiber* fiber) {
  Cta& cta = *fiber->cta;
  if (cta.runnable.empty()) {
    cta.ready_slot = ready.size();
    ready.push_back(&cta);
  }
  fiber->waiting.kind = Wait::kNone;
  cta.runnable.push_back(fiber);
  ++runnable;
  progress();
}

void Scheduler::wake(std::vector<Fiber*>& fibers) {
  for (Fiber* fiber : fibers) make_runnable(fiber);
  fibers.clear();
}

void Scheduler::park(const Waiting& waiting) {
  Fiber& fiber = *current;
  fiber.waiting = waiting;
  tsan::switch_fiber(main_tsan);
  switch_context(fiber.context, main);
}

void Scheduler::yield(bool polling) {
  const uint64_t polls = polling ? idle_polls + 1 : 0;
  make_runnable(current);
  idle_polls = polls;
  Fiber& fiber = *current;
  tsan::switch_fiber(main_tsan);
  switch_context(fiber.context, main);
}

void Scheduler::not_ready(Cta& cta) {
  ready[cta.ready_slot] = ready.back();
  ready[cta.ready_slot]->ready_slot = cta.ready_slot;
  ready.pop_back();
  if (focus == &cta) focus = nullptr;
}

// Takes a random runnable thread of a random CTA, and stays with the CTA for a while: that is kind to the caches, and lets CTAs run far ahead
// of each other. A stalled CTA is mostly passed over.
Fiber* Scheduler::pick() {
  if (focus == nullptr || turn >= focus_until) {
    size_t index = random() % ready.size();
    for (int tries = 0; tries < 4 && ready[index]->stalled_until > turn; ++tries) index = random() % ready.size();
    focus = ready[index];
    focus_until = turn + random() % kLongestFocus;
  }
  Cta& cta = *focus;
  const size_t index = random() % cta.runnable.size();
  Fiber* fiber = cta.runnable[index];
  cta.runnable[index] = cta.runnable.back();
  cta.runnable.pop_back();
  --runnable;
  if (cta.runnable.empty()) not_ready(cta);
  return fiber;
}

void Scheduler::stall_someone() {
  if (turn < stall_check || ready.empty()) return;
  stall_check = turn + kStallCheckTurns;
  if (chance(2)) ready[random() % ready.size()]->stalled_until = turn + random() % kLongestStall;
}

void Scheduler::run_fiber(Fiber* fiber) {
  Cta& cta = *fiber->cta;
  Launch& launch = *cta.launch;
  trace = mix(trace ^ (launch.id << 40) ^ (uint64_t(launch.rank) << 32) ^ (uint64_t(cta.index) << 16) ^ fiber->thread);
  current = fiber;
  tsan::switch_fiber(fiber->tsan);
  switch_context(main, fiber->context);
  current = nullptr;
  if (!launch.error.empty()) return finish_launch(launch, kFailed);
  if (!fiber->finished) return;
  tsan::destroy_fiber(fiber->tsan);
  progress();
  if (--cta.live > 0) {
    if (cta.everyone.arrived == cta.live) cta.everyone.arrived = 0, ++cta.everyone.generation, wake(cta.everyone.waiting);  // those who have left do not count
    return;
  }
  finish_cta(*this, cta);
  if (!launch.error.empty()) return finish_launch(launch, kFailed);
  if (--launch.live_ctas > 0) return;
  while (launch.state == kRunningLaunch && launch.stores_in_flight > 0) execute_some_copy();
  if (launch.state == kRunningLaunch) finish_launch(launch, kSucceeded);
}

// ---- flags

bool Scheduler::poll_flags(bool everyone) {
  const uint64_t time = now();
  released = false;
  if (everyone) released_since_wake = false;
  bool any = false;
  for (size_t i = 0; i < flag_waiters.size();) {
    Fiber* fiber = flag_waiters[i];
    const uint64_t* flag = reinterpret_cast<const uint64_t*>(fiber->waiting.object);
    if (!everyone && time < fiber->waiting.deadline && __atomic_load_n(flag, __ATOMIC_RELAXED) < fiber->waiting.value) {
      ++i;
      continue;
    }
    flag_waiters[i] = flag_waiters.back();
    flag_waiters.pop_back();
    make_runnable(fiber);
    any = true;
  }
  return any;
}

// ---- the loop

int32_t Scheduler::run(uint64_t max_turns, uint64_t until_ns) {
  struct Use {
    Scheduler* before = t_scheduler;
    ~Use() { t_scheduler = before; }
  } use;
  t_scheduler = this;
  const tsan::Ignored ignored;
  main_tsan = tsan::current_fiber();
  const uint64_t end = max_turns > kNever - turn ? kNever : turn + max_turns;
  uint64_t idle_since = 0, looked = 0;
  uint32_t idle_rounds = 0;
  while (true) {
    if (ended) {
      ended = false;
      return kLaunchDone;
    }
    if (running == 0) return kIdle;
    if (turn >= end || (turn % kTimeCheckTurns == 0 && until_ns != kNever && now() >= until_ns)) return kBudget;
    ++turn;
    clock += kTurnNs;
    if (__atomic_exchange_n(&poke, 0, __ATOMIC_ACQUIRE) != 0) {
      poll_flags(true);
    } else if (released ? chance(8) : turn % kFlagPollTurns == 0) {
      poll_flags(false);
    }
    stall_someone();
    step_copies();
    if (runnable == 0 || idle_polls > kPollsPerFiber * (runnable + 16)) {
      if (ended || execute_some_copy() || poll_flags(false) || (released_since_wake && poll_flags(true))) continue;
      if (virtual_time || (runnable == 0 && flag_waiters.empty())) {  // else the outside may write a flag at any time
        idle_polls = 0;
        return kBlocked;
      }
      // Another process, or this process's engine, has to write a flag: leave it the processor.
      const uint64_t time = monotonic_ns();
      if (idle_rounds == 0) idle_since = looked = time;
      if (time - idle_since > kLongestIdleNs) return kBudget;
      if (time - looked > kLookAgainNs) looked = time, poll_flags(true);
      if (++idle_rounds < kYieldRounds) {
        sched_yield();
      } else {
        sleep_ns(idle_rounds < 2 * kYieldRounds ? kShortSleepNs : kLongSleepNs);
      }
      if (runnable == 0) continue;
      idle_polls = 0;
    } else if (!virtual_time && idle_polls == 0) {
      idle_rounds = 0;
    }
    run_fiber(pick());
  }
}

// ---- the report

namespace {
std::string wait_text(const Cta& cta, const Waiting& w, const std::string& flag) {
  const auto object = static_cast<uint32_t>(w.object);
  switch (w.kind) {
    case Wait::kNone:
      return "can run (polling)";
    case Wait::kMbarrier: {
      const Mbarrier& bar = cta.mbarriers.at(object);
      return format("mbarrier at shared +0x%x, parity %u (in phase %u: %u of %u arrivals and %lld bytes missing)", object,
                    static_cast<uint32_t>(w.value), bar.phase, bar.pending, bar.expected, static_cast<long long>(bar.transactions));
    }
    case Wait::kBarrier:
      return format("named barrier %u (%u of %u threads there)", object, cta.barriers[object].arrived, cta.barriers[object].expected);
    case Wait::kCta:
      return format("sync_cta (%u of %u threads there)", cta.everyone.arrived, cta.live);
    case Wait::kWarp:
      return "the other lanes of its warp";
    case Wait::kWarpgroup:
      return "the other threads of its warpgroup, in wgmma_wait";
    case Wait::kStores:
      return "its bulk stores";
    case Wait::kFlag:
      return format("flag %s >= %llu (now %llu)", flag.c_str(), static_cast<unsigned long long>(w.value),
                    static_cast<unsigned long long>(__atomic_load_n(reinterpret_cast<const uint64_t*>(w.object), __ATOMIC_RELAXED)));
  }
  return "?";
}
}  // namespace

std::string Scheduler::flag_name(uint64_t address) const {
  auto it = names.upper_bound(address);
  if (it != names.begin() && (--it, address < it->second.first + it->first)) {
    return format("%s +0x%llx", it->second.second.c_str(), static_cast<unsigned long long>(address - it->first));
  }
  return format("0x%llx", static_cast<unsigned long long>(address));
}

// One line per thing waited for, with the threads that wait for it.
std::string Scheduler::describe(const Launch& launch) const {
  std::string text;
  for (const auto& cta : launch.ctas) {
    std::vector<std::pair<const Fiber*, std::string>> groups;  // the first thread of each, and all of them
    for (uint32_t t = 0; t < launch.threads; ++t) {
      const Fiber& fiber = cta->fibers[t];
      if (fiber.finished) continue;
      uint32_t last = t;
      while (last + 1 < launch.threads && !cta->fibers[last + 1].finished && cta->fibers[last + 1].waiting == fiber.waiting) ++last;
      const std::string range = t == last ? format("%u", t) : format("%u-%u", t, last);
      auto group = groups.begin();
      while (group != groups.end() && !(group->first->waiting == fiber.waiting)) ++group;
      if (group == groups.end()) {
        groups.emplace_back(&fiber, range);
      } else if (group->second.size() < kLongestThreadList) {
        group->second += ", " + range;
      } else if (group->second.back() != '.') {
        group->second += ", ...";
      }
      t = last;
    }
    for (const auto& [fiber, threads] : groups) {
      const std::string flag = fiber->waiting.kind == Wait::kFlag ? flag_name(fiber->waiting.object) : std::string();
      text += format("rank %u, CTA %u, threads %s: %s\n", launch.rank, cta->index, threads.c_str(), wait_text(*cta, fiber->waiting, flag).c_str());
    }
  }
  return text;
}

std::string Scheduler::report() const {
  std::string text;
  for (const auto& [id, launch] : launches) {
    if (launch->state == kRunningLaunch) text += describe(*launch);
  }
  return text;
}

}  // namespace mkcpu

// ---- for the host

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
uint64_t mkc_launch(void* s, void (*entry)(const void*), const void* parameters, size_t bytes, uint32_t grid, uint32_t threads, uint32_t shared_bytes,
                    uint32_t rank) {
  if (grid == 0 || threads == 0 || threads > 1024 || shared_bytes > mkcpu::kMaxShared) return 0;
  try {
    return as_scheduler(s).launch(entry, parameters, bytes, grid, threads, shared_bytes, rank);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}
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
uint64_t mkc_next_deadline(void* s) {
  uint64_t first = mkcpu::kNever;
  for (const mkcpu::Fiber* fiber : as_scheduler(s).flag_waiters) first = std::min(first, fiber->waiting.deadline);
  return first;
}
void mkc_poke(void* s) { __atomic_store_n(&as_scheduler(s).poke, 1, __ATOMIC_RELEASE); }
uint64_t mkc_turns(void* s) { return as_scheduler(s).turn; }
uint64_t mkc_trace(void* s) { return as_scheduler(s).trace; }
void mkc_name(void* s, uint64_t address, uint64_t bytes, const char* name) {
  auto& names = as_scheduler(s).names;
  if (bytes == 0) {
    names.erase(address);
  } else {
    names[address] = {bytes, name};
  }
}

// An engine's copy is not shown to ThreadSanitizer, whose interceptor of memcpy would report it: the order between an engine and a kernel is
// the transport's business, and tested there.
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
  if (s != nullptr && as_scheduler(s).running != 0) as_scheduler(s).record_write(dst, bytes, 0);
  copy_bytes(dst, src, bytes);
}
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
