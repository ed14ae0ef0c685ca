// gemm_allreduce, two-shot: C (M, N) = the sum over all ranks of A (M, K/W) * B (K/W, N), the same bits on every rank. Included by the
// generated source after `struct Config`. Tiles have owners, as in a reduce-scatter (reduce/owned_tiles.cuh); an owner leaves the finished
// tile in its heap, from where the node's other ranks pull it into their C. Across nodes it is put to each rail peer once, and that rank's
// node pulls it there.
#pragma once
#include "comm/intra_comm.cuh"
#include "reduce/owned_tiles.cuh"
#include "reduce/send.cuh"

namespace mkernel {

using Storage = CopyingStorage<GemmStorage<Config>>;
static_assert(kPieceBytes == kConsumerWarpgroups * kBlockBytes, "a piece of a finished tile is one panel");

// Owners have runs of equal length of all tiles, or pairs of them, in raster order; the last ones may have fewer.
struct Tiles : OwnedTiles<Tiles> {
  using OwnedTiles<Tiles>::OwnedTiles;
  static constexpr bool kOwnRows = false;
  MK_DEVICE RasterPosition position(uint32_t owner, uint32_t index) const {
    return raster(first_tile(owner) + index, tile_rows(), tiles_n(), p.group_m);
  }
  MK_DEVICE uint32_t first_taken(uint32_t owner) const { return owner * p.taken; }
  MK_DEVICE uint32_t first_tile(uint32_t owner) const {
    if constexpr (!Shape::kPaired) return owner * p.tiles;
    const uint32_t all = taken_rows() * taken_columns(), first = first_taken(owner);
    return upper_tile(first < all ? first : all);
  }
  MK_DEVICE uint32_t count_of(uint32_t owner) const {
    if constexpr (Shape::kPaired) return first_tile(owner + 1) - first_tile(owner);
    const uint32_t all = tile_rows() * tiles_n(), begin = owner * p.tiles, left = all > begin ? all - begin : 0;
    return left < p.tiles ? left : p.tiles;
  }
  MK_DEVICE void store(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    if (!is_own(c)) return store_partial(entered, c, panel, warpgroup, smem);
    store_result(entered, c, panel, warpgroup, smem);
    if constexpr (kWorldSize > 1) {
      if (!is_there(c)) return;
      char* tile = shared_heap(entered, p.world.local_rank) + result_offset(p, 0, c.index);
      ptx::bulk_store(tile + (panel * kConsumerWarpgroups + warpgroup) * kBlockBytes, smem, kBlockBytes);
    }
  }
  MK_DEVICE bool announces(const TileCoordinate& c) const { return kWorldSize > 1 && is_there(c); }
  MK_DEVICE void raise(const Entered& entered, uint32_t tile) const {  // warp function
    const TileCoordinate c = coordinate(tile);
    if (!is_own(c)) return raise_partial(entered, c);
    raise_flag(entered, p, finished_flag(p, 0, p.world.local_rank, c.index), kNodes > 1 ? 0 : 1);  // the own one is for inter_send
  }
};

// ---- intra_comm: pulls the tiles that others own into C. Those of the node's ranks one by one; those of other nodes' by chunks, from the node's
// rank on the owner's rail, which tells the node's others when a chunk has come. Warp 2 waits for flags, warp 1 raises them, thread 0 copies.
struct PullableTiles {  // what a CTA pulls
  const Tiles& tiles;
  uint32_t begin;

  struct Unit {  // consecutive tiles of one owner
    uint32_t distance, local_rank, first;
  };
  MK_DEVICE bool wait(const Entered& entered, const Unit& u) const {
    return wait_flag(entered, p(), flag(u), is_forwarded(u) ? owner(u) : node_mate(p().world, u.local_rank));
  }
  MK_DEVICE const Parameters& p() const { return tiles.p; }
  MK_DEVICE uint32_t num_local() const { return p().tiles * (kR - 1); }
  MK_DEVICE Unit unit(uint32_t item) const {
    const abi::World& world = p().world;
    if constexpr (kR > 1) {
      if (item < num_local()) return Unit{0, local_peer(world, 1 + item % (kR - 1)), item / (kR - 1)};
    }
    item -= num_local();
    const uint32_t chunk = item / (kOtherNodes * kR), owner = item % (kOtherNodes * kR);
    return Unit{1 + owner / kR, local_peer(world, owner % kR), chunk << p().chunk_shift};
  }
  MK_DEVICE uint32_t owner(const Unit& u) const { return rank_of(node_at(p().world, u.distance), u.local_rank); }
  MK_DEVICE uint32_t flag(const Unit& u) const { return finished_flag(p(), u.distance, u.local_rank, u.first); }
  MK_DEVICE bool is_forwarded(const Unit& u) const { return u.distance != 0 && u.local_rank == p().world.local_rank; }

  MK_DEVICE uint32_t first() const { return existing(begin); }
  MK_DEVICE uint32_t next(uint32_t item) const { return existing(item + num_intra_comm(p())); }
  MK_DEVICE uint32_t existing(uint32_t item) const {  // from `item` on, of this CTA's
#pragma unroll 1
    for (; item < end(); item += num_intra_comm(p())) {
      const Unit u = unit(item);
      if (tiles.exists(owner(u), u.first)) break;
    }
    return item;
  }
  MK_DEVICE uint32_t end() const { return num_local() + num_chunks(p()) * (kNodes - 1) * kR; }
};

struct PulledTiles : PullableTiles {
  Entered entered;
  Receiver& arrived;
  Trace& trace;
  uint64_t since;

  struct Item {
    uint32_t bytes, owner, tile;  // the first tile, of all
    const char* from;
    uint32_t index;
  };
  uint32_t stored_tile = kStop;
  TileCoordinate stored_at{};
  MK_DEVICE Item item(uint32_t index) const {
    const Unit u = unit(index);
    const uint32_t rank = owner(u), tiles_of_it = u.distance == 0 ? 1 : chunk_count(tiles, rank, u.first);
    const char* from = heap(p().world, u.local_rank) + result_offset(p(), u.distance, u.first);
    return Item{static_cast<uint32_t>(tiles_of_it * kResultBytes), rank, rank * p().tiles + u.first, from, index};
  }
  MK_DEVICE bool ready(const Item&) { return arrived.try_take(); }
  MK_DEVICE bool wait(const Item&) {
    const bool ok = arrived.wait();
    since = trace.now();
    return ok;
  }
  MK_DEVICE uint32_t piece_bytes() const { return kPieceBytes; }
  MK_DEVICE uint32_t loaded(const Item&, uint32_t bytes) const { return bytes; }
  MK_DEVICE void load(const Item& item, uint32_t offset, void* smem, uint32_t bytes, uint64_t* bar) const {
    ptx::bulk_load(smem, item.from + offset, bytes, bar);
  }
  MK_DEVICE void store(const Item& item, uint32_t offset, const char* smem, uint32_t) {
    const uint32_t tile = item.tile + static_cast<uint32_t>(offset / kResultBytes);
    if (stored_tile != tile) {
      stored_tile = tile;
      stored_at = tiles.at(item.owner, tile - item.owner * p().tiles, false);
    }
    const uint32_t panel = static_cast<uint32_t>(offset % kResultBytes) / kPieceBytes;
#pragma unroll
    for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) tiles.store_result(entered, stored_at, panel, w, smem + w * kBlockBytes);
  }
  MK_DEVICE void announce(const Item& item) {
    trace.record(abi::kTraceForward, item.index, since);
    since = trace.now();
  }
};

// Posts every item of this CTA that has come, and the flags that warp 1 is to raise for what is forwarded. One thread.
MK_DEVICE void wait_for_tiles(const Entered& entered, const PullableTiles& pulled, Storage& storage, Mailbox::Position& arrival,
                              Mailbox::Position& forwarding) {
#pragma unroll 1
  for (uint32_t item = pulled.first(); item < pulled.end(); item = pulled.next(item)) {
    const PullableTiles::Unit u = pulled.unit(item);
    if (!pulled.wait(entered, u)) return;
    ptx::fence_proxy_async();  // here, not in the thread that copies: it would wait for its copies
    if (kR > 1 && pulled.is_forwarded(u)) storage.announce.post(entered, forwarding, pulled.flag(u));
    storage.arrived.post(entered, arrival, item);
  }
}

MK_DEVICE void intra_comm_role(const Call& call, const Parameters& p, Storage& storage, uint32_t index) {
  const Tiles tiles(p);
  const PullableTiles pullable{tiles, index};
  const auto copy = [&](const auto& enter, Receiver& arrived, Mailbox::Position&) {
    const MaybeEntered entered = enter();
    if (!entered) return;
    Trace trace(p.world, 2);
    CopyRing ring(storage.pieces, storage.copy_barriers);
    PulledTiles pulled{pullable, *entered, arrived, trace, trace.now()};
    ring.copy(pulled);
  };
  const auto wait = [&](const Entered& entered, Mailbox::Position& arrival, Mailbox::Position& forwarding) {
    wait_for_tiles(entered, pullable, storage, arrival, forwarding);
  };
  intra_comm<Announcer::kWait>(call, p, storage, copy, wait, [](uint32_t) { return 1u; });
}

// ---- inter_send: sums of this node to their owners (warp 0) beside finished tiles to the rail peers (warp 1)
struct ResultsToSend {
  const Tiles& tiles;
  MK_DEVICE uint32_t count(uint32_t, uint32_t first) const { return chunk_count(tiles, tiles.p.world.rank, first); }
  MK_DEVICE uint32_t flag(uint32_t, uint32_t index) const { return finished_flag(tiles.p, 0, tiles.p.world.local_rank, index); }
  MK_DEVICE uint64_t src(uint32_t, uint32_t index) const { return result_offset(tiles.p, 0, index); }
  MK_DEVICE uint64_t dst(uint32_t distance, uint32_t index) const { return result_offset(tiles.p, seen_by_node_at(distance), index); }
  MK_DEVICE uint64_t bytes() const { return kResultBytes; }
  MK_DEVICE uint32_t peer_flag(uint32_t distance, uint32_t first) const {
    return finished_flag(tiles.p, seen_by_node_at(distance), tiles.p.world.local_rank, first);
  }
};

struct EitherToSend {  // in one loop: two are as much code again
  bool is_sums;
  SumsToSend<Tiles> sums;
  ResultsToSend results;
  MK_DEVICE uint32_t count(uint32_t distance, uint32_t first) const {
    return is_sums ? sums.count(distance, first) : results.count(distance, first);
  }
  MK_DEVICE uint32_t flag(uint32_t distance, uint32_t index) const {
    return is_sums ? sums.flag(distance, index) : results.flag(distance, index);
  }
  MK_DEVICE uint64_t src(uint32_t distance, uint32_t index) const {
    return is_sums ? sums.src(distance, index) : results.src(distance, index);
  }
  MK_DEVICE uint64_t dst(uint32_t distance, uint32_t index) const {
    return is_sums ? sums.dst(distance, index) : results.dst(distance, index);
  }
  MK_DEVICE uint64_t bytes() const { return is_sums ? sums.bytes() : results.bytes(); }
  MK_DEVICE uint32_t peer_flag(uint32_t distance, uint32_t first) const {
    return is_sums ? sums.peer_flag(distance, first) : results.peer_flag(distance, first);
  }
};

MK_DEVICE void inter_send_role(const Call& call, const Parameters& p, uint32_t index) {  // both warps
  if constexpr (kNodes > 1) {
    const bool is_sums = ptx::warp_index() == 0;
    const Tiles tiles(p);
    const EitherToSend sent{is_sums, SumsToSend<Tiles>{tiles}, ResultsToSend{tiles}};
    send_tiles(call, p, sent, (is_sums ? 1 : 1 + num_inter_send(p)) + index, index, is_sums ? 2 : 1);
  }
}

// ---- the role switch. inter_reduce is compute that makes its sums first.
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = shared_storage<Storage>();
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = kEarly ? coming_call(p.world, role) : begin_call_ahead(p.world, role);
  if constexpr (Config::kIntraComm > 0) {
    if (role == abi::kIntraComm) intra_comm_role(call, p, storage, cta);
  }
  if (role == abi::kInterSend && ptx::warp_index() < 2) inter_send_role(call, p, cta - first_inter_send(p));
  compute_role(call, Tiles(p, role == abi::kInterReduce ? cta - first_inter_reduce(p) : kStop), storage.gemm);
}

}  // namespace mkernel
