// moe_gemm_combine: the rows of each expert times the expert's weights, and of these products every token's weighted sum. Included by the generated
// source after `struct Config`.
//
// Compute CTAs multiply expert by expert into this rank's heap. Who finishes the last tile of an expert tells the node that its rows are there.
// intra_comm combines from the start and never computes: a token's rows are waited for by expert. What is summed where: moe/combine.cuh.
//
// Most tokens wait for one of the last experts, so the link would idle until the end. In large calls a warp therefore first copies rows of earlier
// experts from its node mates, window by window of experts, to where it sums them up later.
#pragma once
#include "moe/combine_send.cuh"
#include "tile/gemm.cuh"
#include "tile/grouped.cuh"

namespace mkernel {

// ---- config: kN, kK, kIntraComm, kInterSend (each may be kDynamic), kInterReduce (0), kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor,
// kNumNodes, kRanksPerNode, kSlices (1), kTopK, kWeighted, kExperts, kWarps; kSharedBytes, kParameterBytes
using Shape = GemmShape<Config>;
using Experts = ExpertTable<Config::kExperts>;
static_assert(Config::kWarps * 32 == kGemmThreads, "warps that combine");

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  Combining combining;
  uint64_t c;                // at rows_offset: the products of this rank's experts, (max_rows, N), contiguous
  uint64_t expert_offsets;   // (kExperts + 1) int32: the row with which each expert begins
  uint64_t counters_offset;  // data heap, read by this rank only: per expert, how many of its tiles are finished; 32 bits
  uint64_t rows_offset;      // data heap: (max_rows, N)
  uint64_t flag_offset;      // signal segment: a flag for the zeroed counters, one per local rank and expert, then those of combining
  uint64_t fetched_offset;   // data heap, read by this rank only: (N, max_tokens, k) rows, of choices whose rows are copied
  uint32_t c_row_bytes;
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
  GemmStorage<Config> gemm;
  Experts experts;
};

// ---- flags, by number
constexpr uint32_t kZeroedFlag = 0;
MK_DEVICE uint32_t expert_flag(uint32_t holder, uint32_t expert) { return 1 + holder * Config::kExperts + expert; }
struct ZeroedFlag {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return wait_flag(entered, p, kZeroedFlag, p.world.rank); }
};

MK_DEVICE uint32_t* finished_tiles(const Entered& entered, const Parameters& p, uint32_t expert) {
  return reinterpret_cast<uint32_t*>(shared_heap(entered, p.world.local_rank) + p.counters_offset) + expert;
}

// ---- compute
struct Tiles : GroupedTiles<Config, Parameters, Config::kExperts> {
  using GroupedTiles::GroupedTiles;
  static constexpr bool kAnnounces = true;
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return false; }
  MK_DEVICE bool wait_inputs(const Entered&, const TileCoordinate&, uint32_t) const { return true; }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return packed_row(c); }
  MK_DEVICE bool announces(const TileCoordinate&) const { return true; }
  // Counts the tile; the last one of an expert tells the node. Counters have no order but that of their atomics, which all who count take part in.
  MK_DEVICE void raise(const Entered& entered, uint32_t tile) const {
    const uint32_t expert = coordinate(tile).plane;
    if (!wait_all(entered, ZeroedFlag{p}, 1)) return;
    const uint32_t finished = ptx::lane_index() == 0 ? ptx::atomic_add_acq_rel(finished_tiles(entered, p, expert), 1) + 1 : 0;
    const bool is_last = ptx::broadcast(finished, 0) == experts.tile_rows(expert) * tiles_n();
    ptx::sync_warp();  // what lane 0 has acquired, all lanes release
    if (is_last) raise_flag(entered, p, expert_flag(p.world.local_rank, expert), 0);
  }
};

// ---- intra_comm
struct FinishedRows {
  static constexpr bool kByExpert = true;
  const Parameters& p;
  MK_DEVICE uint32_t window(const Choice& choice) const { return choice.expert * p.windows / Config::kExperts; }
  MK_DEVICE bool is_fetched(const Choice& choice) const {
    return kR > 1 && choice.holder != p.world.local_rank && window(choice) + 1 < p.windows;
  }
  MK_DEVICE bool wait_expert(const Entered& entered, const Choice& choice) const {
    return wait_flag(entered, p, expert_flag(choice.holder, choice.expert), node_mate(p.world, choice.holder));
  }
  MK_DEVICE const char* product(const Choice& choice) const {
    return heap(p.world, choice.holder) + p.rows_offset + uint64_t(choice.row) * p.combining.row_bytes;
  }
  MK_DEVICE uint64_t fetched_offset(uint64_t index) const { return p.fetched_offset + index * p.combining.row_bytes; }

  // ---- for combining: what has been fetched, this warp has stored itself
  MK_DEVICE bool wait(const Entered& entered, const Choice& choice) const { return is_fetched(choice) || wait_expert(entered, choice); }
  MK_DEVICE const char* at(const Choice& choice) const {
    return is_fetched(choice) ? heap(p.world, p.world.local_rank) + fetched_offset(choice.index) : product(choice);
  }
};

struct FetchFlags {  // of the row that the calling lane has
  const FinishedRows& rows;
  const Choice& choice;
  bool wanted;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return !wanted || rows.wait_expert(entered, choice); }
};

// Copies the rows of a token whose experts are in a window. Warp function.
MK_DEVICE bool fetch_token(const Entered& entered, const Parameters& p, const FinishedRows& rows, uint32_t node, uint32_t token,
                           uint32_t window) {
  const Choice choice = choice_of_lane(p, rows, node, token);
  const bool wanted = choice.exists && rows.is_fetched(choice) && rows.window(choice) == window;
  if (!wait_all(entered, FetchFlags{rows, choice, wanted}, kTopK)) return false;
  const uint64_t at = wanted ? reinterpret_cast<uint64_t>(rows.product(choice)) : 0;
  char* own = shared_heap(entered, p.world.local_rank);
#pragma unroll 1
  for (uint32_t i = 0; i < kTopK; ++i) {
    const uint64_t high = ptx::broadcast(static_cast<uint32_t>(at >> 32), i), low = ptx::broadcast(static_cast<uint32_t>(at), i);
    if ((high << 32 | low) == 0) continue;
    const char* from = reinterpret_cast<const char*>(high << 32 | low) + ptx::lane_index() * kWarpUnit;
    char* to = own + rows.fetched_offset(token_index(p.combining, node, token) * kTopK + i);
    const auto load = [&] {  // a lane's next 16 bytes
      const ptx::Words words = ptx::load_global(from);
      from += kWarpStride;
      return words;
    };
    copy_by_warp(p.combining.row_bytes, load, [&](uint32_t offset, const ptx::Words& words) { ptx::store_global(to + offset, words); });
  }
  return true;
}

// All that warp `worker` of `workers` copies of what it combines later. Warp function.
MK_DEVICE bool fetch_rows(const Entered& entered, const Parameters& p, const FinishedRows& rows, uint32_t worker, uint32_t workers) {
#pragma unroll 1
  for (uint32_t window = 0; window + 1 < p.windows; ++window) {
    const auto fetch_group = [&](uint32_t distance, uint32_t group) {
      const uint32_t node = node_at(p.world, distance);
      const Places places = places_of(p, distance, group);
#pragma unroll 1
      for (uint32_t place = places.begin; place < places.end; ++place) {
        const uint32_t token = load_index(p.combining.listed, token_index(p.combining, node, place));
        if (!fetch_token(entered, p, rows, node, token, window)) return false;
      }
      return true;
    };
    if (kNodes > 1 && !each_served_group(p, worker, workers, fetch_group)) return false;
#pragma unroll 1
    for (uint32_t token = worker; token < p.combining.tokens; token += workers) {
      if (!fetch_token(entered, p, rows, p.world.node, token, window)) return false;
    }
  }
  return true;
}

MK_DEVICE void zero_counters(const Entered& entered, const Parameters& p) {  // one warp of the rank
#pragma unroll 1
  for (uint32_t expert = ptx::lane_index(); expert < Config::kExperts; expert += 32) *finished_tiles(entered, p, expert) = 0;
  ptx::sync_warp();
  if (ptx::lane_index() == 0) raise_flag_of(entered, p, kZeroedFlag, p.world.local_rank);
}

MK_DEVICE void combine_role(const Call& call, const Parameters& p, EntryGate& entries) {  // all threads of the CTA
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index();
  if (ptx::thread_index() == 0) {
    entries.init();
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  const MaybeEntered entered = warp == 0 ? entries.open(call) : entries.pass(call);
  if (!entered) return;
  if (cta == 0 && warp == 0) zero_counters(*entered, p);
  const uint32_t worker = cta * Config::kWarps + warp, workers = num_intra_comm(p) * Config::kWarps;
  const FinishedRows rows{p};
  if (kR > 1) {
    Trace trace(p.world, 2);
    const uint64_t begin = trace.now();
    if (!fetch_rows(*entered, p, rows, worker, workers)) return;
    if (ptx::thread_index() == 0) trace.record(abi::kTraceFetch, cta, begin);
  }
  combine(*entered, p, rows, worker, workers);
}

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = shared_storage<Storage>();
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = begin_call(p.world, role);
  if (role == abi::kCompute) {
    const int32_t* first = reinterpret_cast<const int32_t*>(p.expert_offsets);
    storage.experts.build(Config::kExperts, [&](uint32_t e) { return static_cast<uint32_t>(first[e + 1] - first[e]); });
    compute_role(call, Tiles(p, storage.experts), storage.gemm);
    return;
  }
  if (role == abi::kIntraComm) {
    combine_role(call, p, storage.gemm.entries);
  } else if constexpr (kNodes > 1) {
    send_combined(call, p, cta - first_inter_send(p), num_inter_send(p));
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) leave_call(call);
}

}  // namespace mkernel
