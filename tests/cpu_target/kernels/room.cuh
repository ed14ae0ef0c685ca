// Each CTA says that it has begun, and how many had. `waits`: not before all have, or until a deadline.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct Parameters {
  uint64_t begun, out, waits, timeout_ns;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  ptx::wait_for_grids();
  if (ptx::thread_index() != 0) return;
  uint64_t* begun = reinterpret_cast<uint64_t*>(p.begun);
  const uint64_t all = p.waits != 0 ? ptx::cta_count() : 0, deadline = ptx::clock_ns() + p.timeout_ns;
  ptx::add_release(begun, 1);
  while (ptx::load_acquire_sys(begun) < all && ptx::clock_ns() < deadline) ptx::pause(begun, all, deadline);
  reinterpret_cast<uint64_t*>(p.out)[ptx::cta_index()] = ptx::load_acquire_sys(begun);
}

}  // namespace mkernel
