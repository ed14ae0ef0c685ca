"""Tiles that are left over when every computing CTA has had the same number, cut into slices of their columns."""

from __future__ import annotations

from mkernel.planner.gemm import GemmTile
from mkernel.planner.split import Split

__all__ = ["choose_slices", "most_slices", "sliced_tiles"]

_SLICES = 2  # of a left-over tile
_SLICE_N = 64  # columns that a slice is a multiple of


def choose_slices(tiles: int, tile: GemmTile, split: Split) -> int:
    """Into how many slices to cut the tiles that are left over when every compute CTA has had the same number.

    2 where all SMs can take the halves at once, the communication CTAs (which are done by then) included; else 1. Four slices were
    measured: so narrow, they are slower than two (docs/speed_log.md).
    """
    return most_slices(tile) if sliced_tiles(tiles, split.compute or 1, split.total) else 1


def sliced_tiles(tiles: int, computing: int, ctas: int) -> int:
    """How many tiles are left over when every computing CTA has had the same number, if all CTAs can take their slices at once; else 0."""
    left = tiles % computing
    return left if tiles > computing and _SLICES * left <= ctas else 0


def most_slices(tile: GemmTile) -> int:
    """Into how many slices the kernel can cut a tile of this width."""
    return _SLICES if tile.block_n % (_SLICES * _SLICE_N) == 0 else 1
