// moe_combine: every token gets the weighted sum of the rows that its experts made of it. Included by the generated source after `struct Config`.
//
// A rank reads the rows of its node mates in their arrays where these lie on the symmetric heap, else in copies that they stage chunk by chunk; each
// rank tells the others which. An array that others read is the caller's again only when they are done, so its rank waits for them before it leaves.
// What is summed where: moe/combine.cuh.
#pragma once
#include "moe/combine_send.cuh"

namespace mkernel {

// ---- config: kTopK, kWeighted, kFloat16, kNumNodes, kRanksPerNode, kWarps; kSharedBytes, kParameterBytes

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  Combining combining;
  uint64_t rows;            // (max_rows, row_bytes), this rank's, contiguous
  uint64_t expert_offsets;  // (experts of a rank + 1) int32: the rows between the first and the last of them are valid
  uint64_t told_offset;    // data heap: a Words per local rank: where its rows are in its heap (64 bits), and whether they are staged there
  uint64_t staged_offset;  // data heap: (max_rows, row_bytes)
  uint64_t rows_offset;    // data heap: where the node reads this rank's rows, in the caller's array or at staged_offset
  uint64_t
      flag_offset;  // signal segment: a flag per local rank for what it tells, per local rank and chunk of its rows, per reader and its CTA
  uint32_t experts;          // of a rank
  uint32_t row_chunk_shift;  // a chunk has 1 << row_chunk_shift rows
  uint32_t stage_rows;       // 1: copied to staged_offset. May differ by rank
  uint32_t intra_comm;       // CTAs that combine; the others send
  uint32_t reserved[14];
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

struct RowSource {  // of one rank of the node
  uint64_t offset;
  uint32_t staged;
};
struct Storage {
  EntryGate entries;
  uint32_t failed;                   // warp 0 has not heard from all ranks
  uint32_t gave_up[Config::kWarps];  // a warp has not had all that it waited for
  RowSource sources[kR];
};
static_assert(sizeof(Storage) <= Config::kSharedBytes, "shared memory");

// ---- where things are
MK_DEVICE uint32_t row_chunks(const Parameters& p) { return ceil_shift(p.combining.max_rows, p.row_chunk_shift); }
MK_DEVICE uint32_t row_flag(const Parameters& p, uint32_t holder, uint32_t chunk) { return kR + holder * row_chunks(p) + chunk; }
MK_DEVICE uint32_t done_flag(const Parameters& p, uint32_t reader, uint32_t cta) {
  return row_flag(p, kR, 0) + reader * p.intra_comm + cta;
}
MK_DEVICE uint64_t told_offset(const Parameters& p, uint32_t holder) { return p.told_offset + holder * sizeof(ptx::Words); }

struct NodeRows {
  static constexpr bool kByExpert = false;
  const Parameters& p;
  const RowSource* sources;
  MK_DEVICE bool is_own(uint32_t holder) const { return holder == p.world.local_rank; }
  MK_DEVICE bool wait(const Entered& entered, const Choice& choice) const {
    if (is_own(choice.holder) || sources[choice.holder].staged == 0) return true;
    const uint32_t flag = row_flag(p, choice.holder, choice.row >> p.row_chunk_shift);
    return wait_flag(entered, p, flag, node_mate(p.world, choice.holder));
  }
  MK_DEVICE const char* at(const Choice& choice) const {
    const uint32_t holder = choice.holder;
    const char* rows = is_own(holder) ? reinterpret_cast<const char*>(p.rows) : heap(p.world, holder) + sources[holder].offset;
    return rows + uint64_t(choice.row) * p.combining.row_bytes;
  }
};

// ---- sharing this rank's rows with its node
MK_DEVICE void tell_source(const Entered& entered, const Parameters& p) {  // one warp of the rank
  const abi::World& world = p.world;
  const ptx::Words told{{static_cast<uint32_t>(p.rows_offset), static_cast<uint32_t>(p.rows_offset >> 32), p.stage_rows, 0}};
#pragma unroll 1
  for (uint32_t i = 1 + ptx::lane_index(); i < kR; i += 32) {
    const uint32_t peer = local_peer(world, i);
    ptx::store_global(shared_heap(entered, peer) + told_offset(p, world.local_rank), told);
    raise_flag_of(entered, p, world.local_rank, peer);
  }
}

struct ToldFlags {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t holder) const {
    return holder == p.world.local_rank || wait_flag(entered, p, holder, node_mate(p.world, holder));
  }
};
MK_DEVICE bool find_sources(const Entered& entered, const Parameters& p, RowSource* sources) {  // one warp of each CTA; false: failed
  if (!wait_all(entered, ToldFlags{p}, kR)) return false;
#pragma unroll 1
  for (uint32_t holder = ptx::lane_index(); holder < kR; holder += 32) {
    if (holder == p.world.local_rank) continue;
    const ptx::Words told = ptx::load_global(heap(p.world, p.world.local_rank) + told_offset(p, holder));
    sources[holder] = RowSource{uint64_t(told.word[1]) << 32 | told.word[0], told.word[2]};
  }
  return true;
}

// Copies one chunk after the other, each by all warps of a CTA, and tells the node. All threads of the CTA.
MK_DEVICE void stage_rows(const Entered& entered, const Parameters& p) {
  const uint32_t row_bytes = p.combining.row_bytes, first = load_index(p.expert_offsets, 0), last = load_index(p.expert_offsets, p.experts);
  char* staged = shared_heap(entered, p.world.local_rank) + p.staged_offset;
#pragma unroll 1
  for (uint32_t chunk = (first >> p.row_chunk_shift) + ptx::cta_index(); chunk < ceil_shift(last, p.row_chunk_shift);
       chunk += p.intra_comm) {
    const uint32_t begin = chunk << p.row_chunk_shift, limit = begin + (1u << p.row_chunk_shift), end = limit < last ? limit : last;
    const uint64_t bytes = uint64_t(end - begin) * row_bytes, at = uint64_t(begin) * row_bytes;
    const uint64_t share = (bytes / kWarpUnit + Config::kWarps - 1) / Config::kWarps * kWarpUnit, mine = ptx::warp_index() * share;
    if (mine < bytes) {
      const char* from = reinterpret_cast<const char*>(p.rows) + at + mine + ptx::lane_index() * kWarpUnit;
      const auto load = [&] {  // a lane's next 16 bytes
        const ptx::Words words = ptx::load_input(from);
        from += kWarpStride;
        return words;
      };
      copy_by_warp(static_cast<uint32_t>(bytes - mine < share ? bytes - mine : share), load,
                   [&](uint32_t offset, const ptx::Words& words) { ptx::store_global(staged + at + mine + offset, words); });
    }
    ptx::sync_cta();
    if (ptx::warp_index() == 0) raise_flag(entered, p, row_flag(p, p.world.local_rank, chunk), 1);
  }
}

// ---- giving the rows back
struct DoneFlags {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t reader) const {
    return reader == p.world.local_rank ||
           wait_flag(entered, p, done_flag(p, reader, ptx::cta_index()), node_mate(p.world, reader), kSecondHand);
  }
};
// Tells those whose arrays this CTA has read that it is done, and waits until the same CTA of each node mate is done with this rank's. One warp.
MK_DEVICE void end_reading(const Entered& entered, const Parameters& p, const RowSource* sources) {
  const uint32_t own = p.world.local_rank;
#pragma unroll 1
  for (uint32_t holder = ptx::lane_index(); holder < kR; holder += 32) {
    if (holder != own && sources[holder].staged == 0) raise_flag_of(entered, p, done_flag(p, own, ptx::cta_index()), holder);
  }
  if (p.stage_rows == 0) wait_all(entered, DoneFlags{p}, kR);
}

// ---- intra_comm. All threads of the CTA.
MK_DEVICE void combine_role(const Call& call, const Parameters& p, Storage& storage) {
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index();
  const uint32_t came = load_index(p.expert_offsets, p.experts);
  if (ptx::thread_index() == 0) {
    storage.entries.init();
    storage.failed = 0;
    for (uint32_t i = 0; i < Config::kWarps; ++i) storage.gave_up[i] = 0;
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  const MaybeEntered entered = warp == 0 ? storage.entries.open(call) : storage.entries.pass(call);
  if (!entered || !rows_fit(call, p, came)) return;
  if (kR > 1) {
    if (cta == 0 && warp == 0) tell_source(*entered, p);
    if (p.stage_rows != 0) stage_rows(*entered, p);
    if (warp == 0 && !find_sources(*entered, p, storage.sources) && ptx::lane_index() == 0) storage.failed = 1;
    ptx::sync_cta();
    if (storage.failed != 0) return;
  }
  const NodeRows rows{p, storage.sources};
  const bool ok = combine(*entered, p, rows, StridedItems{cta * Config::kWarps + warp, p.intra_comm * Config::kWarps}, warp == 0);
  if (kR > 1) {
    if (!ok && ptx::lane_index() == 0) storage.gave_up[warp] = 1;
    ptx::sync_cta();  // all warps have read what they read
    if (warp == 0 && ptx::all_of_warp(ptx::lane_index() >= Config::kWarps || storage.gave_up[ptx::lane_index()] == 0)) {
      end_reading(*entered, p, storage.sources);
    }
  }
}

// ---- the role switch
MK_KERNEL(32 * Config::kWarps)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t cta = ptx::cta_index();
  const Call call = begin_call(p.world, cta < p.intra_comm ? abi::kIntraComm : abi::kInterSend);
  if (cta + 1 == ptx::cta_count() && ptx::warp_index() == Config::kWarps - 1) announce_entry(call);
  if (cta < p.intra_comm) {
    combine_role(call, p, *reinterpret_cast<Storage*>(ptx::shared_memory()));
  } else if constexpr (kNodes > 1) {
    send_combined(call, p, cta - p.intra_comm, ptx::cta_count() - p.intra_comm);
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) leave_call(call);
}

}  // namespace mkernel
