// Packets: 16 bytes, four words, each of which is its own flag, so that nobody waits for stores to be complete and then for a flag. A word is not 0 when
// it has come. The receiver leaves zeros behind for the next call; every word that is sent is taken in the same call.
#pragma once
#include "comm/sync.cuh"

namespace mkernel {

constexpr uint32_t kPacketWords = 4;

// Looks at packets, all that are missing, so that they come from L2 together: for each bit i of `missing` the one at at(i). Returns what still is.
template <uint32_t Most, class At>
MK_DEVICE uint32_t look_at_packets(ptx::Words (&v)[Most], uint32_t missing, const At& at) {
#pragma unroll
  for (uint32_t i = 0; i < Most; ++i) ptx::load_packet_if((missing >> i & 1) != 0, v[i], at(i));
#pragma unroll
  for (uint32_t i = 0; i < Most; ++i) {
    const uint32_t* word = v[i].word;
    const bool here = (word[0] != 0) & (word[1] != 0) & (word[2] != 0) & (word[3] != 0);  // && would be branches
    missing &= ~(uint32_t{here} << i);
  }
  return missing;
}

// The same of packets that may come before this rank has entered, until it has, or all have come.
template <uint32_t Most, class At>
MK_DEVICE uint32_t look_at_packets_until(EntryGate& entries, ptx::Words (&v)[Most], uint32_t missing, const At& at) {
#pragma unroll
  for (uint32_t i = 0; i < Most; ++i) v[i] = ptx::any_words();  // of those that are not taken
#pragma unroll 1
  while (missing != 0 && !entries.is_open()) missing = look_at_packets(v, missing, at);
  return missing;
}

// Takes packets, once all their words have come: for each bit i of `wanted` the one at at(i), of which those of `missing` have not been looked at, or
// had not come. Leaves zeros there. peer(i): who sends it, for the report. One thread. False: the call has failed.
template <uint32_t Most, class At, class Peer>
MK_DEVICE bool take_packets(const Entered& entered, ptx::Words (&v)[Most], uint32_t wanted, uint32_t missing, const At& at,
                            const Peer& peer) {
  static_assert(Most <= 32, "a bit for each");
  const Call& call = entered.call();
  Deadline deadline(call, call.world.timeout_ns);
#pragma unroll 1
  while (missing != 0) {
    missing = look_at_packets(v, missing, at);
    if (missing == 0) break;
    uint32_t last = 0;  // of those that are still missing
#pragma unroll
    for (uint32_t i = 0; i < Most; ++i) {
      if ((missing >> i & 1) != 0) last = i;
    }
    // Of the packet's halves that one which lacks a word: it is less now, as a number, than with that word.
    const uint32_t half = v[last].word[0] != 0 && v[last].word[1] != 0;
    const uint64_t now = v[last].word[half * 2] | uint64_t(v[last].word[half * 2 + 1]) << 32;
    const abi::State state = deadline.pass(reinterpret_cast<const uint64_t*>(at(last)) + half, now + 1);
    if (state == abi::kRunning) continue;
    fail(call, state, Awaited{abi::kFlagChunk, 0, peer(last)}, call.epoch(), 0);
    return false;
  }
#pragma unroll
  for (uint32_t i = 0; i < Most; ++i) ptx::store_packet_if((wanted >> i & 1) != 0, at(i), ptx::Words{});
  return true;
}

// All of them, none of which has been looked at.
template <uint32_t Most, class At, class Peer>
MK_DEVICE bool take_packets(const Entered& entered, ptx::Words (&v)[Most], uint32_t wanted, const At& at, const Peer& peer) {
#pragma unroll
  for (uint32_t i = 0; i < Most; ++i) v[i] = ptx::any_words();  // of those that are not taken
  return take_packets(entered, v, wanted, wanted, at, peer);
}

}  // namespace mkernel
