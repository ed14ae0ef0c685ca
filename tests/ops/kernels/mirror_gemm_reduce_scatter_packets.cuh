// The order of tiles, and how much room packets take. Included after the
// kernel.
#pragma once
#include "gemm_reduce_scatter_packets.cuh"
#include "mirror_reduce.cuh"
#include "mirror_shares.cuh"

// The end of the last packet of the last source's last row, in bytes from the
// start of their range.
MKC_API uint64_t mirror_packet_bytes(const void *shape) {
  const mkernel::Parameters p = mirror::parameters(0, shape);
  const mkernel::Tiles tiles(p);
  if (p.rows == 0)
    return 0;
  if constexpr (mkernel::Shape::kSwapped) { // of the last source's last column
                                            // of tiles, as many groups as rows
                                            // of any owner lie in
    uint64_t most = 0;
    for (uint32_t owner = 0; owner < mkernel::kWorldSize; ++owner) {
      const uint32_t groups = tiles.end_group(owner) - tiles.first_group(owner);
      most = groups > most ? groups : most;
    }
    if (most > tiles.owned_groups())
      return 0;
    return uint64_t(mkernel::kWorldSize) * tiles.tiles_n() *
           tiles.owned_groups() * mkernel::kGroupPackets * sizeof(ptx::Words);
  }
  const mkernel::Item last{
      tiles.items() - 1, tiles.tiles_n() - 1, tiles.slices() - 1, 0, 0, 0};
  const mkernel::Place at =
      tiles.place_of(nullptr, mkernel::kWorldSize - 1, last, p.rows - 1, 3);
  return reinterpret_cast<uint64_t>(at.first +
                                    (tiles.row_packets() - 1) * at.next + 1);
}
