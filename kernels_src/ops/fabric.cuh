// A network that SMs play, for emulated nodes (docs/transports.md, "The fabric"): a kernel beside the op's kernel that takes commands off the rank's ring,
// copies their bytes to the peer's heap, and raises each flag when bandwidth and latency say so. It ends soon after the calls that it serves.
//
//   warp 0 of CTA 0   takes commands, and works out when each is due
//   warp 1 of CTA 0   raises the flag of each put that is due and has landed, and returns its slot
//   all other warps   workers: each copies its share of the pieces of every put
#pragma once
#include "comm/sync.cuh"

namespace mkernel {

// ---- config: kPieceBytes, kStamps (notes when each put reaches each stage); kThreads, kSharedBytes, kParameterBytes
constexpr uint64_t kNever = ~uint64_t(0);
constexpr uint32_t kWarps = Config::kThreads / 32;  // of a CTA
constexpr uint32_t kBatch = 30;                     // commands taken at once: a lane each; the last two lanes read other words
constexpr uint32_t kChannels = 256;     // channels with the same remainder share their order, which is never less than what is promised
constexpr uint64_t kLingerNs = 50'000;  // how long it waits for the first command of a call that the host has launched already
constexpr uint32_t kLoads = 8;          // of a lane, under way at once
constexpr uint32_t kPublishBytes = 16 * 1024;  // what a worker copies before it says so, while there is more to do

struct FabricPeer {  // addresses of a rank's segments; 0: no network path
  uint64_t heap, signals;
};
struct FabricReport {  // host memory: a put that cannot be carried out
  uint64_t bad;        // written last (release)
  uint64_t reserved[7];
  abi::Command command;
};

// When a put has reached each stage: device clock. Of lone puts, by tests/gpu/fabric.py.
struct Stamps {
  uint64_t seen;       // by warp 0
  uint64_t due;        // for its flag to be raised
  uint64_t found;      // by the worker of its first piece
  uint64_t copied;     // that piece: its stores are under way
  uint64_t published;  // and complete, as that worker says
  uint64_t landed;     // warp 1 has seen that all workers are done with it
  uint64_t raised;     // its flag's store is under way
  uint64_t reserved;
};

struct alignas(64) Parameters {
  abi::World world;    // `launch`: the call that it serves. `ring` is device memory
  uint64_t peers;      // FabricPeer[world.size]
  uint64_t progress;   // device memory, zero at first. [0]: the launch that is over; from kProgress on, by worker: commands it is done with
  uint64_t host_ring;  // Ring in host memory: `launched` is read; who is put to is left there for reports
  uint64_t report;     // FabricReport
  uint64_t heap_bytes;  // of every rank
  uint64_t signal_bytes;
  uint64_t femtoseconds_per_byte;  // 0: not paced
  uint64_t latency_ns;
  uint64_t reorder_ns;  // puts of different channels arrive up to so much later, in any order, as over SRD; 0: in order, as over RC
  uint64_t seed;
  uint64_t stamps;  // Stamps[abi::kRingSlots] with kStamps
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "mkernel/runtime/fabric.py");
constexpr uint32_t kProgress = 16;

// A put under way.
struct Flight {
  uint64_t due;  // device clock; kNever: its flag is raised
  uint64_t flag;
  uint64_t value;
};
struct Storage {
  FabricPeer peers[abi::kMaxRanks];  // by rank
  // ---- of CTA 0
  uint64_t taken;   // commands
  uint64_t ending;  // warp 1 leaves when so many are raised
  uint64_t channel_due[kChannels];
  uint32_t channel[32];  // of the batch
  Flight flights[abi::kRingSlots];
};
static_assert(sizeof(Storage) <= Config::kSharedBytes, "mkernel/runtime/fabric.py");

MK_DEVICE abi::Ring* ring_of(const Parameters& p) { return reinterpret_cast<abi::Ring*>(p.world.ring); }
MK_DEVICE uint64_t* progress_of(const Parameters& p, uint32_t worker) {
  return reinterpret_cast<uint64_t*>(p.progress) + kProgress + worker;
}
MK_DEVICE uint32_t num_workers() { return ptx::cta_count() * kWarps - 2; }
MK_DEVICE uint64_t lesser(uint64_t a, uint64_t b) { return a < b ? a : b; }
MK_DEVICE uint64_t greater(uint64_t a, uint64_t b) { return a < b ? b : a; }

MK_DEVICE uint64_t of_lane(uint64_t v, uint32_t lane) {
  const uint32_t high = ptx::broadcast(static_cast<uint32_t>(v >> 32), lane);
  return uint64_t(high) << 32 | ptx::broadcast(static_cast<uint32_t>(v), lane);
}
MK_DEVICE uint64_t xor_lane(uint64_t v, uint32_t lanes) {
  const uint32_t high = ptx::shuffle_xor(static_cast<uint32_t>(v >> 32), lanes);
  return uint64_t(high) << 32 | ptx::shuffle_xor(static_cast<uint32_t>(v), lanes);
}
MK_DEVICE uint32_t least_of_warp(uint32_t v) {
#pragma unroll
  for (uint32_t lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = ptx::shuffle_xor(v, lanes);
    v = other < v ? other : v;
  }
  return v;
}
// How many lanes from the first on have voted for it.
MK_DEVICE uint32_t first_lanes(uint32_t votes) { return votes == 0xffffffffu ? 32 : ptx::count_bits(votes ^ (votes + 1)) - 1; }

MK_DEVICE void stamp(const Parameters& p, uint64_t ticket, uint64_t Stamps::* stage, uint64_t time) {
  if constexpr (Config::kStamps != 0) reinterpret_cast<Stamps*>(p.stamps)[ticket % abi::kRingSlots].*stage = time;
}
// The command in a slot whose ticket this thread has acquired, at once: loads that wait for one another would take as long again each.
MK_DEVICE abi::Command command_in(const abi::Command& slot) {
  struct Lines {
    ptx::Words words[sizeof(abi::Command) / sizeof(ptx::Words)];
  } lines;
  const char* from = reinterpret_cast<const char*>(&slot);
#pragma unroll
  for (uint32_t i = 0; i < sizeof(lines) / sizeof(ptx::Words); ++i) lines.words[i] = ptx::load_global(from + i * sizeof(ptx::Words));
  return __builtin_bit_cast(abi::Command, lines);
}

// ---- warp 0
MK_DEVICE bool is_bad(const Parameters& p, const Storage& storage, const abi::Command& command) {
  if (command.dst_rank >= p.world.size || storage.peers[command.dst_rank].heap == 0) return true;
  const uint64_t furthest = command.src_offset > command.dst_offset ? command.src_offset : command.dst_offset;
  return furthest > p.heap_bytes || command.bytes > p.heap_bytes - furthest || command.signal_offset % 8 != 0 ||
         command.signal_offset + 8 > p.signal_bytes;
}
MK_DEVICE void report_bad(const Parameters& p, const abi::Command& command) {
  FabricReport* report = reinterpret_cast<FabricReport*>(p.report);
  report->command = command;
  ptx::store_release_sys(&report->bad, 1);
}
MK_DEVICE uint64_t any_below(const Parameters& p, uint64_t ticket, uint64_t limit) {  // the same for the same ticket (splitmix64)
  uint64_t x = p.seed + ticket * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (x ^ (x >> 31)) % limit;
}

// The NIC: one queue for all peers and channels. Warp function.
class Link {
 public:
  // When the puts of the batch, which were seen at `now`, are due: lane i's, whose bytes take `ns` on the link, is put ticket + i.
  MK_DEVICE void schedule(const Parameters& p, Storage& storage, uint64_t ticket, uint32_t count, uint64_t now, uint64_t ns) {
    const uint32_t lane = ptx::lane_index();
    const uint64_t begin = free_ < now ? now : free_;
    uint64_t until = ns, total = ns;  // of lanes up to this one, and of all
#pragma unroll
    for (uint32_t lanes = 1; lanes < 32; lanes *= 2) {
      const uint64_t others = xor_lane(total, lanes);
      if ((lane & lanes) != 0) until += others;
      total += others;
    }
    free_ = begin + total;
    if (lane < count) storage.flights[(ticket + lane) % abi::kRingSlots].due = begin + until + p.latency_ns;
    if (lane < count) stamp(p, ticket + lane, &Stamps::due, begin + until + p.latency_ns);
    if (p.reorder_ns == 0) return;
    ptx::sync_warp();
    if (lane == 0) reorder(p, storage, ticket, count);
  }

 private:
  MK_DEVICE static void reorder(const Parameters& p, Storage& storage, uint64_t ticket, uint32_t count) {  // one thread
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t& flight_due = storage.flights[(ticket + i) % abi::kRingSlots].due;
      uint64_t& channel_due = storage.channel_due[storage.channel[i]];
      uint64_t due = flight_due + any_below(p, ticket + i, p.reorder_ns);
      if (due < channel_due) due = channel_due;  // behind earlier puts on its channel
      channel_due = due;
      flight_due = due;
    }
  }
  uint64_t free_ = 0;
};

// Whether nothing more is to come: the calls that the host has launched have ended, and all their commands are taken.
class Calls {
 public:
  MK_DEVICE explicit Calls(const Parameters& p) : p_(p), serves_(p.world.launch) {}
  MK_DEVICE void moved() { linger_until_ = 0; }
  MK_DEVICE uint64_t look_again() const { return linger_until_ == 0 ? kNever : linger_until_; }
  MK_DEVICE bool over(uint32_t ended, uint64_t taken) {  // one thread, after it has acquired `ended`
    if (static_cast<int32_t>(ended - serves_) < 0) return false;
    if (ptx::load_acquire_sys(&control_block(p_.world)->ring_head) != taken) return false;
    const uint64_t now = ptx::clock_ns();
    if (linger_until_ == 0) linger_until_ = now + kLingerNs;
    if (now >= linger_until_) return true;
    // The next call's kernel may be there before the next fabric, which waits for this one: this one serves it, too.
    const auto launched = static_cast<uint32_t>(ptx::load_acquire_sys(&reinterpret_cast<const abi::Ring*>(p_.host_ring)->launched));
    return launched == ended;
  }

 private:
  const Parameters& p_;
  uint32_t serves_;
  uint64_t linger_until_ = 0;
};

MK_DEVICE void take_commands(const Parameters& p, Storage& storage, uint64_t taken) {
  abi::Ring* ring = ring_of(p);
  const uint32_t lane = ptx::lane_index();
  const uint64_t* abort = &signal_header(p.world, p.world.local_rank)->abort;
  uint64_t ending = kNever;
  Link link;
  Calls calls(p);
  uint32_t polls = 0;
#pragma unroll 1
  while (ending == kNever) {
    const abi::Command& slot = ring->slots[(taken + lane) % abi::kRingSlots];
    const uint64_t seen = ptx::load_acquire_sys(lane < kBatch ? &slot.ticket : lane == kBatch ? abort : &ring->ended);
    const uint32_t count = first_lanes(ptx::votes(lane < kBatch && seen == taken + lane + 1));
    ptx::sync_warp();  // what any lane has acquired, all have
    if (count > 0) {
      const uint64_t now = of_lane(ptx::clock_ns(), 0);  // before anything else: what that takes is part of the latency
      bool bad = false;
      uint64_t ns = 0;
      if (lane < count) {
        const abi::Command command = command_in(slot);
        bad = is_bad(p, storage, command);
        if (bad) {
          report_bad(p, command);
        } else {
          ns = (command.bytes * p.femtoseconds_per_byte + 999'999) / 1'000'000;
          storage.flights[(taken + lane) % abi::kRingSlots] =
              Flight{0, storage.peers[command.dst_rank].signals + command.signal_offset, command.signal_value};
          storage.channel[lane] = (command.channel + 61 * command.dst_rank) % kChannels;
          abi::Command& told = reinterpret_cast<abi::Ring*>(p.host_ring)->slots[(taken + lane) % abi::kRingSlots];
          told.dst_rank = command.dst_rank;
          told.ticket = taken + lane + 1;
          stamp(p, taken + lane, &Stamps::seen, now);
        }
      }
      if (ptx::any_of_warp(bad)) break;
      link.schedule(p, storage, taken, count, now, ns);
      ptx::sync_warp();
      if (lane == 0) ptx::store_release_shared(&storage.taken, taken + count);
      ptx::sync_warp();
      taken += count;
      calls.moved();
      continue;
    }
    bool leave = lane == kBatch && seen != 0;
    if (++polls % ptx::kPollsPerHostCheck == 0) leave = leave || ptx::load_acquire_sys(&host_block(p.world)->abort) != 0;
    if (ptx::any_of_warp(leave)) break;
    const bool over = lane == 31 && calls.over(static_cast<uint32_t>(seen), taken);
    if (ptx::any_of_warp(over)) ending = taken;
    if (lane == 31 && ending == kNever) ptx::pause_until(&ring->slots[taken % abi::kRingSlots].ticket, taken + 1, calls.look_again());
    ptx::sync_warp();
  }
  if (lane == 0) ptx::store_release_shared(&storage.ending, ending == kNever ? 0 : ending);  // 0: at once, because the world has failed
}

// ---- warp 1
// Puts that every worker is done with, of [raised, known). Warp function.
MK_DEVICE uint64_t landed_of(const Parameters& p, uint64_t raised, uint64_t known) {
  uint64_t least = known;
#pragma unroll 1
  for (uint32_t worker = 2 * ptx::lane_index(); worker < num_workers(); worker += 64) {
    const ptx::WordPair two = ptx::load_acquire_sys_pair(progress_of(p, worker));
    least = lesser(least, worker + 1 < num_workers() ? lesser(two.first, two.second) : two.first);
  }
  least = greater(least, raised);  // a worker that has not said anything yet on a ring that was used before
  const uint64_t landed = raised + least_of_warp(static_cast<uint32_t>(least - raised));
  ptx::sync_warp();
  return landed;
}

// Raises the flags of lanes that are due; of several values of one flag the last one. Warp function.
MK_DEVICE void raise_due(Storage& storage, uint64_t base, bool due, uint32_t lanes_due) {
  const uint32_t lane = ptx::lane_index();
  Flight& flight = storage.flights[(base + lane) % abi::kRingSlots];
  bool last = due;
  if ((lanes_due & (lanes_due - 1)) != 0) {
#pragma unroll
    for (uint32_t other = 1; other < 32; ++other) {
      const uint64_t flag = storage.flights[(base + other) % abi::kRingSlots].flag;
      if ((lanes_due >> other & 1) != 0 && other > lane && flag == flight.flag) last = false;
    }
  }
  if (last) ptx::store_release_sys(reinterpret_cast<uint64_t*>(flight.flag), flight.value);
  ptx::sync_warp();
  if (due) flight.due = kNever;
  ptx::sync_warp();
}

MK_DEVICE void raise_flags(const Parameters& p, Storage& storage, uint64_t raised) {
  abi::Ring* ring = ring_of(p);
  const uint32_t lane = ptx::lane_index();
  uint64_t landed = raised;
#pragma unroll 1
  while (true) {
    const uint64_t ending = of_lane(ptx::load_acquire_shared(&storage.ending), 0);
    const uint64_t known = of_lane(ptx::load_acquire_shared(&storage.taken), 0);
    ptx::sync_warp();
    if (raised >= ending) break;
    const uint64_t landed_before = landed;
    if (landed < known && landed < raised + 32) landed = landed_of(p, raised, known);
    if (landed_before + lane < landed) stamp(p, landed_before + lane, &Stamps::landed, ptx::clock_ns());
    const uint64_t now = of_lane(ptx::clock_ns(), 0);
    uint64_t wait = kNever;  // until the next one is due
#pragma unroll 1
    for (uint64_t base = raised; base < landed; base += 32) {
      const uint64_t due_at = base + lane < landed ? storage.flights[(base + lane) % abi::kRingSlots].due : kNever;
      const bool due = due_at <= now;
      const uint32_t lanes_due = ptx::votes(due);
      if (lanes_due != 0) raise_due(storage, base, due, lanes_due);
      if (due) stamp(p, base + lane, &Stamps::raised, ptx::clock_ns());
      if (!due && due_at != kNever) wait = lesser(wait, due_at - now);
      if (p.reorder_ns == 0 && ptx::any_of_warp(!due && due_at != kNever)) break;
    }
    const uint64_t before = raised;
    uint32_t count = 32;
#pragma unroll 1
    while (count == 32) {
      const bool done = raised + lane < landed && storage.flights[(raised + lane) % abi::kRingSlots].due == kNever;
      count = first_lanes(ptx::votes(done));
      raised += count;
    }
    if (raised != before && lane == 0) ptx::store_release_sys(&ring->completed, raised);
    const uint32_t nap = least_of_warp(static_cast<uint32_t>(lesser(wait, 0xffffffffu)));
    if (lane == 0 && raised == before) ptx::pause_until(&storage.taken, known + 1, nap == 0xffffffffu ? kNever : now + nap);
    ptx::sync_warp();
  }
  if (lane == 0) ptx::store_release_sys(reinterpret_cast<uint64_t*>(p.progress), p.world.launch);  // the workers leave
}

// ---- workers
// Copies bytes between any two addresses; 16 at a time where both allow it. Warp function.
MK_DEVICE void copy_piece(char* to, const char* from, uint32_t bytes) {
  const bool aligned = ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) & 15) == 0;
  const uint32_t lane = ptx::lane_index(), whole = aligned ? bytes & ~15u : 0;
#pragma unroll 1
  for (uint32_t offset = lane * 16; offset < whole; offset += kLoads * 512) {
    ptx::Words words[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (offset + i * 512 < whole) words[i] = ptx::load_global(from + offset + i * 512);
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (offset + i * 512 < whole) ptx::store_global(to + offset + i * 512, words[i]);
    }
  }
#pragma unroll 1
  for (uint32_t offset = whole + lane; offset < bytes; offset += 32) ptx::store_byte(to + offset, ptx::load_byte(from + offset));
}

// Where the first piece of a put begins that is this worker's. Puts of one piece go round the workers.
MK_DEVICE uint64_t first_offset(uint64_t ticket, uint32_t worker) {
  const uint32_t workers = num_workers();
  return uint64_t((worker + workers - static_cast<uint32_t>(ticket) % workers) % workers) * Config::kPieceBytes;
}

// Copies the pieces of one put that are this worker's; returns how many bytes, at most kPublishBytes.
MK_DEVICE uint32_t copy_share(const Parameters& p, const Storage& storage, const abi::Command& command, uint64_t ticket, uint32_t worker) {
  const uint64_t bytes = command.bytes, stride = uint64_t(num_workers()) * Config::kPieceBytes;
  char* to = reinterpret_cast<char*>(storage.peers[command.dst_rank].heap) + command.dst_offset;
  const char* from = detail::heap(p.world, p.world.local_rank) + command.src_offset;
  uint64_t copied = 0;
#pragma unroll 1
  for (uint64_t offset = first_offset(ticket, worker); offset < bytes; offset += stride) {
    const auto piece = static_cast<uint32_t>(lesser(bytes - offset, Config::kPieceBytes));
    copy_piece(to + offset, from + offset, piece);
    copied += piece;
  }
  return static_cast<uint32_t>(lesser(copied, kPublishBytes));
}

MK_DEVICE void publish(const Parameters& p, uint32_t worker, uint64_t next) {
  ptx::sync_warp();  // all lanes have stored
  if (ptx::lane_index() == 0) ptx::store_release_sys(progress_of(p, worker), next);
}

// Goes through all commands, and copies its share. It says how far it is after two looks at the ring at most, because saying so takes long.
MK_DEVICE void work(const Parameters& p, const Storage& storage, uint32_t worker) {
  const abi::Ring* ring = ring_of(p);
  const uint32_t lane = ptx::lane_index();
  const uint64_t* over = reinterpret_cast<const uint64_t*>(p.progress);
  // What is complete on a ring that was used before, another fabric has copied.
  uint64_t next = of_lane(greater(ptx::load_acquire_sys(progress_of(p, worker)), ptx::load_acquire_sys(&ring->completed)), 0);
#pragma unroll 1
  while (true) {
    const uint64_t begin = next;
    uint32_t copied = 0, count = 31;
#pragma unroll 1
    for (uint32_t look = 0; look < 2 && count == 31; ++look) {
      const abi::Command& slot = ring->slots[(next + lane) % abi::kRingSlots];
      const uint64_t seen = ptx::load_acquire_sys(lane == 31 ? over : &slot.ticket);
      count = first_lanes(ptx::votes(lane < 31 && seen == next + lane + 1));
      ptx::sync_warp();
      if (ptx::any_of_warp(lane == 31 && seen == p.world.launch)) return;
      const bool taken = lane < count;
      const abi::Command command = taken ? command_in(slot) : abi::Command{};
      if (ptx::any_of_warp(taken && is_bad(p, storage, command))) return;
      if (taken && first_offset(next + lane, worker) == 0) stamp(p, next + lane, &Stamps::found, ptx::clock_ns());
#pragma unroll 1
      for (uint32_t mine = ptx::votes(taken && first_offset(next + lane, worker) < command.bytes); mine != 0; mine &= mine - 1) {
        const uint64_t ticket = next + ptx::count_bits((mine & (0 - mine)) - 1);
        copied += copy_share(p, storage, ring->slots[ticket % abi::kRingSlots], ticket, worker);
        if (lane == 0 && first_offset(ticket, worker) == 0) stamp(p, ticket, &Stamps::copied, ptx::clock_ns());
        if (copied < kPublishBytes) continue;
        publish(p, worker, ticket + 1);
        copied = 0;
      }
      next += count;
    }
    if (next != begin) {
      publish(p, worker, next);
      if (lane == 0 && first_offset(next - 1, worker) == 0) stamp(p, next - 1, &Stamps::published, ptx::clock_ns());
    } else {
      if (lane == 0) ptx::pause_until(&ring->slots[next % abi::kRingSlots].ticket, next + 1, kNever);
      ptx::sync_warp();
    }
  }
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index();
  for (uint32_t i = ptx::thread_index(); i < p.world.size; i += Config::kThreads) {
    storage.peers[i] = reinterpret_cast<const FabricPeer*>(p.peers)[i];
  }
  for (uint32_t i = ptx::thread_index(); i < kChannels; i += Config::kThreads) storage.channel_due[i] = 0;
  if (ptx::thread_index() == 0) {
    storage.taken = ptx::load_acquire_sys(&ring_of(p)->completed);  // when a fabric ends, all that was taken is complete
    storage.ending = kNever;
  }
  ptx::sync_cta();
  if (cta == 0 && warp < 2) {
    const uint64_t begin = storage.taken;
    ptx::barrier_sync(1, 64);  // both warps have read it
    if (warp == 0) {
      take_commands(p, storage, begin);
    } else {
      raise_flags(p, storage, begin);
    }
  } else {
    work(p, storage, cta * kWarps + warp - 2);
  }
}

}  // namespace mkernel
