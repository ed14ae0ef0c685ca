// The least kernel: adds Config::kValue to a number. With kSpill it keeps more numbers alive than there are registers.
#pragma once
namespace mkernel {

struct alignas(64) Parameters {
  abi::World world;
  uint64_t memory;
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  uint32_t* memory = reinterpret_cast<uint32_t*>(p.memory);
  if constexpr (Config::kSpill != 0) {
    volatile uint32_t numbers[64];  // addressed at run time: local memory
    for (uint32_t i = 0; i < 64; ++i) numbers[i] = memory[i];
    memory[0] = numbers[memory[1] % 64];
  } else {
    memory[ptx::thread_index()] += Config::kValue;
  }
}

}  // namespace mkernel
