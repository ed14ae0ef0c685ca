// Warp 1 enters and posts items; a thread of warp 0 passes the gate and takes some of them, then drains the mailbox (kDrains).
#pragma once
#include "comm/mailbox.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  abi::World world;
  uint64_t items, taken, out;  // posted, taken; the sum of those taken, and whether the end was reached
  uint64_t reserved[5];
};

struct Storage {
  Mailbox mailbox;
  EntryGate entries;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const Call call = begin_call(p.world, abi::kIntraComm);
  if (ptx::thread_index() == 0) {
    s.entries.init();
    s.mailbox.init();
  }
  ptx::sync_cta();
  if (ptx::warp_index() == 1) {
    const MaybeEntered entered = s.entries.open(call);
    if (ptx::lane_index() == 0) {
      Mailbox::Position at;
      for (uint32_t i = 0; entered && i < p.items; ++i) s.mailbox.post(*entered, at, i);
      s.mailbox.end(at);
    }
  } else if (ptx::thread_index() == 0) {
    uint64_t* out = reinterpret_cast<uint64_t*>(p.out);
    Receiver receiver(s.mailbox);
    const MaybeEntered entered = s.entries.pass_to_store(call);
    for (uint32_t i = 0; entered && i < p.taken && receiver.wait(); ++i) out[0] += receiver.try_take();
    if (Config::kDrains != 0) {
      receiver.drain();
      out[1] = !receiver.wait() && !receiver.try_take();  // the end stays where it is
    }
  }
}

}  // namespace mkernel
