// Pairs of CTAs of 128 threads. Thread 64 of each hands a growing sum to the other and back; then it streams `steps` stages of 16 rows of 128
// bytes through shared memory, loading half of every stage for both CTAs. Threads 0-63 add up what arrives; 96-127 leave at once. kFault: what is
// wrong.
#pragma once
#include "ptx.cuh"

namespace mkernel {

struct alignas(64) Parameters {
  abi::TensorMap map;  // 16-bit elements, boxes of 64 x 8
  uint64_t out;        // uint32_t[2 + steps * 64] per CTA: rank, sum; then what each thread has added up of each stage
  uint64_t rounds, steps;
  uint64_t reserved[5];
};

enum Fault : uint32_t {
  kNone,
  kNoStartSync,
  kNoEndSync,
  kNoSuchCta,
  kNotGivenBack,
  kTooEarly,
  kOneStaysAway,
  kUninitialized,
  kNoMulticast,
  kAcquiredInCta,
  kRelaxedRelease
};
constexpr uint32_t kFault = Config::kFault, kStages = 2, kHalf = 8 * 128;
static_assert(Config::kCluster == 2 && Config::kThreads == 128);

struct Storage {
  alignas(1024) char stage[kStages][2 * kHalf];
  uint64_t filled[kStages], consumed[kStages];
  uint64_t sum_sent, never;
  uint32_t sum;
};

MK_DEVICE void wait_sum(Storage& s, uint32_t parity) {
  if constexpr (kFault == kAcquiredInCta) {
    ptx::mbarrier_wait(&s.sum_sent, parity);
  } else {
    ptx::mbarrier_wait_cluster(&s.sum_sent, parity);
  }
}
MK_DEVICE void send_sum(Storage& s, uint32_t peer, uint32_t sum) {
  ptx::store_cluster(&s.sum, peer, sum);
  if constexpr (kFault == kRelaxedRelease) {
    ptx::mbarrier_arrive_cluster_relaxed(&s.sum_sent, peer);
  } else {
    ptx::mbarrier_arrive_cluster(&s.sum_sent, kFault == kNoSuchCta ? 2 : peer);
  }
}

MK_DEVICE void produce(const Parameters& p, Storage& s, uint32_t rank) {
  for (uint32_t step = 0; step < p.steps; ++step) {
    const uint32_t stage = step % kStages, parity = step / kStages & 1;
    if constexpr (kFault != kTooEarly) ptx::mbarrier_wait_cluster(&s.consumed[stage], parity ^ 1);
    ptx::mbarrier_arrive_expect(&s.filled[stage], 2 * kHalf);
    const uint32_t ctas = kFault == kNoMulticast ? 1u << rank : 3;
    ptx::tma_load_3d_multicast(s.stage[stage] + rank * kHalf, &p.map, &s.filled[stage], 0, static_cast<int32_t>(step * 16 + rank * 8), 0,
                               ctas);
  }
}

MK_DEVICE void consume(const Parameters& p, Storage& s, uint32_t* sums) {
  const uint32_t t = ptx::thread_index(), lane = ptx::lane_index();
  for (uint32_t step = 0; step < p.steps; ++step) {
    const uint32_t stage = step % kStages, parity = step / kStages & 1;
    ptx::mbarrier_wait(&s.filled[stage], parity);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(s.stage[stage]) + t * 8;  // four threads per row
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 8; ++i) sum += words[i];
    sums[step * 64 + t] = sum;
    ptx::sync_warp();
    if (lane < 2 && (kFault != kNotGivenBack || lane == ptx::cta_rank_in_cluster())) ptx::mbarrier_arrive_cluster(&s.consumed[stage], lane);
  }
}

MK_DEVICE void talk(const Parameters& p, Storage& s, uint32_t* out, uint32_t rank) {
  uint32_t sum = 0;
  for (uint32_t round = 0; round < p.rounds; ++round) {
    if (rank == 0) send_sum(s, 1, sum);
    wait_sum(s, round & 1);
    sum = s.sum + 1;
    if (rank == 1) send_sum(s, 0, sum);
  }
  out[0] = rank;
  out[1] = sum;
  produce(p, s, rank);
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  const uint32_t t = ptx::thread_index(), rank = ptx::cta_rank_in_cluster();
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out) + ptx::cta_index() * (2 + p.steps * 64);
  if (t == 0 && (kFault != kUninitialized || rank == 0)) {
    for (uint32_t i = 0; i < kStages; ++i) ptx::mbarrier_init(&s.filled[i], 1), ptx::mbarrier_init(&s.consumed[i], 4);
    ptx::mbarrier_init(&s.sum_sent, 1);
    ptx::mbarrier_init(&s.never, 1);
    ptx::mbarrier_init_fence();
  }
  if constexpr (kFault == kNoStartSync) {
    ptx::sync_cta();
  } else {
    ptx::cluster_sync();
  }
  if (t >= 96) return;  // the cluster_sync at the end is for those who are left
  if (t >= 64) {
    if (t == 64) talk(p, s, out, rank);
  } else {
    consume(p, s, out + 2);
  }
  if constexpr (kFault == kOneStaysAway) {
    if (rank == 1) ptx::mbarrier_wait(&s.never, 0);
  }
  ptx::sync_warp();
  if constexpr (kFault != kNoEndSync) ptx::cluster_sync();
}

}  // namespace mkernel
