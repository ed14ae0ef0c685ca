// From one thread of a CTA to another: what it may go on with. A thread that copies or stores hands the flags to raise to a warp that raises
// them, since a release to a peer waits for the link; a warp that waits for flags hands what has come to the thread that copies it.
#pragma once
#include "sync.cuh"

namespace mkernel {

constexpr uint32_t kHandoverSlots = 4;
constexpr uint32_t kNoMore = 0xffffffffu;  // the last index handed over

struct Handover {
  using Position = RingPosition<kHandoverSlots>;
  uint64_t filled[kHandoverSlots], taken[kHandoverSlots];
  uint32_t index[kHandoverSlots];

  MK_DEVICE void init() {  // one thread, before a sync_cta
    for (uint32_t i = 0; i < kHandoverSlots; ++i) {
      ptx::mbarrier_init(&filled[i], 1);
      ptx::mbarrier_init(&taken[i], 1);
    }
    ptx::mbarrier_init_fence();
  }
  MK_DEVICE void push(Position& at, uint32_t value) {  // one thread
    ptx::mbarrier_wait(&taken[at.index], at.parity ^ 1);
    index[at.index] = value;
    ptx::mbarrier_arrive(&filled[at.index]);
    at.advance();
  }
  // One thread takes; it may look first.
  MK_DEVICE bool is_filled(const Position& at) { return ptx::mbarrier_try_wait(&filled[at.index], at.parity); }
  MK_DEVICE uint32_t front(const Position& at) {
    ptx::mbarrier_wait(&filled[at.index], at.parity);
    return index[at.index];
  }
  MK_DEVICE void take(Position& at) {
    ptx::mbarrier_arrive(&taken[at.index]);
    at.advance();
  }
  // Calls raise(index) in all lanes, until kNoMore. Warp function.
  template <class Raise>
  MK_DEVICE void serve(const Raise& raise) {
    Position at;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(&filled[at.index], at.parity);
      const uint32_t value = index[at.index];
      ptx::sync_warp();
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&taken[at.index]);
      if (value == kNoMore) return;
      raise(value);
      at.advance();
    }
  }
};

}  // namespace mkernel
