// inter_send of the reductions: chunks of tiles to the rail peers.
#pragma once
#include "comm/ring.cuh"
#include "concepts.cuh"
#include "reduce/layout.cuh"

namespace mkernel {

// Tiles that are put to the rail peers, in chunks. `distance` is that of the peer's node, `first` the first tile of a chunk, `index` any tile.
template <class Tiles>
concept PutTiles = requires(const Tiles tiles, uint32_t distance, uint32_t first, uint32_t index) {
  { tiles.count(distance, first) } -> Same<uint32_t>;      // how many of the chunk's tiles exist
  { tiles.flag(distance, index) } -> Same<uint32_t>;       // of this rank, raised when the tile is complete
  { tiles.src(distance, index) } -> Same<uint64_t>;        // where it is in this rank's heap
  { tiles.dst(distance, index) } -> Same<uint64_t>;        // where it goes in the peer's heap
  { tiles.bytes() } -> Same<uint64_t>;                     // of a tile
  { tiles.peer_flag(distance, first) } -> Same<uint32_t>;  // of the peer, raised when the chunk has arrived
};

template <PutTiles Tiles>
struct TilesToSend {
  const Parameters& p;
  const Tiles& tiles;
  uint32_t distance, first, count;
  MK_DEVICE uint32_t end() const { return num_chunks(p) * (kNodes - 1); }
  MK_DEVICE bool prepare(const Entered& entered, uint32_t item) {
    first = item / kOtherNodes << p.chunk_shift, distance = 1 + item % kOtherNodes;
    count = tiles.count(distance, first);
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      if (!wait_flag(entered, p, tiles.flag(distance, first + i), p.world.rank)) return false;
    }
    return true;
  }
  MK_DEVICE uint32_t puts() const { return count != 0 ? 1 : 0; }
  MK_DEVICE Put put(const Call& call, uint32_t channel, uint32_t) const {
    const uint64_t src = tiles.src(distance, first), dst = tiles.dst(distance, first);
    const uint32_t peer = rail_peer(p.world, distance), flag = tiles.peer_flag(distance, first);
    return Put{channel, peer, src, dst, count * tiles.bytes(), flag_offset(p, flag), call.epoch()};
  }
};
template <PutTiles Tiles>
MK_DEVICE void send_tiles(const Call& call, const Parameters& p, const Tiles& tiles, uint32_t channel, uint32_t index, uint32_t lane) {
  const MaybeEntered entered = enter(call);  // warp function
  if (!entered || ptx::lane_index() != 0) return;
  Trace trace(p.world, lane);
  TilesToSend<Tiles> chunks{p, tiles, 0, 0, 0};
  put_chunks(*entered, chunks, channel, index, num_inter_send(p), trace);
}

// How many tiles of the chunk from `first` on of an owner there are.
template <class Op>
MK_DEVICE uint32_t chunk_count(const Op& op, uint32_t owner, uint32_t first) {
  const uint32_t tiles = op.count_of(owner), left = tiles > first ? tiles - first : 0;
  return left < chunk_tiles(op.p) ? left : chunk_tiles(op.p);
}

template <class Op>
struct SumsToSend {
  const Op& op;
  MK_DEVICE uint32_t count(uint32_t distance, uint32_t first) const { return chunk_count(op, rail_peer(op.p.world, distance), first); }
  MK_DEVICE uint32_t flag(uint32_t distance, uint32_t index) const { return sum_flag(op.p, distance, index); }
  MK_DEVICE uint64_t src(uint32_t distance, uint32_t index) const { return sum_offset(op.p, distance, index); }
  MK_DEVICE uint64_t dst(uint32_t distance, uint32_t index) const { return arrived_offset(op.p, seen_by_node_at(distance), index); }
  MK_DEVICE uint64_t bytes() const { return kPartialBytes; }
  MK_DEVICE uint32_t peer_flag(uint32_t distance, uint32_t first) const {
    return arrived_flag(op.p, seen_by_node_at(distance), first >> op.p.chunk_shift);
  }
};

}  // namespace mkernel
