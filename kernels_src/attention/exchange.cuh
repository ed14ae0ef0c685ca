// The CTAs of ring attention that move keys and values: intra_comm pushes chunks into the windows of the node's other ranks, its own and those that its
// rail peers have put here; inter_send puts its own to the rail peers. Warps of both keep the credits of this rank's rings.
//
// A flow is what one rank writes to one other. No flow waits for another of the same place in the order of chunks, so each CTA serves one: a receiver that
// takes its sources in another order must not hold up the rest.
#pragma once
#include "attention/window.cuh"
#include "comm/copy.cuh"
#include "comm/mailbox.cuh"
#include "comm/ring.cuh"

namespace mkernel {

constexpr uint32_t kCopyRows = kPieceBytes / 128;  // of a piece: a panel of 64 columns
constexpr uint32_t kFirstKeeper = 3;               // warps from here on keep credits

// A chunk on its way.
struct CopiedChunk {
  uint32_t bytes;  // of whole pieces
  uint32_t number;
  uint32_t distance;     // of the node that it comes from; 0: it is this rank's own
  uint32_t next;         // of another node's: which one this CTA reads next
  int32_t row;           // of an own one, in k and v,
  uint32_t head, batch;  // and where there
  uint32_t from, to;     // planes: of another node's, here; and where it goes
};

struct CopyStorage {
  CopyPieces pieces;
  CopyBarriers barriers;
  EntryGate entries;
  Mailbox arrived, announce;  // chunks that may be copied, for thread 0; numbers of chunks whose flags are to be raised, for warp 1
};

// The chunks of one flow that one of its CTAs moves, in order: segment by segment; in each first this rank's, then those of the rail peers from the next
// node on; with kCanonical by position, as they are read. Every stride-th number is this CTA's. Counts: uint32_t count(distance, sequence, tiles), chunks
// of that source that the receiver gets in a segment; uint32_t distance(leg), which source comes when. It begins before the first of them.
template <uint32_t Sources, class Counts>
class FlowWalk {
 public:
  MK_DEVICE FlowWalk(const Sequences& q, const Counts& counts, uint32_t index, uint32_t stride)
      : q_(q), counts_(counts), index_(index), stride_(stride) {}
  MK_DEVICE bool more() const { return first_ < q_.items(); }
  MK_DEVICE uint32_t first_item() const { return first_; }  // of the segment
  MK_DEVICE const Sequence& sequence() const { return sequence_; }
  MK_DEVICE uint32_t distance() const { return distance_; }
  MK_DEVICE uint32_t chunk() const { return chunk_; }  // of the source's
  MK_DEVICE uint32_t number() const { return base_ + chunk_; }
  MK_DEVICE bool advance() {  // to the next one, if there is one
    chunk_ += stride_;
#pragma unroll 1
    while (chunk_ >= end_of_leg_) {  // to a source and a segment of which something is left
      if (++leg_ >= kWalkLegs) {
        first_ = end_, leg_ = 0;
        if (!more()) return false;
        sequence_ = q_.of_item(first_);
        base_ = chunk_base(q_.r, sequence_, first_), end_ = q_.end_of_segment(sequence_, first_);
        tiles_ = q_.tiles_of_segment(sequence_, first_, end_);
      }
      distance_ = counts_.distance(leg_);
      const uint32_t count = counts_.count(distance_, sequence_, tiles_);
      const uint32_t begin = kByPart && leg_ >= Sources ? sequence_.chunks_per_part : 0;
      end_of_leg_ = kByPart && leg_ < Sources ? smaller(count, sequence_.chunks_per_part) : count;
      chunk_ = begin + first_chunk(base_ + begin);
    }
    return true;
  }
  // Which chunk of the current source this CTA moves after this one: q.total() if none.
  MK_DEVICE uint32_t next_of_source() const { return next_number(distance_, first_, chunk_ + stride_); }
  MK_DEVICE uint32_t first_of_source(uint32_t distance) const { return next_number(distance, 0, kNoChunk); }

 private:
  static constexpr uint32_t kNoChunk = 0xffffffffu;
  static constexpr bool kByPart = kCanonical && Sources > 1;
  static constexpr uint32_t kWalkLegs = (kByPart ? kParts : 1) * Sources;
  MK_DEVICE uint32_t first_chunk(uint32_t base) const {
    const uint32_t inside = base % stride_;
    return index_ >= inside ? index_ - inside : index_ + stride_ - inside;
  }
  MK_DEVICE uint32_t next_number(uint32_t distance, uint32_t first,
                                 uint32_t chunk) const {  // kNoChunk: from the first one of the segment on
#pragma unroll 1
    while (first < q_.items()) {
      const Sequence s = q_.of_item(first);
      const uint32_t base = chunk_base(q_.r, s, first);
      if (chunk == kNoChunk) chunk = first_chunk(base);
      const uint32_t end = q_.end_of_segment(s, first);
      if (chunk < counts_.count(distance, s, q_.tiles_of_segment(s, first, end))) return base + chunk;
      first = end;
      chunk = kNoChunk;
    }
    return q_.total();
  }

  const Sequences& q_;
  const Counts counts_;
  uint32_t index_, stride_;
  Sequence sequence_;
  SegmentTiles tiles_;
  uint32_t first_ = 0, end_ = 0, base_ = 0, leg_ = kWalkLegs - 1, distance_ = 0, end_of_leg_ = 0,
           chunk_ = 0;  // it begins at the end of nothing
};

// Of `ctas` CTAs that serve `flows` flows in turn, those of one flow: this CTA's place among them, and how many they are.
struct FlowShare {
  uint32_t flow, index, stride;
  MK_DEVICE static FlowShare of_cta(uint32_t cta, uint32_t ctas, uint32_t flows) {
    const uint32_t flow = cta % flows;
    return FlowShare{flow, cta / flows, (ctas - flow + flows - 1) / flows};
  }
};

MK_DEVICE uint32_t chunk_bytes(const RingArguments& r, const Sequence& s, uint32_t chunk) {  // of the pieces that have the rows of a chunk
  const uint32_t rows = smaller(r.chunk_rows, s.part_rows - chunk % s.chunks_per_part * r.chunk_rows);
  return 2 * kPanels * quotient_up(rows, kCopyRows) * kPieceBytes;
}
MK_DEVICE CopiedChunk own_chunk(const RingArguments& r, const Sequence& s, uint32_t first, uint32_t number, uint32_t chunk, uint32_t to) {
  const uint32_t pair = pair_of(s, first), part = chunk / s.chunks_per_part;
  const uint32_t row = s.first_row + part * s.part_rows + (chunk - part * s.chunks_per_part) * r.chunk_rows;
  return CopiedChunk{chunk_bytes(r, s, chunk), number, 0, 0, static_cast<int32_t>(row), pair % r.kv_heads, pair / r.kv_heads, 0, to};
}

// What all that copies here has in common. A piece is a panel of 64 columns and kCopyRows rows: of K, then of V, panel by panel.
template <class Parameters>
struct ChunkPieces {
  using Item = CopiedChunk;
  const Parameters& p;
  uint32_t to_rank;  // local rank of whose window it is
  MK_DEVICE uint32_t piece_bytes() const { return kPieceBytes; }
  MK_DEVICE uint32_t loaded(const Item&, uint32_t bytes) const { return bytes; }
  MK_DEVICE static int32_t column(uint32_t offset) { return offset / kPieceBytes % kPanels * 64; }
  MK_DEVICE static uint32_t which(uint32_t offset) { return offset / (kPieceBytes * kPanels) % 2; }  // 0: K, 1: V
  MK_DEVICE static int32_t row(uint32_t offset) { return offset / (kPieceBytes * kPanels * 2) * kCopyRows; }
  MK_DEVICE void load(const CopiedChunk& c, uint32_t offset, void* smem, uint32_t, uint64_t* bar) const {
    if (kNodes == 1 || c.distance == 0) {
      const abi::TensorMap* map = which(offset) == 0 ? &p.copy_k_map : &p.copy_v_map;
      ptx::tma_load_4d(smem, map, bar, column(offset), c.row + row(offset), c.head, c.batch);
    } else {
      ptx::tma_load_4d(smem, &p.push_map, bar, column(offset), row(offset), c.from + which(offset), p.world.local_rank);
    }
  }
  MK_DEVICE void store(const CopiedChunk& c, uint32_t offset, const char* smem, uint32_t) const {
    ptx::tma_store_4d(&p.push_map, smem, column(offset), row(offset), c.to + which(offset), to_rank);
  }
};

// ---- intra_comm
struct PushCounts {  // to one node mate
  const RingArguments& r;
  const abi::World& world;
  uint32_t reader;
  MK_DEVICE uint32_t distance(uint32_t leg) const {
    return kCanonical ? (there_and_back(leg, kNodes) + kNodes - world.node) % kNodes : leg;
  }
  MK_DEVICE uint32_t count(uint32_t distance, const Sequence& s, const SegmentTiles& tiles) const {
    return visible_chunks(r, s, rail_peer(world, distance), last_of_segment(s, reader, tiles));
  }
};
using PushWalk = FlowWalk<kNodes, PushCounts>;

template <class Parameters>
struct PushedChunks : ChunkPieces<Parameters> {
  using ChunkPieces<Parameters>::p;
  const Entered& entered;
  PushWalk walk;
  Receiver& arrived;
  Mailbox& flags;
  Mailbox::Position& at;
  Trace& trace;
  uint64_t since;
  uint32_t found = 0;  // chunks so far

  MK_DEVICE uint32_t first() const { return 0; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + 1; }
  MK_DEVICE uint32_t end() const { return found + (walk.more() ? 1 : 0); }
  MK_DEVICE CopiedChunk item(uint32_t) {
    if (!walk.advance()) return CopiedChunk{};
    ++found;
    return current();
  }
  MK_DEVICE CopiedChunk current() const {
    const RingArguments& r = p.ring;
    const abi::World& world = p.world;
    const uint32_t number = walk.number(), distance = walk.distance();
    const uint32_t ring = distance == 0 ? local_ring(this->to_rank, world.local_rank) : remote_ring(distance, world.local_rank);
    const uint32_t to = 2 * slot_word(r, ring, number);
    if (kNodes == 1 || distance == 0) return own_chunk(r, walk.sequence(), walk.first_item(), number, walk.chunk(), to);
    const uint32_t from = 2 * slot_word(r, remote_ring(distance, world.local_rank), number);
    return CopiedChunk{chunk_bytes(r, walk.sequence(), walk.chunk()), number, distance, walk.next_of_source(), 0, 0, 0, from, to};
  }
  MK_DEVICE bool ready(const CopiedChunk&) { return arrived.try_take(); }
  MK_DEVICE bool wait(const CopiedChunk&) {
    const bool ok = arrived.wait();
    since = trace.now();
    return ok;
  }
  MK_DEVICE void announce(const CopiedChunk& c) {
    flags.post(entered, at, announced++);
    trace.record(c.distance == 0 ? abi::kTraceSend : abi::kTraceForward, c.number, since);
    since = trace.now();
  }
  uint32_t announced = 0;
};

// Posts each chunk when its slot at the receiver is free and, of one of another node, when it has come. One thread.
template <class Parameters>
MK_DEVICE void wait_to_push(const Entered& entered, const Parameters& p, PushWalk walk, uint32_t mate, Mailbox& arrived,
                            Mailbox::Position& at) {
  const RingArguments& r = p.ring;
  const abi::World& world = p.world;
#pragma unroll 1
  while (walk.advance()) {
    const uint32_t number = walk.number(), distance = walk.distance(), reader = node_mate(world, local_peer(world, mate));
    if (number >= r.depth && !wait_counted(entered, r, mate_credit_word(r, distance, mate), number - r.depth + 1, reader)) return;
    if (kNodes > 1 && distance != 0) {
      const uint32_t word = slot_word(r, remote_ring(distance, world.local_rank), number);
      if (!wait_counted(entered, r, word, number + 1, rail_peer(world, distance))) return;
    }
    // What was acquired becomes visible to bulk copies: here, because the thread that copies would wait for its copies.
    ptx::fence_proxy_async();
    arrived.post(entered, at, number);
  }
}

// ---- credits. A keeper is a warp that tells the feeder of one ring which chunks all of this rank's CTAs have read.
template <class Parameters>
struct ReadersBegun {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t reader) const { return wait_flag(entered, p, reader, p.world.rank); }
};
template <class Parameters>
struct RingProgress {
  const Parameters& p;
  uint32_t ring, number;
  MK_DEVICE bool wait(const Entered& entered, uint32_t reader) const {
    const RingArguments& r = p.ring;
    const uint32_t index = num_flags(r) + kRings * (r.depth + 1) + ring * num_readers(r) + reader;
    const char* word = heap(p.world, p.world.local_rank) + progress_offset(r, ring, reader);
    return wait_ge(entered.call(), reinterpret_cast<const uint64_t*>(word), number, Awaited{abi::kFlagChunk, index, p.world.rank},
                   p.world.timeout_ns);
  }
};

// One warp. Returns when the feeder needs no more credits.
template <class Parameters>
MK_DEVICE void keep_credits(const Entered& entered, const Parameters& p, uint32_t total, uint32_t ring) {
  const RingArguments& r = p.ring;
  const abi::World& world = p.world;
  const uint32_t source = source_of(world, ring), feeder = feeder_of(world, ring);
  const bool is_rail = kNodes > 1 && feeder / kR != world.node;
  const uint32_t readers = is_rail ? num_readers(r) : r.ctas, lane = ptx::lane_index();
  if (total <= r.depth || !wait_all(entered, ReadersBegun<Parameters>{p}, readers)) return;
  uint64_t ticket = 0;
#pragma unroll 1
  for (uint32_t number = 0; number < total - r.depth;) {
    number = smaller(number + r.credit_step, total - r.depth);
    if (!wait_all(entered, RingProgress<Parameters>{p, ring, number}, readers)) return;
    if (lane != 0) continue;
    if (!is_rail) {
      const uint32_t mate = seen_by_local(world, feeder % kR);
      raise_counted(entered, r, feeder % kR, mate_credit_word(r, node_distance(world, source), mate), number);
    } else if constexpr (kNodes > 1) {
      const uint32_t distance = seen_by_node_at(node_distance(world, source)), word = rail_credit_word(r, distance);
      const uint32_t channel = 1 + r.inter_send + node_distance(world, source);
      ticket = issue_put(entered, Put{channel, feeder, 0, 0, 0, counted_offset(r, word), counted(entered.call(), number)});
      if (ticket == 0) return;
    }
  }
  if constexpr (kNodes > 1) {
    if (ticket != 0) wait_put(entered.call(), ticket, feeder);
  }
}

// The rings that a warp keeps: CTAs that move data share them out among their warps from kFirstKeeper on. All lanes of these warps.
template <class Parameters>
MK_DEVICE void keep_rings(const Call& call, const Parameters& p, const Sequences& q, EntryGate& entries) {
  constexpr uint32_t kKeepers = AttentionShape<Config>::kThreads / 32 - kFirstKeeper;
  static_assert(kRings <= kKeepers * (kMates + kNodes - 1), "a warp for each ring");  // there are at least so many such CTAs
  const uint32_t ring = (ptx::warp_index() - kFirstKeeper) * (p.ring.intra_comm + p.ring.inter_send) + ptx::cta_index();
  if (ring >= kRings) return;
  const MaybeEntered entered = entries.pass(call);
  if (entered) keep_credits(*entered, p, q.total(), ring);
}

MK_DEVICE void copy_init(CopyStorage& storage) {  // one thread, before a sync_cta
  storage.entries.init();
  storage.arrived.init();
  storage.announce.init();  // ends with the fence for all of them
}

// Which chunks an intra_comm CTA pushes, and to whom.
template <class Parameters>
struct PushFlow {
  const Parameters& p;
  const Sequences& q;
  const FlowShare share;
  MK_DEVICE PushFlow(const Parameters& parameters, const Sequences& sequences)
      : p(parameters), q(sequences), share(FlowShare::of_cta(ptx::cta_index(), p.ring.intra_comm, kMates > 0 ? kMates : 1)) {}
  MK_DEVICE uint32_t mate() const { return 1 + share.flow; }
  MK_DEVICE uint32_t to_rank() const { return local_peer(p.world, mate()); }
  MK_DEVICE PushWalk walk() const {
    return PushWalk(q, PushCounts{p.ring, p.world, node_mate(p.world, to_rank())}, share.index, share.stride);
  }
};

// One thread.
template <class Parameters>
MK_DEVICE void push_chunks(const Call& call, const PushFlow<Parameters>& flow, CopyStorage& storage) {
  Receiver receiver(storage.arrived);
  Mailbox::Position announcement;
  const MaybeEntered maybe = storage.entries.pass_to_store(call);
  if (maybe) {
    const Entered entered = *maybe;
    Trace trace(call.world, 2);
    CopyRing ring(storage.pieces, storage.barriers);
    PushedChunks<Parameters> chunks{{flow.p, flow.to_rank()}, entered,      flow.walk(), receiver,
                                    storage.announce,         announcement, trace,       trace.now()};
    ring.copy(chunks);
  }
  receiver.drain();
  storage.announce.end(announcement);
}

// Raises the flags of what has been pushed. One warp.
template <class Parameters>
MK_DEVICE void announce_chunks(const Call& call, const PushFlow<Parameters>& flow, CopyStorage& storage) {
  const Parameters& p = flow.p;
  const RingArguments& r = p.ring;
  const abi::World& world = call.world;
  const uint32_t reader = r.ctas + ptx::cta_index();
  const MaybeEntered entered = storage.entries.pass(call);
  if (entered && kNodes > 1 && ptx::lane_index() == 0) {
    const PushWalk walk = flow.walk();
#pragma unroll 1
    for (uint32_t distance = 1; distance < kNodes; ++distance) {
      publish_progress(*entered, r, remote_ring(distance, world.local_rank), reader, walk.first_of_source(distance));
    }
    raise_flag_of(*entered, p, reader, world.local_rank);
  }
  storage.announce.serve([&](uint32_t number) {  // only one that has entered posts
    if (ptx::lane_index() != 0) return;
    static_assert(kPiecesAhead + kPiecesBehind + kMailboxSlots + 1 <= kCopyQueue, "chunks that are looked at meanwhile");
    const CopiedChunk& c = storage.pieces.item<CopiedChunk>(number);
    raise_counted(*entered, r, flow.to_rank(), c.to / 2, c.number + 1);
    if (kNodes > 1 && c.distance != 0) publish_progress(*entered, r, remote_ring(c.distance, world.local_rank), reader, c.next);
  });
}

// ---- inter_send
struct SendCounts {  // to one other node
  const RingArguments& r;
  uint32_t rank, node;
  MK_DEVICE uint32_t distance(uint32_t) const { return 0; }
  MK_DEVICE uint32_t count(uint32_t, const Sequence& s, const SegmentTiles& tiles) const {
    return visible_chunks(r, s, rank, last_of_node(s, node, tiles));
  }
};

template <class Parameters>
struct StagedKeys : ChunkPieces<Parameters> {  // one chunk
  CopiedChunk chunk;
  MK_DEVICE uint32_t first() const { return 0; }
  MK_DEVICE uint32_t next(uint32_t) const { return 1; }
  MK_DEVICE uint32_t end() const { return 1; }
  MK_DEVICE CopiedChunk item(uint32_t) const { return chunk; }
  MK_DEVICE bool ready(const CopiedChunk&) const { return true; }
  MK_DEVICE bool wait(const CopiedChunk&) const { return true; }
  MK_DEVICE void announce(const CopiedChunk&) const {}
};

// Stages each chunk in one of this CTA's slots when the engine has read what was there, and puts it when its slot at the receiver is free. One thread.
template <class Parameters>
MK_DEVICE void send_chunks(const Entered& entered, const Parameters& p, const Sequences& q, CopyStorage& storage, uint32_t index) {
  const RingArguments& r = p.ring;
  const abi::World& world = p.world;
  const Call& call = entered.call();
  const FlowShare share = FlowShare::of_cta(index, r.inter_send, kOtherNodes);
  const uint32_t distance = 1 + share.flow, peer = rail_peer(world, distance), node = node_at(world, distance);
  const uint32_t ring = remote_ring(seen_by_node_at(distance), world.local_rank), first_plane = 2 * (kRings * r.depth + index * kSendSlots);
  const uint64_t plane_bytes = uint64_t(r.chunk_rows) * Config::kHeadDim * 2;
  Trace trace(world, 2);
  CopyRing copies(storage.pieces, storage.barriers);
  uint64_t tickets[kSendSlots] = {};
  uint32_t sent = 0;
#pragma unroll 1
  for (FlowWalk<1, SendCounts> walk(q, SendCounts{r, world.rank, node}, share.index, share.stride); walk.advance(); ++sent) {
    const uint64_t begin = trace.now();
    const uint32_t number = walk.number(), plane = first_plane + sent % kSendSlots * 2;
    const uint64_t before = sent % kSendSlots == 0 ? tickets[0] : tickets[1];
    if (before != 0 && !wait_put(call, before, peer)) return;
    StagedKeys<Parameters> staged{{p, world.local_rank}, own_chunk(r, walk.sequence(), walk.first_item(), number, walk.chunk(), plane)};
    copies.copy(staged);
    if (number >= r.depth && !wait_counted(entered, r, rail_credit_word(r, distance), number - r.depth + 1, peer)) return;
    const uint32_t word = slot_word(r, ring, number);
    const uint64_t src = r.window_offset + plane * plane_bytes, dst = r.window_offset + 2 * word * plane_bytes;
    const uint64_t ticket =
        issue_put(entered, Put{1 + index, peer, src, dst, 2 * plane_bytes, counted_offset(r, word), counted(call, number + 1)});
    if (ticket == 0) return;
    (sent % kSendSlots == 0 ? tickets[0] : tickets[1]) = ticket;
    trace.record(abi::kTracePut, number, begin);
  }
  const uint64_t last = tickets[0] > tickets[1] ? tickets[0] : tickets[1];
  if (last != 0) wait_put(call, last, peer);
}

// ---- both
// All threads of a CTA that moves data: an intra_comm one pushes, an inter_send one sends. What both do stands here once, since it is long.
template <class Parameters>
MK_DEVICE void move_role(const Call& call, const Parameters& p, const Sequences& q, CopyStorage& storage) {
  if (ptx::thread_index() == 0) copy_init(storage);
  ptx::sync_cta();
  const uint32_t warp = ptx::warp_index();
  const bool pushes = kMates > 0 && (kNodes == 1 || call.role == abi::kIntraComm);
  if (warp >= kFirstKeeper) {
    keep_rings(call, p, q, storage.entries);
  } else if (warp == 2) {
    const MaybeEntered entered = storage.entries.open(call);
    if (pushes && ptx::lane_index() == 0) {
      Mailbox::Position arrival;
      const PushFlow<Parameters> flow(p, q);
      if (entered) wait_to_push(*entered, p, flow.walk(), flow.mate(), storage.arrived, arrival);
      storage.arrived.end(arrival);
    }
  } else if (pushes) {
    const PushFlow<Parameters> flow(p, q);
    if (warp == 1) {
      announce_chunks(call, flow, storage);
    } else if (ptx::elected()) {
      push_chunks(call, flow, storage);
    }
  } else if constexpr (kNodes > 1) {
    if (warp == 0) {
      const MaybeEntered entered = storage.entries.pass_to_store(call);
      const bool sends = ptx::elected();
      if (entered && sends) send_chunks(*entered, p, q, storage, ptx::cta_index() - p.ring.intra_comm);
    }
  }
  ptx::sync_cta();
}

}  // namespace mkernel
