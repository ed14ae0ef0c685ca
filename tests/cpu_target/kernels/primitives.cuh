// Every ptx function that is no copy and no wgmma, with results that the host can predict. Two CTAs of 64 threads.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct Parameters {
  uint64_t out;    // uint32_t[kWords] per CTA
  uint64_t words;  // uint32_t[4], zero
  uint64_t flags;  // uint64_t[4], zero
};

enum Out : uint32_t {
  kIndex = 0,
  kVotes = 64,
  kShuffle = 128,
  kBarriers = 192,
  kAtomics = 256,
  kPacked = 320,
  kMisc = 384,
  kSwapped = 448,
  kNumbers = 512,
  kWords = 576
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  const uint32_t t = ptx::thread_index(), cta = ptx::cta_index(), lane = ptx::lane_index(), warp = ptx::warp_index();
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out) + cta * kWords;
  uint32_t* words = reinterpret_cast<uint32_t*>(p.words);
  uint64_t* flags = reinterpret_cast<uint64_t*>(p.flags);
  uint32_t* shared = reinterpret_cast<uint32_t*>(ptx::shared_memory());
  uint64_t* bar = reinterpret_cast<uint64_t*>(ptx::shared_memory() + 1024);
  ptx::registers_decrease<40>();
  ptx::registers_increase<64>();
  out[kIndex + t] = cta << 24 | ptx::cta_count() << 16 | warp << 8 | lane;

  const bool all = ptx::all_of_warp(lane < 32), not_all = ptx::all_of_warp(lane != 7), any = ptx::any_of_warp(lane == 31),
             none = ptx::any_of_warp(false);
  out[kVotes + t] = all | not_all << 1 | any << 2 | none << 3;
  out[kShuffle + t] = ptx::broadcast(t * 3, 5);
  out[kSwapped + t] = ptx::bits(ptx::shuffle_xor(t + 0.5f, 3));
  const float nan = ptx::from_bits(0x7fc00000u);
  out[kNumbers + t] = ptx::bits(t < 2    ? ptx::maximum(t == 0 ? nan : 7.0f, t == 0 ? 7.0f : nan)
                                : t < 32 ? ptx::log2(t - 2.0f)
                                         : ptx::maximum(-1.0f * t, -40.0f));

  // Values travel between threads through shared memory, once per kind of barrier.
  shared[t] = t;
  ptx::sync_warp();
  uint32_t sum = shared[warp * 32 + (lane + 1) % 32];
  ptx::sync_cta();
  shared[t] = t * 100;
  ptx::sync_cta();
  sum += shared[(t + 33) % 64];
  ptx::barrier_sync(3, 64);
  if (warp == 0) {
    shared[t] = t + 7000;
    ptx::barrier_arrive(5, 64);
  } else {
    ptx::barrier_sync(5, 64);
    sum += shared[lane];
  }
  out[kBarriers + t] = sum;

  // An mbarrier of 64 arrivals through three phases, and one that is tested.
  if (t == 0) {
    ptx::mbarrier_init(bar, 64);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  for (uint32_t phase = 0; phase < 3; ++phase) {
    shared[t] = phase * 1000 + t;
    ptx::mbarrier_arrive(bar);
    if (phase == 1) {
      while (!ptx::mbarrier_try_wait(bar, phase & 1)) {
      }
    } else {
      ptx::mbarrier_wait(bar, phase & 1);
    }
    if (shared[(t + 17) % 64] != phase * 1000 + (t + 17) % 64) out[kMisc] = 0xbad;
    ptx::sync_cta();
  }

  ptx::atomic_add(&words[0], t);
  const uint32_t ticket = ptx::atomic_add_acq_rel(&words[1], 1u);
  out[kAtomics + t] = ticket;
  ptx::atomic_add(&flags[0], uint64_t(1) << 32);
  ptx::compare_and_swap(&words[2], 0, cta + 1);
  if (ptx::compare_and_swap(&words[2], 77, 78) == 77) out[kMisc] = 0xbad;

  out[kPacked + t] = ptx::pack<ptx::Element::kBFloat16>(1.0f + t, -0.5f * t);
  if (t == 0) out[kMisc + 1] = ptx::pack<ptx::Element::kFloat16>(1.5f, -65520.0f);
  if (t == 1) out[kMisc + 2] = ptx::shared_address(shared + 4) - ptx::shared_address(shared);
  if (t == 2) out[kMisc + 3] = ptx::clock_ns() > 0;

  // CTA 0 sends, CTA 1 receives: both widths, and the wait that every kernel uses.
  if (t == 0 && cta == 0) {
    words[3] = 4711;
    ptx::store_release_sys(&flags[1], uint64_t(1) << 40);
  }
  if (t == 0 && cta == 1) {
    const uint64_t deadline = ptx::clock_ns() + 5'000'000'000ull;
    while (ptx::load_acquire_sys(&flags[1]) < (uint64_t(1) << 40) && ptx::clock_ns() < deadline)
      ptx::pause(&flags[1], uint64_t(1) << 40, deadline);
    out[kMisc + 4] = words[3];
    ptx::store_release_sys(&words[3], 4712u);
    out[kMisc + 5] = ptx::load_acquire_gpu(&words[3]);
  }
}

}  // namespace mkernel
