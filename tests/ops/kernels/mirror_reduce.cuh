// The schedule of the reductions for the host, to be compared with mkernel/planner/reduce_plan.py; and where their tiles and flags are. Included after
// the kernel.
#pragma once
#include "mirror_world.cuh"
#include "reduce/owned_tiles.cuh"

namespace mirror {
struct Place {  // of a tile on its way: on which rank of the node, which flag tells of it
  uint64_t offset;
  uint32_t local_rank, flag;
};
inline uint64_t in_heap(const char* address) { return reinterpret_cast<uint64_t>(address) - kHeap; }

// Seven words per tile: owner, number among its tiles, row and column, whether it is a sum, whether it exists, which share or slice.
// With clusters of CTAs several tiles have a number: that of a CTA's is so many times the number, and the CTA's in its cluster. A CTA without a tile
// has no such tile.
constexpr uint32_t kCluster = mkernel::GemmShape<Config>::kCluster;
template <class Tiles>
mkernel::TileCoordinate tile_at(const Tiles& tiles, uint32_t tile) {
  if constexpr (kCluster > 1) return tiles.coordinate_of(tile / kCluster, tile % kCluster);
  return tiles.coordinate(tile);
}
template <class Tiles>
void write_tile(const Tiles& tiles, uint32_t tile, uint32_t* out) {
  const mkernel::TileCoordinate c = tile_at(tiles, tile);
  const bool exists = tiles.parts(c) != 0 && (kCluster == 1 || tiles.is_there(c));
  *out++ = c.plane, *out++ = c.index, *out++ = c.m, *out++ = c.n, *out++ = c.is_sum, *out++ = exists, *out++ = c.share;
}
}  // namespace mirror

MKC_API uint32_t mirror_num_tiles(uint32_t rank, const void* shape) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  return mkernel::Tiles(p).num_tiles() * mirror::kCluster;
}
MKC_API void mirror_tiles(uint32_t rank, const void* shape, uint32_t* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  for (uint32_t tile = 0; tile < tiles.num_tiles() * mirror::kCluster; ++tile) mirror::write_tile(tiles, tile, out + 7 * tile);
}
