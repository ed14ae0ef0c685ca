// allgather_gemm: C (M, N) = allgather(A) (M, K) * B (K, N). Included by the generated source after `struct Config`.
//
// intra_comm pushes this rank's shard, chunk by chunk, into the gather buffers of the node's other ranks and raises one flag per chunk; across
// nodes inter_send puts the same chunks to each rail peer, whose intra_comm forwards them. Compute starts on the own shard. On one node the
// chunks may also be pushed by a warp of each computing CTA (kIntraComm 0), so that no CTA does anything else.
//
// Tiles cover planes: a plane is the rows of the shards of p.span ranks that follow each other. With one shard per plane (span 1) a tile of the own
// shard reads the caller's array and waits for nobody. With more, a tile may reach over the end of a shard, so that few rows of each rank share a
// tile and B is read once for all; the own shard then lies in this rank's gather buffer, too. Tiles that have rows of the own shard only read the
// caller's array all the same; the others wait for the chunks of all their rows.
//
// With few rows (kPackets) shards travel in packets (comm/shard_packets.cuh, tagged_packets.cuh), moved by the consumers, and there is one plane.
#pragma once
#include "comm/ring.cuh"
#include "comm/shard_packets.cuh"
#include "comm/tagged_packets.cuh"
#include "gather/layout.cuh"

namespace mkernel {

// ---- without CTAs for intra_comm: a warp of every CTA pushes chunks of this rank's shard, beside the tiles of its CTA
MK_DEVICE void push_by_warp(const Call& call, const Parameters& p, const KeptRows& kept) {
  const uint32_t others = num_comm_ctas(p);  // that send to other nodes
  if (ptx::cta_index() < others || (kR == 1 && !keeps_own(p))) return;
  const MaybeEntered entered = enter(call);
  if (!entered) return;
  const abi::World& world = p.world;
  Trace trace(world, 2);
#pragma unroll 1
  for (uint32_t index = ptx::cta_index() - others; index < num_chunks(p); index += ptx::cta_count() - others) {
    const uint32_t number = kept.number(p, index);
    const Chunk chunk = chunk_at(p, number);
    const uint64_t begin = trace.now(), to = shard_offset(p, world.rank) + chunk_offset(p, chunk);
    const bool is_kept = kept.are_in(p, chunk);
    OwnRows rows = own_rows(p, chunk);
    copy_by_warp(chunk_bytes(p, chunk), rows, [&](uint32_t offset, const ptx::Words& words) {
#pragma unroll
      for (uint32_t i = 1; i < kR; ++i) ptx::store_global(shared_heap(*entered, local_peer(world, i)) + to + offset, words);
      if (is_kept) ptx::store_global(shared_heap(*entered, world.local_rank) + to + offset, words);
    });
    raise_flag(*entered, p, flag_index(p, world.rank, number), keeps_own(p) ? 0 : 1);
    if (ptx::lane_index() == 0) trace.record(abi::kTraceSend, flag_index(p, world.rank, number), begin);
  }
}

// ---- tile -> coordinate: tiles of the own shard come first, then the others of its plane, then those of the node's other planes, then those of the
// other nodes. Inside each of these classes the planes, and the shards of the own one, advance together, because their chunks arrive together, in
// groups of group_m tile rows that share columns of B.
// Example: rank 1 of 4 ranks on 2 nodes (0 1 | 2 3), shards of 2 tile rows, B of one tile column, group_m at least 4. Written plane:row,
// tiles 0 to 7 are 1:0 1:1 (own), 0:0 0:1 (node), 3:0 2:0 3:1 2:1 (other nodes; the own rail, rank 3, first). With span 2, and planes of 3 tile
// rows, they are 0:2 (rank 1), 0:0 0:1 (the latter has rows of both ranks), 1:0 1:1 1:2 (ranks 2 and 3).
struct Tiles : BasicOp<Config, Parameters> {
  using BasicOp::BasicOp;

  static constexpr bool kOnePlane = kPackets || kWorldSize == 1;  // few rows: divisions by what is known at run time only would take long
  MK_DEVICE uint32_t span() const { return kOnePlane ? kWorldSize : p.span; }
  MK_DEVICE uint32_t planes() const { return kWorldSize / span(); }
  MK_DEVICE uint32_t near_planes() const { return span() < kR ? kR / span() : 1; }  // with shards of this node
  MK_DEVICE uint32_t plane_rows() const { return span() * p.rows; }
  MK_DEVICE uint32_t tile_rows() const {  // of a plane
    if constexpr (Shape::kSwapped) return plane_rows() == 0 ? 0 : p.last_row + 1;
    return (plane_rows() + Shape::kBlockM - 1) / Shape::kBlockM;
  }
  // With pairs of CTAs a number means two rows, or two columns, of tiles, or what is left of them.
  MK_DEVICE uint32_t taken_height() const { return Shape::kClusterM * block_rows(); }
  MK_DEVICE uint32_t taken_rows() const { return (tile_rows() + Shape::kClusterM - 1) / Shape::kClusterM; }  // of tiles
  MK_DEVICE uint32_t num_tiles() const {
    const uint32_t tiles = taken_rows() * planes() * taken_columns();
    if constexpr (KShares::kMay) return shares().count();
    return Config::kSlices > 1 ? p.whole_tiles + Config::kSlices * (tiles - p.whole_tiles) : tiles;
  }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const { return coordinate_of(tile, Shape::kPaired ? ptx::cluster_rank() : 0); }
  MK_DEVICE TileCoordinate coordinate_of(uint32_t tile, uint32_t cta) const {
    uint32_t slice = 0;
    if (Config::kSlices > 1 && tile >= p.whole_tiles) {  // the last tiles are numbered by slices
      slice = 1 + (tile - p.whole_tiles) % Config::kSlices;
      tile = p.whole_tiles + (tile - p.whole_tiles) / Config::kSlices;
    }
    bool is_share = false, is_sum = false;
    uint32_t share = 0;
    if constexpr (KShares::kMay) tile = shares().tile_of(tile, is_share, is_sum, share);
    const uint32_t index = tile;
    if constexpr (kOnePlane) {
      const RasterPosition at = raster(tile, taken_rows(), taken_columns(), p.group_m);
      return of_cta(TileCoordinate{0, at.row, at.column, slice, index, is_sum, false, is_share, is_narrow(), share}, cta);
    }
    const uint32_t columns = taken_columns(), per_plane = taken_rows() * columns, near = near_planes(), own = own_rows();
    uint32_t of_class = 1, nearest = 0, rows = taken_rows();  // planes of the tile's class, the nearest one's distance, rows of each
    const bool is_first = tile < own * columns, is_later = !is_first && tile < per_plane;  // of the own plane
    if (is_first) {
      rows = own;
    } else if (is_later) {
      tile -= own * columns, rows -= own;
    } else if (tile >= per_plane * near) {
      tile -= per_plane * near, of_class = planes() - near, nearest = near;
    } else {
      tile -= per_plane, of_class = near - 1, nearest = 1;
    }
    const RasterPosition at = raster(tile, rows * of_class, columns, p.group_m);  // of all the class's rows: row i of each plane in turn
    uint32_t row = quotient(at.row, of_class);
    const uint32_t plane = plane_at(nearest + at.row - row * of_class);
    if (is_first) row += first_row(own_shard());
    if (is_later) row = later_row(row);
    return of_cta(TileCoordinate{plane, row, at.column, slice, index, is_sum, false, is_share, is_narrow(), share}, cta);
  }
  // Of the shards of a plane: the row of tiles in which a shard begins, and the first that has no rows of the shard before.
  MK_DEVICE uint32_t begin_row(uint32_t shard) const { return shard < span() ? shard * p.rows / taken_height() : taken_rows(); }
  MK_DEVICE uint32_t first_row(uint32_t shard) const { return (shard * p.rows + taken_height() - 1) / taken_height(); }
  MK_DEVICE uint32_t own_shard() const { return p.world.rank - quotient(p.world.rank, span()) * span(); }
  MK_DEVICE uint32_t own_rows() const {  // of tiles that have rows of the own shard only
    if (span() == 1) return taken_rows();
    const uint32_t first = first_row(own_shard()), end = begin_row(own_shard() + 1);
    return end < first ? 0 : end - first;
  }
  MK_DEVICE KeptRows kept_rows() const {
    if (span() == 1) return KeptRows{0, p.rows};
    const uint32_t begin = own_shard() * p.rows, first = first_row(own_shard());
    return KeptRows{first * taken_height() - begin, (first + own_rows()) * taken_height() - begin};
  }
  // The others of the own plane, as they come: that in which the own shard begins, and then of all others in turn, from the next shard on, the row
  // in which one begins, the next one; at last those that some shards have more of than others.
  MK_DEVICE uint32_t later_row(uint32_t index) const {
    const uint32_t own = own_shard(), others = span() - 1, of_each = p.rows / taken_height(), begun = begin_row(own);
    if (begun < first_row(own) && begun < begin_row(own + 1) && index-- == 0) return begun;
    const auto shard_at = [&](uint32_t distance) { return own + distance < span() ? own + distance : own + distance - span(); };
    const uint32_t row = quotient(index, others);
    if (row < of_each) return begin_row(shard_at(1 + index - row * others)) + row;
    index -= of_each * others;
#pragma unroll 1
    for (uint32_t distance = 1; distance < span(); ++distance) {
      const uint32_t next = begin_row(shard_at(distance)) + of_each, more = begin_row(shard_at(distance) + 1) - next;
      if (index < more) return next + index;
      index -= more;
    }
    return 0;  // there are no more
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
  static constexpr bool kShares = KShares::kMay, kSums = kShares && Shape::kClusterK == 1;
  MK_DEVICE KShares shares() const { return KShares{taken_rows() * planes() * taken_columns(), p.shares, block_rows()}; }
  MK_DEVICE char* packets(const Entered& entered) const {
    return reinterpret_cast<char*>(shared_signals(entered, p.world.local_rank)) + p.packet_offset;
  }
  MK_DEVICE uint32_t rows_of(const TileCoordinate& c) const {  // valid ones, of a pair's second tile perhaps none
    const uint32_t begin = c.m * block_rows();
    return plane_rows() > begin ? plane_rows() - begin : 0;
  }
  MK_DEVICE void send_share(const Entered& entered, const float (&d)[Shape::kHeld], const TileCoordinate& c) const {
    shares().send(packets(entered), d, c, Shape::kSwapped ? load_rows(c) : rows_of(c));
  }
  // With swapped operands a lane has columns r and r + 8 of two rows; with the lane of the next column it exchanges one of each, so that both store whole
  // words: the lane of the even column in the first of the rows, the other one in the second.
  MK_DEVICE void add_swapped(const Entered& entered, const TileCoordinate& c) const {
    const uint32_t lane = ptx::lane_index(), odd = lane / 4 % 2, rows = rows_of(c), row = lane % 4 * 2 + odd;
    const uint32_t column = first_column<Config>(c) + KShares::warp() * kWarpRows + lane / 4 - odd;
    char* to = reinterpret_cast<char*>(p.c) + (uint64_t(c.plane) * plane_rows() + c.m * block_rows() + row) * p.c_row_bytes + column * 2;
    shares().add_up(entered, packets(entered), c, load_rows(c), [&](uint32_t packet, const float (&sum)[kPacketWords]) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {  // of columns 8 apart
        const float kept = odd ? sum[2 * i + 1] : sum[2 * i], other = ptx::shuffle_xor(odd ? sum[2 * i] : sum[2 * i + 1], 4);
        const uint32_t word = odd ? ptx::pack<Shape::kElement>(other, kept) : ptx::pack<Shape::kElement>(kept, other);
        if (packet * 8 + row < rows && column + i * 8 < extent_n(p))
          ptx::store_word(to + uint64_t(packet) * 8 * p.c_row_bytes + i * 16, word);
      }
    });
  }
  // Where a thread stores the sum of a packet.
  struct SumPlace {
    char* to;
    uint64_t row_bytes;
    uint32_t row, rows, columns;  // in the tile, of the tile, and of C from the thread's first column on
    MK_DEVICE void operator()(uint32_t packet, const float (&sum)[kPacketWords]) const {
      if (packet * 8 >= columns) return;
      if (row < rows) ptx::store_word(to + packet * 16, ptx::pack<Shape::kElement>(sum[0], sum[1]));
      if (row + 8 < rows) ptx::store_word(to + packet * 16 + 8 * row_bytes, ptx::pack<Shape::kElement>(sum[2], sum[3]));
    }
  };
  MK_DEVICE SumPlace sum_place(const TileCoordinate& c) const {
    const uint32_t lane = ptx::lane_index(), row = KShares::warp() * kWarpRows + lane / 4;
    const uint32_t column = first_column<Config>(c) + lane % 4 * 2;
    const uint64_t first_row = uint64_t(c.plane) * plane_rows() + c.m * block_rows() + row;
    char* to = reinterpret_cast<char*>(p.c) + first_row * p.c_row_bytes + column * 2;
    return SumPlace{to, p.c_row_bytes, row, rows_of(c), extent_n(p) > column ? extent_n(p) - column : 0};
  }
  MK_DEVICE void add_shares(const Entered& entered, const TileCoordinate& c) const {
    if constexpr (Shape::kSwapped) return add_swapped(entered, c);
    shares().add_up(entered, packets(entered), c, rows_of(c), sum_place(c));
  }
  template <class Storage>
  MK_DEVICE void add_in_cluster(const MaybeEntered& entered, Storage& storage, const float (&d)[Shape::kHeld], const TileCoordinate& c,
                                uint32_t round, bool has_more) const {
    const SumPlace place = sum_place(c);
    ClusterSums<Config>::add(storage, d, rows_of(c), round, has_more, [&](uint32_t packet, const float (&sum)[kPacketWords]) {
      if (entered) place(packet, sum);
    });
  }
  // Where the own shard begins, from the beginning of a tile's plane on; wraps if it is in an earlier one.
  MK_DEVICE uint32_t own_begin(const TileCoordinate& c) const { return p.world.rank * p.rows - c.plane * plane_rows(); }
  MK_DEVICE uint32_t end_of(uint32_t begin) const { return begin + taken_height() < plane_rows() ? begin + taken_height() : plane_rows(); }
  MK_DEVICE bool is_own(const TileCoordinate& c) const {  // of the caller's array alone: so are both tiles of a pair, or none
    if constexpr (kOnePlane) return !kPackets;
    if (span() == 1) return c.plane == p.world.rank;
    const uint32_t begin = c.m / Shape::kClusterM * taken_height(), end = end_of(begin);
    return begin - own_begin(c) < p.rows && end - own_begin(c) <= p.rows;
  }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const {
    const uint32_t row = c.m * block_rows();
    return is_own(c) ? row - own_begin(c) : row;
  }
  MK_DEVICE bool waits(const TileCoordinate& c, uint32_t) const { return !is_own(c) && !(kSums && c.is_sum) && !kTagged; }
  MK_DEVICE bool wait_inputs(const Entered& entered, const TileCoordinate& c, uint32_t part) const {  // warp function
    if constexpr (kPackets && !kTagged) return wait_gathered(entered, shards());
    const uint32_t begin = c.m * block_rows(), end = end_of(begin);
    const uint32_t first = block_of(c.plane, begin), last = block_of(c.plane, end - 1);
    return wait_all(entered, ChunkFlags{p, first, part}, last - first + 1);
  }
  MK_DEVICE uint32_t block_of(uint32_t plane, uint32_t row) const {  // of a row of a plane, among the blocks of all shards
    const uint32_t source = row / p.rows;
    return (plane * span() + source) * num_blocks(p) + ((row - source * p.rows) >> p.chunk_shift);
  }
  MK_DEVICE const abi::TensorMap* a_map(const TileCoordinate& c) const {
    if (is_own(c)) return BasicOp::a_map(c);
    return is_last_row(c) ? &p.gather_tail_map : &p.gather_map;
  }
  MK_DEVICE int32_t a_plane(const TileCoordinate& c, uint32_t part) const { return is_own(c) ? 0 : part * planes() + c.plane; }
  MK_DEVICE int32_t a_k(const TileCoordinate& c, uint32_t part) const { return is_own(c) ? part * part_k(p) : 0; }
  MK_DEVICE void prefetch_a() const {
    if constexpr (!kPackets) return BasicOp::prefetch_a();
    ptx::prefetch_map(&p.gather_map);  // tiles read what has been gathered only
    ptx::prefetch_map(&p.gather_tail_map);
  }
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
  MK_DEVICE uint32_t load_rows(const TileCoordinate& c) const { return kTagged ? 0 : BasicOp::load_rows(c); }
  MK_DEVICE uint32_t taken_rows(const TileCoordinate& c) const { return rows_of(c) < block_rows() ? rows_of(c) : block_rows(); }
  MK_DEVICE Row taken_row(const TileCoordinate& c, uint32_t row) const {
    return tagged().row(p.world, (c.m * block_rows() + row) * uint32_t(row_bytes(p)));
  }
  MK_DEVICE const char* taken_from(const Call& call, const Row& row, uint32_t k) const { return tagged().from(call, row, k * 2); }
  MK_DEVICE bool keeps(const TileCoordinate& c) const { return p.keeps != 0 && c.n == 0; }  // in the gather buffer, by the first column
  MK_DEVICE void keep(const Entered& entered, const Row& row, uint32_t k, const ptx::Words& values) const {
    if (!row.is_own) ptx::store_global(shards().gathered(entered, 0, row.offset + k * 2), values);
  }

  static constexpr bool kMoves = kWarpsPush;
  MK_DEVICE void move(const Call& call) const { push_by_warp(call, p, kept_rows()); }
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
  bool is_own, is_kept;
};
MK_DEVICE Copied own_copy(const Parameters& p, uint32_t index, uint64_t plane, const KeptRows& kept) {
  const Chunk chunk = chunk_at(p, index);
  const uint32_t row = chunk.block << p.chunk_shift, units = part_bytes(p) / kUnitBytes, unit = chunk.part * units;
  const uint32_t bytes = chunk_bytes(p, chunk), flag = flag_index(p, p.world.rank, index);
  return Copied{bytes, flag, row, unit, unit + units, own_chunk(p, chunk), plane + chunk_offset(p, chunk), true, kept.are_in(p, chunk)};
}
// What all have in common that CopyRing copies here. With parts the rows of a piece of this rank's shard do not follow each other, and one TMA load
// gathers them: a bulk load for each was half as slow again (docs/speed_log.md).
struct ShardPieces {
  using Item = Copied;
  const Parameters& p;
  MK_DEVICE uint32_t piece_bytes() const { return has_parts(p) ? p.piece_rows * p.piece_units * kUnitBytes : kPieceBytes; }
  // Where a shard begins inside a sector of L2, whole sectors cross the links all the same: parts of them take twice as long (docs/speed_log.md).
  MK_DEVICE uint32_t skew(const Copied& c) const { return has_parts(p) ? 0 : c.to % kSwizzleBytes; }
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

// A store goes to all mates: what is in flight to three takes as much room in the links as three stores to one (docs/speed_log.md).
constexpr uint32_t kPushedBehind = kR < 4 ? kPiecesBehind : kR < 8 ? 2 : 1;
struct PushedChunks : ShardPieces {
  MaybeEntered entered;  // when something is stored
  char* heaps[kR];       // from then on, by distance: not worked out again for each piece
  uint32_t begin;
  Receiver& arrived;
  Mailbox& flags;
  Mailbox::Position& at;
  Trace& trace;
  KeptRows kept;
  uint64_t since;

  MK_DEVICE bool enter(const MaybeEntered& call) {
    entered = call, since = trace.now();
    if (!entered) return false;
#pragma unroll
    for (uint32_t i = 0; i < kR; ++i) heaps[i] = shared_heap(*entered, local_peer(p.world, i));
    return true;
  }

  MK_DEVICE uint32_t first() const { return begin; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + num_intra_comm(p); }
  MK_DEVICE uint32_t end() const { return num_chunks(p) * kNodes; }
  MK_DEVICE Copied item(uint32_t index) const {
    if (kNodes == 1 || index < num_chunks(p)) return own_copy(p, kept.number(p, index), shard_offset(p, p.world.rank), kept);
    const uint32_t source = pushed_source(p, index), number = pushed_chunk(p, index);
    const Chunk chunk = chunk_at(p, number);
    const uint64_t offset = shard_offset(p, source) + chunk_offset(p, chunk);  // in the heap of every rank of the node
    return Copied{
        chunk_bytes(p, chunk), flag_index(p, source, number), 0, 0, 0, heap(p.world, p.world.local_rank) + offset, offset, false, false};
  }
  MK_DEVICE bool ready(const Copied& c) { return kNodes == 1 || c.is_own || arrived.try_take(); }
  MK_DEVICE bool wait(const Copied&) {  // own chunks are ready
    const bool ok = arrived.wait();
    since = trace.now();
    return ok;
  }
  MK_DEVICE void store(const Copied& c, uint32_t offset, const char* smem, uint32_t bytes) const {
    const uint64_t to = c.to + offset;
#pragma unroll
    for (uint32_t i = 1; i < kR; ++i) ptx::bulk_store(heaps[i] + to, smem, bytes);
    if (c.is_kept) ptx::bulk_store(heaps[0] + to, smem, bytes);
  }
  MK_DEVICE void announce(const Copied& c) {
    flags.post(*entered, at, c.flag);
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
  const auto copy = [&](const auto& enter, Receiver& arrived, Mailbox::Position& at) {
    Trace trace(p.world, 2);
    CopyRing ring(storage.pieces, storage.copy_barriers);
    PushedChunks chunks{{p}, MaybeEntered::not_yet(call), {}, index, arrived, storage.announce, at, trace, Tiles(p).kept_rows(), 0};
    // The shard is there from the start: what is loaded of it need not wait for the other ranks.
    ring.copy<kPushedBehind>(chunks, [&] { return chunks.enter(enter()); });
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
  MK_DEVICE Copied item(uint32_t index) const { return own_copy(p, index, p.send_offset, KeptRows{0, p.rows}); }
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
