// Shards of very few rows travel in tagged packets: each word of the shard beside a tag, the low word of the call's epoch, and both are stored and loaded
// at once. A packet has come when its tags are the call's, so that any number of threads may read it, and nobody leaves zeros behind. The consumer warps
// of all CTAs send this rank's shard, as in comm/shard_packets.cuh; then those of each CTA bring the rows of its tile straight into shared memory, k step
// by k step (tile/taken.cuh). Half of what travels are tags, and each CTA reads all rows of its tile: for few rows that takes less time than a round
// trip through the gather buffer, with a counter, and a TMA load.
//
// They are sent as early (rule 19 of docs/memory_model.md), to a range of their own, in two halves. What lies in one was read at the latest in the call
// before the last one. An earlier tag is another word, except after 2^32 calls.
#pragma once
#include "comm/shard_packets.cuh"

namespace mkernel {

constexpr uint32_t kTaggedPackets = 2;  // of 16 bytes of a shard: 8 values

MK_DEVICE uint32_t tag_of(const Call& call) { return static_cast<uint32_t>(call.epoch()); }

// Eight values of a row: the packets that they come in, or (own) where they lie in the caller's array.
struct TaggedUnit {
  static constexpr uint32_t kPackets = kTaggedPackets;
  ptx::Words words[kPackets];

  // One kind of loads, without branches (tile/taken.cuh). Not wanted: the words stay as they are.
  MK_DEVICE void look(bool wanted, const char* from, bool is_own) {
#pragma unroll
    for (uint32_t i = 0; i < kTaggedPackets; ++i) {
      ptx::load_pairs_if(wanted && (i == 0 || !is_own), words[i], reinterpret_cast<const ptx::Words*>(from) + i);
    }
  }
  MK_DEVICE bool has_come(uint32_t tag) const {
    bool here = true;
#pragma unroll
    for (uint32_t i = 0; i < kTaggedPackets; ++i)
      here = here & (words[i].word[1] == tag) & (words[i].word[3] == tag);  // && would be branches
    return here;
  }
  MK_DEVICE uint32_t lacks(uint32_t tag) const {  // a pair that has not come
    return words[0].word[1] != tag ? 0 : words[0].word[3] != tag ? 1 : words[1].word[1] != tag ? 2 : 3;
  }
  MK_DEVICE ptx::Words values(bool is_own) const {
    return is_own ? words[0] : ptx::Words{{words[0].word[0], words[0].word[2], words[1].word[0], words[1].word[2]}};
  }
};

// A row of the shards: where it begins, in bytes of values from the first shard's first byte on, or (is_own) from the own shard's.
struct TaggedRow {
  uint32_t offset;
  bool is_own;
};

struct TaggedShards {
  ShardPackets shards;

  MK_DEVICE TaggedRow row(const abi::World& world,
                          uint32_t at) const {  // which begins `at` bytes of values after the first shard's first one
    const uint32_t own = world.local_rank * shards.bytes;
    return at - own < shards.bytes ? TaggedRow{at - own, true} : TaggedRow{at, false};
  }
  MK_DEVICE const char* from(const Call& call, const TaggedRow& row, uint32_t inside) const {  // the unit so many bytes of values on
    const uint32_t at = row.offset + inside;
    return row.is_own ? shards.shard + at : packet(call, call.world.local_rank, 0, at);
  }

  // Where a shard's packets of the bytes from `at` on lie with a rank. Local ranks.
  MK_DEVICE char* packet(const Call& call, uint32_t rank, uint32_t source, uint64_t at) const {
    return tagged_ahead(call, rank, shards.packets) + (uint64_t(source) * shards.bytes + at) * kTaggedPackets;
  }
  // Sends this rank's shard: all consumer threads of a CTA, before they multiply. `own`: shards.read(shards.first()).
  MK_DEVICE void begin(const Call& call, const ShardPackets::Round& own) const {
    if (is_skipped(call)) return;
    const uint32_t tag = tag_of(call);
    shards.for_own(own, [&](uint32_t at, const ptx::Words& v) {
#pragma unroll
      for (uint32_t peer = 1; peer < kR; ++peer) {
        ptx::Words* to = reinterpret_cast<ptx::Words*>(packet(call, local_peer(call.world, peer), call.world.local_rank, at));
        ptx::store_pairs(to, ptx::Words{{v.word[0], tag, v.word[1], tag}});
        ptx::store_pairs(to + 1, ptx::Words{{v.word[2], tag, v.word[3], tag}});
      }
    });
  }

  template <uint32_t Most>
  MK_DEVICE static uint32_t missing_of(const TaggedUnit (&units)[Most], uint32_t wanted, uint32_t tag) {
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t i = 0; i < Most; ++i) missing |= (wanted >> i & uint32_t{!units[i].has_come(tag)}) << i;
    return missing;
  }
  // Looks at units, for each bit of `wanted` the one at at(i), until all have come (true), or this rank has entered.
  template <uint32_t Most, class At>
  MK_DEVICE bool look_ahead(const Call& call, EntryGate& entries, TaggedUnit (&units)[Most], uint32_t wanted, const At& at) const {
#pragma unroll 1
    while (true) {
      const uint32_t missing = missing_of(units, wanted, tag_of(call));
      if (missing == 0 || entries.is_open()) return missing == 0;
#pragma unroll
      for (uint32_t i = 0; i < Most; ++i) units[i].look((missing >> i & 1) != 0, at(i), false);
    }
  }
  // The same, until all have come; those that have are not looked at again. One thread. False: the call has failed.
  template <uint32_t Most, class At>
  MK_DEVICE bool take(const Entered& entered, TaggedUnit (&units)[Most], uint32_t wanted, const At& at) const {
    const Call& call = entered.call();
    const abi::World& world = call.world;
    const uint32_t tag = tag_of(call);
    Deadline deadline(call, world.timeout_ns);
    while (true) {
      const uint32_t missing = missing_of(units, wanted, tag);
      if (missing == 0) return true;
      const char* from = nullptr;  // where a pair of the last one that is missing has not come
#pragma unroll
      for (uint32_t i = 0; i < Most; ++i) {
        if ((missing >> i & 1) != 0) from = at(i) + units[i].lacks(tag) * sizeof(uint64_t);
      }
      // What is waited for is a tag, in the high word of a pair: any word with this one is more than an earlier one.
      const abi::State state = deadline.pass(reinterpret_cast<const uint64_t*>(from), uint64_t(tag) << 32);
      if (state != abi::kRunning) {
        const uint32_t source = (from - packet(call, world.local_rank, 0, 0)) / (uint64_t(shards.bytes) * kTaggedPackets);
        fail(call, state, Awaited{abi::kFlagChunk, 0, node_mate(world, source)}, call.epoch(), 0);
        return false;
      }
#pragma unroll
      for (uint32_t i = 0; i < Most; ++i) units[i].look((missing >> i & 1) != 0, at(i), false);
    }
  }
};

}  // namespace mkernel
