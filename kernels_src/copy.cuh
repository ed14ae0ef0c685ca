// Bulk copies by one thread per CTA: global -> shared -> one or several destinations, a ring of pieces deep. The source is read once
// however many destinations there are. Measured: 43-50 GB/s per CTA to a peer, linear to 8 CTAs (docs/architecture.md).
#pragma once
#include "sync.cuh"

namespace mkernel {

constexpr uint32_t kPieceBytes = 16 * 1024;
constexpr uint32_t kPieceStages = 8;
constexpr uint32_t kPiecesAhead = 5;   // loads in flight before their store is issued
constexpr uint32_t kPiecesBehind = 4;  // stores in flight before a finished chunk is announced

struct CopyPieces {
  alignas(128) char piece[kPieceStages][kPieceBytes];
};
struct CopyBarriers {
  uint64_t piece_arrived[kPieceStages];
};

// Where one thread stands in a ring of pieces; lives across several copies. Once per kernel: it initializes the barriers.
class CopyRing {
 public:
  MK_DEVICE CopyRing(CopyPieces& pieces, CopyBarriers& barriers) : pieces_(pieces), barriers_(barriers) {
    for (uint32_t s = 0; s < kPieceStages; ++s) ptx::mbarrier_init(&barriers.piece_arrived[s], 1);
    ptx::mbarrier_init_fence();
  }
  MK_DEVICE ~CopyRing() { ptx::fence_proxy_async_shared(); }  // shared memory changes hands from bulk copies to barriers and tiles

  // Copies the chunks that `chunks` enumerates and calls chunks.announce(item) once a chunk is complete at all its destinations.
  // Chunks: Item, what is worked out once for all pieces of a chunk: one thread copies, and every instruction it spends on a piece delays all
  //         pieces; it has `bytes`. Item item(index); uint32_t first() / next(index) / end();
  //         bool ready(item): whether its source is there, true once for each; bool wait(item): until it is (false: the call has failed);
  //         kPieceBytes, at most as many as a stage has room for; void load(item, offset, smem, bytes, bar) issues the load of one piece,
  //         loaded(bytes) says how many bytes it brings; store(item, offset, smem, bytes) issues its stores;
  //         void announce(item).
  // Nothing is in flight afterwards.
  template <class Chunks>
  MK_DEVICE void copy(Chunks& chunks) {
    Cursor<Chunks> loading = cursor(chunks, chunks.first()), storing = loading, announcing = loading;
    uint32_t ahead = 0, behind = 0;
#pragma unroll 1
    while (storing.index < chunks.end()) {
#pragma unroll 1
      while (ahead < kPiecesAhead && loading.index < chunks.end() && (loading.offset != 0 || chunks.ready(loading.item))) {
        ptx::store_wait_read<kPieceStages - kPiecesAhead>();
        load(chunks, loading, (stage_ + ahead) % kPieceStages);
        advance(chunks, loading);
        ++ahead;
      }
      if (ahead == 0) {  // nothing to do but wait; first what is done is told
        ptx::store_wait<0>();
        for (; behind > 0; --behind) announce(chunks, announcing);
        if (!chunks.wait(loading.item)) return;
        continue;
      }
      store(chunks, storing);
      advance(chunks, storing);
      --ahead;
      if (++behind > kPiecesBehind) {
        ptx::store_wait<kPiecesBehind>();
        announce(chunks, announcing);
        --behind;
      }
    }
    ptx::store_wait<0>();
    while (behind-- > 0) announce(chunks, announcing);
  }

 private:
  template <class Chunks>
  struct Cursor {
    uint32_t index, offset;
    typename Chunks::Item item;
  };
  template <class Chunks>
  MK_DEVICE static Cursor<Chunks> cursor(Chunks& chunks, uint32_t index) {
    Cursor<Chunks> at{index, 0, {}};
    if (index < chunks.end()) at.item = chunks.item(index);
    return at;
  }
  template <class Chunks>
  MK_DEVICE static uint32_t piece_bytes(const Cursor<Chunks>& at) {
    static_assert(Chunks::kPieceBytes <= sizeof(CopyPieces::piece[0]), "a piece per stage");
    const uint32_t left = at.item.bytes - at.offset;
    return left < Chunks::kPieceBytes ? left : Chunks::kPieceBytes;
  }
  template <class Chunks>
  MK_DEVICE static void advance(Chunks& chunks, Cursor<Chunks>& at) {
    at.offset += Chunks::kPieceBytes;
    if (at.offset >= at.item.bytes) at = cursor(chunks, chunks.next(at.index));
  }
  template <class Chunks>
  MK_DEVICE void load(Chunks& chunks, const Cursor<Chunks>& at, uint32_t stage) {
    const uint32_t bytes = piece_bytes(at);
    ptx::mbarrier_arrive_expect(&barriers_.piece_arrived[stage], chunks.loaded(bytes));
    chunks.load(at.item, at.offset, pieces_.piece[stage], bytes, &barriers_.piece_arrived[stage]);
  }
  template <class Chunks>
  MK_DEVICE void store(Chunks& chunks, const Cursor<Chunks>& at) {
    ptx::mbarrier_wait(&barriers_.piece_arrived[stage_], parity_);
    chunks.store(at.item, at.offset, pieces_.piece[stage_], piece_bytes(at));
    ptx::store_commit();
    if (++stage_ == kPieceStages) stage_ = 0, parity_ ^= 1;
  }
  template <class Chunks>
  MK_DEVICE static void announce(Chunks& chunks, Cursor<Chunks>& at) {  // a piece is stored
    if (at.offset + Chunks::kPieceBytes >= at.item.bytes) chunks.announce(at.item);
    advance(chunks, at);
  }

  CopyPieces& pieces_;
  CopyBarriers& barriers_;
  uint32_t stage_ = 0, parity_ = 0;
};

// One warp copies `bytes` (a multiple of 16) by ordinary loads and stores, which need no shared memory: load(offset) reads 16 bytes of the source,
// store(offset, words) writes them to all destinations.
constexpr uint32_t kWarpLoads = 4;  // of a lane, under way at once
template <class Load, class Store>
MK_DEVICE void copy_by_warp(uint32_t bytes, const Load& load, const Store& store) {
  constexpr uint32_t kUnit = sizeof(ptx::Words), kStride = 32 * kUnit;
#pragma unroll 1
  for (uint32_t offset = ptx::lane_index() * kUnit; offset < bytes; offset += kWarpLoads * kStride) {
    ptx::Words words[kWarpLoads];
#pragma unroll
    for (uint32_t i = 0; i < kWarpLoads; ++i) {
      if (offset + i * kStride < bytes) words[i] = load(offset + i * kStride);
    }
#pragma unroll
    for (uint32_t i = 0; i < kWarpLoads; ++i) {
      if (offset + i * kStride < bytes) store(offset + i * kStride, words[i]);
    }
  }
  ptx::sync_warp();  // all lanes have stored
}

}  // namespace mkernel
