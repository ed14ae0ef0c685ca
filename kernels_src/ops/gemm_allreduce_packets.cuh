// gemm_allreduce for few rows, inside one node: C (M, N) = the sum over all ranks of A (M, K/W) * B (K/W, N), the same bits on every rank.
// Included by the generated source after `struct Config`.
//
// In packets (reduce/packets.cuh): one-shot (kTwoShot 0), everyone sends to everyone and adds up in the order of the ranks; two-shot, the 16 rows of
// a warp have an owner, to which the others send theirs, and which sends them the sum.
#pragma once
#include "reduce/groups.cuh"

namespace mkernel {

struct Tiles : GroupTiles<Tiles> {
  using GroupTiles::GroupTiles;
  static constexpr bool kStoresRows = Shape::kSwapped, kKeepsOwn = Config::kTwoShot != 0;
  MK_DEVICE uint32_t all_rows() const { return p.rows; }
  MK_DEVICE uint32_t first_row() const { return 0; }
  MK_DEVICE void store(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    if constexpr (!kStoresRows) store_result(entered, c, panel, warpgroup, smem);
  }

  // ---- where packets are: block by block of a warp's. One-shot: (source, warp of a tile). Two-shot: (source, warp among its owner's), then
  // (warp of a tile) for the sums.
  MK_DEVICE uint32_t owned() const { return (items() * warps() + kWorldSize - 1) / kWorldSize; }
  MK_DEVICE ptx::Words* packets(const Entered& entered, uint32_t rank, uint32_t block) const {  // of this lane
    return packets_at(entered, rank) + uint64_t(block) * warp_packets() + ptx::lane_index();
  }
  MK_DEVICE Place row_of(ptx::Words* packets, uint32_t half) const { return Place{packets + half * row_packets() * 32, 32}; }
  MK_DEVICE void send_rows(const float (&d)[kValues], ptx::Words* to, const Item& item) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (item.row + half * 8 >= p.rows) continue;
      send(d, half, row_of(to, half), item.packets);
    }
  }

  // ---- the exchange
  MK_DEVICE void exchange_values(const Entered& entered, float (&d)[kValues], const Item& item) const {
    const uint32_t rank = p.world.rank, group = item.number * warps() + item.warp, row = item.row;  // the warp's number among all
    if constexpr (Config::kTwoShot == 0) {
      const uint32_t all = items() * warps();
#pragma unroll 1
      for (uint32_t i = 1; i <= kWorldSize; ++i)
        send_rows(d, packets(entered, (rank + i) % kWorldSize, rank * all + group), item);  // its own rank, too
      const auto at = [&](uint32_t source, uint32_t half) { return row_of(packets(entered, rank, source * all + group), half); };
      add_all(entered, d, item, row < p.rows, row + 8 < p.rows, at);
    } else {
      const uint32_t owner = group % kWorldSize, slot = group / kWorldSize, sums = kWorldSize * owned();
      if (owner != rank) {
        send_rows(d, packets(entered, owner, rank * owned() + slot), item);
        const auto at = [&](uint32_t, uint32_t half) { return row_of(packets(entered, rank, sums + group), half); };
        receive(entered, d, item, row < p.rows, row + 8 < p.rows, owner, at);
        return;
      }
      const auto at = [&](uint32_t source, uint32_t half) { return row_of(packets(entered, rank, source * owned() + slot), half); };
      if (!PacketTiles::add_others(entered, d, item, row < p.rows, row + 8 < p.rows, at))
        return;  // nobody may take what is not the sum for it
#pragma unroll 1
      for (uint32_t i = 1; i < kWorldSize; ++i) send_rows(d, packets(entered, (rank + i) % kWorldSize, sums + group), item);
    }
  }

  // ---- with swapped operands. A block is what a warp has of all groups of a tile; blocks lie as those of 16 rows do.
  MK_DEVICE uint32_t blocks() const { return p.tiles * kColumnWarps; }
  MK_DEVICE uint32_t owned_blocks() const { return (blocks() + kWorldSize - 1) / kWorldSize; }
  MK_DEVICE uint32_t block_of(const Groups& groups) const { return groups.tile * kColumnWarps + KShares::warp(); }
  MK_DEVICE GroupPlace groups_at(const Entered& entered, uint32_t rank, uint32_t block) const {
    const uint64_t first = uint64_t(block) * (block_rows() / kGroupRows) * 32;
    return GroupPlace{packets_at(entered, rank) + first + ptx::lane_index(), 32};
  }
  // To so many ranks from the next one on, or to one.
  template <uint32_t Ranks, uint32_t Values>
  MK_DEVICE void send_block(const Entered& entered, const float (&d)[Values], const Groups& groups, uint32_t at, uint32_t first,
                            uint32_t number) const {
    Groups of[Ranks];
    GroupPlace place[Ranks];
#pragma unroll
    for (uint32_t i = 0; i < Ranks; ++i) of[i] = groups, place[i] = groups_at(entered, (first + i) % kWorldSize, number);
    send_groups(d, groups, at, of, place);
  }
  template <uint32_t Values>
  MK_DEVICE void send_values(const Entered& entered, const float (&d)[Values], const Groups& groups, uint32_t at) const {
    const uint32_t rank = p.world.rank, block = block_of(groups), owner = block % kWorldSize;
    if constexpr (Config::kTwoShot == 0) {
      send_block<kWorldSize>(entered, d, groups, at, rank + 1, rank * blocks() + block);  // its own rank, too
    } else if (owner != rank) {
      send_block<1>(entered, d, groups, at, owner, rank * owned_blocks() + block / kWorldSize);
    }
  }
  template <uint32_t Values>
  MK_DEVICE void finish_values(const Entered& entered, float (&values)[Values], const Groups& groups, uint32_t at) const {
    const uint32_t rank = p.world.rank, block = block_of(groups), owner = block % kWorldSize;
    if constexpr (Config::kTwoShot == 0) {
#pragma unroll
      for (float& e : values) e = 0.0f;
      const auto add = [&](uint32_t i, uint32_t word) {
        float low, high;
        values_of(word, low, high);
        values[i] += low, values[i + 1] += high;
      };
      const auto place = [&](uint32_t source) { return groups_at(entered, rank, source * blocks() + block); };
      if (!take_groups<together(Values, kWorldSize)>(entered, values, kWorldSize, groups, at, [](uint32_t s) { return s; }, place, add))
        return;
    } else {
      const uint32_t sums = kWorldSize * owned_blocks() + block;
      if (owner != rank) {
        const auto set = [&](uint32_t i, uint32_t word) { values_of(word, values[i], values[i + 1]); };
        const auto place = [&](uint32_t) { return groups_at(entered, rank, sums); };
        if (!take_groups<1>(entered, values, 1, groups, at, [&](uint32_t) { return owner; }, place, set)) return;
      } else {
        const auto place = [&](uint32_t source) { return groups_at(entered, rank, source * owned_blocks() + block / kWorldSize); };
        if (!GroupTiles::add_others(entered, values, groups, at, place)) return;  // nobody may take what is not the sum for it
        send_block<kWorldSize - 1>(entered, values, groups, at, rank + 1, sums);
      }
    }
    store_groups(values, groups, at);
  }
};

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  const Call call = kEarly ? coming_call(p.world, abi::kCompute) : begin_call_ahead(p.world, abi::kCompute);
  compute_role(call, Tiles(p), shared_storage<GemmStorage<Config>>());
}

}  // namespace mkernel
