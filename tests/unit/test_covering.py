"""The covering that decides which cases run by default."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from covering import MOST, MOST_CASES, covering, pairwise, product

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [(0,), (1,), (2,)], "d": [True, False]}


def test_product_is_every_combination() -> None:
    assert len(product(AXES)) == 3 * 2 * 3 * 2


def test_every_pair_occurs_in_few_cases() -> None:
    cases = pairwise(AXES)
    for one, two in itertools.combinations(AXES, 2):
        assert {(c[one], c[two]) for c in cases} == set(itertools.product(AXES[one], AXES[two]))
    assert 9 <= len(cases) <= 12


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_values_of_so_many_axes_occur_together(strength: int) -> None:
    cases = covering(AXES, strength=strength)
    for names in itertools.combinations(AXES, strength):
        assert {tuple(c[name] for name in names) for c in cases} == set(itertools.product(*(AXES[name] for name in names)))
    assert len(cases) <= (3, 12, 24, 36)[strength - 1]


def test_fewer_axes_than_that_are_a_product() -> None:
    axes = {name: AXES[name] for name in "ab"}
    assert len(covering(axes, strength=3)) == len(product(axes))


def test_invalid_combinations_never_run_and_valid_pairs_still_do() -> None:
    def valid(a: int, b: str, **_: object) -> bool:
        return not (a == 1 and b == "x")

    cases = pairwise(AXES, valid)
    assert all(valid(**c) for c in cases)
    assert {(c["a"], c["b"]) for c in cases} == {(a, b) for a in AXES["a"] for b in AXES["b"]} - {(1, "x")}


def _greedy(axes: Mapping[str, Sequence[Any]], valid: Callable[..., bool] | None, strength: int) -> list[dict[str, Any]]:
    """``covering`` in as few words as can be."""
    candidates = product(axes, valid)
    tuples = [{*itertools.combinations(case.items(), min(strength, len(axes)))} for case in candidates]
    missing, chosen = set().union(*tuples), []
    while missing:
        best = max(range(len(candidates)), key=lambda at: len(tuples[at] & missing))
        chosen.append(candidates[best])
        missing -= tuples[best]
    return chosen


def test_each_case_is_the_first_that_has_the_most_of_what_is_missing(rng: np.random.Generator) -> None:
    for _ in range(20):
        axes = {name: tuple(range(int(rng.integers(1, 5)))) for name in "abcdef"[: rng.integers(1, 7)]}
        invalid = int(rng.integers(2, 6))

        def valid(invalid: int = invalid, **case: int) -> bool:
            return sum(case.values()) % invalid != 1

        for strength in (2, 3):
            assert covering(axes, valid, strength) == _greedy(axes, valid, strength)


def test_products_that_are_too_large_are_drawn_from() -> None:
    """Every pair occurs all the same, if it is valid in many cases; other seeds have other cases."""
    axes = {f"axis {i}": range(6) for i in range(12)}
    assert math.prod(map(len, axes.values())) > MOST

    def valid(**case: int) -> bool:
        return case["axis 0"] != case["axis 1"]

    cases, others = (covering(axes, valid, seed=seed) for seed in (1, 2))
    assert cases == covering(axes, valid, seed=1) != others
    for found in (cases, others):
        assert all(valid(**case) for case in found) and len(found) < 100
        for one, two in itertools.combinations(axes, 2):
            pairs = {(case[one], case[two]) for case in found}
            assert len(pairs) == 36 or ((one, two) == ("axis 0", "axis 1") and len(pairs) == 30)


def test_an_axis_that_is_a_product_of_axes_is_refused() -> None:
    """Such a test took 47 s to collect, and ``make test-full`` never ended collecting it."""
    axes = {f"axis {i}": range(6) for i in range(5)}
    assert len(covering(axes, strength=3)) <= MOST_CASES
    folded = {"four": product({name: axes[name] for name in list(axes)[:4]}), "axis 4": axes["axis 4"]}
    with pytest.raises(ValueError, match="should be several axes"):
        covering(folded, strength=3)


def test_what_is_never_valid_is_said() -> None:
    with pytest.raises(AssertionError, match="no case is valid"):
        covering({name: range(20) for name in "abcd"}, lambda **_: False)


def test_equal_values_are_distinct_cases() -> None:
    assert len(pairwise({"flag": [True, 1, False, 0]})) == 4


@pytest.mark.cases(a=[1, 2, 3, 4], b=[1, 2, 3, 4], c=[1, 2, 3, 4], valid=lambda a, b, c: a != b or c == 1)
def test_marker_parametrizes(a: int, b: int, c: int) -> None:
    assert a != b or c == 1
