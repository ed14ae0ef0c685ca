// One tile of 64 x kBlockN per CTA: TMA loads by one thread -> wgmma -> stmatrix -> TMA store, operands in any layout.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  abi::TensorMap a, b, c;
  uint64_t steps;  // of 64 along K
  uint64_t tiles_m;
  uint64_t reserved[6];
};

constexpr uint32_t kBlockN = Config::kBlockN, kStages = 3, kPanels = kBlockN / 64;
constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
constexpr ptx::Major kMajorA = Config::kAColumns ? ptx::Major::kMN : ptx::Major::kK,
                     kMajorB = Config::kBRows ? ptx::Major::kMN : ptx::Major::kK;
constexpr uint32_t kBytesA = 64 * 128, kBytesB = kBlockN * 128;

struct Storage {
  alignas(1024) char a[kStages][kBytesA];
  alignas(1024) char b[kStages][kBytesB];
  alignas(1024) char c[kPanels][64 * 128];
  uint64_t filled[kStages], consumed[kStages];
};
static_assert(sizeof(Storage) <= Config::kSharedBytes);

MK_DEVICE void produce(const Parameters& p, Storage& s, uint32_t m, uint32_t n) {
  for (uint32_t step = 0; step < p.steps; ++step) {
    const uint32_t stage = step % kStages;
    ptx::mbarrier_wait(&s.consumed[stage], (step / kStages & 1) ^ 1);
    ptx::mbarrier_arrive_expect(&s.filled[stage], kBytesA + kBytesB);
    const int32_t k = step * 64, row = m * 64, column = n * kBlockN;
    ptx::tma_load_3d(s.a[stage], &p.a, &s.filled[stage], Config::kAColumns ? row : k, Config::kAColumns ? k : row, 0);
    if constexpr (Config::kBRows) {
      for (uint32_t panel = 0; panel < kPanels; ++panel) {
        ptx::tma_load_3d(s.b[stage] + panel * 64 * 128, &p.b, &s.filled[stage], column + panel * 64, k, 0);
      }
    } else {
      ptx::tma_load_3d(s.b[stage], &p.b, &s.filled[stage], k, column, 0);
    }
  }
}

MK_DEVICE void consume(const Parameters& p, Storage& s, uint32_t m, uint32_t n) {
  const uint32_t t = ptx::thread_index(), lane = ptx::lane_index();
  float d[kBlockN / 2];
  for (uint32_t step = 0; step < p.steps; ++step) {
    const uint32_t stage = step % kStages;
    ptx::mbarrier_wait(&s.filled[stage], step / kStages & 1);
    ptx::wgmma_fence();
    for (uint32_t k = 0; k < 64; k += 16) {
      const uint64_t a = ptx::matrix_descriptor(s.a[stage] + (Config::kAColumns ? k * 128 : k * 2), 16, 1024);
      const uint64_t b = Config::kBRows ? ptx::matrix_descriptor(s.b[stage] + k * 128, 64 * 128, 1024)
                                        : ptx::matrix_descriptor(s.b[stage] + k * 2, 16, 1024);
      ptx::wgmma<kBlockN, kElement, kMajorA, kMajorB>(d, a, b, step > 0 || k > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>(d);
    if (step > 0 && lane == 0) ptx::mbarrier_arrive(&s.consumed[(step - 1) % kStages]);
  }
  ptx::wgmma_wait<0>(d);
  const uint32_t row = t / 32 * 16 + lane % 16;
  for (uint32_t panel = 0; panel < kPanels; ++panel) {
    for (uint32_t j = 0; j < 4; ++j) {
      const float* e = &d[panel * 32 + j * 8];
      ptx::stmatrix_x4(s.c[panel] + row * 128 + ((2 * j + lane / 16) ^ (row % 8)) * 16, ptx::pack<kElement>(e[0], e[1]),
                       ptx::pack<kElement>(e[2], e[3]), ptx::pack<kElement>(e[4], e[5]), ptx::pack<kElement>(e[6], e[7]));
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(1, 128);
  if (t == 0) {
    for (uint32_t panel = 0; panel < kPanels; ++panel) ptx::tma_store_3d(&p.c, s.c[panel], n * kBlockN + panel * 64, m * 64, 0);
    ptx::store_commit();
    ptx::store_wait_read<0>();
  }
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  if (ptx::thread_index() == 0) {
    for (uint32_t i = 0; i < kStages; ++i) ptx::mbarrier_init(&s.filled[i], 1), ptx::mbarrier_init(&s.consumed[i], 4);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  const uint32_t m = ptx::cta_index() % p.tiles_m, n = ptx::cta_index() / p.tiles_m;
  if (ptx::thread_index() < 128) {
    consume(p, s, m, n);
  } else if (ptx::thread_index() == 128) {
    produce(p, s, m, n);
  }
}

}  // namespace mkernel
