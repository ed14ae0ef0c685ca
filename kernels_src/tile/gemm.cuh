// The GEMM of every fused kernel: C tiles of kBlockM x kBlockN = A (K-major) * B (K-major or N-major), float32 accumulation.
//
// A CTA is three warpgroups. Of warpgroup 0, one thread of warp 0 loads tiles by TMA, warp 1 schedules, one thread of warp 2 stores results by TMA,
// and warp 3 raises flags. Warpgroups 1 and 2, the consumers, each multiply 64 rows of the tile and add what other ranks computed of it. The loading
// thread begins with the CTA's first tile by itself, if that waits for nobody (first_item). They pass on to each other (names of GemmStorage in the
// middle):
//   scheduler         queue        the others         items: one part of one tile each, whose inputs are there; kStop at the end
//   loading thread    stages       consumers          A and B of one k step, or some panels of a partial tile
//   loading thread    tile_wanted  scheduler          the tile is nearly loaded: take the next one
//   consumers         blocks       storing thread     64 rows of a result or a partial tile, 128 bytes wide
//   storing thread    announce     flag-raising warp  tiles whose stores are complete
//   scheduler         entries      all that write     whether all ranks have entered the call
#pragma once
#include "comm/ring.cuh"
#include "tile/load.cuh"
#include "tile/multiply.cuh"
#include "tile/op.cuh"
#include "tile/schedule.cuh"

namespace mkernel {

// All threads of the CTA; whatever one did before is done when it comes here. Computes until the tile counter runs out, then leaves the call.
// Nothing may follow: each warpgroup ends with its own number of registers. Of an early kernel the call has not begun.
template <class Config, TileOp<Config> Op>
MK_DEVICE void compute_role(const Call& coming, const Op& op, GemmStorage<Config>& storage) {
  Call call = coming;
  static_assert(!GemmShape<Config>::kPaired || !Op::kShortTiles, "pairs have whole tiles");
  // Stages of addends each CTA fills for itself. If it did not wait for all of its cluster, it could give one back twice while another had not once.
  static_assert(!Op::kAdds || GemmShape<Config>::kSharing == GemmShape<Config>::kCluster, "beside sums all CTAs share a row or a column");
  static_assert(!GemmShape<Config>::kSwapped || !(Op::kAdds || Op::kTakes || Op::kMasks || Op::kShortTiles || Op::kParts > 1),
                "swapped operands: tiles of plain products only");
  // What takes long at the beginning stands side by side: one warp works out the first tile, one fetches maps, two initialize barriers. Roles are told
  // apart by halves, since of a switch ptxas makes a jump by a table, which first has to come from memory.
  const uint32_t warp = ptx::warp_index();
  // The last CTA computes from the start. Where nobody can multiply before all ranks have entered, a consumer tells them as soon as it can.
  const bool announces = Op::kAnnouncesEntry && ptx::cta_index() + 1 == ptx::cta_count();
  [[maybe_unused]] typename Op::Read read;
  if constexpr (Op::kGathers) {
    if (announces && warp == kGemmThreads / 32 - 1) announce_entry(call);  // before it reads: what it releases waits for that
    if (warp >= 4) read = op.read_ahead();
  }
  TilePart first{kStop, {}};
  if (warp < 2) {
    if (warp == 0) {
      first = first_item<Config>(call, op);
    } else if (ptx::lane_index() == 0) {
      op.prefetch_a();
      ptx::prefetch_map(&op.p.b_map);
      ptx::prefetch_map(&op.p.c_map);
    }
  } else if (warp < 4 && ptx::lane_index() == 0) {
    if (warp == 2) {
      init_inputs(storage);
    } else {
      init_results(storage);
    }
  }
  Pair<Config>::come();
  // All that need the epoch have read it before the CTA leaves the call. The loading thread does not: it would wait for it where it uses the register
  // for something else, before its first load.
  if constexpr (kEarly) begin_call_late(call, warp != 0);
  Pair<Config>::meet();
  if (warp < 4) {
    ptx::registers_decrease<kProducerRegisters>();
    if (warp < 2) {
      if (warp == 0) {
        if (ptx::elected()) load_tiles(op, storage, first);
      } else {
        schedule_tiles(call, op, storage);
      }
    } else if (warp == 2) {
      if (ptx::elected()) store_tiles(call, op, storage);
    } else {
      if (announces && !Op::kGathers) announce_entry(call);
      if constexpr (Op::kMoves) op.move(call);
      if constexpr (Op::kAnnounces) {
        const MaybeEntered entered = storage.entries.pass(call);
        storage.announce.serve([&](uint32_t tile) { op.raise(*entered, tile); });  // only a thread that has entered posts
      }
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    if constexpr (Op::kGathers) op.gather(call, storage.entries, read);
    multiply_tiles(call, op, storage);
    if constexpr (Op::kFinishes) {
      if (const MaybeEntered entered = storage.entries.pass(call)) op.finish(*entered);
    }
  }
}

}  // namespace mkernel
