// Thread t of CTA b: once flag >= value (at most a few seconds), out[b * kThreads + t] = data[t] + b. With kWait = 0 at once.
#pragma once
namespace mkernel {

struct alignas(64) Parameters {
  abi::World world;
  uint64_t flag, value, data, out;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint64_t deadline = ptx::clock_ns() + p.world.timeout_ns;
  const uint64_t* flag = reinterpret_cast<uint64_t*>(p.flag);
  bool arrived = true;
  if constexpr (Config::kWait != 0) {
    while (ptx::load_acquire_sys(flag) < p.value && ptx::clock_ns() < deadline) ptx::pause(flag, p.value, deadline);
    arrived = ptx::load_acquire_sys(flag) >= p.value;
  }
  const uint32_t cta = ptx::cta_index(), thread = ptx::thread_index();
  const uint32_t* data = reinterpret_cast<uint32_t*>(p.data);
  reinterpret_cast<uint32_t*>(p.out)[cta * Config::kThreads + thread] = arrived ? data[thread] + cta : 0xdeadu;
}

}  // namespace mkernel
