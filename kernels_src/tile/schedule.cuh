// The scheduler warp of a compute CTA: takes tiles from a counter, waits for their inputs, offers them to the others.
#pragma once
#include "tile/pair.cuh"
#include "trace.cuh"

namespace mkernel {

// Clusters are placed over the GPCs in turn, CTAs alone one GPC after the other (read from %smid; docs/speed_log.md). L2 reads once what SMs of a GPC ask
// for at the same time. So the clusters of a GPC have numbers that follow each other, and with them tiles that are neighbours, as CTAs alone have. Between
// ranks that gains nothing.
constexpr uint32_t kGpcs = 8;
MK_DEVICE uint32_t number_by_gpc(uint32_t cluster, uint32_t clusters) {
  const uint32_t gpc = cluster % kGpcs, each = clusters / kGpcs, left = clusters % kGpcs;
  return gpc * each + (gpc < left ? gpc : left) + cluster / kGpcs;
}

// The tile that a CTA, or a cluster, which computes from the start has by its number, before it takes any from the counter; else kStop.
template <class Config, class Op>
MK_DEVICE uint32_t given_tile(const Call& call, const Op& op) {
  constexpr uint32_t kCluster = GemmShape<Config>::kCluster;
  if (call.role != abi::kCompute) return kStop;
  const uint32_t number = (ptx::cta_index() - num_comm_ctas(op.p)) / kCluster;
  return kCluster == 1 || kWorldSize > 1 ? number : number_by_gpc(number, (ptx::cta_count() - num_comm_ctas(op.p)) / kCluster);
}

// The tiles of this CTA, or of its pair, one after the other: those assigned to it, then one given by its index, then those it takes from the
// counter that all CTAs of the rank share. Warp functions.
//
// Where CTAs share K, all begin at once and have as much to do, so that numbers are dealt: every CTA has each that is so many further as there are CTAs.
// By the counter one that is a little sooner took several sums ahead, one after the other, and others none; and at the end nobody asks whether there
// are more.
template <class Config, class Op>
class TileSource {
 public:
  MK_DEVICE TileSource(const Call& call, const Op& op) : call_(call), op_(op), num_tiles_(op.num_tiles()) {
    if constexpr (Op::kShares) is_dealt_ = op.shares().shares > 1 && num_comm_ctas(op.p) == 0;
  }

  MK_DEVICE bool take(uint32_t& tile) {  // false: there are no more
    tile = kStop;
    if (own_ != kStop) {
      tile = op_.assigned(own_);
      if (tile != kStop) {
        ++own_;
        return true;
      }
      own_ = kStop;
      tile = given_tile<Config>(call_, op_);  // a CTA that computes from the start has its first tile without an atomic
    }
    if (is_dealt_) {
      if (tile == kStop) tile = last_ + ptx::cta_count() / kCluster;
      last_ = tile;
    } else if (tile == kStop) {
      tile = ptx::lane_index() == 0 ? ptx::atomic_add(&control_block(call_.world)->tile_counter, 1) : 0;
      tile = ptx::broadcast(tile, 0) + (ptx::cta_count() - num_comm_ctas(op_.p)) / kCluster;
    }
    return tile < num_tiles_;
  }

 private:
  static constexpr uint32_t kCluster = GemmShape<Config>::kCluster;
  const Call& call_;
  const Op& op_;
  bool is_dealt_ = false;
  uint32_t last_ = 0;             // of those dealt
  uint32_t num_tiles_, own_ = 0;  // how many tiles assigned to this CTA it has taken; kStop: all, and the one that it has by its index
};

// The entry of this CTA into the call: opens its EntryGate once, at the first tile that needs other ranks, or after the first tile of own
// inputs, which is multiplied meanwhile. Warp functions.
class CtaEntry {
 public:
  MK_DEVICE CtaEntry(const Call& call, EntryGate& gate) : call_(call), gate_(gate), entered_(MaybeEntered::not_yet(call)) {}
  MK_DEVICE bool is_open() const { return is_open_; }
  MK_DEVICE bool open() {  // false: a rank did not enter
    is_open_ = true;
    entered_ = gate_.open(call_);
    return static_cast<bool>(entered_);
  }
  MK_DEVICE Entered operator*() const { return *entered_; }  // only where open() was true

 private:
  const Call& call_;
  EntryGate& gate_;
  MaybeEntered entered_;
  bool is_open_ = false;
};

template <class Config>
MK_DEVICE void offer_item(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at, const TilePart& item) {
  if (ptx::lane_index() == 0) {
    storage.queue.wait_taken(at);
    storage.item[at.index] = item;
    storage.queue.fill(at);
  }
  ptx::sync_warp();
  at.advance();
}

// The scheduler of a pair's other CTA: offers what the leader's sends. It enters for its own threads, after the first item, as the leader's does; where
// they gather, before it, because the leader has no item until they have.
template <class Config, class Op>
MK_DEVICE void follow(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  RingPosition<kTileQueue> at, received;
  bool entered = Op::kGathers;
  if (entered) storage.entries.open(call);
  uint32_t item;
#pragma unroll 1
  do {
    item = Pair<Config>::receive(storage, received);
    if (item != kStop) offer_item(storage, at, TilePart{item, op.coordinate(item / Op::kParts)});
    if (!entered) storage.entries.open(call), entered = true;
  } while (item != kStop);
  if (ptx::lane_index() == 0) leave_call(call);
  offer_item(storage, at, TilePart{kStop, {}});
}

// The offer loop: offers each part of each tile when its inputs are there, and kStop at the end, whatever has happened.
template <class Config, class Op>
MK_DEVICE void schedule_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  if constexpr (Pair<Config>::kIs) {
    if (!Pair<Config>::leads()) return follow(call, op, storage);
  }
  RingPosition<kTileQueue> at;
  Trace trace(call.world, 0);
  const uint32_t lane = ptx::lane_index();
  TileSource<Config, Op> tiles(call, op);
  CtaEntry entry(call, storage.entries);
  uint32_t parts = 0, wanted = 0;  // of the tile before, and the parity of the barrier that it completes
  bool ok = true;
#pragma unroll 1
  while (true) {
    if (parts != 0) {  // a tile taken sooner than needed would be missing where another CTA has nothing to do
      ptx::mbarrier_wait(&storage.tile_wanted, wanted);
      ptx::sync_warp();  // all lanes have seen that a tile is wanted, before the next one may be
      wanted ^= 1;
    }
    uint32_t tile;
    const bool more = tiles.take(tile);
    if (more) {
      const TileCoordinate c = op.coordinate(tile);
      parts = op.parts(c);
#pragma unroll 1
      for (uint32_t part = 0; ok && part < parts; ++part) {
        if (op.waits(c, part)) {
          if (!entry.is_open()) ok = entry.open();
          const uint64_t begin = trace.now();
          if (ok) ok = op.wait_inputs(*entry, c, part);
          if (lane == 0) trace.record(abi::kTraceWait, tile, begin);
        }
        if (ok) {
          Pair<Config>::send(storage, at, tile * Op::kParts + part, op.waits(c, part));
          offer_item(storage, at, TilePart{tile * Op::kParts + part, c});
        }
      }
    }
    if (!entry.is_open()) ok = entry.open();  // not sooner: a first tile of own inputs is multiplied meanwhile
    if (!ok || !more) break;
  }
  if (lane == 0) leave_call(call);  // this CTA takes no more tiles, and all its threads have read the epoch
  Pair<Config>::send(storage, at, kStop, false);
  offer_item(storage, at, TilePart{kStop, {}});
  Pair<Config>::end_sending(storage, at);
}

}  // namespace mkernel
