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
  MK_DEVICE void push(const Entered&, Position& at, uint32_t value) { put(at, value); }  // one thread
  MK_DEVICE void end(Position& at) { put(at, kNoMore); }                                 // the same thread, last, whatever has happened

  // Calls raise(index) in all lanes, until the end. Warp function.
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

 private:
  MK_DEVICE void put(Position& at, uint32_t value) {
    ptx::mbarrier_wait(&taken[at.index], at.parity ^ 1);
    index[at.index] = value;
    ptx::mbarrier_arrive(&filled[at.index]);
    at.advance();
  }
};

// The thread that takes what a Handover brings, in the order in which it expects it. Until it has come to the end, whoever pushes may be waiting for
// room: it drains the queue when it has no use for the rest, also where the call has failed.
class Receiver {
 public:
  MK_DEVICE explicit Receiver(Handover& queue) : queue_(queue) {}
  MK_DEVICE bool try_take() {  // false: it has not come yet, or nothing more will
    if (!ptx::mbarrier_try_wait(&queue_.filled[at_.index], at_.parity) || !wait()) return false;
    ptx::mbarrier_arrive(&queue_.taken[at_.index]);
    at_.advance();
    return true;
  }
  MK_DEVICE bool wait() {  // until something has come; false: nothing more will
    ptx::mbarrier_wait(&queue_.filled[at_.index], at_.parity);
    return queue_.index[at_.index] != kNoMore;
  }
  MK_DEVICE void drain() {
#pragma unroll 1
    while (wait()) try_take();
  }

 private:
  Handover& queue_;
  Handover::Position at_;
};

}  // namespace mkernel
