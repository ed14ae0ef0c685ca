// Recoverable errors: a call that its op refuses, because what the ranks have passed does not go together, and after which the world stays usable.
//
// Every rank finds the error in data that all of them have exchanged inside the call, so that all come to the same verdict; one thread of each rank
// reports it, all CTAs leave before anything is moved, by leave_refused. The rank's later calls are then skipped, by nobody entered, until its host
// has raised the error: hosts notice at different times and have launched different numbers of calls by then, but on every rank the refused call
// was the last one that took place, and the next one is the first after the error has been raised.
#pragma once
#include "comm/sync.cuh"

namespace mkernel {

// Tells the host that the op refuses this call. One thread of the rank, once. `code`: of the op, not 0; details: whatever its error is made of.
MK_DEVICE void report_error(const Entered& entered, uint32_t code, uint64_t first = 0, uint64_t second = 0, uint64_t third = 0) {
  const abi::World& world = entered.world();
  abi::HostBlock* block = host_block(world);
  abi::CallReport& report = block->report;
  report.epoch = entered.call().epoch();
  report.problem = world.problem;
  report.rows = world.rows;
  report.schedule = world.schedule;
  report.details[0] = first;
  report.details[1] = second;
  report.details[2] = third;
  ptx::store_release_sys(&block->reported, code);
}

// As leave_call, by every CTA of a call that is reported.
MK_DEVICE void leave_refused(const Call& call) { leave_call(Call{call.world, call.before | abi::kHalted, call.role, call.check}); }

}  // namespace mkernel
