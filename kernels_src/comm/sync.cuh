// One call of one rank: entry, waiting on system flags, failing, leaving. docs/memory_model.md gives the reason of every rule kept here.
#pragma once
#include "ptx.cuh"
#include "trace.cuh"

namespace mkernel {

// What every role knows of the running call. Cheap to pass by value.
struct Call {
  const abi::World& world;
  uint64_t before;  // ControlBlock::epoch as the call found it; nothing is worked out of it sooner than needed: see begin_call_ahead
  uint32_t role;
  uint32_t check;  // what all ranks must ask for alike: World::check, and what a kernel finds in its inputs before it announces its entry

  MK_DEVICE uint64_t epoch() const { return before + 1; }  // number of this call, from 1; the value of every flag raised in it
};

MK_DEVICE abi::ControlBlock* control_block(const abi::World& world) { return reinterpret_cast<abi::ControlBlock*>(world.control); }
MK_DEVICE abi::HostBlock* host_block(const abi::World& world) { return reinterpret_cast<abi::HostBlock*>(world.host); }

// Reads the epoch, for which all threads wait, some 700 cycles.
MK_DEVICE Call begin_call(const abi::World& world, uint32_t role) { return Call{world, control_block(world)->epoch, role, world.check}; }
// The same, but a thread waits where it uses the epoch, and keeps it in two registers of its own, not in uniform ones.
MK_DEVICE Call begin_call_ahead(const abi::World& world, uint32_t role) {
  return Call{world, ptx::load_for_thread(&control_block(world)->epoch), role, world.check};
}
// Of a kernel that may be launched early (KernelSpec.early): a call that has not begun, of which nothing but the role is known. Each thread begins it
// before it touches memory. Only in a world of one: a CTA that waits for the kernel before it takes the place of what another rank may wait for.
MK_DEVICE Call coming_call(const abi::World& world, uint32_t role) { return Call{world, 0, role, world.check}; }
MK_DEVICE void begin_call_late(Call& call, bool reads_epoch) {
  ptx::wait_for_grids();
  if (reads_epoch) call.before = ptx::load_for_thread(&control_block(call.world)->epoch);
}

// Whether this call is to be skipped: an earlier one has reported an error that this rank's host has not raised yet (comm/status.cuh). A skipped call
// is entered by nobody, so that ranks may differ in how many they have launched.
MK_DEVICE bool is_skipped(const Call& call) { return (call.epoch() & abi::kHalted) != 0; }

// Proof that every rank of the world has entered this call with the same plan. Only code that holds one can write to memory that ranks share
// (shared_heap, shared_signals), raise an op's flag, issue a put, or post a flag or an item to a mailbox. Only such code waits for an op's flag,
// because `timeout` counts from the entry on. Only enter(), enter_alone() and EntryGate make one.
class Entered {
 public:
  MK_DEVICE const Call& call() const { return call_; }
  MK_DEVICE const abi::World& world() const { return call_.world; }

 private:
  friend class MaybeEntered;
  MK_DEVICE explicit Entered(const Call& call) : call_(call) {}
  Call call_;  // not its address: it would be in local memory
};
class MaybeEntered {  // result of entering; false: a rank did not come in time, or came with another plan
 public:
  MK_DEVICE explicit operator bool() const { return ok_; }
  MK_DEVICE Entered operator*() const { return Entered(call_); }  // only where true
  MK_DEVICE static MaybeEntered not_yet(const Call& call) { return MaybeEntered(call, false); }
  MK_DEVICE void operator=(const MaybeEntered& other) { ok_ = other.ok_; }  // of the same call

 private:
  friend MK_DEVICE MaybeEntered enter(const Call& call);
  friend MK_DEVICE MaybeEntered enter_alone(const Call& call);
  friend struct EntryGate;
  MK_DEVICE MaybeEntered(const Call& call, bool ok) : call_(call), ok_(ok) {}
  Call call_;
  bool ok_;
};

// The one place where the addresses of ranks' memory are formed: as what may be read, and for who has entered as what may be written.
namespace detail {
MK_DEVICE char* heap(const abi::World& world, uint32_t local_rank) {
  return reinterpret_cast<char*>(world.heap_base + local_rank * world.heap_stride);
}
MK_DEVICE char* signals(const abi::World& world, uint32_t local_rank) {
  return reinterpret_cast<char*>(world.signal_base + local_rank * world.signal_stride);
}
}  // namespace detail
MK_DEVICE const char* heap(const abi::World& world, uint32_t local_rank) { return detail::heap(world, local_rank); }
MK_DEVICE char* shared_heap(const Entered& entered, uint32_t local_rank) { return detail::heap(entered.world(), local_rank); }
// A half of the range of packets that may be sent before their rank has entered `call` (rule 19): in that half nobody reads or writes any more what an
// earlier call has sent, because this rank has ended the call before this one, and saw all ranks enter it. Not of a call that is skipped.
MK_DEVICE char* signals_ahead(const Call& call, uint32_t local_rank, uint64_t offset) {
  return detail::signals(call.world, local_rank) + offset + (call.epoch() & 1) * abi::kAheadBytes;
}
// The same of tagged packets, whose range follows that one.
MK_DEVICE char* tagged_ahead(const Call& call, uint32_t local_rank, uint64_t offset) {
  return detail::signals(call.world, local_rank) + offset + 2 * abi::kAheadBytes + (call.epoch() & 1) * abi::kTaggedBytes;
}
// An area of this rank's heap that nobody reads but its own engine, whose puts are complete when a call ends (wait_put): no need to enter before.
MK_DEVICE char* staging_area(const abi::World& world, uint64_t offset) { return detail::heap(world, world.local_rank) + offset; }
MK_DEVICE const char* signals(const abi::World& world, uint32_t local_rank) { return detail::signals(world, local_rank); }
MK_DEVICE char* shared_signals(const Entered& entered, uint32_t local_rank) { return detail::signals(entered.world(), local_rank); }
MK_DEVICE abi::SignalHeader* signal_header(const abi::World& world, uint32_t local_rank) {  // whose words have rules of their own
  return reinterpret_cast<abi::SignalHeader*>(detail::signals(world, local_rank));
}

// A wait, for the report of its failure.
struct Awaited {
  abi::FlagKind kind;
  uint32_t index;
  uint32_t peer;
};

// Gives the world up: the first failure of this rank is reported to the host, then this rank's other CTAs and the node's ranks are asked to leave.
MK_DEVICE void fail(const Call& call, abi::State state, const Awaited& what, uint64_t expected, uint64_t seen) {
  const abi::World& world = call.world;
  if (ptx::compare_and_swap(&control_block(world)->failed, abi::kRunning, state) != abi::kRunning) return;
  abi::HostBlock* report = host_block(world);
  report->rank = world.rank;
  report->role = call.role;
  report->cta = ptx::cta_index();
  report->flag_kind = what.kind;
  report->flag_index = what.index;
  report->peer = what.peer;
  report->epoch = call.epoch();
  report->expected = expected;
  report->seen = seen;
  report->problem = world.problem;
  report->rows = world.rows;
  report->schedule = world.schedule;
  ptx::store_release_sys(&report->state, state);
#pragma unroll 1
  for (uint32_t peer = 0; peer < world.ranks_per_node; ++peer) {
    ptx::store_release_sys(&signal_header(world, peer)->abort, uint64_t(world.rank) + 1);
  }
}

// The time limit of one wait. pass() is called after every look that did not find what is waited for.
class Deadline {
 public:
  MK_DEVICE Deadline(const Call& call, uint64_t timeout_ns) : call_(call), timeout_ns_(timeout_ns) {}

  // Returns kRunning to look again, else why the call is given up. The wait is for *flag >= value.
  MK_DEVICE abi::State pass(const uint64_t* flag, uint64_t value) {
    const uint64_t now = ptx::clock_ns();
    if (polls_++ == 0) end_ = now + timeout_ns_;
    if (now >= end_) return abi::kTimedOut;
    const abi::World& world = call_.world;
    if ((polls_ % ptx::kPollsPerAbortCheck == 0 && ptx::load_acquire_sys(&signal_header(world, world.local_rank)->abort) != 0) ||
        (polls_ % ptx::kPollsPerHostCheck == 0 && ptx::load_acquire_sys(&host_block(world)->abort) != 0)) {
      return abi::kAborted;
    }
    ptx::pause(flag, value, end_);
    return abi::kRunning;
  }

  // What is waited for has come. A trace holds the waits that were not over at the first look.
  MK_DEVICE void end(const Awaited& what) const {
    if (polls_ == 0 || call_.world.trace_capacity == 0) return;
    record_flag(call_.world, call_.role, what.kind, what.peer, what.index, end_ - timeout_ns_);
  }

 private:
  const Call& call_;
  uint64_t timeout_ns_, end_ = 0;
  uint32_t polls_ = 0;
};

// Waits until *flag is at least `least`; where `exact` is not 0, it must then be just that. fail() is called in one place
// only, because it is long and is inlined wherever something is waited for.
MK_DEVICE bool wait_word(const Call& call, const uint64_t* flag, uint64_t least, uint64_t exact, const Awaited& what, uint64_t timeout_ns) {
  Deadline deadline(call, timeout_ns);
  uint64_t seen = 0;
  abi::State state = abi::kRunning;
#pragma unroll 1
  while (state == abi::kRunning) {
    seen = ptx::load_acquire_sys(flag);
    if (seen < least) {
      state = deadline.pass(flag, least);
    } else if (exact == 0 || seen == exact) {
      deadline.end(what);
      return true;
    } else {
      state = abi::kMismatch;
    }
  }
  fail(call, state, what, state == abi::kMismatch ? exact : least, seen);
  return false;
}

// Every wait on a system flag. True: *flag >= value, and all that its writer did before is visible to this thread (a thread that then reads
// by TMA, or hands over to one that does, still needs fence_proxy_async). False: the deadline passed or an abort was seen; leave.
MK_DEVICE bool wait_ge(const Call& call, const uint64_t* flag, uint64_t value, const Awaited& what, uint64_t timeout_ns) {
  return wait_word(call, flag, value, 0, what, timeout_ns);
}

// Waits for flags 0 .. count-1 of an array; a warp function, a lane per flag. What any lane has acquired, all lanes have. Flags: bool wait(who, i),
// who: a Call or an Entered.
template <class Who, class Flags>
MK_DEVICE bool wait_all(const Who& who, const Flags& flags, uint32_t count) {
  bool ok = true;
#pragma unroll 1
  for (uint32_t base = 0; ok && base < count; base += 32) {
    const uint32_t i = base + ptx::lane_index();
    ok = ptx::all_of_warp(i >= count || flags.wait(who, i));
  }
  ptx::sync_warp();  // a vote orders no memory
  return ok;
}

// In time limits, where the writer may itself be waiting for what has gone wrong: so that it is the one to report.
constexpr uint32_t kSecondHand = 2;

// ---- entry: a rank tells everyone that call `epoch` has begun, so its buffers may be written and what it asks for compared
MK_DEVICE uint64_t entry_value(uint64_t epoch, uint32_t check) { return (epoch << abi::kCheckBits) | check; }
MK_DEVICE uint64_t entry_offset(uint64_t epoch, uint32_t source) {
  return ((epoch & 1) * abi::kMaxRanks + source) * sizeof(uint64_t);  // SignalHeader::entered is the first member
}

// Waits until `peer` has entered this call and compares plans. The parity slots make the comparison exact: a peer can be at most one call
// ahead, because no rank leaves a call before it has seen everyone enter it.
MK_DEVICE const uint64_t* entry_flag(const Call& call, uint32_t peer) {
  return reinterpret_cast<const uint64_t*>(signals(call.world, call.world.local_rank) + entry_offset(call.epoch(), peer));
}
// Entries of other nodes come to the rank on their rail, which hands them to its node mates (announce_entry, comm/ring.cuh). Who waits for such a
// node mate waits longer, so that whoever misses an entry itself is the one to report.
MK_DEVICE bool wait_entered(const Call& call, uint32_t peer) {
  const abi::World& world = call.world;
  const Awaited what{abi::kFlagEntry, peer, peer};
  const uint64_t entered = call.epoch() << abi::kCheckBits, expected = entry_value(call.epoch(), call.check);
  const bool handed_on = peer / world.ranks_per_node != world.node && peer % world.ranks_per_node != world.local_rank;
  return wait_word(call, entry_flag(call, peer), entered, expected, what, (handed_on ? kSecondHand : 1) * world.entry_timeout_ns);
}

// Enters a call: waits until every other rank of the world has entered it, too. Then nobody reads any more, in an earlier call, the memory that this
// call writes: neither its owner, nor the node's other ranks that pull from it, nor an engine. Warp function.
struct EntryFlags {
  MK_DEVICE bool wait(const Call& call, uint32_t i) const { return wait_entered(call, (call.world.rank + 1 + i) % call.world.size); }
};
MK_DEVICE MaybeEntered enter(const Call& call) {
  return MaybeEntered(call, !is_skipped(call) && wait_all(call, EntryFlags{}, call.world.size - 1));
}

// The same by one thread, one rank after the other: for a thread that has done other work meanwhile.
MK_DEVICE MaybeEntered enter_alone(const Call& call) {
  bool ok = !is_skipped(call);
#pragma unroll 1
  for (uint32_t i = 0; ok && i + 1 < call.world.size; ++i) ok = EntryFlags{}.wait(call, i);
  return MaybeEntered(call, ok);
}

// How one warp of a CTA enters for all its threads. In shared memory.
struct EntryGate {
  uint64_t opened;  // completes once
  uint32_t refused;

  MK_DEVICE void init() {  // one thread, before an mbarrier_init_fence and a sync_cta
    ptx::mbarrier_init(&opened, 1);
  }
  MK_DEVICE MaybeEntered open(const Call& call) {  // one warp, once
    const MaybeEntered entered = enter(call);
    if (ptx::lane_index() == 0) {
      refused = !entered;
      ptx::mbarrier_arrive(&opened);
    }
    return entered;
  }
  MK_DEVICE MaybeEntered pass(const Call& call) {  // any thread, any number of times
    ptx::mbarrier_wait(&opened, 0);
    return MaybeEntered(call, refused == 0);
  }
  MK_DEVICE bool is_open() { return ptx::mbarrier_test(&opened, 0); }  // or shut for good; any thread
  // The same for a thread that goes on to write by bulk copies: they come after what the ranks did before they entered.
  MK_DEVICE MaybeEntered pass_to_store(const Call& call) {
    const MaybeEntered entered = pass(call);
    ptx::fence_proxy_async();
    return entered;
  }
};

// The last CTA out ends the call: it zeroes the counters and advances the epoch. One thread per CTA, when the CTA takes no more tiles (its threads
// read the epoch at their start); the next call touches memory when this kernel has ended.
MK_DEVICE void leave_call(const Call& call) {
  abi::ControlBlock* control = control_block(call.world);
  if (ptx::atomic_add_acq_rel(&control->exit_counter, 1) + 1 == ptx::cta_count()) {
    control->tile_counter = 0;
    control->exit_counter = 0;
    control->gathered = 0;
    control->met = 0;
    control->epoch = call.epoch();
    // The engine may rest: this call issues no more commands, and those that it waits for are complete (rule 14).
    if (call.world.launch != 0) ptx::store_release_sys(&reinterpret_cast<abi::Ring*>(call.world.ring)->ended, call.world.launch);
  }
}

}  // namespace mkernel
