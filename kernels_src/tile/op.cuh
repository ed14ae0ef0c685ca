// What a fused kernel tells the GEMM about its tiles: a TileOp, most of which BasicOp provides.
#pragma once
#include "comm/sync.cuh"
#include "concepts.cuh"
#include "tile/shape.cuh"

namespace mkernel {

// The terms of a canonical sum, and which of them is the own one; the others are addends.
struct Level {
  uint32_t terms, own;
};

// The tiles that the CTAs of this rank multiply, where their operands are, and where their results go. A tile is done in parts: each begins when
// its own inputs are there. `c` is the coordinate of a tile. Functions are called by one thread, if nothing else is said.
template <class Op, class Config>
concept TileOp = requires(const Op op, const Call& call, const Entered& entered, const TileCoordinate& c, uint32_t tile, uint32_t i,
                          uint32_t part, uint32_t panel, uint32_t warpgroup, const char* smem, float (&d)[GemmShape<Config>::kHeld]) {
  op.p.fields;  // the parameters of the kernel, with fields.cuh's

  // ---- which tiles
  { op.num_tiles() } -> Same<uint32_t>;  // that the CTAs of this rank share; with pairs of CTAs (pair.cuh) a number means both tiles,
  { op.assigned(i) } -> Same<uint32_t>;  // the i-th tile that only this CTA does, before all others; kStop: no more
  { op.coordinate(tile) } -> Same<TileCoordinate>;      // and the coordinate is that of this CTA's: the one function from number to place
  requires Same<decltype(Op::kParts), const uint32_t>;  // parts of a tile, at most
  { op.parts(c) } -> Same<uint32_t>;                    // parts of this one; 0: there is no such tile
  { op.has_few_bytes() } -> Same<bool>;                 // the operands of a call: memory does not bind

  // ---- their inputs
  { op.waits(c, part) } -> Same<bool>;                 // false: the part reads this rank's own inputs only. Of both tiles of a pair alike
  { op.wait_inputs(entered, c, part) } -> Same<bool>;  // waits for the part's inputs, of both tiles of a pair; false: failed. Warp function
  { op.steps(c, part) } -> Same<uint32_t>;             // k steps of the part; the parts of a tile follow each other in K,
  { op.first_step(c) } -> Same<uint32_t>;              // from this k step on
  { op.load_rows(c) } -> Same<uint32_t>;               // how many rows of the tile of A are loaded: those of the map's box, or none
  { op.a_map(c) } -> Same<const abi::TensorMap*>;      // where the tile's rows of A are: map, row, plane and k
  { op.a_row(c) } -> Same<int32_t>;
  { op.a_plane(c, part) } -> Same<int32_t>;
  { op.a_k(c, part) } -> Same<int32_t>;
  { op.b_map(c) } -> Same<const abi::TensorMap*>;  // where its columns of B are; of a slice a map with boxes of its width
  { op.b_plane(c) } -> Same<int32_t>;
  op.prefetch_a();                                       // the maps that rows of A are loaded by. One thread
  requires Same<decltype(Op::kShortTiles), const bool>;  // whether c.is_short may be true; of results only, not of partial tiles
  requires !Op::kShortTiles || GemmShape<Config>::kHasHalves;

  // ---- partial tiles (partial.cuh) that are added to the product
  requires Same<decltype(Op::kAdds), const bool>;  // false: there are none
  { op.addends(c, part) } -> Same<uint32_t>;       // how many the part adds,
  { op.addend(c, i) } -> Same<const char*>;        // in the order of i
  // True: the sum must not depend on who owns the tile. The own product is rounded as the addends were, and has a place among them: each level is a
  // sum of its own, rounded, that has a place in the next one. Tiles with c.is_sum have their own contribution among the addends.
  requires Same<decltype(Op::kCanonical), const bool>;
  requires !Op::kCanonical || requires {
    requires Same<decltype(Op::kLevels), const uint32_t>;
    { op.level(i) } -> Same<Level>;
  };

  // ---- what the coordinates of its tiles may say: that they are sums, short, or shares of K
  requires Same<decltype(Op::kSums), const bool> && Same<decltype(Op::kShares), const bool>;
  requires !Op::kShares || requires {
    op.send_share(entered, d, c);  // what a consumer thread has of a share,
    op.add_shares(entered, c);     // and what it adds up, and stores
    requires(Op::kSums || GemmShape<Config>::kClusterK > 1) && !Op::kAdds && !Op::kExchanges;
  };

  // ---- the result
  requires Same<decltype(Op::kExchanges), const bool>;
  requires !Op::kExchanges || requires {
    { op.is_there(c) } -> Same<bool>;  // whether there is a tile: else a CTA of a cluster multiplies beside the others;
    op.exchange(entered, d, c);        // each consumer thread replaces its values by those to store,
  };
  requires Same<decltype(Op::kStoresRows), const bool>;  // or stores them itself
  requires !GemmShape<Config>::kGated || requires {
    { op.clamp() } -> Same<float>;  // gated.cuh
    requires !Op::kAdds && !Op::kExchanges;
  };
  { op.is_partial(c) } -> Same<bool>;            // true: stored as a partial tile; false: rounded and stored as a result
  { op.rows(c) } -> Same<uint32_t>;              // valid rows of it; asked of partial tiles, and of all with kMasks
  op.store(entered, c, panel, warpgroup, smem);  // issues the stores of one block
  // True: what comes after a result's valid rows is not the tile's to write. Blocks that are not full are not given to store(); the consumers write
  // them to the row-major matrix whose first element of the tile's first row, in its column 0, is at result(entered, c).
  requires Same<decltype(Op::kMasks), const bool>;
  requires !Op::kMasks || requires {
    { op.result(entered, c) } -> Same<char*>;
    { op.result_row_bytes() } -> Same<uint32_t>;
  };
  requires Same<decltype(Op::kAnnounces), const bool>;
  { op.announces(c) } -> Same<bool>;  // whether others wait for the tile;
  op.raise(entered, tile);            // raises its flags, its stores being complete. Warp function

  // ---- beside the tiles
  requires Same<decltype(Op::kAnnouncesEntry), const bool>;  // false: the kernel has announced its entry before it came here
  requires Same<decltype(Op::kMoves), const bool>;
  requires !Op::kMoves || requires { op.move(call); };  // moves data while the CTA computes. Warp function
  requires Same<decltype(Op::kGathers), const bool>;
  // What consumer threads do before there are tiles, all of a CTA's, and what they read for it while barriers are initialized. All tiles wait for it,
  // so B of the first one is loaded meanwhile.
  requires !Op::kGathers || requires(EntryGate& entries, const typename Op::Read& read) {
    { op.read_ahead() } -> Same<typename Op::Read>;
    op.gather(call, entries, read);
  };
  // Whether the consumers bring rows of A into shared memory themselves (taken.cuh), in units of 8 values. Then load_rows() is 0.
  requires Same<decltype(Op::kTakes), const bool>;
  requires !Op::kTakes || requires(EntryGate& entries, typename Op::Unit(&units)[4], const char* (*at)(uint32_t),
                                   const typename Op::Row& row, const ptx::Words& values) {
    { op.taken_rows(c) } -> Same<uint32_t>;                     // valid ones of the tile
    { op.taken_row(c, i) } -> Same<typename Op::Row>;           // one of them,
    { op.taken_from(call, row, i) } -> Same<const char*>;       // and where its unit with value i is
    op.tagged().look_ahead(call, entries, units, i, at);        // looks, while the gate is shut, and
    { op.tagged().take(entered, units, i, at) } -> Same<bool>;  // waits for those whose bit is 1 in i, the caller's own not among them
    { op.keeps(c) } -> Same<bool>;                              // whether what the tile brings is wanted besides,
    op.keep(entered, row, i, values);                           // and where to
    requires Op::kParts == 1 && !Op::kAdds && !Op::kShortTiles && Config::kSlices == 1 && !GemmShape<Config>::kPaired;
  };
  requires Same<decltype(Op::kFinishes), const bool>;
  requires !Op::kFinishes || requires { op.finish(entered); };  // what consumer warps do when there are no more tiles. Warp function
};

// What most ops have in common: no tiles of one CTA alone, nothing to add, results instead of partial tiles, no flags. Rows of tiles are the p.rows
// rows of plane 0 of the maps p.a_map, p.a_tail_map and p.c_map, with all of K; columns are those of p.b_map.
template <class Config, class Parameters>
struct BasicOp {
  using Shape = GemmShape<Config>;
  const Parameters& p;
  MK_DEVICE explicit BasicOp(const Parameters& parameters) : p(parameters) {}

  static constexpr bool kAdds = false, kMoves = false, kAnnounces = false, kExchanges = false, kMasks = false, kShortTiles = false;
  static constexpr bool kAnnouncesEntry = true, kGathers = false, kFinishes = false, kCanonical = false;
  static constexpr bool kSums = false, kShares = false, kStoresRows = false, kTakes = false;
  struct Read {};
  MK_DEVICE Read read_ahead() const { return {}; }
  MK_DEVICE uint32_t assigned(uint32_t) const { return kStop; }
  MK_DEVICE uint32_t addends(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE const char* addend(const TileCoordinate&, uint32_t) const { return nullptr; }
  MK_DEVICE uint32_t first_step(const TileCoordinate&) const { return 0; }
  MK_DEVICE bool is_partial(const TileCoordinate&) const { return false; }
  MK_DEVICE bool announces(const TileCoordinate&) const { return false; }
  MK_DEVICE void raise(const Entered&, uint32_t) const {}

  // Rows of a tile, and stages: with swapped operands the call's.
  MK_DEVICE uint32_t block_rows() const {
    if constexpr (Shape::kSwapped) return p.block_rows;
    return Shape::kBlockM;
  }
  MK_DEVICE uint32_t rows_of_warpgroup() const { return Shape::kSplitsRows ? block_rows() / kConsumerWarpgroups : block_rows(); }
  MK_DEVICE uint32_t stages() const { return p.stages; }
  // Panels below each other of a warpgroup's blocks, as far as there are rows.
  MK_DEVICE uint32_t panels(const TileCoordinate& c) const {
    return ((Shape::kSplitsRows ? rows_of_warpgroup() : load_rows(c)) + kBlockRows - 1) / kBlockRows;
  }
  MK_DEVICE bool is_narrow() const {  // of all tiles
    if constexpr (Shape::kMayBeNarrow) return p.columns == kPanel;
    return false;
  }
  MK_DEVICE uint32_t tile_rows() const { return (p.rows + block_rows() - 1) / block_rows(); }
  MK_DEVICE uint32_t tiles_n() const {
    return is_narrow() ? (extent_n(p) + kPanel - 1) / kPanel : (extent_n(p) + Shape::kResultN - 1) / Shape::kResultN;
  }
  // Where clusters take tiles: columns of what they take, and the tile of one CTA of it.
  MK_DEVICE uint32_t taken_columns() const { return (tiles_n() + Shape::kClusterN - 1) / Shape::kClusterN; }
  MK_DEVICE static TileCoordinate of_cta(TileCoordinate taken, uint32_t cta) {
    if constexpr (Shape::kClusterM > 1) taken.m = taken.m * Shape::kClusterM + cta / Shape::kClusterN;
    if constexpr (Shape::kClusterN > 1) taken.n = taken.n * Shape::kClusterN + cta % Shape::kClusterN;
    return taken;
  }
  // The same of what a cluster takes by this number, in raster order, of so many rows of tiles. It keeps the number that it has without clusters.
  MK_DEVICE TileCoordinate of_cluster(TileCoordinate c, uint32_t number, uint32_t cta, uint32_t rows) const {
    const RasterPosition at =
        raster(number, (rows + Shape::kClusterM - 1) / Shape::kClusterM, taken_columns(), p.group_m / Shape::kClusterM);
    c.m = at.row, c.n = at.column;
    c = of_cta(c, cta);
    c.index = raster_number(c.m, c.n, rows, tiles_n(), p.group_m);
    return c;
  }
  MK_DEVICE bool has_few_bytes() const { return uint64_t(p.rows + extent_n(p)) * extent_k(p) * 2 <= 10 << 20; }  // docs/speed_log.md
  MK_DEVICE uint32_t steps_k() const { return (extent_k(p) + Shape::kBlockK - 1) / Shape::kBlockK; }
  // Of the last row of tiles no more rows are loaded than there are, in whole warps' rows, by a map of its own: to fill rows that are not there with
  // zeros takes TMA longer than to load rows. What the others hold does not matter.
  MK_DEVICE bool is_last_row(const TileCoordinate& c) const { return c.m == p.last_row; }
  MK_DEVICE uint32_t load_rows(const TileCoordinate& c) const {
    if (Shape::kClusterM > 1 && c.m > p.last_row) return 0;  // the second CTA of a pair has no tile
    return is_last_row(c) ? p.tail_rows : block_rows();
  }
  MK_DEVICE bool is_low() const { return p.load_rows <= kBlockRows; }  // of all tiles: see StageRing
  MK_DEVICE const abi::TensorMap* a_map(const TileCoordinate& c) const { return is_last_row(c) ? &p.a_tail_map : &p.a_map; }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return c.m * block_rows(); }
  MK_DEVICE int32_t a_plane(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE int32_t a_k(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE const abi::TensorMap* b_map(const TileCoordinate&) const { return &p.b_map; }
  MK_DEVICE int32_t b_plane(const TileCoordinate&) const { return 0; }
  MK_DEVICE float clamp() const { return p.clamp; }
  MK_DEVICE void prefetch_a() const {
    ptx::prefetch_map(&p.a_map);
    ptx::prefetch_map(&p.a_tail_map);
  }
  MK_DEVICE uint32_t rows(const TileCoordinate& c) const {
    if (!is_there(c)) return 0;
    const uint32_t left = p.rows - c.m * block_rows();
    return left < block_rows() ? left : block_rows();
  }
  // False: the CTA has no tile here, and multiplies beside its partner in the pair.
  MK_DEVICE bool is_there(const TileCoordinate& c) const {
    return (Shape::kClusterM == 1 || c.m <= p.last_row) && (Shape::kClusterN == 1 || c.n < tiles_n());
  }
  MK_DEVICE void store_result(const Entered&, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem,
                              int32_t plane = 0) const {
    if constexpr (Shape::kSwapped) {  // the last panel of a block may have fewer rows, for which there is a map of its own
      const uint32_t unit = Shape::kUnits == 1 ? 0 : panel / panels(c), first = (panel - unit * panels(c)) * kBlockRows;
      const abi::TensorMap* map = first + kBlockRows <= rows_of_warpgroup() ? &p.c_map : &p.c_tail_map;
      const uint32_t column = Shape::kSplitsRows ? unit : warpgroup * Shape::kUnits + unit;
      const uint32_t row = c.m * block_rows() + (Shape::kSplitsRows ? warpgroup * rows_of_warpgroup() : 0) + first;
      ptx::tma_store_3d(map, smem, first_column<Config>(c) + column * kPanel, row, plane);
    } else {
      const uint32_t row = c.m * block_rows() + block_row(c, warpgroup);
      if constexpr (Shape::kCut) {  // what a panel has beyond the tile lies beyond a row of c_map; the last tile's, beyond C
        if (c.n + 1 < tiles_n()) return ptx::tma_store_3d(&p.c_map, smem, panel * kPanel, c.n, row);
        return ptx::tma_store_3d(&p.c_tail_map, smem, block_column<Config>(c, panel, warpgroup), row, plane);
      }
      ptx::tma_store_3d(&p.c_map, smem, block_column<Config>(c, panel, warpgroup), row, plane);
    }
  }
};

// Where the tile of an item is, with what the compiler can know of it.
template <class Config, class Op>
MK_DEVICE TileCoordinate known_place(const TilePart& item) {
  TileCoordinate c = item.c;
  if constexpr (Config::kSlices == 1) c.slice = 0;
  if constexpr (!Op::kSums) c.is_sum = false;
  if constexpr (!Op::kShortTiles) c.is_short = false;
  if constexpr (!Op::kShares) c.is_share = false, c.share = 0;
  if constexpr (!GemmShape<Config>::kMayBeNarrow) c.is_narrow = false;
  return c;
}

}  // namespace mkernel
