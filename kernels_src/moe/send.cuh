// inter_send of a dispatch: packs the rows that a node lists and puts them to this rank's rail peer there; tells this node's ranks what came here.
#pragma once
#include "comm/copy.cuh"
#include "comm/ring.cuh"
#include "moe/routing.cuh"
#include "moe/rows.cuh"

namespace mkernel {

MK_DEVICE uint64_t area_of(const RoutingArguments& r, uint64_t offset, uint32_t distance) {  // of the node at a distance
  return offset + uint64_t(distance - 1) * r.max_tokens * r.row_bytes;
}
MK_DEVICE uint32_t num_listed(const abi::World& world, const RoutingArguments& r,
                              uint32_t distance) {  // of the rail peer's tokens, by this node
  return reinterpret_cast<const uint32_t*>(r.counts)[node_at(world, distance) * 2];
}
MK_DEVICE uint32_t num_sent(const abi::World& world, const RoutingArguments& r, uint32_t distance) {
  return reinterpret_cast<const uint32_t*>(r.counts)[node_at(world, distance) * 2 + 1];
}

// Rows of one put, from x to where they lie one after the other.
struct PackedRows {
  struct Item {
    uint32_t bytes, first;
  };
  const RoutingArguments& r;
  const uint32_t* tokens;
  char* to;  // of the first row
  uint32_t rows;
  MK_DEVICE uint32_t first() const { return 0; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + 1; }
  MK_DEVICE uint32_t end() const { return (rows + kRowsPerPiece - 1) / kRowsPerPiece; }
  MK_DEVICE Item item(uint32_t index) const {
    const uint32_t first = index * kRowsPerPiece;
    return Item{rows_of_piece(rows - first) * r.row_bytes, first};
  }
  MK_DEVICE bool ready(const Item&) const { return true; }
  MK_DEVICE bool wait(const Item&) const { return true; }
  MK_DEVICE uint32_t piece_bytes() const { return kPieceBytes; }
  MK_DEVICE uint32_t loaded(const Item&, uint32_t bytes) const { return bytes; }
  MK_DEVICE void load(const Item& item, uint32_t offset, void* smem, uint32_t bytes, uint64_t* bar) const {
    load_rows(item.bytes / r.row_bytes, r.row_bytes, smem, bytes, bar,
              [&](uint32_t i) { return reinterpret_cast<const char*>(r.x) + uint64_t(tokens[item.first + i]) * r.row_bytes + offset; });
  }
  MK_DEVICE void store(const Item& item, uint32_t offset, const char* smem, uint32_t bytes) const {
    ptx::bulk_store(to + uint64_t(item.first) * r.row_bytes + offset, smem, bytes);
  }
  MK_DEVICE void announce(const Item&) const {}
};

// For put_chunks: chunk i goes to the node at distance 1 + i % (kNodes - 1).
template <class Parameters>
struct RowsToSend {
  const Parameters& p;
  CopyRing& ring;
  uint32_t most;  // puts to one node
  uint32_t distance = 0, first = 0, rows = 0;

  MK_DEVICE RowsToSend(const Parameters& parameters, CopyRing& copies) : p(parameters), ring(copies), most(0) {
#pragma unroll 1
    for (uint32_t d = 1; d < kNodes; ++d) {
      const uint32_t chunks = (num_sent(p.world, p.routing, d) + p.routing.put_rows - 1) / p.routing.put_rows;
      most = chunks > most ? chunks : most;
    }
  }
  MK_DEVICE uint32_t end() const { return most * (kNodes - 1); }
  MK_DEVICE bool prepare(const Entered& entered, uint32_t chunk) {
    const RoutingArguments& r = p.routing;
    distance = 1 + chunk % kOtherNodes, first = chunk / kOtherNodes * r.put_rows;
    const uint32_t all = num_sent(p.world, r, distance), left = all > first ? all - first : 0;
    rows = left < r.put_rows ? left : r.put_rows;
    char* to = shared_heap(entered, p.world.local_rank) + area_of(r, r.sending_offset, distance) + uint64_t(first) * r.row_bytes;
    PackedRows packed{r, Tables(entered, r).sent(distance) + first, to, rows};
    ring.copy(packed);
    return true;
  }
  MK_DEVICE uint32_t puts() const { return rows != 0 ? 1 : 0; }
  MK_DEVICE Put put(const Call& call, uint32_t channel, uint32_t) const {
    const RoutingArguments& r = p.routing;
    const uint64_t at = uint64_t(first) * r.row_bytes;
    const uint64_t src = area_of(r, r.sending_offset, distance) + at, dst = area_of(r, r.arrived_offset, seen_by_node_at(distance)) + at;
    const uint32_t flag = chunk_flag(r, p.world.rank, first / r.put_rows);
    return Put{channel, rail_peer(p.world, distance), src, dst, uint64_t(rows) * r.row_bytes, flag_offset(p, flag), call.epoch()};
  }
};

// Tells the node which rows the rail peers have put here. One warp of the rank.
template <class Parameters>
MK_DEVICE void forward_rows(const Entered& entered, const Parameters& p) {
  const RoutingArguments& r = p.routing;
  bool ok = kR > 1, more = true;
#pragma unroll 1
  for (uint32_t first = 0; ok && more; first += r.put_rows) {
    more = false;
#pragma unroll 1
    for (uint32_t distance = 1; ok && distance < kNodes; ++distance) {
      if (num_listed(p.world, r, distance) <= first) continue;
      more = true;
      const uint32_t rank = rail_peer(p.world, distance), flag = chunk_flag(r, rank, first / r.put_rows);
      ok = ptx::all_of_warp(ptx::lane_index() != 0 || wait_flag(entered, p, flag, rank));
      ptx::sync_warp();
      if (ok) raise_flag(entered, p, flag, 1);
    }
  }
}

// All threads of the CTA.
template <class Parameters>
MK_DEVICE void send_rows(const Entered& entered, const Parameters& p, CopyPieces& pieces, CopyBarriers& barriers, uint32_t index) {
  const uint32_t warp = ptx::warp_index();
  if (warp == 0 && ptx::elected()) {
    Trace trace(p.world, 2);
    CopyRing ring(pieces, barriers);
    RowsToSend<Parameters> rows(p, ring);
    put_chunks(entered, rows, 2 + index, index, num_inter_send(p), trace);
  } else if (warp == 2 && index == 0) {
    forward_rows(entered, p);
  }
  ptx::sync_cta();
}

}  // namespace mkernel
