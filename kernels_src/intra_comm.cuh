// A CTA that moves data between the ranks of a node before it computes: thread 0 copies, a thread of warp 2 waits for what comes from others,
// warp 1 raises flags.
#pragma once
#include "copy.cuh"
#include "gemm.cuh"

namespace mkernel {

struct CopyingStorage {
  union {
    GemmStorage<Config> gemm;
    CopyPieces pieces;
  };
  CopyBarriers copy_barriers;  // not shared with anything: barriers must not be overwritten
  Handover arrived, announce;  // items for thread 0, flags for warp 1
};

// All threads of the CTA. copy() and wait(), one thread each, end what they hand over with kNoMore: one of them `announce`, the other `arrived`
// if it is waited for.
template <class Parameters, class Copy, class Wait>
MK_DEVICE void intra_comm(const Call& call, const Parameters& p, CopyingStorage& storage, const Copy& copy, const Wait& wait) {
  if (ptx::thread_index() == 0) {
    storage.arrived.init();
    storage.announce.init();
  }
  ptx::sync_cta();
  const uint32_t warp = ptx::warp_index();
  if (warp == 0) {
    if (ptx::lane_index() == 0) copy();
  } else if (warp == 1) {
    storage.announce.serve([&](uint32_t flag) { raise_flag(call, p, flag, 1); });
  } else if (warp == 2) {
    if (ptx::lane_index() == 0) wait();
  }
  ptx::sync_cta();
}

}  // namespace mkernel
