// How the work of ring attention is dealt, and how keys of other ranks come: numbers that all ranks work out alike. mkernel/planner/ring_attention.py
// says the same in Python. Included after `struct Config`.
//
// An item is a tile of query rows of one head; a pair is a batch and a KV head, whose items follow each other. The items that the compute CTAs of a rank
// work on at the same time are a wave, and the part of a wave that belongs to one pair is a segment. In each segment a rank streams the pair's keys of
// all others, chunk by chunk, through a ring of slots per source. Chunks of a ring are numbered through all segments.
#pragma once
#include "attention/shape.cuh"
#include "comm/world.cuh"

namespace mkernel {

constexpr uint32_t kParts = Config::kParts;  // runs of consecutive positions that a rank holds: 2 with the layout zigzag
constexpr uint32_t kRings = kWorldSize - 1, kMates = kR - 1;
constexpr uint32_t kPanels = AttentionShape<Config>::kPanels, kQueryRows = AttentionShape<Config>::kQueryRows;
constexpr uint32_t kKeyBlock = Config::kKeyBlock;
constexpr uint32_t kSendSlots = 2;   // of an inter_send CTA, where chunks wait for the network
constexpr uint32_t kCountBits = 24;  // of a counted flag; the others are the epoch

struct RingArguments {
  uint64_t window_offset;    // data heap: rings x depth slots, each (K, V) x chunk_rows x D; then kSendSlots more of each inter_send CTA
  uint64_t progress_offset;  // data heap: rings x readers words, which chunk a CTA of this rank reads next
  uint64_t counted_offset;   // signal segment: flags that count
  uint32_t items, items_per_pair;
  uint32_t group, kv_heads;                      // query heads of a KV head
  uint32_t part_rows, tiles_per_part;            // of a part of a rank's rows
  uint32_t chunk_rows, chunks_per_part;          // of keys; chunk_rows is a multiple of kKeyBlock
  uint32_t ctas, intra_comm, inter_send;         // of these roles: ctas compute
  uint32_t period;                               // every so many waves end where a pair ends
  uint32_t total, depth, credit_step, reserved;  // chunks of a ring, its slots, chunks that are given back at once
};

MK_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
MK_DEVICE uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// ---- items
MK_DEVICE uint32_t item_of(const RingArguments& r, uint32_t wave,
                           uint32_t cta) {  // every other wave backwards; r.items or more: there is none
  return wave * r.ctas + (wave % 2 == 0 ? cta : r.ctas - 1 - cta);
}
MK_DEVICE uint32_t tile_of(const RingArguments& r, uint32_t item) {  // the last rows first, which see most keys
  return kParts * r.tiles_per_part - 1 - item % r.items_per_pair / r.group;
}
MK_DEVICE uint32_t part_of(const RingArguments& r, uint32_t tile) { return kParts > 1 && tile >= r.tiles_per_part ? 1 : 0; }
MK_DEVICE uint32_t row_in_part(const RingArguments& r, uint32_t tile) { return (tile - part_of(r, tile) * r.tiles_per_part) * kQueryRows; }

// ---- positions
MK_DEVICE int32_t part_position(const RingArguments& r, uint32_t rank, uint32_t part) {
  return static_cast<int32_t>((part == 0 ? rank : 2 * kWorldSize - 1 - rank) * r.part_rows);
}
MK_DEVICE int32_t last_position(const RingArguments& r, uint32_t rank, uint32_t tile) {  // of a tile's rows
  const uint32_t rows = smaller(row_in_part(r, tile) + kQueryRows, r.part_rows);
  return part_position(r, rank, part_of(r, tile)) + static_cast<int32_t>(rows) - 1;
}
// Rows of a part of a rank that are seen from a position, its first ones.
MK_DEVICE uint32_t seen_rows(const RingArguments& r, uint32_t rank, uint32_t part, int32_t position) {
  if constexpr (Config::kCausal == 0) return r.part_rows;
  const int32_t rows = position - part_position(r, rank, part) + 1;
  return rows <= 0 ? 0 : smaller(static_cast<uint32_t>(rows), r.part_rows);
}
// Chunks of a rank, its first ones, of which a key is seen from a position.
MK_DEVICE uint32_t visible_chunks(const RingArguments& r, uint32_t rank, int32_t position) {
#pragma unroll
  for (uint32_t part = kParts; part-- > 0;) {
    const uint32_t rows = seen_rows(r, rank, part, position);
    if (rows != 0) return part * r.chunks_per_part + quotient_up(rows, r.chunk_rows);
  }
  return 0;
}
// The rank of a node whose tile of this number sees most.
MK_DEVICE uint32_t node_reader(const RingArguments& r, uint32_t node, uint32_t tile) {
  return rank_of(node, part_of(r, tile) == 1 ? 0 : kR - 1);
}

// ---- segments, each named by its first item, which sees most
MK_DEVICE uint32_t chunk_base(const RingArguments& r, uint32_t item) {  // number of the first chunk of the segment that an item is in
  const uint32_t wave = item / r.ctas;
  return (item / r.items_per_pair + wave - wave / r.period) * kParts * r.chunks_per_part;
}
MK_DEVICE uint32_t segment_end(const RingArguments& r, uint32_t first) {
  const uint32_t wave = (first / r.ctas + 1) * r.ctas, pair = (first / r.items_per_pair + 1) * r.items_per_pair;
  return smaller(smaller(wave, pair), r.items);
}

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
MK_DEVICE uint32_t feeder_of(const abi::World& world, uint32_t ring) {  // who writes to the ring: its source, or the node mate on its rail
  const uint32_t source = source_of(world, ring);
  return source / kR == world.node || source % kR == world.local_rank ? source : node_mate(world, source % kR);
}

// ---- counted flags: words of the signal segment whose value is the epoch and, in the low kCountBits, a number that grows within the call. They are apart
// from the ops' other flags, which hold epochs (docs/memory_model.md).
MK_DEVICE uint64_t counted(const Call& call, uint32_t number) { return (call.epoch << kCountBits) + number; }
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
// Waits until a counted flag of this rank says `number`. For reports, counted flags are numbered behind the others.
MK_DEVICE bool wait_counted(const Entered& entered, const RingArguments& r, uint32_t word, uint32_t number, uint32_t writer) {
  const Call& call = entered.call();
  const Awaited what{abi::kFlagChunk, num_readers(r) + word, writer};
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
