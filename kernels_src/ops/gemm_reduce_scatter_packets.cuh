// gemm_reduce_scatter for few rows, inside one node: C (M/W, N) = this rank's rows of the sum over all ranks of A (M, K/W) * B (K/W, N).
// Included by the generated source after `struct Config`.
//
// In packets (reduce/packets.cuh): tiles cover the rows of all ranks, so that B is read once for all of them, and every rank multiplies every tile.
// Each row has an owner, to which the others send theirs.
#pragma once
#include "reduce/groups.cuh"

namespace mkernel {

struct Tiles : GroupTiles<Tiles> {
  using GroupTiles::GroupTiles;
  MK_DEVICE uint32_t all_rows() const { return p.rows * kWorldSize; }
  MK_DEVICE uint32_t first_row() const { return p.rows * p.world.rank; }
  static constexpr bool kStoresRows = true, kKeepsOwn = true;
  MK_DEVICE void store(const Entered&, const TileCoordinate&, uint32_t, uint32_t, const char*) const {}

  // Packets of a row of this rank's result, by (source, column of tiles, slice, packet of a row, row, lane of four).
  MK_DEVICE Place place_of(ptx::Words* packets, uint32_t source, const Item& item, uint32_t row, uint32_t lane) const {
    const uint32_t block = (source * tiles_n() + item.column) * slices() + item.slice, next = p.rows * 4;
    return Place{packets + uint64_t(block) * row_packets() * next + row * 4 + lane, next};
  }
  MK_DEVICE Place row_of(const Entered& entered, uint32_t owner, uint32_t source, const Item& item, uint32_t row) const {
    return place_of(packets_at(entered, owner), source, item, row, ptx::lane_index() % 4);
  }
  MK_DEVICE void exchange_values(const Entered& entered, float (&d)[kValues], const Item& item) const {
    const uint32_t rank = p.world.rank;
    uint32_t owner[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = item.row + half * 8;
      owner[half] = quotient(row, p.rows);
      if (owner[half] >= kWorldSize || owner[half] == rank) continue;
      send(d, half, row_of(entered, owner[half], rank, item, row - owner[half] * p.rows), item.packets);
    }
    const auto at = [&](uint32_t source, uint32_t half) { return row_of(entered, rank, source, item, item.row + half * 8 - first_row()); };
    PacketTiles::add_others(entered, d, item, owner[0] == rank, owner[1] == rank, at);
  }

  // ---- with swapped operands. Packets lie by (source, column of tiles, group of an owner's rows, warp, lane).
  MK_DEVICE uint32_t owned_groups() const { return (p.rows + kGroupRows - 2) / kGroupRows + 1; }  // with rows of an owner, at most
  MK_DEVICE uint32_t first_group(uint32_t owner) const { return owner * p.rows / kGroupRows; }
  MK_DEVICE uint32_t end_group(uint32_t owner) const { return ((owner + 1) * p.rows + kGroupRows - 1) / kGroupRows; }
  MK_DEVICE GroupPlace groups_at(const Entered& entered, uint32_t owner, uint32_t source, const Groups& groups) const {
    const int32_t before = groups.first - first_group(owner);  // less than 0 where the owner's rows begin in the tile
    const int64_t at = int64_t((source * tiles_n() + groups.column) * owned_groups()) + before;
    return GroupPlace{packets_at(entered, owner) + at * kGroupPackets + lane_of_tile(), kGroupPackets};
  }
  MK_DEVICE Groups of_owner(const Groups& groups, uint32_t owner) const { return groups.between(first_group(owner), end_group(owner)); }
  template <uint32_t Values>
  MK_DEVICE void send_values(const Entered& entered, const float (&d)[Values], const Groups& groups, uint32_t at) const {
    Groups of[kWorldSize - 1];
    GroupPlace place[kWorldSize - 1];
#pragma unroll
    for (uint32_t i = 0; i < kWorldSize - 1; ++i) {
      const uint32_t owner = (p.world.rank + 1 + i) % kWorldSize;
      of[i] = of_owner(groups, owner), place[i] = groups_at(entered, owner, p.world.rank, groups);
    }
    send_groups(d, groups, at, of, place);
  }
  template <uint32_t Values>
  MK_DEVICE void finish_values(const Entered& entered, float (&values)[Values], const Groups& groups, uint32_t at) const {
    const Groups own = of_owner(groups, p.world.rank);
    if (own.begin >= own.end) return;
    const auto place = [&](uint32_t source) { return groups_at(entered, p.world.rank, source, groups); };
    if (GroupTiles::add_others(entered, values, own, at, place)) store_groups(values, own, at);
  }
};

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  const Call call = kEarly ? coming_call(p.world, abi::kCompute) : begin_call_ahead(p.world, abi::kCompute);
  compute_role(call, Tiles(p), shared_storage<GemmStorage<Config>>());
}

}  // namespace mkernel
