// moe_dispatch_gemm: sends each token's row to the ranks that have its experts, and multiplies the rows of each expert by the expert's weights.
// Included by the generated source after `struct Config`.
//
// All CTAs first exchange the routing and work out where every token goes (moe/router.cuh). Then intra_comm fetches rows in order of their first
// expert on this rank, so that the first experts' tiles begin while others' rows are on their way; inter_send puts to each node, once, the rows that
// its experts want; all others compute.
#pragma once
#include "moe/exchange.cuh"
#include "moe/pull.cuh"
#include "moe/router.cuh"
#include "moe/send.cuh"
#include "tile/gemm.cuh"
#include "tile/grouped.cuh"

namespace mkernel {

// ---- config: kN, kK, kIntraComm, kInterSend (each may be kDynamic), kInterReduce (0), kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor,
// kNumNodes, kRanksPerNode, kSlices (1), kTopK, kExperts, kWeighted, kGated, kRowsPerPiece; kSharedBytes, kParameterBytes

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  RoutingArguments routing;
  uint64_t c;             // (max_rows, N): y
  uint64_t slots_offset;  // data heap, read by this rank only: rows by slot, slot_bytes apart
  uint64_t flag_offset;   // signal segment
  uint32_t c_row_bytes;
  uint32_t group_m;        // tile rows of an expert that share columns of B
  float clamp;             // of a gated result; 0: none
  uint32_t counted_alone;  // choices of all ranks, at most, that each CTA counts by itself
  abi::TensorMap a_map;    // (slots, K), boxes of 128 rows; a_short_map: of 64
  abi::TensorMap a_short_map;
  abi::TensorMap b_map;  // (experts of this rank, K, N) or its transpose
  abi::TensorMap c_map;  // (max_rows, N)
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

struct Storage {
  union {
    RoutingScratch routing;
    PullStorage pull;
    GemmStorage<Config> gemm;
  };
  PullBarriers pull_barriers;  // not shared with anything: barriers must not be overwritten
  EntryGate entries;
  uint32_t failed;
  ExpertTable<kExperts> experts;
};

// ---- compute
struct Tiles : GroupedTiles<Config, Parameters, kExperts> {
  using GroupedTiles::GroupedTiles;
  static constexpr bool kAnnouncesEntry = false;  // done when the tiles begin
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return true; }
  struct Blocks {
    const Parameters& p;
    uint32_t first;
    MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
      const Awaited what{abi::kFlagChunk, fetched_flag(p.routing, kR * num_intra_comm(p) + first + i), p.world.rank};
      return wait_ge(entered.call(), Tables(entered, p.routing).arrived(first + i), kSegmentRows, what, kSecondHand * p.world.timeout_ns);
    }
  };
  MK_DEVICE bool wait_inputs(const Entered& entered, const TileCoordinate& c, uint32_t) const {
    return wait_all(entered, Blocks{p, slot_row(c) / kSegmentRows}, (rows(c) + kSegmentRows - 1) / kSegmentRows);
  }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return slot_row(c); }
};

// ---- routing, by all threads of all CTAs
enum class Outcome { kRouted, kRefused, kFailed };

struct Routed {
  Outcome outcome;
  uint32_t items;   // rows to fetch
  uint64_t ticket;  // of the one thread that has put the record: to be waited for before the call ends; else 0
};

MK_DEVICE Routed route(const Call& call, const Parameters& p, Storage& storage, const MaybeEntered& maybe) {
  if (!maybe) return Routed{Outcome::kFailed, 0, 0};
  const Entered entered = *maybe;
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index(), publisher = first_inter_send(p);
  Routed routed{Outcome::kFailed, 0, 0};
  if (cta == publisher) {
    write_record(entered, p.routing);
    ptx::sync_cta();
    if (warp == 0) routed.ticket = announce_record(entered, p);
  }
  stage_rows(entered, p);
  if (warp == 1 && cta == publisher) forward_records(entered, p);  // where it fails, so does the next wait
  if (warp == 0) {
    const bool came = wait_all(entered, RecordFlags<Parameters>{p}, kWorldSize);
    if (ptx::lane_index() == 0) storage.failed = !came;
  }
  ptx::sync_cta();
  if (storage.failed != 0) return routed;

  Router router(entered, p.routing, storage.routing, p.counted_alone);
  bool right = router.read_headers();
  if (right) {
    router.count();
    if (!router.is_few() && !sync_grid(entered, p, 1, barrier_name(p.routing, 0), storage.failed)) return routed;
    right = router.add_up();
  }
  if (!right) {
    const Verdict& verdict = router.verdict();
    if (cta == 0 && ptx::thread_index() == 0) {
      report_error(entered, verdict.code, verdict.details[0], verdict.details[1], verdict.details[2]);
    }
    routed.outcome = Outcome::kRefused;
    return routed;
  }
  router.place();
  storage.experts.build(kExperts, [&](uint32_t e) { return router.rows_of(e); });
  routed.items = router.num_items();
  if (!sync_grid(entered, p, router.is_few() ? 1 : 2, barrier_name(p.routing, 1), storage.failed)) return routed;
  ptx::fence_proxy_async();  // what was scratch is written by bulk copies next; and bulk copies write to the heap
  ptx::sync_cta();
  routed.outcome = Outcome::kRouted;
  return routed;
}

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = shared_storage<Storage>();
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = begin_call_ahead(p.world, role);
  if (ptx::thread_index() == 0) {
    storage.entries.init();
    storage.pull_barriers.init();
  }
  ptx::sync_cta();
  if (cta + 1 == ptx::cta_count() && ptx::warp_index() == 3) announce_entry(call);
  const MaybeEntered entered = ptx::warp_index() == 0 ? storage.entries.open(call) : storage.entries.pass(call);
  const bool traces = ptx::thread_index() == kWarpgroup;  // as for tiles
  Trace trace(p.world, 1);
  const uint64_t begin = traces ? trace.now() : 0;
  const Routed routed = route(call, p, storage, entered);
  if (traces) trace.record(abi::kTraceRoute, cta, begin);
  if (routed.outcome == Outcome::kRouted) {
    if (role == abi::kIntraComm) pull_rows(*entered, p, storage.pull, storage.pull_barriers, routed.items, cta);
    if constexpr (kNodes > 1) {
      if (role == abi::kInterSend) send_rows(*entered, p, storage.pull.pieces, storage.pull_barriers.copy, cta - first_inter_send(p));
    }
  }
  if (routed.ticket != 0) wait_put(call, routed.ticket, rail_peer(p.world, 1));
  if (routed.outcome == Outcome::kRouted) {
    compute_role(call, Tiles(p, storage.experts), storage.gemm);
    return;
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) routed.outcome == Outcome::kRefused ? leave_refused(call) : leave_call(call);
}

}  // namespace mkernel
