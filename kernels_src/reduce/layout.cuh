// The reductions' arguments, where partial tiles and sums lie, and which flags tell of them.
#pragma once
#include "comm/world.cuh"
#include "tile/shape.cuh"

namespace mkernel {

// ---- config: kN, kK, kIntraComm, kInterSend, kInterReduce (each may be kDynamic), kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor,
// kPartialFloat32, kCanonical, kNumNodes, kRanksPerNode, kSlices (1), kTwoShot, kShares, kCluster, kClusterN (with clusters of CTAs), kSwapped;
// kSharedBytes, kParameterBytes
using Shape = GemmShape<Config>;
constexpr uint64_t kPartialBytes = Partial<Config>::kTileBytes;
constexpr uint64_t kResultBytes = Shape::kPanels * kConsumerWarpgroups * kBlockBytes;  // a finished tile in the layout of its TMA stores

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  uint64_t partial_offset;  // data heap: (world size - 1, tiles) partial tiles from ranks of this node
  uint64_t sum_offset;      // data heap: (nodes - 1, tiles) sums of this node for owners on this rail, by distance of the owner's node
  uint64_t arrived_offset;  // data heap: (nodes - 1, tiles) sums of the other nodes, by their distance
  uint64_t result_offset;   // data heap, all-reduce: (nodes, tiles) finished tiles of this rank and its rail peers, by distance of the node
  uint64_t flag_offset;     // signal segment, in 64-bit words: a flag per partial tile, sum, chunk of arrived sums, finished tile
  uint32_t rows;            // of the owner's shard (reduce-scatter), of the whole (all-reduce)
  uint32_t tiles;           // per owner
  uint32_t taken;           // the same in what CTAs take at a time: tiles, or what a cluster takes of them, or what is left
  uint32_t group_taken;     // of these, of an owner, what is computed one after the other
  uint32_t group_m;         // tile rows that share columns of B
  uint32_t chunk_shift;     // a put has 1 << chunk_shift tiles
  uint32_t load_rows;       // of a tile of A, at most
  uint32_t shares;          // CTAs that share K of a tile (tile/shares.cuh)
  uint32_t interleaved;     // 1: own tiles, and those of each other rank, are computed in turn, not one owner's after the other's
  uint32_t whole_pairs;     // pairs of tiles, in raster order, before the last group, if that has a row of tiles without a neighbour;
  uint32_t last_pairs;      // and rows of pairs in that group
  uint32_t last_row;        // the last row of tiles of an owner,
  uint32_t tail_rows;       // and how many rows of A are loaded for its tiles
  uint32_t block_rows;      // of a tile, and the stages of its kernel, with swapped operands
  uint32_t stages;
  uint32_t c_row_bytes;   // of a row of the result to the next; used where threads store results
  uint64_t share_offset;  // signal segment: packets of shares
  uint64_t c;             // the result's first row; used likewise
  uint32_t reserved[10];  // the maps are 64-byte aligned
  abi::TensorMap a_map;   // (owners or 1, rows, K), boxes of 128 rows; a_tail_map: of tail_rows
  abi::TensorMap a_tail_map;
  abi::TensorMap b_map;
  abi::TensorMap c_map;  // (1, rows, N)
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

// ---- where things are
MK_DEVICE uint32_t chunk_tiles(const Parameters& p) { return 1u << p.chunk_shift; }
MK_DEVICE uint32_t num_chunks(const Parameters& p) { return (p.tiles + chunk_tiles(p) - 1) >> p.chunk_shift; }
// Partial tiles at the rank that adds them up, by distances: of the owner's node, and of their source's local rank. Its own are not stored.
MK_DEVICE uint32_t partial_index(const Parameters& p, uint32_t owner_distance, uint32_t source_distance, uint32_t index) {
  const uint32_t block = owner_distance == 0 ? source_distance - 1 : kR - 1 + (owner_distance - 1) * kR + source_distance;
  return block * p.tiles + index;
}
MK_DEVICE const char* own_heap(const Parameters& p) { return heap(p.world, p.world.local_rank); }
MK_DEVICE uint64_t partial_offset(const Parameters& p, uint32_t index) { return p.partial_offset + index * kPartialBytes; }
MK_DEVICE uint64_t sum_offset(const Parameters& p, uint32_t distance, uint32_t index) {
  return p.sum_offset + ((distance - 1) * p.tiles + index) * kPartialBytes;
}
MK_DEVICE uint64_t arrived_offset(const Parameters& p, uint32_t distance, uint32_t index) {
  return p.arrived_offset + ((distance - 1) * p.tiles + index) * kPartialBytes;
}
MK_DEVICE uint64_t result_offset(const Parameters& p, uint32_t distance, uint32_t index) {
  return p.result_offset + (distance * p.tiles + index) * kResultBytes;
}

// ---- flags, by number
MK_DEVICE uint32_t sum_flag(const Parameters& p, uint32_t distance, uint32_t index) {
  return (kWorldSize - 1 + distance - 1) * p.tiles + index;
}
MK_DEVICE uint32_t arrived_flag(const Parameters& p, uint32_t distance, uint32_t chunk) {
  return (kWorldSize - 1 + kNodes - 1) * p.tiles + (distance - 1) * num_chunks(p) + chunk;
}
MK_DEVICE uint32_t finished_flag(const Parameters& p, uint32_t distance, uint32_t local_rank, uint32_t index) {  // of that owner's tile
  return (kWorldSize - 1 + kNodes - 1) * p.tiles + (kNodes - 1) * num_chunks(p) + (distance * kR + local_rank) * p.tiles + index;
}

}  // namespace mkernel
