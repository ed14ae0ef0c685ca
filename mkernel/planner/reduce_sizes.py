"""What follows from the rows of a GEMM whose K is spread over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Sizes", "sizes_of"]


class Sizes(NamedTuple):
    """What follows from the rows of a call.

    Attributes
    ----------
    grid
        CTAs.
    tiles
        Per owner; all tiles where everyone adds up everything.
    taken
        The same in what clusters take at a time: as many for CTAs alone, or pairs of tiles.
    whole_pairs, last_pairs
        Of ``pairs.lone_row``, with pairs of CTAs.
    exchanged
        Where CTAs share K: bytes of the packets of the ranks, behind which those of shares begin.
    last_row, tail_rows
        Of ``gemm.tail_of``: of an owner's rows, or of all where a tile has several owners' rows.
    block_rows
        Rows of a tile.
    stages
        Those of a call with swapped operands; 0 of others.
    """

    grid: int
    tiles: int
    taken: int
    whole_pairs: int
    last_pairs: int
    exchanged: int
    last_row: int
    tail_rows: int
    block_rows: int
    stages: int


# Of all its fields, without a function of Python in between.
sizes_of: Callable[[tuple[int, ...]], Sizes] = functools.partial(tuple.__new__, Sizes)
