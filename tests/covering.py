"""Which combinations of axes a test runs: all pairs of values by default, the whole product with ``--full``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["pairwise", "product"]

Case = dict[str, Any]
Valid = Callable[..., bool]


def product(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None) -> list[Case]:
    """Every combination for which ``valid(**case)`` holds."""
    cases = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [case for case in cases if valid is None or valid(**case)]


def pairwise(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None) -> list[Case]:
    """A small set of cases in which every pair of values that occurs in ``product`` occurs. Greedy and deterministic."""
    candidates = product(axes, valid)
    numbers: dict[tuple[tuple[str, int], ...], int] = {}  # of pairs: each is a bit
    pairs = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in _pairs(axes, case)) for case in candidates]
    missing = (1 << len(numbers)) - 1
    chosen: list[Case] = []
    while missing:
        best = max(range(len(candidates)), key=lambda at: (pairs[at] & missing).bit_count())
        chosen.append(candidates[best])
        missing &= ~pairs[best]
    return chosen


def _pairs(axes: Mapping[str, Sequence[Any]], case: Case) -> Iterator[tuple[tuple[str, int], ...]]:
    """Values by position, not by equality: axes may hold unhashable or equal values."""
    positions = [(name, next(i for i, value in enumerate(axes[name]) if value is case[name])) for name in axes]
    if len(positions) == 1:
        yield (positions[0],)
    yield from itertools.combinations(positions, 2)
