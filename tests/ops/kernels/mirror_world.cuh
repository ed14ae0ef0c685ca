// Where a rank stands, as the host would tell its kernel. Included after the kernel.
#pragma once
#include "world.cuh"

namespace mirror {
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
}  // namespace mirror

MKC_API uint32_t mirror_role(uint32_t cta) { return mkernel::role_of(cta); }
