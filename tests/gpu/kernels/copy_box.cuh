// One box by TMA from one tensor to another, through shared memory.
#pragma once
namespace mkernel {

struct alignas(64) Parameters {
  abi::World world;
  int32_t from[4], to[4];
  abi::TensorMap source, target;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  char* smem = ptx::shared_memory();
  uint64_t* bar = reinterpret_cast<uint64_t*>(smem + Config::kBoxBytes);
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::mbarrier_init_fence();
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive_expect(bar, Config::kBoxBytes);
    ptx::tma_load_3d(smem, &p.source, bar, p.from[0], p.from[1], p.from[2]);
    ptx::mbarrier_wait(bar, 0);
    ptx::tma_store_3d(&p.target, smem, p.to[0], p.to[1], p.to[2]);
    ptx::store_commit();
    ptx::store_wait<0>();
  }
}

}  // namespace mkernel
