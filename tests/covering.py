"""Which combinations of axes a test runs: all pairs of values, all threes with ``--full``, the whole product with ``--products``."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["MOST", "MOST_CASES", "covering", "pairwise", "product"]

Case = dict[str, Any]
Valid = Callable[..., bool]
Places = tuple[int, ...]  # of a case's values in their axes: these may hold unhashable or equal values

MOST = 1 << 16  # of a product that is looked at as a whole; of larger ones
DRAWN, TRIES = 1 << 13, 1 << 20  # so many valid cases are drawn, or as many as so many draws find
MOST_CASES = 1000  # of a covering: where there are more, an axis has the values of several


def product(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None) -> list[Case]:
    """Every combination for which ``valid(**case)`` holds."""
    return [case for _, case in _all(axes, valid)]


def covering(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None, strength: int = 2, seed: int = 0) -> list[Case]:
    """A small set of cases in which all values of ``strength`` axes that occur together in ``product`` do.

    Greedy: each is one that has the most of what is missing, the first of these. Of products that are too large to be looked at, what
    occurs together in many valid cases does, drawn by ``seed``. Raises ValueError where that is more than ``MOST_CASES``.
    """
    found = list(_all(axes, valid) if math.prod(map(len, axes.values())) <= MOST else _drawn(axes, valid, seed))
    numbers: dict[tuple[tuple[int, int], ...], int] = {}  # of tuples
    tuples = [[numbers.setdefault(one, len(numbers)) for one in _tuples(places, strength)] for places, _ in found]
    missing, left = bytearray(b"\1") * len(numbers), len(numbers)
    # By how much a case has at most: what it had when it was looked at last, since that only becomes less.
    queue = [(-len(of_case), at) for at, of_case in enumerate(tuples)]
    heapq.heapify(queue)
    chosen: list[Case] = []
    while left:
        most, at = queue[0]
        gain = sum(missing[one] for one in tuples[at])
        if gain < -most:
            heapq.heapreplace(queue, (-gain, at))
            continue
        heapq.heappop(queue)
        chosen.append(found[at][1])
        if len(chosen) > MOST_CASES:
            raise ValueError(
                f"more than {MOST_CASES} cases of {', '.join(axes)}: an axis that is a product of several should be several axes"
            )
        for one in tuples[at]:
            missing[one] = 0
        left -= gain
    return chosen


def pairwise(axes: Mapping[str, Sequence[Any]], valid: Valid | None = None) -> list[Case]:
    """``covering`` of all pairs."""
    return covering(axes, valid)


def _all(axes: Mapping[str, Sequence[Any]], valid: Valid | None) -> Iterator[tuple[Places, Case]]:
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        case = _case(axes, places)
        if valid is None or valid(**case):
            yield places, case


def _drawn(axes: Mapping[str, Sequence[Any]], valid: Valid | None, seed: int) -> Iterator[tuple[Places, Case]]:
    """At most ``DRAWN`` valid cases, no two of them alike."""
    rng, known = random.Random(seed), set()
    for _ in range(TRIES):
        places = tuple(rng.randrange(len(values)) for values in axes.values())
        case = _case(axes, places)
        if places not in known and (valid is None or valid(**case)):
            known.add(places)
            yield places, case
            if len(known) == DRAWN:
                return
    assert known, "no case is valid"


def _case(axes: Mapping[str, Sequence[Any]], places: Places) -> Case:
    return {name: values[at] for (name, values), at in zip(axes.items(), places, strict=True)}


def _tuples(places: Places, strength: int) -> Iterator[tuple[tuple[int, int], ...]]:
    return itertools.combinations(enumerate(places), min(strength, len(places)))
