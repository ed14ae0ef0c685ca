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
    exchanged
        Where CTAs share K: bytes of the packets of the ranks, behind which those of shares begin.
    """

    grid: int
    tiles: int
    exchanged: int


# Of all its fields, without a function of Python in between.
sizes_of: Callable[[tuple[int, int, int]], Sizes] = functools.partial(tuple.__new__, Sizes)
