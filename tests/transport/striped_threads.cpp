// Two cards per rank below two compiled engines (engine_threads.hpp): each card
// is a thread, which carries its requests in order and knows nothing of others.
#include <deque>
#include <mutex>
#include <random>

#include "engine_threads.hpp"

namespace {

constexpr uint64_t kCards = 2, kDepth = 24;

struct Work {
  uint64_t id, address, bytes, remote, value;
  uint32_t opcode, flags;
};

// The mutex stands for what the card's hardware orders: a request after its
// posting, a completion after its request.
struct NetworkCard {
  std::mutex mutex;
  std::deque<Work> posted;
  std::deque<Completion> sends;
  Target target{};
  uint64_t pairs[1];
  Report report{};
  std::vector<uint64_t> scratch = std::vector<uint64_t>(kScratch + kDepth);
};

struct Rank : Memory {
  NetworkCard cards[kCards];
  Setup links[kCards];
};

Rank ranks[2];
bool cards_end = false;

// A queue pair, and a queue, is the address of its card.
int post_send(void* pair, SendRequest* first, SendRequest**) {
  NetworkCard& card = *static_cast<NetworkCard*>(pair);
  const std::lock_guard lock(card.mutex);
  for (; first != nullptr; first = first->next) {
    const Entry& entry = *first->entries;
    Work work{first->id, entry.address, entry.bytes, first->remote, 0, first->opcode, first->flags};
    if ((first->flags & kInline) != 0) work.value = *reinterpret_cast<uint64_t*>(entry.address);
    card.posted.push_back(work);
  }
  return 0;
}
int post_receive(void*, ReceiveRequest*, ReceiveRequest**) { return 0; }
int poll(void* queue, int limit, Completion* found) {
  NetworkCard& card = *static_cast<NetworkCard*>(queue);
  const std::lock_guard lock(card.mutex);
  int count = 0;
  for (; count < limit && !card.sends.empty(); ++count) {
    found[count] = card.sends.front();
    card.sends.pop_front();
  }
  return count;
}

bool carry(NetworkCard& card) {
  Work work;
  {
    const std::lock_guard lock(card.mutex);
    if (card.posted.empty()) return false;
    work = card.posted.front();
    card.posted.pop_front();
  }
  auto* word = reinterpret_cast<uint64_t*>(work.remote);
  if (work.opcode == kFetchAdd) {
    *reinterpret_cast<uint64_t*>(work.address) = __atomic_fetch_add(word, 0, __ATOMIC_RELAXED);
  } else if ((work.flags & kInline) != 0) {
    __atomic_store_n(word, work.value, __ATOMIC_RELEASE);
  } else {
    std::memcpy(word, reinterpret_cast<const void*>(work.address), work.bytes);
  }
  if ((work.flags & kSignaled) == 0) return true;
  Completion ended{};
  ended.id = work.id;
  const std::lock_guard lock(card.mutex);
  card.sends.push_back(ended);
  return true;
}

// Cards are of unlike speed, which changes: what one carries is early or late.
void run_card(NetworkCard& card, unsigned seed) {
  std::mt19937 random(seed);
  while (!__atomic_load_n(&cards_end, __ATOMIC_RELAXED)) {
    if (!carry(card)) sched_yield();
    for (unsigned pauses = random() % 64 == 0 ? random() % 16 : 0; pauses > 0; --pauses) sched_yield();
  }
}

void open(uint64_t me) {
  Rank &rank = ranks[me], &peer = ranks[1 - me];
  for (uint64_t number = 0; number < kCards; ++number) {
    NetworkCard &card = rank.cards[number], &other = peer.cards[number];
    card.pairs[0] = reinterpret_cast<uint64_t>(&card);
    card.target.rank = 1 - me;
    card.target.heap = reinterpret_cast<uint64_t>(peer.heap.data());
    card.target.signals = reinterpret_cast<uint64_t>(peer.signals.data());
    card.target.barrier = reinterpret_cast<uint64_t>(other.scratch.data());
    Setup& link = rank.links[number];
    link = Setup{};
    link.kind = kRc;
    link.signal = kAtomic;
    link.post_send = reinterpret_cast<uint64_t>(&post_send);
    link.post_receive = reinterpret_cast<uint64_t>(&post_receive);
    link.poll = reinterpret_cast<uint64_t>(&poll);
    link.sends = link.arrivals = reinterpret_cast<uint64_t>(&card);
    link.pairs = reinterpret_cast<uint64_t>(card.pairs);
    link.targets = reinterpret_cast<uint64_t>(&card.target);
    link.num_peers = link.queue_pairs = 1;
    link.heap = reinterpret_cast<uint64_t>(rank.heap.data());
    link.heap_bytes = rank.heap.size();
    link.signal_bytes = kSignalBytes;
    link.scratch = link.scratch_registered = reinterpret_cast<uint64_t>(card.scratch.data());
    link.max_message = 40;
    link.depth = link.completions = kDepth;
    link.rate = 1 + number;
    link.report = reinterpret_cast<uint64_t>(&card.report);
  }
  Setup& setup = rank.setup;
  setup.kind = kStriped;
  setup.ring = reinterpret_cast<uint64_t>(&rank.ring);
  setup.batch = 64;
  setup.num_peers = 1;
  setup.queue_pairs = kCards;
  setup.links = reinterpret_cast<uint64_t>(rank.links);
  setup.num_links = kCards;
  setup.smallest = 24;
  setup.unit = 8;
}

}  // namespace

int main(int, char** arguments) {
  open(0), open(1);
  std::vector<std::thread> cards;
  for (Rank& rank : ranks) {
    for (NetworkCard& card : rank.cards) {
      cards.emplace_back(run_card, std::ref(card), static_cast<unsigned>(std::atoi(arguments[1])) + cards.size());
    }
  }
  run_ranks(ranks[0], ranks[1]);
  __atomic_store_n(&cards_end, true, __ATOMIC_RELAXED);
  for (std::thread& card : cards) card.join();
  std::puts("all puts came");
  return 0;
}
