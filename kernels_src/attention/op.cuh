// What an op tells the attention role about its items and keys.
#pragma once
#include "attention/shape.cuh"
#include "comm/sync.cuh"
#include "concepts.cuh"

namespace mkernel {

// The blocks of keys of an item, in the order in which they are used. The producer warp alone goes through them, all of its lanes alike. Blocks of which
// the mask hides every key from every row of the item had better be left out.
template <class Stream>
concept KeyStream = requires(Stream keys, KeyBlock& block) {
  { keys.next(block) } -> Same<bool>;  // false: there are no more
};

// Functions are called by one thread, if nothing else is said. "Producer": by all lanes of the producer warp, which come together before and after.
template <class Op>
concept AttentionOp = requires(const Op op, const Call& call, const Entered& entered, const AttentionItem& item, const KeyBlock& block,
                               uint32_t number, uint32_t credit) {
  { op.scale_log2() } -> Same<float>;  // what scores are multiplied by, times log2(e); finite and positive

  // ---- items
  { op.take(number) } -> Same<uint32_t>;  // the number of this CTA's `number`-th item; kNoItem: there are no more. Producer
  { op.repeats() } -> Same<bool>;         // whether all credits must be given before the next item is taken. Producer
  { op.item(number) } -> Same<AttentionItem>;
  requires KeyStream<decltype(op.keys(number, item))>;

  // ---- their inputs, by 4-D tensor maps: columns, rows, heads, batches
  { op.q_map() } -> Same<const abi::TensorMap*>;       // boxes of 64 columns and 64 rows
  { op.k_map(block) } -> Same<const abi::TensorMap*>;  // boxes of 64 columns and kKeyBlock rows
  { op.v_map(block) } -> Same<const abi::TensorMap*>;
  { op.is_ready(entered, block) } -> Same<bool>;  // of a block that waits: whether its keys are there. Producer
  { op.wait(entered, block) } -> Same<bool>;      // until they are; false: the call has failed. Producer
  op.landed(entered, credit);                     // a block with this credit, and all before it, have been loaded. Producer
  op.finish(entered);                             // all items are loaded and all credits given; not after a failure. Producer

  // ---- their results
  { op.o_map() } -> Same<const abi::TensorMap*>;     // boxes of 64 columns and 64 rows
  { op.o(entered, item) } -> Same<char*>;            // the item's first row of o, and the bytes between rows,
  { op.o_row_bytes() } -> Same<uint64_t>;            // for warpgroups that have less than 64 valid rows
  { op.lse(entered, item) } -> Same<float*>;         // of the item's first row; the others follow
  requires Same<decltype(Op::kSplits), const bool>;  // whether item.parts may be more than 1. The numbers of the other parts of an item are
                                                     // smaller than its last part's, and CTAs take numbers in order
  requires !Op::kSplits || requires {
    { op.partial(entered, item, number) } -> Same<char*>;  // kPartialBytes of part `number` of the item; on a multiple of 16
    op.raise_part(entered, item);                          // item.part is there
    { op.wait_parts(entered, item) } -> Same<bool>;        // until all parts but the last are. Producer
  };
  requires Same<decltype(Op::kMoves), const bool>;
  requires !Op::kMoves || requires { op.move(call); };  // moves data while the CTA computes. Warp function
};

}  // namespace mkernel
