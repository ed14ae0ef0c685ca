// How rows of tokens are copied: several of them in a piece where they are short, because the thread that copies takes a while for each piece.
// Included after `struct Config`: kRowsPerPiece. A row that is longer than a piece is copied in several.
#pragma once
#include "comm/copy.cuh"

namespace mkernel {

constexpr uint32_t kRowsPerPiece = Config::kRowsPerPiece;

// How many rows the next piece has, of those that are left; and bytes of each, of a piece of `bytes`: all of them where it is one row, or a part of one.
MK_DEVICE uint32_t rows_of_piece(uint32_t left) { return kRowsPerPiece == 1 || left >= kRowsPerPiece ? kRowsPerPiece : left; }
MK_DEVICE uint32_t bytes_of_row(uint32_t row_bytes, uint32_t bytes) { return kRowsPerPiece == 1 ? bytes : row_bytes; }
template <class From>
MK_DEVICE void load_rows(uint32_t rows, uint32_t row_bytes, void* smem, uint32_t bytes, uint64_t* bar, const From& from) {
  const uint32_t of_row = bytes_of_row(row_bytes, bytes);
#pragma unroll 1
  for (uint32_t i = 0; i < rows; ++i) ptx::bulk_load(static_cast<char*>(smem) + i * of_row, from(i), of_row, bar);
}

}  // namespace mkernel
