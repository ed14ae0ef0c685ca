"""What follows from the rows of an AllGather+GEMM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Sizes", "sizes_of"]


class Sizes(NamedTuple):
    """What follows from the rows of a call.

    Attributes
    ----------
    plane_rows, tile_rows
        Rows of a plane, and of its tiles.
    taken_rows, taken
        Rows of tiles of a plane that clusters take at a time: one for a CTA alone; tiles, or pairs of them, of all planes.
    num_tiles
        Whole tiles, before any is halved.
    whole_tiles
        Tiles up to here are whole; the others are sliced.
    grid
        CTAs: no more than have something to do. Fewer, spread over the device, load faster (docs/speed_log.md).
    shares
        CTAs, or pairs, that share K of a tile.
    load_rows, last_row, tail_rows
        Of ``gemm.tail_of``: of a plane.
    block_rows
        Rows of a tile.
    stages
        Those of a call with swapped operands; 0 of others.
    """

    plane_rows: int
    tile_rows: int
    taken_rows: int
    taken: int
    num_tiles: int
    whole_tiles: int
    grid: int
    shares: int
    load_rows: int
    last_row: int
    tail_rows: int
    block_rows: int
    stages: int


# Of all its fields, without a function of Python in between.
sizes_of: Callable[[tuple[int, ...]], Sizes] = functools.partial(tuple.__new__, Sizes)
