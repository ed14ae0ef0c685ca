// Which row of which rank each choice of each token becomes, worked out by every rank for itself from the routing of all ranks.
//
// A rank writes its routing into its own heap, from where the ranks of its node read it; the network brings it to its rail peers, whose nodes read
// it there. Here: what is exchanged, and where everything lies. The work is in router.cuh.
//
// Included after `struct Config`: kTopK, kExperts (of a rank), kWeighted.
#pragma once
#include "comm/world.cuh"
#include "moe/places.cuh"
#include "tile/shape.cuh"

namespace mkernel {

constexpr uint32_t kTopK = Config::kTopK, kExperts = Config::kExperts, kAllExperts = kExperts * kWorldSize;
constexpr bool kWeighted = Config::kWeighted != 0;
constexpr uint32_t kNone = 0xffffffffu;  // a choice that is not routed; a slot or a place that there is not
constexpr uint32_t kGroup = 32;          // tokens that a warp does at once, a lane each
constexpr uint32_t kSegmentRows = 64;    // experts begin at multiples of so many slots
constexpr uint32_t kStagedRows = 32;     // rows that are staged, and flagged, at once
constexpr uint32_t kRoutingWarps = kGemmThreads / 32;

// ---- columns: what tokens are counted for. A token counts at most once for each
constexpr uint32_t kFirstOf = kAllExperts;  // after a column per expert: those whose first expert of this rank it is
// A node lists the tokens of another node's rank that it has experts of, and gets their rows in that order: by bands of their first experts there, each
// counted on its own rank, so that what the first experts need comes first; those of a band in order of the tokens.
constexpr uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }
constexpr uint32_t kBandColumns = 512 / (kWorldSize + kNodes);  // in large worlds lists have few bands, or one
constexpr uint32_t kBands = kNodes == 1 || kBandColumns == 0 ? 1 : at_most(at_most(kBandColumns, 16), kExperts);
constexpr uint32_t kListed = kFirstOf + kExperts;          // of a source rank and a band: those of its tokens that this node lists
constexpr uint32_t kSent = kListed + kWorldSize * kBands;  // of a node and a band: this rank's tokens that it lists
constexpr uint32_t kColumns = kSent + kNodes * kBands;

// ---- arguments
struct RoutingArguments {
  uint64_t ids;                                                            // (tokens, k) int32 or int64
  uint64_t weights;                                                        // (tokens, k) float32, or 0
  uint64_t x;                                                              // (tokens, row_bytes)
  uint64_t topk_ids, rows, experts, sums, listed, counts, expert_offsets;  // the arrays of Routing
  uint64_t source;                                                         // (max_rows, 3)
  uint64_t row_weight;                                                     // (max_rows) float32, or 0
  uint64_t expert_counts;                                                  // (all experts): tokens of all ranks, or 0
  uint64_t records_offset;  // data heap: by node, the record of this rank's rail peer there, or its own
  uint64_t staged_offset;   // data heap: (max_tokens, row_bytes), slot_bytes apart, this rank's rows, for its node
  uint64_t sending_offset;  // data heap: by distance of the node - 1, rows that go there
  uint64_t arrived_offset;  // data heap: by distance of the node - 1, rows that came from there
  uint64_t tables_offset;   // data heap, read by this rank only: Tables
  uint64_t x_offset;        // data heap: where x is, kStaged if it is not there
  uint32_t tokens;          // of this rank
  uint32_t max_tokens, max_rows;
  uint32_t alignment;  // each expert's rows begin at a multiple
  uint32_t id_bytes;   // 4 or 8
  uint32_t row_bytes;
  uint32_t put_rows;    // rows of a put
  uint32_t slot_bytes;  // from a slot, or a staged row, to the next one: whole lines
};
constexpr uint64_t kStaged = ~uint64_t(0);

// What a call is refused for, with these details: a rank, then a token and the id, or how many there are and how many there may be.
enum RoutingFault : uint32_t { kBadExpert = 1, kTwice = 2, kTooManyTokens = 3, kTooManyRows = 4 };

// ---- records: what a rank tells of itself: Header, ids, weights
struct Header {
  uint32_t tokens, reserved;
  uint64_t x_offset;
};
MK_DEVICE uint32_t ids_bytes(const RoutingArguments& r) { return (r.max_tokens * kTopK * 4 + 15) / 16 * 16; }
MK_DEVICE uint32_t record_bytes(const RoutingArguments& r) {
  return (sizeof(Header) + ids_bytes(r) * (kWeighted ? 2 : 1) + 127) / 128 * 128;
}
MK_DEVICE uint64_t record_offset(const RoutingArguments& r, uint32_t node) { return r.records_offset + uint64_t(node) * record_bytes(r); }
// Where this node's ranks read the record of a rank: on its rail.
MK_DEVICE const char* record(const abi::World& world, const RoutingArguments& r, uint32_t rank) {
  return heap(world, rank % kR) + record_offset(r, rank / kR);
}

// ---- flags of the op: of each rank its record; of each rank its rows, in chunks; the barriers of the grid (numbers only); of each rank of the node and each of its
// intra_comm CTAs, that it has fetched its rows
MK_DEVICE uint32_t max_chunks(const RoutingArguments& r) {
  const uint32_t rows = r.put_rows < kStagedRows ? r.put_rows : kStagedRows;
  return (r.max_tokens + rows - 1) / rows;
}
MK_DEVICE uint32_t chunk_flag(const RoutingArguments& r, uint32_t rank, uint32_t chunk) {
  return kWorldSize + rank * max_chunks(r) + chunk;
}
MK_DEVICE uint32_t barrier_name(const RoutingArguments& r, uint32_t i) { return kWorldSize * (1 + max_chunks(r)) + i; }
MK_DEVICE uint32_t fetched_flag(const RoutingArguments& r, uint32_t i) { return barrier_name(r, 2) + i; }

// ---- tables in this rank's part of the heap. `token`: its number among the tokens of all ranks
struct Item {     // a row to fetch
  uint64_t from;  // its address
  uint32_t flag;  // what must be raised before it is there; kNone: nothing
  uint32_t token;
};
struct Tables {
  char* base;
  uint32_t tokens, blocks, senders;  // of all ranks; of kSegmentRows slots; room for the CTAs of the grid
  MK_DEVICE Tables(const Entered& entered, const RoutingArguments& r)
      : base(shared_heap(entered, entered.world().local_rank) + r.tables_offset),
        tokens(r.max_tokens * kWorldSize),
        blocks((r.max_rows + kSegmentRows - 1) / kSegmentRows + kExperts),
        senders(r.max_tokens) {}
  MK_DEVICE uint64_t* arrived(uint32_t block) const {
    return reinterpret_cast<uint64_t*>(base) + block;
  }  // rows of the block that are there
  MK_DEVICE Item* items() const { return reinterpret_cast<Item*>(arrived((blocks + 1) / 2 * 2)); }
  MK_DEVICE uint32_t* ids() const { return reinterpret_cast<uint32_t*>(items() + tokens); }  // by token and choice; then
  MK_DEVICE uint32_t* slots() const { return ids() + uint64_t(tokens) * kTopK; }             // the slots of those of this rank, else kNone
  MK_DEVICE uint32_t* sent(uint32_t distance) const {  // this rank's tokens that go to a node, as it lists them
    return slots() + uint64_t(tokens) * kTopK + uint64_t(distance - 1) * senders;
  }
  MK_DEVICE uint32_t* counted(uint32_t cta) const {
    return sent(kNodes) + uint64_t(cta) * (kColumns + 2);
  }  // columns, then the first fault
};

// ---- shared memory while tokens are placed
// Warps of a CTA that place tokens: as many as have room for their columns.
constexpr uint32_t kPlacingBytes = 96 * 1024;
constexpr uint32_t kPlacers = kPlacingBytes / (8 * kColumns) < kRoutingWarps ? kPlacingBytes / (8 * kColumns) : kRoutingWarps;
static_assert(kPlacers > 0, "too many experts");
static_assert(kTopK + 1 + kNodes < 64, "a bit per column that a token may count for");

struct RoutingScratch {
  uint32_t first_token[kWorldSize + 1];
  uint64_t x_offset[kWorldSize];
  uint64_t fault[kRoutingWarps], found[kRoutingWarps][32];
  uint32_t scan[kRoutingWarps][32];
  uint32_t rank_rows[kWorldSize];     // of each rank: rows
  uint32_t first_row[kAllExperts];    // of each expert, on its rank
  uint32_t first_slot[kExperts + 1];  // of each of this rank's experts
  uint32_t first_item[kExperts + 1];
  uint32_t total[kColumns];
  // by warp and column: how many come before the warp's next group; then which tokens of the group count
  uint32_t before[kPlacers][kColumns], marks[kPlacers][kColumns];
  uint32_t ids[kPlacers][kGroup][kTopK | 1];  // of each token of the warp's group; an odd stride, so that lanes meet no bank twice
};

}  // namespace mkernel
