// Transport srd below two compiled engines (engine_threads.hpp): one thread is
// both cards, and carries requests in any order.
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

#include "engine_threads.hpp"

using namespace mkproxy;

namespace {

constexpr uint64_t kDepth = 32, kReceives = 41, kSpare = 9;

struct Work {
  uint64_t id, address, bytes, remote;
  uint32_t imm;
  bool write;
};

// One rank: its memory, its queue pair and queues. The mutex stands for what
// the card's hardware orders.
struct Rank : Memory {
  ExtendedPair pair{};
  Rank* peer = nullptr;
  std::vector<Work> batch;
  std::mutex mutex;
  std::vector<Work> posted;
  std::deque<ReceiveRequest> receives;
  std::deque<Entry> entries;
  std::deque<Completion> sends, arrivals;
  std::vector<unsigned char> messages = std::vector<unsigned char>(kMessageSlot * (kDepth + kReceives));
  Target target{};
  uint64_t pairs[1];
};

Rank ranks[2];
bool cards_end = false;

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

void run_cards(unsigned seed) {
  std::mt19937 random(seed);
  while (!__atomic_load_n(&cards_end, __ATOMIC_RELAXED)) {
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
  setup.signal_bytes = kSignalBytes;
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
  std::thread cards(run_cards, static_cast<unsigned>(std::atoi(arguments[1])));
  run_ranks(ranks[0], ranks[1]);
  __atomic_store_n(&cards_end, true, __ATOMIC_RELAXED);
  cards.join();
  std::puts("all puts came");
  return 0;
}
