// A barrier of all CTAs of a rank, which are all resident. Included after `struct Config`.
#pragma once
#include "comm/world.cuh"

namespace mkernel {

// All threads of all CTAs of the rank, alike: what any of them did before is visible to all of them after. `number`: of the barrier in this call, from
// 1 on; `name`: the number by which a report calls it, among the op's flags. `failed`: a word in shared memory. False: the call has failed.
template <class Parameters>
MK_DEVICE bool sync_grid(const Entered& entered, const Parameters& p, uint32_t number, uint32_t name, uint32_t& failed) {
  ptx::sync_cta();
  if (ptx::thread_index() == 0) {
    uint64_t* met = &control_block(p.world)->met;
    ptx::add_release(met, 1);
    const Awaited what{abi::kFlagChunk, name, p.world.rank};
    failed = !wait_ge(entered.call(), met, uint64_t(number) * ptx::cta_count(), what, p.world.timeout_ns);
  }
  ptx::sync_cta();
  return failed == 0;
}

}  // namespace mkernel
