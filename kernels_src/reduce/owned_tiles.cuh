// What gemm_reduce_scatter and gemm_allreduce share. Every tile of the sum has an owner: the other ranks send it their partial tiles, it adds
// them to its own product in a fixed order and rounds once: from the own rank on, or (kCanonical) by rank, whoever the owner is.
//
// Inside a node a partial tile goes by bulk stores straight into the owner's heap. For an owner on another node it goes to this node's rank on
// the owner's rail, whose inter_reduce adds up the node's partial tiles; inter_send puts that sum, so that a tile crosses the network once per
// node. A tile that is sent waits for nothing, a sum for tiles that are sent, an owned tile for both: nothing waits in a circle.
#pragma once
#include "reduce/layout.cuh"
#include "tile/gemm.cuh"

namespace mkernel {

// Inside a node, and where each owner has rows of its own, CTAs may be clusters of any shape. Else runs of tiles belong to somebody: then they are alone,
// or pairs of neighbours in M, whose tiles follow each other in raster order.
constexpr bool kFollowing = Shape::kClusterN == 1 && Shape::kCluster <= 2;
static_assert(kFollowing || kNodes == 1, "runs of tiles travel between nodes");

// ---- tile -> coordinate: group by group of the owners' tiles: those of the other nodes' ranks (own rail last), of the node's other ranks, and,
// one group later, the own ones: what they add has then had time to come. Interleaved: from the second group on one of each other owner and
// an own one in turn, so that the link has as much to carry at any time.
// Derived says how an owner's tiles lie in C: RasterPosition position(owner, index), and uint32_t count_of(owner): so many of p.tiles there are.
// With clusters an owner has whole ones: uint32_t first_taken(owner), of all in raster order, and first_tile(owner), of single tiles.
template <class Derived>
struct OwnedTiles : BasicOp<Config, Parameters> {
  uint32_t first_sum;  // of inter_reduce: the first of the sums that this CTA makes; kStop: it makes none
  MK_DEVICE explicit OwnedTiles(const Parameters& parameters, uint32_t first = kStop) : BasicOp(parameters), first_sum(first) {}
  MK_DEVICE const Derived& derived() const { return static_cast<const Derived&>(*this); }

  static constexpr uint32_t kPeers = kWorldSize - 1, kParts = kPeers > 0 ? 2 : 1;
  static constexpr bool kAdds = kPeers > 0, kAnnounces = kPeers > 0, kCanonical = kAdds && Config::kCanonical != 0;
  static constexpr bool kSums = kNodes > 1;

  // Each number, of these and of sums, is of what CTAs take: a tile, or those of a cluster.
  MK_DEVICE uint32_t num_tiles() const { return p.taken * kWorldSize; }
  MK_DEVICE uint32_t num_sums() const { return p.taken * (kNodes - 1); }
  MK_DEVICE uint32_t assigned(uint32_t i) const {
    if constexpr (kNodes == 1) return kStop;
    const uint32_t sum = (first_sum + i * num_inter_reduce(p)) / Shape::kCluster;  // the CTAs of a cluster have the same
    return first_sum != kStop && sum < num_sums() ? num_tiles() + sum : kStop;
  }
  MK_DEVICE uint32_t peer(uint32_t i) const {  // the i-th other owner
    constexpr uint32_t kRemote = kWorldSize - kR;
    const bool remote = i < kRemote;
    return rank_at(p.world, remote ? 1 + i % kOtherNodes : 0, remote ? 1 + i / kOtherNodes : 1 + i - kRemote);
  }
  MK_DEVICE bool exists(uint32_t owner, uint32_t index) const { return index < derived().count_of(owner); }
  MK_DEVICE TileCoordinate at(uint32_t owner, uint32_t index, bool is_sum) const {
    const RasterPosition position = derived().exists(owner, index) ? derived().position(owner, index) : RasterPosition{0, 0};
    return TileCoordinate{owner, position.row, position.column, 0, index, is_sum};
  }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const { return coordinate_of(tile, Shape::kPaired ? ptx::cluster_rank() : 0); }
  MK_DEVICE TileCoordinate coordinate_of(uint32_t tile, uint32_t cta) const {  // of a cluster
    const bool is_sum = kNodes > 1 && tile >= num_tiles();
    const OwnedTile it = is_sum ? summed(tile - num_tiles()) : multiplied(tile);
    if constexpr (Shape::kPaired) return of_owner(it.owner, it.index, is_sum, cta);
    return at(it.owner, it.index, is_sum);  // once: it is long
  }
  // The tile of one CTA of a cluster. All that is sent lies as it does without clusters.
  MK_DEVICE uint32_t taken_rows() const { return (tile_rows() + Shape::kClusterM - 1) / Shape::kClusterM; }
  MK_DEVICE TileCoordinate of_owner(uint32_t owner, uint32_t index, bool is_sum, uint32_t cta) const {
    static_assert(kFollowing || Derived::kOwnRows || kWorldSize == 1, "runs of tiles have owners");
    const uint32_t taken = derived().first_taken(owner) + index;
    if (!derived().taken_exists(taken)) return TileCoordinate{owner, 0, 0, 0, kStop, is_sum};
    TileCoordinate c = of_cluster(TileCoordinate{owner, 0, 0, 0, 0, is_sum}, taken, cta, tile_rows());
    if constexpr (kWorldSize > 1) c.index -= derived().first_tile(owner);
    return c;
  }
  // A pair's upper tile in the raster order of single tiles, in groups of p.group_m rows, an even number. Where the last group has an odd number of
  // rows, so has each of its columns of tiles.
  MK_DEVICE uint32_t upper_tile(uint32_t pair) const {
    return 2 * pair - (pair < p.whole_pairs ? 0 : quotient(pair - p.whole_pairs, p.last_pairs));
  }
  MK_DEVICE bool taken_exists(uint32_t number) const { return number < taken_rows() * taken_columns(); }
  // Of a cluster all CTAs say the same: also those that have no tile.
  MK_DEVICE bool is_taken(const TileCoordinate& c) const { return Shape::kPaired ? c.index != kStop : derived().exists(c.plane, c.index); }
  struct OwnedTile {
    uint32_t owner, index;  // the rank that owns it, and its number among what is taken of that rank's
  };
  // Example: rank 0 of 3 ranks on one node, whose owners have 4 tiles each, in groups of 2. Written owner:index, tiles 0 to 11 are
  //   first round  1:0 1:1 2:0 2:1                    the others' first group
  //   last round   1:2 1:3 2:2 2:3  0:0 0:1  0:2 0:3  the others' next group, the own ones of the group before it, then the own ones left
  // Interleaved, the last round is 1:2 2:2 0:0 1:3 2:3 0:1 0:2 0:3. With more groups there are more rounds, each but the last without own
  // tiles of its own group.
  MK_DEVICE OwnedTile multiplied(uint32_t tile) const {
    const uint32_t own = p.world.rank, first_round = kPeers * group_size(0), groups = (p.taken + p.group_taken - 1) / p.group_taken;
    if (tile < first_round) return OwnedTile{peer(tile / group_size(0)), tile % group_size(0)};
    uint32_t rest = tile - first_round;  // in the rounds after it, then in its own round
    if (groups == 1) return OwnedTile{own, rest};
    const uint32_t before = rest / (kWorldSize * p.group_taken), round = before + 1 < groups - 1 ? before + 1 : groups - 1;
    rest -= (round - 1) * kWorldSize * p.group_taken;
    const uint32_t begin = round * p.group_taken, own_begin = begin - p.group_taken, size = group_size(begin), sent = kPeers * size;
    if (p.interleaved != 0 && rest < kWorldSize * size) {
      const uint32_t turn = rest % kWorldSize, index = rest / kWorldSize;
      return turn < kPeers ? OwnedTile{peer(turn), begin + index} : OwnedTile{own, own_begin + index};
    }
    return rest < sent ? OwnedTile{peer(rest / size), begin + rest % size} : OwnedTile{own, own_begin + rest - sent};
  }
  // Sums are made group by group, of each group those for the nearest other node first.
  MK_DEVICE OwnedTile summed(uint32_t sum) const {
    const uint32_t begin = sum / (p.group_taken * kOtherNodes) * p.group_taken, rest = sum - begin * kOtherNodes;
    return OwnedTile{rail_peer(p.world, 1 + rest / group_size(begin)), begin + rest % group_size(begin)};
  }
  MK_DEVICE uint32_t group_size(uint32_t begin) const { return p.taken - begin < p.group_taken ? p.taken - begin : p.group_taken; }

  // ---- for the GEMM
  MK_DEVICE bool is_own(const TileCoordinate& c) const { return kPeers == 0 || c.plane == p.world.rank; }
  MK_DEVICE uint32_t parts(const TileCoordinate& c) const {
    if (!derived().is_taken(c)) return 0;
    return is_own(c) ? kParts : 1;
  }
  MK_DEVICE bool waits(const TileCoordinate& c, uint32_t part) const { return part == 1 || c.is_sum; }
  MK_DEVICE uint32_t steps(const TileCoordinate& c, uint32_t part) const { return part == 0 && !c.is_sum ? steps_k() : 0; }

  // A sum: what the node's ranks have of it, from the own one on. An own tile: after its product the node's others', then the other nodes' sums.
  // Canonical: both by rank and by node.
  static constexpr uint32_t kLevels = kNodes > 1 ? 2 : 1;
  MK_DEVICE Level level(uint32_t i) const { return i == 0 ? Level{kR, p.world.local_rank} : Level{kNodes, p.world.node}; }
  // Distances at which the i-th contribution to a sum was made, and to an own tile (of its node, or, `arrived`, of another one).
  MK_DEVICE uint32_t source_distance(const TileCoordinate& c, uint32_t i) const {
    if constexpr (!kCanonical) return c.is_sum ? i : i + 1;
    const uint32_t source = c.is_sum || i < p.world.local_rank ? i : i + 1;
    return (source + kR - p.world.local_rank) % kR;
  }
  MK_DEVICE uint32_t arrived_distance(uint32_t i) const {
    const uint32_t other = i - (kR - 1);
    if constexpr (!kCanonical) return other + 1;
    const uint32_t node = other < p.world.node ? other : other + 1;
    return (node + kNodes - p.world.node) % kNodes;
  }
  MK_DEVICE uint32_t addends(const TileCoordinate& c, uint32_t part) const {
    if (c.is_sum) return kR;
    return part == 1 ? kR - 1 + kNodes - 1 : 0;
  }
  MK_DEVICE uint32_t addend_index(const TileCoordinate& c, uint32_t i) const {  // of a partial tile of this node
    return partial_index(p, c.is_sum ? node_distance(p.world, c.plane) : 0, source_distance(c, i), c.index);
  }
  MK_DEVICE const char* addend(const TileCoordinate& c, uint32_t i) const {
    const bool arrived = !c.is_sum && i >= kR - 1;
    return own_heap(p) + (arrived ? arrived_offset(p, arrived_distance(i), c.index) : partial_offset(p, addend_index(c, i)));
  }
  struct AddendFlags {
    const OwnedTiles& op;
    const TileCoordinate& c;
    MK_DEVICE bool arrived(uint32_t i) const { return !c.is_sum && i >= kR - 1; }
    MK_DEVICE uint32_t flag(uint32_t i, uint32_t further = 0) const {  // of the tile, or of one so many numbers further on
      if (!arrived(i)) return op.addend_index(c, i) + further;
      return arrived_flag(op.p, op.arrived_distance(i), (c.index + further) >> op.p.chunk_shift);
    }
    MK_DEVICE uint32_t writer(uint32_t i) const {
      const abi::World& world = op.p.world;
      return arrived(i) ? rail_peer(world, op.arrived_distance(i)) : node_mate(world, local_peer(world, op.source_distance(c, i)));
    }
    MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {  // of a cluster: tile by tile, column by column
      if constexpr (!Shape::kPaired) return wait_flag(entered, op.p, flag(i), writer(i));
      const uint32_t count = op.addends(c, 1);
      uint32_t tile = i < count ? 0 : kFollowing ? 1 : i / count;
      i -= tile * count;
      if constexpr (!kFollowing) {
        const uint32_t rows = op.rows_there(c), column = tile / rows;
        tile = op.raster_further(c, tile - column * rows, column);
      }
      return wait_flag(entered, op.p, flag(i, tile), writer(i));
    }
  };
  MK_DEVICE bool wait_inputs(const Entered& entered, const TileCoordinate& c, uint32_t part) const {  // warp function
    return wait_all(entered, AddendFlags{*this, c}, rows_there(c) * columns_there(c) * addends(c, part));
  }
  // From the first tile of a cluster on: rows and columns of its tiles that there are; and how much further the number of one of them is.
  MK_DEVICE uint32_t rows_there(const TileCoordinate& c) const {
    return Shape::kClusterM > 1 && tile_rows() - c.m < Shape::kClusterM ? tile_rows() - c.m : Shape::kClusterM;
  }
  MK_DEVICE uint32_t columns_there(const TileCoordinate& c) const {
    return Shape::kClusterN > 1 && tiles_n() - c.n < Shape::kClusterN ? tiles_n() - c.n : Shape::kClusterN;
  }
  MK_DEVICE uint32_t raster_further(const TileCoordinate& c, uint32_t row, uint32_t column) const {
    return raster_number(c.m + row, c.n + column, tile_rows(), tiles_n(), p.group_m) - c.index;
  }

  // ---- where a tile goes: a sum to where the network reads it, a partial tile to the node's rank on the owner's rail
  MK_DEVICE bool is_partial(const TileCoordinate& c) const { return !is_own(c); }
  MK_DEVICE uint32_t adder(const TileCoordinate& c) const { return c.plane % kR; }  // local rank
  MK_DEVICE uint32_t sent_index(const TileCoordinate& c) const {
    return partial_index(p, node_distance(p.world, c.plane), seen_by_local(p.world, adder(c)), c.index);
  }
  static constexpr uint32_t kPacedWaves = 4;  // of tiles, from which there is much to load behind a partial tile
  // Over a link, and with many tiles to load behind it.
  MK_DEVICE bool paced(const TileCoordinate& c) const {
    return !c.is_sum && adder(c) != p.world.local_rank && num_tiles() * Shape::kCluster > kPacedWaves * ptx::cta_count();
  }
  MK_DEVICE void store_partial(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup,
                               const char* smem) const {
    const uint32_t bytes = block_bytes(rows(c), warpgroup);
    char* tile = c.is_sum ? shared_heap(entered, p.world.local_rank) + sum_offset(p, node_distance(p.world, c.plane), c.index)
                          : shared_heap(entered, adder(c)) + partial_offset(p, sent_index(c));
    tile += (panel * kConsumerWarpgroups + warpgroup) * kBlockBytes;
    if (paced(c)) {
      store_paced(tile, smem, bytes);
    } else if (bytes != 0) {
      ptx::bulk_store(tile, smem, bytes);
    }
  }
  MK_DEVICE void raise_partial(const Entered& entered, const TileCoordinate& c) const {  // warp function
    if (ptx::lane_index() != 0) return;
    const uint32_t flag = c.is_sum ? sum_flag(p, node_distance(p.world, c.plane), c.index) : sent_index(c);
    raise_flag_of(entered, p, flag, c.is_sum ? p.world.local_rank : adder(c));
  }
};

}  // namespace mkernel
