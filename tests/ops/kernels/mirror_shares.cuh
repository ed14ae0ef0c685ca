// How much room the packets of shares of K take. Included after the kernel.
#pragma once
#include "mirror_world.cuh"

// The end of the last share's last packet, in bytes from the start of their range.
MKC_API uint64_t mirror_share_bytes(const void* shape) {
  const mkernel::Parameters p = mirror::parameters(0, shape);
  return uint64_t(p.tiles) * p.shares * mkernel::Tiles(p).shares().next() * sizeof(ptx::Words);
}
