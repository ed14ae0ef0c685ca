// allgather_gemm: C (M, N) = allgather(A) (M, K) * B (K, N). Included by the generated source after `struct Config`.
//
// intra_comm pushes this rank's shard, chunk by chunk, into the gather buffers of the node's other ranks and raises one flag per chunk; across
// nodes inter_send puts the same chunks to each rail peer, whose intra_comm forwards them. Compute starts on the own shard. On one node the
// chunks may also be pushed by a warp of each computing CTA (kIntraComm 0), so that no CTA does anything else.
//
// Tiles cover planes: a plane is the rows of the shards of p.span ranks that follow each other. With one shard per plane (span 1) a tile of the own
// shard reads the caller's array and waits for nobody. With more, a tile may reach over the end of a shard, so that few rows of each rank share a
// tile and B is read once for all; the own shard then lies in this rank's gather buffer, too, and a tile waits for the chunks of all its rows.
//
// With few rows (kPackets) shards travel in packets (comm/shard_packets.cuh, tagged_packets.cuh), moved by the consumers, and there is one plane.
#pragma once
#include "comm/intra_comm.cuh"
#include "comm/ring.cuh"
#include "comm/shard_packets.cuh"
#include "comm/tagged_packets.cuh"
#include "tile/gemm.cuh"
#include "tile/shares.cuh"

namespace mkernel {

// ---- config: kN, kK, kIntraComm, kInterSend (each may be kDynamic), kInterReduce (0), kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor,
// kNumNodes, kRanksPerNode, kSlices, kHasParts, kShares, kPackets (2: tagged); kSharedBytes, kParameterBytes
using Shape = GemmShape<Config>;
using Storage = CopyingStorage<GemmStorage<Config>>;
constexpr bool kPackets = Config::kPackets != 0, kTagged = Config::kPackets == 2;
static_assert(!kTagged || Shape::kCluster == 1, "each CTA brings its own rows");
static_assert(!kPackets || (kNodes == 1 && kR > 1 && Config::kIntraComm == 0), "packets travel inside a node, without CTAs for it");
// Also with one rank per node: into the own gather buffer.
constexpr bool kWarpsPush = Config::kIntraComm == 0 && kWorldSize > 1 && !kPackets;
static_assert(!kWarpsPush || kNodes == 1 || kR == 1, "what comes from other nodes is forwarded by intra_comm");
constexpr uint32_t kUnitBytes = kSwizzleBytes;      // of a row of the part map's box
constexpr bool kHasParts = Config::kHasParts != 0;  // K is such that it may travel in parts: all that copies has more to do
static_assert(!kHasParts || (kNodes == 1 && kR > 1), "puts are contiguous in a, and on one rank nothing travels");
constexpr uint32_t kMaxPartShift = kHasParts ? 2 : 0;
using KShares = Shares<Config>;
static_assert(!KShares::kMay || (kNodes == 1 && Config::kSlices == 1), "there are packets inside a node only");

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  uint64_t a;               // this rank's shard (rows, K), contiguous
  uint64_t gather_offset;   // data heap: (parts, world size, rows, K / parts); the own shard is there with span > 1 only
  uint64_t send_offset;     // data heap: where network sends read the shard, in the caller's array or in this rank's staging area
  uint64_t flag_offset;     // signal segment: one flag per (source rank, chunk)
  uint64_t packet_offset;   // signal segment: (tiles that are shared, shares, CTAs of a pair, warps, packets of a thread, 32)
  uint64_t ahead_offset;    // signal segment, with kPackets: comm/shard_packets.cuh, comm/tagged_packets.cuh
  uint32_t rows;            // M / W
  uint32_t whole_tiles;     // tiles 0 .. whole_tiles-1 are whole, the others are sliced
  uint32_t group_m;         // tile rows that share columns of B
  uint32_t part_blocks;     // blocks of a chunk's rows whose first parts travel before their second parts
  uint32_t chunk_shift;     // a chunk has 1 << chunk_shift rows
  uint32_t part_shift;      // K travels in 1 << part_shift parts: each a whole number of k steps, and its rows no shorter than kWarpStride
  uint32_t piece_rows;      // with parts, of the part map's box: so many rows (several only if they are whole rows of a part),
  uint32_t piece_units;     // and of each so many units, of which a row of a part has a multiple
  uint32_t load_rows;       // of a tile of A
  uint32_t span;            // ranks whose shards are one plane: a divisor or a multiple of the ranks of a node, and a divisor of all
  uint32_t shares;          // CTAs, or pairs, that share K of a tile; 1 with several parts, slices or nodes
  uint32_t stage_send;      // 1: inter_send first copies the shard to send_offset
  uint32_t c_row_bytes;     // of a row of the result to the next; used with shares
  uint32_t keeps;           // 1: the shards of tagged packets are wanted in the gather buffer, too
  uint64_t c;               // its first row
  uint64_t reserved[6];     // the maps are 64-byte aligned
  abi::TensorMap a_map;     // (rows, K)
  abi::TensorMap part_map;  // the same for copies: (rows, K / 64, 64), boxes of (piece_rows, piece_units, 64), not swizzled
  abi::TensorMap gather_map;  // (parts * planes, rows of a plane, K / parts)
  abi::TensorMap b_map;
  abi::TensorMap b_slice_map;  // of a K-major B with boxes as wide as a slice
  abi::TensorMap c_map;        // (planes, rows of a plane, N)
};

static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

// ---- where things are
// A chunk is 1 << chunk_shift rows (a block) of one part of K. Chunks travel, and are numbered, in groups of part_blocks blocks: the first part of
// all blocks of a group, then the second ... so that the tiles of a group can begin before their last part has come.
struct Chunk {
  uint32_t block, part;
};
MK_DEVICE uint32_t part_shift(const Parameters& p) { return kHasParts ? p.part_shift : 0; }
MK_DEVICE bool has_parts(const Parameters& p) { return kHasParts && p.part_shift != 0; }
MK_DEVICE uint64_t row_bytes(const Parameters& p) { return uint64_t(extent_k(p)) * 2; }
MK_DEVICE uint32_t part_k(const Parameters& p) { return extent_k(p) >> part_shift(p); }
MK_DEVICE uint32_t part_bytes(const Parameters& p) { return part_k(p) * 2; }  // of one row
MK_DEVICE uint32_t chunk_rows(const Parameters& p) { return 1u << p.chunk_shift; }
MK_DEVICE uint32_t num_blocks(const Parameters& p) { return (p.rows + chunk_rows(p) - 1) >> p.chunk_shift; }
MK_DEVICE uint32_t num_chunks(const Parameters& p) { return num_blocks(p) << part_shift(p); }
MK_DEVICE uint32_t blocks_of_group(const Parameters& p, uint32_t first) {
  const uint32_t left = num_blocks(p) - first;
  return left < p.part_blocks ? left : p.part_blocks;
}
MK_DEVICE uint32_t chunk_index(const Parameters& p, uint32_t block, uint32_t part) {
  if (!has_parts(p)) return block;
  const uint32_t first = block / p.part_blocks * p.part_blocks;
  return (first << part_shift(p)) + part * blocks_of_group(p, first) + (block - first);
}
MK_DEVICE Chunk chunk_at(const Parameters& p, uint32_t index) {
  if (!has_parts(p)) return Chunk{index, 0};
  const uint32_t first = index / (p.part_blocks << part_shift(p)) * p.part_blocks;
  const uint32_t in_group = index - (first << part_shift(p)), blocks = blocks_of_group(p, first);
  return Chunk{first + in_group % blocks, in_group / blocks};
}
MK_DEVICE uint32_t chunk_bytes(const Parameters& p, const Chunk& chunk) {
  const uint32_t left = p.rows - (chunk.block << p.chunk_shift);
  return (left < chunk_rows(p) ? left : chunk_rows(p)) * part_bytes(p);
}
MK_DEVICE uint64_t chunk_offset(const Parameters& p, const Chunk& chunk) {  // in the gather buffer, from shard_offset on; contiguous
  return (uint64_t(chunk.part) * kWorldSize * p.rows + (uint64_t(chunk.block) << p.chunk_shift)) * part_bytes(p);
}
MK_DEVICE const char* own_chunk(const Parameters& p,
                                const Chunk& chunk) {  // in this rank's shard, where the parts of a row lie side by side
  return reinterpret_cast<const char*>(p.a) + (uint64_t(chunk.block) << p.chunk_shift) * row_bytes(p) + chunk.part * part_bytes(p);
}
MK_DEVICE uint64_t shard_offset(const Parameters& p, uint32_t source) {
  return p.gather_offset + uint64_t(source) * p.rows * part_bytes(p);
}
MK_DEVICE bool keeps_own(const Parameters& p) { return kWorldSize > 1 && p.span > 1; }  // in the gather buffer, with a flag per chunk
MK_DEVICE uint32_t flag_index(const Parameters& p, uint32_t source, uint32_t chunk) { return source * num_chunks(p) + chunk; }
MK_DEVICE bool wait_chunk(const Entered& entered, const Parameters& p, uint32_t source, uint32_t chunk) {
  const abi::World& world = p.world;
  const uint32_t local = source % kR;  // its rail peer in this node forwards what comes from another node
  const uint32_t writer = source / kR == world.node || local == world.local_rank ? source : node_mate(world, local);
  return wait_flag(entered, p, flag_index(p, source, chunk), writer);
}

struct ChunkFlags {  // one part of the blocks of all shards, rank by rank, from block `first` on
  const Parameters& p;
  uint32_t first, part;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    const uint32_t blocks = num_blocks(p), source = (first + i) / blocks;
    return wait_chunk(entered, p, source, chunk_index(p, first + i - source * blocks, part));
  }
};

// What a lane of a warp reads of a chunk of this rank's shard, as copy_by_warp asks for it: the rows of a part do not follow each other. No division.
struct OwnRows {
  const char* at;
  uint32_t inside, run;  // of the bytes that follow each other, where it is, and how many they are
  uint64_t gap;          // from one run's end to the next
  MK_DEVICE ptx::Words operator()() {
    const ptx::Words words = ptx::load_input(at);
    at += kWarpStride, inside += kWarpStride;
    if (inside >= run) at += gap, inside -= run;  // once: a run is no shorter than the stride, or there is one
    return words;
  }
};
MK_DEVICE OwnRows own_rows(const Parameters& p, const Chunk& chunk) {
  const uint32_t begin = ptx::lane_index() * kWarpUnit, run = has_parts(p) ? part_bytes(p) : 0xffffffffu;
  return OwnRows{own_chunk(p, chunk) + begin, begin, run, row_bytes(p) - part_bytes(p)};
}

// ---- without CTAs for intra_comm: a warp of every CTA pushes chunks of this rank's shard, beside the tiles of its CTA
MK_DEVICE void push_by_warp(const Call& call, const Parameters& p) {
  const uint32_t others = num_comm_ctas(p);  // that send to other nodes
  if (ptx::cta_index() < others || (kR == 1 && !keeps_own(p))) return;
  const MaybeEntered entered = enter(call);
  if (!entered) return;
  const abi::World& world = p.world;
  Trace trace(world, 2);
#pragma unroll 1
  for (uint32_t index = ptx::cta_index() - others; index < num_chunks(p); index += ptx::cta_count() - others) {
    const Chunk chunk = chunk_at(p, index);
    const uint64_t begin = trace.now(), to = shard_offset(p, world.rank) + chunk_offset(p, chunk);
    OwnRows rows = own_rows(p, chunk);
    copy_by_warp(chunk_bytes(p, chunk), rows, [&](uint32_t offset, const ptx::Words& words) {
#pragma unroll
      for (uint32_t i = 1; i < kR; ++i) ptx::store_global(shared_heap(*entered, local_peer(world, i)) + to + offset, words);
      if (keeps_own(p)) ptx::store_global(shared_heap(*entered, world.local_rank) + to + offset, words);
    });
    raise_flag(*entered, p, flag_index(p, world.rank, index), keeps_own(p) ? 0 : 1);
    if (ptx::lane_index() == 0) trace.record(abi::kTraceSend, flag_index(p, world.rank, index), begin);
  }
}

// ---- tile -> coordinate: tiles of the own plane come first, then those of the node's other planes, then those of the other nodes. Inside each of
// these classes the planes advance together, because their chunks arrive together, in groups of group_m tile rows that share columns of B.
// Example: rank 1 of 4 ranks on 2 nodes (0 1 | 2 3), shards of 2 tile rows, B of one tile column, group_m at least 4. Written plane:row,
// tiles 0 to 7 are 1:0 1:1 (own), 0:0 0:1 (node), 3:0 2:0 3:1 2:1 (other nodes; the own rail, rank 3, first). With span 2, and planes of 4 tile
// rows, they are 0:0 0:1 0:2 0:3 (ranks 0 and 1), 1:0 1:1 1:2 1:3 (ranks 2 and 3).
struct Tiles : BasicOp<Config, Parameters> {
  using BasicOp::BasicOp;

  static constexpr bool kOnePlane = kPackets || kWorldSize == 1;  // few rows: divisions by what is known at run time only would take long
  MK_DEVICE uint32_t span() const { return kOnePlane ? kWorldSize : p.span; }
  MK_DEVICE uint32_t planes() const { return kWorldSize / span(); }
  MK_DEVICE uint32_t near_planes() const { return span() < kR ? kR / span() : 1; }  // with shards of this node
  MK_DEVICE uint32_t plane_rows() const { return span() * p.rows; }
  MK_DEVICE uint32_t tile_rows() const { return (plane_rows() + Shape::kBlockM - 1) / Shape::kBlockM; }  // of a plane
  // With pairs of CTAs a number means two rows of tiles, or what is left of them.
  static constexpr uint32_t kTakenRows = Shape::kCluster * Shape::kBlockM;
  MK_DEVICE uint32_t taken_rows() const { return (tile_rows() + Shape::kCluster - 1) / Shape::kCluster; }  // of tiles
  MK_DEVICE uint32_t num_tiles() const {
    const uint32_t tiles = taken_rows() * planes() * tiles_n();
    if constexpr (KShares::kMay) return shares().count();
    return Config::kSlices > 1 ? p.whole_tiles + Config::kSlices * (tiles - p.whole_tiles) : tiles;
  }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const { return coordinate_of(tile, Shape::kPaired ? ptx::cluster_rank() : 0); }
  MK_DEVICE TileCoordinate coordinate_of(uint32_t tile, uint32_t cta) const {  // of a pair
    uint32_t slice = 0;
    if (Config::kSlices > 1 && tile >= p.whole_tiles) {  // the last tiles are numbered by slices
      slice = 1 + (tile - p.whole_tiles) % Config::kSlices;
      tile = p.whole_tiles + (tile - p.whole_tiles) / Config::kSlices;
    }
    bool is_share = false, is_sum = false;
    uint32_t share = 0;
    if constexpr (KShares::kMay) tile = shares().tile_of(tile, is_share, is_sum, share);
    const uint32_t index = tile;
    const uint32_t per_plane = taken_rows() * tiles_n(), near = near_planes();
    uint32_t of_class = 1, nearest = 0;  // how many planes the tile's class has, and the nearest one's distance from the own one
    if (!kOnePlane && tile >= per_plane * near) {
      tile -= per_plane * near, of_class = planes() - near, nearest = near;
    } else if (!kOnePlane && tile >= per_plane) {
      tile -= per_plane, of_class = near - 1, nearest = 1;
    }
    const RasterPosition at =
        raster(tile, taken_rows() * of_class, tiles_n(), p.group_m);  // of all the class's rows: row i of each plane in turn
    const uint32_t row = quotient(at.row, of_class), plane = plane_at(nearest + at.row - row * of_class);
    return TileCoordinate{plane, row * Shape::kCluster + cta, at.column, slice, index, is_sum, false, is_share, share};
  }
  // The plane at a distance: 0 is the own one, then come those of the node from the next on, then those of the other nodes from the next on, of
  // each first the one in the own plane's place.
  MK_DEVICE uint32_t plane_at(uint32_t distance) const {
    if (span() == 1) return rank_at(p.world, distance / kR, distance % kR);
    const uint32_t near = near_planes(), groups = planes() / near, own = p.world.rank / span();
    return (own / near + distance / near) % groups * near + (own % near + distance % near) % near;
  }

  // ---- for the GEMM
  static constexpr uint32_t kParts = 1 << kMaxPartShift;
  MK_DEVICE uint32_t parts(const TileCoordinate&) const { return 1u << part_shift(p); }
  MK_DEVICE uint32_t steps(const TileCoordinate& c, uint32_t) const {
    if constexpr (KShares::kMay) {
      if (c.is_sum) return 0;
      if (c.is_share) return shares().first_step(steps_k(), c.share + 1) - first_step(c);
    }
    return steps_k() >> part_shift(p);
  }
  MK_DEVICE uint32_t first_step(const TileCoordinate& c) const {
    if constexpr (KShares::kMay) return c.is_share ? shares().first_step(steps_k(), c.share) : 0;
    return 0;
  }

  // ---- shares of K
  static constexpr bool kShares = KShares::kMay, kSums = KShares::kMay;
  MK_DEVICE KShares shares() const { return KShares{taken_rows() * planes() * tiles_n(), p.shares}; }
  MK_DEVICE char* packets(const Entered& entered) const {
    return reinterpret_cast<char*>(shared_signals(entered, p.world.local_rank)) + p.packet_offset;
  }
  MK_DEVICE uint32_t rows_of(const TileCoordinate& c) const {  // valid ones, of a pair's second tile perhaps none
    const uint32_t begin = c.m * Shape::kBlockM;
    return plane_rows() > begin ? plane_rows() - begin : 0;
  }
  MK_DEVICE void send_share(const Entered& entered, const float (&d)[Config::kBlockN / 2], const TileCoordinate& c) const {
    shares().send(packets(entered), d, c, rows_of(c));
  }
  MK_DEVICE void add_shares(const Entered& entered, const TileCoordinate& c) const {
    const uint32_t lane = ptx::lane_index(), rows = rows_of(c), row = KShares::warp() * kWarpRows + lane / 4;
    const uint32_t column = first_column<Config>(c) + lane % 4 * 2;
    const uint64_t first_row = uint64_t(c.plane) * plane_rows() + c.m * Shape::kBlockM + row;
    char* to = reinterpret_cast<char*>(p.c) + first_row * p.c_row_bytes + column * 2;
    shares().add_up(entered, packets(entered), c, rows, [&](uint32_t packet, const float (&sum)[kPacketWords]) {
      if (column + packet * 8 >= extent_n(p)) return;
      if (row < rows) ptx::store_word(to + packet * 16, ptx::pack<Shape::kElement>(sum[0], sum[1]));
      if (row + 8 < rows) ptx::store_word(to + packet * 16 + uint64_t(8) * p.c_row_bytes, ptx::pack<Shape::kElement>(sum[2], sum[3]));
    });
  }
  MK_DEVICE bool is_own(const TileCoordinate& c) const { return span() == 1 && c.plane == p.world.rank; }  // of the caller's array alone
  MK_DEVICE bool waits(const TileCoordinate& c, uint32_t) const { return !is_own(c) && !(kSums && c.is_sum) && !kTagged; }
  MK_DEVICE bool wait_inputs(const Entered& entered, const TileCoordinate& c, uint32_t part) const {  // warp function
    if constexpr (kPackets && !kTagged) return wait_gathered(entered, shards());
    const uint32_t begin = c.m * Shape::kBlockM, end = begin + kTakenRows < plane_rows() ? begin + kTakenRows : plane_rows();
    const uint32_t first = block_of(c.plane, begin), last = block_of(c.plane, end - 1);
    return wait_all(entered, ChunkFlags{p, first, part}, last - first + 1);
  }
  MK_DEVICE uint32_t block_of(uint32_t plane, uint32_t row) const {  // of a row of a plane, among the blocks of all shards
    const uint32_t source = row / p.rows;
    return (plane * span() + source) * num_blocks(p) + ((row - source * p.rows) >> p.chunk_shift);
  }
  MK_DEVICE const abi::TensorMap* a_map(const TileCoordinate& c) const { return is_own(c) ? &p.a_map : &p.gather_map; }
  MK_DEVICE int32_t a_plane(const TileCoordinate& c, uint32_t part) const { return is_own(c) ? 0 : part * planes() + c.plane; }
  MK_DEVICE int32_t a_k(const TileCoordinate& c, uint32_t part) const { return is_own(c) ? part * part_k(p) : 0; }
  MK_DEVICE const abi::TensorMap* b_map(const TileCoordinate& c) const {
    return Config::kSlices > 1 && !Config::kBRowMajor && c.slice != 0 ? &p.b_slice_map : &p.b_map;
  }
  MK_DEVICE void store(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    store_result(entered, c, panel, warpgroup, smem, c.plane);
  }
  static constexpr bool kGathers = kPackets;
  MK_DEVICE ShardPackets shards() const {
    return ShardPackets{reinterpret_cast<const char*>(p.a), p.rows * uint32_t(row_bytes(p)), p.ahead_offset, p.gather_offset};
  }
  using Read = ShardPackets::Round;
  MK_DEVICE Read read_ahead() const { return shards().read(shards().first()); }
  MK_DEVICE void gather(const Call& call, EntryGate& entries, const Read& own) const {
    if constexpr (kTagged) return tagged().begin(call, own);
    gather_shards(call, entries, shards(), own);
  }

  // ---- rows of A that the consumers bring themselves, out of tagged packets
  static constexpr bool kTakes = kTagged;
  using Unit = TaggedUnit;
  using Row = TaggedRow;
  MK_DEVICE TaggedShards tagged() const { return TaggedShards{shards()}; }
  MK_DEVICE uint32_t load_rows(const TileCoordinate&) const { return kTagged ? 0 : p.load_rows; }
  MK_DEVICE uint32_t taken_rows(const TileCoordinate& c) const { return rows_of(c) < Shape::kBlockM ? rows_of(c) : Shape::kBlockM; }
  MK_DEVICE Row taken_row(const TileCoordinate& c, uint32_t row) const {
    return tagged().row(p.world, (c.m * Shape::kBlockM + row) * uint32_t(row_bytes(p)));
  }
  MK_DEVICE const char* taken_from(const Call& call, const Row& row, uint32_t k) const { return tagged().from(call, row, k * 2); }
  MK_DEVICE bool keeps(const TileCoordinate& c) const { return p.keeps != 0 && c.n == 0; }  // in the gather buffer, by the first column
  MK_DEVICE void keep(const Entered& entered, const Row& row, uint32_t k, const ptx::Words& values) const {
    if (!row.is_own) ptx::store_global(shards().gathered(entered, 0, row.offset + k * 2), values);
  }

  static constexpr bool kMoves = kWarpsPush;
  MK_DEVICE void move(const Call& call) const { push_by_warp(call, p); }
};

// ---- intra_comm: chunks to the node's other ranks. Thread 0 copies and tells warp 1 which flags to raise, warp 2 waits for what is to be forwarded.
// Items: the chunks of this rank's shard, then those that the rail peers have put here.
MK_DEVICE uint32_t pushed_source(const Parameters& p, uint32_t item) {
  if (item < num_chunks(p)) return p.world.rank;
  return rail_peer(p.world, 1 + (item - num_chunks(p)) % kOtherNodes);
}
MK_DEVICE uint32_t pushed_chunk(const Parameters& p, uint32_t item) {
  return item < num_chunks(p) ? item : (item - num_chunks(p)) / kOtherNodes;
}
// A chunk to be copied to the same place in one or several heaps.
struct Copied {
  uint32_t bytes, flag;
  uint32_t row, unit;  // of this rank's shard, with parts: where the part map's box of a piece begins,
  uint32_t unit_end;   // and where the row of the part ends
  const char* from;    // else: its source, contiguous
  uint64_t to;         // in a heap
  bool is_own;
};
MK_DEVICE Copied own_copy(const Parameters& p, uint32_t index, uint64_t plane) {
  const Chunk chunk = chunk_at(p, index);
  const uint32_t row = chunk.block << p.chunk_shift, units = part_bytes(p) / kUnitBytes, unit = chunk.part * units;
  const uint32_t bytes = chunk_bytes(p, chunk), flag = flag_index(p, p.world.rank, index);
  return Copied{bytes, flag, row, unit, unit + units, own_chunk(p, chunk), plane + chunk_offset(p, chunk), true};
}
// What all have in common that CopyRing copies here. With parts the rows of a piece of this rank's shard do not follow each other, and one TMA load
// gathers them: a bulk load for each was half as slow again (docs/speed_log.md).
struct ShardPieces {
  using Item = Copied;
  const Parameters& p;
  MK_DEVICE uint32_t piece_bytes() const { return has_parts(p) ? p.piece_rows * p.piece_units * kUnitBytes : kPieceBytes; }
  MK_DEVICE uint32_t loaded(const Copied&, uint32_t bytes) const { return has_parts(p) ? piece_bytes() : bytes; }
  // The piece at offset. What a box has beyond the chunk is loaded, too, and not stored.
  MK_DEVICE void load(const Copied& c, uint32_t offset, void* smem, uint32_t bytes, uint64_t* bar) const {
    if (has_parts(p)) {
      ptx::tma_load_3d(smem, &p.part_map, bar, 0, c.unit, c.row);
    } else {
      ptx::bulk_load(smem, c.from + offset, bytes, bar);
    }
  }
  MK_DEVICE void next_piece(Copied& c) const {  // a division for each piece would halve the rate
    if constexpr (kHasParts) {
      c.unit += p.piece_units;
      if (c.unit == c.unit_end) c.unit -= part_bytes(p) / kUnitBytes, c.row += p.piece_rows;
    }
  }
};

struct PushedChunks : ShardPieces {
  Entered entered;
  uint32_t begin;
  Receiver& arrived;
  Mailbox& flags;
  Mailbox::Position& at;
  Trace& trace;
  uint64_t since;

  MK_DEVICE uint32_t first() const { return begin; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + num_intra_comm(p); }
  MK_DEVICE uint32_t end() const { return num_chunks(p) * kNodes; }
  MK_DEVICE Copied item(uint32_t index) const {
    if (kNodes == 1 || index < num_chunks(p)) return own_copy(p, index, shard_offset(p, p.world.rank));
    const uint32_t source = pushed_source(p, index), number = pushed_chunk(p, index);
    const Chunk chunk = chunk_at(p, number);
    const uint64_t offset = shard_offset(p, source) + chunk_offset(p, chunk);  // in the heap of every rank of the node
    return Copied{chunk_bytes(p, chunk), flag_index(p, source, number), 0, 0, 0, heap(p.world, p.world.local_rank) + offset, offset, false};
  }
  MK_DEVICE bool ready(const Copied& c) { return kNodes == 1 || c.is_own || arrived.try_take(); }
  MK_DEVICE bool wait(const Copied&) {  // own chunks are ready
    const bool ok = arrived.wait();
    since = trace.now();
    return ok;
  }
  MK_DEVICE void store(const Copied& c, uint32_t offset, const char* smem, uint32_t bytes) const {
#pragma unroll
    for (uint32_t i = 1; i < kR; ++i) ptx::bulk_store(shared_heap(entered, local_peer(p.world, i)) + c.to + offset, smem, bytes);
    if (c.is_own && keeps_own(p)) ptx::bulk_store(shared_heap(entered, p.world.local_rank) + c.to + offset, smem, bytes);
  }
  MK_DEVICE void announce(const Copied& c) {
    flags.post(entered, at, c.flag);
    trace.record(c.is_own ? abi::kTraceSend : abi::kTraceForward, c.flag, since);
    since = trace.now();
  }
};

// Posts what the rail peers have put here for this CTA to forward. One thread.
MK_DEVICE void wait_for_chunks(const Entered& entered, const Parameters& p, Mailbox& arrived, Mailbox::Position& at, uint32_t index) {
  uint32_t item = index;
  while (item < num_chunks(p)) item += num_intra_comm(p);
#pragma unroll 1
  for (; item < num_chunks(p) * kNodes; item += num_intra_comm(p)) {
    if (!wait_chunk(entered, p, pushed_source(p, item), pushed_chunk(p, item))) return;
    ptx::fence_proxy_async();  // here, not in the thread that copies: it would wait for its copies
    arrived.post(entered, at, item);
  }
}

MK_DEVICE void intra_comm_role(const Call& call, const Parameters& p, Storage& storage, uint32_t index) {
  const auto copy = [&](const Entered& entered, Receiver& arrived, Mailbox::Position& at) {
    Trace trace(p.world, 2);
    CopyRing ring(storage.pieces, storage.copy_barriers);
    PushedChunks chunks{{p}, entered, index, arrived, storage.announce, at, trace, trace.now()};
    ring.copy(chunks);
  };
  const auto wait = [&](const Entered& entered, Mailbox::Position& at, Mailbox::Position&) {
    if constexpr (kNodes > 1) wait_for_chunks(entered, p, storage.arrived, at, index);
  };
  // Flags of what is forwarded are raised here by the transport, those of the own chunks by this rank, if it keeps them.
  const auto nearest = [&](uint32_t flag) {
    const bool is_own = kNodes == 1 || flag - flag_index(p, p.world.rank, 0) < num_chunks(p);
    return keeps_own(p) && is_own ? 0u : 1u;
  };
  intra_comm<Announcer::kCopy>(call, p, storage, copy, wait, nearest);
}

// ---- inter_send: this rank's chunks to its rail peers (one thread)
struct StagedChunk : ShardPieces {  // a copy of one chunk into the staging area, where the network can read it
  uint32_t chunk;
  MK_DEVICE uint32_t first() const { return chunk; }
  MK_DEVICE uint32_t next(uint32_t) const { return chunk + 1; }
  MK_DEVICE uint32_t end() const { return chunk + 1; }
  MK_DEVICE Copied item(uint32_t index) const { return own_copy(p, index, p.send_offset); }
  MK_DEVICE bool ready(const Copied&) const { return true; }
  MK_DEVICE bool wait(const Copied&) const { return true; }
  MK_DEVICE void store(const Copied& c, uint32_t offset, const char* smem, uint32_t bytes) const {
    ptx::bulk_store(staging_area(p.world, c.to + offset), smem, bytes);
  }
  MK_DEVICE void announce(const Copied&) const {}
};

struct ShardToSend {
  const Parameters& p;
  CopyRing& ring;
  uint32_t chunk, staged = kStop;  // the one that is staged already
  MK_DEVICE uint32_t end() const { return num_chunks(p); }
  MK_DEVICE void stage(uint32_t next) {
    if (p.stage_send == 0 || next >= end() || next == staged) return;
    StagedChunk copied{{p}, next};
    ring.copy(copied);
    staged = next;
  }
  MK_DEVICE bool prepare(const Entered&, uint32_t next) {
    stage(next);
    chunk = next;
    return true;
  }
  MK_DEVICE uint32_t puts() const { return kNodes - 1; }
  MK_DEVICE Put put(const Call& call, uint32_t channel, uint32_t i) const {
    const Chunk at = chunk_at(p, chunk);
    const uint64_t offset = chunk_offset(p, at), src = p.send_offset + offset, dst = shard_offset(p, p.world.rank) + offset;
    const uint32_t peer = rail_peer(p.world, 1 + i), flag = flag_index(p, p.world.rank, chunk);
    return Put{channel, peer, src, dst, chunk_bytes(p, at), flag_offset(p, flag), call.epoch()};
  }
};

MK_DEVICE void inter_send_role(const Call& call, const Parameters& p, Storage& storage, uint32_t index) {  // one thread
  if constexpr (kNodes > 1) {
    Trace trace(p.world, 2);
    CopyRing ring(storage.pieces, storage.copy_barriers);
    ShardToSend chunks{p, ring, 0};
    chunks.stage(index);  // while the others enter
    if (const MaybeEntered entered = enter_alone(call)) put_chunks(*entered, chunks, 1 + index, index, num_inter_send(p), trace);
  }
}

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = shared_storage<Storage>();
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = kEarly ? coming_call(p.world, role) : begin_call_ahead(p.world, role);
  if (role == abi::kInterSend && ptx::thread_index() < 32 && ptx::elected()) inter_send_role(call, p, storage, cta - first_inter_send(p));
  if constexpr (Config::kIntraComm > 0) {
    if (role == abi::kIntraComm) intra_comm_role(call, p, storage, cta);
  }
  compute_role(call, Tiles(p), storage.gemm);
}

}  // namespace mkernel
