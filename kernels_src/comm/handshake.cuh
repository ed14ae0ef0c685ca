// How two sides of a CTA take turns at slots in shared memory: one side fills a slot, the other takes what is in it and gives the slot back.
#pragma once
#include "ptx.cuh"

namespace mkernel {

// Where one thread stands in a ring of Size slots. `parity` changes with every lap.
template <uint32_t Size>
struct RingPosition {
  uint32_t index = 0, parity = 0;
  MK_DEVICE void advance(uint32_t size = Size) {  // of a ring that has fewer in this call
    if (++index == size) index = 0, parity ^= 1;
  }
  MK_DEVICE void advance_by(uint32_t slots, uint32_t size) {
    const uint32_t laps = (index + slots) / size;
    index += slots - laps * size, parity ^= laps % 2;
  }
};

// The barriers of a ring of slots; the slots themselves lie beside it. Every thread that takes part keeps its own Position and advances it once
// per slot. A barrier is named for what has happened when it completes.
template <uint32_t Slots>
struct Handshake {
  using Position = RingPosition<Slots>;
  uint64_t filled[Slots], taken[Slots];

  // How many arrivals complete a slot's barriers. One thread, before an mbarrier_init_fence and a sync_cta.
  MK_DEVICE void init(uint32_t fillers, uint32_t takers) {
    for (uint32_t i = 0; i < Slots; ++i) {
      ptx::mbarrier_init(&filled[i], fillers);
      ptx::mbarrier_init(&taken[i], takers);
    }
  }
  // ---- the side that fills
  MK_DEVICE void wait_taken(const Position& at) { ptx::mbarrier_wait(&taken[at.index], at.parity ^ 1); }  // in the first lap: at once
  MK_DEVICE void fill(const Position& at) { ptx::mbarrier_arrive(&filled[at.index]); }
  // The slot is filled by TMA: it is complete when so many bytes have come.
  MK_DEVICE uint64_t* fill_by_tma(const Position& at, uint32_t bytes) {
    ptx::mbarrier_arrive_expect(&filled[at.index], bytes);
    return &filled[at.index];
  }
  // ---- the side that takes
  MK_DEVICE void wait_filled(const Position& at) { ptx::mbarrier_wait(&filled[at.index], at.parity); }
  MK_DEVICE bool is_filled(const Position& at) { return ptx::mbarrier_test(&filled[at.index], at.parity); }
  MK_DEVICE void take(const Position& at) { ptx::mbarrier_arrive(&taken[at.index]); }
};

}  // namespace mkernel
