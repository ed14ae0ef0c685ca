// A k step of wgmma as one statement, or as an instruction each: test_cuda.py
// compares what becomes of them.
#pragma once
namespace mkernel {

struct alignas(64) Parameters {
  abi::World world;
  uint64_t memory, words;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  constexpr uint32_t kN = Config::kWidth;
  constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  constexpr ptx::Major kA = Config::kTransposed ? ptx::Major::kMN : ptx::Major::kK;
  constexpr uint32_t kByA = Config::kTransposed ? 16 * 128 : 32;
  float d[kN / 2];
  const uint64_t a = ptx::warp_descriptor(ptx::matrix_descriptor(ptx::shared_memory(), 16, 1024));
  const uint64_t b = ptx::advance_descriptor(a, 32768);
  uint32_t i = 0;
#pragma unroll 1
  do {
    if constexpr (Config::kWhole) {
      ptx::wgmma_step<kN, kElement, kA>(d, a, b, i > 0);
    } else {
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        ptx::wgmma<kN, kElement, kA, ptx::Major::kK>(d, ptx::advance_descriptor(a, k * kByA), ptx::advance_descriptor(b, k * 32), i > 0 || k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>(d);
    }
  } while (++i < p.words);
  ptx::wgmma_wait<0>(d);
#pragma unroll
  for (uint32_t j = 0; j < kN / 2; ++j) reinterpret_cast<volatile float*>(p.memory)[j] = d[j];
}

}  // namespace mkernel
