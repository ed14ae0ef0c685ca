// Two compiled engines under ThreadSanitizer: per rank a thread that is the
// device's producer, two that are its consumers, and one for the engine. Cards
// are threads of the program that includes this. What one thread may use of
// another's memory, the engines alone must order.
#pragma once
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "engine.cpp"

using namespace mkproxy;

constexpr uint64_t kPuts = 1500, kStreams = 2, kBytes = 96,
                   kSlots = 8;  // slots: of the source, per channel
constexpr uint64_t kTargets = kPuts * kBytes * kStreams;
constexpr uint64_t kSignalBytes = abi::kSignalFlags + 8 * kStreams;

// Of one rank. Registered memory: sources first, then where the peer's puts go.
struct Memory {
  std::vector<unsigned char> heap = std::vector<unsigned char>(kStreams * kSlots * kBytes + kTargets);
  std::vector<uint64_t> signals = std::vector<uint64_t>(kSignalBytes / 8);
  abi::Ring ring{};
  Report report{};
  Setup setup{};
  bool engine_ends = false;
};

inline void die(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(3);
}

inline unsigned char byte_of(uint64_t rank, uint64_t channel, uint64_t number) {
  return static_cast<unsigned char>(rank + 2 * channel + 5 * number + 1);
}
inline uint64_t target_of(uint64_t channel, uint64_t number) { return kStreams * kSlots * kBytes + (number * kStreams + channel) * kBytes; }

// The device's producer: writes a source, then the command; a source again when
// the put that used it has completed.
inline void produce(Memory& rank, uint64_t me) {
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
    put.signal_offset = abi::kSignalFlags + 8 * channel;
    put.signal_value = number + 1;
    __atomic_store_n(&put.ticket, ticket + 1, __ATOMIC_RELEASE);
  }
}

// The device's consumer of a channel: reads what a flag says has come.
inline void consume(Memory& rank, uint64_t me, uint64_t channel) {
  for (uint64_t seen = 0; seen < kPuts;) {
    const uint64_t flag = __atomic_load_n(&rank.signals[abi::kSignalFlags / 8 + channel], __ATOMIC_ACQUIRE);
    if (flag == seen) sched_yield();
    for (; seen < flag; ++seen) {
      const unsigned char* bytes = rank.heap.data() + target_of(channel, seen);
      for (uint64_t i = 0; i < kBytes; ++i) {
        if (bytes[i] != byte_of(1 - me, channel, seen)) die("visible before the bytes");
      }
    }
  }
}

inline void run_engine(Memory& rank) {
  void* engine = mkp_create(&rank.setup, &rank.report);
  if (engine == nullptr) die("no engine");
  while (!__atomic_load_n(&rank.engine_ends, __ATOMIC_RELAXED)) {
    const int result = mkp_step(engine);
    if (result == kTrouble) die("trouble");
    if (result == kIdle) sched_yield();
  }
  mkp_destroy(engine);
}

// Until all puts of both ranks have been seen.
inline void run_ranks(Memory& one, Memory& other) {
  std::vector<std::thread> devices, engines;
  for (uint64_t me = 0; me < 2; ++me) {
    Memory& rank = me == 0 ? one : other;
    engines.emplace_back(run_engine, std::ref(rank));
    devices.emplace_back(produce, std::ref(rank), me);
    for (uint64_t channel = 0; channel < kStreams; ++channel) devices.emplace_back(consume, std::ref(rank), me, channel);
  }
  for (std::thread& thread : devices) thread.join();
  for (Memory* rank : {&one, &other}) __atomic_store_n(&rank->engine_ends, true, __ATOMIC_RELAXED);
  for (std::thread& thread : engines) thread.join();
}
