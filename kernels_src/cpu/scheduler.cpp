// The run: which thread goes on next, when asynchronous copies happen, when a launch ends, and who waits for what when nothing moves.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "crash.hpp"
#include "model.hpp"

namespace mkcpu {

namespace {
constexpr uint64_t kTurnNs = 5;           // virtual time of one turn
constexpr uint64_t kFlagPollTurns = 256;  // how often flags are looked at that others may have written
constexpr uint64_t kTimeCheckTurns = 64;
constexpr uint64_t kStallCheckTurns = 512;
constexpr uint64_t kLongestStall = 4096;               // turns
constexpr uint64_t kLagOdds = 8, kLongestLag = 65536;  // a rank with some of its CTAs far behind: the others get a call ahead of it
constexpr uint64_t kLateOdds = 2, kShortestLate = 8, kLongestLate = 20;  // a thread that others overtake: powers of two, in turns
constexpr uint64_t kLongestFocus = 256;                                  // turns
constexpr uint64_t kPollsPerFiber = 16;                                  // without progress, before the run counts as idle
constexpr uint32_t kYieldRounds = 64;                                    // process mode: rounds of sched_yield before it sleeps
constexpr uint64_t kShortSleepNs = 50'000, kLongSleepNs = 200'000;
constexpr uint64_t kLookAgainNs = 1'000'000;                             // process mode: abort words are looked at this often
constexpr uint64_t kLongestIdleNs = 20'000'000;                          // process mode: run returns, so that the host sees signals
constexpr size_t kStackBytes = 64 * 1024, kTsanStackBytes = 512 * 1024;  // a race report is formatted on the fiber's stack
constexpr size_t kStacksPerSlab = 64, kSharedPerSlab = 4;
constexpr int kPoison = 0xff;  // NaN in either 16-bit format

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

Scheduler* current_scheduler() { return t_scheduler; }
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
    : virtual_time(virtual_time_),
      rng(mix(seed + 0x9e3779b97f4a7c15ull)),
      stacks(tsan::active() ? kTsanStackBytes : kStackBytes, kStacksPerSlab) {}

Scheduler::~Scheduler() {
  while (!launches.empty()) {
    remove(*launches.begin()->second);
    launches.erase(launches.begin());
  }
}

uint64_t Scheduler::random() { return mix(rng += 0x9e3779b97f4a7c15ull); }
uint64_t Scheduler::now() const { return virtual_time ? clock : monotonic_ns(); }

// ---- launches

uint64_t Scheduler::launch(void (*entry)(const void*), const void* parameters, size_t bytes, uint32_t grid, uint32_t threads,
                           uint32_t shared_bytes, uint32_t cluster, bool apart, bool early, uint32_t rank) {
  const uint64_t id = next_launch++;
  Launch& l = *launches.emplace(id, std::make_unique<Launch>()).first->second;
  l.id = id, l.begin = ++turn, l.rank = rank, l.grid = grid, l.threads = threads, l.entry = entry, l.live_ctas = grid;
  l.early = early, l.cluster = cluster, l.clusters.resize(grid / cluster);
  // Where clusters need not be resident at once (KernelSpec.clusters_are_apart), there is room for all of them, or for some.
  l.clusters_begun = grid / cluster;
  if (apart && chance(2)) l.clusters_begun = 1 + random() % l.clusters_begun;
  ++running;
  try {
    l.parameters = std::aligned_alloc(kSharedAlignment, (bytes / kSharedAlignment + 1) * kSharedAlignment);
    if (l.parameters == nullptr) throw std::bad_alloc();
    memcpy(l.parameters, parameters, bytes);
    for (uint32_t index = 0; index < grid; ++index) create_cta(l, index, shared_bytes);
  } catch (...) {
    remove(l);
    launches.erase(id);
    throw;
  }
  tsan::release(&l);
  return id;
}

void Scheduler::create_cta(Launch& launch, uint32_t index, uint32_t shared_bytes) {
  launch.ctas.push_back(std::make_unique<Cta>());
  Cta& cta = *launch.ctas.back();
  const uint32_t threads = launch.threads, room = (shared_bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  cta.launch = &launch, cta.index = index, cta.live = threads, cta.shared_bytes = shared_bytes;
  GuardedPool& pool = shared_pools.try_emplace(room, room, kSharedPerSlab).first->second;
  cta.shared_block = pool.take();
  cta.shared = cta.shared_block + pool.block_bytes() - room;
  memset(cta.shared_block, kPoison, pool.block_bytes());
  cta.dirty_owner.resize(shared_bytes / kChunkBytes + 1);
  cta.warps.resize((threads + kLanes - 1) / kLanes);
  cta.warpgroups.resize((threads + kWarpgroupThreads - 1) / kWarpgroupThreads);
  cta.fibers = std::make_unique<Fiber[]>(threads);
  for (uint32_t t = 0; t < threads; ++t) {
    Fiber& fiber = cta.fibers[t];
    fiber.cta = &cta, fiber.thread = t, fiber.begun = !launch.early;
    fiber.stack = stacks.take();
    fiber.tsan = tsan::create_fiber();
    prepare(fiber.context, fiber.stack, stacks.block_bytes(), fiber_main);
    if (index / launch.cluster < launch.clusters_begun) {
      make_runnable(&fiber);
    } else {
      fiber.waiting.kind = Wait::kRoom;
    }
  }
}

void Scheduler::begin_cluster(Launch& launch, uint32_t number) {
  for (uint32_t i = number * launch.cluster; i < (number + 1) * launch.cluster; ++i) {
    for (uint32_t t = 0; t < launch.threads; ++t) make_runnable(&launch.ctas[i]->fibers[t]);
  }
}

void Scheduler::give_back(Cta& cta) {
  runnable -= cta.runnable.size();
  if (!cta.runnable.empty()) not_ready(cta);
  void* here = tsan::current_fiber();
  for (uint32_t t = 0; cta.fibers != nullptr && t < cta.launch->threads; ++t) {
    Fiber& fiber = cta.fibers[t];
    if (fiber.stack != nullptr) stacks.give(fiber.stack);  // not earlier: who gets it next must come after all that this launch did
    if (fiber.finished || fiber.tsan == nullptr) continue;
    tsan::switch_fiber(fiber.tsan);  // a context may not end while it ignores
    while (fiber.calls-- > 0) tsan::ignore_end();
    tsan::switch_fiber(here);
    tsan::destroy_fiber(fiber.tsan);
  }
  if (cta.shared_block != nullptr) {
    shared_pools.at((cta.shared_bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment).give(cta.shared_block);
  }
}

bool Scheduler::shared_guards(const void* address) const {
  for (const auto& [bytes, pool] : shared_pools) {
    if (pool.guards(address)) return true;
  }
  return false;
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
  if (--running == 0) forget_writes();
  const auto of_launch = [&](const Fiber* fiber) { return fiber->cta->launch == &launch; };
  std::erase_if(flag_waiters, of_launch);
  if (late != nullptr && of_launch(late)) late = nullptr;
  const auto copy_of_launch = [&](const std::unique_ptr<AsyncCopy>& copy) { return copy->cta->launch == &launch; };
  std::erase_if(eager, copy_of_launch);
  std::erase_if(lazy, copy_of_launch);
  for (auto& cta : launch.ctas) give_back(*cta);
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
  const uint64_t polls = idle_polls + 1, since = progressed;
  const bool still_settling = settling;
  make_runnable(current);
  if (polling) idle_polls = polls, settling = still_settling, progressed = since;
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

// Takes a random runnable thread of a random CTA, and stays with the CTA for a while: that is kind to the caches, and lets CTAs run far
// ahead of each other. A stalled CTA is passed over while others can run, and a held one for them, too.
Fiber* Scheduler::pick() {
  if (focus == nullptr || turn >= focus_until) {
    const size_t begin = random() % ready.size();
    focus = nullptr;
    for (size_t tries = 0; tries < ready.size() && (focus == nullptr || focus->stalled_until > turn); ++tries) {
      Cta* cta = ready[(begin + tries) % ready.size()];
      if (!is_held(*cta) && (focus == nullptr || cta->stalled_until <= turn)) focus = cta;
    }
    if (focus == nullptr) focus = ready[begin];
    focus_until = turn + random() % kLongestFocus;
  }
  Cta& cta = *focus;
  return take_runnable(cta, random() % cta.runnable.size());
}

Fiber* Scheduler::take_runnable(Cta& cta, size_t index) {
  Fiber* fiber = cta.runnable[index];
  cta.runnable[index] = cta.runnable.back();
  cta.runnable.pop_back();
  --runnable;
  if (cta.runnable.empty()) not_ready(cta);
  return fiber;
}

// One thread rests, while the other lanes of its warp and whoever does not wait for it run on. Threads that are taken at random stay close to each other:
// without this, a ring of stages hardly ever goes round before a lane has looked at one.
void Scheduler::leave_behind(Cta& cta) {
  late = take_runnable(cta, random() % cta.runnable.size());
  late_until = turn + random() % (uint64_t{1} << (kShortestLate + random() % (kLongestLate - kShortestLate + 1)));
}

void Scheduler::stall_someone() {
  if (late != nullptr && turn >= late_until) make_runnable(std::exchange(late, nullptr));
  if (turn < stall_check || settling || ready.empty()) return;
  stall_check = turn + kStallCheckTurns;
  if (chance(2)) ready[random() % ready.size()]->stalled_until = turn + random() % kLongestStall;
  if (late == nullptr && chance(kLateOdds)) leave_behind(*ready[random() % ready.size()]);
  if (ready.empty() || !chance(kLagOdds)) return;
  const uint64_t until = turn + random() % kLongestLag;
  for (const auto& cta : ready[random() % ready.size()]->launch->ctas) {
    if (chance(2)) cta->stalled_until = until;
  }
}

// Those that could run only poll: who has been passed over goes on. Else a stalled CTA would look as if nobody could. And nobody is stalled anew before
// there is progress: where thousands of threads poll, somebody always is, and the run would never count as idle.
bool Scheduler::end_stalls() {
  bool any = false;
  for (Cta* cta : ready) {
    if (cta->stalled_until <= turn || is_held(*cta)) continue;
    cta->stalled_until = turn;
    any = true;
  }
  if (late != nullptr) make_runnable(std::exchange(late, nullptr)), any = true;
  if (any) focus = nullptr, idle_polls = 0, settling = true;
  return any;
}

// A held CTA rests, and the copies under way that it has issued, even where everybody else waits for the network: see ThreadRanks._advance.
void Scheduler::hold(Cta& cta) {
  cta.held_until = turn + cta.hold_turns;
  cta.copies_until_hold = cta.hold_after;
  last_hold = std::max(last_hold, cta.held_until);
  focus = nullptr;
}

bool Scheduler::all_held() const {
  return turn < last_hold && std::all_of(ready.begin(), ready.end(), [&](const Cta* cta) { return is_held(*cta); });
}

// Nobody else can go on: the hold that would end first ends now. So of several held CTAs the one with the longest hold stays furthest behind.
bool Scheduler::end_hold() {
  Cta* first = nullptr;
  const auto consider = [&](Cta* cta) {
    if (is_held(*cta) && (first == nullptr || cta->held_until < first->held_until)) first = cta;
  };
  for (Cta* cta : ready) consider(cta);
  for (const auto* list : {&eager, &lazy}) {
    for (const auto& copy : *list) consider(copy->issuer->cta);
  }
  if (first == nullptr) return false;
  first->held_until = 0;
  return true;
}

// Whoever can run and has not since the last progress, does: threads are taken at random, and one that has been passed over for long would look as
// if it, too, only polled. True: there was one.
bool Scheduler::run_passed_over() {
  for (Cta* cta : ready) {
    if (is_held(*cta)) continue;
    for (size_t i = 0; i < cta->runnable.size(); ++i) {
      Fiber* fiber = cta->runnable[i];
      if (fiber->ran >= progressed) continue;
      run_fiber(take_runnable(*cta, i));
      return true;
    }
  }
  return false;
}

void Scheduler::run_fiber(Fiber* fiber) {
  fiber->ran = turn;
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
  --cta.live;
  const auto leave = [&](NamedBarrier& bar, uint32_t live) {  // those who have left do not count
    if (bar.arrived != 0 && bar.arrived == live) bar.arrived = 0, ++bar.generation, wake(bar.waiting);
  };
  if (launch.cluster > 1) {
    NamedBarrier& bar = cluster_barrier(cta);
    if (fiber->has_come && fiber->came == bar.generation) --bar.arrived;  // it came, and need not stay
    leave(bar, live_of_cluster(cta));
  }
  if (cta.live > 0) return leave(cta.everyone, cta.live);
  finish_cta(*this, cta);
  if (!launch.error.empty()) return finish_launch(launch, kFailed);
  if (live_of_cluster(cta) == 0 && launch.clusters_begun < launch.clusters.size()) begin_cluster(launch, launch.clusters_begun++);
  if (--launch.live_ctas > 0) return;
  while (launch.state == kRunningLaunch && launch.stores_in_flight > 0) execute_some_copy(true);
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
  const FaultHandler explained;
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
    if (runnable == 0 || idle_polls > kPollsPerFiber * (runnable + 16) || all_held()) {
      if (ended || execute_some_copy(false) || end_stalls() || poll_flags(false) || (released_since_wake && poll_flags(true))) continue;
      if (run_passed_over()) continue;
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

}  // namespace mkcpu
