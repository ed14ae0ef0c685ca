// allgather_rows: the rows of all ranks, packed by rank, on every rank; how many rows a rank has, only that rank knows. Included by the generated
// source after `struct Config`.
//
// Ranks tell each other their counts first. From these each works out where whose rows go, and whether there is room: all come to the same verdict.
// Then a rank's rows lie at their packed place in its own heap, from where its node reads them; inter_send puts them to the same place at each rail
// peer, whose node reads them there. A warp does one chunk after the other, as an item of its own.
#pragma once
#include "comm/copy.cuh"
#include "comm/ring.cuh"
#include "comm/status.cuh"

namespace mkernel {

// ---- config: kIntraComm, kInterSend (0 on one node), kNumNodes, kRanksPerNode; kThreads, kSharedBytes, kParameterBytes
constexpr uint32_t kWarps = Config::kThreads / 32, kWorkers = Config::kIntraComm * kWarps;
constexpr uint32_t kTooManyRows = 1;  // the one error, with these details: how many there are, max_rows, and who has most << 32 | how many
static_assert((Config::kInterSend != 0) == (kNodes > 1), "what other nodes need is sent by inter_send");

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  uint64_t x;              // (rows, row_bytes), this rank's, contiguous
  uint64_t out;            // (max_rows, row_bytes)
  uint64_t offsets;        // (world size + 1) int32
  uint64_t counts_offset;  // data heap: a Words per rank, whose first is its number of rows
  uint64_t rows_offset;    // data heap: (max_rows, row_bytes); filled where this rank's and its rail peers' rows belong
  uint64_t flag_offset;    // signal segment: a flag per rank for its count, then one per (rank, chunk)
  uint32_t rows;           // T of this rank; may differ by rank
  uint32_t max_rows;       // the same on all ranks
  uint32_t row_bytes;
  uint32_t chunk_rows;
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

struct Storage {
  uint32_t first[kWarps][kWorldSize + 1];  // of each warp for itself: the packed row with which a rank's rows begin
};
static_assert(sizeof(Storage) == Config::kSharedBytes, "shared memory");

// ---- where things are
MK_DEVICE uint64_t count_offset(const Parameters& p, uint32_t rank) { return p.counts_offset + rank * sizeof(ptx::Words); }
MK_DEVICE uint32_t max_chunks(const Parameters& p) { return (p.max_rows + p.chunk_rows - 1) / p.chunk_rows; }
MK_DEVICE uint32_t chunk_flag(const Parameters& p, uint32_t rank, uint32_t chunk) { return kWorldSize + rank * max_chunks(p) + chunk; }

struct Packing {  // what a warp has worked out of the counts
  const Parameters& p;
  const uint32_t* first;
  MK_DEVICE uint32_t rows(uint32_t rank) const { return first[rank + 1] - first[rank]; }
  MK_DEVICE uint32_t chunks(uint32_t rank) const { return (rows(rank) + p.chunk_rows - 1) / p.chunk_rows; }
  MK_DEVICE uint32_t bytes(uint32_t rank, uint32_t chunk) const {
    const uint32_t left = rows(rank) - chunk * p.chunk_rows;
    return (left < p.chunk_rows ? left : p.chunk_rows) * p.row_bytes;
  }
  MK_DEVICE uint64_t offset(uint32_t rank, uint32_t chunk) const { return uint64_t(first[rank] + chunk * p.chunk_rows) * p.row_bytes; }
  MK_DEVICE bool fits() const { return first[kWorldSize] <= p.max_rows; }
  MK_DEVICE uint64_t largest() const {
    uint32_t most = 0;
    for (uint32_t rank = 1; rank < kWorldSize; ++rank) most = rows(rank) > rows(most) ? rank : most;
    return uint64_t(most) << 32 | rows(most);
  }
};

struct CountFlags {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t rank) const {
    const bool handed_on = rank / kR != p.world.node && rank % kR != p.world.local_rank;
    return wait_flag(entered, p, rank, rank, handed_on ? kSecondHand : 1);
  }
};
struct ChunkFlag {
  const Parameters& p;
  uint32_t rank, chunk, writer;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return wait_flag(entered, p, chunk_flag(p, rank, chunk), writer); }
};

// ---- counts: one warp of the rank tells its node and its rail its own; returns what to wait for before the call ends (put_done), 0 on one node
MK_DEVICE uint64_t tell_count(const Entered& entered, const Parameters& p) {
  const abi::World& world = p.world;
  const uint64_t offset = count_offset(p, world.rank);
#pragma unroll 1
  for (uint32_t i = ptx::lane_index(); i < kR; i += 32) {  // lane 0 to its own rank, from where the network reads it
    const uint32_t peer = local_peer(world, i);
    ptx::store_global(shared_heap(entered, peer) + offset, ptx::Words{{p.rows, 0, 0, 0}});
    raise_flag_of(entered, p, world.rank, peer);
  }
  uint64_t ticket = 0;
  if (kNodes > 1 && ptx::lane_index() == 0) {
#pragma unroll 1
    for (uint32_t distance = 1; distance < kNodes; ++distance) {
      const Put put{1, rail_peer(world, distance), offset, offset, sizeof(ptx::Words), flag_offset(p, world.rank), entered.call().epoch()};
      ticket = issue_put(entered, put);
    }
  }
  return ticket;
}
// Ranks put to their rail only: each hands the counts of its rail peers to its node mates. The same warp; a lane per peer and mate.
MK_DEVICE void hand_on_counts(const Entered& entered, const Parameters& p) {
  const abi::World& world = p.world;
  constexpr uint32_t kMates = kR > 1 ? kR - 1 : 1;  // no 0: a division by it would draw a warning
#pragma unroll 1
  for (uint32_t i = ptx::lane_index(); kR > 1 && i < (kNodes - 1) * kMates; i += 32) {
    const uint32_t source = rail_peer(world, 1 + i / kMates), mate = local_peer(world, 1 + i % kMates);
    if (!wait_flag(entered, p, source, source)) break;
    const uint64_t offset = count_offset(p, source);
    ptx::store_global(shared_heap(entered, mate) + offset, ptx::load_global(heap(world, world.local_rank) + offset));
    raise_flag_of(entered, p, source, mate);
  }
  ptx::sync_warp();
}
MK_DEVICE void put_done(const Call& call, uint64_t ticket) {
  if (ticket != 0) wait_put(call, ticket, rail_peer(call.world, 1));
}

// A warp's own packing, once all counts have come. False: the call has failed.
MK_DEVICE bool pack(const Entered& entered, const Parameters& p, uint32_t* first) {
  if (!wait_all(entered, CountFlags{p}, kWorldSize)) return false;
  if (ptx::lane_index() == 0) {
    const char* counts = heap(p.world, p.world.local_rank);
    first[0] = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < kWorldSize; ++rank)
      first[rank + 1] = first[rank] + ptx::load_global(counts + count_offset(p, rank)).word[0];
  }
  ptx::sync_warp();
  return true;
}

// ---- intra_comm
MK_DEVICE void share_rows(const Entered& entered, const Parameters& p, const Packing& packing, uint32_t worker) {  // this rank's own
  const uint32_t rank = p.world.rank;
  char* shared = shared_heap(entered, p.world.local_rank) + p.rows_offset;
#pragma unroll 1
  for (uint32_t chunk = worker; chunk < packing.chunks(rank); chunk += kWorkers) {
    const uint64_t to = packing.offset(rank, chunk), from = to - packing.offset(rank, 0);
    const char* at = reinterpret_cast<const char*>(p.x) + from + ptx::lane_index() * kWarpUnit;
    const auto load = [&] {  // a lane's next 16 bytes
      const ptx::Words words = ptx::load_input(at);
      at += kWarpStride;
      return words;
    };
    copy_by_warp(packing.bytes(rank, chunk), load, [&](uint32_t offset, const ptx::Words& words) {
      ptx::store_global(shared + to + offset, words);
      ptx::store_global(reinterpret_cast<char*>(p.out) + to + offset, words);
    });
    raise_flag(entered, p, chunk_flag(p, rank, chunk), 0);  // of this rank, too: inter_send waits for it
  }
}

// The rows of another rank, from the heap of the node's rank on its rail; that one tells the node when the network has brought them.
MK_DEVICE bool take_rows(const Entered& entered, const Parameters& p, const Packing& packing, uint32_t rank, uint32_t worker) {
  const abi::World& world = p.world;
  const uint32_t holder = rank % kR, writer = rank / kR == world.node || holder == world.local_rank ? rank : world.node * kR + holder;
#pragma unroll 1
  for (uint32_t chunk = worker; chunk < packing.chunks(rank); chunk += kWorkers) {
    if (!wait_all(entered, ChunkFlag{p, rank, chunk, writer}, 1)) return false;
    if (holder == world.local_rank) raise_flag(entered, p, chunk_flag(p, rank, chunk), 1);
    const uint64_t to = packing.offset(rank, chunk);
    const char* at = heap(world, holder) + p.rows_offset + to + ptx::lane_index() * kWarpUnit;
    const auto load = [&] {
      const ptx::Words words = ptx::load_global(at);  // written during this call
      at += kWarpStride;
      return words;
    };
    copy_by_warp(packing.bytes(rank, chunk), load,
                 [&](uint32_t offset, const ptx::Words& words) { ptx::store_global(reinterpret_cast<char*>(p.out) + to + offset, words); });
  }
  return true;
}

MK_DEVICE void intra_comm_role(const Entered& entered, const Parameters& p, const Packing& packing, uint32_t worker) {
  share_rows(entered, p, packing, worker);
  bool ok = true;
#pragma unroll 1
  for (uint32_t i = 1; ok && i < kWorldSize; ++i) ok = take_rows(entered, p, packing, rank_at(p.world, i / kR, i % kR), worker);
}

// ---- inter_send: this rank's rows to its rail peers (one thread)
struct RowsToSend {
  const Parameters& p;
  const Packing& packing;
  uint32_t chunk;
  MK_DEVICE uint32_t end() const { return packing.chunks(p.world.rank); }
  MK_DEVICE bool prepare(const Entered& entered, uint32_t next) {
    chunk = next;
    return wait_flag(entered, p, chunk_flag(p, p.world.rank, chunk), p.world.rank);
  }
  MK_DEVICE uint32_t puts() const { return kNodes - 1; }
  MK_DEVICE Put put(const Call& call, uint32_t channel, uint32_t i) const {
    const uint32_t rank = p.world.rank, flag = chunk_flag(p, rank, chunk);
    const uint64_t at = p.rows_offset + packing.offset(rank, chunk);
    return Put{channel, rail_peer(p.world, 1 + i), at, at, packing.bytes(rank, chunk), flag_offset(p, flag), call.epoch()};
  }
};

MK_DEVICE void inter_send_role(const Entered& entered, const Parameters& p, const Packing& packing, uint32_t index) {
  Trace trace(p.world, 2);
  RowsToSend rows{p, packing, 0};
  put_chunks(entered, rows, 2 + index, index, Config::kInterSend, trace);
}

// ---- the role switch: whether the op refuses the call, which every warp finds alike
MK_DEVICE bool refuses(const Call& call, const Parameters& p, uint32_t* first) {
  const uint32_t cta = ptx::cta_index(), worker = cta * kWarps + ptx::warp_index();
  if (worker == 0) announce_entry(call);
  const MaybeEntered entered = enter(call);
  if (!entered) return false;
  const uint64_t ticket = worker == 0 ? tell_count(*entered, p) : 0;
  if (worker == 0) hand_on_counts(*entered, p);
  const Packing packing{p, first};
  bool refused = false;
  if (pack(*entered, p, first)) {
    refused = !packing.fits();
    if (refused) {
      if (worker == 0 && ptx::lane_index() == 0) report_error(*entered, kTooManyRows, first[kWorldSize], p.max_rows, packing.largest());
    } else if (call.role == abi::kIntraComm) {
      if (worker == 0) {
        for (uint32_t i = ptx::lane_index(); i <= kWorldSize; i += 32) reinterpret_cast<uint32_t*>(p.offsets)[i] = first[i];
      }
      intra_comm_role(*entered, p, packing, worker);
    } else if (ptx::thread_index() == 0) {
      inter_send_role(*entered, p, packing, cta - Config::kIntraComm);
    }
  }
  put_done(call, ticket);
  return refused;
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const Call call = begin_call(p.world, ptx::cta_index() < Config::kIntraComm ? abi::kIntraComm : abi::kInterSend);
  const bool refused = refuses(call, p, storage.first[ptx::warp_index()]);
  ptx::sync_cta();
  if (ptx::thread_index() == 0) refused ? leave_refused(call) : leave_call(call);
}

}  // namespace mkernel
