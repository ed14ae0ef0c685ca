// Pairs of CTAs (Config::kCluster 2): CTAs 2 i and 2 i + 1 of a rank are a cluster, and multiply two tiles that are neighbours in M, with the
// same columns of B. Each loads its own rows of A and half of those columns, by TMA to both. So an SM loads a third less, of tiles of 128
// columns a quarter: where rows do not begin at multiples of 128 bytes, it is loads that bind (docs/planner.md).
//
// A tile's number means both tiles; the CTA of rank 0 in the cluster, the leader, has the upper one. Its scheduler takes numbers, waits for the
// inputs of both tiles, offers them to its own CTA, and sends them to the scheduler of the other CTA, which offers them there. Where no row is
// left for the other CTA's tile, that is multiplied with zeros, none of it is stored or sent, and nobody is told of it. Barriers that the CTAs share:
//   relay.filled   of the other CTA: the leader's scheduler arrives
//   relay.taken    of the leader: the other scheduler arrives
//   stages.filled  of each CTA: its own loading thread arrives; bytes come from both
//   stages.taken   of each CTA: the consumers of both, because its loading thread writes to both
// Partial tiles that are added to the product each CTA loads for itself, through the same stages. Both CTAs add as many, of no rows where there is
// no tile, and both give each of these stages back to both: so they always stand at the same stage, of the same use.
//
// None of these waits has a deadline. Each is for threads of the same GPU, which are resident as long as the pair is, and none of which stops
// before the end of the queue: what they wait for outside of the pair has deadlines, and after a failure the leader still offers kStop to both.
// No CTA of a pair ends before the other one has done all that reaches its shared memory (end).
#pragma once
#include "tile/storage.cuh"

namespace mkernel {

template <class Config>
struct Pair {
  using Shape = GemmShape<Config>;
  static constexpr bool kIs = Shape::kPaired;
  static constexpr uint32_t kBoth = 3;  // a mask of CTAs

  MK_DEVICE static bool leads() { return ptx::cluster_rank() == 0; }

  // From the leader's scheduler to the other one, by warp functions: an item, and with it what the leader has acquired. `at`: where it is in
  // the leader's queue, whose slots the relay's are like.
  MK_DEVICE static void send(GemmStorage<Config>& storage, const RingPosition<kTileQueue>& at, uint32_t item) {
    if constexpr (kIs) {
      if (ptx::lane_index() == 0) {
        ptx::cluster_wait(&storage.relay.slots.taken[at.index], at.parity ^ 1);
        ptx::cluster_store(&storage.relay.item[at.index], 1, item);
        ptx::cluster_arrive(&storage.relay.slots.filled[at.index], 1);
      }
      ptx::sync_warp();
    }
  }
  MK_DEVICE static uint32_t receive(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at) {
    ptx::cluster_wait(&storage.relay.slots.filled[at.index], at.parity);
    const uint32_t item = storage.relay.item[at.index];
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) ptx::cluster_arrive(&storage.relay.slots.taken[at.index], 0);
    at.advance();
    return item;
  }

  // Gives a stage back to both CTAs: lanes 0 and 1 of a warp that has read it. The own CTA by an ordinary arrival: the way through the other one's
  // takes longer, and the wider the tiles, the sooner their few stages are wanted again.
  MK_DEVICE static void give_back(uint64_t* taken, uint32_t lane) {
    if (lane == 0) {
      ptx::mbarrier_arrive(taken);
    } else {
      ptx::cluster_give_back(taken, ptx::cluster_rank() ^ 1);
    }
  }

  // All threads, when one thread of each CTA has initialized its barriers, and when nothing more is to be done.
  MK_DEVICE static void begin() {
    if constexpr (kIs) {
      ptx::sync_warp();
      ptx::cluster_sync();
    } else {
      ptx::sync_cta();
    }
  }
  MK_DEVICE static void end() {
    if constexpr (kIs) {
      ptx::sync_warp();  // of some warps one lane has worked
      ptx::cluster_sync();
    }
  }

  // The loading thread: its half of a stage of B, for both. Of a row-major B that is half of the k rows of each panel, else half of the columns:
  // either way a multiple of 8 rows of shared memory, after which the swizzle repeats.
  MK_DEVICE static void load_b(char* smem, const abi::TensorMap* map, uint64_t* filled, int32_t column, int32_t k, int32_t plane) {
    const uint32_t rank = ptx::cluster_rank();
    if constexpr (Config::kBRowMajor) {
#pragma unroll
      for (uint32_t p = 0; p < Shape::kBlockN / kPanel; ++p) {
        ptx::tma_load_3d_multicast(smem + p * Shape::kPanelBytes + rank * (Shape::kPanelBytes / 2), map, filled, kBoth, column + p * kPanel,
                                   k + rank * (Shape::kBlockK / 2), plane);
      }
    } else {
      ptx::tma_load_3d_multicast(smem + rank * (Shape::kBytesB / 2), map, filled, kBoth, k, column + rank * Shape::kHalfN, plane);
    }
  }
};

}  // namespace mkernel
