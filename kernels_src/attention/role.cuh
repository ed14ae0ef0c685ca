// Attention of the class of FlashAttention-3: a CTA takes q tiles, one after the other, and for each goes through blocks of keys, as its op gives them.
//
// Warpgroup 0: warp 0 is the producer, warp 1 enters the call, warp 3 moves data beside them. The other warpgroups consume. They pass on to each other
// (names of AttentionStorage in the middle):
//   producer  items         consumers  which q tile is next; kNoItem at the end
//   producer  query         consumers  its rows of q
//   producer  keys, values  consumers  a block of K, with what must be known of it, and of V
//   warp 1    entries       all        whether all ranks have entered the call
#pragma once
#include "attention/attend.cuh"
#include "attention/load.cuh"

namespace mkernel {

// All threads of the CTA; whatever one did before is done when it comes here. Takes items until there are no more, then leaves the call. Nothing may
// follow: each warpgroup ends with its own number of registers.
template <class Config, AttentionOp Op>
MK_DEVICE void attention_role(const Call& call, const Op& op, AttentionStorage<Config>& storage) {
  using Shape = AttentionShape<Config>;
  if (ptx::thread_index() == 0) attention_init(storage);
  ptx::sync_cta();
  const uint32_t warp = ptx::warp_index();
  if (warp < 4) {
    ptx::registers_decrease<Shape::kProducerRegisters>();
    if (warp == 0) {
      Producer<Config, Op>(call, op, storage).run();
    } else if (warp == 1) {
      storage.entries.open(call);
    } else if (warp == 3) {
      if constexpr (Op::kMoves) op.move(call);
    }
  } else {
    ptx::registers_increase<Shape::kConsumerRegisters>();
    attend_items(call, op, storage);
  }
}

}  // namespace mkernel
