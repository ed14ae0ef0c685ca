// Numbers and 16-byte accesses of shared memory: each of 64 threads turns a pair of 16-bit numbers and a float around.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct Parameters {
  uint64_t packed;  // uint32_t[64]: pairs of 16-bit numbers
  uint64_t floats;  // float[64]
  uint64_t out;     // uint32_t[64][8]: low and high as float32, the pair packed again, the float's bits and back, the words of another thread
};
constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t t = ptx::thread_index();
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out) + t * 8;
  float low, high;
  ptx::unpack<kElement>(reinterpret_cast<const uint32_t*>(p.packed)[t], low, high);
  const float value = reinterpret_cast<const float*>(p.floats)[t];
  ptx::Words words;
  words.word[0] = ptx::bits(low);
  words.word[1] = ptx::bits(high);
  words.word[2] = ptx::pack<kElement>(low, high);
  words.word[3] = ptx::bits(ptx::from_bits(ptx::bits(value)));
  char* shared = ptx::shared_memory();
  ptx::store_shared(shared + t * 16, words);
  ptx::sync_cta();
  const ptx::Words own = ptx::load_shared(shared + t * 16), other = ptx::load_shared(shared + (t + 1) % 64 * 16);
  for (uint32_t i = 0; i < 4; ++i) {
    out[i] = own.word[i];
    out[4 + i] = other.word[i];
  }
}

}  // namespace mkernel
