"""Classes of rows: calls of one class use the same kernel, and share what was tuned. Arithmetic, the same on every rank.

A class ends at a multiple of its step: 1 row up to 2, 2 up to 4, 4 up to 16, 16 up to 256, 32 up to 1024, 64 up to 4096, 128 up to 16384,
and beyond that a 128th of the next power of two, so that there are about 64 classes per doubling however large a matrix is. The choice for
a class is made for its largest number of rows.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["EXAMINED_ROWS", "MOST_KERNELS", "MOST_ROWS", "class_of", "classes", "examined", "most_chosen", "span"]

Kernel = TypeVar("Kernel")

# (up to so many rows, step); each limit is a multiple of the next step
_STEPS = ((2, 1), (4, 2), (16, 4), (256, 16), (1024, 32), (4096, 64), (16384, 128))
_FIRSTS = 0, *(last for last, _ in _STEPS[:-1])
_ENDS = [end for first, (last, step) in zip(_FIRSTS, _STEPS, strict=True) for end in range(first + step, last + 1, step)]
_PER_POWER = 128
MOST_ROWS = (1 << 31) - 1  # of a matrix
MOST_KERNELS = 8  # of one N and K, however many classes there are
EXAMINED_ROWS = 1 << 17  # of a rank: from some tens of waves on, all classes choose the same kernel


def _step(rows: int) -> int:
    for limit, step in _STEPS:
        if rows <= limit:
            return step
    return (1 << (rows - 1).bit_length()) // _PER_POWER


def class_of(rows: int) -> int:
    """The largest number of rows in the class of ``rows``: what names the class. No rows are in the class of one."""
    if rows <= _ENDS[-1]:
        return _ENDS[bisect.bisect_left(_ENDS, rows)]
    step = _step(rows)
    return -(-rows // step) * step


def span(rows: int) -> range:
    """The numbers of rows, from 1 on, in the class of ``rows``."""
    last = class_of(rows)
    return range(last - _step(last) + 1, last + 1)


def classes(max_rows: int) -> Iterator[int]:
    """All classes up to that of ``max_rows``, by their largest number of rows, ascending."""
    last, rows = class_of(max_rows), 0
    while rows < last:
        rows = class_of(rows + 1)
        yield rows


def examined(max_rows: int) -> Iterator[int]:
    """Some of the classes up to that of ``max_rows``, ascending, that use all of their kernels: each up to ``EXAMINED_ROWS``, then few."""
    yield from classes(min(max_rows, EXAMINED_ROWS))
    rows = 2 * EXAMINED_ROWS
    while rows < 2 * max_rows:
        yield class_of(min(rows, max_rows))
        rows *= 2


def most_chosen(kernels: Iterable[Kernel]) -> frozenset[Kernel]:
    """The ``MOST_KERNELS`` kernels that the most classes choose; of equals the first, in the order of the classes."""
    return frozenset(kernel for kernel, _ in collections.Counter(kernels).most_common(MOST_KERNELS))
