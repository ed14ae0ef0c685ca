// Counts the float32 NaNs, of all there are, that ptx::pack does not make 0x7fff, in either half.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct Parameters {
  uint64_t wrong;  // uint32_t: zero
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  constexpr uint32_t kInfinity = 0x7f800000, kPayloads = (1u << 23) - 1;  // of either sign
  uint32_t wrong = 0;
#pragma unroll 1
  for (uint32_t i = ptx::thread_index(); i < 2 * kPayloads; i += Config::kThreads) {
    const float nan = ptx::from_bits((i / kPayloads) << 31 | (kInfinity + 1 + i % kPayloads));
    if (ptx::pack<kElement>(nan, nan) != 0x7fff7fff) ++wrong;
  }
  ptx::atomic_add(reinterpret_cast<uint32_t*>(p.wrong), wrong);
}

}  // namespace mkernel
