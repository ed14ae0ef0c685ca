// The consumer warpgroups of a compute CTA: each multiplies 64 rows of a tile and adds what other ranks computed of it.
#pragma once
#include "tile/epilogue.cuh"
#include "tile/pair.cuh"
#include "tile/taken.cuh"
#include "trace.cuh"

namespace mkernel {

// Where a stage's operands are, as wgmma has it.
struct StageOperands {
  uint64_t a, b;
};
template <class Config>
MK_DEVICE StageOperands stage_operands(const char* a, const char* b) {
  using Shape = GemmShape<Config>;
  const auto descriptor = [](const char* operand, ptx::Major major) {
    const uint32_t leading = major == ptx::Major::kMN ? Shape::kBlockK * kSwizzleBytes : 16;
    return ptx::warp_descriptor(ptx::matrix_descriptor(operand, leading, kSwizzleAtom));
  };
  return StageOperands{descriptor(a, Shape::kMajorA), descriptor(b, Shape::kMajorB)};
}

// One k step of an instruction's k for N columns and a warpgroup's blocks of 64 rows, from the given one on.
template <uint32_t N, uint32_t Unit, class Config>
MK_DEVICE void multiply_units(float (&d)[GemmShape<Config>::kHeld], uint64_t a, uint64_t b, bool accumulate) {
  using Shape = GemmShape<Config>;
  ptx::wgmma<N, Shape::kElement, Shape::kMajorA, Shape::kMajorB, Unit * Shape::kUnitHeld>(d, a, b, accumulate);
  if constexpr (Unit + 1 < Shape::kUnits) {
    multiply_units<N, Unit + 1, Config>(d, ptx::advance_descriptor(a, 64 * kSwizzleBytes), b, accumulate);
  }
}

// One k-step of kBlockK for 64 rows, or so many of each of its blocks, and N columns.
template <uint32_t N, class Config>
MK_DEVICE void multiply_stage(float (&d)[GemmShape<Config>::kHeld], const StageOperands& stage, bool accumulate) {
  using Shape = GemmShape<Config>;
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < Shape::kBlockK; k += kInstructionK) {
    const uint64_t a = ptx::advance_descriptor(stage.a, k * (Shape::kMajorA == ptx::Major::kMN ? kSwizzleBytes : 2));
    const uint64_t b = ptx::advance_descriptor(stage.b, k * (Shape::kMajorB == ptx::Major::kMN ? kSwizzleBytes : 2));
    multiply_units<N, 0, Config>(d, a, b, accumulate || k > 0);
  }
  ptx::wgmma_commit();
}

// A stage that all lanes of a warp have read, to all whose loading threads write to it.
template <class Config>
MK_DEVICE void give_back(GemmStorage<Config>& storage, uint32_t stage) {
  const uint32_t lane = ptx::lane_index();
  uint64_t* taken = &storage.stages.taken[stage];
  if constexpr (GemmShape<Config>::kPaired) {
    Pair<Config>::give_back(taken, lane);
  } else {
    if (lane == 0) ptx::mbarrier_arrive(taken);
  }
}

// Tells the other warpgroup that this one has seen its tile's last stage filled.
template <class Config>
MK_DEVICE void end_turn(GemmStorage<Config>& storage) {
  ptx::sync_warp();  // all lanes have seen that their own turn had come: the next time may follow soon
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&storage.turn.ended[ptx::thread_index() / kWarpgroup - 1]);
}

// Adds one partial tile, or the part of it in one stage.
template <uint32_t Part, class Config>
MK_DEVICE void add_stage(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, uint32_t stage, uint32_t warpgroup) {
  using Shape = GemmShape<Config>;
#pragma unroll
  for (uint32_t p = 0; p < Shape::kAddPanels; ++p) {
    const char* block = stage_block(storage, stage, p * kConsumerWarpgroups + warpgroup);
#pragma unroll
    for (uint32_t u = 0; u < kBlockUnits; ++u) {
      float* e = &d[((Part * Shape::kAddPanels + p) * kBlockUnits + u) * Partial<Config>::kUnit];
      Partial<Config>::add(e, ptx::load_shared(block + unit_offset(u)));
    }
  }
}
template <uint32_t Part, class Config>
MK_DEVICE void take_stage(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, StagePosition<Config>& stage,
                          uint32_t warpgroup) {
  storage.stages.wait_filled(stage);
  add_stage<Part>(d, storage, stage.index, warpgroup);
  ptx::sync_warp();  // all lanes have read
  give_back<Config>(storage, stage.index);
  stage.advance();
}
template <uint32_t Part, class Config>
MK_DEVICE void add_partial(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, StagePosition<Config>& stage,
                           uint32_t warpgroup) {
  take_stage<Part>(d, storage, stage, warpgroup);
  if constexpr (Part + 1 < GemmShape<Config>::kAddStages) add_partial<Part + 1>(d, storage, stage, warpgroup);
}

// The canonical sum (Op::kCanonical) of the own product and the addends: a part of the tile, then the next one, so that few registers hold what is
// rounded of the own product while others' contributions before it are added up.
template <uint32_t Part, class Config, class Op>
MK_DEVICE void add_in_order(float (&d)[GemmShape<Config>::kHeld], const Op& op, GemmStorage<Config>& storage, StagePosition<Config>& stage,
                            uint32_t warpgroup) {
  using Own = Partial<Config>;
  constexpr uint32_t kUnits = GemmShape<Config>::kAddPanels * kBlockUnits, kFirst = Part * kUnits * Own::kUnit;
  ptx::Words own[kUnits];
#pragma unroll 1
  for (uint32_t i = 0; i < Op::kLevels; ++i) {
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      float* e = &d[kFirst + u * Own::kUnit];
      own[u] = Own::round(e);
#pragma unroll
      for (uint32_t j = 0; j < Own::kUnit; ++j) e[j] = 0.0f;
    }
    const Level level = op.level(i);
#pragma unroll 1
    for (uint32_t term = 0; term < level.terms; ++term) {
      if (term != level.own) {
        take_stage<Part>(d, storage, stage, warpgroup);
        continue;
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnits; ++u) Own::add(&d[kFirst + u * Own::kUnit], own[u]);
    }
  }
  if constexpr (Part + 1 < GemmShape<Config>::kAddStages) add_in_order<Part + 1>(d, op, storage, stage, warpgroup);
}

// One part of K for 64 rows and N columns: of a short tile the same rows as the other warpgroup's, and the columns of one half of B. Nothing is in
// flight afterwards.
template <uint32_t N, bool Short, class Config>
MK_DEVICE void multiply_part(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, const StageRing<Config>& ring,
                             StagePosition<Config>& stage, uint32_t steps, uint32_t warpgroup, bool accumulate) {
  using Shape = GemmShape<Config>;
  constexpr bool kSharesA = Short || Shape::kSplitsRows;  // with the other warpgroup, which has other columns of wgmma's
  uint32_t previous = kStop;                              // the stage of the step before
  uint32_t step = 0;
#pragma unroll 1
  do {  // at least once: with a way around it ptxas may find accumulators defined outside wgmma, and serializes it
    constexpr uint32_t kApart = Short ? Shape::kBytesB / kConsumerWarpgroups : N * kSwizzleBytes;
    const char* a = ring.a(storage, stage.index) + (kSharesA ? 0 : warpgroup * Shape::kUnits * 64 * kSwizzleBytes);
    const char* b = ring.b(storage, stage.index) + (kSharesA ? warpgroup * kApart : 0);
    const StageOperands operands = stage_operands<Config>(a, b);
    storage.stages.wait_filled(stage);
    if constexpr (Shape::kSwapped && Shape::kUnits == 1) {
      static_assert(Shape::kBlockK == 4 * kInstructionK && Shape::kMajorB == ptx::Major::kK, "what wgmma_step multiplies");
      ptx::wgmma_step<N, Shape::kElement, Shape::kMajorA>(d, operands.a, operands.b, accumulate || step > 0);
    } else {
      multiply_stage<N, Config>(d, operands, accumulate || step > 0);
      if constexpr (Shape::kAlternates) {
        if (step + 1 == steps) end_turn(storage);
      }
      ptx::wgmma_wait<1, N / 2, Shape::kUnitHeld>(d);
    }
    if (previous != kStop) give_back<Config>(storage, previous);
    previous = stage.index;
    stage.advance(ring.count());
  } while (++step < steps);
  ptx::wgmma_wait<0, N / 2, Shape::kUnitHeld>(d);
  give_back<Config>(storage, previous);
}

// The same where the warpgroup has none of it: it gives the stages back, and the other one has the tensor cores.
template <class Config>
MK_DEVICE void pass_stages(GemmStorage<Config>& storage, const StageRing<Config>& ring, StagePosition<Config>& stage, uint32_t steps) {
#pragma unroll 1
  for (uint32_t step = 0; step < steps; ++step, stage.advance(ring.count())) {
    storage.stages.wait_filled(stage);
    ptx::sync_warp();  // all lanes have looked: the loading thread may be a lap ahead of one that has not
    give_back<Config>(storage, stage.index);
  }
}
template <class Config>
MK_DEVICE void pass_part(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, const StageRing<Config>& ring,
                         StagePosition<Config>& stage, uint32_t steps) {  // its rows are zeros
#pragma unroll
  for (float& e : d) e = 0.0f;
  pass_stages<Config>(storage, ring, stage, steps);
}
// A whole tile, or a warpgroup that has none of its rows.
template <class Config>
MK_DEVICE void multiply_rows(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, const StageRing<Config>& ring,
                             StagePosition<Config>& stage, uint32_t steps, uint32_t warpgroup, bool accumulate) {
  if constexpr (GemmShape<Config>::kMayBeLow) {
    if (ring.is_low() && warpgroup != 0) return pass_part<Config>(d, storage, ring, stage, steps);
  }
  multiply_part<GemmShape<Config>::kBlockN, false>(d, storage, ring, stage, steps, warpgroup, accumulate);
}

// Swapped operands: as many rows of a tile as an instruction has, or a few more. Heights that there are instructions for: bit i of Config::kHeights says
// so of 8 (i + 1) rows. That of a call's tiles is one of them (planner/heights.py), and few are compiled, since each is code of its own.
template <class Config>
struct Heights {
  MK_DEVICE static constexpr uint32_t at(uint32_t i) {  // the i-th of them
    uint32_t height = 0, below = i + 1;
    while (below != 0) below -= Config::kHeights >> height & 1, ++height;
    return height * 8;
  }
  MK_DEVICE static constexpr uint32_t count() {
    uint32_t count = 0;
    for (uint32_t bits = Config::kHeights; bits != 0; bits &= bits - 1) ++count;
    return count;
  }
  static_assert(at(count() - 1) <= GemmShape<Config>::kBlockN, "accumulators");
};
// Where a CTA of a cluster has no rows, it multiplies the fewest that there may be, whatever it holds.
template <uint32_t Low, uint32_t High, class Config>
MK_DEVICE void multiply_high(float (&d)[GemmShape<Config>::kHeld], GemmStorage<Config>& storage, const StageRing<Config>& ring,
                             StagePosition<Config>& stage, uint32_t steps, uint32_t warpgroup, uint32_t rows) {
  if constexpr (Low == High) {
    constexpr uint32_t kRows = Heights<Config>::at(Low) / (GemmShape<Config>::kSplitsRows ? kConsumerWarpgroups : 1);
    multiply_part<kRows, false>(d, storage, ring, stage, steps, warpgroup, false);
  } else {
    constexpr uint32_t kMiddle = (Low + High) / 2;
    if (rows <= Heights<Config>::at(kMiddle)) {
      multiply_high<Low, kMiddle>(d, storage, ring, stage, steps, warpgroup, rows);
    } else {
      multiply_high<kMiddle + 1, High>(d, storage, ring, stage, steps, warpgroup, rows);
    }
  }
}

// All of K of a tile, or of its share, whose rows of A the consumers bring themselves.
template <class Config, class Op>
MK_DEVICE void multiply_taken(const Call& call, float (&d)[GemmShape<Config>::kHeld], const Op& op, GemmStorage<Config>& storage,
                              const StageRing<Config>& ring, StagePosition<Config>& stage, const TileCoordinate& c, uint32_t steps,
                              uint32_t warpgroup) {
  TakenRounds<Config, Op> rounds(call, op, c);
  const uint32_t first = op.first_step(c);
  uint32_t done = 0, round = rounds.look(first, steps);
  bool has_come = rounds.look_ahead(storage.entries);
  const MaybeEntered entered = storage.entries.pass(call);
  bool ok = static_cast<bool>(entered);
#pragma unroll 1
  do {
    if (ok && !has_come) ok = rounds.wait(*entered);
    has_come = false;
    ptx::barrier_sync(kTakenBarrier, kConsumerThreads);  // nobody multiplies what the stages held
    if (ok) rounds.store(*entered, storage, stage.index, op.keeps(c));
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kTakenBarrier, kConsumerThreads);  // all have stored
    const uint32_t begun = done + round;
    uint32_t next = 0;
    if (begun < steps) next = rounds.look(first + begun, steps - begun);  // mostly there is one round: its threads need not fetch this code
    multiply_rows<Config>(d, storage, ring, stage, round, warpgroup, done > 0);
    done = begun, round = next;
  } while (done < steps);
}

// All tiles of a call where they are narrow, by the warpgroup that has none of them.
template <class Config, class Op>
MK_DEVICE void pass_tiles(const Op& op, GemmStorage<Config>& storage) {
  RingPosition<kTileQueue> queue;
  const StageRing<Config> ring(op);
  StagePosition<Config> stage;
#pragma unroll 1
  while (true) {
    const TilePart item = take_item<Reader::kWarp>(storage, queue);
    if (item.number == kStop) return;
    pass_stages<Config>(storage, ring, stage, op.steps(known_place<Config, Op>(item), 0));
  }
}

template <class Config, class Op>
MK_DEVICE void multiply_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  const uint32_t warpgroup = ptx::warp_index() / 4 - 1;
  if constexpr (Shape::kMayBeNarrow) {
    if (op.is_narrow() && warpgroup != 0) return pass_tiles<Config>(op, storage);
  }
  const bool traces = ptx::thread_index() % kWarpgroup == 0 && (Shape::kAlternates || warpgroup == 0);
  RingPosition<kTileQueue> queue;
  const StageRing<Config> ring(op);
  StagePosition<Config> stage;
  RingPosition<Shape::kResultBuffers> block;
  Trace trace(call.world, Shape::kAlternates ? 1 + warpgroup : 1);
  float d[Shape::kHeld];
  [[maybe_unused]] uint32_t turns = 0;     // tiles, where the warpgroups have them in turn
  [[maybe_unused]] uint32_t rounds = 0;    // tiles whose K the cluster has shared,
  [[maybe_unused]] bool has_more = false;  // and whether there was to be another one
#pragma unroll 1
  while (true) {
    const TilePart item = take_item<Reader::kWarp>(storage, queue);
    const uint32_t part = item.number % Op::kParts, tile = item.number / Op::kParts;
    if (item.number == kStop) break;
    if (traces && part == 0) trace.begin();
    // Packets of eight ranks leave no registers for what has been read: worked out again it costs none, and no time beside the loads.
    const TileCoordinate c = Op::kExchanges ? op.coordinate(tile) : known_place<Config, Op>(item);
    if constexpr (Op::kShares && Shape::kClusterK == 1) {
      if (c.is_sum) {
        if (const MaybeEntered entered = storage.entries.pass(call)) op.add_shares(*entered, c);
        if (traces) trace.end(abi::kTraceReduce, tile);
#pragma unroll
        for (float& e : d) e = ptx::any_value();  // sums have all registers
        continue;
      }
    }
    const uint32_t steps = op.steps(c, part);
    if constexpr (Shape::kAlternates) {
      const uint32_t turn = turns++;
      if (turn % 2 != warpgroup) {
        stage.advance_by(steps, ring.count());
        continue;
      }
      if (turn != 0) ptx::mbarrier_wait(&storage.turn.ended[1 - warpgroup], (turn - 1) / 2 % 2);
    }
    if (Op::kAdds && steps == 0) {
      if (part == 0) {
#pragma unroll
        for (float& e : d) e = 0.0f;
      }
    } else if (Config::kSlices > 1 && c.slice != 0) {
      if constexpr (Config::kSlices > 1) multiply_part<Shape::kSliceN, false>(d, storage, ring, stage, steps, warpgroup, part > 0);
    } else if (Op::kShortTiles && c.is_short) {
      if constexpr (Op::kShortTiles) multiply_part<Shape::kHalfN, true>(d, storage, ring, stage, steps, warpgroup, part > 0);
    } else if constexpr (Shape::kSwapped) {
      const uint32_t rows = Shape::kSplitsRows ? op.block_rows() : op.load_rows(c);  // whose halves begin where those of other tiles do
      const uint32_t of_tile = Shape::kAlternates ? 0 : warpgroup;
      multiply_high<0, Heights<Config>::count() - 1>(d, storage, ring, stage, steps, of_tile, rows);
    } else if constexpr (Op::kTakes) {
      multiply_taken<Config>(call, d, op, storage, ring, stage, c, steps, warpgroup);
    } else if (!Op::kShortTiles && !Op::kShares && op.load_rows(c) <= warpgroup * kBlockRows) {  // with shares of K it spills
      pass_part<Config>(d, storage, ring, stage, steps);
    } else {
      multiply_rows<Config>(d, storage, ring, stage, steps, warpgroup, part > 0);
    }
    if constexpr (Op::kAdds) {
      const uint32_t addends = op.addends(c, part);
      if (Op::kCanonical && !c.is_sum) {
        if constexpr (Op::kCanonical) {
          if (addends != 0) add_in_order<0, Config>(d, op, storage, stage, warpgroup);
        }
      } else {
#pragma unroll 1
        for (uint32_t i = 0; i < addends; ++i) add_partial<0, Config>(d, storage, stage, warpgroup);
      }
    }
    if (part + 1 < op.parts(c)) continue;
    if constexpr (Op::kExchanges) {
      if (op.is_there(c)) {
        if (const MaybeEntered entered = storage.entries.pass(call)) op.exchange(*entered, d, c);
      }
      if constexpr (Op::kStoresRows) {
#pragma unroll
        for (float& e : d) e = ptx::any_value();  // what is left to exchange has their registers
        if (traces) trace.end(abi::kTraceTile, tile);
        continue;
      }
    }
    if constexpr (Shape::kClusterK > 1) {
      has_more = item.number + ptx::cta_count() < op.num_tiles();
      op.add_in_cluster(storage.entries.pass(call), storage, d, c, rounds++, has_more);
      if (traces) trace.end(abi::kTraceTile, tile);
      continue;
    } else if constexpr (Op::kShares) {
      if (c.is_share) {
        if (const MaybeEntered entered = storage.entries.pass(call)) op.send_share(*entered, d, c);
        if (traces) trace.end(abi::kTraceTile, tile);
        continue;
      }
    }
    write_blocks(call, d, op, c, storage, warpgroup, block);
    if (traces) trace.end(Op::kAdds && op.steps(c, 0) == 0 ? abi::kTraceReduce : abi::kTraceTile, tile);
  }
  if constexpr (Shape::kClusterK > 1) {  // where the call is skipped, the others arrive here all the same
    if (has_more) ptx::cluster_wait(&storage.sums.taken, (rounds - 1) % 2);
  }
}

}  // namespace mkernel
