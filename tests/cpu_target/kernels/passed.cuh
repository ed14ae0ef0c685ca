// One thread works for a while, and two of every other CTA only look whether it has ended.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct Parameters {
  uint64_t flag, steps;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  uint64_t* flag = reinterpret_cast<uint64_t*>(p.flag);
  if (ptx::cta_index() == 0 && ptx::thread_index() == 0) {
    for (uint64_t i = 0; i < p.steps; ++i) ptx::store_wait_read<0>();  // others may run meanwhile
    ptx::store_release_sys(flag, uint64_t{1});
  } else if (ptx::cta_index() != 0 && ptx::thread_index() < 2) {
    while (ptx::load_acquire_sys(flag) == 0) {
    }
  }
}

}  // namespace mkernel
