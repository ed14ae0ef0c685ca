// inter_send of the kernels that combine: this rank's weights and the sums of its node to the rail peers. All threads of a CTA.
#pragma once
#include "comm/ring.cuh"
#include "moe/combine.cuh"

namespace mkernel {

// Copies the weights to where the network can read them: an area that needs no entry. All threads of the CTA.
template <class Parameters>
MK_DEVICE void stage_weights(const Parameters& p) {
  const Combining& c = p.combining;
  const uint32_t number = c.tokens * kTopK, stride = 32 * Config::kWarps;
  const float* from = reinterpret_cast<const float*>(c.weights);
  float* to = reinterpret_cast<float*>(staging_area(p.world, c.send_weights_offset));
#pragma unroll 4
  for (uint32_t i = ptx::thread_index(); i < number; i += stride) to[i] = from[i];
}

// Puts the weights to each rail peer whose node has experts for this rank's tokens. One thread. Returns the last put's ticket, 0 if there is none;
// false: the call has failed.
template <class Parameters>
MK_DEVICE bool send_weights(const Entered& entered, const Parameters& p, uint32_t channel, uint64_t& ticket) {
  const Combining& c = p.combining;
#pragma unroll 1
  for (uint32_t distance = 1; distance < kNodes; ++distance) {
    if (count_awaited(p, distance) == 0) continue;
    const uint32_t there = seen_by_node_at(distance), bytes = c.tokens * kTopK * sizeof(float);
    const uint64_t signal = flag_offset(p, weights_flag(c, there)), to = peer_weights_offset(c, there);
    ticket =
        issue_put(entered, Put{channel, rail_peer(p.world, distance), c.send_weights_offset, to, bytes, signal, entered.call().epoch()});
    if (ticket == 0) return false;
  }
  return true;
}

template <class Parameters>
struct SumFlags {  // of the groups of a chunk
  const Parameters& p;
  uint32_t distance, first;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    return wait_flag(entered, p, sum_flag(p.combining, distance, first + i), p.world.rank);
  }
};

// Puts one chunk of sums to the rail peer at a distance once its sums are there. False: the call has failed. Warp function.
template <class Parameters>
MK_DEVICE bool send_chunk(const Entered& entered, const Parameters& p, uint32_t channel, uint32_t distance, uint32_t chunk,
                          uint64_t& ticket) {
  const Combining& c = p.combining;
  const uint32_t first = chunk << c.chunk_shift, served = count_served(p, distance), left = served > first ? served - first : 0;
  if (left == 0) return true;
  const uint32_t whole = 1u << c.chunk_shift, count = left < whole ? left : whole;
  if (!wait_all(entered, SumFlags<Parameters>{p, distance, first >> c.group_shift}, ceil_shift(count, c.group_shift))) return false;
  if (ptx::lane_index() == 0) {
    const uint32_t there = seen_by_node_at(distance);
    const uint64_t from = sum_offset(c, distance, first), to = arrived_offset(c, there, first), bytes = uint64_t(count) * c.row_bytes;
    const uint64_t signal = flag_offset(p, arrived_flag(c, there, chunk));
    ticket = issue_put(entered, Put{channel, rail_peer(p.world, distance), from, to, bytes, signal, entered.call().epoch()});
  }
  return ptx::all_of_warp(ptx::lane_index() != 0 || ticket != 0);
}

// CTA `index` of `ctas` that send: the first sends the weights, all share the chunks of sums. All threads of the CTA.
template <class Parameters>
MK_DEVICE void send_combined(const Call& call, const Parameters& p, uint32_t index, uint32_t ctas) {
  const Combining& c = p.combining;
  if (kWeighted && index == 0 && c.stage_weights != 0) stage_weights(p);
  ptx::sync_cta();  // the thread that puts has seen all of them staged
  if (ptx::warp_index() != 0) return;
  const MaybeEntered entered = enter(call);
  if (!entered) return;
  const uint32_t lane = ptx::lane_index(), channel = 1 + index, items = sum_chunks(c) * (kNodes - 1);
  Trace trace(p.world, 2);
  uint64_t ticket = 0;
  bool ok = lane != 0 || !kWeighted || index != 0 || send_weights(*entered, p, channel, ticket);
  ok = ptx::all_of_warp(ok);
#pragma unroll 1
  for (uint32_t item = index; ok && item < items; item += ctas) {
    const uint64_t begin = trace.now();
    ok = send_chunk(*entered, p, channel, 1 + item % kOtherNodes, item / kOtherNodes, ticket);
    if (lane == 0) trace.record(abi::kTracePut, item, begin);
  }
  if (ok && ticket != 0) wait_put(call, ticket, rail_peer(p.world, 1));
}

}  // namespace mkernel
