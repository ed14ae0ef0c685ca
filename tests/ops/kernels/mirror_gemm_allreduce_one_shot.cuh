#pragma once
#include "gemm_allreduce_one_shot.cuh"
#include "mirror_reduce.cuh"

// What a sum adds, in order; the rank is whose tile it is. Returns how many.
MKC_API uint32_t mirror_addends(uint32_t rank, const void* shape, uint32_t tile, uint32_t part, mirror::Place* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  const mkernel::TileCoordinate c = tiles.coordinate(tile);
  const mkernel::Tiles::SlotFlags flags{p, c.index};
  const uint32_t count = tiles.addends(c, part);
  for (uint32_t i = 0; i < count; ++i) *out++ = mirror::Place{mirror::in_heap(tiles.addend(c, i)), i, flags.flag(i)};
  return count;
}
