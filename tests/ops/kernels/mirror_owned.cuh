// Of reductions whose tiles have owners. Included after the kernel.
#pragma once
#include "mirror_reduce.cuh"

// The number of the i-th sum of an inter_reduce CTA, of a pair that of its tile; all ones: there are no more.
MKC_API uint32_t mirror_assigned(uint32_t rank, const void* shape, uint32_t cta, uint32_t i) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const uint32_t number = mkernel::Tiles(p, cta).assigned(i);
  return number == mkernel::kStop ? number : number * mirror::kCluster + cta % mirror::kCluster;
}
MKC_API void mirror_tile(uint32_t rank, const void* shape, uint32_t tile, uint32_t* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  mirror::write_tile(mkernel::Tiles(p), tile, out);
}

// Where a partial tile or sum goes.
MKC_API void mirror_sent(uint32_t rank, const void* shape, uint32_t tile, mirror::Place* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  const mkernel::TileCoordinate c = mirror::tile_at(tiles, tile);
  const uint32_t distance = mkernel::node_distance(p.world, c.plane);
  if (c.is_sum) {
    *out = mirror::Place{mkernel::sum_offset(p, distance, c.index), p.world.local_rank, mkernel::sum_flag(p, distance, c.index)};
  } else {
    *out = mirror::Place{mkernel::partial_offset(p, tiles.sent_index(c)), tiles.adder(c), tiles.sent_index(c)};
  }
}

// What a part of a tile adds, in order; the rank is who raises the flag. Returns how many.
MKC_API uint32_t mirror_addends(uint32_t rank, const void* shape, uint32_t tile, uint32_t part, mirror::Place* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  const mkernel::TileCoordinate c = mirror::tile_at(tiles, tile);
  const mkernel::Tiles::AddendFlags flags{tiles, c};
  const uint32_t count = tiles.addends(c, part);
  for (uint32_t i = 0; i < count; ++i) *out++ = mirror::Place{mirror::in_heap(tiles.addend(c, i)), flags.writer(i), flags.flag(i)};
  return count;
}

// A put of sums: its source (and the flag of its first tile), its destination and the flag there. Returns how many tiles.
template <class Sent>
uint32_t put(const Sent& sent, uint32_t rank, uint32_t distance, uint32_t first, mirror::Place* out) {
  out[0] = mirror::Place{sent.src(distance, first), rank % Config::kRanksPerNode, sent.flag(distance, first)};
  out[1] = mirror::Place{sent.dst(distance, first), rank % Config::kRanksPerNode, sent.peer_flag(distance, first)};
  return sent.count(distance, first);
}
MKC_API uint32_t mirror_put_sums(uint32_t rank, const void* shape, uint32_t distance, uint32_t first, mirror::Place* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  return put(mkernel::SumsToSend<mkernel::Tiles>{tiles}, rank, distance, first, out);
}
