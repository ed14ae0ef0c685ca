"""In how many parts the K of a shard travels inside a node, and how a part is copied (``kernels_src/ops/allgather_gemm.cuh``)."""

from __future__ import annotations

import math

from mkernel.planner.gemm import BLOCK_K

__all__ = ["choose_parts", "choose_piece"]

_PIECE_UNITS = 128  # of 128 bytes: the pieces of a copy (kernels_src/comm/copy.cuh)
_PART_BYTES = 4096  # of a row: shorter ones cost more to copy than they save (measured, docs/speed_log.md)


def choose_parts(k: int) -> int:
    """Parts of K: whole steps of the main loop each, and rows long enough to be copied piecemeal, in pieces that are not small."""

    def good(parts: int) -> bool:
        return k % (parts * BLOCK_K) == 0 and k * 2 >= parts * _PART_BYTES and 2 * math.prod(choose_piece(k // parts)) >= _PIECE_UNITS

    return next((parts for parts in (4, 2) if good(parts)), 1)


def choose_piece(part_k: int) -> tuple[int, int]:
    """Rows, and units of 64 elements of each, that one load of a copy gathers: several whole rows, or an equal share of one."""
    units = part_k // BLOCK_K
    if units <= _PIECE_UNITS:
        return _PIECE_UNITS // units, units
    return 1, next(share for share in range(_PIECE_UNITS, 0, -1) if units % share == 0)
