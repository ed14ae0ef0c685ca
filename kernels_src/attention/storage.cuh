// Shared memory and barriers of the attention role.
#pragma once
#include "attention/shape.cuh"
#include "comm/handshake.cuh"
#include "comm/sync.cuh"

namespace mkernel {

// What consumers need to know of a block of keys.
struct BlockHeader {
  int32_t position;
  uint32_t rows;       // valid keys; 0: nothing was loaded, because the call has failed
  uint32_t is_last;    // of the item
  uint32_t abandoned;  // the call has failed, and the item's result is not to be stored; then it is the last one, too
};
// And of an item. `number` is kNoItem at the end.
struct ItemHeader {
  AttentionItem item;
  uint32_t number;
  uint32_t has_keys;  // 0: no row sees any key
};

constexpr uint32_t kItemQueue = 2;
constexpr uint32_t kEpilogueBarrier = 1;  // named barriers of each warpgroup's own threads, from this one on

template <class Config>
struct AttentionStorage {
  using Shape = AttentionShape<Config>;
  alignas(1024) char q[Shape::kWarpgroups][Shape::kPanels][Shape::kQueryPanel];
  alignas(1024) char k[Shape::kStages][Shape::kKeyBytes];
  alignas(1024) char v[Shape::kValueStages][Shape::kKeyBytes];
  alignas(1024) char o[Shape::kWarpgroups][Shape::kOutPanels][Shape::kQueryPanel];  // results on their way out
  BlockHeader block[Shape::kStages];                                                // comes with K
  ItemHeader item[kItemQueue];
  KeyBlock owed;                         // the producer's: of which it has loaded K and not V,
  uint32_t credit[Shape::kValueStages];  // and what it owes the op for the blocks in the stages of V
  Handshake<1> query;                    // producer, consumers
  Handshake<Shape::kStages> keys;
  Handshake<Shape::kValueStages> values;
  Handshake<kItemQueue> items;
  Handshake<1> parts;                 // producer, consumers: the other parts of an item are there to be merged,
  uint32_t parts_failed;              // or the call has failed
  Handshake<1> left;                  // consumers, warp 1: what they leave of a part is in memory,
  uint32_t left_number;               // and this is the part's number; kNoItem at the end
  uint64_t padded;                    // values that the producer completes with zeros before it gives them to the consumers
  uint32_t padded_parity;             // The producer's, which has few registers: which phase of `padded` comes next,
  uint32_t items_taken;               // how many items it has taken,
  RingPosition<kItemQueue> items_at;  // and where in `items` it offers the next one
  EntryGate entries;
};

template <class Config>
MK_DEVICE void attention_init(AttentionStorage<Config>& storage, bool traces) {  // one thread
  using Shape = AttentionShape<Config>;
  constexpr uint32_t kConsumerWarps = 4 * Shape::kWarpgroups;
  storage.query.init(1, kConsumerWarps);
  storage.keys.init(1, kConsumerWarps);
  storage.values.init(1, kConsumerWarps);
  storage.items.init(1, kConsumerWarps + (traces ? 1 : 0));
  storage.parts.init(1, kConsumerWarps);
  storage.left.init(kConsumerWarps, 1);
  ptx::mbarrier_init(&storage.padded, 1);
  storage.padded_parity = storage.items_taken = 0;
  storage.items_at = {};
  storage.entries.init();
  for (uint32_t i = 0; i < Shape::kValueStages; ++i) storage.credit[i] = kNoCredit;
  ptx::mbarrier_init_fence();
}

}  // namespace mkernel
