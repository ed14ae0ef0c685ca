// Who is where, and an op's flags. Included after `struct Config`: kNumNodes, kRanksPerNode.
#pragma once
#include "comm/sync.cuh"

namespace mkernel {

constexpr uint32_t kR = Config::kRanksPerNode, kNodes = Config::kNumNodes, kWorldSize = kNodes * kR;
constexpr uint32_t kOtherNodes = kNodes > 1 ? kNodes - 1 : 1;  // no 0: a division by it would draw a warning

// ---- ranks and distances. The distance of a node is how many nodes on from this one it is, modulo the number of nodes; likewise the distance of
// a local rank. In a world of 3 nodes of 2 ranks (0 1 | 2 3 | 4 5), rank 3 (node 1, local rank 1) has rank 4 at node distance 1, local distance 1.
MK_DEVICE uint32_t rank_of(uint32_t node, uint32_t local_rank) { return node * kR + local_rank; }
MK_DEVICE uint32_t node_at(const abi::World& world, uint32_t distance) { return (world.node + distance) % kNodes; }
MK_DEVICE uint32_t local_peer(const abi::World& world, uint32_t distance) {  // its local rank
  return (world.local_rank + distance) % kR;
}
MK_DEVICE uint32_t rail_peer(const abi::World& world, uint32_t distance) { return rank_of(node_at(world, distance), world.local_rank); }
MK_DEVICE uint32_t rank_at(const abi::World& world, uint32_t node_distance, uint32_t local_distance) {
  return rank_of(node_at(world, node_distance), local_peer(world, local_distance));
}
MK_DEVICE uint32_t node_mate(const abi::World& world, uint32_t local_rank) { return rank_of(world.node, local_rank); }
// Who raises a flag of a rank's on this one: that rank, or for one of another node the rank of this node on its rail.
MK_DEVICE uint32_t raiser(const abi::World& world, uint32_t rank) {
  return rank / kR == world.node || rank % kR == world.local_rank ? rank : node_mate(world, rank % kR);
}
MK_DEVICE uint32_t node_distance(const abi::World& world, uint32_t rank) { return (rank / kR + kNodes - world.node) % kNodes; }
// The distance at which a peer sees this rank: the node at `distance` (not 0) from here, the local rank `local_rank` of this node.
MK_DEVICE uint32_t seen_by_node_at(uint32_t distance) { return kNodes - distance; }
MK_DEVICE uint32_t seen_by_local(const abi::World& world, uint32_t local_rank) { return (world.local_rank + kR - local_rank) % kR; }

// ---- an op's flags: words of the signal segment, from p.flag_offset on
template <class Parameters>
MK_DEVICE uint64_t flag_offset(const Parameters& p, uint32_t flag) {
  return p.flag_offset + uint64_t(flag) * sizeof(uint64_t);
}
template <class Parameters>
MK_DEVICE bool wait_flag(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t writer, uint32_t time_limits = 1) {
  const uint64_t* word = reinterpret_cast<const uint64_t*>(signals(p.world, p.world.local_rank) + flag_offset(p, flag));
  const Call& call = entered.call();
  return wait_ge(call, word, call.epoch(), Awaited{abi::kFlagChunk, flag, writer}, time_limits * p.world.timeout_ns);
}
template <class Parameters>
MK_DEVICE void raise_flag_of(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t local_rank) {  // one thread
  char* word = shared_signals(entered, local_rank) + flag_offset(p, flag);
  ptx::store_release_sys(reinterpret_cast<uint64_t*>(word), entered.call().epoch());
}
// A flag of this node's ranks, from the one at distance `first` on, by `lanes` threads of which this is the one numbered `lane`: so that no release
// waits for another.
template <class Parameters>
MK_DEVICE void raise_flag_by(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t first, uint32_t lane, uint32_t lanes) {
  for (uint32_t i = first + lane; i < kR; i += lanes) raise_flag_of(entered, p, flag, local_peer(p.world, i));
}
template <class Parameters>  // warp function
MK_DEVICE void raise_flag(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t first) {
  raise_flag_by(entered, p, flag, first, ptx::lane_index(), 32);
}

}  // namespace mkernel
