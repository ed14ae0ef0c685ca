// Tells the host this device's time, each time it asks: so that traces of several ranks can be laid over each other (mkernel/runtime/clock.py).
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  uint64_t asked;     // host memory: how many answers the host wants by now; the answers follow from kAnswers on
  uint64_t limit_ns;  // a host that does not ask for so long has gone
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "mkernel/runtime/clock.py");
constexpr uint32_t kAnswers = 16;  // in words: on a cache line of their own

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  if (ptx::warp_index() != 0 || ptx::lane_index() != 0) return;
  uint64_t* asked = reinterpret_cast<uint64_t*>(p.asked);
#pragma unroll 1
  for (uint32_t round = 1; round <= Config::kRounds; ++round) {
    const uint64_t end = ptx::clock_ns() + p.limit_ns;
    while (ptx::load_acquire_sys(asked) < round) {
      if (ptx::clock_ns() >= end) return;
      ptx::pause(asked, round, end);
    }
    ptx::store_release_sys(asked + kAnswers + round, ptx::clock_ns());
  }
}

}  // namespace mkernel
