// Device side of the command ring: puts to ranks of other nodes, executed by the engine (mkernel/proxy).
#pragma once
#include "comm/world.cuh"
#include "concepts.cuh"
#include "trace.cuh"

namespace mkernel {

struct Put {
  uint32_t channel;
  uint32_t dst_rank;
  uint64_t src_offset;
  uint64_t dst_offset;
  uint64_t bytes;
  uint64_t signal_offset;
  uint64_t signal_value;
};

constexpr uint32_t kEntryChannel = 0;  // entry flags; ops number their channels from 1

// Gives the engine one command; everything this thread wrote or acquired before is visible to it. Returns the number of commands that must
// complete before the source may be reused (for wait_put), or 0 when the ring stayed full past the deadline.
MK_DEVICE uint64_t issue_command(const Call& call, const Put& put) {
  abi::Ring* ring = reinterpret_cast<abi::Ring*>(call.world.ring);
  const uint64_t ticket = ptx::atomic_add(&control_block(call.world)->ring_head, 1);
  if (ticket >= abi::kRingSlots) {
    const Awaited what{abi::kFlagRingSlot, static_cast<uint32_t>(ticket), put.dst_rank};
    if (!wait_ge(call, &ring->completed, ticket - abi::kRingSlots + 1, what, call.world.timeout_ns)) return 0;
  }
  abi::Command& slot = ring->slots[ticket % abi::kRingSlots];
  slot.channel = put.channel;
  slot.dst_rank = put.dst_rank;
  slot.src_offset = put.src_offset;
  slot.dst_offset = put.dst_offset;
  slot.bytes = put.bytes;
  slot.signal_offset = put.signal_offset;
  slot.signal_value = put.signal_value;
  ptx::store_release_sys(&slot.ticket, ticket + 1);
  return ticket + 1;
}

// A put: it writes to a peer's heap and raises a flag there.
MK_DEVICE uint64_t issue_put(const Entered& entered, const Put& put) { return issue_command(entered.call(), put); }

MK_DEVICE bool wait_put(const Call& call, uint64_t ticket, uint32_t peer) {
  const abi::Ring* ring = reinterpret_cast<abi::Ring*>(call.world.ring);
  return wait_ge(call, &ring->completed, ticket, Awaited{abi::kFlagRingDone, static_cast<uint32_t>(ticket), peer}, call.world.timeout_ns);
}

// What put_chunks puts.
template <class Chunks>
concept PutChunks = requires(Chunks chunks, const Entered& entered, const Call& call, uint32_t chunk, uint32_t channel, uint32_t i) {
  { chunks.end() } -> Same<uint32_t>;  // chunks are 0 .. end()-1
  {
    chunks.prepare(entered, chunk)
  } -> Same<bool>;                      // makes it the current one and waits until its source is complete; false: the call has failed
  { chunks.puts() } -> Same<uint32_t>;  // of the current chunk
  { chunks.put(call, channel, i) } -> Same<Put>;
};

// Puts every stride-th chunk from `first` on to ranks of other nodes, each when its source is complete, and waits until the engine has read the
// sources: they may be used again afterwards, unless the call has failed. One thread of an inter_send CTA.
template <PutChunks Chunks>
MK_DEVICE void put_chunks(const Entered& entered, Chunks& chunks, uint32_t channel, uint32_t first, uint32_t stride, Trace& trace) {
  const Call& call = entered.call();
  uint64_t last_put = 0;
  uint32_t last_peer = call.world.rank;
#pragma unroll 1
  for (uint32_t chunk = first; chunk < chunks.end(); chunk += stride) {
    const uint64_t begin = trace.now();
    if (!chunks.prepare(entered, chunk)) return;
    if (chunks.puts() == 0) continue;
#pragma unroll 1
    for (uint32_t i = 0; i < chunks.puts(); ++i) {
      const Put put = chunks.put(call, channel, i);
      last_put = issue_put(entered, put);
      last_peer = put.dst_rank;
      if (last_put == 0) return;
    }
    trace.record(abi::kTracePut, chunk, begin);
  }
  if (last_put != 0) wait_put(call, last_put, last_peer);
}

// Hands the entries of this rank's rail peers to its node mates, when they come: a rank tells its rail only, so that its engine has one command per
// node. A lane per peer and mate. The words are compared by those who wait for them: one with another plan is handed on as well.
MK_DEVICE void hand_on_entries(const Call& call) {
  const abi::World& world = call.world;
  const uint64_t entered = call.epoch() << abi::kCheckBits;
  constexpr uint32_t kMates = kR > 1 ? kR - 1 : 1;  // no 0: a division by it would draw a warning
#pragma unroll 1
  for (uint32_t i = ptx::lane_index(); i < (kNodes - 1) * kMates; i += 32) {
    const uint32_t peer = rail_peer(world, 1 + i / kMates), mate = local_peer(world, 1 + i % kMates);
    const uint64_t* flag = entry_flag(call, peer);
    if (!wait_word(call, flag, entered, 0, Awaited{abi::kFlagEntry, peer, peer}, world.entry_timeout_ns)) return;
    ptx::store_release_sys(&signal_header(world, mate)->entered[call.epoch() & 1][peer], ptx::load_acquire_sys(flag));
  }
}

// Tells every rank that this one has entered the call. One warp of the grid, which has nothing to do before all ranks have entered: a lane per peer
// of the node, so that no release waits for another.
MK_DEVICE void announce_entry(const Call& call) {
  if (is_skipped(call)) return;
  const abi::World& world = call.world;
  const uint64_t offset = entry_offset(call.epoch(), world.rank), value = entry_value(call.epoch(), call.check);
  for (uint32_t i = 1 + ptx::lane_index(); i < kR; i += 32) {
    ptx::store_release_sys(&signal_header(world, local_peer(world, i))->entered[call.epoch() & 1][world.rank], value);
  }
  if constexpr (kNodes > 1) {
    if (ptx::lane_index() == 0) {
#pragma unroll 1
      for (uint32_t distance = 1; distance < kNodes; ++distance) {
        issue_command(call, Put{kEntryChannel, rail_peer(world, distance), 0, 0, 0, offset, value});
      }
    }
    if constexpr (kR > 1) hand_on_entries(call);
    ptx::sync_warp();
  }
}

}  // namespace mkernel
