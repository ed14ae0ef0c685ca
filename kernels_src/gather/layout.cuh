// The arguments of allgather_gemm, and where its chunks and flags are.
#pragma once
#include "comm/intra_comm.cuh"
#include "tile/gemm.cuh"
#include "tile/cluster_sums.cuh"

namespace mkernel {

// ---- config: kN, kK, kIntraComm, kInterSend (each may be kDynamic), kInterReduce (0), kBlockN, kStages, kResultBuffers, kFloat16, kBRowMajor,
// kNumNodes, kRanksPerNode, kSlices, kHasParts, kShares, kPackets (2: tagged); kSharedBytes, kParameterBytes
using Shape = GemmShape<Config>;
using Storage = CopyingStorage<GemmStorage<Config>>;
constexpr bool kPackets = Config::kPackets != 0, kTagged = Config::kPackets == 2;
static_assert(!kTagged || Shape::kCluster == 1, "each CTA brings its own rows");
static_assert(!kPackets || (kNodes == 1 && kR > 1 && Config::kIntraComm == 0), "packets travel inside a node, without CTAs for it");
// Also with one rank per node: into the own gather buffer.
constexpr bool kWarpsPush = Config::kIntraComm == 0 && kWorldSize > 1 && !kPackets;
static_assert(!kWarpsPush || kNodes == 1 || kR == 1, "what comes from other nodes is forwarded by intra_comm");
constexpr uint32_t kUnitBytes = kSwizzleBytes;      // of a row of the part map's box
constexpr bool kHasParts = Config::kHasParts != 0;  // K is such that it may travel in parts: all that copies has more to do
static_assert(!kHasParts || (kNodes == 1 && kR > 1), "puts are contiguous in a, and on one rank nothing travels");
constexpr uint32_t kMaxPartShift = kHasParts ? 2 : 0;
using KShares = Shares<Config>;
static_assert(!KShares::kMay || (kNodes == 1 && Config::kSlices == 1), "there are packets inside a node only");

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  uint64_t a;              // this rank's shard (rows, K), contiguous
  uint64_t gather_offset;  // data heap: (parts, world size, rows, K / parts); the own shard is there with span > 1 only
  uint64_t send_offset;    // data heap: where network sends read the shard, in the caller's array or in this rank's staging area
  uint64_t flag_offset;    // signal segment: one flag per (source rank, chunk)
  uint64_t packet_offset;  // signal segment: (tiles that are shared, shares, CTAs of a pair, warps, packets of a thread, 32)
  uint64_t ahead_offset;   // signal segment, with kPackets: comm/shard_packets.cuh, comm/tagged_packets.cuh
  uint32_t rows;           // M / W
  uint32_t whole_tiles;    // tiles 0 .. whole_tiles-1 are whole, the others are sliced
  uint32_t group_m;        // tile rows that share columns of B
  uint32_t part_blocks;    // blocks of a chunk's rows whose first parts travel before their second parts
  uint32_t chunk_shift;    // a chunk has 1 << chunk_shift rows
  uint32_t part_shift;     // K travels in 1 << part_shift parts: each a whole number of k steps, and its rows no shorter than kWarpStride
  uint32_t piece_rows;     // with parts, of the part map's box: so many rows (several only if they are whole rows of a part),
  uint32_t piece_units;    // and of each so many units, of which a row of a part has a multiple
  uint32_t load_rows;      // of a tile of A, at most
  uint32_t span;           // ranks whose shards are one plane: a divisor or a multiple of the ranks of a node, and a divisor of all
  uint32_t shares;         // CTAs, or pairs, that share K of a tile; 1 with several parts, slices or nodes
  uint32_t last_row;       // the last row of tiles of a plane,
  uint32_t tail_rows;      // and how many rows of A are loaded for its tiles
  uint32_t block_rows;     // of a tile,
  uint32_t stages;         // and with swapped operands stages for as many,
  uint32_t columns;        // and columns of a tile
  uint32_t stage_send;     // 1: inter_send first copies the shard to send_offset
  uint32_t c_row_bytes;    // of a row of the result to the next; used with shares
  uint32_t keeps;          // 1: the shards of tagged packets are wanted in the gather buffer, too
  uint32_t unused;         // 0: what comes next is aligned
  uint64_t c;              // its first row
  uint64_t reserved[3];    // the maps are 64-byte aligned
  abi::TensorMap a_map;    // (rows, K), boxes of 128 rows; a_tail_map: of tail_rows
  abi::TensorMap a_tail_map;
  abi::TensorMap part_map;    // the same for copies: (rows, K / 64, 64), boxes of (piece_rows, piece_units, 64), not swizzled
  abi::TensorMap gather_map;  // (parts * planes, rows of a plane, K / parts), boxes of 128 rows; gather_tail_map: of tail_rows
  abi::TensorMap gather_tail_map;
  abi::TensorMap b_map;
  abi::TensorMap b_slice_map;  // of a K-major B with boxes as wide as a slice
  // (planes, rows of a plane, N); c_tail_map: of what tiles of swapped operands have beyond whole blocks of rows. Of columns that are no whole panels
  // (GemmShape::kCut): (rows, columns of tiles, columns of a tile), all of them but the last, which has c_tail_map, (planes, rows of a plane, N).
  abi::TensorMap c_map;
  abi::TensorMap c_tail_map;
};

static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

// ---- where things are
// A chunk is 1 << chunk_shift rows (a block) of one part of K. Chunks travel, and are numbered, in groups of part_blocks blocks: the first part of
// all blocks of a group, then the second ... so that the tiles of a group can begin before their last part has come.
struct Chunk {
  uint32_t block, part;
};
MK_DEVICE uint32_t part_shift(const Parameters& p) { return kHasParts ? p.part_shift : 0; }
MK_DEVICE bool has_parts(const Parameters& p) { return kHasParts && p.part_shift != 0; }
MK_DEVICE uint64_t row_bytes(const Parameters& p) { return uint64_t(extent_k(p)) * 2; }
MK_DEVICE uint32_t part_k(const Parameters& p) { return extent_k(p) >> part_shift(p); }
MK_DEVICE uint32_t part_bytes(const Parameters& p) { return part_k(p) * 2; }  // of one row
MK_DEVICE uint32_t chunk_rows(const Parameters& p) { return 1u << p.chunk_shift; }
MK_DEVICE uint32_t num_blocks(const Parameters& p) { return (p.rows + chunk_rows(p) - 1) >> p.chunk_shift; }
MK_DEVICE uint32_t num_chunks(const Parameters& p) { return num_blocks(p) << part_shift(p); }
MK_DEVICE uint32_t blocks_of_group(const Parameters& p, uint32_t first) {
  const uint32_t left = num_blocks(p) - first;
  return left < p.part_blocks ? left : p.part_blocks;
}
MK_DEVICE uint32_t chunk_index(const Parameters& p, uint32_t block, uint32_t part) {
  if (!has_parts(p)) return block;
  const uint32_t first = block / p.part_blocks * p.part_blocks;
  return (first << part_shift(p)) + part * blocks_of_group(p, first) + (block - first);
}
MK_DEVICE Chunk chunk_at(const Parameters& p, uint32_t index) {
  if (!has_parts(p)) return Chunk{index, 0};
  const uint32_t first = index / (p.part_blocks << part_shift(p)) * p.part_blocks;
  const uint32_t in_group = index - (first << part_shift(p)), blocks = blocks_of_group(p, first);
  return Chunk{first + in_group % blocks, in_group / blocks};
}
MK_DEVICE uint32_t chunk_bytes(const Parameters& p, const Chunk& chunk) {
  const uint32_t left = p.rows - (chunk.block << p.chunk_shift);
  return (left < chunk_rows(p) ? left : chunk_rows(p)) * part_bytes(p);
}
MK_DEVICE uint64_t chunk_offset(const Parameters& p, const Chunk& chunk) {  // in the gather buffer, from shard_offset on; contiguous
  return (uint64_t(chunk.part) * kWorldSize * p.rows + (uint64_t(chunk.block) << p.chunk_shift)) * part_bytes(p);
}
MK_DEVICE const char* own_chunk(const Parameters& p,
                                const Chunk& chunk) {  // in this rank's shard, where the parts of a row lie side by side
  return reinterpret_cast<const char*>(p.a) + (uint64_t(chunk.block) << p.chunk_shift) * row_bytes(p) + chunk.part * part_bytes(p);
}
MK_DEVICE uint64_t shard_offset(const Parameters& p, uint32_t source) {
  return p.gather_offset + uint64_t(source) * p.rows * part_bytes(p);
}
MK_DEVICE bool keeps_own(const Parameters& p) { return kWorldSize > 1 && p.span > 1; }  // in the gather buffer, with a flag per chunk
MK_DEVICE uint32_t flag_index(const Parameters& p, uint32_t source, uint32_t chunk) { return source * num_chunks(p) + chunk; }
MK_DEVICE bool wait_chunk(const Entered& entered, const Parameters& p, uint32_t source, uint32_t chunk) {
  const abi::World& world = p.world;
  const uint32_t local = source % kR;  // its rail peer in this node forwards what comes from another node
  const uint32_t writer = source / kR == world.node || local == world.local_rank ? source : node_mate(world, local);
  return wait_flag(entered, p, flag_index(p, source, chunk), writer);
}

struct ChunkFlags {  // one part of the blocks of all shards, rank by rank, from block `first` on
  const Parameters& p;
  uint32_t first, part;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    const uint32_t blocks = num_blocks(p), source = (first + i) / blocks;
    return wait_chunk(entered, p, source, chunk_index(p, first + i - source * blocks, part));
  }
};

// What a lane of a warp reads of a chunk of this rank's shard, as copy_by_warp asks for it: the rows of a part do not follow each other. No division.
struct OwnRows {
  const char* at;
  uint32_t inside, run;  // of the bytes that follow each other, where it is, and how many they are
  uint64_t gap;          // from one run's end to the next
  MK_DEVICE ptx::Words operator()() {
    const ptx::Words words = ptx::load_input(at);
    at += kWarpStride, inside += kWarpStride;
    if (inside >= run) at += gap, inside -= run;  // once: a run is no shorter than the stride, or there is one
    return words;
  }
};
MK_DEVICE OwnRows own_rows(const Parameters& p, const Chunk& chunk) {
  const uint32_t begin = ptx::lane_index() * kWarpUnit, run = has_parts(p) ? part_bytes(p) : 0xffffffffu;
  return OwnRows{own_chunk(p, chunk) + begin, begin, run, row_bytes(p) - part_bytes(p)};
}

// Of this rank's shard, what is copied into its gather buffer, too: rows of which some tile has others beside, before `first` and from `last` on. The
// latter travel first: with the first rows of the next shard they fill a tile, which would else be the last that can begin.
struct KeptRows {
  uint32_t first, last;
  MK_DEVICE bool are_in(const Parameters& p, const Chunk& chunk) const {
    const uint32_t begin = chunk.block << p.chunk_shift, end = begin + chunk_rows(p);
    return begin < first || (end < p.rows ? end : p.rows) > last;
  }
  MK_DEVICE uint32_t number(const Parameters& p, uint32_t index) const {  // of the chunk that travels at this place
    if (last >= p.rows) return index;
    const Chunk chunk = chunk_at(p, index);
    const uint32_t block = chunk.block + (last >> p.chunk_shift);
    return chunk_index(p, block < num_blocks(p) ? block : block - num_blocks(p), chunk.part);
  }
};

}  // namespace mkernel
