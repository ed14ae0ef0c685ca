// The sizes of a fused GEMM, and where its tiles are in C.
#pragma once
#include "fields.cuh"
#include "tile/partial.cuh"

namespace mkernel {

constexpr uint32_t kWarpgroup = 128;
constexpr uint32_t kConsumerWarpgroups = 2;
constexpr uint32_t kGemmThreads = (1 + kConsumerWarpgroups) * kWarpgroup;
constexpr uint32_t kConsumerThreads = kConsumerWarpgroups * kWarpgroup;
constexpr uint32_t kConsumerWarps = kConsumerThreads / 32;
constexpr uint32_t kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kWarpgroup * kProducerRegisters + kConsumerThreads * kConsumerRegisters <= 65536, "register file");

constexpr uint32_t kSwizzleBytes = 128;                 // one row of every tile in shared memory
constexpr uint32_t kPanel = kSwizzleBytes / 2;          // 16-bit elements of such a row
constexpr uint32_t kSwizzleAtom = 8 * kSwizzleBytes;    // 8 rows: the pattern repeats
constexpr uint32_t kInstructionK = 16;                  // k of one wgmma
constexpr uint32_t kTileQueue = 2;                      // items (tile * Op::kParts + part) offered ahead
constexpr uint32_t kQueueReaders = kConsumerWarps + 2;  // and the loading and the storing thread
constexpr uint32_t kStop = 0xffffffffu;                 // in the tile queue: no more tiles
constexpr uint32_t kAskAhead = 1280;  // columns x k steps of a tile left to load when the next tile is asked for: about 3 us

struct TileCoordinate {
  uint32_t plane;  // which shard (allgather_gemm: the source rank; reductions: the rank that owns the tile; grouped: the rank's expert)
  uint32_t m;      // tile row inside the shard, or of the expert's own
  uint32_t n;      // tile column
  uint32_t slice;  // 0: the whole tile; 1 .. Config::kSlices: so many columns of it (the last tiles are sliced to fill all SMs)
  uint32_t index;  // reductions: the tile's number among its owner's; with shares of K: that of the tile
  bool is_sum;     // nothing is multiplied: partial tiles (reductions), or shares (shares.cuh), are added up
  bool is_short = false;   // 64 rows high, not 128: each consumer warpgroup has all of them and half of the columns (Op::kShortTiles)
  bool is_share = false;   // of K (shares.cuh), or their sum
  bool is_narrow = false;  // with swapped operands: 64 columns, all of which the first consumer warpgroup has (Op::is_narrow())
  uint32_t share = 0;      // which share, or slice of the sum
};

// What the scheduler offers: one part of one tile, and where it is, which only the scheduler works out: its divisions would stand at the beginning of
// each reader's work.
struct alignas(16) TilePart {
  uint32_t number;  // tile * Op::kParts + part, or kStop
  TileCoordinate c;
};
static_assert(sizeof(TilePart) == 32, "two loads");

// With swapped operands (Config::kSwapped) wgmma has columns of B in the place of rows, 64 for each consumer warpgroup, and rows of A in the place of
// columns, of which it takes any multiple of 8. So a tile has 128 columns, and as many rows as the call says (op.block_rows()), up to kBlockN: they fit M,
// and the SMs. Or it has 64 columns (kMayBeNarrow, op.is_narrow()), where that fits the SMs better: tiles as large, of fewer columns and more rows, or
// twice as many. Columns of B are in the stages' part for A, and the other way round; a thread holds two columns of 8 rows' results, not the reverse.
// Wide tiles are kernels of their own (Config::kColumns): of 256 columns a warpgroup has 128, two blocks of 64, one after the other with the same rows; of
// 192 columns, of which it cannot have half, it has all three blocks, and half of the rows. They load least for what they multiply.
// Or the warpgroups have tiles of 128 columns in turn (Config::kAlternates): while one writes a result the other multiplies, as long as there are tiles.
//
// With operands as they are a tile may have fewer columns than Config::kBlockN, a multiple of 16 that fits N (Config::kWidth), so that its last panel is
// not a whole one (kCut). Of a row-major B whole ones are loaded, and stages have room for them.
template <class Config>
struct GemmShape {
  static constexpr bool kSwapped = optional::kSwapped<Config>;
  static constexpr uint32_t kBlockM = kSwapped ? optional::kColumns<Config> : 64 * kConsumerWarpgroups, kBlockK = kPanel;
  static constexpr bool kAlternates = optional::kAlternates<Config>, kSplitsRows = kBlockM % (64 * kConsumerWarpgroups) != 0;
  static constexpr uint32_t kWarpgroups = kAlternates ? 1 : kConsumerWarpgroups;       // that multiply a tile
  static constexpr uint32_t kUnits = kBlockM / (kSplitsRows ? 64 : 64 * kWarpgroups);  // blocks of 64 columns, or rows, of a warpgroup
  static constexpr uint32_t kMostRows = kSplitsRows ? 192 : 160;                       // of a tile, if warpgroups have several blocks
  static constexpr uint32_t kBlockN = kUnits > 1 ? kMostRows : optional::kWidth<Config>;
  static constexpr uint32_t kHeld = kBlockM * kBlockN / (kWarpgroups * kWarpgroup);  // values that a consumer thread has of a tile,
  static constexpr uint32_t kUnitHeld = kHeld / kUnits;                              // and of each of its blocks
  static constexpr uint32_t kStages = Config::kStages;
  static constexpr uint32_t kSliceN = kBlockN / Config::kSlices;  // columns of a slice
  // (Of wide tiles A takes more of a stage, and B what is left of it, which the highest tiles are more than: there are fewer stages then.)
  static constexpr uint32_t kRoom = Config::kBRowMajor ? Config::kBlockN : optional::kWidth<Config>;  // columns of B
  static constexpr uint32_t kStageBytes = (64 * kConsumerWarpgroups + kRoom) * kBlockK * 2;
  static constexpr uint32_t kBytesA = kBlockM * kBlockK * 2, kBytesB = kStageBytes - kBytesA;
  // Where a call's tiles have at most 64 rows, A may take half as much of a stage, and there are as many stages as then fit.
  static constexpr bool kMayBeLow = optional::kLow<Config>;
  static constexpr bool kMayBeNarrow = kSwapped && optional::kNarrow<Config>;
  static constexpr uint32_t kFewestBytes = (kMayBeLow || kMayBeNarrow ? kBytesA / 2 : kBytesA) + (kSwapped ? kSwizzleAtom : kBytesB);
  static constexpr uint32_t kMostStages = kStages * (kBytesA + kBytesB) / kFewestBytes;
  static constexpr uint32_t kStageBlocks = (kBytesA + kBytesB) / kBlockBytes;
  // Panels of an addend in one stage. Of a canonical sum one: what is rounded of the own product waits in registers beside the accumulators, and two
  // panels of it spill.
  static constexpr uint32_t kMostAddPanels = optional::kCanonical<Config> ? 1 : kStageBlocks / kConsumerWarpgroups;
  static constexpr uint32_t kAddPanels = largest_divisor(Partial<Config>::kPanels, kMostAddPanels);
  static constexpr uint32_t kAddStages = Partial<Config>::kPanels / kAddPanels;  // of one addend
  static constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  // Of wgmma's operands; rows of A lie along K.
  static constexpr ptx::Major kMajorOfB = Config::kBRowMajor ? ptx::Major::kMN : ptx::Major::kK;
  static constexpr ptx::Major kMajorA = kSwapped ? kMajorOfB : ptx::Major::kK, kMajorB = kSwapped ? ptx::Major::kK : kMajorOfB;
  static constexpr bool kGated = optional::kGated<Config>;
  static constexpr uint32_t kColumns = kSwapped ? kBlockM : kBlockN;     // of B, of a tile
  static constexpr uint32_t kResultN = kGated ? kBlockN / 2 : kColumns;  // columns of a result
  // Of a result, of a warpgroup at most; of wide tiles of each of its blocks.
  static constexpr uint32_t kPanels = ((kSwapped ? kBlockN / (kSplitsRows ? kConsumerWarpgroups : 1) : kResultN) + kPanel - 1) / kPanel;
  static constexpr uint32_t kPanelsOfB = (kColumns + kPanel - 1) / kPanel;
  // A panel of B (64 columns), and a consumer warpgroup's half of B, of which gated tiles need whole pairs of panels.
  static constexpr uint32_t kPanelBytes = kPanel * kBlockK * 2, kHalfN = kBlockN / 2;
  static constexpr bool kHasHalves = Config::kSlices == 1 && kHalfN % ((kGated ? 2 : 1) * kPanel) == 0;
  // CTAs that take tiles together: neighbours in M, which load B together, or in N, which load A together.
  // (Or a cluster's CTAs share K of a tile, each with a number and loads of its own.)
  static constexpr uint32_t kClusterK = optional::kClusterK<Config>, kCluster = optional::kCluster<Config> / kClusterK,
                            kClusterN = optional::kClusterN<Config>, kClusterM = kCluster / kClusterN;
  static constexpr bool kPaired = kCluster > 1;
  static constexpr uint32_t kSharing = kClusterM + kClusterN - 1;  // CTAs with a stage's rows of A, or columns of B, one of them included
  static_assert(kClusterM * kClusterN == kCluster && (kCluster <= 2 || kCluster == 4), "one, two or four CTAs");
  static_assert(kCluster == 1 || (kPaired && !kGated && Config::kSlices == 1), "CTAs alone, or pairs, of whole tiles of plain products");
  static_assert(kClusterK == 1 || (kCluster == 1 && optional::kShares<Config> && !kSwapped), "shares of K of whole tiles, unswapped");
  static_assert(!kSwapped || (!kMayBeLow && !kGated && Config::kSlices == 1), "whole tiles of plain products");
  static_assert(kUnits == 1 || (kSwapped && kBlockM % 64 == 0 && kHeld <= 160 && !kMayBeNarrow && !optional::kShares<Config>),
                "registers; and whole tiles of all K");
  static_assert(!kMayBeLow || (!kPaired && !kGated && Config::kSlices == 1), "of CTAs alone, whole tiles of plain products");
  static constexpr uint32_t kResultBuffers = Config::kResultBuffers;  // of a panel, per consumer warpgroup: results on their way out
  static_assert(Config::kBlockN % kPanel == 0 && Config::kBlockN <= 256, "kBlockN: 64, 128, 192 or 256");
  static_assert(!kGated || (kBlockN % (2 * kPanel) == 0 && Config::kSlices == 1), "a panel of gate and one of up lie side by side");
  static constexpr bool kCut = !kSwapped && kResultN % kPanel != 0;
  static_assert(kSwapped || kCut || (kSliceN * Config::kSlices == kBlockN && kSliceN % kPanel == 0), "a slice is a whole number of panels");
  static_assert(!kCut || (kBlockN % kInstructionK == 0 && Config::kBlockN - kBlockN < kPanel && !kMayBeLow && !kGated &&
                          Config::kSlices == 1 && !optional::kShares<Config>),
                "multiples of 16, in room for whole panels: whole tiles of all K of plain products");
};

// a / b, without the division, some 150 cycles, where the answer can be seen: small calls begin with it.
MK_DEVICE uint32_t quotient(uint32_t a, uint32_t b) { return a < b ? 0 : b == 1 ? a : a / b; }

// The order of the tiles of `tile_rows` rows and `tiles_n` columns of tiles: groups of group_m rows that share B, column by column.
struct RasterPosition {
  uint32_t row, column;
};
MK_DEVICE RasterPosition raster(uint32_t tile, uint32_t tile_rows, uint32_t tiles_n, uint32_t group_m) {
  const uint32_t group = quotient(tile, group_m * tiles_n), in_group = tile - group * group_m * tiles_n;
  const uint32_t left = tile_rows - group * group_m, group_rows = left < group_m ? left : group_m;
  const uint32_t column = quotient(in_group, group_rows);
  return RasterPosition{group * group_m + in_group - column * group_rows, column};
}
// The number of the tile there.
MK_DEVICE uint32_t raster_number(uint32_t row, uint32_t column, uint32_t tile_rows, uint32_t tiles_n, uint32_t group_m) {
  const uint32_t first = quotient(row, group_m) * group_m, left = tile_rows - first, group_rows = left < group_m ? left : group_m;
  return first * tiles_n + column * group_rows + row - first;
}

template <class Config>
MK_DEVICE uint32_t tile_width(const TileCoordinate& c) {  // columns of B
  if (GemmShape<Config>::kMayBeNarrow && c.is_narrow) return kPanel;
  return Config::kSlices > 1 && c.slice != 0 ? GemmShape<Config>::kSliceN : GemmShape<Config>::kColumns;
}
template <class Config>
MK_DEVICE uint32_t first_column(const TileCoordinate& c) {  // of the result
  if (GemmShape<Config>::kMayBeNarrow && c.is_narrow) return c.n * kPanel;
  return c.n * GemmShape<Config>::kResultN + (Config::kSlices > 1 && c.slice != 0 ? (c.slice - 1) * GemmShape<Config>::kSliceN : 0);
}

// Consumer warpgroups that have some of a tile's result.
template <class Config>
MK_DEVICE uint32_t warpgroups_of(const TileCoordinate& c) {
  return GemmShape<Config>::kMayBeNarrow && c.is_narrow ? 1 : GemmShape<Config>::kWarpgroups;
}

// A result leaves in blocks of 64 rows x 64 columns: how many panels a consumer warpgroup has of it, and where in the tile, or in C, they begin. (With
// swapped operands a warpgroup's panels lie below each other: epilogue.cuh, BasicOp::store_result.)
template <class Config>
MK_DEVICE uint32_t block_panels(const TileCoordinate& c) {
  const uint32_t width = GemmShape<Config>::kGated ? tile_width<Config>(c) / 2 : tile_width<Config>(c);
  return ((c.is_short ? width / kConsumerWarpgroups : width) + kPanel - 1) / kPanel;
}
MK_DEVICE uint32_t block_row(const TileCoordinate& c, uint32_t warpgroup) { return c.is_short ? 0 : warpgroup * kBlockRows; }
template <class Config>
MK_DEVICE uint32_t block_column(const TileCoordinate& c, uint32_t panel, uint32_t warpgroup) {
  return first_column<Config>(c) + ((c.is_short ? warpgroup * block_panels<Config>(c) : 0) + panel) * kPanel;
}

}  // namespace mkernel
