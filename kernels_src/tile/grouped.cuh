// Grouped GEMM: rows of A are sorted by expert, and those of expert e are multiplied by plane e of B. How many rows an expert has, only the device knows.
#pragma once
#include "tile/op.cuh"

namespace mkernel {

// Where the rows, slots and tiles of this rank's experts begin. Lies in shared memory.
//   row       of packed matrices: an expert's rows follow those of the expert before it
//   slot      of staging areas: every expert begins at a multiple of 64
//   tile row  128 rows of one expert, or what is left of them; where 64 or fewer are left it is short, and takes 64 slots, else 128
// Example: experts of 3, 0 and 200 rows have rows 0, 3 and 3 on, slots 0, 64 and 64 on, and tile rows 0 (short), none, and 1 and 2.
template <uint32_t kCapacity>
class ExpertTable {
 public:
  // rows(e): of expert e; fewer than 2^27 altogether. The table may be used when it returns. All kThreads threads of the CTA.
  template <uint32_t kThreads = kGemmThreads, class Rows>
  MK_DEVICE void build(uint32_t experts, const Rows& rows) {
    const uint32_t thread = ptx::thread_index();
    if (thread == 0) experts_ = experts, row_[0] = tiles_[0] = 0;
#pragma unroll 1
    for (uint32_t e = thread; e < experts; e += kThreads) {
      const uint32_t count = rows(e), last = count % kTileRows;  // rows of an incomplete tile
      row_[e + 1] = count;
      tiles_[e + 1] = (count + kTileRows - 1) / kTileRows << kShortBits | (last != 0 && last <= kBlockRows ? 1 : 0);
    }
    ptx::sync_cta();
    constexpr uint32_t kEach = (kCapacity + kThreads - 1) / kThreads;
#pragma unroll 1
    for (uint32_t distance = 1; distance < experts; distance *= 2) {  // sums of `distance` experts become sums of twice as many
      uint32_t row_before[kEach], tiles_before[kEach];
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t e = thread + i * kThreads;
        const bool adds = e >= distance && e < experts;
        row_before[i] = adds ? row_[e + 1 - distance] : 0, tiles_before[i] = adds ? tiles_[e + 1 - distance] : 0;
      }
      ptx::sync_cta();
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t e = thread + i * kThreads;
        if (e >= distance && e < experts) row_[e + 1] += row_before[i], tiles_[e + 1] += tiles_before[i];
      }
      ptx::sync_cta();
    }
  }

  // Of expert e, or of what comes after the last one: e may be size().
  MK_DEVICE uint32_t size() const { return experts_; }
  MK_DEVICE uint32_t first_row(uint32_t e) const { return row_[e]; }
  MK_DEVICE uint32_t first_tile_row(uint32_t e) const { return tiles_[e] >> kShortBits; }
  MK_DEVICE uint32_t first_slot(uint32_t e) const { return (2 * first_tile_row(e) - tiles_[e] % (1u << kShortBits)) * kBlockRows; }
  // Of expert e.
  MK_DEVICE uint32_t rows(uint32_t e) const { return row_[e + 1] - row_[e]; }
  MK_DEVICE uint32_t tile_rows(uint32_t e) const { return first_tile_row(e + 1) - first_tile_row(e); }

  MK_DEVICE uint32_t num_rows() const { return first_row(experts_); }
  MK_DEVICE uint32_t num_slots() const { return first_slot(experts_); }
  MK_DEVICE uint32_t num_tile_rows() const { return first_tile_row(experts_); }
  MK_DEVICE uint32_t expert_of(uint32_t tile_row) const {  // one of num_tile_rows(); experts without rows have none
    uint32_t begin = 0, end = experts_;                    // it is one of begin .. end-1
#pragma unroll 1
    while (end - begin > 1) {
      const uint32_t middle = (begin + end) / 2;
      (first_tile_row(middle) <= tile_row ? begin : end) = middle;
    }
    return begin;
  }

 private:
  static constexpr uint32_t kTileRows = kConsumerWarpgroups * kBlockRows;
  static constexpr uint32_t kShortBits = 12;  // one word for two sums: kernels with many experts have little shared memory to spare
  static_assert(kCapacity < 1u << kShortBits, "short tile rows are counted in so many bits");
  uint32_t experts_;
  uint32_t row_[kCapacity + 1];
  uint32_t tiles_[kCapacity + 1];  // tile rows of the experts before << kShortBits | how many of them are short
};

// The tiles of a grouped GEMM: expert by expert, and inside an expert in groups of p.group_m tile rows that share columns of B. Results are packed: a
// block with rows of the next expert behind it is masked. The op that derives from it has p.a_map and p.a_short_map (boxes of 128 and 64 rows), p.b_map
// ((K, N) or its transpose per expert), p.c_map (rows, N), p.c, p.c_row_bytes and p.group_m, and says what the tiles wait for and where in A they are:
// a_row(c) is packed_row(c) or slot_row(c).
template <class Config, class Parameters, uint32_t kCapacity>
struct GroupedTiles : BasicOp<Config, Parameters> {
  using Shape = GemmShape<Config>;
  using Basic = BasicOp<Config, Parameters>;
  using Basic::p;
  const ExpertTable<kCapacity>& experts;
  MK_DEVICE GroupedTiles(const Parameters& parameters, const ExpertTable<kCapacity>& table) : Basic(parameters), experts(table) {}

  static constexpr uint32_t kParts = 1;
  static constexpr bool kMasks = true, kShortTiles = Shape::kHasHalves;

  MK_DEVICE uint32_t num_tiles() const { return experts.num_tile_rows() * this->tiles_n(); }
  MK_DEVICE bool has_few_bytes() const { return false; }  // routing says how many experts and rows there are
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {
    const uint32_t tiles_n = this->tiles_n(), e = experts.expert_of(tile / tiles_n);
    const RasterPosition at = raster(tile - experts.first_tile_row(e) * tiles_n, experts.tile_rows(e), tiles_n, p.group_m);
    const bool is_short = kShortTiles && experts.rows(e) - at.row * Shape::kBlockM <= kBlockRows;
    return TileCoordinate{e, at.row, at.column, 0, 0, false, is_short};
  }
  MK_DEVICE uint32_t parts(const TileCoordinate&) const { return 1; }
  MK_DEVICE uint32_t steps(const TileCoordinate&, uint32_t) const { return this->steps_k(); }
  MK_DEVICE uint32_t rows(const TileCoordinate& c) const {
    const uint32_t left = experts.rows(c.plane) - c.m * Shape::kBlockM;
    return left < Shape::kBlockM ? left : Shape::kBlockM;
  }
  MK_DEVICE uint32_t packed_row(const TileCoordinate& c) const { return experts.first_row(c.plane) + c.m * Shape::kBlockM; }
  MK_DEVICE uint32_t slot_row(const TileCoordinate& c) const { return experts.first_slot(c.plane) + c.m * Shape::kBlockM; }

  // Where tiles have no halves, a tile of few rows is multiplied whole, but only its own rows are loaded.
  MK_DEVICE bool is_low(const TileCoordinate& c) const { return kShortTiles ? c.is_short : rows(c) <= kBlockRows; }
  MK_DEVICE uint32_t load_rows(const TileCoordinate& c) const { return is_low(c) ? kBlockRows : Shape::kBlockM; }
  MK_DEVICE const abi::TensorMap* a_map(const TileCoordinate& c) const { return is_low(c) ? &p.a_short_map : &p.a_map; }
  MK_DEVICE void prefetch_a() const {
    ptx::prefetch_map(&p.a_map);
    ptx::prefetch_map(&p.a_short_map);
  }
  MK_DEVICE int32_t b_plane(const TileCoordinate& c) const { return c.plane; }

  MK_DEVICE void store(const Entered&, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    ptx::tma_store_3d(&p.c_map, smem, block_column<Config>(c, panel, warpgroup), packed_row(c) + block_row(c, warpgroup), 0);
  }
  MK_DEVICE char* result(const Entered&, const TileCoordinate& c) const {
    return reinterpret_cast<char*>(p.c) + uint64_t(packed_row(c)) * p.c_row_bytes;
  }
  MK_DEVICE uint32_t result_row_bytes() const { return p.c_row_bytes; }
};

}  // namespace mkernel
