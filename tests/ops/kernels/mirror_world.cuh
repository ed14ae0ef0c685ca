// Where a rank stands, as the host would tell its kernel. Included after the kernel.
#pragma once
#include <cstring>

#include "fields.cuh"
#include "comm/world.cuh"

namespace mirror {
constexpr uint64_t kHeap = uint64_t(1) << 40;  // where heaps seem to be: only differences are looked at
inline abi::World world_of(uint32_t rank) {
  abi::World world{};
  world.rank = rank;
  world.size = mkernel::kWorldSize;
  world.num_nodes = mkernel::kNodes;
  world.ranks_per_node = mkernel::kR;
  world.node = rank / mkernel::kR;
  world.local_rank = rank % mkernel::kR;
  return world;
}
// What the host would pass (the Parameters of mkernel/ops), wherever it lies; with the world of a rank.
inline mkernel::Parameters parameters(uint32_t rank, const void* host) {
  mkernel::Parameters p;
  std::memcpy(&p, host, sizeof(p));
  p.world = world_of(rank);
  p.world.heap_base = kHeap;
  return p;
}
}  // namespace mirror

MKC_API uint32_t mirror_role(const void* shape, uint32_t cta) { return mkernel::role_of(mirror::parameters(0, shape), cta); }
