// Shards of few rows travel in packets (packet.cuh): nobody waits for stores to be complete, and then for a flag. The consumer warps of all CTAs, which
// have nothing to multiply before A is there, send this rank's shard to the node's other ranks, take theirs, and store all shards in this rank's
// gather buffer. A counter of the rank then says that it is full: each CTA with a part of the work adds one.
//
// They are sent before this rank has entered the call (rule 19 of docs/memory_model.md): they go to a range of the signal segment that holds nothing else,
// in two halves, by parity of the epoch. What lies in a half was taken two calls ago; and since this rank has ended the call before, in which it has seen
// all ranks enter, all have ended the one before that. So a shard is on its way while the ranks still tell each other that they have come.
//
// A unit is what a warp moves at once: 16 bytes of a lane. Unit u belongs to CTA u % CTAs, and there to warp u / CTAs % 8, so that few units are spread
// over all SMs. It has the same number on every rank, but not the same CTA where ranks have different numbers of them.
#pragma once
#include "comm/packet.cuh"
#include "comm/world.cuh"

namespace mkernel {

constexpr uint32_t kGatherWarps = 8, kGatherThreads = kGatherWarps * 32;  // of a CTA: its consumers, who come after the first warpgroup
constexpr uint32_t kGatherFirst = 128;
constexpr uint32_t kGatherBarrier = 1;  // a named barrier; 0 is sync_cta's
constexpr uint32_t kUnitBytesOfWarp = 32 * sizeof(ptx::Words);

// Two values, inverted, as packets have them. Two NaNs with all bits set would be 0, which no packet holds, and other NaNs are sent for them.
MK_DEVICE uint32_t shard_word(uint32_t values) { return values == 0xffffffffu ? 0x80008000u : ~values; }

struct ShardPackets {
  const char* shard;  // this rank's, contiguous
  uint32_t bytes;     // of a shard: a multiple of 16
  uint64_t packets;   // signal segment: (parities, kAheadBytes), of which (ranks of the node, bytes), by source
  uint64_t gather;    // data heap: (ranks of the node, bytes)

  MK_DEVICE uint32_t units() const { return (bytes + kUnitBytesOfWarp - 1) / kUnitBytesOfWarp; }
  MK_DEVICE uint32_t ctas() const { return units() < ptx::cta_count() ? units() : ptx::cta_count(); }  // that have any
  MK_DEVICE uint32_t first() const {                                                                   // this lane's first byte
    const uint32_t warp = (ptx::thread_index() - kGatherFirst) / 32;
    return (warp * ptx::cta_count() + ptx::cta_index()) * kUnitBytesOfWarp + ptx::lane_index() * uint32_t{sizeof(ptx::Words)};
  }
  MK_DEVICE uint32_t stride() const { return kGatherWarps * ptx::cta_count() * kUnitBytesOfWarp; }
  MK_DEVICE ptx::Words* packet(const Call& call, uint32_t rank, uint32_t source, uint32_t at) const {  // local ranks
    return reinterpret_cast<ptx::Words*>(signals_ahead(call, rank, packets) + uint64_t(source) * bytes + at);
  }
  MK_DEVICE char* gathered(const Entered& entered, uint32_t source, uint32_t at) const {
    return shared_heap(entered, entered.world().local_rank) + gather + uint64_t(source) * bytes + at;
  }

  // The first of this lane's part of the own shard: what its threads can do before they know which call it is.
  static constexpr uint32_t kRound = 4;  // units under way at once
  struct Round {
    ptx::Words words[kRound];
  };
  MK_DEVICE Round read(uint32_t begin) const {
    Round found;
#pragma unroll
    for (uint32_t i = 0; i < kRound; ++i) {
      if (begin + i * stride() < bytes) found.words[i] = ptx::load_input(shard + begin + i * stride());
    }
    return found;
  }
  // send(at, words) of all of this lane's part. `own`: the first of it.
  template <class Send>
  MK_DEVICE void for_own(const Round& own, const Send& send) const {
    send_round(first(), own, send);
#pragma unroll 1
    for (uint32_t at = first() + kRound * stride(); at < bytes; at += kRound * stride()) send_round(at, read(at), send);
  }
  template <class Send>
  MK_DEVICE void send_round(uint32_t begin, const Round& round, const Send& send) const {
#pragma unroll
    for (uint32_t i = 0; i < kRound; ++i) {
      const uint32_t at = begin + i * stride();
      if (at < bytes) send(at, round.words[i]);
    }
  }
  // To the others.
  MK_DEVICE void send(const Call& call, const Round& own) const {
    for_own(own, [&](uint32_t at, const ptx::Words& v) {
      ptx::Words sent;
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) sent.word[j] = shard_word(v.word[j]);
#pragma unroll
      for (uint32_t peer = 1; peer < kR; ++peer)
        ptx::store_packet(packet(call, local_peer(call.world, peer), call.world.local_rank, at), sent);
    });
  }

  // Packets that a thread looks at together: those of several units, and all sources.
  static constexpr uint32_t kPeers = kR > 1 ? kR - 1 : 1, kUnits = kPeers < 8 ? 8 / kPeers : 1, kLook = kUnits * kPeers;
  struct Looked {
    ptx::Words words[kLook];
    uint32_t missing;
  };
  MK_DEVICE uint32_t wanted(uint32_t at) const {  // which of the units from `at` on there are
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLook; ++i) bits |= uint32_t{at + i / kPeers * stride() < bytes} << i;
    return bits;
  }
  MK_DEVICE static uint32_t source(const abi::World& world, uint32_t i) { return local_peer(world, 1 + i % kPeers); }
  MK_DEVICE ptx::Words* from(const Call& call, uint32_t at, uint32_t i) const {
    return packet(call, call.world.local_rank, source(call.world, i), at + i / kPeers * stride());
  }
  // What comes of the first ones while this rank has not entered. They are not taken, and nothing is stored: in the gather buffer somebody may still read.
  MK_DEVICE void look_ahead(const Call& call, EntryGate& entries, Looked& looked) const {
    const auto at = [&](uint32_t i) { return from(call, first(), i); };
    looked.missing = look_at_packets_until(entries, looked.words, wanted(first()), at);
  }

  // The same part of all shards, into the gather buffer. `own`, `looked`: as above.
  MK_DEVICE void take(const Entered& entered, const Round& own, Looked& looked) const {
    const abi::World& world = entered.world();
#pragma unroll
    for (uint32_t i = 0; i < kRound; ++i) {
      const uint32_t at = first() + i * stride();
      if (at < bytes) ptx::store_global(gathered(entered, world.local_rank, at), own.words[i]);
    }
#pragma unroll 1
    for (uint32_t at = first() + kRound * stride(); at < bytes; at += stride()) {
      ptx::store_global(gathered(entered, world.local_rank, at), ptx::load_input(shard + at));
    }
    ptx::Words(&v)[kLook] = looked.words;
    uint32_t missing = looked.missing;
#pragma unroll 1
    for (uint32_t at = first(); at < bytes; at += kUnits * stride(), missing = wanted(at)) {
      const uint32_t these = wanted(at);
      const auto place = [&](uint32_t i) { return from(entered.call(), at, i); };
      if (!take_packets(entered, v, these, missing, place, [&](uint32_t i) { return node_mate(world, source(world, i)); })) return;
#pragma unroll
      for (uint32_t i = 0; i < kLook; ++i) {
        if ((these >> i & 1) == 0) continue;
#pragma unroll
        for (uint32_t j = 0; j < kPacketWords; ++j) v[i].word[j] = ~v[i].word[j];
        ptx::store_global(gathered(entered, source(world, i), at + i / kPeers * stride()), v[i]);
      }
    }
  }
};

// All consumer threads of a CTA, before they multiply. `own`: shards.read(shards.first()). A CTA that does not enter counts nothing: a call that is skipped
// is over for the CTA that leaves last, which zeroes the counter, while others still come here. Where packets do not come the world has failed, and what
// is counted does not matter.
MK_DEVICE void gather_shards(const Call& call, EntryGate& entries, const ShardPackets& shards, const ShardPackets::Round& own) {
  if (ptx::cta_index() >= shards.ctas() || is_skipped(call)) return;
  shards.send(call, own);
  ShardPackets::Looked looked;
  shards.look_ahead(call, entries, looked);
  const MaybeEntered entered = entries.pass(call);  // the same for all threads
  if (!entered) return;
  shards.take(*entered, own, looked);
  ptx::barrier_sync(kGatherBarrier, kGatherThreads);  // all have stored
  if (ptx::thread_index() == kGatherFirst) ptx::add_release(&control_block(call.world)->gathered, 1);
}

// Waits until the gather buffer is full. False: the call has failed. Who takes packets has the shorter deadline, and reports whose are missing.
struct GatheredShards {
  const ShardPackets& shards;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const {
    const abi::World& world = entered.world();
    const Awaited what{abi::kFlagChunk, 0, world.rank};
    return wait_ge(entered.call(), &control_block(world)->gathered, shards.ctas(), what, kSecondHand * world.timeout_ns);
  }
};
MK_DEVICE bool wait_gathered(const Entered& entered, const ShardPackets& shards) {  // warp function
  return wait_all(entered, GatheredShards{shards}, 1);
}

}  // namespace mkernel
