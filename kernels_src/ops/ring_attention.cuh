// ring_attention: every rank's queries attend to the keys and values of all ranks. Included by the generated source after `struct Config`.
// ring_attention_varlen is the same with kPacked: sequences of lengths that only the device knows (attention/sequences.cuh).
//
// A compute CTA takes one tile of queries after the other, and for each goes through this rank's keys, where the caller has them, then through those of
// the other ranks, which come chunk by chunk into a window of this rank's heap; with kCanonical through all keys by position. intra_comm pushes chunks to the node's other ranks, inter_send puts them
// to other nodes (attention/exchange.cuh). A slot of the window is written again when all CTAs of its rank have read it.
#pragma once
#include "attention/exchange.cuh"
#include "attention/packed.cuh"
#include "attention/role.cuh"

namespace mkernel {

// ---- config: as for every attention kernel (attention/shape.cuh), and kParts, kPacked, kCanonical, kShares, kNumNodes, kRanksPerNode; kSharedBytes, kParameterBytes
using Shape = AttentionShape<Config>;

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  RingArguments ring;
  uint64_t o, lse;
  uint64_t o_batch_bytes, o_head_bytes, o_row_bytes;
  uint64_t flag_offset;  // signal segment: one per CTA that reads rings, raised when its progress is valid
  uint32_t rows;         // of this rank, per head
  float scale_log2;
  uint64_t cu_seqlens;  // packed: where each sequence begins, of all ranks, and where the last one ends
  uint32_t sequences;
  uint32_t pairs_together;                    // of which items take turns, where this rank is the only one
  uint32_t reserved[6];                       // the maps are 64-byte aligned
  abi::TensorMap q_map, k_map, v_map, o_map;  // (B, heads, rows, D)
  abi::TensorMap copy_k_map, copy_v_map;      // k and v in the boxes of copies
  abi::TensorMap window_k_map, window_v_map;  // (slots, chunk_rows, D)
  abi::TensorMap push_map;                    // (ranks of the node, planes: K and V of each slot, chunk_rows, D)
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

// What is read for an item.
struct ItemKeys {
  Sequence sequence;         // that the item belongs to, if it is packed
  int32_t last;              // key that it sees
  uint32_t base, next_base;  // numbers of the first chunk of its segment, and of the first one behind it
};
// Where the producer warp is in the keys of its item. In shared memory: it has few registers.
struct KeyPosition {
  KeyBlock block;
  ItemKeys items[Config::kValueStages + 1];  // this one, and those that the op owes the credit of their own keys
  uint32_t count, has_keys;                  // items before this one that had keys; whether this one has
  uint32_t more, told;                       // told: that this CTA's progress is valid
  uint32_t head, batch;                      // of the item; the KV head
  uint32_t stage, source, part;              // stage 0: this rank's keys; else those of ring stage - 1
  uint32_t row, seen;                        // of the part: where the next block begins, and how many are seen
  uint32_t chunk, in_chunk;                  // of the part, and row in it
  uint32_t leg;                              // kCanonical: which part of which rank this is, by position
  uint32_t turn;                             // kShares: so many blocks are other CTAs' before this one's next
  uint32_t segment_end, open;                // of the newest item: its segment's end; whether items of that segment may be left to be taken
  uint32_t words[kRings + 1];                // of each ring: this CTA's items so far read no chunk below it any more

  MK_DEVICE void init() {  // its one user, the first lane of the producer warp
    count = has_keys = told = open = 0;
#pragma unroll 1
    for (uint32_t ring = 0; ring < kRings; ++ring) words[ring] = 0;
  }
  MK_DEVICE uint32_t place() const { return count % (Config::kValueStages + 1); }
  MK_DEVICE ItemKeys& item() { return items[place()]; }
  MK_DEVICE void begin_item() {
    count += has_keys;
    has_keys = 0;
  }
};
struct Storage {
  union {
    AttentionStorage<Config> attention;
    CopyStorage copy;
  };
  KeyPosition keys;
  SequenceTables tables;
};
static_assert(sizeof(Storage) <= Config::kSharedBytes, "shared memory");

// ---- compute: the keys of an item. This rank's first, then those of the rings in turn; or (kCanonical) all by position.
constexpr uint32_t kOwnKeys = 0xfe, kAllKeys = 0xfd;  // in a credit, in place of a ring
static_assert(kRings < kAllKeys, "a credit names a ring in 8 bits");

class Keys {  // functions of the producer warp
  MK_DEVICE decltype(auto) sequence() const {
    if constexpr (kPacked)
      return (at_.item().sequence);
    else
      return q_.of_item(0);
  }

 public:
  MK_DEVICE Keys(const Parameters& p, const Sequences& q, KeyPosition& at, uint32_t number, const AttentionItem& item)
      : p_(p), q_(q), at_(at) {
    if (ptx::lane_index() == 0) {
      if constexpr (!kPacked) at.begin_item();
      ItemKeys& keys = at.item();
      keys.last = item.position + static_cast<int32_t>(item.rows) - 1;
      if (kPacked && Config::kCausal == 0) keys.last = sequence().length - 1;
      if (kCanonical && Config::kCausal == 0) keys.last = last_key(sequence());
      if (kPacked && item.rows == 0) keys.last = -1;  // a tile of padding sees nothing
      if constexpr (kRings > 0) {
        keys.base = chunk_base(p.ring, sequence(), number);
        keys.next_base = keys.base + kParts * sequence().chunks_per_part;
#pragma unroll 1
        for (uint32_t ring = 0; ring < kRings; ++ring) at.words[ring] = smaller(at.words[ring], keys.base);
        at.segment_end = q.end_of_segment(sequence(), number), at.open = 1;
      }
      at.head = item.head / p.ring.group, at.batch = item.batch;
      at.turn = item.part;
      if constexpr (kCanonical) {
        begin_leg(0);
      } else {
        at.stage = 0;
        begin_source(p.world.rank);
      }
    }
    ptx::sync_warp();
  }

  MK_DEVICE bool next(KeyBlock& block) {
    if (ptx::lane_index() == 0) {
      at_.more = find();
      if (at_.more != 0) take(at_.block);
    }
    ptx::sync_warp();
    const bool more = at_.more != 0;
    if (more) block = at_.block;
    ptx::sync_warp();  // all lanes have read
    return more;
  }

 private:                      // the first lane's
  MK_DEVICE uint32_t find() {  // goes on to this CTA's next block; 0: there is none
    uint32_t found = find_part();
#pragma unroll 1
    for (; kShares && found != 0 && at_.turn > 0; --at_.turn) {
      pass_block();
      found = find_part();
    }
    return found;
  }
  MK_DEVICE void pass_block() {
    const bool chunk_ends = at_.in_chunk + kKeyBlock == p_.ring.chunk_rows;
    at_.row += kKeyBlock, at_.in_chunk = chunk_ends ? 0 : at_.in_chunk + kKeyBlock;
    if (chunk_ends) ++at_.chunk;
  }
  MK_DEVICE uint32_t find_part() {  // goes on to a part of which something is left; 0: there is none
#pragma unroll 1
    while (at_.row >= at_.seen) {
      if constexpr (kCanonical) {
        if (at_.leg + 1 == kLegs) return 0;
        begin_leg(at_.leg + 1);
        if (at_.seen == 0) return 0;  // nor is anything behind it
      } else if (at_.part + 1 < kParts) {
        begin_part(at_.part + 1);
      } else if (at_.stage < kRings) {
        begin_source(source_of(p_.world, at_.stage++));
      } else {
        return 0;
      }
    }
    return 1;
  }
  MK_DEVICE void take(KeyBlock& block) {
    const RingArguments& r = p_.ring;
    const Sequence& s = sequence();
    const uint32_t row = at_.row, in_chunk = at_.in_chunk, part = at_.part, stage = at_.stage, step = shares_of(r) * kKeyBlock;
    const uint32_t number = at_.item().base + part * s.chunks_per_part + at_.chunk;
    block.rows = smaller(kKeyBlock, (kPacked ? at_.seen : s.part_rows) - row);
    block.position = part_position(s, at_.source, part) + static_cast<int32_t>(row);
    block.credit = kNoCredit;
    const bool chunk_ends = in_chunk + step >= r.chunk_rows, part_ends = row + step >= at_.seen;  // of what this CTA has of them
    const bool source_ends = part_ends && (part + 1 == kParts || seen_rows(s, at_.source, part + 1, at_.item().last) == 0);
    pass_block();
    at_.turn = shares_of(r) - 1;
    if (stage == 0) {
      block.map = 0;
      block.row = static_cast<int32_t>(s.first_row + part * s.part_rows + row);
      block.head = at_.head, block.batch = at_.batch;
      block.is_padded = kPacked || part + 1 < kParts;
      block.waits = false;
      if constexpr (!kCanonical) at_.has_keys = 1;
      if (!kCanonical && kRings > 0 && source_ends) block.credit = kOwnKeys << kCountBits | at_.place();
    } else {
      block.map = 1 + number;
      block.row = static_cast<int32_t>(in_chunk);
      block.head = slot_word(r, stage - 1, number), block.batch = 0;
      block.is_padded = true;
      block.waits = in_chunk < step;
      if (source_ends || part_ends || chunk_ends)
        block.credit = (stage - 1) << kCountBits | (source_ends ? at_.item().next_base : number + 1);
    }
    if constexpr (kCanonical) {
      const bool item_ends = part_ends && part_position(s, at_.source, part) + static_cast<int32_t>(at_.seen) > at_.item().last;
      if (item_ends) block.credit = kAllKeys << kCountBits | at_.item().next_base;
    }
  }
  MK_DEVICE void begin_leg(uint32_t leg) {
    const uint32_t rank = there_and_back(leg, kWorldSize);
    at_.leg = leg, at_.source = rank;
    at_.stage = rank == p_.world.rank ? 0 : 1 + ring_of(p_.world, rank);
    begin_part(leg / kWorldSize);
  }
  MK_DEVICE void begin_source(uint32_t source) {
    at_.source = source;
    begin_part(0);
  }
  MK_DEVICE void begin_part(uint32_t part) {
    at_.part = part, at_.row = at_.in_chunk = at_.chunk = 0;
    at_.seen = seen_rows(sequence(), at_.source, part, at_.item().last);
  }

  const Parameters& p_;
  const Sequences& q_;
  KeyPosition& at_;
};

struct RingAttention {
  static constexpr bool kMoves = true, kSplits = kShares;
  const Parameters& p;
  const Sequences& q;
  KeyPosition& position;
  EntryGate& entries;

  MK_DEVICE float scale_log2() const { return p.scale_log2; }
  MK_DEVICE uint32_t cta() const { return ptx::cta_index() - p.ring.intra_comm - p.ring.inter_send; }

  // ---- items. By the producer warp. A CTA takes the next item when it has time for it.
  MK_DEVICE uint32_t take(uint32_t taken) const {
    uint32_t number = cta();
    if (taken > 0) {
      if (ptx::lane_index() == 0) number = p.ring.ctas + ptx::atomic_add(&control_block(p.world)->tile_counter, 1);
      number = ptx::broadcast(number, 0);
    }
    return number < q.items() ? number : kNoItem;
  }
  // The next item may be of the same segment, whose chunks are then read once more. Their numbers must not be told as read any more: credits for them
  // that come later would.
  MK_DEVICE bool repeats() const {
    if constexpr (kRings == 0) return false;
    return ptx::any_of_warp(ptx::lane_index() == 0 && position.open != 0 && are_left());
  }
  MK_DEVICE AttentionItem item(uint32_t number) const {
    const RingArguments& r = p.ring;
    if constexpr (kPacked) {
      if (ptx::lane_index() == 0) {
        position.begin_item();
        position.item().sequence = q.of_item(number);
      }
      ptx::sync_warp();
    }
    const Sequence s = kPacked ? position.item().sequence : q.of_item(0);
    const ItemPlace place = kRings == 0 && !kPacked ? place_among(r, number, p.pairs_together) : place_of(r, s, number);
    const uint32_t pair = place.pair, tile = place.tile, of_tile = place.of_tile, part = part_of(s, tile), row = row_in_part(s, tile);
    const uint32_t head = pair % r.kv_heads * r.group + of_tile / shares_of(r);
    const uint32_t valid = valid_rows(s, p.world.rank, part);
    return AttentionItem{pair / r.kv_heads,
                         head,
                         static_cast<int32_t>(s.first_row + part * s.part_rows + row),
                         valid <= row ? 0 : smaller(kQueryRows, valid - row),
                         part_position(s, p.world.rank, part) + static_cast<int32_t>(row),
                         of_tile % shares_of(r),
                         shares_of(r)};
  }
  MK_DEVICE Keys keys(uint32_t number, const AttentionItem& item) const { return Keys(p, q, position, number, item); }

  // ---- their inputs
  MK_DEVICE const abi::TensorMap* q_map() const { return &p.q_map; }
  MK_DEVICE const abi::TensorMap* k_map(const KeyBlock& block) const { return block.map == 0 ? &p.k_map : &p.window_k_map; }
  MK_DEVICE const abi::TensorMap* v_map(const KeyBlock& block) const { return block.map == 0 ? &p.v_map : &p.window_v_map; }
  MK_DEVICE bool is_ready(const Entered& entered, const KeyBlock& block) const {
    const uint64_t* flag = counted_flag(p.world, p.ring, block.head);
    const bool came = ptx::any_of_warp(ptx::lane_index() == 0 && ptx::load_acquire_sys(flag) >= counted(entered.call(), block.map));
    ptx::sync_warp();  // a vote orders no memory
    return came;
  }
  // Others may wait for what this CTA has read, and it for them: it says first where it is. What it has loaded has come.
  MK_DEVICE bool wait(const Entered& entered, const KeyBlock& block) const {
    const uint32_t until = block.head / p.ring.depth, base = position.item().base;
#pragma unroll 1
    for (uint32_t ring = ptx::lane_index(); ring < kRings; ring += 32) {
      raise(ring, base);
      // One of several shares may have no block of a chunk, or of a ring: it will not read what comes before. It is the CTA's only item.
      if (kShares && p.ring.shares > 1 && ring <= until) raise(ring, ring < until ? q.total() : block.map - 1);
    }
    publish(entered);
    const bool open = position.open != 0;
    ptx::sync_warp();  // all lanes have read
    if (open) {
      if (ptx::lane_index() == 0) wait_taken(entered, block);
      publish(entered);
    }
    const uint32_t feeder = feeder_of(p.world, until);
    const bool came = ptx::all_of_warp(ptx::lane_index() != 0 || wait_counted(entered, p.ring, block.head, block.map, feeder));
    ptx::sync_warp();
    return came;
  }
  MK_DEVICE void landed(const Entered& entered, uint32_t credit) const {
    const uint32_t which = credit >> kCountBits, number = credit & ((1u << kCountBits) - 1);
#pragma unroll 1
    for (uint32_t ring = ptx::lane_index(); ring < kRings; ring += 32) {
      if (!kCanonical && which == kOwnKeys) {  // a ring of which the item sees nothing is free for the next segment
        const ItemKeys& keys = position.items[number];
        const Sequence s = kPacked ? keys.sequence : q.of_item(0);
        const bool reads = visible_chunks(p.ring, s, source_of(p.world, ring), keys.last) != 0;
        raise(ring, reads ? keys.base : keys.next_base);
      } else if ((kCanonical && which == kAllKeys) || which == ring) {  // the end of an item frees all rings
        raise(ring, number);
      }
    }
    publish(entered);
  }

  // ---- progress: of each ring, below which chunk this CTA reads nothing any more. Each lane has its rings
  MK_DEVICE void raise(uint32_t ring, uint32_t number) const {
    if (position.words[ring] < number) position.words[ring] = number;
  }
  // As long as items of its newest item's segment are left, this CTA may get one of them, and read that segment once more from its beginning.
  MK_DEVICE bool are_left() const {
    return p.ring.ctas + ptx::load_acquire_gpu(&control_block(p.world)->tile_counter) < position.segment_end;
  }
  MK_DEVICE void publish(const Entered& entered) const {
    if (ptx::lane_index() == 0 && position.open != 0) position.open = are_left();
    ptx::sync_warp();
    const uint32_t most = position.open != 0 ? position.item().base : q.total();
#pragma unroll 1
    for (uint32_t ring = ptx::lane_index(); ring < kRings; ring += 32) {
      publish_progress(entered, p.ring, ring, cta(), smaller(position.words[ring], most));
    }
    tell(entered);
  }
  // The block may need slots that are free only once all items of the segment are taken, which other CTAs do when they have ended their own. First lane.
  MK_DEVICE void wait_taken(const Entered& entered, const KeyBlock& block) const {
    const uint64_t* flag = counted_flag(p.world, p.ring, block.head);
    const uint64_t number = counted(entered.call(), block.map);
    Deadline deadline(entered.call(), p.world.timeout_ns);
#pragma unroll 1
    while (ptx::load_acquire_sys(flag) < number && are_left() && deadline.pass(flag, number) == abi::kRunning) {
    }
  }
  MK_DEVICE void finish(const Entered& entered) const {
    if constexpr (kRings > 0) {
#pragma unroll 1
      for (uint32_t ring = ptx::lane_index(); ring < kRings; ring += 32) publish_progress(entered, p.ring, ring, cta(), q.total());
      tell(entered);  // it may have had no item
    }
  }

  // ---- shares of an item's keys
  MK_DEVICE uint32_t tile_number(const AttentionItem& item) const {  // of all heads
    const RingArguments& r = p.ring;
    const uint32_t part = kParts > 1 && item.row >= static_cast<int32_t>(r.part_rows) ? 1 : 0;
    const uint32_t tile = part * r.tiles_per_part + (item.row - part * r.part_rows) / kQueryRows;
    return (item.batch * r.kv_heads * r.group + item.head) * kParts * r.tiles_per_part + tile;
  }
  MK_DEVICE char* partial(const Entered& entered, const AttentionItem& item, uint32_t share) const {
    const uint64_t place = uint64_t(tile_number(item)) * (p.ring.shares - 1) + share;
    return shared_heap(entered, p.world.local_rank) + p.ring.partial_offset + place * Shape::kPartialBytes;
  }
  MK_DEVICE uint32_t part_flag(const AttentionItem& item, uint32_t share) const {
    return num_readers(p.ring) + tile_number(item) * p.ring.shares + share;
  }
  MK_DEVICE void raise_part(const Entered& entered, const AttentionItem& item) const {
    raise_flag_of(entered, p, part_flag(item, item.part), p.world.local_rank);
  }
  MK_DEVICE bool wait_parts(const Entered& entered, const AttentionItem& item) const {
    finish(entered);  // the others may read chunks of which this share has nothing
    return wait_all(entered, PartFlags<RingAttention>{*this, item}, item.parts - 1);
  }
  MK_DEVICE void tell(const Entered& entered) const {
    ptx::sync_warp();
    if (ptx::lane_index() != 0 || position.told != 0) return;
    position.told = 1;
    raise_flag_of(entered, p, cta(), p.world.local_rank);
  }

  // ---- their results
  MK_DEVICE const abi::TensorMap* o_map() const { return &p.o_map; }
  MK_DEVICE char* o(const Entered&, const AttentionItem& item) const {
    return reinterpret_cast<char*>(p.o) + item.batch * p.o_batch_bytes + item.head * p.o_head_bytes + item.row * p.o_row_bytes;
  }
  MK_DEVICE uint64_t o_row_bytes() const { return p.o_row_bytes; }
  MK_DEVICE float* lse(const Entered&, const AttentionItem& item) const {
    const uint64_t heads = uint64_t(p.ring.kv_heads) * p.ring.group;
    return reinterpret_cast<float*>(p.lse) + (item.batch * heads + item.head) * p.rows + item.row;
  }
  MK_DEVICE void move(const Call& call) const {
    if (ptx::cta_index() + 1 == ptx::cta_count()) announce_entry(call);
    if constexpr (kPacked) {
      const MaybeEntered entered = entries.pass(call);
      if (entered) zero_padding(*entered, *this, p.world.rank, p.rows, cta());
    }
  }
};

// ---- the role switch
MK_KERNEL(Shape::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const uint32_t cta = ptx::cta_index(), moving = p.ring.intra_comm + p.ring.inter_send;
  const abi::Role role = cta + 1 > moving ? abi::kCompute : cta + 1 > p.ring.intra_comm ? abi::kInterSend : abi::kIntraComm;
  const Sequences sequences(p.ring, storage.tables, p.cu_seqlens, p.sequences);
  Call call = begin_call(p.world, role);
  if constexpr (kPacked) {
    build_tables(sequences, storage.tables);
    call.check = mixed_check(sequences, call.check);
    if (!are_right(sequences, p.rows)) {
      refuse_sequences(call, sequences, p.rows, storage.keys.told);
      return;
    }
  }
  if (role == abi::kCompute) {
    if (ptx::thread_index() == 0) storage.keys.init();
    attention_role<Config>(call, RingAttention{p, sequences, storage.keys, storage.attention.entries}, storage.attention);
    return;
  }
  if constexpr (kWorldSize > 1) move_role(call, p, sequences, storage.copy);
  if (ptx::thread_index() == 0) leave_call(call);
}

}  // namespace mkernel
