// A kernel that only sends: what the engine and the network sustain, for the bench (mkernel/bench/puts.py). Every rank sends p.bytes from its
// heap to its rail peer on each other node, in puts of kPutBytes, and waits until as much has come from each of them.
#pragma once
#include "comm/ring.cuh"

namespace mkernel {

// ---- config: kPutBytes, kNumNodes, kRanksPerNode, kInterSend; kThreads (64), kParameterBytes
static_assert(kNodes > 1, "every CTA sends, to other nodes");

struct alignas(64) Parameters {
  abi::World world;
  uint64_t source_offset;  // data heap: what is sent
  uint64_t target_offset;  // data heap: (nodes - 1, bytes), by distance of the sender's node
  uint64_t flag_offset;    // signal segment: (nodes - 1, puts)
  uint64_t bytes;          // to each peer
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

MK_DEVICE uint32_t num_puts(const Parameters& p) { return (p.bytes + Config::kPutBytes - 1) / Config::kPutBytes; }  // to each peer

struct Puts {
  const Parameters& p;
  uint32_t item;
  MK_DEVICE uint32_t end() const { return num_puts(p) * (kNodes - 1); }
  MK_DEVICE bool prepare(const Entered&, uint32_t chunk) {
    item = chunk;
    return true;
  }
  MK_DEVICE uint32_t puts() const { return 1; }
  MK_DEVICE Put put(const Call& call, uint32_t channel, uint32_t) const {
    const uint32_t distance = 1 + item % kOtherNodes, number = item / kOtherNodes,
                   slot = seen_by_node_at(distance) - 1;  // slot: at the peer
    const uint64_t begin = uint64_t(number) * Config::kPutBytes, left = p.bytes - begin;
    return Put{channel,
               rail_peer(p.world, distance),
               p.source_offset + begin,
               p.target_offset + slot * p.bytes + begin,
               left < Config::kPutBytes ? left : Config::kPutBytes,
               mkernel::flag_offset(p, slot * num_puts(p) + number),
               call.epoch()};
  }
};

struct Arrivals {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    return wait_flag(entered, p, i, rail_peer(p.world, 1 + i / num_puts(p)));
  }
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index();
  const Call call = begin_call(p.world, abi::kInterSend);
  if (warp == 0) {
    const MaybeEntered entered = enter(call);
    if (entered && ptx::lane_index() == 0) {
      Trace trace(p.world, 2);
      Puts puts{p, 0};
      put_chunks(*entered, puts, 1 + cta, cta, Config::kInterSend, trace);
    }
  } else if (warp == 1 && cta == 0) {
    announce_entry(call);
    if (const MaybeEntered entered = enter(call)) wait_all(*entered, Arrivals{p}, num_puts(p) * (kNodes - 1));
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) leave_call(call);
}

}  // namespace mkernel
