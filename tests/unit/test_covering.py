"""The covering that decides which cases run by default."""

from __future__ import annotations

import itertools

import pytest
from covering import covering, pairwise, product

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


def test_equal_values_are_distinct_cases() -> None:
    assert len(pairwise({"flag": [True, 1, False, 0]})) == 4


@pytest.mark.cases(a=[1, 2, 3, 4], b=[1, 2, 3, 4], c=[1, 2, 3, 4], valid=lambda a, b, c: a != b or c == 1)
def test_marker_parametrizes(a: int, b: int, c: int) -> None:
    assert a != b or c == 1
