// Where threads of a kernel meet: barriers, mbarriers, warps, system flags, and the proxy fences between them.
#include "model.hpp"

namespace mkcpu {

uint32_t shared_offset(const void* p, uint32_t bytes, uint32_t alignment, const char* what) {
  const Cta& cta = *self().cta;
  const char* address = static_cast<const char*>(p);
  if (address < cta.shared || address > cta.shared + cta.shared_bytes ||
      bytes > static_cast<size_t>(cta.shared + cta.shared_bytes - address)) {
    scheduler().fail_fiber("%s: %u bytes at %p are outside shared memory (%u bytes at %p)", what, bytes, p, cta.shared_bytes, cta.shared);
  }
  const auto offset = static_cast<uint32_t>(address - cta.shared);
  if (offset % alignment != 0) scheduler().fail_fiber("%s: shared +0x%x is not aligned to %u bytes", what, offset, alignment);
  return offset;
}

void check_clean(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what) {
  for (uint32_t chunk = offset / kChunkBytes; chunk * kChunkBytes < offset + bytes; ++chunk) {
    if (cta.dirty_owner[chunk] == 0) continue;
    scheduler().fail_fiber(
        "missing fence.proxy.async: %s uses shared +0x%x (%u bytes), of which thread %u has written +0x%x with an ordinary store and not "
        "fenced (fence_proxy_async_shared) before this",
        what, offset, bytes, cta.dirty_owner[chunk] - 1u, chunk * kChunkBytes);
  }
}

namespace {
// 16 bytes of shared memory that this thread has written through the generic proxy.
void mark_dirty(Fiber& fiber, uint32_t offset) {
  fiber.cta->dirty_owner[offset / kChunkBytes] = static_cast<uint16_t>(fiber.thread + 1);
  fiber.dirty.push_back(offset / kChunkBytes);
}

// All arrive; the last one lets the waiting ones go.
void meet(Scheduler& s, Fiber& fiber, NamedBarrier& bar, bool wait, const Waiting& waiting) {
  bar.past.join(fiber.past);
  const char* sync = &bar.sync[bar.generation % 2];
  if (waiting.kind != Wait::kCluster) tsan::release(sync);  // CTAs of a cluster meet without ordering memory
  const bool last = ++bar.arrived == bar.expected;
  if (last) {
    bar.arrived = 0;
    ++bar.generation;
    s.wake(bar.waiting);
  }
  if (!wait) return s.maybe_yield();
  if (last) {
    s.yield(false);
  } else {
    bar.waiting.push_back(&fiber);
    s.park(waiting);
  }
  fiber.past.join(bar.past);
  tsan::acquire(sync);
}

// All lanes of a warp come here, one after the other: have they called warp_index(), which is a shuffle, at the same places?
void compare_lanes(Scheduler& s, Fiber& fiber) {
  Warp& warp = fiber.cta->warps[fiber.thread / kLanes];
  if (warp.compared++ == 0) warp.shuffles = fiber.shuffles;
  if (warp.compared == kLanes) warp.compared = 0;
  if (warp.shuffles != fiber.shuffles) {
    s.fail_fiber("the warp has diverged: some of its lanes have called warp_index(), a shuffle, where others have not");
  }
}

const char* const kMeetingNames[] = {"sync_warp", "all_of_warp / any_of_warp", "broadcast", "shuffle_xor", "stmatrix_x4"};

// Waits until all lanes have come with their words; the slots stay readable until this lane's next meeting.
const Warp::Slots& meet_warp(Meeting meeting, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  Cta& cta = *fiber.cta;
  Warp& warp = cta.warps[fiber.thread / kLanes];
  const uint32_t lane = fiber.thread % kLanes, generation = warp.generation;
  if (warp.arrived != 0 && warp.meeting != meeting) {
    s.fail_fiber("the warp has diverged: this lane is in %s, another one in %s", kMeetingNames[int(meeting)],
                 kMeetingNames[int(warp.meeting)]);
  }
  compare_lanes(s, fiber);
  Warp::Slots& slots = warp.slots[generation % 2];
  if (warp.arrived == 0) slots.past = Past();
  warp.meeting = meeting;
  slots.word[lane][0] = w0, slots.word[lane][1] = w1, slots.word[lane][2] = w2, slots.word[lane][3] = w3;
  slots.past.join(fiber.past);
  if (meeting == Meeting::kSync) tsan::release(&slots);  // the others order no memory
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.generation;
    const uint32_t first = fiber.thread - lane;
    for (uint32_t l = 0; l < kLanes; ++l) {
      if (l != lane) s.make_runnable(&cta.fibers[first + l]);
    }
    s.maybe_yield();
  } else {
    s.park(Waiting{Wait::kWarp, generation, 0, kNever});
  }
  fiber.past.join(slots.past);
  if (meeting == Meeting::kSync) tsan::acquire(&slots);
  return slots;
}
}  // namespace

// ---- mbarriers

uint64_t Mbarrier::word() const {
  return uint64_t(phase()) | (uint64_t(pending) << 1) | (uint64_t(expected) << 21) | ((uint64_t(transactions) & 0x1fffff) << 41) |
         (uint64_t(2) << 62);
}

namespace {
void publish(Cta& cta, uint32_t offset, const Mbarrier& bar) { *reinterpret_cast<uint64_t*>(cta.shared + offset) = bar.word(); }
}  // namespace

Mbarrier& mbarrier_at(Cta& cta, uint64_t* bar, const char* what) {
  return mbarrier_in(cta, shared_offset(bar, sizeof(uint64_t), sizeof(uint64_t), what), what);
}

Mbarrier& mbarrier_in(Cta& cta, uint32_t offset, const char* what) {
  const auto it = cta.mbarriers.find(offset);
  if (it == cta.mbarriers.end()) scheduler().fail_fiber("%s: the mbarrier at shared +0x%x has not been initialized", what, offset);
  if (*reinterpret_cast<uint64_t*>(cta.shared + offset) != it->second.word())
    scheduler().fail_fiber("%s: the mbarrier at shared +0x%x has been overwritten", what, offset);
  return it->second;
}

// ---- grids

void check_begun(const Fiber& fiber) {
  if (!fiber.begun) scheduler().fail_fiber("memory is touched before wait_for_grids(): kernels before this one may still run");
}

// ---- clusters

Cta& cluster_cta(uint32_t rank, const char* what) {
  const Cta& own = *self().cta;
  const Launch& launch = *own.launch;
  if (rank >= launch.cluster) scheduler().fail_fiber("%s: CTA %u of a cluster of %u", what, rank, launch.cluster);
  Cta& cta = *launch.ctas[own.index / launch.cluster * launch.cluster + rank];
  if (&cta != &own && !self().past.met) {
    scheduler().fail_fiber("%s: nobody in this thread's past has met the CTAs of its cluster (cluster_meet): CTA %u may not have begun",
                           what, rank);
  }
  if (cta.live == 0) scheduler().fail_fiber("%s: CTA %u of the cluster has ended, and its shared memory with it", what, rank);
  return cta;
}

NamedBarrier& cluster_barrier(const Cta& cta) { return cta.launch->clusters[cta.index / cta.launch->cluster]; }

uint32_t live_of_cluster(const Cta& cta) {
  const Launch& launch = *cta.launch;
  uint32_t live = 0;
  for (uint32_t i = 0; i < launch.cluster; ++i) live += launch.ctas[cta.index / launch.cluster * launch.cluster + i]->live;
  return live;
}

namespace {
// A thread tells phases apart by their parity. So whoever waits for one must have seen it before the next one completes, in every interleaving: all that
// arrives for the next one comes after all waits for this one. ThreadSanitizer is shown a wait as a read, and the end of the next phase as a write.
void pass(Fiber& fiber, Mbarrier& bar, uint32_t parity) {
  bar.unobserved = false;
  fiber.past.join(bar.past);
  tsan::acquire(&bar.sync[parity]);
  if (bar.passed != nullptr) tsan::read(bar.passed.get(), 1);
}

void show_phase_ends(Mbarrier& bar) {
  if (!tsan::active()) return;
  if (bar.passed != nullptr) {
    const tsan::AsyncContext context;  // whoever arrives last
    tsan::acquire(&bar.sync[bar.phase()]);
    tsan::write(bar.passed.get(), 1);
  }
  bar.passed = std::make_unique<char>();  // while accesses are ignored, ThreadSanitizer remembers nothing of what is allocated
}
}  // namespace

void complete_phase_if_done(Scheduler& s, Cta& cta, uint32_t offset, Mbarrier& bar) {
  if (bar.pending == 0 && bar.transactions == 0) {
    show_phase_ends(bar);
    ++bar.completed;
    bar.pending = bar.expected;
    bar.unobserved = bar.had_bytes;
    bar.had_bytes = false;
    s.wake(bar.waiting);
  }
  publish(cta, offset, bar);
}

// ---- the end of threads and CTAs

void finish_thread(Scheduler& s, Fiber& fiber) {
  compare_lanes(s, fiber);
  if (fiber.stores != nullptr) {
    if (fiber.stores->open_used) s.fail_fiber("ended with bulk stores that were never committed (store_commit missing)");
    if (fiber.stores->waited < fiber.stores->open())
      s.fail_fiber("ended with bulk stores in flight (store_wait or store_wait_read missing)");
  }
  const Warpgroup& group = fiber.cta->warpgroups[fiber.thread / kWarpgroupThreads];
  if (fiber.wgmma_issued > group.first) s.fail_fiber("ended with wgmma in flight (wgmma_wait missing)");
}

void finish_cta(Scheduler& s, Cta& cta) {
  const auto complain = [&](const char* what, uint32_t at) {
    s.fail_launch(*cta.launch, format("rank %u, CTA %u: ended, but %s (shared +0x%x)", cta.launch->rank, cta.index, what, at));
  };
  for (const auto* list : {&s.eager, &s.lazy}) {
    for (const auto& copy : *list) {
      if (copy->cta == &cta && copy->is_load())
        complain("a TMA load into it is in flight", static_cast<uint32_t>(copy->shared - cta.shared));
    }
  }
  for (const auto& [offset, bar] : cta.mbarriers) {
    const bool intact = *reinterpret_cast<const uint64_t*>(cta.shared + offset) == bar.word();
    if (intact && bar.unobserved) complain("nobody has waited for the TMA loads of an mbarrier", offset);
  }
}

}  // namespace mkcpu

using namespace mkcpu;

// ---- identity

uint32_t mkc_thread_index() { return self().thread; }
uint32_t mkc_warp_index(uint32_t line) {
  Fiber& fiber = self();
  fiber.shuffles = fiber.shuffles * 0x9e3779b1 + line;
  return fiber.thread / kLanes;
}
void mkc_wait_for_grids() {
  self().begun = true;
  self().past.acquired = scheduler().turn;
}
uint32_t mkc_cta_index() { return self().cta->index; }
uint32_t mkc_cta_count() { return self().cta->launch->grid; }
char* mkc_shared_memory() { return self().cta->shared; }
uint32_t mkc_shared_address(const void* p) { return shared_offset(p, 0, 1, "shared_address") + kSharedBase; }

// ---- execution barriers

void mkc_sync_cta() {
  const Call call;
  Fiber& fiber = call.fiber;
  Cta& cta = *fiber.cta;
  compare_lanes(call.scheduler, fiber);
  cta.everyone.expected = cta.live;
  meet(call.scheduler, fiber, cta.everyone, true, Waiting{Wait::kCta, 0, 0, kNever});
}

void mkc_sync_warp() { meet_warp(Meeting::kSync, 0, 0, 0, 0); }

void mkc_barrier(uint32_t id, uint32_t threads, bool wait) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  const char* what = wait ? "barrier_sync" : "barrier_arrive";
  if (id >= kNamedBarriers) s.fail_fiber("%s: barrier %u, there are %u", what, id, kNamedBarriers);
  if (threads == 0 || threads % kLanes != 0 || threads > fiber.cta->launch->threads) {
    s.fail_fiber("%s: %u threads: must be a multiple of %u and at most the CTA's %u", what, threads, kLanes, fiber.cta->launch->threads);
  }
  NamedBarrier& bar = fiber.cta->barriers[id];
  if (bar.arrived != 0 && bar.expected != threads) {
    s.fail_fiber("%s: barrier %u of %u threads, others use it with %u", what, id, threads, bar.expected);
  }
  bar.expected = threads;
  meet(s, fiber, bar, wait, Waiting{Wait::kBarrier, id, threads, kNever});
}

// ---- warp collectives

uint32_t mkc_vote(bool value) {
  const Warp::Slots& slots = meet_warp(Meeting::kVote, value, 0, 0, 0);
  uint32_t votes = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) votes |= slots.word[lane][0] << lane;
  return votes;
}

uint32_t mkc_broadcast(uint32_t value, uint32_t lane) { return meet_warp(Meeting::kBroadcast, value, 0, 0, 0).word[lane % kLanes][0]; }

uint32_t mkc_shuffle_xor(uint32_t value, uint32_t lanes) {
  const uint32_t lane = self().thread % kLanes;
  return meet_warp(Meeting::kShuffle, value, 0, 0, 0).word[(lane ^ lanes) % kLanes][0];
}

void mkc_stmatrix(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3, bool transposed) {
  constexpr uint32_t kMatrixRowBytes = 16;
  const Call call;
  Fiber& fiber = call.fiber;
  const uint32_t offset = shared_offset(row, kMatrixRowBytes, kMatrixRowBytes, "stmatrix_x4");
  const Warp::Slots& slots = meet_warp(Meeting::kStmatrix, m0, m1, m2, m3);
  const uint32_t lane = fiber.thread % kLanes, matrix = lane / 8, index = lane % 8;
  uint32_t words[4];
  for (uint32_t i = 0; i < 4; ++i) {
    if (!transposed) {
      words[i] = slots.word[index * 4 + i][matrix];  // a row's elements come from four lanes,
    } else {                                         // a column's from eight: two rows' elements of it
      const uint32_t low = slots.word[2 * i * 4 + index / 2][matrix], high = slots.word[(2 * i + 1) * 4 + index / 2][matrix];
      words[i] = (low >> index % 2 * 16 & 0xffffu) | (high >> index % 2 * 16) << 16;
    }
  }
  tsan::write(row, kMatrixRowBytes);
  __builtin_memcpy(row, words, kMatrixRowBytes);
  mark_dirty(fiber, offset);
}

void mkc_check_shared(const void* p, uint32_t bytes) { shared_offset(p, bytes, bytes, "load_shared"); }

void mkc_wrote_shared(void* p, uint32_t bytes) { mark_dirty(self(), shared_offset(p, bytes, kChunkBytes, "store_shared")); }

// ---- time and flags

uint64_t mkc_clock_ns() {
  Scheduler& s = scheduler();
  const uint64_t time = s.now();
  s.clock += 1;  // a thread that only looks at the clock sees it move
  return time;
}

void mkc_pause(const uint64_t* flag, uint64_t value, uint64_t deadline, bool timer) {
  const Call call;
  Scheduler& s = call.scheduler;
  mkc_check_word(flag, sizeof(uint64_t));
  if (__atomic_load_n(flag, __ATOMIC_RELAXED) >= value || s.now() >= deadline) return s.yield(true);
  s.flag_waiters.push_back(s.current);
  s.park(Waiting{Wait::kFlag, reinterpret_cast<uint64_t>(flag), value, deadline, timer});
}

void mkc_check_word(const void* p, uint32_t bytes) {
  check_begun(self());
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (address % bytes != 0 || address < 4096) scheduler().fail_fiber("an atomic access of %u bytes at %p", bytes, p);
}

void mkc_acquired(const void* p, uint64_t seen) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  fiber.past.acquired = s.turn;
  uint64_t& known = fiber.cta->seen[p];
  const bool changed = known != seen;
  known = seen;
  if (s.chance(4)) s.yield(!changed);
}

void mkc_released(bool acquires) {
  const Call call;
  Scheduler& s = call.scheduler;
  if (acquires) call.fiber.past.acquired = s.turn;
  tsan::release(&s.published);
  s.released = s.released_since_wake = true;
  s.progress();
  s.maybe_yield();
}

uint32_t mkc_random(uint32_t count) {
  const Call call;
  return static_cast<uint32_t>(call.scheduler.random() % count);
}

// ---- mbarriers

void mkc_mbarrier_init(uint64_t* word, uint32_t count) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  const uint32_t offset = shared_offset(word, sizeof(uint64_t), sizeof(uint64_t), "mbarrier_init");
  if (count == 0 || count > kMaxCount) s.fail_fiber("mbarrier_init: a count of %u", count);
  Mbarrier& bar = fiber.cta->mbarriers[offset];
  if (!bar.waiting.empty()) s.fail_fiber("mbarrier_init: threads wait for the mbarrier at shared +0x%x", offset);
  bar = Mbarrier();
  bar.expected = bar.pending = count;
  fiber.unfenced_inits.push_back(offset);
  publish(*fiber.cta, offset, bar);
}

void mkc_mbarrier_init_fence() {
  const Call call;
  Fiber& fiber = call.fiber;
  for (const uint32_t offset : fiber.unfenced_inits) fiber.cta->mbarriers[offset].visible = true;
  fiber.unfenced_inits.clear();
}

namespace {
void arrive(Scheduler& s, Fiber& fiber, Cta& cta, uint32_t offset, uint32_t expected_bytes, bool releases = true) {
  Mbarrier& bar = mbarrier_in(cta, offset, "mbarrier_arrive");
  if (bar.pending == 0)
    s.fail_fiber("mbarrier_arrive: the mbarrier at shared +0x%x has all its %u arrivals and waits for bytes", offset, bar.expected);
  bar.transactions += expected_bytes;
  if (bar.transactions > kMaxCount)
    s.fail_fiber("mbarrier_arrive_expect: %lld bytes expected in one phase", static_cast<long long>(bar.transactions));
  bar.had_bytes = bar.had_bytes || expected_bytes != 0;
  if (releases) bar.past.join(fiber.past);
  // Of every arrival: what a thread has waited for before it comes before what others arrive for after it.
  tsan::release(&bar.sync[bar.phase()]);
  --bar.pending;
  complete_phase_if_done(s, cta, offset, bar);
  s.progress();
  s.maybe_yield();
}
}  // namespace

void mkc_mbarrier_arrive(uint64_t* word, uint32_t expected_bytes) {
  const Call call;
  const uint32_t offset = shared_offset(word, sizeof(uint64_t), sizeof(uint64_t), "mbarrier_arrive");
  arrive(call.scheduler, call.fiber, *call.fiber.cta, offset, expected_bytes);
}

bool mkc_mbarrier_test(uint64_t* word, uint32_t parity) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  if (parity > 1) s.fail_fiber("mbarrier_wait: a parity of %u", parity);
  Mbarrier& bar = mbarrier_at(*fiber.cta, word, "mbarrier_wait");
  if (bar.phase() == parity) {
    s.yield(true);
    return false;
  }
  pass(fiber, bar, parity);
  return true;
}

void mkc_mbarrier_wait(uint64_t* word, uint32_t parity) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  if (parity > 1) s.fail_fiber("mbarrier_wait: a parity of %u", parity);
  Mbarrier& bar = mbarrier_at(*fiber.cta, word, "mbarrier_wait");
  const auto offset = static_cast<uint64_t>(reinterpret_cast<char*>(word) - fiber.cta->shared);
  const uint64_t completed = bar.completed;
  if (bar.phase() == parity) {
    bar.waiting.push_back(&fiber);
    s.park(Waiting{Wait::kMbarrier, offset, parity, kNever});
    if (bar.completed != completed + 1) {  // on the machine it waits on, perhaps for ever, or takes what is there for what it waited for
      s.fail_fiber(
          "mbarrier_wait: overtaken: since this thread waits for a phase of the mbarrier at shared +0x%x, %llu phases have completed",
          static_cast<uint32_t>(offset), static_cast<unsigned long long>(bar.completed - completed));
    }
  }
  pass(fiber, bar, parity);
}

// ---- clusters

uint32_t mkc_cluster_rank() {
  const Cta& cta = *self().cta;
  return cta.index % cta.launch->cluster;
}

void mkc_cluster_come() {
  const Call call;
  Fiber& fiber = call.fiber;
  NamedBarrier& bar = cluster_barrier(*fiber.cta);
  if (fiber.has_come) call.scheduler.fail_fiber("cluster_come: for the second time, without cluster_meet in between");
  fiber.has_come = true, fiber.came = bar.generation;
  bar.expected = live_of_cluster(*fiber.cta);
  meet(call.scheduler, fiber, bar, false, Waiting{Wait::kCluster, 0, 0, kNever});
}

void mkc_cluster_meet() {
  const Call call;
  Fiber& fiber = call.fiber;
  NamedBarrier& bar = cluster_barrier(*fiber.cta);
  if (!fiber.has_come) call.scheduler.fail_fiber("cluster_meet: without cluster_come");
  if (bar.generation == fiber.came) {
    bar.waiting.push_back(&fiber);
    call.scheduler.park(Waiting{Wait::kCluster, 0, 0, kNever});
  }
  fiber.has_come = false, fiber.past.met = true;
  fiber.past.join(bar.past);
}

uint32_t mkc_cluster_address(const void* p, uint32_t cta) {  // windows that are farther apart than shared memory is large
  cluster_cta(cta, "cluster_address");
  return shared_offset(p, 0, 1, "cluster_address") + kSharedBase + ((cta + 1) << 24);
}

void mkc_cluster_arrive(uint64_t* word, uint32_t rank, bool releases) {
  const Call call;
  const uint32_t offset = shared_offset(word, sizeof(uint64_t), sizeof(uint64_t), "cluster_arrive");
  arrive(call.scheduler, call.fiber, cluster_cta(rank, "cluster_arrive"), offset, 0, releases);
}

// ---- proxies

void mkc_fence_proxy_async(bool shared_only) {
  const Call call;
  Fiber& fiber = call.fiber;
  if (!shared_only) fiber.past.fenced = call.scheduler.turn;
  for (const uint32_t chunk : fiber.dirty) {
    uint16_t& owner = fiber.cta->dirty_owner[chunk];
    if (owner == fiber.thread + 1) owner = 0;
  }
  fiber.dirty.clear();
  mkc_mbarrier_init_fence();
}
