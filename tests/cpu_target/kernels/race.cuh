// For ThreadSanitizer: threads hand values to each other through plain memory. kFault: the synchronization that is left out.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  uint64_t data, flag;
  uint64_t reserved[6];
};

enum Fault : uint32_t { kNone, kNoBarrier, kVoteIsNoBarrier, kRelaxedFlag, kNoMbarrier, kStoreNotAwaited, kStageReused, kOvertaken };

struct Storage {
  uint32_t value[64];
  uint64_t bar, loaded;
  uint64_t filled[8], taken[8];
  alignas(16) uint32_t piece[64];
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const uint32_t t = ptx::thread_index(), other = (t + 1) % 64;
  uint32_t* data = reinterpret_cast<uint32_t*>(p.data);
  uint32_t* counter = reinterpret_cast<uint32_t*>(p.flag);
  if (t == 0) {
    ptx::mbarrier_init(&s.bar, 64);
    ptx::mbarrier_init(&s.loaded, 1);
    for (uint32_t i = 0; i < 8; ++i) ptx::mbarrier_init(&s.filled[i], 1), ptx::mbarrier_init(&s.taken[i], 1);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();

  s.value[t] = t;  // between all threads
  if constexpr (Config::kFault != kNoBarrier) ptx::sync_cta();
  uint32_t sum = s.value[other];
  ptx::sync_cta();

  s.value[t] = t;  // inside a warp
  if constexpr (Config::kFault == kVoteIsNoBarrier) {
    ptx::all_of_warp(true);
  } else {
    ptx::sync_warp();
  }
  sum += s.value[t / 32 * 32 + (t + 1) % 32];
  ptx::sync_cta();

  s.value[t] = t;  // by mbarrier
  if constexpr (Config::kFault != kNoMbarrier) {
    ptx::mbarrier_arrive(&s.bar);
    ptx::mbarrier_wait(&s.bar, 0);
  }
  sum += s.value[other];
  ptx::sync_cta();

  if (t == 0) {  // by a word in global memory
    data[0] = 1;
    if constexpr (Config::kFault == kRelaxedFlag) {
      ptx::atomic_add(counter, 1u);
    } else {
      ptx::atomic_add_acq_rel(counter, 1u);
    }
  }
  if (t == 40) {
    while (ptx::load_acquire_gpu(counter) == 0) {
    }
    sum += data[0];
  }
  ptx::sync_cta();

  for (uint32_t i = 0; i < Config::kLaps * 8; ++i) {  // by eight slots, which one lane gives back for all of its warp
    const uint32_t slot = i % 8, parity = i / 8 & 1;
    if (t < 32) {
      ptx::mbarrier_wait(&s.filled[slot], parity);
      if constexpr (Config::kFault != kOvertaken) ptx::sync_warp();
      if (t == 0) ptx::mbarrier_arrive(&s.taken[slot]);
    } else if (t == 32) {
      ptx::mbarrier_wait(&s.taken[slot], parity ^ 1);
      ptx::mbarrier_arrive(&s.filled[slot]);
    }
  }
  ptx::sync_cta();

  if (t == 0) {  // through TMA
    for (uint32_t i = 0; i < 64; ++i) s.piece[i] = i;
    ptx::fence_proxy_async_shared();
    ptx::bulk_store(data + 64, s.piece, 256);
    ptx::store_commit();
    if constexpr (Config::kFault == kStageReused) s.piece[0] = 1;
    ptx::store_wait_read<0>();
    if constexpr (Config::kFault != kStoreNotAwaited) ptx::store_wait<0>();
    sum += data[64];
    ptx::store_wait<0>();
    s.piece[0] = sum;
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive_expect(&s.loaded, 256);
    ptx::bulk_load(s.piece, data + 64, 256, &s.loaded);
  }
  ptx::mbarrier_wait(&s.loaded, 0);
  data[128 + t] = sum + s.piece[t];
}

}  // namespace mkernel
