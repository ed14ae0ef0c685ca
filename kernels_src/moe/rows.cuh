// How rows of tokens are copied: a piece per row, or a few. Included after `struct Config`: kRowStages.
#pragma once
#include "comm/copy.cuh"

namespace mkernel {

using RowRing = CopyRingOf<Config::kRowStages>;
using RowPieces = RowRing::Pieces;
using RowBarriers = RowRing::Barriers;

}  // namespace mkernel
