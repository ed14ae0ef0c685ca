"""Tiles that are left over when every computing CTA has had the same number, cut into slices of their columns."""

from __future__ import annotations

from mkernel.planner.gemm import GemmTile
from mkernel.planner.split import Split

__all__ = ["choose_slices", "most_slices"]

_SLICES = 2  # of a left-over tile
_SLICE_N = 64  # columns that a slice is a multiple of


def choose_slices(tiles: int, tile: GemmTile, split: Split) -> int:
    """Into how many slices to cut the tiles that are left over when every compute CTA has had the same number.

    2 where all SMs can take the halves at once, the communication CTAs (which are done by then) included; else 1. Four slices were
    measured: so narrow, they are slower than two (docs/speed_log.md).
    """
    compute = split.compute or 1
    odd = tiles % compute
    fits = tiles > compute and 0 < _SLICES * odd <= split.total
    return most_slices(tile) if fits else 1


def most_slices(tile: GemmTile) -> int:
    """Into how many slices the kernel can cut a tile of this width."""
    return _SLICES if tile.block_n % (_SLICES * _SLICE_N) == 0 else 1
