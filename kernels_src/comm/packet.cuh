// Packets: 16 bytes, four words, each of which is its own flag, so that nobody waits for stores to be complete and then for a flag. A word is not 0 when
// it has come. The receiver leaves zeros behind for the next call; every word that is sent is taken in the same call.
#pragma once
#include "comm/sync.cuh"

namespace mkernel {

constexpr uint32_t kPacketWords = 4;

// Takes `Count` packets, of which the i-th lies at at(i), once all their words have come; leaves zeros there. peer(i): who sends it, for the report.
// One thread. False: the call has failed.
template <uint32_t Count, class At, class Peer>
MK_DEVICE bool take_packets(const Entered& entered, ptx::Words (&v)[Count], const At& at, const Peer& peer) {
  const Call& call = entered.call();
  Deadline deadline(call, call.world.timeout_ns);
  while (true) {
    uint32_t missing = Count;
#pragma unroll
    for (uint32_t i = 0; i < Count; ++i) {
      v[i] = ptx::load_packet(at(i));
      const uint32_t* word = v[i].word;
      const bool here = (word[0] != 0) & (word[1] != 0) & (word[2] != 0) & (word[3] != 0);  // && would be branches
      if (!here) missing = i;
    }
    if (missing == Count) break;
    // Of the packet's halves that one which lacks a word: it is less now, as a number, than with that word.
    const uint32_t half = v[missing].word[0] != 0 && v[missing].word[1] != 0;
    const uint64_t now = v[missing].word[half * 2] | uint64_t(v[missing].word[half * 2 + 1]) << 32;
    const abi::State state = deadline.pass(reinterpret_cast<const uint64_t*>(at(missing)) + half, now + 1);
    if (state == abi::kRunning) continue;
    fail(call, state, Awaited{abi::kFlagChunk, 0, peer(missing)}, call.epoch, 0);
    return false;
  }
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) ptx::store_packet(at(i), ptx::Words{});
  return true;
}

}  // namespace mkernel
