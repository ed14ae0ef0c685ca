// Results of which only some rows may be written, because the rows after them belong to another tile (Op::kMasks).
#pragma once
#include "tile/op.cuh"
#include "tile/storage.cuh"

namespace mkernel {

template <class Op>
MK_DEVICE uint32_t block_rows(const Op& op, const TileCoordinate& c, uint32_t warpgroup) {  // valid ones of a block of a result
  if constexpr (Op::kMasks) {
    const uint32_t rows = op.rows(c), begin = block_row(c, warpgroup), left = rows > begin ? rows - begin : 0;
    return left < kBlockRows ? left : kBlockRows;
  } else {
    return kBlockRows;
  }
}
template <class Op>
MK_DEVICE bool is_full(const Op& op, const TileCoordinate& c, uint32_t warpgroup) {
  return block_rows(op, c, warpgroup) == kBlockRows;
}

// What a consumer warp does about a block that is not full: it stores its 16 rows of it, as far as they are valid, by ordinary stores, between writing
// them to the block's buffer and giving the buffer to the storing thread, which then does not store the block. So the stores come before the
// buffer's `filled`, and whatever that thread releases or posts later says that they are done, too (docs/memory_model.md, rule 2).
template <class Config, class Op>
class MaskedBlock {
 public:
  MK_DEVICE MaskedBlock(const Call& call, const Op& op, const TileCoordinate& c, GemmStorage<Config>& storage, uint32_t warpgroup)
      : op_(op), c_(c), warpgroup_(warpgroup), rows_(block_rows(op, c, warpgroup)), entered_(MaybeEntered::not_yet(call)) {
    if (Op::kMasks && rows_ < kBlockRows) entered_ = storage.entries.pass(call);
  }
  // Lanes take 16 bytes each, eight of them a row's 128. Warp function.
  MK_DEVICE void store(uint32_t panel, const char* block) const {
    if constexpr (Op::kMasks) {
      if (!entered_) return;
      ptx::sync_warp();  // all lanes have written the block
      const uint32_t lane = ptx::lane_index(), chunk = lane % 8, first = ptx::thread_index() % kWarpgroup / 32 * kWarpRows + lane / 8;
      const uint32_t column = block_column<Config>(c_, panel, warpgroup_) + chunk * 8;
      const uint64_t row_bytes = op_.result_row_bytes();
      char* to = op_.result(*entered_, c_) + block_row(c_, warpgroup_) * row_bytes + uint64_t(column) * 2;
#pragma unroll
      for (uint32_t row = first; row < first + kWarpRows; row += 4) {
        const ptx::Words words = ptx::load_shared(block + row * kSwizzleBytes + (chunk ^ row % 8) * 16);
        if (row < rows_ && column < extent_n(op_.p)) ptx::store_global(to + row * row_bytes, words);
      }
    }
  }

 private:
  const Op& op_;
  const TileCoordinate& c_;
  uint32_t warpgroup_, rows_;
  MaybeEntered entered_;
};

}  // namespace mkernel
