"""What an entry flag carries tells calls apart that differ in one thing, whatever the others are: all of them, not a sample."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mkernel import abi
from mkernel.ops.schedule import schedule_number
from mkernel.planner.split import Split
from mkernel.runtime.prepared import check_of

NUMBERS = 1 << 24
ROLES = [field.name for field in dataclasses.fields(Split)]
SMS = (None, *range(255))  # what a role may be given


@pytest.mark.parametrize("which", range(3), ids=["problem", "rows", "schedule"])
@pytest.mark.drawn(1)
def test_a_difference_in_one_number_is_always_seen(rng: np.random.Generator, which: int) -> None:
    """Any two calls of the same problem with other rows, say, have other checks: as many checks as there are rows."""
    numbers = [int(one) for one in rng.integers(NUMBERS, size=3)]
    every = [np.arange(NUMBERS, dtype=np.uint64) if i == which else np.uint64(number) for i, number in enumerate(numbers)]
    checks = np.asarray(check_of(*every))  # type: ignore[arg-type]
    seen = np.zeros(1 << abi.CHECK_BITS, bool)
    seen[checks] = True
    assert seen.all(), numbers


def test_checks_fit_their_bits(rng: np.random.Generator) -> None:
    """Also of numbers that no call has yet."""
    for _ in range(1000):
        numbers = [int(one) for one in rng.integers(1 << 32, size=3)]
        assert 0 <= check_of(*numbers) < 1 << abi.CHECK_BITS


def test_rows_that_are_close_or_differ_in_one_bit(rng: np.random.Generator) -> None:
    """What ranks most likely disagree in: one row more, a power of two, a multiple of a tile, as much as fits."""
    for _ in range(200):
        problem, schedule, rows = (int(one) for one in rng.integers(NUMBERS, size=3))
        others = [rows + 1, rows - 1, *(rows ^ 1 << bit for bit in range(24)), *(rows + 128 * i for i in range(1, 100)), NUMBERS - 1 - rows]
        for other in others:
            if other % NUMBERS != rows:
                assert check_of(problem, rows, schedule) != check_of(problem, other, schedule), (problem, rows, other, schedule)


def test_few_calls_that_differ_in_everything_are_taken_for_each_other(rng: np.random.Generator) -> None:
    """24 bits cannot tell all of them apart: of 4000 by chance half a pair look alike, and nine once in 10^9 runs."""
    calls = {tuple(int(one) for one in rng.integers((1, 0, 0), (40, 4096, 1 << 24))) for _ in range(4000)}
    assert len(calls) - len({check_of(*call) for call in calls}) < 9


# ---- schedules


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.drawn(1)
def test_splits_that_differ_in_one_role_have_other_numbers(rng: np.random.Generator, role: str) -> None:
    """All pairs of numbers of SMs of that role; the other roles are open, or have any number."""
    bases = [Split(), *(Split(*(SMS[i] for i in rng.integers(len(SMS), size=4))) for _ in range(300))]
    for base in bases:
        numbers = {schedule_number(dataclasses.replace(base, **{role: sms})) for sms in SMS}
        assert len(numbers) == len(SMS), base
        assert all(0 <= number < NUMBERS for number in numbers)


def test_no_split_is_number_nought_and_nothing_else_near_it() -> None:
    """A call without ``split=`` and one that leaves all roles open are the same call."""
    assert schedule_number(None) == schedule_number(Split()) == 0
    assert 0 not in {schedule_number(Split(compute, intra)) for compute in SMS for intra in SMS if (compute, intra) != (None, None)}


def test_splits_of_one_device_have_other_numbers(rng: np.random.Generator) -> None:
    """Splits in full, as tuning asks for them, and with compute left open."""
    splits = {Split(*(int(one) for one in rng.integers((1, 0, 0, 0), (133, 25, 25, 25)))) for _ in range(3000)}
    splits |= {dataclasses.replace(split, compute=None) for split in splits}
    numbers = {schedule_number(split) for split in splits}
    assert len(numbers) > 0.998 * len(splits), f"{len(splits) - len(numbers)} of {len(splits)}"
