// The order of tiles, and how much room packets take. Included after the
// kernel.
#pragma once
#include "gemm_allreduce_packets.cuh"
#include "mirror_reduce.cuh"
#include "mirror_shares.cuh"

// The end of the last block of packets that the exchange reaches, in bytes from
// the start of their range.
MKC_API uint64_t mirror_packet_bytes(const void *shape) {
  const mkernel::Parameters p = mirror::parameters(0, shape);
  const mkernel::Tiles tiles(p);
  if constexpr (mkernel::Shape::kSwapped) {
    const uint32_t last =
        Config::kTwoShot == 0
            ? mkernel::kWorldSize * tiles.blocks()
            : mkernel::kWorldSize * tiles.owned_blocks() + tiles.blocks();
    return last * uint64_t(tiles.block_rows() / mkernel::kGroupRows) * 32 *
           sizeof(ptx::Words);
  }
  const uint64_t groups = tiles.items() * tiles.warps();
  const uint64_t blocks = Config::kTwoShot == 0
                              ? mkernel::kWorldSize * groups
                              : mkernel::kWorldSize * tiles.owned() + groups;
  return blocks * tiles.warp_packets() * sizeof(ptx::Words);
}
