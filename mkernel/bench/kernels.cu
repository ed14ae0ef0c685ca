// Helpers of the benchmark; none of them runs inside a timed region. Compiled by CuPy, without any header.
typedef unsigned long long u64;

__device__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Keeps the stream busy while the host enqueues what is measured.
extern "C" __global__ void hold(u64 ns) {
  const u64 begin = now_ns();
  while (now_ns() - begin < ns) {
  }
}

// Every thread writes 16 bytes to each other rank. A link that has slept takes up to 200 us to carry the first byte, so this wakes all links
// before anything is timed. Memory of a rank: flag_bytes, then as much as a grid writes for each source.
extern "C" __global__ void wake(const u64* addresses, unsigned rank, unsigned size, unsigned flag_bytes) {
  const u64 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (unsigned peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(addresses[peer] + flag_bytes + (rank * threads + thread) * 16), "r"(rank)
                 : "memory");
  }
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Device-side barrier: thread p tells rank p that this rank has come, then waits for rank p. flags[rank of source], one set per rank.
// Bounded, so that a lost rank leaves no kernel behind: own[size] becomes 1 and the host raises.
extern "C" __global__ void meet(const u64* addresses, unsigned rank, unsigned size, u64 epoch, u64 limit_ns) {
  const unsigned peer = threadIdx.x;
  if (peer >= size) return;
  const u64 theirs = addresses[peer] + 8 * rank, ours = addresses[rank] + 8 * peer;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(theirs), "l"(epoch) : "memory");
  const u64 begin = now_ns();
  u64 seen;
  do {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(ours) : "memory");
    if (now_ns() - begin > limit_ns) {
      *reinterpret_cast<u64*>(addresses[rank] + 8 * size) = 1;
      return;
    }
  } while (seen < epoch);
}

// Normal numbers from a counter, so that any rank can write any rank's input again. kind 0: bfloat16, 1: float16.
extern "C" __global__ void fill(unsigned short* out, u64 count, u64 seed, unsigned kind) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
    u64 x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    const float u = ((unsigned)(x >> 40) + 1) * 0x1p-24f, v = (unsigned)(x & 0xFFFFFF) * 0x1p-24f;
    const float value = sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
    unsigned short bits;
    if (kind == 0)
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    out[i] = bits;
  }
}
