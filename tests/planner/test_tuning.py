"""The search for a split: what it tries, what it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReduceProblem
from mkernel.planner.split import Split
from mkernel.planner.split_search import SMS, WORTH, search
from mkernel.planner.topology import Topology

WORLDS = [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(4, 2), Topology(4, 1), Topology(8, 8)]
GATHER = AllGatherGemmProblem(Topology(4, 4), 4096, 16384, "bfloat16", True), 4096


def planner(asked: tuple[Any, int], sms: int = 132) -> Callable[[Split | None], Any]:
    problem, rows = asked
    make_plan = allgather_gemm.make_plan if isinstance(problem, AllGatherGemmProblem) else reduce.make_plan
    return lambda split: make_plan(problem, rows, sms, split)


def problems() -> list[tuple[Any, int]]:
    found: list[tuple[Any, int]] = []
    for topology, rows, n, k in itertools.product(WORLDS, (0, 1, 300, 2048), (8, 1000, 4096), (64, 520, 8192)):
        found.append((AllGatherGemmProblem(topology, n, k, "bfloat16", True), rows))
        found.append((ReduceProblem(REDUCE_SCATTER, topology, n, k, "bfloat16", True), rows))
        found += [(ReduceProblem(ALLREDUCE, topology, n, k, "bfloat16", True, "output", name), rows) for name in reduce.ALGORITHMS]
    return found


def drive(problem: tuple[Any, int], time_of: Callable[[Split], float], sms: int = 132) -> tuple[Any, list[list[Split]]]:
    """The plan that a search keeps if a split takes so long; and what was measured, by round."""
    rounds, steps = [], search(planner(problem, sms))
    try:
        plans = next(steps)
        while True:
            rounds.append([plan.split for plan in plans])
            plans = steps.send([time_of(plan.split) for plan in plans])
    except StopIteration as end:
        return end.value, rounds


@pytest.mark.parametrize("sms", [4, 132])
def test_the_whole_split_of_a_plan_gives_that_plan(sms: int) -> None:
    """Else what was measured would not be what is used."""
    for problem in problems():
        plan = planner(problem, sms)
        assert plan(plan(None).split) == plan(None)


def test_the_fastest_is_found_role_by_role() -> None:
    problem = ReduceProblem(ALLREDUCE, Topology(4, 2), 8192, 2048, "bfloat16", True, "output", "two_shot"), 8192
    wanted = Split(None, 8, 3, 6)

    def away(split: Split) -> float:
        return 10.0 + sum(abs((getattr(split, r) or 0) - getattr(wanted, r)) for r in ("intra_comm", "inter_send", "inter_reduce"))

    best, rounds = drive(problem, away)
    assert best.split == Split(132 - 8 - 3 - 6, 8, 3, 6)
    assert len(rounds) == 4
    default = planner(problem)(None).split
    assert rounds[0][0] == default
    assert rounds[-1] == [default, best.split]
    for before, measured in itertools.pairwise(rounds[:-1]):
        assert measured[0] == min(before, key=away), "each role starts from the best so far"
    assert all(split.total == 132 for measured in rounds for split in measured)


def test_little_gained_is_not_kept() -> None:
    default = planner(GATHER)(None).split
    best, rounds = drive(GATHER, lambda split: 1.0 if split == default else WORTH)
    assert best.split == default
    assert len(rounds) == 1, "and nothing is measured again"


def test_what_was_found_must_win_again() -> None:
    default, seen = planner(GATHER)(None).split, []

    def lucky(split: Split) -> float:
        seen.append(split)
        return 0.5 if split.intra_comm == 12 and seen.count(split) == 1 else 1.0

    best, rounds = drive(GATHER, lucky)
    assert rounds[-1] == [default, Split(120, 12, 0, 0)]
    assert best.split == default


@pytest.mark.parametrize("right", [True, False], ids=["the model is right", "the model is wrong"])
def test_what_the_model_likes_is_measured_first(right: bool) -> None:
    problem = ReduceProblem(ALLREDUCE, Topology(4, 2), 8192, 2048, "bfloat16", True, "output", "two_shot"), 8192
    wanted, liked = Split(None, 8, 3, 6), Split(None, *((8, 3, 6) if right else (20, 1, 1)))

    def away(split: Split, from_: Split) -> float:
        return 10.0 + sum(abs((getattr(split, r) or 0) - getattr(from_, r)) for r in ("intra_comm", "inter_send", "inter_reduce"))

    rounds, steps = [], search(planner(problem), predicted=lambda plan: away(plan.split, liked))
    try:
        plans = next(steps)
        while True:
            rounds.append([plan.split for plan in plans])
            plans = steps.send([away(plan.split, wanted) for plan in plans])
    except StopIteration as end:
        best = end.value.split
    first, *later = rounds
    assert first[0] == planner(problem)(None).split
    assert 1 < len(first) <= 5
    assert [away(split, liked) for split in first[1:]] == sorted(away(split, liked) for split in first[1:])
    assert best == Split(132 - 8 - 3 - 6, 8, 3, 6), "measurements decide, not the model"
    assert not right or first[1] == later[0][0] == best
    assert len(rounds) == 5


def test_a_model_that_knows_nothing_changes_nothing() -> None:
    steps = search(planner(GATHER), predicted=lambda plan: float("inf"))
    assert [plan.split for plan in next(steps)] == drive(GATHER, lambda split: 1.0)[1][0]


def test_only_splits_that_the_op_takes_are_tried_and_each_once() -> None:
    default, (measured,) = planner(GATHER)(None).split, drive(GATHER, lambda split: 1.0)[1]
    assert sorted(split.intra_comm or 0 for split in measured) == sorted({*SMS, default.intra_comm})
    # Nothing to choose: a rank alone; tiles that are sent by those who compute them; packets.
    for problem in (
        (AllGatherGemmProblem(Topology(1, 1), 4096, 4096, "bfloat16", True), 4096),
        (ReduceProblem(REDUCE_SCATTER, Topology(4, 4), 8192, 2048, "bfloat16", True), 2048),
        (ReduceProblem(ALLREDUCE, Topology(4, 4), 8192, 2048, "bfloat16", True), 32),
    ):
        best, rounds = drive(problem, lambda split: 1.0)
        assert rounds == []
        assert best == planner(problem)(None)


@pytest.mark.parametrize("sms", [4, 132])
def test_no_split_of_another_kernel_is_compared(sms: int) -> None:
    """Other kernels of an op may round at other places."""
    for problem in problems():
        name = planner(problem, sms)(None).spec.name
        steps = search(planner(problem, sms))
        for plans in steps:
            assert {plan.spec.name for plan in plans} == {name}
            break


def test_open_roles_are_filled() -> None:
    tuned = Split(None, 8, 2, 4)
    assert Split().filled(tuned) == tuned
    assert Split(100, 12).filled(tuned) == Split(100, 12, 2, 4)
    assert Split(None, 0, 0, 0).filled(tuned) == Split(None, 0, 0, 0)
    assert Split(None, 12).filled(Split()) == Split(None, 12)
