// The producer warp of the attention role: takes items, waits for keys, and loads q, K and V by TMA.
#pragma once
#include "attention/op.cuh"
#include "attention/storage.cuh"
#include "trace.cuh"

namespace mkernel {

// K and V have rings of stages of their own, since the consumers need K of block j + 1 before V of block j; so they are loaded in this order: K0, q, K1, V0,
// K2, V1, ... All functions: all lanes of one warp, except those of the elected one.
template <class Config, AttentionOp Op>
class Producer {
  using Shape = AttentionShape<Config>;

 public:
  MK_DEVICE Producer(const Call& call, const Op& op, AttentionStorage<Config>& storage)
      : call_(call), op_(op), storage_(storage), entered_(MaybeEntered::not_yet(call)), is_elected_(ptx::elected()) {}

  MK_DEVICE void run() {
    ok_ = !is_skipped(call_);
#pragma unroll 1
    while (ok_) {
      if (op_.repeats()) {
        settle();
        if (!ok_) break;
      }
      const uint32_t number = op_.take(storage_.items_taken);
      ptx::sync_warp();  // all lanes have read how many
      if (number == kNoItem) break;
      if (is_elected_) ++storage_.items_taken;
      load_item(number);
    }
    enter();
    settle();
    if (ok_) op_.finish(*entered_);
    if (is_elected_) leave_call(call_);  // this CTA takes no more items, and all its threads have read the epoch
    offer(AttentionItem{}, kNoItem, false);
  }

 private:
  MK_DEVICE void enter() {  // once, when something has to be waited for; as late as that, since the first items may not need other ranks
    if (has_entered_) return;
    has_entered_ = true;
    entered_ = storage_.entries.pass(call_);
    ok_ = ok_ && entered_;
  }

  MK_DEVICE void offer(const AttentionItem& item, uint32_t number, bool has_keys) {
    if (is_elected_) {
      const RingPosition<kItemQueue> at = storage_.items_at;
      storage_.items.wait_taken(at);
      storage_.item[at.index] = ItemHeader{item, number, has_keys};
      storage_.items.fill(at);
      storage_.items_at.advance();
    }
    ptx::sync_warp();
  }

  MK_DEVICE void load_item(uint32_t number) {
    const AttentionItem item = op_.item(number);
    auto keys = op_.keys(number, item);
    KeyBlock block, next;
    bool more = keys.next(block), is_first = true;
    offer(item, number, more);
#pragma unroll 1
    for (bool has_block = more;; has_block = more) {
      if (has_block) {
        if (block.waits) wait_for(block, number);
        more = ok_ && keys.next(next);
        load_keys(block, !more);
        if (is_first) load_query(item);
        is_first = false;
      }
      load_values();  // of the block before
      if (!has_block) break;
      owe_values(block);
      block = next;
    }
    if constexpr (Op::kSplits) {
      if (item.parts > 1 && item.part + 1 == item.parts) wait_for_parts(item);
    }
  }

  MK_DEVICE void wait_for_parts(const AttentionItem& item) {
    enter();
    settle();
    ok_ = ok_ && op_.wait_parts(*entered_, item);
    ptx::sync_warp();
    if (is_elected_) {
      storage_.parts.wait_taken(parts_at_);
      storage_.parts_failed = !ok_;
      storage_.parts.fill(parts_at_);
    }
    parts_at_.advance();
    ptx::sync_warp();
  }

  MK_DEVICE void wait_for(const KeyBlock& block, uint32_t number) {
    enter();
    if (ok_ && !op_.is_ready(*entered_, block)) {  // others may wait for what this CTA owes: it gives all that before it waits itself
      load_values();
      settle();
      Trace trace(call_.world, 0);
      const uint64_t begin = trace.now();
      ok_ = op_.wait(*entered_, block);
      if (is_elected_) trace.record(abi::kTraceWait, number, begin);
    }
    ptx::fence_proxy_async();  // what has been acquired becomes visible to the loads below
    ptx::sync_warp();
  }

  MK_DEVICE void load_query(const AttentionItem& item) {
    if (is_elected_) {
      storage_.query.wait_taken(query_at_);
      uint64_t* filled = storage_.query.fill_by_tma(query_at_, Shape::kQueryBytes);
#pragma unroll
      for (uint32_t w = 0; w < Shape::kWarpgroups; ++w) {
#pragma unroll
        for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
          ptx::tma_load_4d(storage_.q[w][panel], op_.q_map(), filled, panel * Shape::kPanelColumns, item.row + w * Shape::kBlockRows,
                           item.head, item.batch);
        }
      }
    }
    query_at_.advance();
    ptx::sync_warp();
  }

  MK_DEVICE void load_keys(const KeyBlock& block, bool is_last) {
    if (is_elected_) {
      storage_.keys.wait_taken(key_at_);
      storage_.block[key_at_.index] = BlockHeader{block.position, ok_ ? block.rows : 0, is_last, !ok_};
      if (ok_) {
        load_panels(storage_.k[key_at_.index], op_.k_map(block), block, storage_.keys.fill_by_tma(key_at_, Shape::kKeyBytes));
      } else {
        storage_.keys.fill(key_at_);
      }
    }
    key_at_.advance();
    ptx::sync_warp();
  }

  MK_DEVICE void owe_values(const KeyBlock& block) {
    owes_values_ = true, loads_values_ = ok_;
    if (is_elected_) storage_.owed = block;
    ptx::sync_warp();
  }
  MK_DEVICE void load_values() {  // of the block whose K has been loaded last
    if (!owes_values_) return;
    owes_values_ = false;
    if (is_elected_) storage_.values.wait_taken(value_at_);
    ptx::sync_warp();
    give_credit(value_at_.index);  // the consumers have used the block that the stage held
    const KeyBlock block = storage_.owed;
    char* v = storage_.v[value_at_.index];
    if (!loads_values_) {
      if (is_elected_) storage_.values.fill(value_at_);
    } else if (block.is_padded && block.rows < Shape::kKeyBlock) {
      load_padded_values(block, v);
    } else if (is_elected_) {
      load_panels(v, op_.v_map(block), block, storage_.values.fill_by_tma(value_at_, Shape::kKeyBytes));
    }
    if (is_elected_) storage_.credit[value_at_.index] = loads_values_ ? block.credit : kNoCredit;
    ptx::sync_warp();
    value_at_.advance();
  }

  // Rows that belong to nobody become zeros: their weights are 0, but 0 times a NaN would be a NaN.
  MK_DEVICE void load_padded_values(const KeyBlock& block, char* v) {
    if (is_elected_) {
      ptx::mbarrier_arrive_expect(&storage_.padded, Shape::kKeyBytes);
      load_panels(v, op_.v_map(block), block, &storage_.padded);
    }
    const uint32_t parity = storage_.padded_parity;
    ptx::mbarrier_wait(&storage_.padded, parity);
    ptx::sync_warp();  // all lanes have read the parity
    if (is_elected_) storage_.padded_parity = parity ^ 1;
    const uint32_t begin = block.rows * Shape::kRowBytes;
#pragma unroll 1
    for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
#pragma unroll 1
      for (uint32_t at = begin + ptx::lane_index() * 16; at < Shape::kKeyPanel; at += 32 * 16) {
        ptx::store_shared(v + panel * Shape::kKeyPanel + at, ptx::Words{{0, 0, 0, 0}});
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::sync_warp();
    if (is_elected_) storage_.values.fill(value_at_);
  }

  MK_DEVICE void load_panels(char* to, const abi::TensorMap* map, const KeyBlock& block, uint64_t* filled) {  // the elected lane
#pragma unroll
    for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
      ptx::tma_load_4d(to + panel * Shape::kKeyPanel, map, filled, panel * Shape::kPanelColumns, block.row, block.head, block.batch);
    }
  }

  MK_DEVICE void give_credit(uint32_t stage) {  // for the block that the stage of V holds
    const uint32_t credit = storage_.credit[stage];
    ptx::sync_warp();
    if (credit == kNoCredit) return;
    if (is_elected_) storage_.credit[stage] = kNoCredit;
    ptx::sync_warp();
    enter();  // the credit of keys that nobody had to wait for
    if (ok_) op_.landed(*entered_, credit);
  }

  // Waits until everything that has been loaded is there, and gives the credits for it.
  MK_DEVICE void settle() {
    RingPosition<Shape::kStages> keys = key_at_;
    RingPosition<Shape::kValueStages> at = value_at_;
    keys.parity ^= 1, at.parity ^= 1;  // of the lap before: from the oldest stage to the newest
#pragma unroll 1
    for (uint32_t i = 0; i < Shape::kStages; ++i, keys.advance()) {
      storage_.keys.wait_filled(keys);  // of every stage: a credit is for the blocks before it, too, and loads end in any order
    }
#pragma unroll 1
    for (uint32_t i = 0; i < Shape::kValueStages; ++i, at.advance()) {
      storage_.values.wait_filled(at);
      give_credit(at.index);
    }
  }

  const Call& call_;
  const Op& op_;
  AttentionStorage<Config>& storage_;
  MaybeEntered entered_;
  const bool is_elected_;
  bool has_entered_ = false, ok_ = true;
  RingPosition<1> query_at_, parts_at_;
  RingPosition<Shape::kStages> key_at_;
  RingPosition<Shape::kValueStages> value_at_;
  bool owes_values_ = false;   // K of storage.owed has been loaded, and V has not
  bool loads_values_ = false;  // false: because the call has failed
};

}  // namespace mkernel
