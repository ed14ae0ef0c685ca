// allgather_gemm's schedule for the host, to be compared with mkernel/plan/allgather_gemm.py.
#pragma once
#include "allgather_gemm.cuh"

namespace mirror {
inline mkernel::Parameters parameters(uint32_t rank, uint32_t rows) {
  mkernel::Parameters p{};
  p.world.rank = rank;
  p.world.size = mkernel::kWorldSize;
  p.world.num_nodes = Config::kNumNodes;
  p.world.ranks_per_node = Config::kRanksPerNode;
  p.world.node = rank / Config::kRanksPerNode;
  p.world.local_rank = rank % Config::kRanksPerNode;
  p.rows = rows;
  return p;
}
}  // namespace mirror

MKC_API uint32_t mirror_num_tiles(uint32_t rank, uint32_t rows) {
  const mkernel::Parameters p = mirror::parameters(rank, rows);
  return mkernel::Tiles{p}.num_tiles();
}

// Three words per tile: source rank, row of tiles in its shard, column of tiles.
MKC_API void mirror_tiles(uint32_t rank, uint32_t rows, uint32_t* out) {
  const mkernel::Parameters p = mirror::parameters(rank, rows);
  const mkernel::Tiles tiles{p};
  for (uint32_t tile = 0; tile < tiles.num_tiles(); ++tile) {
    const mkernel::TileCoordinate c = tiles.coordinate(tile);
    *out++ = c.plane, *out++ = c.m, *out++ = c.n;
  }
}

MKC_API uint32_t mirror_num_chunks(uint32_t rows) { return mkernel::num_chunks(mirror::parameters(0, rows)); }

// Bytes from the start of the workspace, and of the flags.
MKC_API uint64_t mirror_plane_offset(uint32_t rows, uint32_t source) { return mkernel::plane_offset(mirror::parameters(0, rows), source); }
MKC_API uint64_t mirror_flag_offset(uint32_t rows, uint32_t source, uint32_t chunk) {
  return mkernel::flag_offset(mirror::parameters(0, rows), source, chunk);
}
MKC_API uint32_t mirror_role(uint32_t cta) { return mkernel::role_of(cta); }
