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
  // One thread takes, what it expects next. False: it has not come yet, or nothing more will.
  MK_DEVICE bool try_take(Position& at) {
    if (!ptx::mbarrier_try_wait(&filled[at.index], at.parity) || !wait(at)) return false;
    ptx::mbarrier_arrive(&taken[at.index]);
    at.advance();
    return true;
  }
  MK_DEVICE bool wait(const Position& at) {  // until something has come; false: nothing more will
    ptx::mbarrier_wait(&filled[at.index], at.parity);
    return index[at.index] != kNoMore;
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
