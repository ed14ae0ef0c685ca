// The consumer warpgroups of the attention role: each has 64 rows of a q tile, its sums of weighted values in registers, over all blocks of keys.
#pragma once
#include "attention/epilogue.cuh"
#include "attention/op.cuh"
#include "attention/partial.cuh"
#include "attention/products.cuh"
#include "attention/softmax.cuh"

namespace mkernel {

// What a warpgroup does about the keys that some of its rows must not see.
template <class Config>
MK_DEVICE void mask_block(float (&s)[Config::kKeyBlock / 2], const BlockHeader& block, int32_t position) {  // of the warpgroup's first row
  using Shape = AttentionShape<Config>;
  const int32_t first = position - block.position;  // so many keys of the block are before the key at the first row's own position
  const bool is_cut = block.rows < Shape::kKeyBlock || (Shape::kCausal && first + 1 < int32_t(Shape::kKeyBlock));
  if (!is_cut) return;
  int32_t seen[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t row = ptx::thread_index() % 128 / 32 * 16 + ptx::lane_index() / 4 + 8 * i;
    seen[i] = block.rows;
    if (Shape::kCausal && first + row + 1 < seen[i]) seen[i] = first + row + 1;
  }
  hide_keys(s, seen);
}

// The blocks of one item (the order of products and softmax: FlashAttention-3, Shah et al. 2024). Returns false where the item is not to be stored.
template <class Config>
MK_DEVICE bool attend_item(AttentionStorage<Config>& storage, uint32_t warpgroup, float scale_log2, int32_t position,
                           RingPosition<1>& query_at, RingPosition<Config::kStages>& key_at, RingPosition<Config::kValueStages>& value_at,
                           float (&o)[Config::kHeadDim / 2], RowSums& rows) {
  const bool reports = ptx::lane_index() == 0;
  const char* q = storage.q[warpgroup][0];
  float s[Config::kKeyBlock / 2], rescale[2];
  uint32_t weights[Config::kKeyBlock / 4];

  storage.query.wait_filled(query_at);
  storage.keys.wait_filled(key_at);
  BlockHeader block = storage.block[key_at.index];
  multiply_keys<Config>(s, q, storage.k[key_at.index]);
  ptx::wgmma_wait<0>(s);
  if (reports) storage.keys.take(key_at);
  key_at.advance();
  mask_block<Config>(s, block, position);
  bool rescales = rows.add(s, scale_log2, rescale), multiplies = false;  // whether values are being multiplied
#pragma unroll
  for (float& e : o) e = 0.0f;

#pragma unroll 1
  while (true) {
    // The loop begins here, because ptxas moves this wait up to the beginning of its basic block: the softmax must be in another one.
    ptx::wgmma_wait<0>(o);
    if (multiplies) {
      if (reports) storage.values.take(value_at);
      value_at.advance();
    }
    multiplies = true;
    round_weights<Config>(weights, s);
    if (rescales) rescale_rows(o, rescale);
    if (block.is_last != 0) break;
    storage.keys.wait_filled(key_at);
    block = storage.block[key_at.index];
    multiply_keys<Config>(s, q, storage.k[key_at.index]);
    storage.values.wait_filled(value_at);
    multiply_values<Config>(o, weights, storage.v[value_at.index]);
    ptx::wgmma_wait<1>(s);
    if (reports) storage.keys.take(key_at);
    key_at.advance();
    mask_block<Config>(s, block, position);
    rescales = rows.add(s, scale_log2, rescale);
  }
  if (reports) storage.query.take(query_at);  // the next item's is loaded meanwhile
  query_at.advance();
  storage.values.wait_filled(value_at);
  multiply_values<Config>(o, weights, storage.v[value_at.index]);
  rows.reduce();
  ptx::wgmma_wait<0>(o);
  if (reports) storage.values.take(value_at);
  value_at.advance();
  return block.abandoned == 0;
}

template <class Config, AttentionOp Op>
MK_DEVICE void attend_items(const Call& call, const Op& op, AttentionStorage<Config>& storage) {
  const uint32_t warpgroup = ptx::warp_index() / 4 - 1;
  const float scale_log2 = op.scale_log2();
  RingPosition<kItemQueue> item_at;
  RingPosition<1> query_at, parts_at, left_at;
  RingPosition<Config::kStages> key_at;
  RingPosition<Config::kValueStages> value_at;
  float o[Config::kHeadDim / 2];
#pragma unroll 1
  while (true) {
    storage.items.wait_filled(item_at);
    const ItemHeader& item = storage.item[item_at.index];
    if (item.number == kNoItem) break;
    RowSums rows;
    bool stores = true;
    if (item.has_keys != 0) {
      const int32_t position = item.item.position + warpgroup * AttentionShape<Config>::kBlockRows;
      stores = attend_item<Config>(storage, warpgroup, scale_log2, position, query_at, key_at, value_at, o, rows);
    } else {
#pragma unroll
      for (float& e : o) e = 0.0f;
    }
    if constexpr (Op::kSplits) {
      if (stores && item.item.parts > 1) {
        if (item.item.part + 1 < item.item.parts) {
          leave_part<Config>(call, op, item, storage, warpgroup, left_at, o, rows);
          stores = false;
        } else {
          stores = merge_parts<Config>(call, op, item.item, storage, warpgroup, parts_at, o, rows);
        }
      }
    }
    if (stores) store_item<Config>(call, op, item.item, storage, warpgroup, o, rows);
    ptx::sync_warp();
    if (ptx::lane_index() == 0) storage.items.take(item_at);
    item_at.advance();
  }
  if constexpr (Op::kSplits) post_part(storage, left_at, kNoItem);
  if (leads_warpgroup()) ptx::store_wait_read<0>();  // kernel exit completes the stores
}

}  // namespace mkernel
