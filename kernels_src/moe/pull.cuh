// intra_comm of a dispatch: fetches each row once, from wherever it is, and stores it into all of its slots. Warp 2 finds the rows, thread 0 copies
// them, warp 1 counts what has arrived.
#pragma once
#include "comm/copy.cuh"
#include "comm/mailbox.cuh"
#include "moe/routing.cuh"
#include "moe/rows.cuh"
#include "trace.cuh"

namespace mkernel {

constexpr uint32_t kBatches = 2;
constexpr uint32_t kTold = 8;  // rows that are told of at once: a release takes about as long as storing two of them
static_assert(kGroup % kTold == 0 && kTold % kRowsPerPiece == 0, "those are of one batch");
struct RowBatch {  // a row per lane of the warp that has found them
  uint64_t from[kGroup];
  uint32_t slots[kGroup], slot[kGroup][kTopK];  // how many, and which
  uint32_t rows;                                // 0: the call has failed
};
struct PullStorage {
  CopyPieces pieces;
  RowBatch batch[kBatches];
};
struct PullBarriers {
  CopyBarriers copy;
  Handshake<kBatches> batches;  // warp 2 fills them, warp 1 gives them back
  Mailbox done;                 // the last of the rows that are stored, thread 0 to warp 1
  MK_DEVICE void init() {       // one thread, before a sync_cta
    batches.init(1, 1);
    done.init();  // ends with the fence for all of them
  }
};

// The rows that one CTA fetches: every stride-th item from `first` on; row i of them is in batch i / kGroup.
struct PulledRows {
  uint32_t first, stride, count;
  MK_DEVICE static PulledRows of_cta(uint32_t items, uint32_t index, uint32_t stride) {
    return PulledRows{index, stride, index < items ? (items - index - 1) / stride + 1 : 0};
  }
};

template <class Parameters>
struct ItemFlags {
  const Parameters& p;
  uint32_t flag;  // of this lane
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const {
    return flag == kNone || wait_flag(entered, p, flag, raiser(p.world, (flag - kWorldSize) / max_chunks(p.routing)));
  }
};

template <class Parameters>
MK_DEVICE void find_rows(const Entered& entered, const Parameters& p, PullStorage& storage, PullBarriers& barriers,
                         const PulledRows& rows) {
  const Tables tables(entered, p.routing);
  const uint32_t lane = ptx::lane_index();
  RingPosition<kBatches> at;
  bool ok = true;
#pragma unroll 1
  for (uint32_t begin = 0; ok && begin < rows.count; begin += kGroup) {
    const bool exists = begin + lane < rows.count;
    Item item{0, kNone, 0};
    if (exists) item = tables.items()[rows.first + (begin + lane) * rows.stride];
    ok = wait_all(entered, ItemFlags<Parameters>{p, item.flag}, 32);
    ptx::fence_proxy_async();  // the rows were written by ordinary stores, or by others' bulk copies, and are read by bulk copies
    if (lane == 0) barriers.batches.wait_taken(at);
    ptx::sync_warp();
    RowBatch& batch = storage.batch[at.index];
    if (exists) {
      uint32_t slots = 0, slot[kTopK];  // loaded at once
#pragma unroll
      for (uint32_t i = 0; i < kTopK; ++i) slot[i] = ptx::load_word(&tables.slots()[uint64_t(item.token) * kTopK + i]);
#pragma unroll
      for (uint32_t i = 0; i < kTopK; ++i) {
        if (slot[i] != kNone) batch.slot[lane][slots++] = slot[i];
      }
      batch.from[lane] = item.from, batch.slots[lane] = slots;
    }
    if (lane == 0) batch.rows = !ok ? 0 : rows.count - begin < kGroup ? rows.count - begin : kGroup;
    ptx::sync_warp();
    if (lane == 0) barriers.batches.fill(at);
    at.advance();
  }
}

// What CopyRing copies: rows from batches, in order, kRowsPerPiece at a time.
template <class Parameters>
struct RowCopies {
  struct Item {
    uint32_t bytes, row;
  };
  const Entered& entered;
  const Parameters& p;
  PullStorage& storage;
  PullBarriers& barriers;
  uint32_t count;
  Mailbox::Position at{};
  uint32_t seen = 0;              // rows whose batch has come
  uint32_t stored = 0, told = 0;  // rows
  Handshake<kBatches>::Position coming{};

  MK_DEVICE RowBatch& batch(const Item& item) const { return storage.batch[item.row / kGroup % kBatches]; }
  MK_DEVICE uint32_t first() const { return 0; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + 1; }
  MK_DEVICE uint32_t end() const { return (count + kRowsPerPiece - 1) / kRowsPerPiece; }
  MK_DEVICE Item item(uint32_t index) const { return Item{kRowsPerPiece * p.routing.row_bytes, index * kRowsPerPiece}; }
  MK_DEVICE uint32_t rows(const Item& item) const { return rows_of_piece(count - item.row); }
  MK_DEVICE bool ready(const Item& item) { return item.row < seen || (barriers.batches.is_filled(coming) && wait(item)); }
  MK_DEVICE bool wait(const Item&) {
    tell();  // it may take long
    barriers.batches.wait_filled(coming);
    if (storage.batch[coming.index].rows == 0) return false;
    coming.advance();
    seen += kGroup;
    return true;
  }
  MK_DEVICE uint32_t piece_bytes() const { return kPieceBytes; }
  MK_DEVICE uint32_t loaded(const Item& item, uint32_t bytes) const { return rows(item) * bytes_of_row(p.routing.row_bytes, bytes); }
  MK_DEVICE void load(const Item& item, uint32_t offset, void* smem, uint32_t bytes, uint64_t* bar) const {
    load_rows(rows(item), p.routing.row_bytes, smem, bytes, bar,
              [&](uint32_t i) { return reinterpret_cast<const char*>(batch(item).from[item.row % kGroup + i]) + offset; });
  }
  MK_DEVICE void store(const Item& item, uint32_t offset, const char* smem, uint32_t bytes) const {
    const RowBatch& of = batch(item);
    const uint32_t of_row = bytes_of_row(p.routing.row_bytes, bytes);
    char* slots = shared_heap(entered, p.world.local_rank) + p.slots_offset + offset;
#pragma unroll 1
    for (uint32_t row = item.row % kGroup, end = row + rows(item); row < end; ++row, smem += of_row) {
      const uint32_t wanted = of.slots[row];
      uint32_t slot[kTopK];  // read at once: a thread that waits for each copies less
#pragma unroll
      for (uint32_t i = 0; i < kTopK; ++i) slot[i] = of.slot[row][i];
#pragma unroll
      for (uint32_t i = 0; i < kTopK; ++i) {
        if (i < wanted) ptx::bulk_store(slots + uint64_t(slot[i]) * p.routing.slot_bytes, smem, of_row);
      }
    }
  }
  MK_DEVICE void announce(const Item& item) {
    stored = item.row + rows(item);
    if (stored % kTold == 0 || stored == count) tell();
  }
  MK_DEVICE void tell() {
    if (stored == told) return;
    barriers.done.post(entered, at, stored - 1);
    told = stored;
  }
};

// Counts rows that are stored, those since the last message at once, and gives batches back whose rows all are. Warp function.
template <class Parameters>
MK_DEVICE void count_arrivals(const Entered& entered, const Parameters& p, PullStorage& storage, PullBarriers& barriers) {
  const Tables tables(entered, p.routing);
  const uint32_t lane = ptx::lane_index();
  RingPosition<kBatches> at;
  uint32_t counted = 0;  // rows
  barriers.done.serve([&](uint32_t last) {
    const RowBatch& batch = storage.batch[at.index];
    const uint32_t choices = (last + 1 - counted) * kTopK;
#pragma unroll 1
    for (uint32_t i = lane; i < choices; i += 32) {
      const uint32_t row = (counted + i / kTopK) % kGroup;
      if (i % kTopK < batch.slots[row]) ptx::add_release(tables.arrived(batch.slot[row][i % kTopK] / kSegmentRows), 1);
    }
    counted = last + 1;
    const bool all = last % kGroup + 1 == batch.rows;
    ptx::sync_warp();  // all have read
    if (!all) return;
    if (lane == 0) barriers.batches.take(at);
    at.advance();
  });
}

// The other ranks of the node may have read x itself, and it is the caller's again when the call ends: CTA i of each rank tells CTA i of the others that
// it has fetched its rows. Warp function.
template <class Parameters>
struct FetchedFlags {
  const Parameters& p;
  uint32_t index;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    const uint32_t local = local_peer(p.world, 1 + i);
    return wait_flag(entered, p, fetched_flag(p.routing, local * num_intra_comm(p) + index), node_mate(p.world, local), kSecondHand);
  }
};
template <class Parameters>
MK_DEVICE void give_back(const Entered& entered, const Parameters& p, uint32_t index) {
  raise_flag(entered, p, fetched_flag(p.routing, p.world.local_rank * num_intra_comm(p) + index), 1);
  if (p.routing.x_offset != kStaged) wait_all(entered, FetchedFlags<Parameters>{p, index}, kR - 1);
}

// All threads of the CTA. `items`: rows that all intra_comm CTAs fetch together.
template <class Parameters>
MK_DEVICE void pull_rows(const Entered& entered, const Parameters& p, PullStorage& storage, PullBarriers& barriers, uint32_t items,
                         uint32_t index) {
  const PulledRows rows = PulledRows::of_cta(items, index, num_intra_comm(p));
  const uint32_t warp = ptx::warp_index();
  if (warp == 0) {
    if (ptx::elected()) {
      Trace trace(p.world, 2);
      const uint64_t begin = trace.now();
      RowCopies<Parameters> copies{entered, p, storage, barriers, rows.count};
      CopyRing ring(storage.pieces, barriers.copy);
      ring.copy(copies);
      barriers.done.end(copies.at);
      trace.record(abi::kTraceFetch, index, begin);
    }
  } else if (warp == 1) {
    count_arrivals(entered, p, storage, barriers);
    if (kR > 1) give_back(entered, p, index);
  } else if (warp == 2) {
    find_rows(entered, p, storage, barriers, rows);
  }
  ptx::sync_cta();
}

}  // namespace mkernel
