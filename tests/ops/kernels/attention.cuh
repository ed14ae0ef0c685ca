// Attention to a rank's own keys: the attention role by itself. Included by
// the generated source after `struct Config`.
#pragma once
#include "attention/role.cuh"
#include "comm/ring.cuh"

namespace mkernel {

// ---- config: as for every attention kernel
using Shape = AttentionShape<Config>;

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  uint64_t o, lse;
  uint64_t o_row_bytes, o_head_bytes, o_batch_bytes;
  uint32_t batches, heads, kv_heads;
  uint32_t rows, keys;  // per head
  uint32_t map_keys;    // rows of the maps of K and V; those after the keys are nobody's
  uint32_t tile_rows;   // of a q tile; at most kQueryRows
  uint32_t chunk;       // keys that are given a credit
  int32_t q_position;   // global, of the first row of q; the first key has 0
  float scale_log2;
  uint32_t waits;  // 1: chunks are waited for
  uint32_t parts;         // CTAs that share a q tile's keys
  uint64_t flag_offset;
  uint64_t partials;      // bytes from the start of the heap
  uint32_t missing;       // the chunk that never comes, if there is one
  uint32_t key_bytes;     // not 0: keys that have landed become NaNs; bytes between rows of K, and of V
  uint64_t k, v;          // of these
  abi::TensorMap q_map, k_map, v_map, o_map;
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

MK_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Keys from the first to the last one that the item's rows see, in chunks that
// no block reaches across.
struct Keys {
  const Parameters& p;
  uint32_t head, batch, end, at;
  MK_DEVICE bool next(KeyBlock& block) {
    if (at >= end) return false;
    const uint32_t in_chunk = at % p.chunk, rows = smaller(smaller(Shape::kKeyBlock, p.chunk - in_chunk), end - at);
    block = KeyBlock{0, int32_t(at), head, batch, rows, int32_t(at), at + rows < p.map_keys, p.waits != 0 && in_chunk == 0, kNoCredit};
    at += rows;
    if (p.waits != 0 && (at % p.chunk == 0 || at == end)) block.credit = (at - 1) / p.chunk;
    return true;
  }
};

struct LocalAttention {
  static constexpr bool kMoves = true, kSplits = Config::kSplits != 0;
  const Parameters& p;
  MK_DEVICE float scale_log2() const { return p.scale_log2; }
  MK_DEVICE bool repeats() const { return false; }
  MK_DEVICE uint32_t tiles() const { return (p.rows + p.tile_rows - 1) / p.tile_rows; }
  MK_DEVICE uint32_t take(uint32_t i) const {  // CTAs that have short tiles take more
    uint32_t number = ptx::cta_index();
    if (i > 0) {
      if (ptx::lane_index() == 0) number = ptx::cta_count() + ptx::atomic_add(&control_block(p.world)->tile_counter, 1);
      number = ptx::broadcast(number, 0);
    }
    return number < tiles() * p.heads * p.batches * p.parts ? number : kNoItem;
  }
  MK_DEVICE AttentionItem item(uint32_t part_number) const {
    const uint32_t number = part_number / p.parts;
    // The tiles of a head that have most keys come first.
    const uint32_t tile = tiles() - 1 - number % tiles(), plane = number / tiles(), row = tile * p.tile_rows;
    return AttentionItem{plane / p.heads, plane % p.heads, int32_t(row), smaller(p.tile_rows, p.rows - row), p.q_position + int32_t(row),
                         part_number % p.parts, p.parts};
  }
  MK_DEVICE Keys keys(uint32_t, const AttentionItem& item) const {
    const int32_t seen = item.position + int32_t(item.rows);  // with kCausal, by the last row
    const uint32_t end = !Shape::kCausal ? p.keys : seen > 0 ? smaller(p.keys, seen) : 0;
    const uint32_t each = ((end + p.parts - 1) / p.parts + Shape::kKeyBlock - 1) / Shape::kKeyBlock * Shape::kKeyBlock;
    return Keys{p, item.head / (p.heads / p.kv_heads), item.batch, smaller(end, (item.part + 1) * each), smaller(end, item.part * each)};
  }
  MK_DEVICE const abi::TensorMap* q_map() const { return &p.q_map; }
  MK_DEVICE const abi::TensorMap* k_map(const KeyBlock&) const { return &p.k_map; }
  MK_DEVICE const abi::TensorMap* v_map(const KeyBlock&) const { return &p.v_map; }
  MK_DEVICE bool is_ready(const Entered&, const KeyBlock& block) const { return block.row % 2 == 0 && block.row / p.chunk != p.missing; }
  struct MissingFlag {  // one that nobody raises
    const Parameters& p;
    MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return wait_flag(entered, p, 0, p.world.rank); }
  };
  MK_DEVICE bool wait(const Entered& entered, const KeyBlock& block) const {
    return block.row / p.chunk != p.missing || wait_all(entered, MissingFlag{p}, 1);
  }
  // Who waits for a credit may use the memory again, as this does. One item,
  // one head: nobody else reads these keys.
  MK_DEVICE void landed(const Entered&, uint32_t credit) const {
    if (p.key_bytes == 0) return;
    const uint32_t begin = credit * p.chunk, end = smaller(p.keys, begin + p.chunk), units = Config::kHeadDim / 8;
    const ptx::Words nans{{0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu}};
    for (uint32_t i = begin * units + ptx::lane_index(); i < end * units; i += 32) {
      const uint64_t at = uint64_t(i / units) * p.key_bytes + i % units * 16;
      ptx::store_global(reinterpret_cast<char*>(p.k) + at, nans);
      ptx::store_global(reinterpret_cast<char*>(p.v) + at, nans);
    }
  }
  MK_DEVICE void finish(const Entered&) const {}
  MK_DEVICE const abi::TensorMap* o_map() const { return &p.o_map; }
  MK_DEVICE char* o(const Entered&, const AttentionItem& item) const {
    return reinterpret_cast<char*>(p.o) + item.batch * p.o_batch_bytes + item.head * p.o_head_bytes + item.row * p.o_row_bytes;
  }
  MK_DEVICE uint64_t o_row_bytes() const { return p.o_row_bytes; }
  MK_DEVICE float* lse(const Entered&, const AttentionItem& item) const {
    return reinterpret_cast<float*>(p.lse) + (uint64_t(item.batch) * p.heads + item.head) * p.rows + item.row;
  }
  MK_DEVICE uint32_t plane_tile(const AttentionItem& item) const {
    return (item.batch * p.heads + item.head) * tiles() + item.row / p.tile_rows;
  }
  MK_DEVICE char* partial(const Entered& entered, const AttentionItem& item, uint32_t part) const {
    return shared_heap(entered, p.world.local_rank) + p.partials + (uint64_t(plane_tile(item)) * p.parts + part) * Shape::kPartialBytes;
  }
  MK_DEVICE uint32_t part_flag(const AttentionItem& item, uint32_t part) const { return plane_tile(item) * p.parts + part; }
  MK_DEVICE void raise_part(const Entered& entered, const AttentionItem& item) const {
    raise_flag_of(entered, p, part_flag(item, item.part), p.world.local_rank);
  }
  MK_DEVICE bool wait_parts(const Entered& entered, const AttentionItem& item) const {
    return wait_all(entered, PartFlags<LocalAttention>{*this, item}, item.parts - 1);
  }
  MK_DEVICE void move(const Call& call) const {
    if (ptx::cta_index() + 1 == ptx::cta_count()) announce_entry(call);
  }
};

MK_KERNEL(Shape::kThreads)(MK_GRID_CONSTANT Parameters p) {
  const Call call = begin_call(p.world, abi::kCompute);
  using Storage = AttentionStorage<Config>;
  static_assert(sizeof(Storage) <= Config::kSharedBytes, "shared memory");
  attention_role<Config>(call, LocalAttention{p}, *reinterpret_cast<Storage*>(ptx::shared_memory()));
}

}  // namespace mkernel
