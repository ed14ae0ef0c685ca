// Bulk copies by one thread per CTA: global -> shared -> one or several destinations, a ring of pieces deep. The source is read once
// however many destinations there are. Measured: 43-50 GB/s per CTA to a peer, linear to 8 CTAs (docs/planner.md).
#pragma once
#include "comm/sync.cuh"
#include "concepts.cuh"

namespace mkernel {

constexpr uint32_t kPieceBytes = 16 * 1024;
constexpr uint32_t kPieceStages = 8;
constexpr uint32_t kPiecesAhead = 5;   // loads in flight before their store is issued
constexpr uint32_t kPiecesBehind = 4;  // stores in flight, to one destination: more fill the link no better, and take longer

constexpr uint32_t kCopyQueue = 16;      // chunks: 9 that are on their way, and those that a mailbox tells of
constexpr uint32_t kCopyItemBytes = 48;  // at most

struct CopyPieces {
  alignas(128) char piece[kPieceStages][kPieceBytes];
  alignas(16) char items[kCopyQueue][kCopyItemBytes];  // of chunks, one after the other

  template <class Item>
  MK_DEVICE Item& item(uint32_t number) {
    static_assert(sizeof(Item) <= kCopyItemBytes && alignof(Item) <= 16, "kCopyItemBytes");
    return *reinterpret_cast<Item*>(items[number % kCopyQueue]);
  }
};
struct CopyBarriers {
  uint64_t piece_arrived[kPieceStages];
};

// What CopyRing copies. One thread copies, and every instruction that it spends on a piece delays all pieces; so an Item holds what is worked out
// once per chunk, for all its pieces: when they are loaded, when they are stored, and when the chunk is announced.
template <class Chunks>
concept CopiedChunks = requires(Chunks chunks, const typename Chunks::Item& item, uint32_t index, uint32_t offset, void* stage,
                                const char* smem, uint32_t bytes, uint64_t* bar) {
  { item.bytes } -> Same<const uint32_t&>;  // of the chunk, not 0

  // ---- which chunks: by index
  { chunks.first() } -> Same<uint32_t>;
  { chunks.next(index) } -> Same<uint32_t>;
  { chunks.end() } -> Same<uint32_t>;                     // may be one more until item() has found that there is no such chunk
  { chunks.item(index) } -> Same<typename Chunks::Item>;  // asked for once for each, in order

  // ---- their source
  { chunks.ready(item) } -> Same<bool>;              // whether it is complete; true once for each chunk
  { chunks.wait(item) } -> Same<bool>;               // waits until it is complete; false: the call has failed
  { chunks.piece_bytes() } -> Same<uint32_t>;        // at most kPieceBytes
  chunks.load(item, offset, stage, bytes, bar);      // issues the load of one piece,
  { chunks.loaded(item, bytes) } -> Same<uint32_t>;  // which brings so many bytes
  // If there is chunks.next_piece(its own item): what is kept for loads goes on to the next piece of the chunk.
  // If there is chunks.skew(item): by so many bytes the first piece is smaller, so that all others begin with a line at their destination.

  // ---- their destinations
  chunks.store(item, offset, smem, bytes);  // issues the stores of one piece
  chunks.announce(item);                    // the chunk is complete
};

// Where one thread stands in a ring of pieces; lives across several copies. Once per kernel: it initializes the barriers.
class CopyRing {
 public:
  MK_DEVICE CopyRing(CopyPieces& pieces, CopyBarriers& barriers) : pieces_(pieces), barriers_(barriers) {
    for (uint32_t s = 0; s < kPieceStages; ++s) ptx::mbarrier_init(&barriers.piece_arrived[s], 1);
    ptx::mbarrier_init_fence();
  }
  MK_DEVICE ~CopyRing() { ptx::fence_proxy_async_shared(); }  // shared memory changes hands from bulk copies to barriers and tiles

  // Copies the chunks that `chunks` enumerates and announces each once it is complete at all its destinations. Nothing is in flight afterwards.
  // Behind: stores in flight before a finished chunk is announced. The first pieces are loaded before may_store(), which waits until something may be
  // stored, and says whether.
  //
  // One loop loads, stores and announces in one place each: what a kernel's chunks do is inlined there, and may be hundreds of instructions.
  template <uint32_t Behind = kPiecesBehind, CopiedChunks Chunks, class MayStore>
  MK_DEVICE void copy(Chunks& chunks, const MayStore& may_store) {
    Cursor<Chunks> loading{}, storing{};
    uint32_t index = chunks.first();                 // of the chunk that is looked at next
    uint32_t stored = looked_, announced = looked_;  // chunks whose first piece is stored, and whose last one is announced
    uint32_t ahead = 0, behind = 0;                  // pieces that are loaded, and that are stored and not announced
    uint32_t ends = 0;                               // which of the pieces behind are the last of their chunk; the latest: bit 0
    bool may = false;
#pragma unroll 1
    while (true) {
      load_ahead(chunks, loading, index, ahead);
      bool rests = false;        // nothing to do but wait; first what is done is told
      if (storing.bytes == 0) {  // as when nothing is ahead: a chunk that is complete is loaded and stored to its end
        if (!may) {
          may = may_store();
          if (!may) break;
        }
        rests = ahead == 0;
        if (!rests) storing = begin(chunks, item<Chunks>(stored++));
      }
      if (rests) {
        ptx::store_wait<0>();
      } else {
        store(chunks, storing);
        advance(chunks, storing);
        ends = ends << 1 | (storing.bytes == 0 ? 1 : 0);
        --ahead;
        if (++behind > Behind) ptx::store_wait<Behind>();
      }
#pragma unroll 1
      for (; behind > (rests ? 0 : Behind); --behind) {
        if (ends >> (behind - 1) & 1) chunks.announce(item<Chunks>(announced++));
      }
      if (rests && (loading.bytes == 0 || !chunks.wait(loading.item))) return;
    }
    for (; ahead > 0; --ahead) take_piece();
  }
  template <uint32_t Behind = kPiecesBehind, CopiedChunks Chunks>
  MK_DEVICE void copy(Chunks& chunks) {
    copy<Behind>(chunks, [] { return true; });
  }

 private:
  template <class Chunks>
  struct Cursor {
    uint32_t offset, bytes;  // of a piece in its chunk; no bytes: there is no chunk
    typename Chunks::Item item;
  };
  template <class Chunks>
  MK_DEVICE typename Chunks::Item& item(uint32_t number) const {
    return pieces_.template item<typename Chunks::Item>(number);
  }
  MK_DEVICE static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
  template <class Chunks>
  MK_DEVICE static Cursor<Chunks> begin(const Chunks& chunks, const typename Chunks::Item& item) {
    uint32_t most = chunks.piece_bytes();
    if constexpr (requires { chunks.skew(item); }) most -= chunks.skew(item);
    return Cursor<Chunks>{0, least(most, item.bytes), item};
  }
  template <class Chunks>
  MK_DEVICE static void advance(const Chunks& chunks, Cursor<Chunks>& at) {
    at.offset += at.bytes;
    at.bytes = least(chunks.piece_bytes(), at.item.bytes - at.offset);
    if (at.bytes == 0) at.offset = 0;
  }
  template <class Chunks>
  MK_DEVICE bool begins(Chunks& chunks, Cursor<Chunks>& loading, uint32_t& index) {  // whether a chunk is there, and complete
    if (loading.bytes == 0) {
      if (index >= chunks.end()) return false;
      const typename Chunks::Item next = chunks.item(index);
      if (index >= chunks.end()) return false;
      index = chunks.next(index);
      item<Chunks>(looked_++) = next;
      loading = begin(chunks, next);
    }
    return chunks.ready(loading.item);
  }
  template <class Chunks>
  MK_DEVICE void load_ahead(Chunks& chunks, Cursor<Chunks>& loading, uint32_t& index, uint32_t& ahead) {
#pragma unroll 1
    for (; ahead < kPiecesAhead; ++ahead) {
      if (loading.offset == 0 && !begins(chunks, loading, index)) return;
      ptx::store_wait_read<kPieceStages - kPiecesAhead>();
      load(chunks, loading, (stage_ + ahead) % kPieceStages);
      advance(chunks, loading);
      if constexpr (requires { chunks.next_piece(loading.item); }) {
        if (loading.bytes != 0) chunks.next_piece(loading.item);
      }
    }
  }
  template <class Chunks>
  MK_DEVICE void load(Chunks& chunks, const Cursor<Chunks>& at, uint32_t stage) {
    ptx::mbarrier_arrive_expect(&barriers_.piece_arrived[stage], chunks.loaded(at.item, at.bytes));
    chunks.load(at.item, at.offset, pieces_.piece[stage], at.bytes, &barriers_.piece_arrived[stage]);
  }
  template <class Chunks>
  MK_DEVICE void store(Chunks& chunks, const Cursor<Chunks>& at) {
    const char* piece = pieces_.piece[take_piece()];
    chunks.store(at.item, at.offset, piece, at.bytes);
    ptx::store_commit();
  }
  MK_DEVICE uint32_t take_piece() {  // the stage of the next one that has been loaded
    const uint32_t stage = stage_;
    ptx::mbarrier_wait(&barriers_.piece_arrived[stage], parity_);
    if (++stage_ == kPieceStages) stage_ = 0, parity_ ^= 1;
    return stage;
  }

  CopyPieces& pieces_;
  CopyBarriers& barriers_;
  uint32_t stage_ = 0, parity_ = 0;
  uint32_t looked_ = 0;  // chunks
};

// One warp copies `bytes` (a multiple of 16) by ordinary loads and stores, which need no shared memory: load() reads the lane's next 16 bytes of the
// source, from lane_index() * kWarpUnit on, each time kWarpStride further; store(offset, words) writes them to all destinations.
constexpr uint32_t kWarpLoads = 4;  // of a lane, under way at once
constexpr uint32_t kWarpUnit = sizeof(ptx::Words), kWarpStride = 32 * kWarpUnit;
template <class Load, class Store>
MK_DEVICE void copy_by_warp(uint32_t bytes, Load& load, const Store& store) {
#pragma unroll 1
  for (uint32_t offset = ptx::lane_index() * kWarpUnit; offset < bytes; offset += kWarpLoads * kWarpStride) {
    ptx::Words words[kWarpLoads];
#pragma unroll
    for (uint32_t i = 0; i < kWarpLoads; ++i) {
      if (offset + i * kWarpStride < bytes) words[i] = load();
    }
#pragma unroll
    for (uint32_t i = 0; i < kWarpLoads; ++i) {
      if (offset + i * kWarpStride < bytes) store(offset + i * kWarpStride, words[i]);
    }
  }
  ptx::sync_warp();  // all lanes have stored
}

}  // namespace mkernel
