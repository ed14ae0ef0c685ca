// The cpu target's ptx.cuh: the names, signatures and meanings of kernels_src/ptx.cuh for a C++20 host compiler. Each CUDA thread is a
// fiber of the scheduler library (interface.h); whatever may wait, or takes effect later, happens there.
#ifndef MK_PTX_CUH  // the guard of kernels_src/ptx.cuh, which kernel headers find beside them and which must then be empty
#define MK_PTX_CUH
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "interface.h"

#define MK_DEVICE inline
#define MK_GRID_CONSTANT const
#define MK_KERNEL(launch_threads)                                 \
  MKC_API uint32_t mkernel_threads() { return (launch_threads); } \
  extern "C" void mkernel_entry

namespace ptx {

// ---- identity
MK_DEVICE uint32_t thread_index() { return mkc_thread_index(); }
MK_DEVICE uint32_t cta_index() { return mkc_cta_index(); }
MK_DEVICE uint32_t cta_count() { return mkc_cta_count(); }
MK_DEVICE uint32_t lane_index() { return mkc_thread_index() & 31u; }
MK_DEVICE uint32_t warp_index(uint32_t line = __builtin_LINE()) {
  return mkc_warp_index(line);
}  // a warp function: see kernels_src/ptx.cuh
MK_DEVICE char* shared_memory() { return mkc_shared_memory(); }
MK_DEVICE uint32_t shared_address(const void* p) { return mkc_shared_address(p); }

// ---- execution barriers
MK_DEVICE void sync_cta() { mkc_sync_cta(); }
MK_DEVICE void sync_warp() { mkc_sync_warp(); }
MK_DEVICE void barrier_sync(uint32_t id, uint32_t threads) { mkc_barrier(id, threads, true); }
MK_DEVICE void barrier_arrive(uint32_t id, uint32_t threads) { mkc_barrier(id, threads, false); }

// ---- warp collectives
MK_DEVICE bool all_of_warp(bool v) { return mkc_vote(v) == 0xffffffffu; }
MK_DEVICE bool elected() {
  mkc_vote(true);
  return lane_index() == 0;
}
MK_DEVICE bool any_of_warp(bool v) { return mkc_vote(v) != 0; }
MK_DEVICE uint32_t votes(bool v) { return mkc_vote(v); }
MK_DEVICE uint32_t broadcast(uint32_t v, uint32_t lane) { return mkc_broadcast(v, lane); }
MK_DEVICE float shuffle_xor(float v, uint32_t lanes) {
  return __builtin_bit_cast(float, mkc_shuffle_xor(__builtin_bit_cast(uint32_t, v), lanes));
}
MK_DEVICE uint32_t shuffle_xor(uint32_t v, uint32_t lanes) { return mkc_shuffle_xor(v, lanes); }
template <uint32_t Registers>
MK_DEVICE void registers_increase() {
  static_assert(Registers >= 24 && Registers <= 256 && Registers % 8 == 0, "setmaxnreg");
}
template <uint32_t Registers>
MK_DEVICE void registers_decrease() {
  static_assert(Registers >= 24 && Registers <= 256 && Registers % 8 == 0, "setmaxnreg");
}

// ---- time
constexpr uint32_t kPollsPerAbortCheck = 1, kPollsPerHostCheck = 1;  // threads poll only after something has changed
MK_DEVICE uint64_t clock_ns() { return mkc_clock_ns(); }
MK_DEVICE void pause(const uint64_t* flag, uint64_t value, uint64_t deadline) { mkc_pause(flag, value, deadline, false); }
MK_DEVICE void pause_until(const uint64_t* flag, uint64_t value, uint64_t time) { mkc_pause(flag, value, time, true); }

// ---- mbarriers (shared memory)
MK_DEVICE void mbarrier_init(uint64_t* bar, uint32_t count) { mkc_mbarrier_init(bar, count); }
MK_DEVICE void mbarrier_init_fence() { mkc_mbarrier_init_fence(); }
MK_DEVICE void mbarrier_arrive(uint64_t* bar) { mkc_mbarrier_arrive(bar, 0); }
MK_DEVICE void mbarrier_arrive_expect(uint64_t* bar, uint32_t bytes) { mkc_mbarrier_arrive(bar, bytes); }
MK_DEVICE bool mbarrier_try_wait(uint64_t* bar, uint32_t parity) { return mkc_mbarrier_test(bar, parity); }
MK_DEVICE bool mbarrier_test(uint64_t* bar, uint32_t parity) { return mkc_mbarrier_test(bar, parity); }
MK_DEVICE void mbarrier_wait(uint64_t* bar, uint32_t parity) { mkc_mbarrier_wait(bar, parity); }

// ---- clusters
MK_DEVICE uint32_t cluster_rank() { return mkc_cluster_rank(); }
MK_DEVICE void cluster_come() { mkc_cluster_come(); }
MK_DEVICE void cluster_meet() { mkc_cluster_meet(); }
MK_DEVICE uint32_t cluster_address(const void* p, uint32_t cta) { return mkc_cluster_address(p, cta); }
MK_DEVICE void cluster_post(uint32_t* p, uint64_t* bar, uint32_t cta, uint32_t v) { mkc_cluster_post(p, bar, cta, &v, sizeof(v)); }
MK_DEVICE void cluster_arrive(uint64_t* bar, uint32_t cta) { mkc_cluster_arrive(bar, cta, true); }
MK_DEVICE void cluster_arrive_relaxed(uint64_t* bar, uint32_t cta) { mkc_cluster_arrive(bar, cta, false); }
// Its reads come before what is written then.
MK_DEVICE void cluster_give_back(uint64_t* bar, uint32_t cta) { mkc_cluster_arrive(bar, cta, true); }
MK_DEVICE void cluster_give_back_by(uint32_t lane, uint32_t lanes, uint64_t* bar, uint32_t cta) {
  if (lane == 0) {
    mbarrier_arrive(bar);
  } else if (lane < lanes) {
    cluster_give_back(bar, cta);
  }
}
MK_DEVICE void cluster_wait(uint64_t* bar, uint32_t parity) { mkc_mbarrier_wait(bar, parity); }

MK_DEVICE void prefetch_map(const abi::TensorMap*) {}

// ---- grids
MK_DEVICE void wait_for_grids() { mkc_wait_for_grids(); }
MK_DEVICE void launch_grids() {}

// ---- proxies
MK_DEVICE void fence_proxy_async() { mkc_fence_proxy_async(false); }
MK_DEVICE void fence_proxy_async_shared() { mkc_fence_proxy_async(true); }

// ---- TMA
MK_DEVICE void tma_load_3d(void* smem, const abi::TensorMap* map, uint64_t* bar, int32_t c0, int32_t c1, int32_t c2) {
  mkc_tensor_load(smem, map, bar, 3, c0, c1, c2, 0);
}
MK_DEVICE void tma_load_3d_multicast(void* smem, const abi::TensorMap* map, uint64_t* bar, uint32_t ctas, int32_t c0, int32_t c1,
                                     int32_t c2) {
  mkc_tensor_load_multicast(smem, map, bar, ctas, c0, c1, c2);
}
MK_DEVICE void tma_store_3d(const abi::TensorMap* map, const void* smem, int32_t c0, int32_t c1, int32_t c2) {
  mkc_tensor_store(map, smem, 3, c0, c1, c2, 0);
}
MK_DEVICE void tma_load_4d(void* smem, const abi::TensorMap* map, uint64_t* bar, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  mkc_tensor_load(smem, map, bar, 4, c0, c1, c2, c3);
}
MK_DEVICE void tma_store_4d(const abi::TensorMap* map, const void* smem, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  mkc_tensor_store(map, smem, 4, c0, c1, c2, c3);
}
MK_DEVICE void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar) { mkc_bulk_load(smem, global, bytes, bar); }
MK_DEVICE void bulk_store(void* global, const void* smem, uint32_t bytes) { mkc_bulk_store(global, smem, bytes); }
MK_DEVICE void store_commit() { mkc_store_commit(); }
template <uint32_t Pending>
MK_DEVICE void store_wait_read() {
  mkc_store_wait(Pending, true);
}
template <uint32_t Pending>
MK_DEVICE void store_wait() {
  mkc_store_wait(Pending, false);
}

// ---- memory: system and GPU scope words
namespace detail {
template <class T>
inline T load_acquire(const T* p) {
  mkc_check_word(p, sizeof(T));
  const T v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  mkc_acquired(p, v);
  return v;
}
template <class T>
inline void store_release(T* p, T v) {
  mkc_check_word(p, sizeof(T));
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  mkc_released(false);
}
template <class T>
inline T atomic_add(T* p, T v, int order) {
  mkc_check_word(p, sizeof(T));
  const T old = order == __ATOMIC_RELAXED ? __atomic_fetch_add(p, v, __ATOMIC_RELAXED) : __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
  mkc_released(order != __ATOMIC_RELAXED);
  return old;
}
}  // namespace detail
MK_DEVICE uint64_t load_acquire_sys(const uint64_t* p) { return detail::load_acquire(p); }
struct WordPair {
  uint64_t first, second;
};
MK_DEVICE WordPair load_acquire_sys_pair(const uint64_t* p) {
  mkc_check_word(p, sizeof(WordPair));
  const uint64_t second = detail::load_acquire(p + 1);  // in any order
  return WordPair{detail::load_acquire(p), second};
}
MK_DEVICE void store_release_sys(uint64_t* p, uint64_t v) { detail::store_release(p, v); }
MK_DEVICE void store_release_sys(uint32_t* p, uint32_t v) { detail::store_release(p, v); }
MK_DEVICE void store_release_gpu(uint64_t* p, uint64_t v) { detail::store_release(p, v); }
MK_DEVICE uint64_t load_for_thread(const uint64_t* p) {
  mkc_check_word(p, sizeof(uint64_t));
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
MK_DEVICE uint32_t load_acquire_gpu(const uint32_t* p) { return detail::load_acquire(p); }
MK_DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { return detail::atomic_add(p, v, __ATOMIC_RELAXED); }
MK_DEVICE uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t v) { return detail::atomic_add(p, v, __ATOMIC_ACQ_REL); }
MK_DEVICE uint64_t atomic_add(uint64_t* p, uint64_t v) { return detail::atomic_add(p, v, __ATOMIC_RELAXED); }
MK_DEVICE void add_release(uint64_t* p, uint64_t v) { detail::atomic_add(p, v, __ATOMIC_ACQ_REL); }
MK_DEVICE uint32_t compare_and_swap(uint32_t* p, uint32_t expected, uint32_t desired) {
  mkc_check_word(p, sizeof(uint32_t));
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  mkc_released(true);
  return expected;
}

// ---- numbers
enum class Element : uint32_t { kBFloat16 = 0, kFloat16 = 1 };
namespace detail {
inline uint32_t to_bfloat16(float value) {  // round to nearest even; NaN becomes the canonical NaN, as cvt does
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
inline float from_float16(uint32_t bits) {  // exact
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u) return __builtin_bit_cast(float, sign | ((magnitude << 13) + 0x38000000u));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -value : value;
}
inline uint32_t to_float16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: the sum with 0.5 has the subnormal's unit as its last bit
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000u);
  }
  return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}
}  // namespace detail
template <Element E>
MK_DEVICE uint32_t pack(float low, float high) {
  if constexpr (E == Element::kBFloat16) {
    return detail::to_bfloat16(low) | (detail::to_bfloat16(high) << 16);
  } else {
    return detail::to_float16(low) | (detail::to_float16(high) << 16);
  }
}

template <Element E>
MK_DEVICE void unpack(uint32_t v, float& low, float& high) {
  if constexpr (E == Element::kBFloat16) {
    low = __builtin_bit_cast(float, v << 16), high = __builtin_bit_cast(float, v & 0xffff0000u);
  } else {
    low = detail::from_float16(v & 0xffffu), high = detail::from_float16(v >> 16);
  }
}
MK_DEVICE uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
MK_DEVICE float from_bits(uint32_t v) { return __builtin_bit_cast(float, v); }
MK_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
MK_DEVICE float exp2(float x) { return __builtin_exp2f(x); }
MK_DEVICE float log2(float x) { return __builtin_log2f(x); }
MK_DEVICE float reciprocal(float x) { return 1.0f / x; }

// ---- 16 bytes at a time
struct alignas(16) Words {
  uint32_t word[4];
};
MK_DEVICE void cluster_post_words(Words* p, uint64_t* bar, uint32_t cta, const Words& v) { mkc_cluster_post(p, bar, cta, &v, sizeof(v)); }
MK_DEVICE Words any_words() {  // inverted, as of packets, they are NaNs
  return Words{{0x80000000u, 0x80000000u, 0x80000000u, 0x80000000u}};
}
MK_DEVICE float any_value() { return __builtin_nanf(""); }
MK_DEVICE Words load_shared(const void* p) {
  mkc_check_shared(p, sizeof(Words));
  return *static_cast<const Words*>(p);
}
MK_DEVICE void store_shared(void* p, const Words& v) {
  mkc_wrote_shared(p, sizeof(Words));
  *static_cast<Words*>(p) = v;
}

// ---- words of shared memory by which threads of a CTA tell each other
MK_DEVICE uint64_t load_acquire_shared(const uint64_t* p) {
  mkc_check_shared(p, sizeof(uint64_t));
  return detail::load_acquire(p);
}
MK_DEVICE void store_release_shared(uint64_t* p, uint64_t v) {
  mkc_check_shared(p, sizeof(uint64_t));
  detail::store_release(p, v);
}

// ---- words of shared memory that several threads change
MK_DEVICE void shared_add(uint32_t* p, uint32_t v) {
  mkc_check_shared(p, sizeof(uint32_t));
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
MK_DEVICE void shared_or(uint32_t* p, uint32_t v) {
  mkc_check_shared(p, sizeof(uint32_t));
  __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}

// ---- bits
MK_DEVICE uint32_t count_bits(uint32_t v) { return static_cast<uint32_t>(__builtin_popcount(v)); }

// ---- words of global memory
MK_DEVICE uint32_t load_input_word(const void* p) {
  mkc_check_word(p, sizeof(uint32_t));
  return *static_cast<const uint32_t*>(p);
}
MK_DEVICE uint32_t load_word(const void* p) { return load_input_word(p); }
MK_DEVICE void store_word(void* p, uint32_t v) {
  mkc_check_word(p, sizeof(uint32_t));
  *static_cast<uint32_t*>(p) = v;
}

MK_DEVICE uint32_t load_byte(const void* p) {
  mkc_check_word(p, 1);
  return *static_cast<const unsigned char*>(p);
}
MK_DEVICE void store_byte(void* p, uint32_t v) {
  mkc_check_word(p, 1);
  *static_cast<unsigned char*>(p) = static_cast<unsigned char>(v);
}

MK_DEVICE Words load_input(const void* p) {
  mkc_check_word(p, sizeof(Words));
  return *static_cast<const Words*>(p);
}
MK_DEVICE Words load_global(const void* p) { return load_input(p); }
MK_DEVICE void store_global(void* p, const Words& v) {
  mkc_check_word(p, sizeof(Words));
  *static_cast<Words*>(p) = v;
}

MK_DEVICE void load_packet_if(bool wanted, Words& v, const Words* p) {
  if (!wanted) return;
  mkc_check_word(p, sizeof(Words));
  for (uint32_t i = 0; i < 4; ++i) v.word[i] = __atomic_load_n(&p->word[i], __ATOMIC_RELAXED);
}
MK_DEVICE void store_packet(Words* p, const Words& v) {
  mkc_check_word(p, sizeof(Words));
  const uint32_t first = mkc_random(4);
  for (uint32_t i = 0; i < 4; ++i) {  // others may run between any two
    const uint32_t at = (first + i) % 4;
    __atomic_store_n(&p->word[at], v.word[at], __ATOMIC_RELAXED);
    mkc_released(false);
  }
}
MK_DEVICE void store_packet_if(bool wanted, Words* p, const Words& v) {
  if (wanted) store_packet(p, v);
}

MK_DEVICE void load_pairs_if(bool wanted, Words& v, const Words* p) {
  if (!wanted) return;
  mkc_check_word(p, sizeof(Words));
  const uint64_t* pair = reinterpret_cast<const uint64_t*>(p);
  for (uint32_t i = 0; i < 2; ++i) {
    const uint64_t both = __atomic_load_n(pair + i, __ATOMIC_RELAXED);
    v.word[2 * i] = static_cast<uint32_t>(both), v.word[2 * i + 1] = static_cast<uint32_t>(both >> 32);
  }
}
MK_DEVICE void store_pairs(Words* p, const Words& v) {
  mkc_check_word(p, sizeof(Words));
  const uint32_t first = mkc_random(2);
  for (uint32_t i = 0; i < 2; ++i) {  // others may run between the two
    const uint32_t at = (first + i) % 2;
    __atomic_store_n(reinterpret_cast<uint64_t*>(p) + at, v.word[2 * at] | uint64_t(v.word[2 * at + 1]) << 32, __ATOMIC_RELAXED);
    mkc_released(false);
  }
}

MK_DEVICE void stmatrix_x4(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) { mkc_stmatrix(row, m0, m1, m2, m3, false); }
MK_DEVICE void stmatrix_x4_transposed(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  mkc_stmatrix(row, m0, m1, m2, m3, true);
}

// ---- wgmma
enum class Major : uint32_t { kK = 0, kMN = 1 };

MK_DEVICE uint64_t matrix_descriptor(const void* smem, uint32_t leading, uint32_t stride) {
  const uint64_t address = (shared_address(smem) & 0x3ffffu) >> 4;
  return address | (uint64_t(leading >> 4) << 16) | (uint64_t(stride >> 4) << 32) | (uint64_t(1) << 62);
}
// The same `bytes` further on, without leaving shared memory: addresses are in the low word, and add up to less than it holds.
MK_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}
MK_DEVICE uint64_t warp_descriptor(uint64_t descriptor) { return descriptor; }
MK_DEVICE void wgmma_fence() { mkc_wgmma_fence(); }
MK_DEVICE void wgmma_commit() { mkc_wgmma_commit(); }
template <uint32_t Pending, uint32_t Most = 0, uint32_t Of = ~0u, uint32_t Count>
MK_DEVICE void wgmma_wait(float (&)[Count]) {
  mkc_wgmma_wait(Pending);
}
template <uint32_t N, Element E, Major A, Major B, uint32_t First = 0, uint32_t Count>
MK_DEVICE void wgmma(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(Count >= First + N / 2, "accumulators");
  static_assert(N % 8 == 0 && N <= 256, "wgmma shape");
  mkc_wgmma(d + First, N, static_cast<uint32_t>(E), static_cast<uint32_t>(A), static_cast<uint32_t>(B), a, nullptr, b, accumulate);
}
template <uint32_t N, Element E, Major A, uint32_t Count>
MK_DEVICE void wgmma_step(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate) {
  wgmma_fence();
  for (uint32_t i = 0; i < 4; ++i) {
    wgmma<N, E, A, Major::kK>(d, advance_descriptor(a, i * (A == Major::kK ? 32 : 2048)), advance_descriptor(b, i * 32),
                              accumulate || i > 0);
  }
  wgmma_commit();
  wgmma_wait<1>(d);
}
template <uint32_t N, Element E, Major B, uint32_t Count>
MK_DEVICE void wgmma_registers(float (&d)[Count], const uint32_t* a, uint64_t b, bool accumulate) {
  static_assert(Count >= N / 2, "accumulators");
  static_assert(N == 64 || N == 128, "wgmma shape");
  mkc_wgmma(d, N, static_cast<uint32_t>(E), 0, static_cast<uint32_t>(B), 0, a, b, accumulate);
}

}  // namespace ptx
#endif  // MK_PTX_CUH
