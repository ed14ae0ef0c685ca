// A small correct kernel (kFault == 0) and its planted faults, one each. One CTA of 128 threads unless said otherwise.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  uint64_t in, out;  // 16-byte aligned
  uint64_t flag;
  uint64_t reserved[5];
};

enum Fault : uint32_t {
  kNone,
  kNoSharedFence,
  kNoStoreWait,
  kNoCommit,
  kNoArrive,
  kNoWgmmaWait,
  kNoInitFence,
  kTooManyArrivals,
  kBadParity,
  kOutside,
  kMisaligned,
  kLoadNotAwaited,
  kDiverged,
  kBarrierCounts,
  kNoWgmmaFence,
  kBarrierThreads,
  kOverwritten,
  kUninitialized,
  kNotSwizzled,
  kDifferentOperands,
  kMisalignedFlag,
  kGenericWgmma,
  kNotATensorMap,
  kWrongBytes,
  kSharedOverrun,
  kStackOverrun,
  kNullPointer,
  kDividedByZero,
  kOneLaneShuffles,
  kLanesShuffleApart
};
constexpr uint32_t kFault = Config::kFault, kBytes = 2048;

struct Storage {
  alignas(1024) char tile[8192];
  alignas(1024) char operand[8192];
  uint64_t loaded;
  uint64_t never;
};

MK_DEVICE int deep(volatile int* up) {
  volatile int here[1024];
  here[0] = up == nullptr ? 0 : up[0] + 1;
  return here[0] < 1000000 ? deep(here) + here[0] : 0;
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const uint32_t t = ptx::thread_index(), lane = ptx::lane_index();
  if (t == 0) {
    ptx::mbarrier_init(&s.loaded, kFault == kNoArrive ? 2 : 1);
    if constexpr (kFault != kNoInitFence) ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  if (t == 0) {
    const char* in = reinterpret_cast<const char*>(p.in);
    ptx::mbarrier_arrive_expect(&s.loaded, kFault == kWrongBytes ? kBytes + 16 : kBytes);
    if constexpr (kFault == kTooManyArrivals) ptx::mbarrier_arrive(&s.loaded);
    ptx::bulk_load(kFault == kOutside ? ptx::shared_memory() + Config::kSharedBytes - 1024 : s.operand,
                   in + (kFault == kMisaligned ? 8 : 0), kBytes, &s.loaded);
    if constexpr (kFault == kNotATensorMap) ptx::tma_load_3d(s.tile, reinterpret_cast<const abi::TensorMap*>(&p), &s.loaded, 0, 0, 0);
    if constexpr (kFault == kOverwritten) s.loaded = 1;
    if constexpr (kFault == kUninitialized) ptx::mbarrier_arrive(&s.never);
    if constexpr (kFault == kMisalignedFlag) ptx::store_release_sys(reinterpret_cast<uint64_t*>(p.flag + 4), uint64_t(1));
  }
  if constexpr (kFault == kSharedOverrun) {
    if (t == 5) ptx::shared_memory()[Config::kSharedBytes + 16] = 1;
  }
  if constexpr (kFault == kStackOverrun) {
    if (t == 6) s.never = deep(nullptr);
  }
  if constexpr (kFault == kNullPointer) {
    if (t == 7) *reinterpret_cast<volatile int*>(p.reserved[0] + 8) = 1;
  }
  if constexpr (kFault == kDividedByZero) {
    if (t == 8) s.never = 7 / p.reserved[0];
  }
  if constexpr (kFault == kLoadNotAwaited) return;
  ptx::mbarrier_wait(&s.loaded, kFault == kBadParity ? 2 : 0);
  if constexpr (kFault == kDiverged) {
    if (lane == 3) {
      ptx::sync_warp();
    } else {
      ptx::all_of_warp(true);
    }
  }
  if constexpr (kFault == kOneLaneShuffles) {
    if (lane == 3) s.never = ptx::warp_index();
  }
  if constexpr (kFault == kLanesShuffleApart) {
    if (lane < 16) {
      s.never = ptx::warp_index();
    } else {
      s.never = ptx::warp_index() + 1;
    }
  }
  if constexpr (kFault == kBarrierCounts) ptx::barrier_sync(2, t < 64 ? 128 : 96);
  if constexpr (kFault == kBarrierThreads) ptx::barrier_sync(2, 100);

  float d[32] = {};
  uint64_t a = ptx::matrix_descriptor(s.operand, 16, 1024);
  if constexpr (kFault == kNotSwizzled) a &= ~(uint64_t(3) << 62);
  if constexpr (kFault == kDifferentOperands) a += t == 77;
  if constexpr (kFault == kGenericWgmma) {
    ptx::stmatrix_x4(s.operand + t * 16, 0, 0, 0, 0);
    ptx::sync_cta();
  }
  if constexpr (kFault != kNoWgmmaFence) ptx::wgmma_fence();
  ptx::wgmma<64, ptx::Element::kBFloat16, ptx::Major::kK, ptx::Major::kK>(d, a, ptx::matrix_descriptor(s.operand, 16, 1024), false);
  ptx::wgmma_commit();
  if constexpr (kFault != kNoWgmmaWait) ptx::wgmma_wait<0>(d);

  ptx::stmatrix_x4(s.tile + t * 16, t, t + 1, t + 2, t + 3);
  if constexpr (kFault != kNoSharedFence) ptx::fence_proxy_async_shared();
  ptx::barrier_sync(1, 128);
  if (t == 0) {
    ptx::bulk_store(reinterpret_cast<char*>(p.out), s.tile, kBytes);
    if constexpr (kFault != kNoCommit) ptx::store_commit();
    if constexpr (kFault != kNoStoreWait) ptx::store_wait<0>();
  }
}

}  // namespace mkernel
