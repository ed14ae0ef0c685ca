// Two compiled engines under ThreadSanitizer: per rank a thread that is the
// device's producer, one that is its consumer, and one for the engine; and one
// thread that is both cards. What one of them may use of another's memory, the
// engine alone must order.
#include <arpa/inet.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "engine.cpp"

using namespace mkproxy;

namespace {

constexpr uint64_t kPuts = 1500, kStreams = 2, kBytes = 96,
                   kSlots = 8;  // slots: of the source, per channel
constexpr uint64_t kDepth = 32, kReceives = 41, kSpare = 9;
constexpr uint64_t kTargets = kPuts * kBytes * kStreams;

struct Work {
  uint64_t id, address, bytes, remote;
  uint32_t imm;
  bool write;
};

// One rank: its memory, its queue pair and queues. The mutex stands for what
// the card's hardware orders.
struct Rank {
  ExtendedPair pair{};
  Rank* peer = nullptr;
  std::vector<Work> batch;
  std::mutex mutex;
  std::vector<Work> posted;
  std::deque<ReceiveRequest> receives;
  std::deque<Entry> entries;
  std::deque<Completion> sends, arrivals;
  // Registered memory: sources first, then where the peer's puts go.
  std::vector<unsigned char> heap = std::vector<unsigned char>(kStreams * kSlots * kBytes + kTargets);
  std::vector<uint64_t> signals = std::vector<uint64_t>(kStreams);
  std::vector<unsigned char> messages = std::vector<unsigned char>(kMessageSlot * (kDepth + kReceives));
  abi::Ring ring{};
  Report report{};
  Target target{};
  Setup setup{};
  uint64_t pairs[1];
  bool engine_ends = false, card_ends = false;
};

Rank ranks[2];

Rank& of(void* pair) { return ranks[static_cast<ExtendedPair*>(pair) == &ranks[0].pair ? 0 : 1]; }

void start(ExtendedPair*) {}
void write_imm(ExtendedPair* pair, uint32_t, uint64_t remote, uint32_t imm) {
  of(pair).batch.push_back({pair->id, 0, 0, remote, imm, true});
}
void send(ExtendedPair* pair) { of(pair).batch.push_back({pair->id, 0, 0, 0, 0, false}); }
void set_route(ExtendedPair*, void*, uint32_t, uint32_t) {}
void set_entry(ExtendedPair* pair, uint32_t, uint64_t address, uint32_t bytes) {
  of(pair).batch.back().address = address;
  of(pair).batch.back().bytes = bytes;
}
int complete(ExtendedPair* pair) {
  Rank& rank = of(pair);
  const std::lock_guard lock(rank.mutex);
  rank.posted.insert(rank.posted.end(), rank.batch.begin(), rank.batch.end());
  rank.batch.clear();
  return 0;
}
int post_receive(void* pair, ReceiveRequest* first, ReceiveRequest**) {
  Rank& rank = of(pair);
  const std::lock_guard lock(rank.mutex);
  for (; first != nullptr; first = first->next) {
    rank.receives.push_back(*first);
    rank.entries.push_back(*first->entries);
  }
  return 0;
}
// A queue is the address of a rank's deque of completions.
int poll(void* queue, int limit, Completion* found) {
  Rank& rank = ranks[queue == &ranks[0].sends || queue == &ranks[0].arrivals ? 0 : 1];
  auto& completions = *static_cast<std::deque<Completion>*>(queue);
  const std::lock_guard lock(rank.mutex);
  int count = 0;
  for (; count < limit && !completions.empty(); ++count) {
    found[count] = completions.front();
    completions.pop_front();
  }
  return count;
}

// Carries one request of a rank, any of those posted; false if there is none,
// or nowhere to put it.
bool carry(Rank& rank, std::mt19937& random) {
  Work work;
  Completion arrival{};
  Entry entry;
  {
    const std::lock_guard lock(rank.mutex);
    if (rank.posted.empty()) return false;
  }
  {
    const std::lock_guard lock(rank.peer->mutex);
    if (rank.peer->receives.empty()) return false;
    arrival.id = rank.peer->receives.front().id;
    entry = rank.peer->entries.front();
    rank.peer->receives.pop_front();
    rank.peer->entries.pop_front();
  }
  {
    const std::lock_guard lock(rank.mutex);
    std::swap(rank.posted[random() % rank.posted.size()], rank.posted.back());
    work = rank.posted.back();
    rank.posted.pop_back();
  }
  const uint64_t destination = work.write ? work.remote : entry.address;
  std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(work.address), work.bytes);
  arrival.bytes = static_cast<uint32_t>(work.bytes);
  arrival.imm = work.imm;
  arrival.opcode = kReceived;
  arrival.flags = work.write ? kWithImm : 0;
  {
    const std::lock_guard lock(rank.peer->mutex);
    rank.peer->arrivals.push_back(arrival);
  }
  const std::lock_guard lock(rank.mutex);
  Completion ended{};
  ended.id = work.id;
  rank.sends.push_back(ended);
  return true;
}

void die(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(3);
}

unsigned char byte_of(uint64_t rank, uint64_t channel, uint64_t number) {
  return static_cast<unsigned char>(rank + 2 * channel + 5 * number + 1);
}
uint64_t target_of(uint64_t channel, uint64_t number) { return kStreams * kSlots * kBytes + (number * kStreams + channel) * kBytes; }

// The device's producer: writes a source, then the command; a source again when
// the put that used it has completed.
void produce(uint64_t me) {
  Rank& rank = ranks[me];
  for (uint64_t ticket = 0; ticket < kPuts * kStreams; ++ticket) {
    const uint64_t channel = ticket % kStreams, number = ticket / kStreams, source = (channel * kSlots + number % kSlots) * kBytes;
    if (number >= kSlots) {
      const uint64_t before = ticket - kSlots * kStreams + 1;
      while (__atomic_load_n(&rank.ring.completed, __ATOMIC_ACQUIRE) < before) sched_yield();
    }
    std::memset(rank.heap.data() + source, byte_of(me, channel, number), kBytes);
    abi::Command& put = rank.ring.slots[ticket % abi::kRingSlots];
    put.channel = static_cast<uint32_t>(channel);
    put.dst_rank = static_cast<uint32_t>(1 - me);
    put.src_offset = source;
    put.dst_offset = target_of(channel, number);
    put.bytes = kBytes;
    put.signal_offset = 8 * channel;
    put.signal_value = number + 1;
    __atomic_store_n(&put.ticket, ticket + 1, __ATOMIC_RELEASE);
  }
}

// The device's consumer of a channel: reads what a flag says has come.
void consume(uint64_t me, uint64_t channel) {
  Rank& rank = ranks[me];
  for (uint64_t seen = 0; seen < kPuts;) {
    const uint64_t flag = __atomic_load_n(&rank.signals[channel], __ATOMIC_ACQUIRE);
    if (flag == seen) sched_yield();
    for (; seen < flag; ++seen) {
      const unsigned char* bytes = rank.heap.data() + target_of(channel, seen);
      for (uint64_t i = 0; i < kBytes; ++i) {
        if (bytes[i] != byte_of(1 - me, channel, seen)) die("visible before the bytes");
      }
    }
  }
}

void run_engine(uint64_t me) {
  Rank& rank = ranks[me];
  void* engine = mkp_create(&rank.setup, &rank.report);
  if (engine == nullptr) die("no engine");
  while (!__atomic_load_n(&rank.engine_ends, __ATOMIC_RELAXED)) {
    const int result = mkp_step(engine);
    if (result == kTrouble) die("trouble");
    if (result == kIdle) sched_yield();
  }
  mkp_destroy(engine);
}

void run_cards(unsigned seed) {
  std::mt19937 random(seed);
  while (!__atomic_load_n(&ranks[0].card_ends, __ATOMIC_RELAXED)) {
    bool moved = false;
    for (Rank& rank : ranks) moved |= carry(rank, random);
    if (!moved) sched_yield();
  }
}

void open(uint64_t me) {
  Rank& rank = ranks[me];
  Rank& peer = ranks[1 - me];
  rank.peer = &peer;
  ExtendedPair& pair = rank.pair;
  pair.start = start, pair.write_imm = write_imm, pair.send = send;
  pair.set_route = set_route, pair.set_entry = set_entry, pair.complete = complete;
  rank.pairs[0] = reinterpret_cast<uint64_t>(&pair);
  rank.target.rank = 1 - me;
  rank.target.heap = reinterpret_cast<uint64_t>(peer.heap.data());
  rank.target.credits = kReceives - kSpare;
  Setup& setup = rank.setup;
  setup.kind = kSrd;
  setup.ring = reinterpret_cast<uint64_t>(&rank.ring);
  setup.batch = 64;
  setup.post_receive = reinterpret_cast<uint64_t>(&post_receive);
  setup.poll = reinterpret_cast<uint64_t>(&poll);
  setup.sends = reinterpret_cast<uint64_t>(&rank.sends);
  setup.arrivals = reinterpret_cast<uint64_t>(&rank.arrivals);
  setup.pairs = reinterpret_cast<uint64_t>(rank.pairs);
  setup.targets = reinterpret_cast<uint64_t>(&rank.target);
  setup.num_peers = setup.queue_pairs = 1;
  setup.heap = reinterpret_cast<uint64_t>(rank.heap.data());
  setup.heap_bytes = rank.heap.size();
  setup.signals = reinterpret_cast<uint64_t>(rank.signals.data());
  setup.signal_bytes = 8 * kStreams;
  setup.scratch = setup.scratch_registered = reinterpret_cast<uint64_t>(rank.messages.data());
  setup.max_message = 40;  // three writes for a put
  setup.depth = kDepth;
  setup.receives = kReceives;
  setup.completions = kDepth;
  setup.credits = kReceives - kSpare;
  setup.backlog = 64;
  setup.window = 8192;
  for (uint64_t slot = 0; slot < kReceives; ++slot) {
    const uint64_t address = setup.scratch + kMessageSlot * (kDepth + kReceives - 1 - slot);
    rank.receives.push_back({slot, nullptr, nullptr, 1});
    rank.entries.push_back({address, kMessageSlot, 0});
  }
}

}  // namespace

int main(int, char** arguments) {
  open(0), open(1);
  std::vector<std::thread> devices, engines;
  for (uint64_t me = 0; me < 2; ++me) {
    engines.emplace_back(run_engine, me);
    devices.emplace_back(produce, me);
    for (uint64_t channel = 0; channel < kStreams; ++channel) devices.emplace_back(consume, me, channel);
  }
  std::thread cards(run_cards, static_cast<unsigned>(std::atoi(arguments[1])));
  for (std::thread& thread : devices) thread.join();
  for (Rank& rank : ranks) __atomic_store_n(&rank.engine_ends, true, __ATOMIC_RELAXED);
  for (std::thread& thread : engines) thread.join();
  __atomic_store_n(&ranks[0].card_ends, true, __ATOMIC_RELAXED);
  cards.join();
  std::puts("all puts came");
  return 0;
}
