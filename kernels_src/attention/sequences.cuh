// How the work of ring attention is divided: numbers that all ranks work out alike. mkernel/planner/ring_attention.py says the same in Python, and
// ring_varlen.py what differs where sequences are packed. Included after `struct Config`.
//
// An item is a tile of query rows of one head, or (kShares) a share of its keys: every so many blocks of them. A pair is a sequence and a KV head, whose items follow each other. CTAs take them in their
// order. As many as there are compute CTAs of a rank are a wave, and the part of a wave that belongs to one pair is a segment. In each segment a rank streams the pair's keys
// of all others, chunk by chunk, through a ring of slots per source. Chunks of a ring are numbered through all segments.
//
// The sequences of a batch are alike, and all of this has closed forms. Packed sequences (kPacked) have lengths of their own, which only the device
// knows: every CTA sums up what comes before each sequence, in shared memory, and looks there for the sequence of an item.
#pragma once
#include "attention/shape.cuh"
#include "comm/world.cuh"

namespace mkernel {

constexpr uint32_t kParts = Config::kParts;  // runs of consecutive positions that a rank holds: 2 with the layout zigzag
constexpr bool kPacked = Config::kPacked != 0;
constexpr bool kCanonical = Config::kCanonical != 0;  // keys are taken by position, whoever has them
constexpr bool kShares = Config::kShares != 0;        // several CTAs may share the keys of a tile
constexpr uint32_t kPanels = AttentionShape<Config>::kPanels, kQueryRows = AttentionShape<Config>::kQueryRows;
constexpr uint32_t kKeyBlock = Config::kKeyBlock;
constexpr uint32_t kCountBits = 24;  // of a counted flag, which holds a chunk's number; the others are the epoch

// Of packed sequences items, period, total and the sizes of a sequence are not used.
struct RingArguments {
  uint64_t window_offset;    // data heap: rings x depth slots, each (K, V) x chunk_rows x D; then kSendSlots more of each inter_send CTA
  uint64_t progress_offset;  // data heap: rings x readers words, which chunk a CTA of this rank reads next
  uint64_t counted_offset;   // signal segment: flags that count
  uint64_t partial_offset;   // data heap: (tiles of all heads, shares - 1) sums that CTAs leave, where shares is more than 1
  uint32_t items, items_per_pair;
  uint32_t group, kv_heads;               // query heads of a KV head
  uint32_t part_rows, tiles_per_part;     // of a part of a rank's rows
  uint32_t chunk_rows, chunks_per_part;   // of keys; chunk_rows is a multiple of kKeyBlock
  uint32_t ctas, intra_comm, inter_send;  // of these roles: ctas compute
  uint32_t period;                        // every so many waves end where a pair ends
  uint32_t total, depth, credit_step;     // chunks of a ring, its slots, chunks that are given back at once
  uint32_t shares;                        // CTAs that share the keys of a tile. Where they are several, each has one item
};

MK_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
MK_DEVICE uint32_t quotient_up(uint32_t a, uint32_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// The sequence that an item belongs to. Of a batch all are one, which has all items.
struct Sequence {
  uint32_t items_per_pair, part_rows, tiles_per_part, chunks_per_part;
  uint32_t first_item, first_chunk, first_row;  // numbers of its first item and of its first chunk; its first row in this rank's arrays
  int32_t length;                               // of a packed one, on all ranks
};

// ---- items
MK_DEVICE uint32_t pair_of(const Sequence& s, uint32_t item) { return (item - s.first_item) / s.items_per_pair; }
MK_DEVICE uint32_t shares_of(const RingArguments& r) { return kShares ? r.shares : 1; }
MK_DEVICE uint32_t tile_of(const RingArguments& r, const Sequence& s, uint32_t item) {  // the last rows first, which see most keys
  return kParts * s.tiles_per_part - 1 - (item - s.first_item) % s.items_per_pair / (r.group * shares_of(r));
}
// Which item of which pair and which tile a number is.
struct ItemPlace {
  uint32_t pair, tile;
  uint32_t of_tile;  // by query head of the group, then by share
};
MK_DEVICE ItemPlace place_of(const RingArguments& r, const Sequence& s, uint32_t item) {
  const uint32_t of_tile = (item - s.first_item) % s.items_per_pair % (r.group * shares_of(r));
  return ItemPlace{pair_of(s, item), tile_of(r, s, item), of_tile};
}
// The same where so many pairs go together, tile by tile, so that the longest items of all of them come first. The last pairs may be fewer. Not of
// packed sequences.
MK_DEVICE ItemPlace place_among(const RingArguments& r, uint32_t item, uint32_t together) {
  const uint32_t first = item / (together * r.items_per_pair) * together, inside = item - first * r.items_per_pair;
  const uint32_t each = r.group * shares_of(r), count = smaller(together, r.items / r.items_per_pair - first);
  const uint32_t back = inside / (count * each), of_pairs = inside - back * (count * each);
  return ItemPlace{first + of_pairs / each, kParts * r.tiles_per_part - 1 - back, of_pairs % each};
}
MK_DEVICE uint32_t part_of(const Sequence& s, uint32_t tile) { return kParts > 1 && tile >= s.tiles_per_part ? 1 : 0; }
MK_DEVICE uint32_t row_in_part(const Sequence& s, uint32_t tile) { return (tile - part_of(s, tile) * s.tiles_per_part) * kQueryRows; }

// ---- positions
MK_DEVICE int32_t part_position(const Sequence& s, uint32_t rank, uint32_t part) {
  return static_cast<int32_t>((part == 0 ? rank : 2 * kWorldSize - 1 - rank) * s.part_rows);
}
MK_DEVICE uint32_t rows_below(int32_t end, int32_t begin,
                              uint32_t most) {  // of the rows from `begin` on, at most so many, those before `end`
  return end <= begin ? 0 : smaller(static_cast<uint32_t>(end - begin), most);
}
MK_DEVICE uint32_t valid_rows(const Sequence& s, uint32_t rank, uint32_t part) {  // of a part: the others are padding
  return kPacked ? rows_below(s.length, part_position(s, rank, part), s.part_rows) : s.part_rows;
}
// The last key that the rows of a tile see; of a packed sequence one of its rows is valid.
MK_DEVICE int32_t last_position(const Sequence& s, uint32_t rank, uint32_t tile) {
  if constexpr (kPacked && Config::kCausal == 0) return s.length - 1;
  const uint32_t rows = smaller(row_in_part(s, tile) + kQueryRows, s.part_rows);
  const int32_t last = part_position(s, rank, part_of(s, tile)) + static_cast<int32_t>(rows) - 1;
  return kPacked && last >= s.length ? s.length - 1 : last;
}
// Rows of a part of a rank that are seen by who sees keys up to a position: its first ones.
MK_DEVICE uint32_t seen_rows(const Sequence& s, uint32_t rank, uint32_t part, int32_t last) {
  if constexpr (!kPacked && Config::kCausal == 0) return s.part_rows;
  return rows_below(last + 1, part_position(s, rank, part), s.part_rows);
}
MK_DEVICE int32_t last_key(const Sequence& s) {  // of all
  return kPacked ? s.length - 1 : static_cast<int32_t>(kParts * kWorldSize * s.part_rows) - 1;
}
// Chunks of a rank, its first ones, of which a key is seen.
MK_DEVICE uint32_t visible_chunks(const RingArguments& r, const Sequence& s, uint32_t rank, int32_t last) {
#pragma unroll
  for (uint32_t part = kParts; part-- > 0;) {
    const uint32_t rows = seen_rows(s, rank, part, last);
    if (rows != 0) return part * s.chunks_per_part + quotient_up(rows, r.chunk_rows);
  }
  return 0;
}

// ---- segments, each named by its first item, which sees most. Of packed sequences some tiles are all padding, and see nothing.
struct SegmentTiles {
  uint32_t first, last;  // from the largest number to the smallest
};
// The last key that a rank's rows in a segment see, or -1. What is streamed to a rank is what is read there: a slot is only written again once its
// chunk has been read, because only then it is certain that it has been written.
MK_DEVICE int32_t last_of_segment(const Sequence& s, uint32_t rank, const SegmentTiles& tiles) {
  if constexpr (!kPacked) return last_position(s, rank, tiles.first);
#pragma unroll
  for (uint32_t part = kParts; part-- > 0;) {
    const uint32_t begin = part * s.tiles_per_part, valid = valid_rows(s, rank, part);
    const uint32_t tile = smaller(tiles.first, begin + quotient_up(valid, kQueryRows) - 1);
    if (valid != 0 && tile >= begin && tile >= tiles.last) return last_position(s, rank, tile);
  }
  return -1;
}
// The same of all ranks of a node.
MK_DEVICE int32_t last_of_node(const Sequence& s, uint32_t node, const SegmentTiles& tiles) {
  if constexpr (!kPacked) return last_position(s, rank_of(node, part_of(s, tiles.first) == 1 ? 0 : kR - 1), tiles.first);
  int32_t last = -1;
#pragma unroll 1
  for (uint32_t i = 0; i < kR; ++i) {
    const int32_t seen = last_of_segment(s, rank_of(node, i), tiles);
    last = seen > last ? seen : last;
  }
  return last;
}
MK_DEVICE uint32_t chunk_base(const RingArguments& r, const Sequence& s,
                              uint32_t item) {  // number of the first chunk of the item's segment
  const uint32_t wave = item / r.ctas, chunks = kParts * s.chunks_per_part;
  if constexpr (!kPacked) return (item / s.items_per_pair + wave - wave / r.period) * chunks;
  // Where a wave and a pair end together, numbers are left out.
  return s.first_chunk + (pair_of(s, item) + wave - s.first_item / r.ctas) * chunks;
}

// ---- packed sequences. They lie in groups of so many one after the other; it is known what comes before each group.
constexpr uint32_t kSequenceGroups = kPacked ? 256 : 0;
constexpr uint32_t kSumLimit = 1u << 30;  // where sums stop growing

// What is wrong with cu_seqlens: mkernel/planner/ring_varlen.py makes the exception.
enum SequenceFault : uint32_t { kBadStart = 1, kDecreasing = 2, kTooManyRows = 3, kTooManyChunks = 4 };

struct SequenceTables {                                                                         // shared memory
  uint32_t items[kSequenceGroups + 1], chunks[kSequenceGroups + 1], rows[kSequenceGroups + 1];  // before each group; in all
  uint32_t mixed[kSequenceGroups + 1];                                                          // a sum over all that cu_seqlens says
};

// The sequences of a call.
class Sequences {
 public:
  const RingArguments& r;
  MK_DEVICE Sequences(const RingArguments& ring, const SequenceTables& tables, uint64_t cu_seqlens, uint32_t count)
      : r(ring), tables_(tables), ends_(reinterpret_cast<const char*>(cu_seqlens)), count_(count), group_(quotient_up(count, kGroups)) {}

  MK_DEVICE uint32_t items() const { return kPacked ? tables_.items[groups()] : r.items; }
  MK_DEVICE uint32_t total() const { return kPacked ? tables_.chunks[groups()] : r.total; }  // numbers of chunks of a ring
  MK_DEVICE uint32_t rows() const { return tables_.rows[groups()]; }                         // of a rank that are some sequence's
  MK_DEVICE uint32_t mixed() const { return tables_.mixed[groups()]; }
  MK_DEVICE uint32_t count() const { return count_; }
  MK_DEVICE uint32_t groups() const { return group_ == 0 ? 0 : quotient_up(count_, group_); }
  MK_DEVICE uint32_t first_of_group(uint32_t group) const { return smaller(group * group_, count_); }

  MK_DEVICE Sequence of_item(uint32_t item) const {  // below items()
    if constexpr (!kPacked) return Sequence{r.items_per_pair, r.part_rows, r.tiles_per_part, r.chunks_per_part, 0, 0, 0, 0};
    uint32_t group = 0;  // the last one before which there are no more items
#pragma unroll 1
    for (uint32_t end = groups(); group + 1 < end;) {
      const uint32_t middle = (group + end) / 2;
      (tables_.items[middle] <= item ? group : end) = middle;
    }
    Sequence s = begin(group);
#pragma unroll 1
    for (uint32_t i = first_of_group(group);; ++i) {
      measure(s, i);
      if (item - s.first_item < items_of(s)) return s;
      pass(s);
    }
  }
  MK_DEVICE uint32_t end_of_segment(const Sequence& s, uint32_t first) const {
    const uint32_t wave = (first / r.ctas + 1) * r.ctas, pair = s.first_item + (pair_of(s, first) + 1) * s.items_per_pair;
    return smaller(smaller(wave, pair), items());
  }
  MK_DEVICE SegmentTiles tiles_of_segment(const Sequence& s, uint32_t first, uint32_t end) const {
    return SegmentTiles{tile_of(r, s, first), kPacked ? tile_of(r, s, end - 1) : 0};
  }

  // ---- one packed sequence after the other
  MK_DEVICE Sequence begin(uint32_t group) const {
    return Sequence{0, 0, 0, 0, tables_.items[group], tables_.chunks[group], tables_.rows[group], 0};
  }
  MK_DEVICE int32_t end(uint32_t i) const { return static_cast<int32_t>(ptx::load_input_word(ends_ + i * sizeof(int32_t))); }
  MK_DEVICE void measure(Sequence& s, uint32_t i) const {  // of one whose ends are right
    s.length = end(i + 1) - end(i);
    s.part_rows = quotient_up(s.length, kParts * kWorldSize);
    s.tiles_per_part = quotient_up(s.part_rows, kQueryRows), s.chunks_per_part = quotient_up(s.part_rows, r.chunk_rows);
    s.items_per_pair = kParts * s.tiles_per_part * r.group;
  }
  MK_DEVICE uint32_t items_of(const Sequence& s) const { return s.items_per_pair * r.kv_heads; }
  MK_DEVICE uint32_t numbers_of(const Sequence& s) const {  // of chunks
    if (s.items_per_pair == 0) return 0;
    const uint32_t waves = (s.first_item + items_of(s) - 1) / r.ctas - s.first_item / r.ctas;
    return (r.kv_heads + waves) * kParts * s.chunks_per_part;
  }
  MK_DEVICE void pass(Sequence& s) const {
    s.first_chunk += numbers_of(s), s.first_item += items_of(s), s.first_row += kParts * s.part_rows;
  }

 private:
  static constexpr uint32_t kGroups = kPacked ? kSequenceGroups : 1;
  const SequenceTables& tables_;
  const char* ends_;
  const uint32_t count_, group_;
};

// ---- the tables
MK_DEVICE uint32_t sum_of(uint32_t a, uint32_t b) { return smaller(a + b, kSumLimit); }  // of two that are at most kSumLimit
MK_DEVICE uint32_t mix(uint32_t place, uint32_t value) {
  uint32_t h = value * 0x9e3779b1u + place * 0x85ebca77u + 0x27d4eb2fu;
  h = (h ^ h >> 15) * 0x2c1b3c6du;
  h = (h ^ h >> 12) * 0x297a2d39u;
  return h ^ h >> 15;
}
template <bool Limited>
MK_DEVICE void add_up(uint32_t* values, uint32_t count) {  // values[1] to values[count], each with all before it. One thread
  uint32_t sum = 0;
  values[0] = 0;
#pragma unroll 8
  for (uint32_t i = 1; i <= count; ++i) values[i] = sum = Limited ? sum_of(sum, values[i]) : sum + values[i];
}

// Makes the tables. All threads of a CTA. Whatever cu_seqlens says, sums end, and those of rows are too large where an end is wrong.
MK_DEVICE void build_tables(const Sequences& q, SequenceTables& tables) {
  const uint32_t thread = ptx::thread_index(), groups = q.groups();
  static_assert(kSequenceGroups <= Config::kThreads, "a thread for each group");
  const uint32_t first = q.first_of_group(thread), last = q.first_of_group(thread + 1);
  if (thread < groups) {
    uint32_t rows = 0, items = 0, mixed = thread == 0 ? mix(q.count(), 0) : 0;
    Sequence s{};
#pragma unroll 1
    for (uint32_t i = first; i < last; ++i) {
      const int32_t begin = q.end(i), end = q.end(i + 1);
      mixed += mix(i, static_cast<uint32_t>(begin)) + (i + 1 == q.count() ? mix(i + 1, static_cast<uint32_t>(end)) : 0);
      if (begin < 0 || end < begin || (i == 0 && begin != 0)) {
        rows = kSumLimit;
        continue;
      }
      q.measure(s, i);
      rows = sum_of(rows, smaller(kParts * s.part_rows, kSumLimit)), items = sum_of(items, smaller(q.items_of(s), kSumLimit));
    }
    tables.rows[thread + 1] = rows, tables.items[thread + 1] = items, tables.mixed[thread + 1] = mixed;
  }
  ptx::sync_cta();
  if (thread == 0) add_up<true>(tables.rows, groups);
  if (thread == 32) add_up<true>(tables.items, groups);
  if (thread == 64) add_up<false>(tables.mixed, groups);
  ptx::sync_cta();
  if (thread < groups) {
    uint32_t chunks = 0;
    Sequence s{};
    s.first_item = tables.items[thread];
#pragma unroll 1
    for (uint32_t i = first; i < last && q.rows() < kSumLimit; ++i) {
      q.measure(s, i);
      chunks = sum_of(chunks, smaller(q.numbers_of(s), kSumLimit));
      s.first_item += q.items_of(s);
    }
    tables.chunks[thread + 1] = chunks;
  }
  ptx::sync_cta();
  if (thread == 0) add_up<true>(tables.chunks, groups);
  ptx::sync_cta();
}

}  // namespace mkernel
