// gemm_allreduce, one-shot: C (M, N) = the sum over all ranks of A (M, K/W) * B (K/W, N), where little is sent. Included by the generated source
// after `struct Config`. Everyone adds up the partial tiles of all ranks itself, in the order of the ranks: one step instead of two, more bytes. Inside a
// node a tile goes to everyone by bulk stores; inter_send puts it to the rail peers, from whose heaps their node mates add it.
#pragma once
#include "comm/ring.cuh"
#include "reduce/layout.cuh"
#include "tile/gemm.cuh"

namespace mkernel {

static_assert(Config::kIntraComm == 0 && Config::kInterReduce == 0, "no such roles");
static_assert(!Shape::kPaired, "few rows are no two rows of tiles");

// p.tiles is the number of all tiles; every rank has room for (world size, tiles) partial tiles, and a flag for each. Of ranks on other nodes only
// the places of the rail peers are used, and only the flags of chunks' first tiles.
MK_DEVICE uint32_t slot(const Parameters& p, uint32_t source, uint32_t tile) { return source * p.tiles + tile; }

// First all tiles are multiplied and sent, then all are added up.
struct Tiles : BasicOp<Config, Parameters> {
  using BasicOp::BasicOp;
  // A tile has one part. With a constant 1 NVRTC (13.5) spills 224 bytes at kBlockN = 256.
  static constexpr uint32_t kParts = 2;
  static constexpr bool kAdds = true, kAnnounces = true, kSums = true;

  MK_DEVICE uint32_t num_tiles() const { return 2 * p.tiles; }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {
    const bool is_sum = tile >= p.tiles;
    const uint32_t index = is_sum ? tile - p.tiles : tile;
    const RasterPosition at = raster(index, tile_rows(), tiles_n(), p.group_m);
    return TileCoordinate{p.world.rank, at.row, at.column, 0, index, is_sum};
  }
  MK_DEVICE uint32_t parts(const TileCoordinate&) const { return 1; }
  MK_DEVICE bool waits(const TileCoordinate& c, uint32_t) const { return c.is_sum; }
  MK_DEVICE uint32_t steps(const TileCoordinate& c, uint32_t) const { return c.is_sum ? 0 : steps_k(); }
  MK_DEVICE uint32_t addends(const TileCoordinate& c, uint32_t) const { return c.is_sum ? kWorldSize : 0; }
  MK_DEVICE const char* addend(const TileCoordinate& c, uint32_t source) const {
    const bool remote = source / kR != p.world.node;
    return heap(p.world, remote ? source % kR : p.world.local_rank) + partial_offset(p, slot(p, source, c.index));
  }
  struct SlotFlags {  // by source rank
    const Parameters& p;
    uint32_t index;
    MK_DEVICE uint32_t flag(uint32_t source) const {
      const bool remote = source / kR != p.world.node;
      return slot(p, source, remote ? index >> p.chunk_shift << p.chunk_shift : index);
    }
    MK_DEVICE bool wait(const Entered& entered, uint32_t source) const {
      const uint32_t writer = raiser(p.world, source);
      return wait_flag(entered, p, flag(source), writer, writer != source ? kSecondHand : 1);
    }
  };
  MK_DEVICE bool wait_inputs(const Entered& entered, const TileCoordinate& c, uint32_t) const {  // warp function
    return wait_all(entered, SlotFlags{p, c.index}, kWorldSize);
  }
  MK_DEVICE bool is_partial(const TileCoordinate& c) const { return !c.is_sum; }
  MK_DEVICE char* destination(const Entered& entered, const TileCoordinate& c, uint32_t i) const {
    return shared_heap(entered, local_peer(p.world, i)) + partial_offset(p, slot(p, p.world.rank, c.index));
  }
  MK_DEVICE void store(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    if (c.is_sum) return store_result(entered, c, panel, warpgroup, smem);
    const uint32_t bytes = block_bytes(rows(c), warpgroup);
#pragma unroll
    for (uint32_t i = 0; i < kR; ++i) {
      if (bytes != 0) ptx::bulk_store(destination(entered, c, i) + (panel * kConsumerWarpgroups + warpgroup) * kBlockBytes, smem, bytes);
    }
  }
  MK_DEVICE bool announces(const TileCoordinate& c) const { return !c.is_sum; }
  MK_DEVICE void raise(const Entered& entered, uint32_t tile) const {  // warp function
    raise_flag(entered, p, slot(p, p.world.rank, coordinate(tile).index), 0);
  }
};

// ---- inter_send: chunks of this rank's partial tiles to the rail peers (warp 0), beside word of theirs to the node (warp 1)
struct PartialsToSend {
  const Parameters& p;
  uint32_t first, count;  // slots
  MK_DEVICE uint32_t end() const { return num_chunks(p); }
  MK_DEVICE bool prepare(const Entered& entered, uint32_t chunk) {
    const uint32_t begin = chunk << p.chunk_shift, left = p.tiles - begin;
    first = slot(p, p.world.rank, begin), count = left < chunk_tiles(p) ? left : chunk_tiles(p);
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      if (!wait_flag(entered, p, first + i, p.world.rank)) return false;
    }
    return true;
  }
  MK_DEVICE uint32_t puts() const { return kNodes - 1; }
  MK_DEVICE Put put(const Call& call, uint32_t channel, uint32_t i) const {  // from the next node on
    const uint64_t offset = partial_offset(p, first);
    return Put{channel, rail_peer(p.world, 1 + i), offset, offset, count * kPartialBytes, flag_offset(p, first), call.epoch()};
  }
};

// Tells the node's other ranks of the chunks that the rail peers have put here. One warp of each inter_send CTA.
MK_DEVICE void forward_partials(const Entered& entered, const Parameters& p, uint32_t index) {
  bool ok = true;
#pragma unroll 1
  for (uint32_t chunk = index; ok && chunk < num_chunks(p); chunk += num_inter_send(p)) {
#pragma unroll 1
    for (uint32_t distance = 1; ok && distance < kNodes; ++distance) {
      const uint32_t source = rail_peer(p.world, distance), flag = slot(p, source, chunk << p.chunk_shift);
      ok = ptx::all_of_warp(ptx::lane_index() != 0 || wait_flag(entered, p, flag, source));
      ptx::sync_warp();
      if (ok) raise_flag(entered, p, flag, 1);
    }
  }
}

MK_DEVICE void inter_send_role(const Call& call, const Parameters& p, uint32_t index) {  // both warps
  if constexpr (kNodes > 1) {
    const MaybeEntered entered = enter(call);
    if (entered && ptx::warp_index() == 1) forward_partials(*entered, p, index);
    if (!entered || ptx::thread_index() != 0) return;
    Trace trace(p.world, 2);
    PartialsToSend chunks{p, 0, 0};
    put_chunks(*entered, chunks, 1 + index, index, num_inter_send(p), trace);
  }
}

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = kEarly ? coming_call(p.world, role) : begin_call_ahead(p.world, role);
  if (ptx::warp_index() < (kR > 1 ? 2 : 1) && role == abi::kInterSend) inter_send_role(call, p, cta - first_inter_send(p));
  compute_role(call, Tiles(p), shared_storage<GemmStorage<Config>>());
}

}  // namespace mkernel
