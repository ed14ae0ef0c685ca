"""Which combinations of axes a test runs: all pairs of values, all threes with ``--full``, the whole product with ``--products``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["covering", "pairwise", "product"]

Case = dict[str, Any]
Valid = Callable[..., bool]


def product(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None) -> list[Case]:
    """Every combination for which ``valid(**case)`` holds."""
    cases = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [case for case in cases if valid is None or valid(**case)]


def covering(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None, strength: int = 2) -> list[Case]:
    """A small set of cases in which all values of ``strength`` axes that occur together in ``product`` do. Greedy and deterministic."""
    candidates = product(axes, valid)
    numbers: dict[tuple[tuple[str, int], ...], int] = {}  # of tuples: each is a bit
    tuples = [sum(1 << numbers.setdefault(one, len(numbers)) for one in _tuples(axes, case, strength)) for case in candidates]
    missing = (1 << len(numbers)) - 1
    chosen: list[Case] = []
    while missing:
        best = max(range(len(candidates)), key=lambda at: (tuples[at] & missing).bit_count())
        chosen.append(candidates[best])
        missing &= ~tuples[best]
    return chosen


def pairwise(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None) -> list[Case]:
    """``covering`` of all pairs."""
    return covering(axes, valid)


def _tuples(axes: Mapping[str, Sequence[Any]], case: Case, strength: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Values by position, not by equality: axes may hold unhashable or equal values."""
    positions = [(name, next(i for i, value in enumerate(axes[name]) if value is case[name])) for name in axes]
    return itertools.combinations(positions, min(strength, len(positions)))
