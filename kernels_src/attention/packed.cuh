// Packed sequences: whether cu_seqlens is right, and rows that belong to no sequence. Included after `struct Config`.
#pragma once
#include "attention/sequences.cuh"
#include "comm/ring.cuh"
#include "comm/status.cuh"

namespace mkernel {

// What ranks compare when they enter: a digest of cu_seqlens beside what their hosts have asked for.
MK_DEVICE uint32_t mixed_check(const Sequences& q, uint32_t check) {
  const uint32_t mixed = q.count() == 0 ? mix(0, static_cast<uint32_t>(q.end(0))) : q.mixed();
  return (check ^ mixed) & ((1u << abi::kCheckBits) - 1);
}

// Whether all sequences fit into the `rows` of a rank. All threads of all ranks come to the same, as cu_seqlens is the same for all of them.
MK_DEVICE bool are_right(const Sequences& q, uint32_t rows) {
  if (q.count() == 0) return q.end(0) == 0;
  return q.rows() <= rows && q.items() < kSumLimit && q.total() < 1u << kCountBits;
}

// Says what is wrong. One thread of a rank.
MK_DEVICE void report_sequences(const Entered& entered, const Sequences& q, uint32_t rows) {
  if (q.end(0) != 0) return report_error(entered, kBadStart, 0, static_cast<uint32_t>(q.end(0)));
  uint64_t needed = 0;
  Sequence s{};
#pragma unroll 1
  for (uint32_t i = 0; i < q.count(); ++i) {
    const uint32_t begin = static_cast<uint32_t>(q.end(i)), end = static_cast<uint32_t>(q.end(i + 1));
    if (static_cast<int32_t>(end) < static_cast<int32_t>(begin)) return report_error(entered, kDecreasing, i, begin, end);
    q.measure(s, i);
    needed += uint64_t(kParts) * s.part_rows;
  }
  if (needed > rows) return report_error(entered, kTooManyRows, 0, needed, rows);
  report_error(entered, kTooManyChunks, 0, q.count(), q.total());
}

// The call is not to be. All threads of all CTAs. They enter nevertheless: only now is it known that cu_seqlens is the same on all ranks. `failed`: a
// word of shared memory.
MK_DEVICE void refuse_sequences(const Call& call, const Sequences& q, uint32_t rows, uint32_t& failed) {
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index();
  if (warp == 1 && cta + 1 == ptx::cta_count()) announce_entry(call);
  if (warp == 0) {
    const MaybeEntered entered = enter(call);
    if (ptx::lane_index() == 0) {
      failed = !entered;
      if (entered && cta == 0) report_sequences(*entered, q, rows);
    }
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) failed != 0 ? leave_call(call) : leave_refused(call);
}

// A row of no sequence: zeros in o, and no sum. Warp function.
template <class Op>
MK_DEVICE void zero_row(const Entered& entered, const Op& op, uint32_t heads, uint32_t row) {
  constexpr uint32_t kWords = Config::kHeadDim / 8, kNothing = 0xff800000u;  // -inf
#pragma unroll 1
  for (uint32_t i = ptx::lane_index(); i < heads * kWords; i += 32) {
    const AttentionItem item{0, i / kWords, static_cast<int32_t>(row), 1, 0};
    ptx::store_global(op.o(entered, item) + i % kWords * 16, ptx::Words{{0, 0, 0, 0}});
    if (i % kWords == 0) ptx::store_word(op.lse(entered, item), kNothing);
  }
}

// All rows of no sequence, some by each of the CTAs that compute: those of the parts of sequences, then those behind the last one. Warp function.
template <class Op>
MK_DEVICE void zero_padding(const Entered& entered, const Op& op, uint32_t rank, uint32_t rows, uint32_t cta) {
  const Sequences& q = op.q;
  const uint32_t heads = q.r.kv_heads * q.r.group;
#pragma unroll 1
  for (uint32_t group = cta; group < q.groups(); group += q.r.ctas) {
    Sequence s = q.begin(group);
#pragma unroll 1
    for (uint32_t i = q.first_of_group(group); i < q.first_of_group(group + 1); ++i, q.pass(s)) {
      q.measure(s, i);
#pragma unroll 1
      for (uint32_t part = 0; part < kParts; ++part) {
#pragma unroll 1
        for (uint32_t row = valid_rows(s, rank, part); row < s.part_rows; ++row) {
          zero_row(entered, op, heads, s.first_row + part * s.part_rows + row);
        }
      }
    }
  }
#pragma unroll 1
  for (uint32_t row = q.rows() + cta; row < rows; row += q.r.ctas) zero_row(entered, op, heads, row);
}

}  // namespace mkernel
