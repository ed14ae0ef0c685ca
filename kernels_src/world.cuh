// Who is where, and an op's flags. Included after `struct Config`: kNumNodes, kRanksPerNode, kIntraComm, kInterSend, kInterReduce.
#pragma once
#include "sync.cuh"

namespace mkernel {

constexpr uint32_t kR = Config::kRanksPerNode, kNodes = Config::kNumNodes, kWorldSize = kNodes * kR;
constexpr uint32_t kOtherNodes = kNodes > 1 ? kNodes - 1 : 1;  // no 0: a division by it would draw a warning
constexpr uint32_t kCommCtas = Config::kIntraComm + Config::kInterSend + Config::kInterReduce;  // CTAs that do not compute at first

// ---- ranks by their distance from this one: of the node, of the local rank
MK_DEVICE uint32_t local_peer(const abi::World& world, uint32_t distance) {  // its local rank
  return (world.local_rank + distance) % kR;
}
MK_DEVICE uint32_t rail_peer(const abi::World& world, uint32_t distance) {
  return (world.node + distance) % kNodes * kR + world.local_rank;
}
MK_DEVICE uint32_t rank_at(const abi::World& world, uint32_t node_distance, uint32_t local_distance) {
  return (world.node + node_distance) % kNodes * kR + local_peer(world, local_distance);
}
MK_DEVICE uint32_t node_distance(const abi::World& world, uint32_t rank) { return (rank / kR + kNodes - world.node) % kNodes; }

// ---- an op's flags: words of the signal segment, from p.flag_offset on
template <class Parameters>
MK_DEVICE uint64_t flag_offset(const Parameters& p, uint32_t flag) {
  return p.flag_offset + uint64_t(flag) * sizeof(uint64_t);
}
template <class Parameters>
MK_DEVICE bool wait_flag(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t writer) {
  const uint64_t* word = reinterpret_cast<const uint64_t*>(signals(p.world, p.world.local_rank) + flag_offset(p, flag));
  const Call& call = entered.call();
  return wait_ge(call, word, call.epoch, Awaited{abi::kFlagChunk, flag, writer}, p.world.timeout_ns);
}
template <class Parameters>
MK_DEVICE void raise_flag_of(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t local_rank) {  // one thread
  char* word = shared_signals(entered, local_rank) + flag_offset(p, flag);
  ptx::store_release_sys(reinterpret_cast<uint64_t*>(word), entered.call().epoch);
}
// A flag of this node's ranks, from the one at distance `first` on. Warp function: a lane per rank, so that no release waits for another.
template <class Parameters>
MK_DEVICE void raise_flag(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t first) {
  for (uint32_t i = first + ptx::lane_index(); i < kR; i += 32) raise_flag_of(entered, p, flag, local_peer(p.world, i));
}

// ---- roles: intra_comm first, then inter_send, then inter_reduce; the rest compute
constexpr uint32_t kFirstInterSend = Config::kIntraComm, kFirstInterReduce = kFirstInterSend + Config::kInterSend;  // of the CTAs
MK_DEVICE abi::Role role_of(uint32_t cta) {  // sums on the left: a comparison of unsigned with a constant 0 draws a warning
  if (cta + 1 <= kFirstInterSend) return abi::kIntraComm;
  if (cta + 1 <= kFirstInterReduce) return abi::kInterSend;
  return cta + 1 <= kCommCtas ? abi::kInterReduce : abi::kCompute;
}

}  // namespace mkernel
