// gemm_reduce_scatter for few rows, inside one node: C (M/W, N) = this rank's rows of the sum over all ranks of A (M, K/W) * B (K/W, N).
// Included by the generated source after `struct Config`.
//
// In packets (reduce/packets.cuh): tiles cover the rows of all ranks, so that B is read once for all of them, and every rank multiplies every tile.
// Each row has an owner, to which the others send theirs.
#pragma once
#include "reduce/packets.cuh"

namespace mkernel {

struct Tiles : PacketTiles<Tiles> {
  using PacketTiles::PacketTiles;
  MK_DEVICE uint32_t all_rows() const { return p.rows * kWorldSize; }
  MK_DEVICE uint32_t first_row() const { return p.rows * p.world.rank; }
  static constexpr bool kStoresRows = true;
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
    add_others(entered, d, item, owner[0] == rank, owner[1] == rank, at);
  }
};

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  const Call call = kEarly ? coming_call(p.world, abi::kCompute) : begin_call_ahead(p.world, abi::kCompute);
  compute_role(call, Tiles(p), shared_storage<GemmStorage<Config>>());
}

}  // namespace mkernel
