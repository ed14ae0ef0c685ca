// moe_gemm_combine: the rows of each expert times the expert's weights, and of these products every token's weighted sum. Included by the generated
// source after `struct Config`.
//
// Compute CTAs multiply expert by expert into this rank's heap. Who finishes the last tile of an expert tells the node that its rows are there.
// intra_comm combines from the start and never computes; the consumers of compute CTAs join in when there are no more tiles. A token's rows are waited
// for by expert. What is summed where: moe/combine.cuh.
//
// Most tokens wait for one of the last experts, so the link would idle until the end. In large calls intra_comm therefore first copies rows of earlier
// experts from the node mates, window by window of experts, to where they are summed up later.
#pragma once
#include "moe/combine_send.cuh"
#include "moe/fetch.cuh"
#include "tile/gemm.cuh"
#include "tile/grouped.cuh"

namespace mkernel {

// ---- config: kN, kK, kIntraComm, kInterSend (each may be kDynamic), kInterReduce (0), kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor,
// kNumNodes, kRanksPerNode, kSlices (1), kTopK, kWeighted, kExperts, kWarps, kRowsPerPiece; kSharedBytes, kParameterBytes
using Shape = GemmShape<Config>;
using Experts = ExpertTable<Config::kExperts>;
static_assert(Config::kWarps * 32 == kGemmThreads, "warps that combine");

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  Combining combining;
  uint64_t c;                  // at rows_offset: the products of this rank's experts, (max_rows, N)
  uint64_t expert_offsets;     // (kExperts + 1) int32: the row with which each expert begins
  uint64_t counters_offset;    // data heap, read by this rank only: struct Counters
  uint64_t rows_offset;        // data heap: (max_rows, N)
  uint64_t flag_offset;        // signal segment: a flag for the zeroed counters, one per local rank and expert, then those of combining
  uint64_t fetched_offset;     // data heap, read by this rank only: (N, max_tokens, k) rows, of choices whose rows are copied
  uint32_t c_row_bytes;        // from a product, or a row that is fetched, to the next one: whole lines
  uint32_t group_m;            // tile rows of an expert that share columns of B
  uint32_t windows;            // of experts; rows of all but the last are copied
  uint32_t reserved[7];        // the maps are 64-byte aligned
  abi::TensorMap a_map;        // (max_rows, K), boxes of 128 rows
  abi::TensorMap a_short_map;  // the same, boxes of 64 rows
  abi::TensorMap b_map;        // (experts of this rank, K, N) or its transpose
  abi::TensorMap c_map;        // (max_rows, N)
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

struct Storage {
  union {
    GemmStorage<Config> gemm;
    FetchStorage fetch;
  };
  FetchBarriers fetch_barriers;  // not shared with anything: barriers must not be overwritten
  EntryGate entries;             // of intra_comm
  Experts experts;
};

// ---- flags, by number
constexpr uint32_t kZeroedFlag = 0;
MK_DEVICE uint32_t fetched_name(const Parameters& p) {  // in reports: the number after the last flag
  return arrived_flag(p.combining, kNodes, 0) + kNodes - 1;
}
MK_DEVICE uint32_t expert_flag(uint32_t holder, uint32_t expert) { return 1 + holder * Config::kExperts + expert; }
struct ZeroedFlag {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return wait_flag(entered, p, kZeroedFlag, p.world.rank); }
};

// ---- counters, zeroed in each call
struct Counters {
  uint64_t fetched;    // intra_comm CTAs that have copied all their rows
  uint32_t next_item;  // to combine
  uint32_t reserved;
  uint32_t finished[Config::kExperts];  // tiles of each expert
};
MK_DEVICE Counters& counters(const Entered& entered, const Parameters& p) {
  return *reinterpret_cast<Counters*>(shared_heap(entered, p.world.local_rank) + p.counters_offset);
}

// ---- where products are
struct FinishedRows {
  static constexpr bool kByExpert = true;
  const Parameters& p;
  MK_DEVICE uint32_t window(const Choice& choice) const { return choice.expert * p.windows / Config::kExperts; }
  MK_DEVICE uint32_t first_expert(uint32_t window) const { return (window * Config::kExperts + p.windows - 1) / p.windows; }
  MK_DEVICE bool is_fetched(const Choice& choice) const {
    return kR > 1 && choice.holder != p.world.local_rank && window(choice) + 1 < p.windows;
  }
  MK_DEVICE bool wait_fetched(const Entered& entered) const {
    const Awaited what{abi::kFlagChunk, fetched_name(p), p.world.rank};
    return wait_ge(entered.call(), &counters(entered, p).fetched, num_intra_comm(p), what, kSecondHand * p.world.timeout_ns);
  }
  MK_DEVICE bool wait_expert(const Entered& entered, const Choice& choice) const {
    return wait_flag(entered, p, expert_flag(choice.holder, choice.expert), node_mate(p.world, choice.holder));
  }
  MK_DEVICE const char* product(const Choice& choice) const {
    return heap(p.world, choice.holder) + p.rows_offset + uint64_t(choice.row) * p.c_row_bytes;
  }
  MK_DEVICE uint64_t fetched_offset(uint64_t index) const { return p.fetched_offset + index * p.c_row_bytes; }

  // ---- for combining
  MK_DEVICE bool wait(const Entered& entered, const Choice& choice) const {
    return is_fetched(choice) ? wait_fetched(entered) : wait_expert(entered, choice);
  }
  MK_DEVICE const char* at(const Choice& choice) const {
    return is_fetched(choice) ? heap(p.world, p.world.local_rank) + fetched_offset(choice.index) : product(choice);
  }
};

struct SharedItems {  // whatever comes next in the rank
  const Entered& entered;
  const Parameters& p;
  MK_DEVICE uint32_t take() const {
    const uint32_t item = ptx::lane_index() == 0 ? ptx::atomic_add(&counters(entered, p).next_item, 1) : 0;
    return ptx::broadcast(item, 0);
  }
};

// What any warp combines, once the counters are zero. Warp function.
MK_DEVICE void combine_items(const Entered& entered, const Parameters& p, bool traces) {
  if (wait_all(entered, ZeroedFlag{p}, 1)) combine(entered, p, FinishedRows{p}, SharedItems{entered, p}, traces);
}

// ---- compute
struct Tiles : GroupedTiles<Config, Parameters, Config::kExperts> {
  using GroupedTiles::GroupedTiles;
  static constexpr bool kAnnounces = true, kFinishes = true;
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return false; }
  MK_DEVICE bool wait_inputs(const Entered&, const TileCoordinate&, uint32_t) const { return true; }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return packed_row(c); }
  MK_DEVICE bool announces(const TileCoordinate&) const { return true; }
  // Counts the tile; the last one of an expert tells the node. Counters have no order but that of their atomics, which all who count take part in.
  MK_DEVICE void raise(const Entered& entered, uint32_t tile) const {
    const uint32_t expert = coordinate(tile).plane;
    if (!wait_all(entered, ZeroedFlag{p}, 1)) return;
    const uint32_t finished = ptx::lane_index() == 0 ? ptx::atomic_add_acq_rel(&counters(entered, p).finished[expert], 1) + 1 : 0;
    const bool is_last = ptx::broadcast(finished, 0) == experts.tile_rows(expert) * tiles_n();
    ptx::sync_warp();  // what lane 0 has acquired, all lanes release
    if (is_last) raise_flag(entered, p, expert_flag(p.world.local_rank, expert), 0);
  }
  MK_DEVICE void finish(const Entered& entered) const { combine_items(entered, p, ptx::warp_index() == kWarpgroup / 32); }
};

// ---- intra_comm
struct WindowFlags {  // of the experts of a window, of all node mates
  const FinishedRows& rows;
  uint32_t first, count;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    const uint32_t holder = local_peer(rows.p.world, 1 + i / count);
    return rows.wait_expert(entered, Choice{0, holder, 0, first + i % count, true});
  }
};

// Finds the rows of a window that this CTA copies: of every stride-th of the tokens of the rail's rank at a distance. Warp function.
constexpr uint32_t kLooks = 4;  // of a lane, under way at once
MK_DEVICE void find_rows(const Entered& entered, const Parameters& p, FoundRows& found, uint32_t window, uint32_t distance) {
  const FinishedRows rows{p};
  const uint32_t node = node_at(p.world, distance), count = distance == 0 ? p.combining.tokens : count_served(p, distance);
  const uint32_t cta = ptx::cta_index(), stride = num_intra_comm(p), mine = cta < count ? (count - cta - 1) / stride + 1 : 0;
  char* own = shared_heap(entered, p.world.local_rank);
#pragma unroll 1
  for (uint32_t base = ptx::lane_index(); base - ptx::lane_index() < mine * kTopK; base += kLooks * 32) {  // a choice per lane and look
    uint64_t index[kLooks];
    int32_t row[kLooks];
    uint32_t expert[kLooks];
#pragma unroll
    for (uint32_t look = 0; look < kLooks; ++look) {
      const uint32_t i = base + look * 32, place = cta + i / kTopK * stride;
      const bool exists = i < mine * kTopK;
      const uint32_t token = distance == 0 || !exists ? place : load_index(p.combining.listed, token_index(p.combining, node, place));
      index[look] = token_index(p.combining, node, token) * kTopK + i % kTopK;
      row[look] = exists ? load_index(p.combining.row_of, index[look]) : -1;
      expert[look] = exists ? load_index(p.combining.expert_of, index[look]) : 0;
    }
#pragma unroll
    for (uint32_t look = 0; look < kLooks; ++look) {
      const Choice c = make_choice(p, index[look], row[look], expert[look]);
      const bool wanted = c.exists && rows.is_fetched(c) && rows.window(c) == window;
      found.add(wanted, wanted ? rows.product(c) : nullptr, own + rows.fetched_offset(c.index));
    }
  }
}

MK_DEVICE void find_all_rows(const Entered& entered, const Parameters& p, FetchStorage& storage, FetchBarriers& barriers) {
  const FinishedRows rows{p};
  FoundRows found(storage, barriers);
#pragma unroll 1
  for (uint32_t window = 0; window + 1 < p.windows; ++window) {
    const uint32_t first = rows.first_expert(window), count = rows.first_expert(window + 1) - first;
    if (!wait_all(entered, WindowFlags{rows, first, count}, count * (kR - 1))) break;
    ptx::fence_proxy_async();  // what was acquired is copied by bulk copies
#pragma unroll 1
    for (uint32_t distance = 1; distance <= kNodes; ++distance) find_rows(entered, p, found, window, distance % kNodes);
  }
  found.end();
}

// By one thread: copies what is found, and tells this rank's CTAs. After a failure they see that by themselves.
MK_DEVICE void copy_rows(const Entered& entered, const Parameters& p, FetchStorage& storage, FetchBarriers& barriers) {
  Trace trace(p.world, 2);
  const uint64_t begin = trace.now();
  CopyRing ring(storage.pieces, barriers.copy);
  FetchCopies copies{storage, barriers, p.combining.row_bytes};
  ring.copy(copies);
  if (ZeroedFlag{p}.wait(entered, 0)) ptx::add_release(&counters(entered, p).fetched, 1);
  trace.record(abi::kTraceFetch, ptx::cta_index(), begin);
}

// One warp of the rank. Experts without rows have no last tile to tell of them; windows are waited for whole.
MK_DEVICE void zero_counters(const Entered& entered, const Parameters& p) {
  Counters& zeroed = counters(entered, p);
  const int32_t* first_row = reinterpret_cast<const int32_t*>(p.expert_offsets);
#pragma unroll 1
  for (uint32_t expert = ptx::lane_index(); expert < Config::kExperts; expert += 32) {
    zeroed.finished[expert] = 0;
    if (kR == 1 || p.windows == 1 || first_row[expert] != first_row[expert + 1]) continue;
#pragma unroll 1
    for (uint32_t i = 1; i < kR; ++i) {
      raise_flag_of(entered, p, expert_flag(p.world.local_rank, expert), local_peer(p.world, i));
    }
  }
  if (ptx::lane_index() == 0) zeroed.fetched = zeroed.next_item = 0;
  ptx::sync_warp();
  if (ptx::lane_index() == 0) raise_flag_of(entered, p, kZeroedFlag, p.world.local_rank);
}

MK_DEVICE void combine_role(const Call& call, const Parameters& p, Storage& storage) {  // all threads of the CTA
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index(), came = load_index(p.expert_offsets, Config::kExperts);
  if (ptx::thread_index() == 0) {
    storage.entries.init();
    storage.fetch_barriers.init();
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  const MaybeEntered entered = warp == 0 ? storage.entries.open(call) : storage.entries.pass(call);
  if (!entered || !rows_fit(call, p, came)) return;
  if (cta == 0 && warp == 0) zero_counters(*entered, p);
  if (kR > 1 && p.windows > 1) {
    if (warp == 0 && ptx::elected()) copy_rows(*entered, p, storage.fetch, storage.fetch_barriers);
    if (warp == 2) find_all_rows(*entered, p, storage.fetch, storage.fetch_barriers);
    ptx::sync_cta();  // no warp looks for what has not come while others copy
  }
  combine_items(*entered, p, warp == 0);
}

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = shared_storage<Storage>();
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = begin_call(p.world, role);
  if (role == abi::kCompute) {
    const int32_t* first = reinterpret_cast<const int32_t*>(p.expert_offsets);
    const uint32_t came = first[Config::kExperts];
    storage.experts.build(Config::kExperts, [&](uint32_t e) { return static_cast<uint32_t>(first[e + 1] - first[e]); });
    if (rows_fit(call, p, came)) {
      compute_role(call, Tiles(p, storage.experts), storage.gemm);
      return;
    }
  }
  if (role == abi::kIntraComm) {
    combine_role(call, p, storage);
  } else if (kNodes > 1 && role == abi::kInterSend) {
    send_combined(call, p, cta - first_inter_send(p), num_inter_send(p));
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) leave_call(call);
}

}  // namespace mkernel
