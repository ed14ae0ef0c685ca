// The GEMM of every fused kernel: C tiles of kBlockM x kBlockN = A (K-major) * B (K-major or N-major), float32 accumulation.
//
// A CTA is three warpgroups. Warpgroup 0: warp 0 loads tiles by TMA, warp 1 schedules (takes tiles from a counter, waits on the system flags
// that a tile needs, hands over the tile or STOP). Warpgroups 1 and 2 each multiply 64 rows of the tile and store them.
//
// With Config::kCluster == 2 the CTAs of a pair compute two tiles at a time that lie one above the other: each loads its own rows of A and half
// of the columns of B, which it multicasts to both. CTA 0 (the leader) schedules for both. What the Op numbers are then pairs of tiles.
//
// A kernel provides an Op:
//   uint32_t num_tiles();                               tiles (pairs) of this rank
//   TileCoordinate coordinate(uint32_t tile);           the one tile -> coordinate function; of a pair, the upper tile's
//   kParts                                              K arrives in this many equal parts; a tile starts when its first one is there
//   bool wait_inputs(const Call&, coordinate, part);    warp function: until that part of the tile's (pair's) inputs is there (false: leave)
//   const TensorMap* a_map(c); a_row(c), a_plane(c, part), a_k(part);   where the tile's rows of A are
//   const TensorMap* b_map(c);
//   bool needs_peers(c);                                false: the tile reads this rank's own memory only
//   const TensorMap* c_map(c); c_row(c), c_plane(c);    where the result goes
// A pair's lower tile may lie beyond the end of its shard: its rows of A are read as zeros and nothing of it is stored (tensor maps see to both).
#pragma once
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

constexpr uint32_t kSwizzleBytes = 128;               // one row of every tile in shared memory
constexpr uint32_t kPanel = kSwizzleBytes / 2;        // 16-bit elements of such a row
constexpr uint32_t kSwizzleAtom = 8 * kSwizzleBytes;  // 8 rows: the pattern repeats
constexpr uint32_t kInstructionK = 16;                // k of one wgmma
constexpr uint32_t kTileQueue = 2;                    // items (a tile and a part of K: tile * kParts + part) handed over ahead
constexpr uint32_t kStop = 0xffffffffu;               // in the tile queue: no more tiles

// Named barriers; 0 is sync_cta.
enum NamedBarrier : uint32_t {
  kBarrierCta = 0,
  kBarrierConsumer = 1 /* + warpgroup */,
  kBarrierConsumers = kBarrierConsumer + kConsumerWarpgroups
};

struct TileCoordinate {
  uint32_t plane;  // which shard (allgather_gemm: the source rank)
  uint32_t m;      // tile row inside the shard; of a pair, the upper one
  uint32_t n;      // tile column
  uint32_t slice;  // 0: the whole tile; 1 .. Config::kSlices: so many columns of it (the last tiles are sliced to fill all SMs)
};

template <class Config>
struct GemmShape {
  static constexpr uint32_t kBlockM = 64 * kConsumerWarpgroups, kBlockN = Config::kBlockN, kBlockK = kPanel;
  static constexpr uint32_t kStages = Config::kStages;
  static constexpr uint32_t kTilesN = (Config::kN + kBlockN - 1) / kBlockN;
  static constexpr uint32_t kStepsK = (Config::kK + kBlockK - 1) / kBlockK;
  static constexpr uint32_t kSliceN = kBlockN / Config::kSlices;     // columns of a slice
  static constexpr uint32_t kItemRows = kBlockM * Config::kCluster;  // of C: what the CTAs of a cluster compute at a time
  // One TMA load of B: of a K-major one so many columns, of a row-major one so many rows of K. Each CTA of a cluster loads its share for all.
  static constexpr uint32_t kLoadN = kSliceN / Config::kCluster, kLoadK = kBlockK / Config::kCluster;
  static constexpr uint32_t kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  static constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  static constexpr ptx::Major kMajorB = Config::kBRowMajor ? ptx::Major::kMN : ptx::Major::kK;
  static_assert(kBlockN % kPanel == 0 && kBlockN <= 256, "kBlockN: 64, 128, 192 or 256");
  static_assert(kSliceN * Config::kSlices == kBlockN && kSliceN % kPanel == 0, "a slice is a whole number of panels");
  static_assert(Config::kCluster == 1 || Config::kCluster == 2, "one CTA, or a pair");
  static_assert(kLoadN % 8 == 0 && kLoadK % 8 == 0, "the swizzle's pattern repeats after 8 rows");
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
  alignas(1024) char result[kConsumerWarpgroups][2][64 * kSwizzleBytes];
  uint64_t stage_filled[Shape::kStages], stage_consumed[Shape::kStages];
  uint64_t tile_offered[kTileQueue], tile_taken[kTileQueue];
  uint64_t entries_checked;  // completes once: all ranks have entered with the same plan, or `refused` is set
  uint32_t item[kTileQueue];
  uint32_t refused;
  uint64_t item_sent, item_relayed;  // of a pair: by the leader's scheduler (here), by the other's (at the leader)
  uint32_t sent_item;
};

// This CTA's rank in its cluster, and all threads of the cluster.
template <class Config>
MK_DEVICE uint32_t cluster_rank() {
  return Config::kCluster > 1 ? ptx::cta_rank_in_cluster() : 0;
}
template <class Config>
MK_DEVICE void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    ptx::sync_cta();
  }
}
// This CTA's tile of a pair.
template <class Config>
MK_DEVICE TileCoordinate own_tile(TileCoordinate c) {
  c.m += cluster_rank<Config>();
  return c;
}

template <class Config>
MK_DEVICE uint32_t tile_width(const TileCoordinate& c) {
  return Config::kSlices > 1 && c.slice != 0 ? GemmShape<Config>::kSliceN : GemmShape<Config>::kBlockN;
}
template <class Config>
MK_DEVICE uint32_t first_column(const TileCoordinate& c) {
  return c.n * GemmShape<Config>::kBlockN + (Config::kSlices > 1 && c.slice != 0 ? (c.slice - 1) * GemmShape<Config>::kSliceN : 0);
}

template <class Config>
MK_DEVICE void gemm_init(GemmStorage<Config>& storage) {  // one thread, before a sync_cluster
  for (uint32_t s = 0; s < Config::kStages; ++s) {
    ptx::mbarrier_init(&storage.stage_filled[s], 1);
    ptx::mbarrier_init(&storage.stage_consumed[s], kConsumerWarps * Config::kCluster);  // a load reaches all CTAs of the cluster
  }
  for (uint32_t q = 0; q < kTileQueue; ++q) {
    ptx::mbarrier_init(&storage.tile_offered[q], 1);
    ptx::mbarrier_init(&storage.tile_taken[q], 1 + kConsumerWarps);
  }
  ptx::mbarrier_init(&storage.entries_checked, 1);
  if constexpr (Config::kCluster > 1) {
    ptx::mbarrier_init(&storage.item_sent, 1);
    ptx::mbarrier_init(&storage.item_relayed, 1);
  }
  storage.refused = 0;
  ptx::mbarrier_init_fence();
}

// Reads the next item of the queue, as the loading thread or as one warp of a consumer.
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
  ptx::sync_warp();  // what any lane acquired is handed over
  if (ptx::lane_index() == 0) {
    ptx::mbarrier_wait(&storage.tile_taken[at.index], at.parity ^ 1);
    storage.item[at.index] = item;
    ptx::mbarrier_arrive(&storage.tile_offered[at.index]);
  }
  ptx::sync_warp();
  at.advance();
}

// To the other CTA's scheduler, before the item is offered here: what this warp acquired at the system's scope goes with it.
template <class Config>
MK_DEVICE void send_item(GemmStorage<Config>& storage, uint32_t& parity, uint32_t item) {
  if constexpr (Config::kCluster > 1) {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_wait_cluster(&storage.item_relayed, parity ^ 1);
      ptx::store_cluster(&storage.sent_item, 1, item);
      ptx::mbarrier_arrive_cluster(&storage.item_sent, 1);
    }
    parity ^= 1;
  }
}

// Waits until all ranks have entered and lets the consumers store.
template <class Config>
MK_DEVICE bool check_entries(const Call& call, GemmStorage<Config>& storage) {
  const bool ok = wait_all_entered(call);
  if (ptx::lane_index() == 0) {
    storage.refused = !ok;
    ptx::mbarrier_arrive(&storage.entries_checked);
  }
  return ok;
}

template <class Config, class Op>
MK_DEVICE void schedule_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  RingPosition<kTileQueue> at;
  uint32_t sent = 0;
  Trace trace(call.world, 0);
  const uint32_t num_tiles = op.num_tiles(), lane = ptx::lane_index();
  abi::ControlBlock* control = control_block(call.world);
  bool first = true, checked = false, ok = true;
#pragma unroll 1
  while (ok) {
    uint32_t tile = lane == 0 ? ptx::atomic_add(&control->tile_counter, 1) : 0;
    tile = ptx::broadcast(tile, 0);
    const bool last = tile >= num_tiles;
    const TileCoordinate c = last ? TileCoordinate{} : op.coordinate(tile);
    const bool needs_peers = !last && op.needs_peers(c);
    if (!checked && (!first || last || needs_peers)) {  // not before a first local tile: it is computed meanwhile
      ok = check_entries(call, storage);
      checked = true;
    }
    if (last) break;
    first = false;
#pragma unroll 1
    for (uint32_t part = 0; ok && part < Op::kParts; ++part) {
      if (needs_peers) {
        const uint64_t begin = trace.now();
        ok = op.wait_inputs(call, c, part);
        if (lane == 0) trace.record(abi::kTraceWait, tile, begin);
      }
      if (ok) {
        send_item(storage, sent, tile * Op::kParts + part);
        offer_item(storage, at, tile * Op::kParts + part);
      }
    }
  }
  send_item(storage, sent, kStop);
  offer_item(storage, at, kStop);
}

// The same warp of a pair's other CTA: offers what the leader sends.
template <class Config>
MK_DEVICE void relay_items(const Call& call, GemmStorage<Config>& storage) {
  RingPosition<kTileQueue> at;
  const uint32_t lane = ptx::lane_index();
  bool checked = false;
  uint32_t item = 0;
#pragma unroll 1
  for (uint32_t parity = 0; item != kStop; parity ^= 1) {
    if (lane == 0) {
      ptx::mbarrier_wait_cluster(&storage.item_sent, parity);
      item = storage.sent_item;
      ptx::mbarrier_arrive_cluster(&storage.item_relayed, 0);
    }
    item = ptx::broadcast(item, 0);
    offer_item(storage, at, item);
    if (!checked) check_entries(call, storage);  // the first tile is computed meanwhile
    checked = true;
  }
}

// ---- one thread of warp 0 of warpgroup 0
// A load of B, for all CTAs of the cluster.
template <class Config>
MK_DEVICE void load_b(void* smem, const abi::TensorMap* map, uint64_t* filled, int32_t c0, int32_t c1) {
  if constexpr (Config::kCluster > 1) {
    ptx::tma_load_3d_multicast(smem, map, filled, c0, c1, 0, (1u << Config::kCluster) - 1);
  } else {
    ptx::tma_load_3d(smem, map, filled, c0, c1, 0);
  }
}

template <class Config, class Op>
MK_DEVICE void load_tiles(const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  RingPosition<kTileQueue> queue;
  RingPosition<Shape::kStages> stage;
  const uint32_t rank = cluster_rank<Config>();
#pragma unroll 1
  while (true) {
    const uint32_t item = take_item<Reader::kThread>(storage, queue);
    if (item == kStop) return;
    const uint32_t part = item % Op::kParts;
    const TileCoordinate c = own_tile<Config>(op.coordinate(item / Op::kParts));
    ptx::fence_proxy_async();  // what the scheduler acquired becomes visible to the TMA loads below
    const abi::TensorMap *a = op.a_map(c), *b = op.b_map(c);
    const int32_t a_row = op.a_row(c), a_plane = op.a_plane(c, part), column = first_column<Config>(c);
    const uint32_t width = tile_width<Config>(c), bytes = Shape::kBytesA + width * Shape::kBlockK * 2;
    int32_t a_k = op.a_k(c, part), k = part * Shape::kStepsK / Op::kParts * Shape::kBlockK;
#pragma unroll 1
    for (uint32_t step = 0; step < Shape::kStepsK / Op::kParts; ++step, stage.advance(), a_k += Shape::kBlockK, k += Shape::kBlockK) {
      ptx::mbarrier_wait(&storage.stage_consumed[stage.index], stage.parity ^ 1);
      uint64_t* filled = &storage.stage_filled[stage.index];
      ptx::mbarrier_arrive_expect(filled, bytes);
      ptx::tma_load_3d(storage.pipeline.a[stage.index], a, filled, a_k, a_row, a_plane);
      if constexpr (Config::kBRowMajor) {  // panels of 64 columns x kBlockK rows
        char* smem_b = storage.pipeline.b[stage.index] + rank * Shape::kLoadK * kSwizzleBytes;
#pragma unroll
        for (uint32_t p = 0; p < Shape::kBlockN / kPanel; ++p) {
          if (p * kPanel < width) {
            load_b<Config>(smem_b + p * Shape::kBlockK * kSwizzleBytes, b, filled, column + p * kPanel, k + rank * Shape::kLoadK);
          }
        }
      } else {
        char* smem_b = storage.pipeline.b[stage.index] + rank * Shape::kLoadN * kSwizzleBytes;
#pragma unroll
        for (uint32_t n = 0; n < Shape::kBlockN; n += Shape::kSliceN) {
          if (n < width) load_b<Config>(smem_b + n * kSwizzleBytes, b, filled, k, column + n + rank * Shape::kLoadN);
        }
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

// Rounds 64 rows once and stores them in panels of 64 columns, two panels in flight. Warpgroup function.
template <class Config, class Op>
MK_DEVICE void store_result(const float (&d)[Config::kBlockN / 2], const Op& op, const TileCoordinate& c, GemmStorage<Config>& storage,
                            uint32_t warpgroup, uint32_t& buffer) {
  using Shape = GemmShape<Config>;
  const uint32_t lane = ptx::lane_index(), thread = ptx::thread_index() % kWarpgroup, barrier = kBarrierConsumer + warpgroup;
  const uint32_t row = thread / 32 * 16 + lane % 16;  // the row whose address this lane gives to stmatrix
  const int32_t column = first_column<Config>(c), c_row = op.c_row(c) + warpgroup * 64, plane = op.c_plane(c);
#pragma unroll
  for (uint32_t panel = 0; panel < Shape::kBlockN / kPanel; ++panel) {
    if (panel * kPanel >= tile_width<Config>(c)) break;
    char* smem = storage.result[warpgroup][buffer];
    buffer ^= 1;                                 // across tiles too: a tile may have an odd number of panels
    if (thread == 0) ptx::store_wait_read<1>();  // the store before last has read this buffer
    ptx::barrier_sync(barrier, kWarpgroup);
#pragma unroll
    for (uint32_t j = 0; j < kPanel / 16; ++j) {
      const float* e = &d[panel * (kPanel / 2) + j * 8];
      const uint32_t chunk = (2 * j + lane / 16) ^ (row % 8);  // 128-byte swizzle
      ptx::stmatrix_x4(smem + row * kSwizzleBytes + chunk * 16, ptx::pack<Shape::kElement>(e[0], e[1]),
                       ptx::pack<Shape::kElement>(e[2], e[3]), ptx::pack<Shape::kElement>(e[4], e[5]),
                       ptx::pack<Shape::kElement>(e[6], e[7]));
    }
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(barrier, kWarpgroup);
    if (thread == 0) {
      ptx::tma_store_3d(op.c_map(c), smem, column + panel * kPanel, c_row, plane);
      ptx::store_commit();
    }
  }
}

// A stage has been read: said to the CTA of that rank, which may load into it again.
template <class Config>
MK_DEVICE void give_back(uint64_t* consumed, uint32_t rank) {
  if constexpr (Config::kCluster > 1) {
    ptx::mbarrier_arrive_cluster_relaxed(consumed, rank);
  } else {
    ptx::mbarrier_arrive(consumed);
  }
}

// One part of K for 64 rows and N columns. Nothing is in flight afterwards.
template <uint32_t N, class Config>
MK_DEVICE void multiply_part(float (&d)[Config::kBlockN / 2], GemmStorage<Config>& storage, RingPosition<Config::kStages>& stage,
                             uint32_t steps, uint32_t warpgroup, bool accumulate) {
  const uint32_t lane = ptx::lane_index();
  const bool reports = lane < Config::kCluster;  // a lane for each CTA of the cluster
  uint64_t* previous = nullptr;
#pragma unroll 1
  for (uint32_t step = 0; step < steps; ++step, stage.advance()) {
    ptx::mbarrier_wait(&storage.stage_filled[stage.index], stage.parity);
    const char* a = storage.pipeline.a[stage.index] + warpgroup * 64 * kSwizzleBytes;
    multiply_stage<N, Config>(d, a, storage.pipeline.b[stage.index], accumulate || step > 0);
    ptx::wgmma_wait<1>(d);
    if (previous != nullptr && reports) give_back<Config>(previous, lane);
    previous = &storage.stage_consumed[stage.index];
  }
  ptx::wgmma_wait<0>(d);
  if (reports) give_back<Config>(previous, lane);
}

template <class Config, class Op>
MK_DEVICE void multiply_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  constexpr uint32_t kSteps = Shape::kStepsK / Op::kParts;
  const uint32_t warpgroup = ptx::warp_index() / 4 - 1;
  const bool traces = ptx::thread_index() == kWarpgroup;
  RingPosition<kTileQueue> queue;
  RingPosition<Shape::kStages> stage;
  Trace trace(call.world, 1);
  float d[Shape::kBlockN / 2];
  uint64_t begin = 0;
  uint32_t buffer = 0;
  bool first = true, refused = false;
#pragma unroll 1
  while (true) {
    const uint32_t item = take_item<Reader::kWarp>(storage, queue), part = item % Op::kParts, tile = item / Op::kParts;
    if (item == kStop) break;
    if (part == 0) begin = trace.now();
    const TileCoordinate c = own_tile<Config>(op.coordinate(tile));
    if (Config::kSlices > 1 && c.slice != 0) {
      multiply_part<Shape::kSliceN, Config>(d, storage, stage, kSteps, warpgroup, part > 0);
    } else {
      multiply_part<Shape::kBlockN, Config>(d, storage, stage, kSteps, warpgroup, part > 0);
    }
    if (part + 1 < Op::kParts) continue;
    if (first) {
      ptx::mbarrier_wait(&storage.entries_checked, 0);
      refused = storage.refused != 0;
      first = false;
    }
    if (!refused) store_result(d, op, c, storage, warpgroup, buffer);
    if (traces) trace.record(abi::kTraceTile, tile, begin);
  }
  if (ptx::thread_index() % kWarpgroup == 0) ptx::store_wait<0>();
}

// All threads of the CTA, after gemm_init and a sync_cluster; computes until the tile counter runs out, then leaves the call. Nothing may
// follow: each warpgroup ends with its own number of registers.
template <class Config, class Op>
MK_DEVICE void compute_role(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  const uint32_t warp = ptx::warp_index();
  if (warp < 4) {
    ptx::registers_decrease<kProducerRegisters>();
    if (warp == 0) {
      if (ptx::lane_index() == 0) load_tiles(op, storage);
    } else if (warp == 1) {
      if (cluster_rank<Config>() == 0) {
        schedule_tiles(call, op, storage);
      } else {
        relay_items(call, storage);
      }
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    multiply_tiles(call, op, storage);
    ptx::barrier_sync(kBarrierConsumers, kConsumerThreads);
    if (ptx::thread_index() == kWarpgroup) leave_call(call);
  }
  if constexpr (Config::kCluster > 1) {  // neither CTA ends while the other may still load into it or arrive there
    ptx::sync_warp();
    ptx::cluster_sync();
  }
}

}  // namespace mkernel
