// Shared memory of a compute CTA, its barriers, and how the queue of tiles is read.
#pragma once
#include "comm/handshake.cuh"
#include "comm/mailbox.cuh"
#include "tile/shape.cuh"

namespace mkernel {

// Items on their way from the scheduler of a pair's leader to that of the other CTA (pair.cuh). They, and `filled`, are used in the other CTA's
// shared memory, `taken` in the leader's.
template <uint32_t Ctas>
struct Relay {
  Handshake<kTileQueue> slots;
  uint32_t item[kTileQueue];
  MK_DEVICE void init() { slots.init(2, Ctas - 1); }
};
template <>
struct Relay<1> {
  MK_DEVICE void init() {}
};

// Where the CTAs of a cluster that share K meet (cluster_sums.cuh): what they send lies in `result`.
template <uint32_t Ctas>
struct SumsOfCluster {
  uint64_t filled, taken;
  MK_DEVICE void init() {
    ptx::mbarrier_init(&filled, 1);
    ptx::mbarrier_init(&taken, Ctas * kConsumerWarps);
  }
};
template <>
struct SumsOfCluster<1> {
  MK_DEVICE void init() {}
};

// Where consumer warpgroups have tiles in turn: whose last stage of a tile one of them has looked for, so that the other one's stages come next. (Of what
// it has not waited for it would take an earlier lap for its own.)
template <bool kIs>
struct Turns {
  uint64_t ended[kConsumerWarpgroups];
  MK_DEVICE void init() {
    for (uint64_t& by_warps : ended) ptx::mbarrier_init(&by_warps, kWarpgroup / 32);
  }
};
template <>
struct Turns<false> {
  MK_DEVICE void init() {}
};

// Shared memory of a compute CTA. Barrier pairs: the past tense of what the arriving side has done.
template <class Config>
struct GemmStorage {
  using Shape = GemmShape<Config>;
  struct Pipeline {
    alignas(1024) char a[Shape::kStages][Shape::kBytesA];
    alignas(1024) char b[Shape::kStages][Shape::kBytesB];
  };
  alignas(1024) Pipeline pipeline;
  alignas(1024) char result[kConsumerWarpgroups][Shape::kResultBuffers][kBlockBytes];
  Handshake<Shape::kMostStages> stages;                          // of the pipeline: loading thread, consumers
  Handshake<kTileQueue> queue;                                   // of items: scheduler, all others
  uint64_t tile_wanted;                                          // completes once per tile: it is nearly loaded
  Handshake<Shape::kResultBuffers> blocks[kConsumerWarpgroups];  // of results: a consumer warpgroup, the storing thread
  EntryGate entries;
  TilePart item[kTileQueue];
  Mailbox announce;
  [[no_unique_address]] Relay<Shape::kCluster> relay;
  [[no_unique_address]] SumsOfCluster<Shape::kClusterK> sums;
  [[no_unique_address]] Turns<Shape::kAlternates> turn;
};

template <class Config>
using StagePosition = RingPosition<GemmShape<Config>::kMostStages>;

// The stages of a call. Where its tiles have at most 64 rows (op.is_low(), of kernels with Config::kLow), there are more of them, with 64 rows of A each:
// a load waits as long for few bytes as for many, so the fewer a k step has, the more steps should be on their way. Then the first consumer warpgroup has
// all rows, and the other one only gives stages back. With swapped operands there are as many stages as fit with as many rows and columns as the
// call's tiles have.
template <class Config>
class StageRing {
  using Shape = GemmShape<Config>;

 public:
  template <class Op>
  MK_DEVICE explicit StageRing(const Op& op) {
    if constexpr (Shape::kMayBeLow) is_low_ = op.is_low();
    if constexpr (Shape::kSwapped) is_narrow_ = op.is_narrow(), count_ = op.stages(), bytes_ = bytes_a() + op.block_rows() * kSwizzleBytes;
  }
  MK_DEVICE bool is_low() const { return is_low_; }
  MK_DEVICE uint32_t count() const {
    if constexpr (Shape::kSwapped) return count_;
    return is_low_ ? Shape::kMostStages : Shape::kStages;
  }
  MK_DEVICE char* a(GemmStorage<Config>& storage, uint32_t stage) const {
    if constexpr (Shape::kSwapped) return storage.pipeline.a[0] + stage * bytes_;
    if constexpr (!Shape::kMayBeLow) return storage.pipeline.a[stage];
    return storage.pipeline.a[0] + stage * (bytes_a() + Shape::kBytesB);
  }
  MK_DEVICE char* b(GemmStorage<Config>& storage, uint32_t stage) const {
    if constexpr (!Shape::kMayBeLow && !Shape::kSwapped) return storage.pipeline.b[stage];
    return a(storage, stage) + bytes_a();
  }
  // Where rows of A go, and columns of B.
  MK_DEVICE char* rows(GemmStorage<Config>& storage, uint32_t stage) const {
    return Shape::kSwapped ? b(storage, stage) : a(storage, stage);
  }
  MK_DEVICE char* columns(GemmStorage<Config>& storage, uint32_t stage) const {
    return Shape::kSwapped ? a(storage, stage) : b(storage, stage);
  }

 private:
  MK_DEVICE uint32_t bytes_a() const { return is_low_ || is_narrow_ ? Shape::kBytesA / 2 : Shape::kBytesA; }
  bool is_low_ = false, is_narrow_ = false;
  uint32_t count_ = 0, bytes_ = 0;  // of stages with swapped operands
};

// The shared memory of the CTA, as a kernel lays it out.
template <class Storage>
MK_DEVICE Storage& shared_storage() {
  static_assert(sizeof(Storage) <= Config::kSharedBytes, "shared memory");
  return *reinterpret_cast<Storage*>(ptx::shared_memory());
}

// Each by one thread: what the loading thread and the scheduler wait for, and the rest.
template <class Config>
MK_DEVICE void init_inputs(GemmStorage<Config>& storage) {
  storage.stages.init(1, GemmShape<Config>::kWarpgroups * (kWarpgroup / 32) * GemmShape<Config>::kSharing);
  storage.queue.init(1, kQueueReaders);
  ptx::mbarrier_init(&storage.tile_wanted, 1);
  ptx::mbarrier_init_fence();
}
template <class Config>
MK_DEVICE void init_results(GemmStorage<Config>& storage) {
  for (uint32_t w = 0; w < kConsumerWarpgroups; ++w) storage.blocks[w].init(kWarpgroup / 32, 1);
  storage.entries.init();
  storage.relay.init();
  storage.sums.init();
  storage.turn.init();
  storage.announce.init();  // ends with the fence for all of them
}

// Reads the next item of the queue, as the loading or storing thread or as one warp of a consumer.
enum class Reader { kThread, kWarp };
template <Reader By, class Config>
MK_DEVICE TilePart take_item(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at) {
  storage.queue.wait_filled(at);
  const TilePart item = storage.item[at.index];
  if constexpr (By == Reader::kWarp) ptx::sync_warp();  // all lanes have read before one of them gives the slot back
  if (By == Reader::kThread || ptx::lane_index() == 0) storage.queue.take(at);
  at.advance();
  return item;
}

}  // namespace mkernel
