// Messages from one thread of a CTA to another. A thread that copies or stores posts flags to a warp that raises them, because a release to a peer
// waits for the link. A warp that waits for flags posts what has come to the thread that copies it.
#pragma once
#include "comm/handshake.cuh"
#include "comm/sync.cuh"

namespace mkernel {

constexpr uint32_t kMailboxSlots = 4;
constexpr uint32_t kMailboxLanes = 32 / kMailboxSlots;  // for each slot, of a warp that serves all of them at once
constexpr uint32_t kNoMore = 0xffffffffu;               // posted last

struct Mailbox {
  using Position = RingPosition<kMailboxSlots>;
  Handshake<kMailboxSlots> slots;
  uint32_t index[kMailboxSlots];

  MK_DEVICE void init() {  // one thread, before a sync_cta
    slots.init(1, 1);
    ptx::mbarrier_init_fence();
  }
  MK_DEVICE void post(const Entered&, Position& at, uint32_t value) { put(at, value); }  // one thread
  MK_DEVICE void end(Position& at) { put(at, kNoMore); }                                 // the same thread, last, whatever has happened

  // Calls raise(index) in all lanes, until the end. Warp function.
  template <class Raise>
  MK_DEVICE void serve(const Raise& raise) {
    Position at;
#pragma unroll 1
    while (true) {
      slots.wait_filled(at);
      const uint32_t value = index[at.index];
      ptx::sync_warp();
      if (ptx::lane_index() == 0) slots.take(at);
      if (value == kNoMore) return;
      raise(value);
      at.advance();
    }
  }
  // Calls raise(index, i) in kMailboxLanes lanes, numbered i, for all that has been posted at once, until the end: one after the other, releases that
  // wait for the link would hold back the thread that posts (docs/speed_log.md). Warp function.
  template <class Raise>
  MK_DEVICE void serve_together(const Raise& raise) {
    Position at;
    const uint32_t number = ptx::lane_index() % kMailboxSlots;
#pragma unroll 1
    while (true) {
      slots.wait_filled(at);
      const uint32_t count = ptx::broadcast(filled_from(at), 0);
      ptx::sync_warp();  // what lane 0 has seen to be filled, all lanes may read
      const uint32_t value = number < count ? index[(at.index + number) % kMailboxSlots] : kNoMore;
      ptx::sync_warp();
      for (uint32_t i = 0; i < count; ++i) {
        if (ptx::lane_index() == 0) slots.take(at);
        at.advance();
      }
      if (value != kNoMore) raise(value, ptx::lane_index() / kMailboxSlots);
      if (ptx::broadcast(value, count - 1) == kNoMore) return;
    }
  }

 private:
  MK_DEVICE uint32_t filled_from(Position at) {  // slots, of which the first is filled
    uint32_t count = 1;
    for (at.advance(); count < kMailboxSlots && slots.is_filled(at); at.advance()) ++count;
    return count;
  }
  MK_DEVICE void put(Position& at, uint32_t value) {
    slots.wait_taken(at);
    index[at.index] = value;
    slots.fill(at);
    at.advance();
  }
};

// The thread that reads a Mailbox and knows in which order things come. It reads to the end, by drain() if it has no use for the rest or the call has
// failed: until then the thread that posts may be waiting for room.
class Receiver {
 public:
  MK_DEVICE explicit Receiver(Mailbox& mailbox) : mailbox_(mailbox) {}
  MK_DEVICE bool try_take() {  // false: it has not come yet, or nothing more will
    if (!mailbox_.slots.is_filled(at_) || !wait()) return false;
    mailbox_.slots.take(at_);
    at_.advance();
    return true;
  }
  MK_DEVICE bool wait() {  // until something has come; false: nothing more will
    mailbox_.slots.wait_filled(at_);
    return mailbox_.index[at_.index] != kNoMore;
  }
  MK_DEVICE void drain() {
#pragma unroll 1
    while (wait()) try_take();
  }

 private:
  Mailbox& mailbox_;
  Mailbox::Position at_;
};

}  // namespace mkernel
