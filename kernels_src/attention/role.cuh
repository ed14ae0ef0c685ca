// Attention of the class of FlashAttention-3: a CTA takes q tiles, one after the other, and for each goes through blocks of keys, as its op gives them.
//
// Warpgroup 0: warp 0 is the producer, warp 1 enters the call and announces parts, warp 2 records the trace, warp 3 moves data beside them. The other warpgroups consume. They pass on to each other
// (names of AttentionStorage in the middle):
//   producer  items         consumers  which q tile is next; kNoItem at the end
//   producer  query         consumers  its rows of q
//   producer  keys, values  consumers  a block of K, with what must be known of it, and of V
//   warp 1    entries       all        whether all ranks have entered the call
#pragma once
#include "attention/attend.cuh"
#include "attention/load.cuh"
#include "trace.cuh"

namespace mkernel {

// Records when items begin and end. Not by a consumer: with a branch that one thread takes in their loop, ptxas no longer keeps what a warp has in common
// in uniform registers, and the main loop grows by a tenth. One thread.
template <class Config>
MK_DEVICE void trace_items(const Call& call, AttentionStorage<Config>& storage) {
  Trace trace(call.world, 1);
  RingPosition<kItemQueue> at;
  uint64_t end = 0;
#pragma unroll 1
  while (true) {
    storage.items.wait_filled(at);
    const uint32_t number = storage.item[at.index].number;
    const uint64_t offered = trace.now(), begin = offered > end ? offered : end;  // an item is offered while the one before it is computed
    storage.items.take(at);
    if (number == kNoItem) return;
    RingPosition<kItemQueue> next_lap = at;
    next_lap.parity ^= 1;
    storage.items.wait_taken(next_lap);  // by the consumers, too
    trace.record(abi::kTraceTile, number, begin);
    end = trace.now();
    at.advance();
  }
}

// All threads of the CTA; whatever one did before is done when it comes here. Takes items until there are no more, then leaves the call. Nothing may
// follow: each warpgroup ends with its own number of registers.
template <class Config, AttentionOp Op>
MK_DEVICE void attention_role(const Call& call, const Op& op, AttentionStorage<Config>& storage) {
  using Shape = AttentionShape<Config>;
  const bool traces = call.world.trace_capacity != 0;
  if (ptx::thread_index() == 0) attention_init(storage, traces);
  ptx::sync_cta();
  const uint32_t warp = ptx::warp_index();
  if (warp < 4) {
    ptx::registers_decrease<Shape::kProducerRegisters>();
    if (warp == 0) {
      Producer<Config, Op>(call, op, storage).run();
    } else if (warp == 1) {
      const MaybeEntered entered = storage.entries.open(call);
      if constexpr (Op::kSplits) announce_parts(entered, op, storage);
    } else if (warp == 2) {
      if (traces && ptx::lane_index() == 0) trace_items(call, storage);
    } else {
      if constexpr (Op::kMoves) op.move(call);
    }
  } else {
    ptx::registers_increase<Shape::kConsumerRegisters>();
    attend_items(call, op, storage);
  }
}

}  // namespace mkernel
