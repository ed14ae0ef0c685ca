// Items whose keys several CTAs share: each leaves its sums, and the last part merges them in the order of the parts.
#pragma once
#include "attention/op.cuh"
#include "attention/softmax.cuh"
#include "attention/storage.cuh"

namespace mkernel {

// One warpgroup's share of a part: unit u of all threads is contiguous. The last unit has the rows' bases and sums.
template <class Config>
MK_DEVICE char* partial_unit(char* partial, uint32_t warpgroup, uint32_t unit) {
  using Shape = AttentionShape<Config>;
  return partial + ((warpgroup * Shape::kPartialUnits + unit) * 128 + ptx::thread_index() % 128) * 16;
}

// The flags of the parts of an item, for wait_all. The op has part_flag(item, part), and its parameters as p.
template <class Op>
struct PartFlags {
  const Op& op;
  const AttentionItem& item;
  MK_DEVICE bool wait(const Entered& entered, uint32_t part) const {
    return wait_flag(entered, op.p, op.part_flag(item, part), op.p.world.rank);
  }
};

// Parts are announced by a warp that has nothing else to do. A release by a consumer would cost its main loop the uniform registers (role.cuh: trace_items).
// All consumer warps post alike: the number of each part that they leave, and kNoItem at the end.
template <class Config>
MK_DEVICE void post_part(AttentionStorage<Config>& storage, RingPosition<1>& at, uint32_t number) {
  storage.left.wait_taken(at);
  ptx::sync_warp();  // all lanes have stored
  if (ptx::thread_index() == 128) storage.left_number = number;
  if (ptx::lane_index() == 0) storage.left.fill(at);
  at.advance();
}
template <class Config, AttentionOp Op>
MK_DEVICE void announce_parts(const MaybeEntered& entered, const Op& op, AttentionStorage<Config>& storage) {  // one warp
  RingPosition<1> at;
#pragma unroll 1
  while (true) {
    storage.left.wait_filled(at);
    const uint32_t number = storage.left_number;
    ptx::sync_warp();
    if (ptx::lane_index() == 0) storage.left.take(at);
    at.advance();
    if (number == kNoItem) return;
    if (entered && ptx::lane_index() == 0) op.raise_part(*entered, op.item(number));
  }
}

template <class Config, AttentionOp Op>
MK_DEVICE void leave_part(const Call& call, const Op& op, const ItemHeader& header, AttentionStorage<Config>& storage, uint32_t warpgroup,
                          RingPosition<1>& at, const float (&o)[Config::kHeadDim / 2], const RowSums& sums) {
  using Shape = AttentionShape<Config>;
  const MaybeEntered entered = storage.entries.pass(call);
  if (!entered) return;
  char* to = op.partial(*entered, header.item, header.item.part);
#pragma unroll
  for (uint32_t u = 0; u + 1 < Shape::kPartialUnits; ++u) {
    const float* e = &o[4 * u];
    ptx::store_global(partial_unit<Config>(to, warpgroup, u),
                      ptx::Words{{ptx::bits(e[0]), ptx::bits(e[1]), ptx::bits(e[2]), ptx::bits(e[3])}});
  }
  ptx::store_global(partial_unit<Config>(to, warpgroup, Shape::kPartialUnits - 1),
                    ptx::Words{{ptx::bits(sums.base(0)), ptx::bits(sums.base(1)), ptx::bits(sums.sum(0)), ptx::bits(sums.sum(1))}});
  post_part(storage, at, header.number);
}

// Adds the other parts to this one, which is the last: first to last, so that the bits do not depend on which was there first. Returns false where the call
// has failed.
template <class Config, AttentionOp Op>
MK_DEVICE bool merge_parts(const Call& call, const Op& op, const AttentionItem& item, AttentionStorage<Config>& storage, uint32_t warpgroup,
                           RingPosition<1>& at, float (&o)[Config::kHeadDim / 2], RowSums& sums) {
  using Shape = AttentionShape<Config>;
  storage.parts.wait_filled(at);
  const bool failed = storage.parts_failed != 0;
  ptx::sync_warp();
  if (ptx::lane_index() == 0) storage.parts.take(at);
  at.advance();
  const MaybeEntered entered = storage.entries.pass(call);
  if (failed || !entered) return false;
  const auto rows_of = [&](uint32_t part) {
    return ptx::load_global(partial_unit<Config>(op.partial(*entered, item, part), warpgroup, Shape::kPartialUnits - 1));
  };
  RowSums merged;
  float own[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) merged.set_base(i, sums.base(i));
#pragma unroll 1
  for (uint32_t part = 0; part + 1 < item.parts; ++part) {
    const ptx::Words words = rows_of(part);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) merged.set_base(i, ptx::maximum(merged.base(i), ptx::from_bits(words.word[i])));
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) own[i] = merged.merge(i, sums.base(i), sums.sum(i));
#pragma unroll
  for (uint32_t j = 0; j < Config::kHeadDim / 2; ++j) o[j] *= own[j / 2 % 2];
#pragma unroll 1
  for (uint32_t part = 0; part + 1 < item.parts; ++part) {
    const ptx::Words words = rows_of(part);
    float weight[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) weight[i] = merged.merge(i, ptx::from_bits(words.word[i]), ptx::from_bits(words.word[2 + i]));
    char* from = op.partial(*entered, item, part);
#pragma unroll
    for (uint32_t u = 0; u + 1 < Shape::kPartialUnits; ++u) {
      const ptx::Words e = ptx::load_global(partial_unit<Config>(from, warpgroup, u));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) o[4 * u + i] += weight[i / 2] * ptx::from_bits(e.word[i]);
    }
  }
  sums = merged;
  return true;
}

}  // namespace mkernel
