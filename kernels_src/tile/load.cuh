// The loading thread of a compute CTA: tiles of A and B, and partial tiles, by TMA into the ring of stages.
#pragma once
#include "tile/op.cuh"
#include "tile/pair.cuh"
#include "tile/schedule.cuh"

namespace mkernel {

// Kernels that call compute_role() first of all may be launched early: in a world of one, as planner/gemm.py says.
constexpr bool kEarly = kWorldSize == 1;

// Whether a kernel that may be launched early may begin before this one ends. Where this one has no tiles for nearly all SMs, some of its CTAs
// would come to the SMs that are left and the others wherever a CTA ends, so that its tiles are where they happen to be, not spread over the device, and
// memory gives a sixth less (docs/speed_log.md). Of few bytes it is asked for little, and to begin sooner is worth more.
template <class Config, class Op>
MK_DEVICE bool lets_next_begin(const Op& op) {
  const uint32_t ctas = op.p.fields.ctas;
  return op.has_few_bytes() || op.num_tiles() * GemmShape<Config>::kCluster + ctas / 16 >= ctas;
}

// Partial tiles that are added pass through the same stages, kAddPanels panels (both warpgroups' blocks) at a time.
template <class Config>
MK_DEVICE char* stage_block(GemmStorage<Config>& storage, uint32_t stage, uint32_t block) {
  constexpr uint32_t kInA = GemmShape<Config>::kBytesA / kBlockBytes;
  return block < kInA ? storage.pipeline.a[stage] + block * kBlockBytes : storage.pipeline.b[stage] + (block - kInA) * kBlockBytes;
}
template <class Config>
MK_DEVICE void load_addend(GemmStorage<Config>& storage, const StagePosition<Config>& stage, const char* addend, uint32_t part,
                           uint32_t rows) {
  using Shape = GemmShape<Config>;
  uint32_t bytes = 0;
#pragma unroll
  for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) bytes += block_bytes(rows, w);
  uint64_t* filled = storage.stages.fill_by_tma(stage, bytes * Shape::kAddPanels);
#pragma unroll 1
  for (uint32_t block = 0; block < Shape::kAddPanels * kConsumerWarpgroups; ++block) {
    const uint32_t size = block_bytes(rows, block % kConsumerWarpgroups);
    const char* source = addend + (part * Shape::kAddPanels * kConsumerWarpgroups + block) * kBlockBytes;
    if (size != 0) ptx::bulk_load(stage_block(storage, stage.index, block), source, size, filled);
  }
}

// The first item that the scheduler will offer, if that is of a tile that waits for nobody; else kStop. The loading thread begins with it, while the
// scheduler is still on its way there. Where all tiles wait until A has been gathered (Op::kGathers), B at least may be loaded.
template <class Config, class Op>
MK_DEVICE TilePart first_item(const Call& call, const Op& op) {
  const uint32_t tile = given_tile<Config>(call, op);
  if (op.assigned(0) != kStop || tile == kStop || tile >= op.num_tiles()) return TilePart{kStop, {}};
  const TileCoordinate c = op.coordinate(tile);
  return TilePart{op.parts(c) == 0 || (op.waits(c, 0) && !Op::kGathers) ? kStop : tile * Op::kParts, c};
}

// Of one stage of a tile: the rows of A that this CTA loads, from `row` on, of the k step that begins at `k`.
template <class Config>
MK_DEVICE void load_a(char* smem_a, const abi::TensorMap* a, uint64_t* filled, int32_t k, int32_t row, int32_t plane) {
  if constexpr (GemmShape<Config>::kClusterN > 1) {
    ptx::tma_load_3d_multicast(smem_a, a, filled, Pair<Config>::of_row(), k, row, plane);
  } else {
    ptx::tma_load_3d(smem_a, a, filled, k, row, plane);
  }
}

// Of one stage of a tile: its columns from `column` on, of k steps from k on.
template <class Config, class Op>
MK_DEVICE void load_b(const Op& op, char* smem_b, const abi::TensorMap* b, uint64_t* filled, int32_t column, int32_t k, int32_t b_plane,
                      uint32_t width) {
  using Shape = GemmShape<Config>;
  if constexpr (Shape::kClusterM > 1) {
    Pair<Config>::load_b(smem_b, b, filled, column, k, b_plane, width);
  } else if constexpr (Shape::kGated) {  // panels of gate and up in turn, each of 64 columns x kBlockK
#pragma unroll
    for (uint32_t p = 0; p < Shape::kBlockN / kPanel; ++p) {
      const int32_t at = column + p / 2 * kPanel + (p % 2 != 0 ? extent_n(op.p) : 0);
      ptx::tma_load_3d(smem_b + p * Shape::kPanelBytes, b, filled, Config::kBRowMajor ? at : k, Config::kBRowMajor ? k : at, b_plane);
    }
  } else if constexpr (Config::kBRowMajor) {  // panels of 64 columns x kBlockK rows
#pragma unroll
    for (uint32_t p = 0; p < Shape::kPanelsOfB; ++p) {
      if (p * kPanel < width) ptx::tma_load_3d(smem_b + p * Shape::kPanelBytes, b, filled, column + p * kPanel, k, b_plane);
    }
  } else {
    ptx::tma_load_3d(smem_b, b, filled, k, column, b_plane);
  }
}

template <class Config, class Op>
MK_DEVICE uint32_t bytes_of_stage(const Op& op, const TileCoordinate& c) {
  const uint32_t columns = GemmShape<Config>::kCut ? GemmShape<Config>::kRoom : tile_width<Config>(c);
  return (op.load_rows(c) + columns) * GemmShape<Config>::kBlockK * 2;
}

// Loads B of the first stages of a tile that waits, and no A. Returns how many stages.
template <class Config, class Op>
MK_DEVICE uint32_t load_ahead(const Op& op, GemmStorage<Config>& storage, const TileCoordinate& c) {
  using Shape = GemmShape<Config>;
  const StageRing<Config> ring(op);
  const uint32_t steps = op.steps(c, 0), stages = steps < ring.count() ? steps : ring.count();
  StagePosition<Config> stage;
#pragma unroll 1
  for (uint32_t step = 0; step < stages; ++step, stage.advance(ring.count())) {
    uint64_t* filled = storage.stages.fill_by_tma(stage, bytes_of_stage<Config>(op, c));
    load_b<Config>(op, ring.columns(storage, stage.index), op.b_map(c), filled, first_column<Config>(c),
                   (op.first_step(c) + step) * Shape::kBlockK, op.b_plane(c), tile_width<Config>(c));
  }
  return stages;
}

// The same stages where the tile is not multiplied, because the call has failed: whatever A holds is loaded, so that the stages fill, and nothing is on
// its way when the CTA ends.
template <class Config, class Op>
MK_DEVICE void fill_ahead(const Op& op, GemmStorage<Config>& storage, const TileCoordinate& c, uint32_t stages) {
  const StageRing<Config> ring(op);
  StagePosition<Config> stage, filled;
  const uint32_t rows = op.load_rows(c), from = Pair<Config>::first_row(rows);
#pragma unroll 1
  for (uint32_t i = 0; rows != 0 && i < stages; ++i, stage.advance(ring.count())) {
    load_a<Config>(ring.rows(storage, stage.index) + from * kSwizzleBytes, op.a_map(c), &storage.stages.filled[stage.index], op.a_k(c, 0),
                   op.a_row(c) + from, op.a_plane(c, 0));
  }
#pragma unroll 1
  for (uint32_t i = 0; i < stages; ++i, filled.advance(ring.count())) storage.stages.wait_filled(filled);
}

// `first`: first_item().
template <class Config, class Op>
MK_DEVICE void load_tiles(const Op& op, GemmStorage<Config>& storage, const TilePart& first) {
  using Shape = GemmShape<Config>;
  RingPosition<kTileQueue> queue;
  const StageRing<Config> ring(op);
  StagePosition<Config> stage;
  TilePart item = first;
  bool ahead = first.number != kStop;  // of the scheduler, by this item
  uint32_t has_b = 0;                  // stages whose B is on its way
  if constexpr (Op::kGathers) {
    if (ahead && op.waits(first.c, 0)) has_b = load_ahead(op, storage, known_place<Config, Op>(first)), ahead = false;
  }
#pragma unroll 1
  while (true) {
    if (!ahead) item = take_item<Reader::kThread>(storage, queue);
    if (item.number == kStop) {
      if (has_b != 0) fill_ahead(op, storage, known_place<Config, Op>(first), has_b);
      if constexpr (kEarly) {
        if (lets_next_begin<Config>(op)) ptx::launch_grids();  // not sooner: CTAs of the next kernel would take SMs from it
      }
      return Pair<Config>::end_loading(storage, stage, ring);
    }
    const uint32_t part = item.number % Op::kParts;
    const TileCoordinate c = known_place<Config, Op>(item);
    if (op.waits(c, part)) ptx::fence_proxy_async();  // what the scheduler acquired becomes visible to the TMA loads below
    const abi::TensorMap *a = op.a_map(c), *b = op.b_map(c);
    const uint32_t rows = op.load_rows(c), from = Pair<Config>::first_row(rows);
    const int32_t a_row = op.a_row(c) + from, a_plane = op.a_plane(c, part), b_plane = op.b_plane(c), column = first_column<Config>(c);
    const uint32_t width = tile_width<Config>(c), bytes = bytes_of_stage<Config>(op, c);
    const bool loads_a = !Op::kTakes && (Shape::kClusterM == 1 || rows != 0);
    const uint32_t steps = op.steps(c, part);
    // The next tile is asked for in the last part that multiplies: at once, or at a step. (If step 0 were one, the compiler may unroll the loop.)
    constexpr uint32_t kAhead = kAskAhead / Shape::kBlockN;
    const bool is_last = part + 1 == op.parts(c) || op.steps(c, part + 1) == 0;
    if (steps == 0 ? part == 0 : is_last && steps <= kAhead) ptx::mbarrier_arrive(&storage.tile_wanted);
    const uint32_t ask_at = is_last && steps > kAhead ? steps - kAhead : kStop;
    const uint32_t begin = op.first_step(c) * Shape::kBlockK;
    int32_t a_k = op.a_k(c, part) + begin, k = part * steps * Shape::kBlockK + begin;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step, stage.advance(ring.count()), a_k += Shape::kBlockK, k += Shape::kBlockK) {
      if (step == ask_at) ptx::mbarrier_arrive(&storage.tile_wanted);
      char* smem_a = ring.rows(storage, stage.index) + from * kSwizzleBytes;
      if (Op::kGathers && has_b != 0) {
        --has_b;
        if (loads_a) load_a<Config>(smem_a, a, &storage.stages.filled[stage.index], a_k, a_row, a_plane);
        continue;
      }
      storage.stages.wait_taken(stage);
      uint64_t* filled = storage.stages.fill_by_tma(stage, bytes);
      if (loads_a) load_a<Config>(smem_a, a, filled, a_k, a_row, a_plane);
      load_b<Config>(op, ring.columns(storage, stage.index), b, filled, column, k, b_plane, width);
    }
    if constexpr (Op::kAdds) {
      const uint32_t addends = op.addends(c, part), of_result = op.rows(c);
      const bool by_part = Op::kCanonical && !c.is_sum;  // a part of all addends, then the next part: see add_in_order()
#pragma unroll 1
      for (uint32_t i = 0; i < addends * Shape::kAddStages; ++i, stage.advance()) {
        storage.stages.wait_taken(stage);
        const uint32_t addend = by_part ? i % addends : i / Shape::kAddStages, at = by_part ? i / addends : i % Shape::kAddStages;
        load_addend(storage, stage, op.addend(c, addend), at, of_result);
      }
    }
    if (ahead) take_item<Reader::kThread>(storage, queue);
    ahead = false;
  }
}

}  // namespace mkernel
