// One thread of one CTA: raises a flag of its peer and waits for its own, `rounds` times, within a deadline.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct Parameters {
  uint64_t own, peer;  // flags
  uint64_t first, rounds;
  uint64_t timeout_ns;
  uint64_t result;  // uint64_t[2]: rounds done, nanoseconds
  uint64_t abort;   // flag; 0: none
  uint64_t raises;  // 0: waits only
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  if (ptx::thread_index() != 0) return;
  uint64_t* result = reinterpret_cast<uint64_t*>(p.result);
  const uint64_t* own = reinterpret_cast<uint64_t*>(p.own);
  const uint64_t* abort = reinterpret_cast<uint64_t*>(p.abort);
  const uint64_t begin = ptx::clock_ns(), deadline = begin + p.timeout_ns;
  uint64_t done = 0;
  for (; done < p.rounds; ++done) {
    const uint64_t value = p.first + done;
    if (p.raises != 0) ptx::store_release_sys(reinterpret_cast<uint64_t*>(p.peer), value);
    bool arrived = false, leave = false;
    while (!(arrived = ptx::load_acquire_sys(own) >= value) && !leave) {
      ptx::pause(own, value, deadline);
      leave = ptx::clock_ns() >= deadline || (p.abort != 0 && ptx::load_acquire_sys(abort) != 0);
    }
    if (!arrived) break;
  }
  result[0] = done;
  result[1] = ptx::clock_ns() - begin;
}

}  // namespace mkernel
