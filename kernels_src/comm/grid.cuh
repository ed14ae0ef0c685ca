// A barrier of all CTAs of a rank, which are all resident. Included after `struct Config`.
#pragma once
#include "comm/world.cuh"

namespace mkernel {

// All threads of all CTAs of the rank, alike: what any of them did before is visible to all of them after. `flag`: of this rank alone, a flag of the
// op that nothing else raises in this call; the last CTA to come raises it. `failed`: a word in shared memory. False: the call has failed.
template <class Parameters>
MK_DEVICE bool sync_grid(const Entered& entered, const Parameters& p, uint32_t flag, uint32_t& failed) {
  ptx::sync_cta();
  if (ptx::thread_index() == 0) {
    abi::ControlBlock* control = control_block(p.world);
    if (ptx::atomic_add_acq_rel(&control->sync_counter, 1) + 1 == ptx::cta_count()) {
      control->sync_counter = 0;
      raise_flag_of(entered, p, flag, p.world.local_rank);
    }
    failed = !wait_flag(entered, p, flag, p.world.rank);
  }
  ptx::sync_cta();
  return failed == 0;
}

}  // namespace mkernel
