// Clusters of CTAs (Config::kCluster 2 or 4): so many CTAs of a rank that follow each other multiply tiles that are neighbours, kClusterM in M
// times kClusterN in N. Those of a column have the same columns of B, and those of a row the same rows of A, of which each loads its part, by TMA
// to all of them. So a pair in M loads a third less of tiles of 256 columns, and a pair in N a quarter less of tiles of 128: where rows do not begin
// at multiples of 128 bytes, it is loads that bind (docs/planner.md).
//
// A tile's number means all tiles of a cluster; the CTA of rank 0 in it, the leader, has the first one. Its scheduler takes numbers, waits for the
// inputs of all these tiles, offers them to its own CTA, and sends them to the schedulers of the other CTAs, which offer them there. Where no row or
// column is left for another CTA's tile, that is multiplied with zeros, none of it is stored or sent, and nobody is told of it. Barriers that the
// CTAs share:
//   relay.filled   of the other CTAs: the leader's scheduler arrives, and their own, which expects an item
//   relay.taken    of the leader: the other schedulers arrive
//   stages.filled  of each CTA: its own loading thread arrives; bytes come from all of its row and column
//   stages.taken   of each CTA: the consumers of all of its row and column, because its loading thread writes to them
// Partial tiles that are added to the product each CTA loads for itself, through the same stages. All CTAs add as many, of no rows where there is
// no tile, and all give each of these stages back as the others: so they always stand at the same stage, of the same use.
//
// None of these waits has a deadline. Each is for threads of the same GPU, which are resident as long as the cluster is, and none of which stops
// before the end of the queue: what they wait for outside of the cluster has deadlines, and after a failure the leader still offers kStop to all.
// No CTA of a cluster ends before the others have done all that reaches its shared memory (end_loading, end_sending).
#pragma once
#include "tile/storage.cuh"

namespace mkernel {

template <class Config>
struct Pair {
  using Shape = GemmShape<Config>;
  static constexpr bool kIs = Shape::kPaired;
  // A CTA's place in its cluster, and masks of those in the same row and column.
  MK_DEVICE static uint32_t row() { return ptx::cluster_rank() / Shape::kClusterN; }
  MK_DEVICE static uint32_t column() { return ptx::cluster_rank() % Shape::kClusterN; }
  MK_DEVICE static uint32_t of_row() { return ((1u << Shape::kClusterN) - 1) << row() * Shape::kClusterN; }
  MK_DEVICE static uint32_t of_column() {
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t m = 0; m < Shape::kClusterM; ++m) mask |= 1u << m * Shape::kClusterN;
    return mask << column();
  }

  MK_DEVICE static bool leads() { return ptx::cluster_rank() == 0; }

  // From the leader's scheduler to the others, by warp functions: an item, and, where it says so, with it what the leader has acquired: that takes a
  // fence, which beside the first loads takes 1000 cycles and more. `at`: where it is in the leader's queue, whose slots the relay's are like.
  MK_DEVICE static void send(GemmStorage<Config>& storage, const RingPosition<kTileQueue>& at, uint32_t item, bool has_acquired) {
    if constexpr (kIs) {
      const uint32_t cta = ptx::lane_index();  // of each other CTA a lane: one fence for all of them
      if (cta > 0 && cta < Shape::kCluster) {
        uint64_t* filled = &storage.relay.slots.filled[at.index];
        ptx::cluster_wait(&storage.relay.slots.taken[at.index], at.parity ^ 1);
        ptx::cluster_post(&storage.relay.item[at.index], filled, cta, item);
        if (has_acquired) {
          ptx::cluster_arrive(filled, cta);
        } else {
          ptx::cluster_arrive_relaxed(filled, cta);
        }
      }
      ptx::sync_warp();
    }
  }
  MK_DEVICE static uint32_t receive(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at) {
    if (ptx::lane_index() == 0) storage.relay.slots.fill_by_tma(at, sizeof(uint32_t));
    ptx::cluster_wait(&storage.relay.slots.filled[at.index], at.parity);
    const uint32_t item = storage.relay.item[at.index];
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) ptx::cluster_give_back(&storage.relay.slots.taken[at.index], 0);
    at.advance();
    return item;
  }

  // Gives a stage back to all CTAs of the row and column: as many lanes of a warp that has read it. (Of two by two they are those whose ranks differ
  // by one bit.) The own CTA by an ordinary arrival: the way through another one's takes longer, and the wider the tiles, the sooner their few stages
  // are wanted again.
  MK_DEVICE static void give_back(uint64_t* taken, uint32_t lane) {
    ptx::cluster_give_back_by(lane, Shape::kSharing, taken, ptx::cluster_rank() ^ lane);
  }

  // All threads, when those of their CTA that initialize barriers have done so, and then before they use them.
  MK_DEVICE static void come() {
    if constexpr (kIs || Shape::kClusterK > 1) {
      ptx::sync_warp();  // of some warps one lane has worked
      ptx::cluster_come();
    }
  }
  MK_DEVICE static void meet() {
    ptx::sync_cta();
    if constexpr (kIs) ptx::cluster_meet();
  }

  // Before a CTA ends, whatever others do to its shared memory must have been done. What they load into it, and items, it has waited for. Stages that
  // they give back its loading thread waits for, and slots of the relay the leader's scheduler: all that there are.
  MK_DEVICE static void end_loading(GemmStorage<Config>& storage, StagePosition<Config>& stage, const StageRing<Config>& ring) {
    if constexpr (kIs) {
#pragma unroll 1
      for (uint32_t i = 0; i < ring.count(); ++i, stage.advance(ring.count())) storage.stages.wait_taken(stage);
    }
  }
  MK_DEVICE static void end_sending(GemmStorage<Config>& storage, RingPosition<kTileQueue>& at) {
    if constexpr (kIs) {
#pragma unroll 1
      for (uint32_t i = 0; i < kTileQueue; ++i, at.advance()) ptx::cluster_wait(&storage.relay.slots.taken[at.index], at.parity ^ 1);
    }
  }

  // Of the rows of A that a stage has, each CTA of a row loads a part, by TMA to all of the row: a multiple of 8, after which the swizzle repeats. This
  // is where its own begins.
  MK_DEVICE static uint32_t first_row(uint32_t rows) {
    if constexpr (Shape::kClusterN > 1) return column() * (rows / Shape::kClusterN);
    return 0;
  }

  // The loading thread: its part of a stage of B, for all CTAs of its column. Of a row-major B that is a part of the k rows of each panel, else of
  // the columns: either way a multiple of 8 rows of shared memory, after which the swizzle repeats.
  MK_DEVICE static void load_b(char* smem, const abi::TensorMap* map, uint64_t* filled, int32_t at, int32_t k, int32_t plane,
                               uint32_t width) {
    constexpr uint32_t kParts = Shape::kClusterM;
    const uint32_t part = row(), ctas = of_column();
    if constexpr (Config::kBRowMajor) {
#pragma unroll
      for (uint32_t p = 0; p < Shape::kPanelsOfB; ++p) {
        if (Shape::kMayBeNarrow && p * kPanel >= width) break;
        ptx::tma_load_3d_multicast(smem + p * Shape::kPanelBytes + part * (Shape::kPanelBytes / kParts), map, filled, ctas, at + p * kPanel,
                                   k + part * (Shape::kBlockK / kParts), plane);
      }
    } else {
      const uint32_t columns = (Shape::kMayBeNarrow ? width : Shape::kColumns) / kParts;
      ptx::tma_load_3d_multicast(smem + part * columns * kSwizzleBytes, map, filled, ctas, k, at + part * columns, plane);
    }
  }
};

}  // namespace mkernel
