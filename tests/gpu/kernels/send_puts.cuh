// Sends puts to rank 1, which is this rank's own memory, and takes the time until their flags are seen: by tests/gpu/fabric.py.
#pragma once
#include "comm/ring.cuh"

namespace mkernel {

// ---- config: kNumNodes (2), kRanksPerNode (1), kAlone (puts one after the other, each timed); kThreads (64), kParameterBytes
struct alignas(64) Parameters {
  abi::World world;
  uint64_t source_offset, target_offset;  // data heap
  uint64_t slots;                         // of so many bytes each, in both; used in turn
  uint64_t bytes, puts, flag_offset;
  uint64_t times;  // device memory, device clock: of each put its begin, when it was posted, and when its flag was seen (kAlone); else begin and end
                   // of all together
};
static_assert(sizeof(Parameters) == Config::kParameterBytes, "abi");

MK_DEVICE Put put_of(const Call& call, const Parameters& p, uint64_t i) {
  const uint64_t offset = i % p.slots * p.bytes;
  const uint32_t channel = 1 + ptx::cta_index();
  return Put{channel, 1, p.source_offset + offset, p.target_offset + offset, p.bytes, mkernel::flag_offset(p, i), call.epoch()};
}
MK_DEVICE bool wait_for(const Call& call, const Parameters& p, uint64_t i) {
  const char* word = signals(p.world, 0) + mkernel::flag_offset(p, i);
  const Awaited what{abi::kFlagChunk, static_cast<uint32_t>(i), 1};
  return wait_ge(call, reinterpret_cast<const uint64_t*>(word), call.epoch(), what, p.world.timeout_ns);
}

struct Arrivals {
  const Parameters& p;
  MK_DEVICE bool wait(const Call& call, uint32_t i) const { return wait_for(call, p, i); }
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t cta = ptx::cta_index(), warp = ptx::warp_index();
  const Call call = begin_call(p.world, abi::kInterSend);
  uint64_t* times = reinterpret_cast<uint64_t*>(p.times);
  if (warp == 0 && ptx::lane_index() == 0) {
    if (Config::kAlone) {
      for (uint64_t i = 0; cta == 0 && i < p.puts; ++i) {
        times[3 * i] = ptx::clock_ns();
        if (issue_command(call, put_of(call, p, i)) == 0) break;
        times[3 * i + 1] = ptx::clock_ns();
        if (!wait_for(call, p, i)) break;
        times[3 * i + 2] = ptx::clock_ns();
      }
    } else {
      if (cta == 0) times[0] = ptx::clock_ns();
      for (uint64_t i = cta; i < p.puts; i += ptx::cta_count()) {
        if (issue_command(call, put_of(call, p, i)) == 0) break;
      }
    }
  } else if (warp == 1 && cta == 0 && !Config::kAlone) {
    wait_all(call, Arrivals{p}, static_cast<uint32_t>(p.puts));
    if (ptx::lane_index() == 0) times[1] = ptx::clock_ns();
  }
  ptx::sync_cta();
  if (ptx::thread_index() == 0) leave_call(call);
}

}  // namespace mkernel
