// What gemm_reduce_scatter and gemm_allreduce share. Every tile of the sum has an owner: the other ranks send it their partial tiles, it adds
// them to its own product in a fixed order and rounds once.
//
// Inside a node a partial tile goes by bulk stores straight into the owner's heap. For an owner on another node it goes to this node's rank on
// the owner's rail, whose inter_reduce adds up the node's partial tiles; inter_send puts that sum, so that a tile crosses the network once per
// node. A tile that is sent waits for nothing, a sum for tiles that are sent, an owned tile for both: nothing waits in a circle.
#pragma once
#include "gemm.cuh"
#include "ring.cuh"

namespace mkernel {

// ---- config: kN, kK, kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor, kPartialFloat32, kNumNodes, kRanksPerNode, kIntraComm,
// kInterSend, kInterReduce, kInterleaved, kChunkTiles, kLoadRows, kSlices (1); kSharedBytes, kParameterBytes
using Shape = GemmShape<Config>;
constexpr uint64_t kPartialBytes = Partial<Config>::kTileBytes;
constexpr uint64_t kResultBytes = Shape::kPanels * kConsumerWarpgroups * kBlockBytes;  // a finished tile in the layout of its TMA stores

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  uint64_t partial_offset;  // data heap: (world size - 1, tiles) partial tiles from ranks of this node
  uint64_t sum_offset;      // data heap: (nodes - 1, tiles) sums of this node for owners on this rail, by distance of the owner's node
  uint64_t arrived_offset;  // data heap: (nodes - 1, tiles) sums of the other nodes, by their distance
  uint64_t result_offset;   // data heap, all-reduce: (nodes, tiles) finished tiles of this rank and its rail peers, by distance of the node
  uint64_t flag_offset;     // signal segment, in 64-bit words: a flag per partial tile, sum, chunk of arrived sums, finished tile
  uint32_t rows;            // of the owner's shard (reduce-scatter), of the whole (all-reduce)
  uint32_t tiles;           // per owner
  uint32_t group_tiles;     // of an owner, that are computed one after the other
  uint32_t group_m;         // tile rows that share columns of B
  uint32_t reserved[6];     // the maps are 64-byte aligned
  abi::TensorMap a_map;     // (owners or 1, rows, K)
  abi::TensorMap b_map;
  abi::TensorMap c_map;  // (1, rows, N)
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

// ---- where things are
MK_DEVICE uint32_t num_chunks(const Parameters& p) { return (p.tiles + Config::kChunkTiles - 1) / Config::kChunkTiles; }
// Partial tiles at the rank that adds them up, by distances: of the owner's node, and of their source's local rank. Its own are not stored.
MK_DEVICE uint32_t partial_index(const Parameters& p, uint32_t owner_distance, uint32_t source_distance, uint32_t index) {
  const uint32_t block = owner_distance == 0 ? source_distance - 1 : kR - 1 + (owner_distance - 1) * kR + source_distance;
  return block * p.tiles + index;
}
MK_DEVICE const char* own_heap(const Parameters& p) { return heap(p.world, p.world.local_rank); }
MK_DEVICE uint64_t partial_offset(const Parameters& p, uint32_t index) { return p.partial_offset + index * kPartialBytes; }
MK_DEVICE uint64_t sum_offset(const Parameters& p, uint32_t distance, uint32_t index) {
  return p.sum_offset + ((distance - 1) * p.tiles + index) * kPartialBytes;
}
MK_DEVICE uint64_t arrived_offset(const Parameters& p, uint32_t distance, uint32_t index) {
  return p.arrived_offset + ((distance - 1) * p.tiles + index) * kPartialBytes;
}
MK_DEVICE uint64_t result_offset(const Parameters& p, uint32_t distance, uint32_t index) {
  return p.result_offset + (distance * p.tiles + index) * kResultBytes;
}

// ---- flags, by number
MK_DEVICE uint32_t sum_flag(const Parameters& p, uint32_t distance, uint32_t index) {
  return (kWorldSize - 1 + distance - 1) * p.tiles + index;
}
MK_DEVICE uint32_t arrived_flag(const Parameters& p, uint32_t distance, uint32_t chunk) {
  return (kWorldSize - 1 + kNodes - 1) * p.tiles + (distance - 1) * num_chunks(p) + chunk;
}
MK_DEVICE uint32_t finished_flag(const Parameters& p, uint32_t distance, uint32_t local_rank, uint32_t index) {  // of that owner's tile
  return (kWorldSize - 1 + kNodes - 1) * p.tiles + (kNodes - 1) * num_chunks(p) + (distance * kR + local_rank) * p.tiles + index;
}

// ---- tile -> coordinate: group by group of the owners' tiles: those of the other nodes' ranks (own rail last), of the node's other ranks, and,
// one group later, the own ones: what they add has then had time to come. kInterleaved: from the second group on one of each other owner and
// an own one in turn, so that the link has as much to carry at any time.
// Derived says how an owner's tiles lie in C: RasterPosition position(owner, index), and uint32_t count_of(owner): so many of p.tiles there are.
template <class Derived>
struct OwnedTiles : BasicOp<Config, Parameters> {
  uint32_t sums_begin, sums_stride;  // of inter_reduce: the sums that this CTA makes
  MK_DEVICE explicit OwnedTiles(const Parameters& parameters, uint32_t begin = 0, uint32_t stride = 0)
      : BasicOp(parameters), sums_begin(begin), sums_stride(stride) {}
  MK_DEVICE const Derived& derived() const { return static_cast<const Derived&>(*this); }

  static constexpr uint32_t kPeers = kWorldSize - 1, kParts = kPeers > 0 ? 2 : 1;
  static constexpr bool kAdds = kPeers > 0, kAnnounces = kPeers > 0;

  MK_DEVICE uint32_t num_tiles() const { return p.tiles * kWorldSize; }
  MK_DEVICE uint32_t num_sums() const { return p.tiles * (kNodes - 1); }
  MK_DEVICE uint32_t assigned(uint32_t i) const {
    if constexpr (kNodes == 1) return kStop;
    const uint32_t sum = sums_begin + i * sums_stride;
    return sums_stride != 0 && sum < num_sums() ? num_tiles() + sum : kStop;
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
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {  // calls at() once: it is long
    uint32_t owner = p.world.rank, begin = 0, rest = tile;    // of the group, and the tile's number in it
    bool is_sum = false;
    const uint32_t groups = (p.tiles + p.group_tiles - 1) / p.group_tiles, first = kPeers * group_size(0);
    if (kNodes > 1 && tile >= num_tiles()) {
      rest = tile - num_tiles(), begin = rest / (p.group_tiles * kOtherNodes) * p.group_tiles, is_sum = true;
      rest -= begin * kOtherNodes;
      owner = rail_peer(p.world, 1 + rest / group_size(begin)), rest %= group_size(begin);
    } else if (tile < first) {
      owner = peer(tile / group_size(0)), rest = tile % group_size(0);
    } else {
      rest -= first;
      if (groups > 1) {
        const uint32_t whole = rest / (kWorldSize * p.group_tiles), group = whole + 1 < groups - 1 ? whole + 1 : groups - 1;
        rest -= (group - 1) * kWorldSize * p.group_tiles;
        begin = group * p.group_tiles;
        const uint32_t size = group_size(begin), sent = kPeers * size;
        uint32_t turn = kPeers;  // whose it is: an owner's at this distance, or an own one
        if (Config::kInterleaved != 0 && rest < kWorldSize * size) {
          turn = rest % kWorldSize, rest /= kWorldSize;
        } else if (rest < sent) {
          turn = rest / size, rest %= size;
        } else {
          rest -= sent;
        }
        if (turn < kPeers) {
          owner = peer(turn);
        } else {
          begin -= p.group_tiles;
        }
      }
    }
    return at(owner, begin + rest, is_sum);
  }
  MK_DEVICE uint32_t group_size(uint32_t begin) const { return p.tiles - begin < p.group_tiles ? p.tiles - begin : p.group_tiles; }

  // ---- for the GEMM
  MK_DEVICE bool is_own(const TileCoordinate& c) const { return c.plane == p.world.rank; }
  MK_DEVICE uint32_t parts(const TileCoordinate& c) const {
    if (!derived().exists(c.plane, c.index)) return 0;
    return is_own(c) ? kParts : 1;
  }
  MK_DEVICE bool waits(const TileCoordinate& c, uint32_t part) const { return part == 1 || c.is_sum; }
  MK_DEVICE uint32_t steps(const TileCoordinate& c, uint32_t part) const { return part == 0 && !c.is_sum ? Shape::kStepsK : 0; }

  // A sum: what the node's ranks have of it, from the own one on. An own tile: after its product the node's others', then the other nodes' sums.
  MK_DEVICE uint32_t addends(const TileCoordinate& c, uint32_t part) const {
    if (c.is_sum) return kR;
    return part == 1 ? kR - 1 + kNodes - 1 : 0;
  }
  MK_DEVICE uint32_t addend_index(const TileCoordinate& c, uint32_t i) const {  // of a partial tile of this node
    return c.is_sum ? partial_index(p, node_distance(p.world, c.plane), i, c.index) : partial_index(p, 0, i + 1, c.index);
  }
  MK_DEVICE const char* addend(const TileCoordinate& c, uint32_t i) const {
    const bool arrived = !c.is_sum && i >= kR - 1;
    return own_heap(p) + (arrived ? arrived_offset(p, i - (kR - 1) + 1, c.index) : partial_offset(p, addend_index(c, i)));
  }
  struct AddendFlags {
    const OwnedTiles& op;
    const TileCoordinate& c;
    MK_DEVICE bool arrived(uint32_t i) const { return !c.is_sum && i >= kR - 1; }
    MK_DEVICE uint32_t flag(uint32_t i) const {
      return arrived(i) ? arrived_flag(op.p, i - (kR - 1) + 1, c.index / Config::kChunkTiles) : op.addend_index(c, i);
    }
    MK_DEVICE uint32_t writer(uint32_t i) const {
      const abi::World& world = op.p.world;
      return arrived(i) ? rail_peer(world, i - (kR - 1) + 1) : world.node * kR + local_peer(world, c.is_sum ? i : i + 1);
    }
    MK_DEVICE bool wait(const Entered& entered, uint32_t i) const { return wait_flag(entered, op.p, flag(i), writer(i)); }
  };
  MK_DEVICE bool wait_inputs(const Entered& entered, const TileCoordinate& c, uint32_t part) const {  // warp function
    return wait_all(entered, AddendFlags{*this, c}, addends(c, part));
  }

  // ---- where a tile goes: a sum to where the network reads it, a partial tile to the node's rank on the owner's rail
  MK_DEVICE bool is_partial(const TileCoordinate& c) const { return !is_own(c); }
  MK_DEVICE uint32_t adder(const TileCoordinate& c) const { return c.plane % kR; }  // local rank
  MK_DEVICE uint32_t sent_index(const TileCoordinate& c) const {
    return partial_index(p, node_distance(p.world, c.plane), (p.world.local_rank + kR - adder(c)) % kR, c.index);
  }
  static constexpr uint32_t kPacedWaves = 4;  // of tiles, from which there is much to load behind a partial tile
  // Over a link, and with many tiles to load behind it.
  MK_DEVICE bool paced(const TileCoordinate& c) const {
    return !c.is_sum && adder(c) != p.world.local_rank && num_tiles() > kPacedWaves * ptx::cta_count();
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

// ---- inter_send: chunks of tiles to the rail peers.
// Tiles: uint32_t count(distance, first): how many of the chunk's tiles there are; flag(distance, index): of this rank, told when one is done;
//        src(distance, index), dst(distance, index): offsets in the heaps of this rank and of the peer; bytes(): of a tile;
//        peer_flag(distance, first): at the peer.
template <class Tiles>
struct TilesToSend {
  const Parameters& p;
  const Tiles& tiles;
  uint32_t distance, first, count;
  MK_DEVICE uint32_t end() const { return num_chunks(p) * (kNodes - 1); }
  MK_DEVICE bool prepare(const Entered& entered, uint32_t item) {
    first = item / kOtherNodes * Config::kChunkTiles, distance = 1 + item % kOtherNodes;
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
    return Put{channel, peer, src, dst, count * tiles.bytes(), flag_offset(p, flag), call.epoch};
  }
};
template <class Tiles>
MK_DEVICE void send_tiles(const Call& call, const Parameters& p, const Tiles& tiles, uint32_t channel, uint32_t index, uint32_t lane) {
  const MaybeEntered entered = enter(call);  // warp function
  if (!entered || ptx::lane_index() != 0) return;
  Trace trace(p.world, lane);
  TilesToSend<Tiles> chunks{p, tiles, 0, 0, 0};
  put_chunks(*entered, chunks, channel, index, trace);
}

// How many of the tiles [first, first + kChunkTiles) of an owner there are.
template <class Op>
MK_DEVICE uint32_t chunk_count(const Op& op, uint32_t owner, uint32_t first) {
  const uint32_t tiles = op.count_of(owner), left = tiles > first ? tiles - first : 0;
  return left < Config::kChunkTiles ? left : Config::kChunkTiles;
}

template <class Op>
struct SumsToSend {
  const Op& op;
  MK_DEVICE uint32_t count(uint32_t distance, uint32_t first) const { return chunk_count(op, rail_peer(op.p.world, distance), first); }
  MK_DEVICE uint32_t flag(uint32_t distance, uint32_t index) const { return sum_flag(op.p, distance, index); }
  MK_DEVICE uint64_t src(uint32_t distance, uint32_t index) const { return sum_offset(op.p, distance, index); }
  MK_DEVICE uint64_t dst(uint32_t distance, uint32_t index) const { return arrived_offset(op.p, kNodes - distance, index); }
  MK_DEVICE uint64_t bytes() const { return kPartialBytes; }
  MK_DEVICE uint32_t peer_flag(uint32_t distance, uint32_t first) const {
    return arrived_flag(op.p, kNodes - distance, first / Config::kChunkTiles);
  }
};

}  // namespace mkernel
