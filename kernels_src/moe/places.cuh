// A row of the experts of a node, as one number: the local rank that has it, and its number there. It does not depend on how much room for rows a rank
// has: who combines may have less of it than the dispatch had.
#pragma once
#include "comm/world.cuh"

namespace mkernel {

constexpr uint32_t bits_of_ranks() {
  uint32_t bits = 0;
  while (1u << bits < kR) ++bits;
  return bits;
}
constexpr uint32_t kRowBits = 31 - bits_of_ranks();  // row_bits() of mkernel/planner/moe.py; -1 is no row

MK_DEVICE uint32_t place_of_row(uint32_t holder, uint32_t row) { return holder << kRowBits | row; }
MK_DEVICE uint32_t holder_of(uint32_t place) { return place >> kRowBits; }
MK_DEVICE uint32_t row_at(uint32_t place) { return place & ((1u << kRowBits) - 1); }

}  // namespace mkernel
