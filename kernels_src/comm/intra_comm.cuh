// A CTA that moves data between the ranks of a node before it computes: thread 0 copies, warp 2 enters for all and one thread of it waits for
// what comes from others, warp 1 raises flags.
#pragma once
#include "comm/copy.cuh"
#include "comm/mailbox.cuh"
#include "comm/world.cuh"

namespace mkernel {

template <class Gemm>  // Gemm: what the CTA needs once it computes
struct CopyingStorage {
  union {
    Gemm gemm;
    CopyPieces pieces;
  };
  CopyBarriers copy_barriers;  // not shared with anything: barriers must not be overwritten
  EntryGate entries;
  Mailbox arrived, announce;  // items for thread 0, flags for warp 1
};

// All threads of the CTA. One thread each: copy(enter, receiver, announce) copies, takes items from the receiver and posts flags to raise; it has entered
// when enter() returns. wait(entered, arrived, announce) posts items that have come. Who posts flags is By. Both return early where the call fails.
// nearest(flag): the distance of the nearest of the node's ranks that are told by it, from which on all are.
enum class Announcer { kCopy, kWait };
template <Announcer By, class Parameters, class Storage, class Copy, class Wait, class Nearest>
MK_DEVICE void intra_comm(const Call& call, const Parameters& p, Storage& storage, const Copy& copy, const Wait& wait,
                          const Nearest& nearest) {
  if (ptx::thread_index() == 0) {
    storage.entries.init();
    storage.arrived.init();
    storage.announce.init();  // ends with the fence for all of them
  }
  ptx::sync_cta();
  const uint32_t warp = ptx::warp_index();
  Mailbox::Position arrival, announcement;
  if (warp == 0) {
    if (ptx::elected()) {
      Receiver receiver(storage.arrived);
      copy([&] { return storage.entries.pass_to_store(call); }, receiver, announcement);
      receiver.drain();
      if (By == Announcer::kCopy) storage.announce.end(announcement);
    }
  } else if (warp == 1) {
    const MaybeEntered entered = storage.entries.pass(call);
    storage.announce.serve_together([&](uint32_t flag, uint32_t lane) {  // only one that has entered posts
      raise_flag_by(*entered, p, flag, nearest(flag), lane, kMailboxLanes);
    });
  } else if (warp == 2) {
    const MaybeEntered entered = storage.entries.open(call);
    if (ptx::lane_index() == 0) {
      if (entered) wait(*entered, arrival, announcement);
      storage.arrived.end(arrival);
      if (By == Announcer::kWait) storage.announce.end(announcement);
    }
  }
  ptx::sync_cta();
}

}  // namespace mkernel
