// Rows that a CTA copies by bulk copies, one after the other, as one of its warps finds them.
#pragma once
#include "comm/copy.cuh"
#include "comm/handshake.cuh"
#include "moe/rows.cuh"
#include "trace.cuh"

namespace mkernel {

constexpr uint32_t kFetchGroup = 32;  // rows of a batch: all batches but the last are full
static_assert(kFetchGroup % kRowsPerPiece == 0, "those of a piece are of one batch");
constexpr uint32_t kFetchBatches = 2;
struct FetchBatch {
  const char* from[kFetchGroup];
  char* to[kFetchGroup];
  uint32_t rows;  // fewer than kFetchGroup: the last batch
};
struct FetchStorage {
  CopyPieces pieces;
  FetchBatch batch[kFetchBatches];
};
struct FetchBarriers {
  CopyBarriers copy;
  Handshake<kFetchBatches> batches;
  MK_DEVICE void init() {  // one thread, before an mbarrier_init_fence and a sync_cta
    batches.init(1, 1);
  }
};

// Where the warp that finds rows puts them. Warp functions.
class FoundRows {
 public:
  MK_DEVICE FoundRows(FetchStorage& storage, FetchBarriers& barriers) : storage_(storage), barriers_(barriers) {}
  // A row of each lane that has one (`exists`). The copies see what the lanes have acquired before a fence_proxy_async.
  MK_DEVICE void add(bool exists, const char* from, char* to) {
    const uint32_t lane = ptx::lane_index(), all = ptx::votes(exists);
    const uint32_t place = rows_ + ptx::count_bits(all & ((1u << lane) - 1)), end = rows_ + ptx::count_bits(all);
    if (all == 0) return;
    begin();
    if (exists && place < kFetchGroup) write(place, from, to);
    rows_ = end;
    if (end < kFetchGroup) return;
    fill(kFetchGroup);
    rows_ = end - kFetchGroup;
    if (rows_ == 0) return;
    begin();
    if (exists && place >= kFetchGroup) write(place - kFetchGroup, from, to);
  }
  MK_DEVICE void end() {  // last, whatever has happened
    begin();
    fill(rows_);
  }

 private:
  MK_DEVICE void begin() {  // the batch is this warp's
    if (begun_) return;
    if (ptx::lane_index() == 0) barriers_.batches.wait_taken(at_);
    ptx::sync_warp();
    begun_ = true;
  }
  MK_DEVICE void write(uint32_t place, const char* from, char* to) {
    storage_.batch[at_.index].from[place] = from, storage_.batch[at_.index].to[place] = to;
  }
  MK_DEVICE void fill(uint32_t rows) {
    ptx::sync_warp();  // all lanes have written theirs
    if (ptx::lane_index() == 0) {
      storage_.batch[at_.index].rows = rows;
      barriers_.batches.fill(at_);
    }
    at_.advance();
    begun_ = false;
  }

  FetchStorage& storage_;
  FetchBarriers& barriers_;
  RingPosition<kFetchBatches> at_;
  uint32_t rows_ = 0;  // of the batch that is being filled
  bool begun_ = false;
};

// What CopyRing copies: rows from batches, kRowsPerPiece at a time, until the last batch.
struct FetchCopies {
  struct Item {
    uint32_t bytes, row;
  };
  FetchStorage& storage;
  FetchBarriers& barriers;
  uint32_t row_bytes;
  uint32_t seen = 0;  // rows whose batch has come
  bool ended = false;
  Handshake<kFetchBatches>::Position coming{}, stored{};

  MK_DEVICE FetchBatch& batch(const Item& item) const { return storage.batch[item.row / kFetchGroup % kFetchBatches]; }
  MK_DEVICE uint32_t first() const { return 0; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + 1; }
  MK_DEVICE uint32_t end() const { return 0xffffffffu; }
  MK_DEVICE Item item(uint32_t index) const { return Item{kRowsPerPiece * row_bytes, index * kRowsPerPiece}; }
  MK_DEVICE uint32_t rows(const Item& item) const {
    return rows_of_piece(batch(item).rows - item.row % kFetchGroup);
  }  // once its batch has come
  MK_DEVICE bool ready(const Item& item) { return item.row < seen || (!ended && barriers.batches.is_filled(coming) && wait(item)); }
  MK_DEVICE bool wait(const Item& item) {  // false: there are no more
    if (ended) return false;
    barriers.batches.wait_filled(coming);
    const uint32_t rows = storage.batch[coming.index].rows;
    coming.advance();
    seen += rows;
    ended = rows < kFetchGroup;
    return item.row < seen;
  }
  MK_DEVICE uint32_t piece_bytes() const { return kPieceBytes; }
  MK_DEVICE uint32_t loaded(const Item& item, uint32_t bytes) const { return rows(item) * bytes_of_row(row_bytes, bytes); }
  MK_DEVICE void load(const Item& item, uint32_t offset, void* smem, uint32_t bytes, uint64_t* bar) const {
    load_rows(rows(item), row_bytes, smem, bytes, bar, [&](uint32_t i) { return batch(item).from[item.row % kFetchGroup + i] + offset; });
  }
  MK_DEVICE void store(const Item& item, uint32_t offset, const char* smem, uint32_t bytes) {
    const uint32_t place = item.row % kFetchGroup, number = rows(item), of_row = bytes_of_row(row_bytes, bytes);
#pragma unroll 1
    for (uint32_t i = 0; i < number; ++i) ptx::bulk_store(batch(item).to[place + i] + offset, smem + i * of_row, of_row);
    if (place + number < kFetchGroup || (kRowsPerPiece == 1 && offset + bytes < item.bytes)) return;
    barriers.batches.take(stored);
    stored.advance();
  }
  MK_DEVICE void announce(const Item&) const {}
};

}  // namespace mkernel
