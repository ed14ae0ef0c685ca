// From registers to memory: o by TMA where a warpgroup has 64 valid rows, else by ordinary stores of the valid ones; lse.
#pragma once
#include "attention/op.cuh"
#include "attention/softmax.cuh"
#include "attention/storage.cuh"

namespace mkernel {

// Rows of o, rounded, in shared memory: 64 rows of 128 bytes per panel, swizzled.
template <class Config>
MK_DEVICE void write_rows(const float (&o)[Config::kHeadDim / 2], char* panels) {
  using Shape = AttentionShape<Config>;
  const uint32_t lane = ptx::lane_index(), row = ptx::thread_index() % 128 / 32 * 16 + lane % 16;  // whose address this lane gives
#pragma unroll
  for (uint32_t j = 0; j < Shape::kHeadDim / 16; ++j) {
    char* panel = panels + j / 4 * Shape::kQueryPanel;
    const uint32_t chunk = (2 * (j % 4) + lane / 16) ^ (row % 8);
    const float* e = &o[8 * j];
    ptx::stmatrix_x4(panel + row * Shape::kRowBytes + chunk * 16, ptx::pack<Shape::kElement>(e[0], e[1]),
                     ptx::pack<Shape::kElement>(e[2], e[3]), ptx::pack<Shape::kElement>(e[4], e[5]),
                     ptx::pack<Shape::kElement>(e[6], e[7]));
  }
}

// Each warp stores the valid ones of the 16 rows that it has written: what comes after them is not the item's. Warp function.
template <class Config>
MK_DEVICE void store_valid_rows(const char* panels, char* to, uint64_t row_bytes, uint32_t rows) {
  using Shape = AttentionShape<Config>;
  ptx::sync_warp();  // all lanes have written
  const uint32_t lane = ptx::lane_index(), chunk = lane % 8, first = ptx::thread_index() % 128 / 32 * 16;
#pragma unroll
  for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
#pragma unroll 1
    for (uint32_t row = first + lane / 8; row < first + 16; row += 4) {
      const ptx::Words words = ptx::load_shared(panels + panel * Shape::kQueryPanel + row * Shape::kRowBytes + (chunk ^ row % 8) * 16);
      if (row < rows) ptx::store_global(to + row * row_bytes + panel * Shape::kRowBytes + chunk * 16, words);
    }
  }
}

// Divides by the sums and stores one warpgroup's rows.
template <class Config, AttentionOp Op>
MK_DEVICE void store_item(const Call& call, const Op& op, const AttentionItem& item, AttentionStorage<Config>& storage, uint32_t warpgroup,
                          float (&o)[Config::kHeadDim / 2], const RowSums& sums) {
  using Shape = AttentionShape<Config>;
  const uint32_t begin = warpgroup * Shape::kBlockRows, rows = item.rows > begin ? item.rows - begin : 0;
  const bool leads = ptx::thread_index() % 128 == 0;
  char* panels = storage.o[warpgroup][0];
  const float factor[2] = {sums.factor(0), sums.factor(1)};
#pragma unroll
  for (uint32_t j = 0; j < Config::kHeadDim / 2; ++j) o[j] *= factor[j / 2 % 2];
  if (leads) ptx::store_wait_read<0>();                  // of the item before,
  ptx::barrier_sync(kEpilogueBarrier + warpgroup, 128);  // whose rows are in the same place
  write_rows<Config>(o, panels);
  const MaybeEntered entered = storage.entries.pass(call);
  if (!entered) return;
  if (ptx::lane_index() % 4 == 0) {
    float* lse = op.lse(*entered, item) + begin;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = ptx::thread_index() % 128 / 32 * 16 + ptx::lane_index() / 4 + 8 * i;
      if (row < rows) ptx::store_word(lse + row, ptx::bits(sums.lse(i)));
    }
  }
  if (rows < Shape::kBlockRows) {
    const uint64_t row_bytes = op.o_row_bytes();
    store_valid_rows<Config>(panels, op.o(*entered, item) + begin * row_bytes, row_bytes, rows);
  } else {
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kEpilogueBarrier + warpgroup, 128);
    if (leads) {
      ptx::fence_proxy_async();  // the stores come after what the ranks did before they entered
#pragma unroll
      for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
        ptx::tma_store_4d(op.o_map(), panels + panel * Shape::kQueryPanel, panel * Shape::kPanelColumns, item.row + begin, item.head,
                          item.batch);
      }
      ptx::store_commit();
    }
  }
}

}  // namespace mkernel
