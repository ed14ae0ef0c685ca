// Every machine instruction a kernel uses, one function each. This is the only header the cpu target replaces
// (kernels_src/cpu/ptx.cuh has the same names); kernels contain no other inline PTX and no CUDA built-ins.
// Conventions: `threads` counts threads, `bytes` bytes, coordinates of TMA go from the contiguous dimension outwards.
// "Warp" functions must be reached by all 32 lanes, "warpgroup" functions by all 128 threads, everything else by any one thread.
#ifndef MK_PTX_CUH  // a named guard: where kernels_src/cpu/ptx.cuh came first, this file is empty
#define MK_PTX_CUH
#include "abi.h"

#define MK_DEVICE __device__ __forceinline__
#define MK_GRID_CONSTANT const __grid_constant__
// The one kernel of a cubin: fixed name, so that the host needs no mangling. `launch_threads` must be a constant expression.
#define MK_KERNEL(launch_threads) extern "C" __global__ void __launch_bounds__(launch_threads, 1) mkernel_entry

#include "wgmma.cuh"

namespace ptx {
// ---- identity
MK_DEVICE uint32_t thread_index() { return threadIdx.x; }
MK_DEVICE uint32_t cta_index() { return blockIdx.x; }
MK_DEVICE uint32_t cta_count() { return gridDim.x; }
MK_DEVICE uint32_t lane_index() { return threadIdx.x & 31u; }
// Warp-uniform for the compiler. A shuffle, so a warp function: called by some lanes only it waits for the others for ever. Code for one lane, or for
// lanes that have diverged, is given what all lanes have found before.
MK_DEVICE uint32_t warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }
MK_DEVICE char* shared_memory() {  // dynamic shared memory of this CTA, 1024-byte aligned
  extern __shared__ __align__(1024) char smem[];
  return smem;
}
MK_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- execution barriers
MK_DEVICE void sync_cta() { __syncthreads(); }
MK_DEVICE void sync_warp() { __syncwarp(); }
MK_DEVICE void barrier_sync(uint32_t id, uint32_t threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
MK_DEVICE void barrier_arrive(uint32_t id, uint32_t threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- warp collectives
MK_DEVICE bool all_of_warp(bool v) { return __all_sync(0xffffffffu, v); }
// True in one lane, the same one each time. ptxas knows that it is one (not so of lane_index() == 0): TMA instructions want registers that all lanes of
// a warp have in common, and behind any other condition each becomes a loop over the lanes, some 200 cycles. All lanes ask.
MK_DEVICE bool elected() {
  uint32_t is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is != 0;
}
MK_DEVICE bool any_of_warp(bool v) { return __any_sync(0xffffffffu, v); }
MK_DEVICE uint32_t votes(bool v) { return __ballot_sync(0xffffffffu, v); }  // bit i: lane i's
MK_DEVICE uint32_t broadcast(uint32_t v, uint32_t lane) { return __shfl_sync(0xffffffffu, v, lane); }
MK_DEVICE float shuffle_xor(float v, uint32_t lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }  // the value of lane (own ^ lanes)
MK_DEVICE uint32_t shuffle_xor(uint32_t v, uint32_t lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }
template <uint32_t Registers>
MK_DEVICE void registers_increase() {  // warpgroup
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <uint32_t Registers>
MK_DEVICE void registers_decrease() {  // warpgroup
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- time
MK_DEVICE uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// Between two polls of a 64-bit flag: returns at once here; the cpu target runs other threads until *flag >= value, `deadline` (clock_ns)
// passes, or an abort may have been requested. The caller polls again in every case.
MK_DEVICE void pause(const uint64_t* flag, uint64_t value, uint64_t deadline) {
  (void)flag, (void)value, (void)deadline;
  asm volatile("nanosleep.u32 100;");
}
// The same for who must look again at once; `time` is no deadline but when there is something to do. kernels_src/ops/fabric.cuh
MK_DEVICE void pause_until(const uint64_t* flag, uint64_t value, uint64_t time) { (void)flag, (void)value, (void)time; }

// Polls of a flag (about a microsecond each) between two looks at the abort words. That of the host lies in host memory: with a look every 32
// polls by 124 waiting CTAs, each release to a peer took 100 us (4 x H200, docs/speed_log.md), so they look every 0.1 s only.
constexpr uint32_t kPollsPerAbortCheck = 32, kPollsPerHostCheck = 1 << 16;
// ---- mbarriers (shared memory)
MK_DEVICE void mbarrier_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
MK_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MK_DEVICE void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
MK_DEVICE void mbarrier_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
#define MK_LOOK(how)                                                                                   \
  asm volatile("{ .reg .pred p; mbarrier." how ".shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" \
               : "=r"(done)                                                                            \
               : "r"(shared_address(bar)), "r"(parity)                                                 \
               : "memory")
MK_DEVICE bool mbarrier_try_wait(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  MK_LOOK("try_wait.parity");
  return done != 0;
}
MK_DEVICE bool mbarrier_test(uint64_t* bar, uint32_t parity) {  // looks, where try_wait may wait for a while
  uint32_t done;
  MK_LOOK("test_wait.parity");
  return done != 0;
}
MK_DEVICE void mbarrier_wait(uint64_t* bar, uint32_t parity) {  // returns once the phase of this parity has completed
  for (bool done = false; !done;) done = mbarrier_try_wait(bar, parity);
}

// ---- clusters: CTAs that are resident together and reach each other's shared memory, numbered from 0; alone in its own: a CTA of a launch without.
// A pointer says where in shared memory, `cta` in whose.
MK_DEVICE uint32_t cluster_rank() {  // of this CTA
  uint32_t rank;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all its CTAs, whole warps: they have come, and all have. Of what a thread did before, others see its mbarrier_init_fence().
MK_DEVICE void cluster_come() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
MK_DEVICE void cluster_meet() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
MK_DEVICE uint32_t cluster_address(const void* p, uint32_t cta) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(cta));
  return address;
}
// Stores a word some time later, and tells the barrier, which expects 4 bytes: who waits for it sees the word. Releases nothing else.
MK_DEVICE void cluster_post(uint32_t* p, uint64_t* bar, uint32_t cta, uint32_t v) {
  const uint32_t to = cluster_address(p, cta), told = cluster_address(bar, cta);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(told) : "memory");
}
// Arrivals on another CTA's barrier: with release at cluster scope, which on sm_90 is a fence of GPU scope, 1000 cycles and more; without, by a thread
// that has nothing to release to that CTA; and the same by one that has read what that CTA may write over.
MK_DEVICE void cluster_arrive(uint64_t* bar, uint32_t cta) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(bar, cta)) : "memory");
}
MK_DEVICE void cluster_arrive_relaxed(uint64_t* bar, uint32_t cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(bar, cta)) : "memory");
}
MK_DEVICE void cluster_give_back(uint64_t* bar, uint32_t cta) { cluster_arrive_relaxed(bar, cta); }
// By lane 0 as mbarrier_arrive, to the own CTA, and by the others below `lanes` as cluster_give_back, each to its `cta`: without a branch, which would
// stand between the products of two k steps.
MK_DEVICE void cluster_give_back_by(uint32_t lane, uint32_t lanes, uint64_t* bar, uint32_t cta) {
  asm volatile(
      "{\n.reg .pred own, other;\n.reg .b32 remote;\nsetp.eq.u32 own, %0, 0;\nsetp.lt.u32 other, %0, %1;\n@own setp.ne.u32 other, %0, %0;\n"
      "mapa.shared::cluster.u32 remote, %2, %3;\n@own mbarrier.arrive.shared::cta.b64 _, [%2];\n"
      "@other mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(lane),
      "r"(lanes), "r"(shared_address(bar)), "r"(cta)
      : "memory");
}
// As mbarrier_wait, of this CTA's barrier, for what another CTA has released by cluster_arrive: acquire at cluster scope.
MK_DEVICE void cluster_wait(uint64_t* bar, uint32_t parity) {
  for (uint32_t done = 0; done == 0;) MK_LOOK("try_wait.parity.acquire.cluster");
}
#undef MK_LOOK
// Starts to fetch a tensor map, which the first copy by it would wait for.
MK_DEVICE void prefetch_map(const abi::TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- grids. A kernel may be launched so that it begins while the one before it on its stream still runs (KernelSpec.early).
// Until those that this one follows have ended, and all that they wrote can be seen.
MK_DEVICE void wait_for_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel begin, if it was launched so, once all CTAs have come here or ended.
MK_DEVICE void launch_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- proxies
MK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
MK_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA: tensor copies (128-byte swizzle is a property of the map)
MK_DEVICE void tma_load_3d(void* smem, const abi::TensorMap* map, uint64_t* bar, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                   shared_address(smem)),
               "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
// To the same place in the shared memory of several CTAs of the cluster (bit i: CTA i), and to the barrier at the same place in each.
MK_DEVICE void tma_load_3d_multicast(void* smem, const abi::TensorMap* map, uint64_t* bar, uint32_t ctas, int32_t c0, int32_t c1,
                                     int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], "
      "%6;" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}
MK_DEVICE void tma_store_3d(const abi::TensorMap* map, const void* smem, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(shared_address(smem)),
               "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
MK_DEVICE void tma_load_4d(void* smem, const abi::TensorMap* map, uint64_t* bar, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                   shared_address(smem)),
               "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
MK_DEVICE void tma_store_4d(const abi::TensorMap* map, const void* smem, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(shared_address(smem)),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// ---- TMA: bulk copies of `bytes` (a multiple of 16, 16-byte aligned)
MK_DEVICE void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(smem)),
               "l"(global), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}
MK_DEVICE void bulk_store(void* global, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(smem)), "r"(bytes)
               : "memory");
}
MK_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <uint32_t Pending>
MK_DEVICE void store_wait_read() {  // all but the last `Pending` groups have read their shared memory
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
template <uint32_t Pending>
MK_DEVICE void store_wait() {  // all but the last `Pending` groups are complete: their writes are visible to this thread
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- memory: system and GPU scope words
MK_DEVICE uint64_t load_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
struct WordPair {
  uint64_t first, second;
};
// Each word by itself, in any order, but in one access, where two would wait for each other. 16-byte aligned.
MK_DEVICE WordPair load_acquire_sys_pair(const uint64_t* p) {
  WordPair v;
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.first), "=l"(v.second) : "l"(p) : "memory");
  return v;
}
MK_DEVICE void store_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MK_DEVICE void store_release_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MK_DEVICE void store_release_gpu(uint64_t* p, uint64_t v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// A word that all threads read, for each by itself: with one address ptxas knows of one value, brings it to a uniform register, and waits for it at
// once. Bit 31 is set of no mask.
MK_DEVICE uint64_t load_for_thread(const uint64_t* p) {
  uint32_t lanes_below;
  uint64_t v;
  asm volatile("mov.u32 %0, %lanemask_lt;" : "=r"(lanes_below));
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p + (lanes_below >> 31)) : "memory");
  return v;
}
MK_DEVICE uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MK_DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) {  // relaxed, GPU scope; returns the old value
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MK_DEVICE uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MK_DEVICE uint64_t atomic_add(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MK_DEVICE void add_release(uint64_t* p, uint64_t v) {  // GPU scope
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MK_DEVICE uint32_t compare_and_swap(uint32_t* p, uint32_t expected, uint32_t desired) {  // acq_rel, GPU scope; returns the old value
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
  return old;
}

// ---- numbers: two float32 to one packed pair, `low` in the low half; any NaN becomes 0x7fff
enum class Element : uint32_t { kBFloat16 = 0, kFloat16 = 1 };
template <Element E>
MK_DEVICE uint32_t pack(float low, float high) {
  uint32_t v;
  if constexpr (E == Element::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  }
  return v;
}

template <Element E>
MK_DEVICE void unpack(uint32_t v, float& low, float& high) {  // exact
  if constexpr (E == Element::kBFloat16) {
    low = __uint_as_float(v << 16), high = __uint_as_float(v & 0xffff0000u);
  } else {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(v));
  }
}
MK_DEVICE uint32_t bits(float v) {  // an instruction: else ptxas reads accumulators where they lie, and serializes wgmma
  uint32_t b;
  asm volatile("mov.b32 %0, %1;" : "=r"(b) : "f"(v));
  return b;
}
MK_DEVICE float from_bits(uint32_t v) { return __uint_as_float(v); }
MK_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }  // of a number and a NaN the number
// Errors: exp2 2^-22, reciprocal 2^-23, log2 2^-22, relative (log2 in (0.5, 2): absolute); what is below 2^-126 may count as 0; log2(0): -infinity.
// clang-format off
MK_DEVICE float exp2(float x) { float v; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x)); return v; }
MK_DEVICE float log2(float x) { float v; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x)); return v; }
MK_DEVICE float reciprocal(float x) { float v; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x)); return v; }
// clang-format on

// ---- 16 bytes at a time
struct Words {
  uint32_t word[4];
};
#define MK_WORDS(kind, v) kind(v.word[0]), kind(v.word[1]), kind(v.word[2]), kind(v.word[3])
MK_DEVICE Words any_words() {  // of whatever value, by no instruction
  Words v;
  asm("" : MK_WORDS("=r", v));
  return v;
}
MK_DEVICE void cluster_post_words(Words* p, uint64_t* bar, uint32_t cta, const Words& v) {  // as cluster_post, of 16 bytes
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(cluster_address(p, cta)),
      "r"(cluster_address(bar, cta)), MK_WORDS("r", v)
      : "memory");
}
MK_DEVICE float any_value() {  // the same of a float
  float v;
  asm("" : "=f"(v));
  return v;
}
MK_DEVICE Words load_shared(const void* p) {
  Words v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : MK_WORDS("=r", v) : "r"(shared_address(p)) : "memory");
  return v;
}
MK_DEVICE void store_shared(void* p, const Words& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), MK_WORDS("r", v) : "memory");
}

// ---- words of shared memory by which threads of a CTA tell each other
MK_DEVICE uint64_t load_acquire_shared(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.cta.shared.u64 %0, [%1];" : "=l"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
MK_DEVICE void store_release_shared(uint64_t* p, uint64_t v) {
  asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"(shared_address(p)), "l"(v) : "memory");
}

// ---- words of shared memory that several threads change: relaxed, CTA scope
MK_DEVICE void shared_add(uint32_t* p, uint32_t v) {
  asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}
MK_DEVICE void shared_or(uint32_t* p, uint32_t v) {
  asm volatile("red.relaxed.cta.shared.or.b32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}

// ---- bits
MK_DEVICE uint32_t count_bits(uint32_t v) { return __popc(v); }

// ---- words of global memory, as load_input and load_global
MK_DEVICE uint32_t load_input_word(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
MK_DEVICE uint32_t load_word(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MK_DEVICE void store_word(void* p, uint32_t v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
MK_DEVICE uint32_t load_byte(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MK_DEVICE void store_byte(void* p, uint32_t v) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
MK_DEVICE Words load_input(const void* p) {  // global memory that nobody writes while the kernel runs
  Words v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : MK_WORDS("=r", v) : "l"(p));
  return v;
}
MK_DEVICE Words load_global(const void* p) {  // global memory that has been written during this kernel, after an acquire that says so
  Words v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : MK_WORDS("=r", v) : "l"(p) : "memory");
  return v;
}
MK_DEVICE void store_global(void* p, const Words& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), MK_WORDS("r", v) : "memory");
}

// Packets: four words, each of them stored and loaded at once, in any order (relaxed; the instruction orders nothing).
// If not `wanted`, v or what is at p stays; without a branch, behind which ptxas works out each address anew.
MK_DEVICE void load_packet_if(bool wanted, Words& v, const Words* p) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : MK_WORDS("+r", v)
               : "l"(p), "r"(uint32_t{wanted})
               : "memory");
}
MK_DEVICE void store_packet_if(bool wanted, Words* p, const Words& v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(p), MK_WORDS("r", v),
               "r"(uint32_t{wanted})
               : "memory");
}
MK_DEVICE void store_packet(Words* p, const Words& v) { store_packet_if(true, p, v); }

// Tagged packets: two pairs of words, each pair stored and loaded at once, in either order (relaxed, as above).
MK_DEVICE void load_pairs_if(bool wanted, Words& v, const Words* p) {  // if not, v stays; no branch, and nothing waits for loads before it
  uint64_t low = v.word[0] | uint64_t(v.word[1]) << 32, high = v.word[2] | uint64_t(v.word[3]) << 32;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2]; }"
               : "+l"(low), "+l"(high)
               : "l"(p), "r"(uint32_t{wanted})
               : "memory");
  v = Words{{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}
MK_DEVICE void store_pairs(Words* p, const Words& v) {
  const uint64_t low = v.word[0] | uint64_t(v.word[1]) << 32, high = v.word[2] | uint64_t(v.word[3]) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 (warp). Transposed: of its column l % 8.
#define MK_MATRICES "r"(shared_address(row)), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
MK_DEVICE void stmatrix_x4(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::MK_MATRICES : "memory");
}
MK_DEVICE void stmatrix_x4_transposed(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::MK_MATRICES : "memory");
}

// ---- wgmma (warpgroup): D (64 x N, float32) += A (64 x 16, shared or registers) * B (16 x N, shared)
// Thread t of the warpgroup holds of D the rows r = t / 32 * 16 + t % 32 / 4 and r + 8: d[4 j + 2 i + h] is row r + 8 i, column 8 j + t % 4 * 2 + h.
enum class Major : uint32_t { kK = 0, kMN = 1 };  // which dimension of the operand is contiguous in shared memory

// Shared-memory matrix descriptor for 128-byte swizzle. Byte strides as in the PTX ISA, "matrix descriptor":
// K-major: `stride` between groups of 8 rows, `leading` unused (1). MN-major: `leading` between blocks of 64 columns, `stride` between groups of 8 k.
MK_DEVICE uint64_t matrix_descriptor(const void* smem, uint32_t leading, uint32_t stride) {
  const uint64_t address = (shared_address(smem) & 0x3ffffu) >> 4;
  return address | (uint64_t(leading >> 4) << 16) | (uint64_t(stride >> 4) << 32) | (uint64_t(1) << 62);
}
// The same `bytes` further on, without leaving shared memory: addresses are in the low word, and add up to less than it holds.
MK_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}
// The same for all lanes of the warp, as it is, so that ptxas knows: it then works out what follows from it once for the warp. Otherwise four words of
// each instruction are moved from registers of the lanes, which takes longer than its product if that is narrow. Whole warps.
MK_DEVICE uint64_t warp_descriptor(uint64_t descriptor) {
  return (descriptor & 0xffffffff00000000u) | broadcast(static_cast<uint32_t>(descriptor), 0);
}
MK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last `Pending` groups are complete: `d`, of one of these, may be read, and what reads it stays behind the wait. Most: the first so many have
// been in use, of every `Of`; 0: all.
template <uint32_t Pending, uint32_t Most = 0, uint32_t Of = ~0u, uint32_t Count>
MK_DEVICE void wgmma_wait(float (&d)[Count]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i)
    if (Most == 0 || i % Of < Most) asm volatile("" : "+f"(d[i])::"memory");
}

template <uint32_t N, Element E, Major A, Major B, uint32_t First = 0, uint32_t Count>  // D is in N / 2 of `d`, from First on
MK_DEVICE void wgmma(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (N % 64 == 0) {
    using Atom = typename detail::Atom<N, E == Element::kFloat16, A == Major::kMN, B == Major::kMN>::Type;
    detail::fma<Atom, First>(d, b, accumulate, typename detail::IndicesTo<N / 2>::Type{}, a);
  } else {
    using Text = detail::Instruction<N>;
    Text::template multiply<E == Element::kFloat16, A == Major::kMN, B == Major::kMN, First>(d, detail::descriptors(a, b, accumulate));
  }
}
// The same with A in four registers of each thread, two packed elements each: word i of thread t is row r + 8 (i % 2), columns 8 (i / 2) + t % 4 * 2 and
// one more. So two neighbours of D, packed, are a word of A: word i of k step s is d[8 s + 2 i] and d[8 s + 2 i + 1]. They stay until it is done.
template <uint32_t N, Element E, Major B, uint32_t Count>
MK_DEVICE void wgmma_registers(float (&d)[Count], const uint32_t* a, uint64_t b, bool accumulate) {
  using Atom = typename detail::RegisterAtom<N, E == Element::kFloat16, B == Major::kMN>::Type;
  detail::fma<Atom>(d, b, accumulate, typename detail::IndicesTo<N / 2>::Type{}, a[0], a[1], a[2], a[3]);
}
// wgmma for 64 values of K, B's contiguous, as one statement: a fence, four instructions, commit, and a wait for the step before. NVRTC has it sooner.
template <uint32_t N, Element E, Major A, uint32_t Count>
MK_DEVICE void wgmma_step(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate) {
  detail::Step<N>::template multiply<E == Element::kFloat16, A == Major::kMN>(d, detail::descriptors(a, b, accumulate));
}
}  // namespace ptx
#endif  // MK_PTX_CUH
