// The GEMM of every fused kernel: C tiles of kBlockM x kBlockN = A (K-major) * B (K-major or N-major), float32 accumulation.
//
// A CTA is three warpgroups. Warpgroup 0: warp 0 loads tiles by TMA, warp 1 schedules (takes tiles from a counter, waits on the system flags
// that a tile needs, hands over the tile or STOP), warp 2 stores finished blocks by TMA, warp 3 raises flags once they are stored.
// Warpgroups 1 and 2 each multiply 64 rows of the tile, add what other ranks computed of it, and write blocks of it to shared memory.
//
// A tile is done in parts: an item of the tile queue is one part of one tile, and is handed over when the inputs of that part are there.
// A kernel provides an Op (BasicOp has what most have in common):
//   uint32_t num_tiles();                               tiles that the CTAs of this rank share
//   uint32_t assigned(i);                               the i-th tile that only this CTA does, before all others; kStop: no more
//   TileCoordinate coordinate(uint32_t tile);           the one tile -> coordinate function
//   kParts, uint32_t parts(c);                          parts of a tile at most, and of this one (0: there is no such tile)
//   bool waits(c, part);                                false: the part reads this rank's own inputs only
//   bool wait_inputs(entered, c, part);                 warp function: until the part's inputs are there (false: leave)
//   uint32_t steps(c, part);                            k steps of the part; the parts of a tile follow each other in K
//   const TensorMap* a_map(c); a_row(c), a_plane(c, part), a_k(c, part);   where the tile's rows of A are
//   const TensorMap* b_map(c);
//   kAdds, uint32_t addends(c, part); const char* addend(c, i);   partial tiles (partial.cuh) that the part adds, in this order
//   kExchanges, void exchange(entered, d, c);           each consumer thread makes of its values those to store
//   bool is_partial(c);                                 whether the tile is stored as a partial tile, or rounded as a result
//   uint32_t rows(c);                                   valid rows of it; consulted for partial tiles only
//   void store(entered, c, panel, warpgroup, smem);     issues the stores of one block; one thread
//   kMoves, void move(const Call&);                     what a CTA moves while it computes; warp function
//   kAnnounces, bool announces(c);                      whether others wait for the tile
//   void raise(entered, uint32_t tile);                 raises its flags: its stores are complete; warp function
#pragma once
#include "handover.cuh"
#include "partial.cuh"
#include "ring.cuh"
#include "sync.cuh"
#include "trace.cuh"

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
constexpr uint32_t kTileQueue = 2;                      // items (tile * kParts + part) handed over ahead
constexpr uint32_t kQueueReaders = kConsumerWarps + 2;  // and the loading and the storing thread
constexpr uint32_t kStop = 0xffffffffu;                 // in the tile queue: no more tiles
constexpr uint32_t kAskAhead = 1280;  // columns x k steps of a tile left to load when the next tile is asked for: about 3 us

struct TileCoordinate {
  uint32_t plane;  // which shard (allgather_gemm: the source rank; reductions: the rank that owns the tile)
  uint32_t m;      // tile row inside the shard
  uint32_t n;      // tile column
  uint32_t slice;  // 0: the whole tile; 1 .. Config::kSlices: so many columns of it (the last tiles are sliced to fill all SMs)
  uint32_t index;  // reductions: the tile's number among its owner's
  bool is_sum;     // reductions: nothing is multiplied, partial tiles are added up
};

template <class Config>
struct GemmShape {
  static constexpr uint32_t kBlockM = 64 * kConsumerWarpgroups, kBlockN = Config::kBlockN, kBlockK = kPanel;
  static constexpr uint32_t kStages = Config::kStages;
  static constexpr uint32_t kTilesN = (Config::kN + kBlockN - 1) / kBlockN;
  static constexpr uint32_t kStepsK = (Config::kK + kBlockK - 1) / kBlockK;
  static constexpr uint32_t kSliceN = kBlockN / Config::kSlices;  // columns of a slice, and of one TMA load of a K-major B
  static constexpr uint32_t kLoadRows = Config::kLoadRows;  // of a tile of A, where there are no more; what the others hold does not matter
  static constexpr uint32_t kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  static constexpr uint32_t kStageBlocks = (kBytesA + kBytesB) / kBlockBytes;
  static constexpr uint32_t kAddPanels = largest_divisor(Partial<Config>::kPanels, kStageBlocks / kConsumerWarpgroups);
  static constexpr uint32_t kAddStages = Partial<Config>::kPanels / kAddPanels;  // of one addend
  static constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  static constexpr ptx::Major kMajorB = Config::kBRowMajor ? ptx::Major::kMN : ptx::Major::kK;
  static constexpr uint32_t kPanels = kBlockN / kPanel;               // of a result
  static constexpr uint32_t kResultBuffers = Config::kResultBuffers;  // of a panel, per consumer warpgroup: results on their way out
  static_assert(kBlockN % kPanel == 0 && kBlockN <= 256, "kBlockN: 64, 128, 192 or 256");
  static_assert(kSliceN * Config::kSlices == kBlockN && kSliceN % kPanel == 0, "a slice is a whole number of panels");
  static_assert(Config::kK % 8 == 0 && Config::kN % 8 == 0, "16-byte rows");
};

// Shared memory of a compute CTA. Barrier pairs: the past tense of what the arriving side has done.
template <class Config>
struct GemmStorage {
  using Shape = GemmShape<Config>;
  struct Pipeline {
    alignas(1024) char a[Shape::kStages][Shape::kBytesA];
    alignas(1024) char b[Shape::kStages][Shape::kBytesB];
  };
  alignas(1024) Pipeline pipeline;
  alignas(1024) char result[kConsumerWarpgroups][Shape::kResultBuffers][kBlockBytes];
  uint64_t stage_filled[Shape::kStages], stage_consumed[Shape::kStages];
  uint64_t tile_offered[kTileQueue], tile_taken[kTileQueue];
  uint64_t tile_wanted;  // completes once per tile: it is nearly loaded
  uint64_t block_written[kConsumerWarpgroups][Shape::kResultBuffers], block_stored[kConsumerWarpgroups][Shape::kResultBuffers];
  EntryGate entries;
  uint32_t item[kTileQueue];
  Handover announce;
};

// The order of the tiles of `tile_rows` rows of tiles: groups of group_m rows that share B, column by column.
struct RasterPosition {
  uint32_t row, column;
};
template <class Config>
MK_DEVICE RasterPosition raster(uint32_t tile, uint32_t tile_rows, uint32_t group_m) {
  const uint32_t group = tile / (group_m * GemmShape<Config>::kTilesN), in_group = tile % (group_m * GemmShape<Config>::kTilesN);
  const uint32_t left = tile_rows - group * group_m, group_rows = left < group_m ? left : group_m;
  return RasterPosition{group * group_m + in_group % group_rows, in_group / group_rows};
}

template <class Config>
MK_DEVICE uint32_t tile_width(const TileCoordinate& c) {
  return Config::kSlices > 1 && c.slice != 0 ? GemmShape<Config>::kSliceN : GemmShape<Config>::kBlockN;
}
template <class Config>
MK_DEVICE uint32_t first_column(const TileCoordinate& c) {
  return c.n * GemmShape<Config>::kBlockN + (Config::kSlices > 1 && c.slice != 0 ? (c.slice - 1) * GemmShape<Config>::kSliceN : 0);
}

// The shared memory of the CTA, as a kernel lays it out.
template <class Storage>
MK_DEVICE Storage& shared_storage() {
  static_assert(sizeof(Storage) <= Config::kSharedBytes, "shared memory");
  return *reinterpret_cast<Storage*>(ptx::shared_memory());
}

// What an Op may leave out: no tiles of its own CTA, nothing to add, results instead of partial tiles, no flags; and where tiles are whose rows
// are p.rows rows of the maps p.a_map and p.c_map, plane 0, with all of K, and whose columns those of p.b_map.
template <class Config, class Parameters>
struct BasicOp {
  using Shape = GemmShape<Config>;
  const Parameters& p;
  MK_DEVICE explicit BasicOp(const Parameters& parameters) : p(parameters) {}

  static constexpr bool kAdds = false, kMoves = false, kAnnounces = false, kExchanges = false;
  MK_DEVICE uint32_t assigned(uint32_t) const { return kStop; }
  MK_DEVICE uint32_t addends(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE const char* addend(const TileCoordinate&, uint32_t) const { return nullptr; }
  MK_DEVICE bool is_partial(const TileCoordinate&) const { return false; }
  MK_DEVICE bool announces(const TileCoordinate&) const { return false; }
  MK_DEVICE void raise(const Entered&, uint32_t) const {}

  MK_DEVICE uint32_t tile_rows() const { return (p.rows + Shape::kBlockM - 1) / Shape::kBlockM; }
  MK_DEVICE const abi::TensorMap* a_map(const TileCoordinate&) const { return &p.a_map; }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return c.m * Shape::kBlockM; }
  MK_DEVICE int32_t a_plane(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE int32_t a_k(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE const abi::TensorMap* b_map(const TileCoordinate&) const { return &p.b_map; }
  MK_DEVICE uint32_t rows(const TileCoordinate& c) const {
    const uint32_t left = p.rows - c.m * Shape::kBlockM;
    return left < Shape::kBlockM ? left : Shape::kBlockM;
  }
  MK_DEVICE void store_result(const Entered&, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem,
                              int32_t plane = 0) const {
    ptx::tma_store_3d(&p.c_map, smem, first_column<Config>(c) + panel * kPanel, c.m * Shape::kBlockM + warpgroup * kBlockRows, plane);
  }
};

template <class Config>
MK_DEVICE void gemm_init(GemmStorage<Config>& storage) {  // one thread; a warp that shared them out was slower
  for (uint32_t s = 0; s < Config::kStages; ++s) {
    ptx::mbarrier_init(&storage.stage_filled[s], 1);
    ptx::mbarrier_init(&storage.stage_consumed[s], kConsumerWarps);
  }
  for (uint32_t q = 0; q < kTileQueue; ++q) {
    ptx::mbarrier_init(&storage.tile_offered[q], 1);
    ptx::mbarrier_init(&storage.tile_taken[q], kQueueReaders);
  }
  ptx::mbarrier_init(&storage.tile_wanted, 1);
  for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) {
    for (uint32_t b = 0; b < GemmShape<Config>::kResultBuffers; ++b) {
      ptx::mbarrier_init(&storage.block_written[w][b], kWarpgroup / 32);
      ptx::mbarrier_init(&storage.block_stored[w][b], 1);
    }
  }
  storage.entries.init();
  storage.announce.init();  // ends with the fence for all of them
}

// Reads the next item of the queue, as the loading or storing thread or as one warp of a consumer.
enum class Reader { kThread, kWarp };
template <Reader By, class Config>
MK_DEVICE uint32_t take_item(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at) {
  ptx::mbarrier_wait(&storage.tile_offered[at.index], at.parity);
  const uint32_t item = storage.item[at.index];
  if constexpr (By == Reader::kWarp) ptx::sync_warp();  // all lanes have read before one of them gives the slot back
  if (By == Reader::kThread || ptx::lane_index() == 0) ptx::mbarrier_arrive(&storage.tile_taken[at.index]);
  at.advance();
  return item;
}

// ---- warp 1 of warpgroup 0
template <class Config>
MK_DEVICE void offer_item(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at, uint32_t item) {
  if (ptx::lane_index() == 0) {
    ptx::mbarrier_wait(&storage.tile_taken[at.index], at.parity ^ 1);
    storage.item[at.index] = item;
    ptx::mbarrier_arrive(&storage.tile_offered[at.index]);
  }
  ptx::sync_warp();
  at.advance();
}

template <class Config, class Op>
MK_DEVICE void schedule_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  RingPosition<kTileQueue> at;
  Trace trace(call.world, 0);
  const uint32_t num_tiles = op.num_tiles(), lane = ptx::lane_index();
  abi::ControlBlock* control = control_block(call.world);
  uint32_t num_assigned = 0, given = call.role == abi::kCompute ? ptx::cta_index() - kCommCtas : kStop;
  uint32_t parts = 0, wanted = 0;  // of the tile before, and the parity of the barrier that it completes
  bool first = true, last = false, asked = false, ok = true;
  MaybeEntered entered = MaybeEntered::not_yet(call);
  const auto open = [&] {  // lets the others of this CTA store, too
    asked = true;
    entered = storage.entries.open(call);
    ok = static_cast<bool>(entered);
  };
#pragma unroll 1
  while (true) {
    if (!asked && (!first || last)) open();  // not before a first tile of own inputs: it is computed meanwhile
    if (!ok || last) break;
    if (parts != 0) {  // a tile taken sooner than needed would be missing where another CTA has nothing to do
      ptx::mbarrier_wait(&storage.tile_wanted, wanted);
      wanted ^= 1;
    }
    uint32_t tile = op.assigned(num_assigned);
    if (tile != kStop) {
      ++num_assigned;
    } else {
      if (given != kStop) {  // the first tile of a CTA that computes from the start, without asking
        tile = given, given = kStop;
      } else {
        tile = lane == 0 ? ptx::atomic_add(&control->tile_counter, 1) : 0;
        tile = ptx::broadcast(tile, 0) + ptx::cta_count() - kCommCtas;
      }
      last = tile >= num_tiles;
    }
    if (last) continue;
    first = false;
    const TileCoordinate c = op.coordinate(tile);
    parts = op.parts(c);
#pragma unroll 1
    for (uint32_t part = 0; ok && part < parts; ++part) {
      if (op.waits(c, part)) {
        if (!asked) open();
        const uint64_t begin = trace.now();
        if (ok) ok = op.wait_inputs(*entered, c, part);
        if (lane == 0) trace.record(abi::kTraceWait, tile, begin);
      }
      if (ok) offer_item(storage, at, tile * Op::kParts + part);
    }
  }
  if (lane == 0) leave_call(call);  // this CTA takes no more tiles; the epoch it has read at its start
  offer_item(storage, at, kStop);
}

// ---- one thread of warp 0 of warpgroup 0
// Partial tiles that are added pass through the same stages, kAddPanels panels (both warpgroups' blocks) at a time.
template <class Config>
MK_DEVICE char* stage_block(GemmStorage<Config>& storage, uint32_t stage, uint32_t block) {
  constexpr uint32_t kInA = GemmShape<Config>::kBytesA / kBlockBytes;
  return block < kInA ? storage.pipeline.a[stage] + block * kBlockBytes : storage.pipeline.b[stage] + (block - kInA) * kBlockBytes;
}
template <class Config>
MK_DEVICE void load_addend(GemmStorage<Config>& storage, uint32_t stage, const char* addend, uint32_t part, uint32_t rows) {
  using Shape = GemmShape<Config>;
  uint64_t* filled = &storage.stage_filled[stage];
  uint32_t bytes = 0;
#pragma unroll
  for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) bytes += block_bytes(rows, w);
  ptx::mbarrier_arrive_expect(filled, bytes * Shape::kAddPanels);
#pragma unroll 1
  for (uint32_t block = 0; block < Shape::kAddPanels * kConsumerWarpgroups; ++block) {
    const uint32_t size = block_bytes(rows, block % kConsumerWarpgroups);
    const char* source = addend + (part * Shape::kAddPanels * kConsumerWarpgroups + block) * kBlockBytes;
    if (size != 0) ptx::bulk_load(stage_block(storage, stage, block), source, size, filled);
  }
}

template <class Config, class Op>
MK_DEVICE void load_tiles(const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  RingPosition<kTileQueue> queue;
  RingPosition<Shape::kStages> stage;
#pragma unroll 1
  while (true) {
    const uint32_t item = take_item<Reader::kThread>(storage, queue);
    if (item == kStop) return;
    const uint32_t part = item % Op::kParts;
    const TileCoordinate c = op.coordinate(item / Op::kParts);
    ptx::fence_proxy_async();  // what the scheduler acquired becomes visible to the TMA loads below
    const abi::TensorMap *a = op.a_map(c), *b = op.b_map(c);
    const int32_t a_row = op.a_row(c), a_plane = op.a_plane(c, part), column = first_column<Config>(c);
    const uint32_t width = tile_width<Config>(c), bytes = (Shape::kLoadRows + width) * Shape::kBlockK * 2;
    const uint32_t steps = op.steps(c, part);
    uint32_t ask_at = kStop;  // the step at which the next tile is asked for, in the last part that multiplies
    if (part + 1 == op.parts(c) || op.steps(c, part + 1) == 0) {
      constexpr uint32_t kAhead = kAskAhead / Shape::kBlockN;
      ask_at = steps > kAhead ? steps - kAhead : 0;
    }
    if (part == 0 && steps == 0) ptx::mbarrier_arrive(&storage.tile_wanted);
    int32_t a_k = op.a_k(c, part), k = part * steps * Shape::kBlockK;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step, stage.advance(), a_k += Shape::kBlockK, k += Shape::kBlockK) {
      if (step == ask_at) ptx::mbarrier_arrive(&storage.tile_wanted);
      ptx::mbarrier_wait(&storage.stage_consumed[stage.index], stage.parity ^ 1);
      uint64_t* filled = &storage.stage_filled[stage.index];
      ptx::mbarrier_arrive_expect(filled, bytes);
      ptx::tma_load_3d(storage.pipeline.a[stage.index], a, filled, a_k, a_row, a_plane);
      char* smem_b = storage.pipeline.b[stage.index];
      if constexpr (Config::kBRowMajor) {  // panels of 64 columns x kBlockK rows
#pragma unroll
        for (uint32_t p = 0; p < Shape::kBlockN / kPanel; ++p) {
          if (p * kPanel < width) ptx::tma_load_3d(smem_b + p * Shape::kBlockK * kSwizzleBytes, b, filled, column + p * kPanel, k, 0);
        }
      } else {
#pragma unroll
        for (uint32_t n = 0; n < Shape::kBlockN; n += Shape::kSliceN) {
          if (n < width) ptx::tma_load_3d(smem_b + n * kSwizzleBytes, b, filled, k, column + n, 0);
        }
      }
    }
    if constexpr (Op::kAdds) {
      const uint32_t addends = op.addends(c, part), rows = op.rows(c);
#pragma unroll 1
      for (uint32_t i = 0; i < addends * Shape::kAddStages; ++i, stage.advance()) {
        ptx::mbarrier_wait(&storage.stage_consumed[stage.index], stage.parity ^ 1);
        load_addend(storage, stage.index, op.addend(c, i / Shape::kAddStages), i % Shape::kAddStages, rows);
      }
    }
  }
}

// ---- warpgroups 1 and 2
// One k-step of kBlockK for 64 rows and N columns.
template <uint32_t N, class Config>
MK_DEVICE void multiply_stage(float (&d)[Config::kBlockN / 2], const char* a, const char* b, bool accumulate) {
  using Shape = GemmShape<Config>;
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < Shape::kBlockK; k += kInstructionK) {
    const uint64_t da = ptx::matrix_descriptor(a + k * 2, 16, kSwizzleAtom);
    const uint64_t db = Config::kBRowMajor ? ptx::matrix_descriptor(b + k * kSwizzleBytes, Shape::kBlockK * kSwizzleBytes, kSwizzleAtom)
                                           : ptx::matrix_descriptor(b + k * 2, 16, kSwizzleAtom);
    ptx::wgmma<N, Shape::kElement, ptx::Major::kK, Shape::kMajorB>(d, da, db, accumulate || k > 0);
  }
  ptx::wgmma_commit();
}

// Adds one partial tile, or the part of it in one stage.
template <uint32_t Part, class Config>
MK_DEVICE void add_stage(float (&d)[Config::kBlockN / 2], GemmStorage<Config>& storage, uint32_t stage, uint32_t warpgroup) {
  using Shape = GemmShape<Config>;
#pragma unroll
  for (uint32_t p = 0; p < Shape::kAddPanels; ++p) {
    const char* block = stage_block(storage, stage, p * kConsumerWarpgroups + warpgroup);
#pragma unroll
    for (uint32_t u = 0; u < kBlockUnits; ++u) {
      float* e = &d[((Part * Shape::kAddPanels + p) * kBlockUnits + u) * Partial<Config>::kUnit];
      Partial<Config>::add(e, ptx::load_shared(block + unit_offset(u)));
    }
  }
}
template <uint32_t Part, class Config>
MK_DEVICE void add_partial(float (&d)[Config::kBlockN / 2], GemmStorage<Config>& storage, RingPosition<Config::kStages>& stage,
                           uint32_t warpgroup) {
  ptx::mbarrier_wait(&storage.stage_filled[stage.index], stage.parity);
  add_stage<Part>(d, storage, stage.index, warpgroup);
  ptx::sync_warp();  // all lanes have read
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&storage.stage_consumed[stage.index]);
  stage.advance();
  if constexpr (Part + 1 < GemmShape<Config>::kAddStages) add_partial<Part + 1>(d, storage, stage, warpgroup);
}

// Writes 64 rows to shared memory, block by block: rounded once, 64 columns each in the layout of a TMA store, or as blocks of a partial tile.
template <class Config, class Op>
MK_DEVICE void write_blocks(const float (&d)[Config::kBlockN / 2], const Op& op, const TileCoordinate& c, GemmStorage<Config>& storage,
                            uint32_t warpgroup, RingPosition<GemmShape<Config>::kResultBuffers>& at) {
  using Shape = GemmShape<Config>;
  const uint32_t lane = ptx::lane_index(), warp = ptx::thread_index() % kWarpgroup / 32;
  const auto begin = [&] {
    ptx::mbarrier_wait(&storage.block_stored[warpgroup][at.index], at.parity ^ 1);
    return storage.result[warpgroup][at.index];
  };
  const auto end = [&] {
    ptx::fence_proxy_async_shared();
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(&storage.block_written[warpgroup][at.index]);
    at.advance();
  };
  if (op.is_partial(c)) {
#pragma unroll
    for (uint32_t panel = 0; panel < Partial<Config>::kPanels; ++panel) {
      char* block = begin();
#pragma unroll
      for (uint32_t u = 0; u < kBlockUnits; ++u) {
        ptx::store_shared(block + unit_offset(u), Partial<Config>::round(&d[(panel * kBlockUnits + u) * Partial<Config>::kUnit]));
      }
      end();
    }
    return;
  }
  const uint32_t row = warp * 16 + lane % 16;  // the row whose address this lane gives to stmatrix
#pragma unroll
  for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
    if (panel * kPanel >= tile_width<Config>(c)) break;
    char* block = begin();
#pragma unroll
    for (uint32_t j = 0; j < kPanel / 16; ++j) {
      const float* e = &d[panel * (kPanel / 2) + j * 8];
      const uint32_t chunk = (2 * j + lane / 16) ^ (row % 8);  // 128-byte swizzle
      ptx::stmatrix_x4(block + row * kSwizzleBytes + chunk * 16, ptx::pack<Shape::kElement>(e[0], e[1]),
                       ptx::pack<Shape::kElement>(e[2], e[3]), ptx::pack<Shape::kElement>(e[4], e[5]),
                       ptx::pack<Shape::kElement>(e[6], e[7]));
    }
    end();
  }
}

// One part of K for 64 rows and N columns. Nothing is in flight afterwards.
template <uint32_t N, class Config>
MK_DEVICE void multiply_part(float (&d)[Config::kBlockN / 2], GemmStorage<Config>& storage, RingPosition<Config::kStages>& stage,
                             uint32_t steps, uint32_t warpgroup, bool accumulate) {
  const bool reports = ptx::lane_index() == 0;
  uint64_t* previous = nullptr;
  uint32_t step = 0;
#pragma unroll 1
  do {  // at least once: with a way around it ptxas may find accumulators defined outside wgmma, and serializes it
    ptx::mbarrier_wait(&storage.stage_filled[stage.index], stage.parity);
    const char* a = storage.pipeline.a[stage.index] + warpgroup * 64 * kSwizzleBytes;
    multiply_stage<N, Config>(d, a, storage.pipeline.b[stage.index], accumulate || step > 0);
    ptx::wgmma_wait<1>(d);
    if (previous != nullptr && reports) ptx::mbarrier_arrive(previous);
    previous = &storage.stage_consumed[stage.index];
    stage.advance();
  } while (++step < steps);
  ptx::wgmma_wait<0>(d);
  if (reports) ptx::mbarrier_arrive(previous);
}

template <class Config, class Op>
MK_DEVICE void multiply_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  const uint32_t warpgroup = ptx::warp_index() / 4 - 1;
  const bool traces = ptx::thread_index() == kWarpgroup;
  RingPosition<kTileQueue> queue;
  RingPosition<Shape::kStages> stage;
  RingPosition<Shape::kResultBuffers> block;
  Trace trace(call.world, 1);
  float d[Shape::kBlockN / 2];
  uint64_t begin = 0;
#pragma unroll 1
  while (true) {
    const uint32_t item = take_item<Reader::kWarp>(storage, queue), part = item % Op::kParts, tile = item / Op::kParts;
    if (item == kStop) break;
    if (part == 0) begin = trace.now();
    const TileCoordinate c = op.coordinate(tile);
    const uint32_t steps = op.steps(c, part);
    if (Op::kAdds && steps == 0) {
      if (part == 0) {
#pragma unroll
        for (float& e : d) e = 0.0f;
      }
    } else if (Config::kSlices > 1 && c.slice != 0) {
      multiply_part<Shape::kSliceN, Config>(d, storage, stage, steps, warpgroup, part > 0);
    } else {
      multiply_part<Shape::kBlockN, Config>(d, storage, stage, steps, warpgroup, part > 0);
    }
    if constexpr (Op::kAdds) {
      const uint32_t addends = op.addends(c, part);
#pragma unroll 1
      for (uint32_t i = 0; i < addends; ++i) add_partial<0, Config>(d, storage, stage, warpgroup);
    }
    if (part + 1 < op.parts(c)) continue;
    if constexpr (Op::kExchanges) {
      if (const MaybeEntered entered = storage.entries.pass(call)) op.exchange(*entered, d, c);
    }
    write_blocks(d, op, c, storage, warpgroup, block);
    if (traces) trace.record(Op::kAdds && op.steps(c, 0) == 0 ? abi::kTraceReduce : abi::kTraceTile, tile, begin);
  }
}

// ---- one thread of warp 2 of warpgroup 0
// Stores finished blocks, once all ranks have entered; tells warp 3 which flag to raise once a tile's stores are complete.
template <class Config, class Op>
MK_DEVICE void store_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  RingPosition<kTileQueue> queue;
  RingPosition<Shape::kResultBuffers> at, stored;
  Handover::Position announce;
  bool first = true;
  MaybeEntered entered = MaybeEntered::not_yet(call);
  uint32_t on_their_way = 0;  // buffers
  const auto give_back = [&] {
    for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) ptx::mbarrier_arrive(&storage.block_stored[w][stored.index]);
    stored.advance();
    --on_their_way;
  };
#pragma unroll 1
  while (true) {
    const uint32_t item = take_item<Reader::kThread>(storage, queue);
    if (item == kStop) break;
    const TileCoordinate c = op.coordinate(item / Op::kParts);
    if (item % Op::kParts + 1 < op.parts(c)) continue;
    if (first) {
      entered = storage.entries.pass_to_store(call);
      first = false;
    }
    const uint32_t panels = op.is_partial(c) ? Partial<Config>::kPanels : tile_width<Config>(c) / kPanel;
#pragma unroll 1
    for (uint32_t panel = 0; panel < panels; ++panel) {
#pragma unroll 1
      for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) {
        ptx::mbarrier_wait(&storage.block_written[w][at.index], at.parity);
        if (entered) op.store(*entered, c, panel, w, storage.result[w][at.index]);
      }
      at.advance();
      ptx::store_commit();
      if (++on_their_way < Shape::kResultBuffers) continue;
      ptx::store_wait_read<Shape::kResultBuffers - 1>();  // the oldest has been read
      give_back();
    }
    if constexpr (Op::kAnnounces) {
      if (op.announces(c) && entered) {
        ptx::store_wait<0>();
        storage.announce.push(*entered, announce, item / Op::kParts);
      }
    }
    ptx::store_wait_read<0>();
    while (on_their_way > 0) give_back();
  }
  // The stores have read shared memory; kernel exit completes them.
  if constexpr (Op::kAnnounces) storage.announce.end(announce);
}

// All threads of the CTA; whatever one did before is done when it comes here. Computes until the tile counter runs out, then leaves the call.
// Nothing may follow: each warpgroup ends with its own number of registers.
template <class Config, class Op>
MK_DEVICE void compute_role(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  if (ptx::thread_index() == 0) gemm_init(storage);
  ptx::sync_cta();
  const uint32_t warp = ptx::warp_index();
  if (warp < 4) {
    ptx::registers_decrease<kProducerRegisters>();
    if (warp == 0) {
      if (ptx::lane_index() == 0) load_tiles(op, storage);
    } else if (warp == 1) {
      schedule_tiles(call, op, storage);
    } else if (warp == 2) {
      if (ptx::lane_index() == 0) store_tiles(call, op, storage);
    } else {
      if (ptx::cta_index() + 1 == ptx::cta_count()) announce_entry(call);  // of a CTA that computes from the start
      if constexpr (Op::kMoves) op.move(call);
      if constexpr (Op::kAnnounces) {
        const MaybeEntered entered = storage.entries.pass(call);
        storage.announce.serve([&](uint32_t tile) { op.raise(*entered, tile); });  // a tile is handed over by one that has entered
      }
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    multiply_tiles(call, op, storage);
  }
}

}  // namespace mkernel
