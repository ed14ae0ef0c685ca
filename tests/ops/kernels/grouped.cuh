// A grouped GEMM by itself: every rank multiplies rows of its own. CTAs for
// intra_comm copy finished tiles, each when its flag says that it is there.
// Included by the generated source after `struct Config`.
#pragma once
#include "comm/ring.cuh"
#include "tile/gemm.cuh"
#include "tile/grouped.cuh"

namespace mkernel {

// ---- config: as for every GEMM, without inter_send and inter_reduce, and
// kGated, kMaxExperts, kEnters (1: compute_role announces the entry)
using Shape = GemmShape<Config>;
using Experts = ExpertTable<Config::kMaxExperts>;

// ---- arguments
struct alignas(64) Parameters {
  abi::World world;
  abi::Fields fields;
  uint64_t counts;  // (experts) int32: rows of each
  uint64_t c;       // (rows of all, N), packed
  uint64_t copy;    // the same, copied tile by tile; contiguous
  uint64_t flag_offset;
  uint32_t experts;
  uint32_t c_row_bytes;
  uint32_t group_m;
  uint32_t aligned;  // 1: rows of A begin at slots, else they are packed
  float clamp;
  uint32_t reserved[11];       // the maps are 64-byte aligned
  abi::TensorMap a_map;        // (rows, K), boxes of 128 rows
  abi::TensorMap a_short_map;  // the same, boxes of 64 rows
  abi::TensorMap b_map;        // (experts, K, N or 2 N)
  abi::TensorMap c_map;        // (rows, N)
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

struct Storage {
  GemmStorage<Config> gemm;
  Experts experts;
};

struct Tiles : GroupedTiles<Config, Parameters, Config::kMaxExperts> {
  using GroupedTiles::GroupedTiles;
  static constexpr bool kAnnounces = true, kAnnouncesEntry = Config::kEnters != 0;
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return false; }
  MK_DEVICE bool wait_inputs(const Entered&, const TileCoordinate&, uint32_t) const { return true; }
  MK_DEVICE int32_t a_row(const TileCoordinate& c) const { return p.aligned != 0 ? slot_row(c) : packed_row(c); }
  MK_DEVICE bool announces(const TileCoordinate&) const { return true; }
  MK_DEVICE void raise(const Entered& entered, uint32_t tile) const {
    if (ptx::lane_index() == 0) raise_flag_of(entered, p, tile, p.world.local_rank);
  }
};

struct TileFlag {
  const Parameters& p;
  uint32_t tile;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return wait_flag(entered, p, tile, p.world.rank); }
};

// Each warp copies tiles of its own. Reads what other CTAs have written by TMA
// and by ordinary stores.
MK_DEVICE void copy_tiles(const Call& call, const Parameters& p, const Tiles& tiles) {
  const MaybeEntered entered = enter(call);
  if (!entered) return;
  constexpr uint32_t kWarps = kGemmThreads / 32;
#pragma unroll 1
  for (uint32_t tile = ptx::cta_index() * kWarps + ptx::warp_index(); tile < tiles.num_tiles(); tile += num_intra_comm(p) * kWarps) {
    if (!wait_all(*entered, TileFlag{p, tile}, 1)) return;
    const TileCoordinate c = tiles.coordinate(tile);
    const uint32_t n = extent_n(p), begin = first_column<Config>(c);
    const uint32_t left = n - begin, units = (left < Shape::kResultN ? left : Shape::kResultN) / 8;
#pragma unroll 1
    for (uint32_t i = ptx::lane_index(); i < units * tiles.rows(c); i += 32) {
      const uint64_t row = tiles.packed_row(c) + i / units, column = begin + i % units * 8;
      const char* from = reinterpret_cast<const char*>(p.c) + row * p.c_row_bytes + column * 2;
      ptx::store_global(reinterpret_cast<char*>(p.copy) + (row * n + column) * 2, ptx::load_global(from));
    }
  }
}

MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& storage = shared_storage<Storage>();
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = begin_call(p.world, role);
  if (Config::kEnters == 0 && cta == 0 && ptx::warp_index() == 0) announce_entry(call);
  storage.experts.build(p.experts, [&](uint32_t e) { return reinterpret_cast<const uint32_t*>(p.counts)[e]; });
  const Tiles tiles(p, storage.experts);
  if (role == abi::kIntraComm) copy_tiles(call, p, tiles);
  compute_role(call, tiles, storage.gemm);
}

}  // namespace mkernel
