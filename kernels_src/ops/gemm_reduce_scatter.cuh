// gemm_reduce_scatter: C (M/W, N) = this rank's rows of the sum over all ranks of A (M, K/W) * B (K/W, N). Included by the generated source
// after `struct Config`. Who sends what to whom: reduce/owned_tiles.cuh.
#pragma once
#include "reduce/owned_tiles.cuh"
#include "reduce/send.cuh"

namespace mkernel {

// An owner's tiles are those of its rows.
struct Tiles : OwnedTiles<Tiles> {
  using OwnedTiles<Tiles>::OwnedTiles;
  MK_DEVICE RasterPosition position(uint32_t, uint32_t index) const { return raster(index, tile_rows(), tiles_n(), p.group_m); }
  MK_DEVICE uint32_t count_of(uint32_t) const { return p.tiles; }
  MK_DEVICE bool exists(uint32_t, uint32_t) const { return true; }  // known to the compiler
  static constexpr bool kOwnRows = true;
  MK_DEVICE bool taken_exists(uint32_t) const { return true; }
  MK_DEVICE bool is_taken(const TileCoordinate&) const { return true; }
  MK_DEVICE uint32_t first_taken(uint32_t) const { return 0; }
  MK_DEVICE uint32_t first_tile(uint32_t) const { return 0; }
  MK_DEVICE int32_t a_plane(const TileCoordinate& c, uint32_t) const { return c.plane; }
  MK_DEVICE void store(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    if (is_own(c)) {
      store_result(entered, c, panel, warpgroup, smem);
    } else {
      store_partial(entered, c, panel, warpgroup, smem);
    }
  }
  MK_DEVICE bool announces(const TileCoordinate& c) const { return !is_own(c) && is_there(c); }
  MK_DEVICE void raise(const Entered& entered, uint32_t tile) const { raise_partial(entered, coordinate(tile)); }
};

MK_DEVICE void inter_send_role(const Call& call, const Parameters& p, uint32_t index) {  // one warp
  if constexpr (kNodes > 1) {
    const Tiles tiles(p);
    send_tiles(call, p, SumsToSend<Tiles>{tiles}, 1 + index, index, 2);
  }
}

// ---- the role switch. inter_reduce is compute that makes its sums first.
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t cta = ptx::cta_index();
  const abi::Role role = role_of(p, cta);
  const Call call = kEarly ? coming_call(p.world, role) : begin_call_ahead(p.world, role);
  if (ptx::warp_index() == 0 && role == abi::kInterSend) inter_send_role(call, p, cta - first_inter_send(p));
  compute_role(call, Tiles(p, role == abi::kInterReduce ? cta - first_inter_reduce(p) : kStop), shared_storage<GemmStorage<Config>>());
}

}  // namespace mkernel
