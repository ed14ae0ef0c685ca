// From registers to memory: consumers write blocks of 64 rows to shared memory, the storing thread stores them by TMA; blocks that are not full, of an op
// that masks its results, the consumers store themselves.
#pragma once
#include "tile/gated.cuh"
#include "tile/masked.cuh"
#include "tile/op.cuh"
#include "tile/storage.cuh"

namespace mkernel {

// Panels of a result that each consumer warpgroup has: beside each other, or with swapped operands below each other, as far as there are rows.
template <class Config, class Op>
MK_DEVICE uint32_t panels_of(const Op& op, const TileCoordinate& c) {
  if constexpr (GemmShape<Config>::kSwapped) return op.panels(c);
  return block_panels<Config>(c);
}

// Writes 64 rows to shared memory, block by block: rounded once, 64 columns each in the layout of a TMA store, or as blocks of a partial tile.
template <class Config, class Op>
MK_DEVICE void write_blocks(const Call& call, const float (&d)[GemmShape<Config>::kHeld], const Op& op, const TileCoordinate& c,
                            GemmStorage<Config>& storage, uint32_t warpgroup, RingPosition<GemmShape<Config>::kResultBuffers>& at) {
  using Shape = GemmShape<Config>;
  const uint32_t lane = ptx::lane_index(), warp = ptx::thread_index() % kWarpgroup / 32;
  const auto begin = [&] {
    storage.blocks[warpgroup].wait_taken(at);
    return storage.result[warpgroup][at.index];
  };
  const auto end = [&] {
    ptx::fence_proxy_async_shared();
    ptx::sync_warp();
    if (lane == 0) storage.blocks[warpgroup].fill(at);
    at.advance();
  };
  if (op.is_partial(c)) {
#pragma unroll
    for (uint32_t panel = 0; panel < Partial<Config>::kPanels; ++panel) {
      char* block = begin();
#pragma unroll
      for (uint32_t u = 0; u < kBlockUnits; ++u) {
        ptx::store_shared(block + unit_offset(u), Partial<Config>::round(&d[(panel * kBlockUnits + u) * Partial<Config>::kUnit]));
      }
      end();
    }
    return;
  }
  const uint32_t row = warp * 16 + lane % 16;  // the row whose address this lane gives to stmatrix
  const MaskedBlock<Config, Op> masked(call, op, c, storage, warpgroup);
#pragma unroll
  for (uint32_t unit = 0; unit < Shape::kUnits; ++unit) {
#pragma unroll
    for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
      if (panel >= panels_of<Config>(op, c)) break;
      char* block = begin();
#pragma unroll
      for (uint32_t j = 0; j < kPanel / 16; ++j) {
        if (panel * (kPanel / 2) + j * 8 >= Shape::kUnitHeld) break;  // no tile has so many rows, or columns
        const Results<Config> e(op, d, unit * Shape::kUnitHeld + panel * (kPanel / 2) + j * 8);
        if constexpr (Shape::kSwapped) {  // 16 rows x this warp's 16 columns
          const uint32_t at = j * 16 + lane / 16 * 8 + lane % 8, column = (warp * 2 + lane / 8 % 2) ^ (at % 8);
          ptx::stmatrix_x4_transposed(block + at * kSwizzleBytes + column * 16, ptx::pack<Shape::kElement>(e[0], e[1]),
                                      ptx::pack<Shape::kElement>(e[2], e[3]), ptx::pack<Shape::kElement>(e[4], e[5]),
                                      ptx::pack<Shape::kElement>(e[6], e[7]));
          continue;
        }
        const uint32_t chunk = (2 * j + lane / 16) ^ (row % 8);  // 128-byte swizzle
        ptx::stmatrix_x4(block + row * kSwizzleBytes + chunk * 16, ptx::pack<Shape::kElement>(e[0], e[1]),
                         ptx::pack<Shape::kElement>(e[2], e[3]), ptx::pack<Shape::kElement>(e[4], e[5]),
                         ptx::pack<Shape::kElement>(e[6], e[7]));
      }
      masked.store(panel, block);
      end();
    }
  }
}

// Stores finished blocks, once all ranks have entered; tells warp 3 which flag to raise once a tile's stores are complete.
template <class Config, class Op>
MK_DEVICE void store_tiles(const Call& call, const Op& op, GemmStorage<Config>& storage) {
  using Shape = GemmShape<Config>;
  RingPosition<kTileQueue> queue;
  RingPosition<Shape::kResultBuffers> at, stored;
  [[maybe_unused]] RingPosition<Shape::kResultBuffers> next_at, next_stored;  // where warpgroups have tiles in turn: of the other one,
  [[maybe_unused]] uint32_t turn = 0;                                         // and whose tile it is
  Mailbox::Position announce;
  bool first = true;
  MaybeEntered entered = MaybeEntered::not_yet(call);
  uint32_t on_their_way = 0;                  // buffers
  uint32_t warpgroups = kConsumerWarpgroups;  // of the tile
  const auto give_back = [&] {
    for (uint32_t w = 0; w < warpgroups; ++w) storage.blocks[turn + w].take(stored);
    stored.advance();
    --on_their_way;
  };
#pragma unroll 1
  while (true) {
    const TilePart item = take_item<Reader::kThread>(storage, queue);
    if (item.number == kStop) break;
    const TileCoordinate c = known_place<Config, Op>(item);
    if (item.number % Op::kParts + 1 < op.parts(c)) continue;
    if (first) {
      entered = storage.entries.pass_to_store(call);
      first = false;
    }
    if (Op::kStoresRows || c.is_share) continue;
    const uint32_t panels = op.is_partial(c) ? Partial<Config>::kPanels : Shape::kUnits * panels_of<Config>(op, c);
    warpgroups = warpgroups_of<Config>(c);
#pragma unroll 1
    for (uint32_t panel = 0; panel < panels; ++panel) {
#pragma unroll 1
      for (uint32_t w = 0; w < warpgroups; ++w) {
        storage.blocks[turn + w].wait_filled(at);
        if (entered && (op.is_partial(c) || is_full(op, c, w))) op.store(*entered, c, panel, w, storage.result[turn + w][at.index]);
      }
      at.advance();
      ptx::store_commit();
      if (++on_their_way < Shape::kResultBuffers) continue;
      ptx::store_wait_read<Shape::kResultBuffers - 1>();  // the oldest has been read
      give_back();
    }
    if constexpr (Op::kAnnounces) {
      if (op.announces(c) && entered) {
        ptx::store_wait<0>();
        storage.announce.post(*entered, announce, item.number / Op::kParts);
      }
    }
    ptx::store_wait_read<0>();
    while (on_their_way > 0) give_back();
    if constexpr (Shape::kAlternates) {
      const auto at_of_this = at, stored_of_this = stored;
      at = next_at, stored = next_stored, next_at = at_of_this, next_stored = stored_of_this, turn ^= 1;
    }
  }
  // The stores have read shared memory; kernel exit completes them.
  if constexpr (Op::kAnnounces) storage.announce.end(announce);
}

}  // namespace mkernel
