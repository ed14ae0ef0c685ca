// From the thread that stores to a warp that raises the flags: a release to a peer waits for the link, and must not hold up the stores.
#pragma once
#include "sync.cuh"

namespace mkernel {

constexpr uint32_t kAnnounceQueue = 4;
constexpr uint32_t kNoMoreFlags = 0xffffffffu;
struct AnnounceQueue {
  uint64_t data_stored[kAnnounceQueue], flag_taken[kAnnounceQueue];
  uint32_t flag[kAnnounceQueue];  // which flag (or the flags of which tile) to raise, or kNoMoreFlags

  MK_DEVICE void init() {  // one thread, before a sync_cta
    for (uint32_t i = 0; i < kAnnounceQueue; ++i) {
      ptx::mbarrier_init(&data_stored[i], 1);
      ptx::mbarrier_init(&flag_taken[i], 1);
    }
    ptx::mbarrier_init_fence();
  }
  MK_DEVICE void push(RingPosition<kAnnounceQueue>& at, uint32_t index) {
    ptx::mbarrier_wait(&flag_taken[at.index], at.parity ^ 1);
    flag[at.index] = index;
    ptx::mbarrier_arrive(&data_stored[at.index]);
    at.advance();
  }
  // Calls raise(flag index) in all lanes, until kNoMoreFlags. Warp function.
  template <class Raise>
  MK_DEVICE void serve(const Raise& raise) {
    RingPosition<kAnnounceQueue> at;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(&data_stored[at.index], at.parity);
      const uint32_t index = flag[at.index];
      ptx::sync_warp();
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&flag_taken[at.index]);
      if (index == kNoMoreFlags) return;
      raise(index);
      at.advance();
    }
  }
};

}  // namespace mkernel
