// Pairs of CTAs fill each other's shared memory: each loads half of every box to both, and hands the other a word. `fault`: what is left out.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  abi::TensorMap source;  // (kRounds * 2 * kRows, 64), boxes of (kRows, 64), not swizzled
  uint64_t out;           // per CTA: kRounds boxes of 2 * kRows rows, then kRounds times 16 bytes with the word
  uint64_t fault;
  uint64_t reserved[6];
};

enum Fault : uint32_t { kNone, kNoStart, kNoHandOver, kOneGivesBack, kNoEnd, kToItselfOnly, kOutside, kNoInitFence };
constexpr uint32_t kRounds = 3, kRows = 8, kHalf = kRows * 128, kCtas = 2;

struct Storage {
  alignas(1024) char box[kCtas * kHalf];
  uint64_t loaded, told, given_back;
  uint32_t word;
};

MK_DEVICE void fill(const Parameters& p, Storage& s, uint32_t rank, uint32_t round) {
  if (round > 0) ptx::mbarrier_wait(&s.given_back, (round - 1) % 2);
  ptx::mbarrier_arrive_expect(&s.loaded, kCtas * kHalf);
  const uint32_t to = p.fault == kToItselfOnly ? 1u << rank : p.fault == kOutside ? 7 : 3;
  ptx::tma_load_3d_multicast(s.box + rank * kHalf, &p.source, &s.loaded, to, 0, (round * kCtas + rank) * kRows, 0);
  ptx::mbarrier_arrive_expect(&s.told, sizeof(uint32_t));
  ptx::cluster_post(&s.word, &s.told, 1 - rank, ptx::cta_index() * 100 + round);
}

MK_DEVICE void drain(const Parameters& p, Storage& s, uint32_t rank, uint32_t round) {  // one warp
  const uint32_t lane = ptx::lane_index();
  char* out = reinterpret_cast<char*>(p.out) + ptx::cta_index() * kRounds * (kCtas * kHalf + 16);
  if (p.fault != kNoHandOver) ptx::cluster_wait(&s.told, round % 2);
  if (lane == 0) ptx::store_word(out + kRounds * kCtas * kHalf + round * 16, s.word);
  ptx::mbarrier_wait(&s.loaded, round % 2);
  for (uint32_t i = lane * 16; i < kCtas * kHalf; i += 512) ptx::store_global(out + round * kCtas * kHalf + i, ptx::load_shared(s.box + i));
  ptx::sync_warp();
  if (lane < kCtas && (p.fault != kOneGivesBack || lane == rank)) ptx::cluster_give_back(&s.given_back, lane);
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const uint32_t rank = ptx::cluster_rank(), t = ptx::thread_index();
  if (t == 0) {
    ptx::mbarrier_init(&s.loaded, 1);
    ptx::mbarrier_init(&s.told, 1);
    ptx::mbarrier_init(&s.given_back, p.fault == kOneGivesBack ? 1 : kCtas);
    if (p.fault != kNoInitFence) ptx::mbarrier_init_fence();
  }
  if (p.fault == kNoStart) {
    ptx::sync_cta();
  } else {
    ptx::cluster_come();
    ptx::cluster_meet();
  }
#pragma unroll 1
  for (uint32_t round = 0; round < kRounds; ++round) {
    if (t == 0) fill(p, s, rank, round);
    if (t >= 32) drain(p, s, rank, round);
  }
  ptx::sync_warp();
  if (p.fault != kNoEnd) ptx::cluster_come(), ptx::cluster_meet();
}

}  // namespace mkernel
