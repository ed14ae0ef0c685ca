// How keys of other ranks come: rings of slots, flags that count, and what is told of progress. Included after `struct Config`.
#pragma once
#include "attention/sequences.cuh"

namespace mkernel {

constexpr uint32_t kRings = kWorldSize - 1, kMates = kR - 1;
constexpr uint32_t kSendSlots = 2;  // of an inter_send CTA, where chunks wait for the network

// ---- rings of a rank: of the node's other ranks from the next one on, then of the other nodes from the next one on, local rank 0 first. All ranks of a
// node take those of other nodes in the same order: who forwards a chunk and who gets it must not wait for each other.
MK_DEVICE uint32_t source_of(const abi::World& world, uint32_t ring) {
  if (kNodes == 1 || ring < kMates) return node_mate(world, local_peer(world, 1 + ring));
  return rank_of(node_at(world, 1 + (ring - kMates) / kR), (ring - kMates) % kR);
}
MK_DEVICE uint32_t local_ring(uint32_t reader, uint32_t source) { return (source + kR - reader) % kR - 1; }  // local ranks of one node
MK_DEVICE uint32_t remote_ring(uint32_t distance, uint32_t source) {  // of local rank `source` of the node at a distance
  return kMates + (distance - 1) * kR + source;
}
MK_DEVICE uint32_t ring_of(const abi::World& world, uint32_t source) {  // in which the keys of another rank come
  const uint32_t distance = node_distance(world, source);
  return distance == 0 ? local_ring(world.local_rank, source % kR) : remote_ring(distance, source % kR);
}
// With kCanonical keys are taken in the order of their positions: leg by leg, each a part of some rank's. Sources of one rail follow each other by node.
constexpr uint32_t kLegs = kParts * kWorldSize;
MK_DEVICE uint32_t there_and_back(uint32_t leg, uint32_t count) { return leg < count ? leg : 2 * count - 1 - leg; }
MK_DEVICE uint32_t feeder_of(const abi::World& world, uint32_t ring) {  // who writes to the ring: its source, or the node mate on its rail
  const uint32_t source = source_of(world, ring);
  return source / kR == world.node || source % kR == world.local_rank ? source : node_mate(world, source % kR);
}

// ---- counted flags: words of the signal segment whose value is the epoch and, in the low kCountBits, a number that grows within the call. They are apart
// from the ops' other flags, which hold epochs (docs/memory_model.md).
MK_DEVICE uint64_t counted(const Call& call, uint32_t number) { return (call.epoch() << kCountBits) + number; }
MK_DEVICE uint32_t slot_word(const RingArguments& r, uint32_t ring, uint32_t number) { return ring * r.depth + number % r.depth; }
// What a mate (distance in the node, from 1 on) has read of the ring that this rank feeds with keys of the node at a distance; 0: its own.
MK_DEVICE uint32_t mate_credit_word(const RingArguments& r, uint32_t distance, uint32_t mate) {
  return kRings * r.depth + distance * kMates + mate - 1;
}
MK_DEVICE uint32_t rail_credit_word(const RingArguments& r, uint32_t distance) {  // what the rail peer at a distance has read
  return kRings * r.depth + kNodes * kMates + distance - 1;
}
MK_DEVICE uint64_t counted_offset(const RingArguments& r, uint32_t word) { return r.counted_offset + uint64_t(word) * sizeof(uint64_t); }

MK_DEVICE uint32_t num_readers(const RingArguments& r) {
  return r.ctas + r.intra_comm;
}  // of rings: CTAs that compute, then those that forward
MK_DEVICE const uint64_t* counted_flag(const abi::World& world, const RingArguments& r, uint32_t word) {
  return reinterpret_cast<const uint64_t*>(signals(world, world.local_rank) + counted_offset(r, word));
}
MK_DEVICE uint32_t num_flags(const RingArguments& r) {
  return (kShares ? 2 : 1) * num_readers(r);
}  // theirs, then those of shares that are left
// Waits until a counted flag of this rank says `number`. For reports, counted flags are numbered behind the others.
MK_DEVICE bool wait_counted(const Entered& entered, const RingArguments& r, uint32_t word, uint32_t number, uint32_t writer) {
  const Call& call = entered.call();
  const Awaited what{abi::kFlagChunk, num_flags(r) + word, writer};
  return wait_ge(call, counted_flag(call.world, r, word), counted(call, number), what, call.world.timeout_ns);
}
MK_DEVICE void raise_counted(const Entered& entered, const RingArguments& r, uint32_t local_rank, uint32_t word, uint32_t number) {
  char* flag = shared_signals(entered, local_rank) + counted_offset(r, word);
  ptx::store_release_sys(reinterpret_cast<uint64_t*>(flag), counted(entered.call(), number));
}

// ---- progress: which chunk of a ring a reader of this rank reads next. Valid once the reader has raised its flag.
MK_DEVICE uint64_t progress_offset(const RingArguments& r, uint32_t ring, uint32_t reader) {
  return r.progress_offset + uint64_t(ring * num_readers(r) + reader) * sizeof(uint64_t);
}
MK_DEVICE void publish_progress(const Entered& entered, const RingArguments& r, uint32_t ring, uint32_t reader, uint32_t number) {
  char* word = shared_heap(entered, entered.world().local_rank) + progress_offset(r, ring, reader);
  ptx::store_release_gpu(reinterpret_cast<uint64_t*>(word), number);
}

}  // namespace mkernel
