// What a box of a tensor is in shared memory: loaded there by TMA, written out as it lies. With kStores it then goes back to where it came from.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  abi::TensorMap source;
  uint64_t out;
  int64_t from[4];  // the last one of tensors with Config::kRank 4
  uint64_t reserved[3];
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  char* smem = ptx::shared_memory();
  uint64_t* bar = reinterpret_cast<uint64_t*>(smem + Config::kBoxBytes);
  if (ptx::thread_index() != 0) return;
  ptx::mbarrier_init(bar, 1);
  ptx::mbarrier_init_fence();
  ptx::mbarrier_arrive_expect(bar, Config::kBoxBytes);
  if constexpr (Config::kRank == 3) {
    ptx::tma_load_3d(smem, &p.source, bar, p.from[0], p.from[1], p.from[2]);
  } else {
    ptx::tma_load_4d(smem, &p.source, bar, p.from[0], p.from[1], p.from[2], p.from[3]);
  }
  ptx::mbarrier_wait(bar, 0);
  ptx::bulk_store(reinterpret_cast<char*>(p.out), smem, Config::kBoxBytes);
  if constexpr (Config::kStores) ptx::tma_store_3d(&p.source, smem, p.from[0], p.from[1], p.from[2]);
  ptx::store_commit();
  ptx::store_wait<0>();
}

}  // namespace mkernel
