// What the scheduler knows of a running kernel: launches, CTAs, warpgroups, warps, threads (fibers), and the operations in flight.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.hpp"
#include "interface.h"
#include "memory.hpp"
#include "tsan.hpp"

namespace mkcpu {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kWarpgroupThreads = 128;
constexpr uint32_t kNamedBarriers = 16;
constexpr uint32_t kSharedBase = 1024;       // shared addresses start here: the first KiB belongs to the system, as on sm_90
constexpr uint32_t kMaxShared = 227 * 1024;  // dynamic shared memory of a CTA
constexpr uint32_t kSharedAlignment = 1024;
constexpr uint32_t kChunkBytes = 16;  // granularity of the proxy-fence check
constexpr uint32_t kRowBytes = 128;   // of a tile in shared memory: the reach of the 128-byte swizzle
constexpr uint64_t kLineBytes = 16;   // granularity of the record of writes to global memory: that of bulk copies
constexpr uint64_t kNever = UINT64_MAX;

struct Launch;
struct Cta;
struct Fiber;

// The turns of the latest fence.proxy.async and of the latest acquire from another CTA, or rank, in a thread's past, and whether its cluster has met.
// Joined wherever threads synchronize, so that what any thread does counts for those that come after it.
struct Past {
  uint64_t fenced = 0, acquired = 0;
  bool met = false;
  void join(const Past& other) {
    if (other.fenced > fenced) fenced = other.fenced;
    if (other.acquired > acquired) acquired = other.acquired;
    met = met || other.met;
  }
};

enum class Wait : uint8_t { kNone, kMbarrier, kBarrier, kCta, kCluster, kWarp, kWarpgroup, kStores, kFlag, kRoom };

// What a thread waits for; the meaning of the words depends on the kind.
struct Waiting {
  Wait kind = Wait::kNone;
  uint64_t object = 0;  // mbarrier: shared offset; barrier: id; flag: its address; warp: the Meeting
  uint64_t value = 0;   // mbarrier: parity; barrier: threads; flag: the value; stores: groups that may stay pending
  uint64_t deadline = kNever;
  bool timer = false;  // the deadline is when there is something to do
  bool operator==(const Waiting& o) const { return kind == o.kind && object == o.object && value == o.value; }
};

// Bulk store groups of one thread, numbered from 0 in commit order.
struct StoreGroups {
  struct Group {
    uint32_t reads_left = 0, writes_left = 0;
    char read_sync = 0, write_sync = 0;  // addresses for ThreadSanitizer
  };
  std::deque<Group> groups;  // groups[0] has number `first`; the last one is open
  uint64_t first = 0;
  uint64_t waited = 0;  // groups below this number have been waited for (at least .read)
  bool open_used = false;
  uint64_t open() const { return first + groups.size() - 1; }  // also the number of committed groups
  StoreGroups() : groups(1) {}
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  void* tsan = nullptr;
  Cta* cta = nullptr;
  uint32_t thread = 0;
  bool finished = false;
  uint64_t ran = 0;       // the turn in which it last did
  uint32_t calls = 0;     // into the scheduler, nested
  bool begun = true;      // false: an early kernel, which has not waited for the ones before it
  uint32_t shuffles = 0;  // where warp_index() has been called so far, as one number: alike for all lanes of a warp
  Waiting waiting;
  Past past;
  bool has_come = false;                 // to the cluster's barrier, and not met,
  uint32_t came = 0;                     // in this generation of it
  std::vector<uint32_t> dirty;           // chunks written through the generic proxy since the last proxy fence
  std::vector<uint32_t> unfenced_inits;  // mbarriers
  std::unique_ptr<StoreGroups> stores;
  bool wgmma_fenced = false;
  uint64_t wgmma_issued = 0, wgmma_committed = 0;
};

struct Mbarrier {
  uint32_t expected = 0, pending = 0;
  int64_t transactions = 0;
  uint64_t completed = 0;        // phases
  bool visible = false;          // to the async proxy: an init fence followed
  bool had_bytes = false;        // the current phase expected bytes
  bool unobserved = false;       // the last phase moved bytes and nobody has waited for it yet
  char sync[2] = {};             // addresses for ThreadSanitizer, by phase: who comes late from one must not inherit from the next
  std::unique_ptr<char> passed;  // of the last phase that has completed: see pass()
  Past past;
  std::vector<Fiber*> waiting;
  uint32_t phase() const { return completed & 1; }
  uint64_t word() const;  // what lies in shared memory
};

struct NamedBarrier {
  uint32_t expected = 0, arrived = 0, generation = 0;
  char sync[2] = {};  // addresses for ThreadSanitizer, by generation
  Past past;
  std::vector<Fiber*> waiting;
};

enum class Meeting : uint8_t { kSync, kVote, kBroadcast, kShuffle, kStmatrix };

// The warp rendezvous. Two sets of slots: a lane may be one meeting ahead of the slowest reader.
struct Warp {
  struct Slots {
    uint32_t word[kLanes][4];
    Past past;
  };
  Slots slots[2];
  uint32_t generation = 0;
  uint32_t arrived = 0;                 // lanes
  uint32_t compared = 0, shuffles = 0;  // lanes that have come to where Fiber::shuffles is compared, and what the first one had
  Meeting meeting = Meeting::kSync;
};

struct Wgmma {
  uint32_t n, element, a_major, b_major;
  uint64_t a, b;
  bool accumulate;
  bool a_in_registers;
  uint32_t threads = 0;  // that have issued it
  float* d[kWarpgroupThreads];
  const uint32_t* a_words[kWarpgroupThreads];  // where the registers of A are; read when the instruction is executed
  bool same_operands(const Wgmma& o) const {
    return n == o.n && element == o.element && a_major == o.a_major && b_major == o.b_major && a == o.a && b == o.b &&
           accumulate == o.accumulate && a_in_registers == o.a_in_registers;
  }
};

struct Warpgroup {
  std::deque<Wgmma> ops;  // ops[0] has number `first`
  uint64_t first = 0;
  std::vector<uint64_t> group_ends;  // by commit number: ops below this number belong to it or an earlier one
  uint32_t meeting = 0;              // threads in wgmma_wait
  uint32_t pending = 0;              // its argument
  std::vector<Fiber*> waiting;
  char issued_sync = 0, done_sync = 0;  // addresses for ThreadSanitizer
};

struct Cta {
  Launch* launch = nullptr;
  uint32_t index = 0;
  uint32_t live = 0;
  char* shared_block = nullptr;  // of the pool; what is left of it lies before `shared`, so that an overrun meets the guard
  char* shared = nullptr;
  uint32_t shared_bytes = 0;
  uint64_t stalled_until = 0;  // turn
  uint64_t held_until = 0;     // turn: mkc_hold
  uint64_t hold_turns = 0;
  uint32_t hold_after = 0, copies_until_hold = 0;  // copies issued; 0: there is no next hold
  std::vector<Fiber*> runnable;
  size_t ready_slot = 0;  // in Scheduler::ready, while runnable is not empty
  std::unique_ptr<Fiber[]> fibers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[kNamedBarriers];
  NamedBarrier everyone;                             // sync_cta
  std::unordered_map<uint32_t, Mbarrier> mbarriers;  // by shared offset
  std::vector<uint16_t> dirty_owner;                 // by chunk: 1 + the thread that wrote it and has not fenced; 0: clean
  std::unordered_map<const void*, uint64_t> seen;    // flags: what an acquiring load returned last
};

struct Launch {
  uint64_t id = 0;
  uint64_t begin = 0;  // turn
  uint32_t rank = 0, grid = 0, threads = 0, cluster = 1;
  bool early = false;  // may begin before the kernel before it on its stream has ended
  void (*entry)(const void*) = nullptr;
  void* parameters = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<NamedBarrier> clusters;  // cluster_come
  uint32_t clusters_begun = 0;         // the others have no room yet
  uint32_t live_ctas = 0;
  uint32_t stores_in_flight = 0;
  int32_t state = kRunningLaunch;
  std::string error;
};

enum class Copy : uint8_t { kTensorLoad, kBulkLoad, kTensorStore, kBulkStore, kPost };

// A TMA or bulk copy in flight, or a word for another CTA's shared memory, which lies in `buffer`.
struct AsyncCopy {
  Copy kind;
  bool has_read = false;  // a store: shared memory has been read
  Fiber* issuer;
  Cta* cta;          // whose shared memory it is: of a multicast load one of the issuer's cluster
  CpuTensorMap map;  // a copy: the kernel may change its own afterwards
  int32_t at[4];
  char* shared;
  char* global;
  uint32_t bytes;
  uint64_t* bar;
  uint64_t group;
  const char *first, *last;  // of the global memory that it touches: other copies' rows may lie between its own
  std::unique_ptr<char[]> buffer;
  char issued_sync;  // an address for ThreadSanitizer
  bool is_load() const { return kind == Copy::kTensorLoad || kind == Copy::kBulkLoad || kind == Copy::kPost; }
};

// Who has written a line: a thread of a CTA, or an engine with a put.
struct Writer {
  uint64_t launch = 0;  // 0: an engine
  uint32_t rank = 0, cta = 0, thread = 0;
  uint64_t put = 0;
  bool operator==(const Writer&) const = default;
};

struct Scheduler {
  explicit Scheduler(uint64_t seed, bool virtual_time);
  ~Scheduler();

  // ---- the run
  int32_t run(uint64_t max_turns, uint64_t until_ns);
  uint64_t launch(void (*entry)(const void*), const void* parameters, size_t bytes, uint32_t grid, uint32_t threads, uint32_t shared_bytes,
                  uint32_t cluster, bool apart, bool early, uint32_t rank);
  void remove(Launch& launch);  // stops it wherever it stands
  void finish_launch(Launch& launch, int32_t state);
  Launch* find(uint64_t id);
  std::string report() const;

  // ---- for what fibers call
  uint64_t random();
  bool chance(uint32_t one_in) { return random() % one_in == 0; }
  void make_runnable(Fiber* fiber);
  void wake(std::vector<Fiber*>& fibers);
  void park(const Waiting& waiting);  // the current fiber, which is on the list of what it waits for
  void yield(bool polling);           // `polling`: the thread looks again at something that may not have changed
  void maybe_yield() {
    if (chance(8)) yield(false);
  }
  [[noreturn]] void fail_fiber(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void fail_launch(Launch& launch, const std::string& what);  // from the scheduler's own context
  void progress() { idle_polls = 0, settling = false, progressed = turn + 1; }
  uint64_t now() const;

  void hold(Cta& cta);
  bool is_held(const Cta& cta) const { return cta.held_until > turn; }
  bool all_held() const;  // of those that could run
  bool end_hold();

  // ---- async copies (async.cpp)
  void issue(std::unique_ptr<AsyncCopy> copy);
  void step_copies();                    // sometimes one of those in flight
  bool execute_some_copy(bool of_held);  // also of a CTA that is held; false: there is none
  void execute(std::vector<std::unique_ptr<AsyncCopy>>& list, size_t index);

  // ---- global memory written behind the generic proxy's back while kernels run, in lines: for the proxy-fence check of TMA loads
  struct Written {
    uint64_t turn = 0;
    uint32_t writer = 0;  // index in `writers`
  };
  void record_write(const void* global, size_t bytes, const Writer& writer);
  std::unordered_map<uint64_t, Written> written;  // by address / kLineBytes
  std::vector<Writer> writers;                    // whoever comes twice in a row is there once

  // ---- races (races.cpp): what puts and kernels' copies do to the same bytes at the same time
  uint64_t put_begins(char* dst, const char* src, size_t bytes, const char* name);
  void put_lands(uint64_t put);
  void put_ends(uint64_t put);
  Writer engine_writer(const void* dst) const;  // of the put under way to there
  std::string put_name(uint64_t put) const;
  std::string memory_name(uint64_t address) const;
  std::string writer_name(const Writer& writer) const;
  // Why a copy must not begin now, or a store take effect now: another copy or a put accesses the same bytes. Empty: it may.
  std::string race_of(const AsyncCopy& copy) const;
  std::string race_of_store(const AsyncCopy& store) const;
  struct Put {
    char* dst;
    const char* src;
    size_t bytes;
    bool landed;
  };
  std::map<uint64_t, Put> puts;               // under way
  std::map<uint64_t, std::string> put_names;  // of these, and of those that have written since no kernel ran
  uint64_t next_put = 1;
  void forget_writes();

  // ---- flags
  bool poll_flags(bool everyone);

  const bool virtual_time;
  uint64_t rng, turn = 0, trace = 0, clock = 0;
  Fiber* current = nullptr;
  Context main;
  void* main_tsan = nullptr;
  std::vector<Cta*> ready;   // CTAs with runnable threads
  size_t runnable = 0;       // threads of all of them
  Cta* focus = nullptr;      // the CTA whose threads run at present,
  uint64_t focus_until = 0;  // until this turn
  uint64_t last_hold = 0;    // the turn at which the last one ends
  Fiber* late = nullptr;     // a thread that could run, and is left behind
  uint64_t late_until = 0;   // until this turn, or until nobody else can go on
  std::vector<Fiber*> flag_waiters;
  std::vector<std::unique_ptr<AsyncCopy>> eager, lazy;  // lazy ones run when nothing else can
  std::map<uint64_t, std::unique_ptr<Launch>> launches;
  uint64_t next_launch = 1;
  uint32_t running = 0;
  bool ended = false;                // a launch ended since the last return of run
  bool released = false;             // since the last look at the flags
  bool released_since_wake = false;  // since everyone who waits for a flag last looked again
  uint64_t idle_polls = 0;           // turns that only polled since the last progress
  bool settling = false;             // all stalls were ended since then: nobody is stalled until there is progress
  uint64_t progressed = 0;           // the turn after the last progress
  uint32_t poke = 0;                 // atomic: another thread asks for a look at the flags
  uint64_t stall_check = 0;
  char published = 0;  // ThreadSanitizer: everything fibers released, for engines
  std::map<uint64_t, std::pair<uint64_t, std::string>> names;
  mutable std::mutex names_lock;  // names come from other threads
  GuardedPool stacks;
  std::map<uint32_t, GuardedPool> shared_pools;  // by bytes, a multiple of kSharedAlignment
  bool shared_guards(const void* address) const;
  std::vector<float> scratch;  // wgmma

 private:
  void create_cta(Launch& launch, uint32_t index, uint32_t shared_bytes);
  void begin_cluster(Launch& launch, uint32_t number);
  void give_back(Cta& cta);
  void run_fiber(Fiber* fiber);
  bool run_passed_over();
  Fiber* pick();
  void not_ready(Cta& cta);
  void stall_someone();
  Fiber* take_runnable(Cta& cta, size_t index);
  void leave_behind(Cta& cta);
  bool end_stalls();
  std::string describe(const Launch& launch) const;
  std::string flag_name(uint64_t address) const;
};

inline Writer writer_of(const Fiber& fiber) {
  return Writer{fiber.cta->launch->id, fiber.cta->launch->rank, fiber.cta->index, fiber.thread, 0};
}

Scheduler* current_scheduler();  // that runs on this OS thread; null: none
Scheduler& scheduler();          // of the calling fiber
Fiber& self();

// A call of a kernel's thread into the scheduler.
struct Call {
  Scheduler& scheduler;
  Fiber& fiber;
  Call() : scheduler(mkcpu::scheduler()), fiber(self()) {
    ++fiber.calls;
    tsan::ignore_begin();
  }
  ~Call() {
    tsan::ignore_end();
    --fiber.calls;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

// Shared memory of the calling thread's CTA.
uint32_t shared_offset(const void* p, uint32_t bytes, uint32_t alignment, const char* what);
Mbarrier& mbarrier_at(Cta& cta, uint64_t* bar, const char* what);
Mbarrier& mbarrier_in(Cta& cta, uint32_t offset, const char* what);  // of any CTA
void complete_phase_if_done(Scheduler& s, Cta& cta, uint32_t offset, Mbarrier& bar);
void finish_thread(Scheduler& s, Fiber& fiber);                                       // checks at a thread's end
void finish_cta(Scheduler& s, Cta& cta);                                              // checks at a CTA's end
void check_clean(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what);  // no unfenced generic writes there
void check_begun(const Fiber& fiber);  // that it may touch memory: others may still write what it reads before wait_for_grids()
Cta& cluster_cta(uint32_t rank, const char* what);  // of the calling thread's cluster; it must not have ended
NamedBarrier& cluster_barrier(const Cta& cta);
uint32_t live_of_cluster(const Cta& cta);       // threads
constexpr uint32_t kMaxCount = (1u << 20) - 1;  // of an mbarrier: arrivals, and bytes in flight

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

}  // namespace mkcpu
