// gemm_allreduce, one-shot, for the fewest rows: C (M, N) = the sum over all ranks of A (M, K/W) * B (K/W, N), inside one node. Included by the
// generated source after `struct Config`. As gemm_allreduce_one_shot.cuh, but values travel in packets: 64-bit words of two values and the call's
// number, each stored at once. A packet is its own flag, so nothing waits for stores to complete before it tells of them; it costs twice the
// bytes. The threads that multiplied a tile send it, wait for the others' packets of it, and add up.
#pragma once
#include "reduce.cuh"

namespace mkernel {

struct Storage {
  GemmStorage<Config> gemm;
};
static_assert(sizeof(Storage) <= Config::kSharedBytes, "shared memory");
static_assert(kNodes == 1 && kCommunicating == 0, "no such roles");

// Packets lie in a range of the signal segment that holds nothing else, so that a word that is left from an earlier call is always smaller than
// one of this call: (source rank, tile, warp of 16 rows, word, lane). p.partial_offset is its start, p.tiles the number of all tiles.
constexpr uint32_t kWords = Config::kBlockN / 4;                         // per thread: half of them of each of its two rows
constexpr uint32_t kBatch = kWorldSize >= 16 ? 2 : 32 / kWorldSize / 2;  // words of every source that a thread waits for at once
static_assert(kWords / 2 % kBatch == 0, "whole batches");

struct Tiles : BasicOp {
  const Parameters& p;
  MK_DEVICE explicit Tiles(const Parameters& parameters) : p(parameters) {}
  static constexpr uint32_t kParts = 1, kCommCtas = 0;
  static constexpr bool kExchanges = kWorldSize > 1;

  MK_DEVICE uint32_t num_tiles() const { return p.tiles; }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {
    const RasterPosition at = raster<Config>(tile, (p.rows + Shape::kBlockM - 1) / Shape::kBlockM, p.group_m);
    return TileCoordinate{p.world.rank, at.row, at.column, 0, tile, false};
  }
  MK_DEVICE uint32_t parts(const TileCoordinate&) const { return 1; }
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return false; }
  MK_DEVICE bool wait_inputs(const Call&, const TileCoordinate&, uint32_t) const { return true; }
  MK_DEVICE uint32_t steps(const TileCoordinate&, uint32_t) const { return Shape::kStepsK; }
  MK_DEVICE const abi::TensorMap* a_map(const TileCoordinate&) const { return &p.a_map; }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return c.m * Shape::kBlockM; }
  MK_DEVICE int32_t a_plane(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE int32_t a_k(const TileCoordinate&, uint32_t) const { return 0; }
  MK_DEVICE const abi::TensorMap* b_map(const TileCoordinate&) const { return &p.b_map; }
  MK_DEVICE void store(const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    ptx::tma_store_3d(&p.c_map, smem, first_column<Config>(c) + panel * kPanel, c.m * Shape::kBlockM + warpgroup * kBlockRows, 0);
  }

  // ---- the exchange; each thread for itself
  MK_DEVICE uint64_t* packets(uint32_t local_rank, uint32_t source, const TileCoordinate& c, uint32_t warp) const {
    const uint32_t warps = p.rows < Shape::kBlockM ? (p.rows + kWarpRows - 1) / kWarpRows : Shape::kBlockM / kWarpRows;
    const uint64_t first = ((uint64_t(source) * p.tiles + c.index) * warps + warp) * kWords * 32;
    return reinterpret_cast<uint64_t*>(signals(p.world, local_rank) + p.partial_offset) + first + ptx::lane_index();
  }
  // Word w of a thread: the values (d[e], d[e + 1]).
  MK_DEVICE static constexpr uint32_t element(uint32_t w) { return w % (kWords / 2) * 4 + w / (kWords / 2) * 2; }

  MK_DEVICE void exchange(const Call& call, float (&d)[Config::kBlockN / 2], const TileCoordinate& c) const {
    const uint32_t warp = ptx::thread_index() / 32 - kWarpgroup / 32, row = warp * kWarpRows + ptx::lane_index() / 4;
    const uint64_t stamp = call.epoch << 32;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (c.m * Shape::kBlockM + row + half * 8 >= p.rows) continue;
#pragma unroll 1
      for (uint32_t i = 1; i < kWorldSize; ++i) {
        uint64_t* to = packets((p.world.rank + i) % kWorldSize, p.world.rank, c, warp);
#pragma unroll
        for (uint32_t w = half * kWords / 2; w < (half + 1) * kWords / 2; ++w) {
          ptx::store_relaxed_sys(to + w * 32, stamp | ptx::pack<Shape::kElement>(d[element(w)], d[element(w) + 1]));
        }
      }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (c.m * Shape::kBlockM + row + half * 8 >= p.rows) continue;
#pragma unroll
      for (uint32_t w = half * kWords / 2; w < (half + 1) * kWords / 2; w += kBatch) receive(call, d, c, warp, w, stamp);
    }
  }
  // Adds up words w .. w + kBatch - 1 of all ranks, in the order of the ranks; the own values rounded, as the others see them.
  MK_DEVICE void receive(const Call& call, float (&d)[Config::kBlockN / 2], const TileCoordinate& c, uint32_t warp, uint32_t w,
                         uint64_t stamp) const {
    uint64_t packet[kWorldSize][kBatch];
    while (true) {
      const uint64_t* missing = nullptr;
      uint32_t source = 0;
#pragma unroll
      for (uint32_t s = 0; s < kWorldSize; ++s) {
        const uint64_t* from = packets(p.world.rank, s, c, warp) + w * 32;
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
          const uint32_t e = element(w + b);
          packet[s][b] = s == p.world.rank ? stamp | ptx::pack<Shape::kElement>(d[e], d[e + 1]) : ptx::load_relaxed_sys(from + b * 32);
          if (packet[s][b] < stamp) missing = from + b * 32, source = s;
        }
      }
      if (missing == nullptr) break;
      if (!wait_ge(call, missing, stamp, Awaited{abi::kFlagChunk, c.index, source}, p.world.timeout_ns)) return;
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (uint32_t s = 0; s < kWorldSize; ++s) {
        float x, y;
        ptx::unpack<Shape::kElement>(static_cast<uint32_t>(packet[s][b]), x, y);
        low += x, high += y;
      }
      d[element(w + b)] = low, d[element(w + b) + 1] = high;
    }
  }
};

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const Call call = begin_call(p.world, abi::kCompute);
  if (ptx::thread_index() == 0) gemm_init(storage.gemm);
  ptx::sync_cta();
  compute_role(call, Tiles(p), storage.gemm);
}

}  // namespace mkernel
