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

struct CopyPieces {
  alignas(128) char piece[kPieceStages][kPieceBytes];
};
struct CopyBarriers {
  uint64_t piece_arrived[kPieceStages];
};

// What CopyRing copies. One thread copies, and every instruction that it spends on a piece delays all pieces; so an Item holds what is worked out
// once per chunk, for all its pieces.
template <class Chunks>
concept CopiedChunks = requires(Chunks chunks, const typename Chunks::Item& item, typename Chunks::Item& mutable_item, uint32_t index,
                                uint32_t offset, void* stage, const char* smem, uint32_t bytes, uint64_t* bar) {
  { item.bytes } -> Same<const uint32_t&>;  // of the chunk

  // ---- which chunks: by index
  { chunks.first() } -> Same<uint32_t>;
  { chunks.next(index) } -> Same<uint32_t>;
  { chunks.end() } -> Same<uint32_t>;  // may be one more until item() has found that there is no such chunk
  { chunks.item(index) } -> Same<typename Chunks::Item>;

  // ---- their source
  { chunks.ready(item) } -> Same<bool>;              // whether it is complete; true once for each chunk
  { chunks.wait(item) } -> Same<bool>;               // waits until it is complete; false: the call has failed
  { chunks.piece_bytes() } -> Same<uint32_t>;        // at most kPieceBytes
  chunks.load(item, offset, stage, bytes, bar);      // issues the load of one piece,
  { chunks.loaded(item, bytes) } -> Same<uint32_t>;  // which brings so many bytes
  chunks.next_piece(mutable_item);                   // goes on to the next piece of the chunk
  // If there is chunks.known(index): the item of a chunk that item() has been asked for, for less work.
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
    Cursor<Chunks> loading{chunks.first(), 0, {}, false}, storing = loading, announcing = loading;
    uint32_t ahead = 0, behind = 0;  // pieces that are loaded, and that are stored and not announced
    bool may = false;
#pragma unroll 1
    while (true) {
      load_ahead(chunks, loading, ahead);
      if (!may) {
        may = may_store();
        if (!may) break;
      }
      const bool is_done = storing.index >= chunks.end();
      const bool rests = is_done || ahead == 0;  // nothing to do but wait; first what is done is told
      if (!rests) {
        look<true>(chunks, storing);
        store(chunks, storing);
        advance(chunks, storing);
        --ahead;
        ++behind;
      }
      if (rests) {
        ptx::store_wait<0>();
      } else if (behind > Behind) {
        ptx::store_wait<Behind>();
      }
#pragma unroll 1
      for (; behind > (rests ? 0 : Behind); --behind) announce(chunks, announcing);
      if (is_done || (rests && !chunks.wait(loading.item))) return;
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
    uint32_t index, offset;
    typename Chunks::Item item;
    bool has_item;
  };
  // At a chunk that is there. IsKnown: the loading cursor has looked at it.
  template <bool IsKnown, class Chunks>
  MK_DEVICE static void look(Chunks& chunks, Cursor<Chunks>& at) {
    if (at.has_item) return;
    if constexpr (IsKnown && requires { chunks.known(at.index); }) {
      at.item = chunks.known(at.index);
    } else {
      at.item = chunks.item(at.index);
    }
    at.has_item = true;
  }
  template <class Chunks>
  MK_DEVICE static bool may_load(Chunks& chunks, Cursor<Chunks>& at) {
    if (at.index >= chunks.end()) return false;
    look<false>(chunks, at);
    return at.index < chunks.end() && (at.offset != 0 || chunks.ready(at.item));
  }
  template <class Chunks>
  MK_DEVICE void load_ahead(Chunks& chunks, Cursor<Chunks>& loading, uint32_t& ahead) {
#pragma unroll 1
    while (ahead < kPiecesAhead && may_load(chunks, loading)) {
      ptx::store_wait_read<kPieceStages - kPiecesAhead>();
      load(chunks, loading, (stage_ + ahead) % kPieceStages);
      advance(chunks, loading);
      ++ahead;
    }
  }
  template <class Chunks>
  MK_DEVICE static uint32_t most_bytes(const Chunks& chunks, const Cursor<Chunks>& at) {
    if constexpr (requires { chunks.skew(at.item); }) {
      if (at.offset == 0) return chunks.piece_bytes() - chunks.skew(at.item);
    }
    return chunks.piece_bytes();
  }
  template <class Chunks>
  MK_DEVICE static uint32_t piece_bytes(const Chunks& chunks, const Cursor<Chunks>& at) {
    const uint32_t left = at.item.bytes - at.offset, most = most_bytes(chunks, at);
    return left < most ? left : most;
  }
  template <class Chunks>
  MK_DEVICE static void advance(Chunks& chunks, Cursor<Chunks>& at) {
    at.offset += most_bytes(chunks, at);
    if (at.offset >= at.item.bytes) {
      at.index = chunks.next(at.index), at.offset = 0, at.has_item = false;
    } else {
      chunks.next_piece(at.item);
    }
  }
  template <class Chunks>
  MK_DEVICE void load(Chunks& chunks, const Cursor<Chunks>& at, uint32_t stage) {
    const uint32_t bytes = piece_bytes(chunks, at);
    ptx::mbarrier_arrive_expect(&barriers_.piece_arrived[stage], chunks.loaded(at.item, bytes));
    chunks.load(at.item, at.offset, pieces_.piece[stage], bytes, &barriers_.piece_arrived[stage]);
  }
  template <class Chunks>
  MK_DEVICE void store(Chunks& chunks, const Cursor<Chunks>& at) {
    const char* piece = pieces_.piece[take_piece()];
    chunks.store(at.item, at.offset, piece, piece_bytes(chunks, at));
    ptx::store_commit();
  }
  MK_DEVICE uint32_t take_piece() {  // the stage of the next one that has been loaded
    const uint32_t stage = stage_;
    ptx::mbarrier_wait(&barriers_.piece_arrived[stage], parity_);
    if (++stage_ == kPieceStages) stage_ = 0, parity_ ^= 1;
    return stage;
  }
  template <class Chunks>
  MK_DEVICE static void announce(Chunks& chunks, Cursor<Chunks>& at) {  // a piece is stored
    look<true>(chunks, at);
    if (at.offset + most_bytes(chunks, at) >= at.item.bytes) chunks.announce(at.item);
    advance(chunks, at);
  }

  CopyPieces& pieces_;
  CopyBarriers& barriers_;
  uint32_t stage_ = 0, parity_ = 0;
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
