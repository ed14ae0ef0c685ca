// The boundary of the scheduler library: what compiled kernels call (from ptx.cuh) and what mkernel/runtime/cpu/scheduler.py calls through ctypes.
#pragma once
#include <cstddef>
#include <cstdint>

#define MKC_API extern "C" __attribute__((visibility("default")))

// ---- called by kernels, on a fiber
MKC_API uint32_t mkc_thread_index();
MKC_API void mkc_wait_for_grids();
MKC_API uint32_t mkc_warp_index(uint32_t line);  // of the caller
MKC_API uint32_t mkc_cta_index();
MKC_API uint32_t mkc_cta_count();
MKC_API char* mkc_shared_memory();
MKC_API uint32_t mkc_shared_address(const void* p);

MKC_API void mkc_sync_cta();
MKC_API void mkc_sync_warp();
MKC_API void mkc_barrier(uint32_t id, uint32_t threads, bool wait);
MKC_API uint32_t mkc_vote(bool value);  // bit per lane
MKC_API uint32_t mkc_broadcast(uint32_t value, uint32_t lane);
MKC_API uint32_t mkc_shuffle_xor(uint32_t value, uint32_t lanes);

MKC_API uint64_t mkc_clock_ns();
MKC_API void mkc_pause(const uint64_t* flag, uint64_t value, uint64_t deadline, bool timer);

MKC_API void mkc_mbarrier_init(uint64_t* bar, uint32_t count);
MKC_API void mkc_mbarrier_init_fence();
MKC_API void mkc_mbarrier_arrive(uint64_t* bar, uint32_t expected_bytes);
MKC_API bool mkc_mbarrier_test(uint64_t* bar, uint32_t parity);
MKC_API void mkc_mbarrier_wait(uint64_t* bar, uint32_t parity);

// Clusters: `cta` is a CTA's rank in the caller's cluster, and a pointer says where in that CTA's shared memory.
MKC_API uint32_t mkc_cluster_rank();
MKC_API void mkc_cluster_come();
MKC_API void mkc_cluster_meet();
MKC_API uint32_t mkc_cluster_address(const void* p, uint32_t cta);
MKC_API void mkc_cluster_post(void* p, uint64_t* bar, uint32_t cta, const void* value, uint32_t bytes);
MKC_API void mkc_cluster_arrive(uint64_t* bar, uint32_t cta, bool releases);

MKC_API void mkc_fence_proxy_async(bool shared_only);

MKC_API void mkc_tensor_load(void* smem, const void* map, uint64_t* bar, uint32_t rank, int32_t c0, int32_t c1, int32_t c2, int32_t c3);
MKC_API void mkc_tensor_load_multicast(void* smem, const void* map, uint64_t* bar, uint32_t ctas, int32_t c0, int32_t c1, int32_t c2);
MKC_API void mkc_tensor_store(const void* map, const void* smem, uint32_t rank, int32_t c0, int32_t c1, int32_t c2, int32_t c3);
MKC_API void mkc_bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar);
MKC_API void mkc_bulk_store(void* global, const void* smem, uint32_t bytes);
MKC_API void mkc_store_commit();
MKC_API void mkc_store_wait(uint32_t pending, bool read_only);

// The memory operations themselves are inlined into the kernel (ThreadSanitizer then sees them); these report them.
MKC_API void mkc_check_word(const void* p, uint32_t bytes);  // before: is the address a legal one?
MKC_API void mkc_acquired(const void* p, uint64_t seen);     // after an acquiring load
MKC_API void mkc_released(bool acquires);                    // after a store or atomic that others may wait for
MKC_API uint32_t mkc_random(uint32_t count);                 // one of so many possibilities

MKC_API void mkc_stmatrix(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3, bool transposed);

MKC_API void mkc_check_shared(const void* p, uint32_t bytes);  // before a read: is it in this CTA's shared memory?
MKC_API void mkc_wrote_shared(void* p, uint32_t bytes);        // 16 bytes: the async proxy must not touch them before a fence

MKC_API void mkc_wgmma_fence();
// A is in shared memory, or in each thread's four words at a_words if that is not null.
MKC_API void mkc_wgmma(float* d, uint32_t n, uint32_t element, uint32_t a_major, uint32_t b_major, uint64_t a, const uint32_t* a_words,
                       uint64_t b, bool accumulate);
MKC_API void mkc_wgmma_commit();
MKC_API void mkc_wgmma_wait(uint32_t pending);

// ---- called by the host. One scheduler is used by one OS thread at a time.
namespace mkcpu {

// Why mkc_run came back. The Python mirror is in mkernel/runtime/cpu/scheduler.py.
enum Stop : int32_t {
  kIdle = 0,        // no launch is running
  kBudget = 1,      // the turns, or the time, are used up
  kLaunchDone = 2,  // at least one launch ended (well or with an error): ask mkc_finished
  kBlocked = 3,     // every thread waits for something that only the outside can do (a flag, a deadline), or is held
};
enum Finished : int32_t { kRunningLaunch = 0, kSucceeded = 1, kFailed = 2 };

struct CpuTensorMap {  // in the 128 bytes of abi::TensorMap
  uint64_t magic;
  uint64_t base;
  uint32_t rank;  // dimensions: 3, or 4; of 3 the last one has an extent of 1
  uint32_t element_bytes;
  uint64_t dims[4];     // elements, innermost first
  uint64_t strides[3];  // bytes, of dimensions 1 to 3
  uint32_t box[4];      // elements
  uint32_t swizzled;    // 0: the box's rows lie in shared memory as they are
  uint32_t reserved[7];
};
static_assert(sizeof(CpuTensorMap) == 128, "abi");
constexpr uint32_t kEveryCta = UINT32_MAX;
constexpr uint64_t kTensorMapMagic = 0x70616d2d7570636dull;

}  // namespace mkcpu

MKC_API void* mkc_create(uint64_t seed, bool virtual_time);
MKC_API void mkc_destroy(void* scheduler);
// `cluster`: CTAs of a cluster, of which the grid has a whole number. `apart`: clusters need not be resident at once. `early`: the kernel may begin
// before others have ended, so that until a thread has called wait_for_grids() it may touch nothing but parameters and shared memory.
MKC_API uint64_t mkc_launch(void* scheduler, void (*entry)(const void*), const void* parameters, size_t bytes, uint32_t grid,
                            uint32_t threads, uint32_t shared_bytes, uint32_t cluster, bool apart, bool early, uint32_t rank);
// Holds a CTA of a launch, or each (kEveryCta): it is passed over for so many turns while others can run, each time it has issued so many copies
// (0: once, from now on).
MKC_API void mkc_hold(void* scheduler, uint64_t launch, uint32_t cta, uint32_t copies, uint64_t turns);
MKC_API bool mkc_end_hold(void* scheduler);  // of the held CTAs that could run the one whose hold ends first goes on; false: there is none
MKC_API int32_t mkc_run(void* scheduler, uint64_t max_turns, uint64_t until_ns);
MKC_API int32_t mkc_finished(void* scheduler, uint64_t launch);
MKC_API void mkc_cancel(void* scheduler, uint64_t launch);
MKC_API void mkc_forget(void* scheduler, uint64_t launch);                                // a finished launch: frees its record
MKC_API size_t mkc_error(void* scheduler, uint64_t launch, char* text, size_t capacity);  // of a failed launch
MKC_API size_t mkc_report(void* scheduler, char* text, size_t capacity);                  // who waits for what, now
MKC_API uint64_t mkc_now(void* scheduler);
MKC_API void mkc_advance_to(void* scheduler, uint64_t ns);
MKC_API uint64_t mkc_next_deadline(void* scheduler);  // the earliest deadline of a waiting thread; UINT64_MAX: none
MKC_API uint64_t
mkc_next_timer(void* scheduler);         // the earliest time at which a thread has something to do (pause_until); UINT64_MAX: none
MKC_API void mkc_poke(void* scheduler);  // every thread that waits for a system flag looks again. From any thread.
MKC_API uint64_t mkc_turns(void* scheduler);
MKC_API uint64_t mkc_filled_rows();           // by TMA loads so far, of all schedulers: rows of boxes that lie outside of their matrix
MKC_API uint64_t mkc_trace(void* scheduler);  // hash of the interleaving so far
MKC_API void mkc_name(void* scheduler, uint64_t address, uint64_t bytes, const char* name);  // for reports; bytes = 0 removes

// Memory operations for engines. The scheduler is the one on whose thread they run, or null.
MKC_API void mkc_copy(void* scheduler, void* dst, const void* src, size_t bytes);
// A put is under way. Until mkc_put_lands its bytes at dst may be written at any time, until mkc_put_ends those at src may be read at any
// time: whatever a kernel's copies do there meanwhile is an error. `name` says whose it is.
MKC_API uint64_t mkc_put_begins(void* scheduler, void* dst, const void* src, size_t bytes, const char* name);
MKC_API void mkc_put_lands(void* scheduler, uint64_t put);
MKC_API void mkc_put_ends(void* scheduler, uint64_t put);
MKC_API void mkc_signal(uint64_t* flag, uint64_t value);
MKC_API uint64_t mkc_load(const uint64_t* flag);
MKC_API void mkc_engine_acquire(void* scheduler);  // ThreadSanitizer: what fibers released so far happens before what this thread does next
