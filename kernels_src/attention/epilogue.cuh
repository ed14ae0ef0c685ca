// From registers to memory: o by TMA where a warpgroup has 64 valid rows, else by ordinary stores of the valid ones; lse.
#pragma once
#include "attention/op.cuh"
#include "attention/softmax.cuh"
#include "attention/storage.cuh"

namespace mkernel {

// A panel of o, rounded, in shared memory: 64 rows of 128 bytes, swizzled.
template <class Config>
MK_DEVICE void write_panel(const float* o, char* panel) {
  using Shape = AttentionShape<Config>;
  const uint32_t lane = ptx::lane_index(), row = ptx::thread_index() % 128 / 32 * 16 + lane % 16;  // whose address this lane gives
#pragma unroll
  for (uint32_t j = 0; j < Shape::kPanelColumns / 16; ++j) {
    const uint32_t chunk = (2 * j + lane / 16) ^ (row % 8);
    const float* e = &o[8 * j];
    ptx::stmatrix_x4(panel + row * Shape::kRowBytes + chunk * 16, ptx::pack<Shape::kElement>(e[0], e[1]),
                     ptx::pack<Shape::kElement>(e[2], e[3]), ptx::pack<Shape::kElement>(e[4], e[5]),
                     ptx::pack<Shape::kElement>(e[6], e[7]));
  }
}

// Each warp stores the valid ones of the 16 rows that it has written: what comes after them is not the item's. Warp function.
template <class Config>
MK_DEVICE void store_valid_rows(const char* panel, char* to, uint64_t row_bytes, uint32_t rows) {
  using Shape = AttentionShape<Config>;
  ptx::sync_warp();  // all lanes have written
  const uint32_t lane = ptx::lane_index(), chunk = lane % 8, first = ptx::thread_index() % 128 / 32 * 16;
#pragma unroll 1
  for (uint32_t row = first + lane / 8; row < first + 16; row += 4) {
    const ptx::Words words = ptx::load_shared(panel + row * Shape::kRowBytes + (chunk ^ row % 8) * 16);
    if (row < rows) ptx::store_global(to + row * row_bytes + chunk * 16, words);
  }
}

// The thread of a warpgroup that stores its results by TMA. All threads of the warpgroup.
MK_DEVICE bool leads_warpgroup() { return ptx::elected() && ptx::thread_index() % 128 < 32; }

// Divides by the sums and stores one warpgroup's rows.
template <class Config, AttentionOp Op>
MK_DEVICE void store_item(const Call& call, const Op& op, const AttentionItem& item, AttentionStorage<Config>& storage, uint32_t warpgroup,
                          float (&o)[Config::kHeadDim / 2], const RowSums& sums) {
  using Shape = AttentionShape<Config>;
  const uint32_t begin = warpgroup * Shape::kBlockRows, rows = item.rows > begin ? item.rows - begin : 0;
  const bool leads = leads_warpgroup(), is_whole = rows >= Shape::kBlockRows;
  const float factor[2] = {sums.factor(0), sums.factor(1)};
#pragma unroll
  for (uint32_t j = 0; j < Config::kHeadDim / 2; ++j) o[j] *= factor[j / 2 % 2];
  const MaybeEntered entered = storage.entries.pass(call);
  if (!entered) return;
  if (leads) ptx::fence_proxy_async();  // its stores come after what the ranks did before they entered
#pragma unroll
  for (uint32_t panel = 0; panel < Shape::kPanels; ++panel) {
    const uint32_t buffer = panel % Shape::kOutPanels;
    if (buffer == 0) {
      if (leads) ptx::store_wait_read<0>();                  // of the panels that were
      ptx::barrier_sync(kEpilogueBarrier + warpgroup, 128);  // in the same place
    }
    char* smem = storage.o[warpgroup][buffer];
    write_panel<Config>(&o[panel * Shape::kPanelColumns / 2], smem);
    if (!is_whole) {
      const uint64_t row_bytes = op.o_row_bytes();
      store_valid_rows<Config>(smem, op.o(*entered, item) + begin * row_bytes + panel * Shape::kRowBytes, row_bytes, rows);
    } else if (buffer + 1 == Shape::kOutPanels) {
      ptx::fence_proxy_async_shared();
      ptx::barrier_sync(kEpilogueBarrier + warpgroup, 128);
      if (leads) {
#pragma unroll
        for (uint32_t i = panel - buffer; i <= panel; ++i) {
          ptx::tma_store_4d(op.o_map(), storage.o[warpgroup][i % Shape::kOutPanels], i * Shape::kPanelColumns, item.row + begin, item.head,
                            item.batch);
        }
        ptx::store_commit();
      }
    }
  }
  if (ptx::lane_index() % 4 == 0) {
    float* lse = op.lse(*entered, item) + begin;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = ptx::thread_index() % 128 / 32 * 16 + ptx::lane_index() / 4 + 8 * i;
      if (row < rows) ptx::store_word(lse + row, ptx::bits(sums.lse(i)));
    }
  }
}

}  // namespace mkernel
