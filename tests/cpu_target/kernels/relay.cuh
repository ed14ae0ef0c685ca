// CTA 0 copies `in` to `middle` through shared memory and raises a flag; CTA 1 then copies `middle` to `out`. kFault: what is left out.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  uint64_t in, middle, out, flag, pieces;  // pieces of kPiece bytes
  uint64_t expected;                       // the flag's value
  uint64_t reserved[2];
};

enum Fault : uint32_t { kNone, kNoProxyFence, kOnlyRead, kNoReadWait };
constexpr uint32_t kPiece = 1024, kStages = 2;

struct Storage {
  alignas(128) char piece[kStages][kPiece];
  uint64_t arrived[kStages];
};

MK_DEVICE void copy(Storage& s, const char* from, char* to, uint64_t pieces) {
  for (uint32_t i = 0; i < pieces; ++i) {
    const uint32_t stage = i % kStages;
    if constexpr (Config::kFault != kNoReadWait) ptx::store_wait_read<kStages - 1>();
    ptx::mbarrier_arrive_expect(&s.arrived[stage], kPiece);
    ptx::bulk_load(s.piece[stage], from + i * kPiece, kPiece, &s.arrived[stage]);
    ptx::mbarrier_wait(&s.arrived[stage], i / kStages & 1);
    ptx::bulk_store(to + i * kPiece, s.piece[stage], kPiece);
    ptx::store_commit();
  }
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  if (ptx::thread_index() != 0) return;
  for (uint32_t i = 0; i < kStages; ++i) ptx::mbarrier_init(&s.arrived[i], 1);
  ptx::mbarrier_init_fence();
  uint64_t* flag = reinterpret_cast<uint64_t*>(p.flag);
  char* middle = reinterpret_cast<char*>(p.middle);
  if (ptx::cta_index() == 0) {
    copy(s, reinterpret_cast<const char*>(p.in), middle, p.pieces);
    if constexpr (Config::kFault == kOnlyRead) {
      ptx::store_wait_read<0>();
    } else {
      ptx::store_wait<0>();
    }
    ptx::store_release_sys(flag, p.expected);
  } else {
    while (ptx::load_acquire_sys(flag) < p.expected) ptx::pause(flag, p.expected, ~uint64_t(0));
    if constexpr (Config::kFault != kNoProxyFence) ptx::fence_proxy_async();
    copy(s, middle, reinterpret_cast<char*>(p.out), p.pieces);
    ptx::store_wait<0>();
  }
}

}  // namespace mkernel
