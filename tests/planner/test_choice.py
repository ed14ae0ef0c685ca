"""What the model chooses of all candidates."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mkernel.planner import choice, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.machine import H100, H200, Machine
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReduceProblem
from mkernel.planner.row_classes import class_of
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology

SMS = 132
WORLDS = [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(8, 8)]


def drawn(rng: np.random.Generator, world: Topology) -> tuple[Any, int, Machine]:
    """A problem, a class of rows, and a machine on which no resource is always the one that binds."""
    n, k = (int(rng.choice((8, 128))) * int(2 ** rng.uniform(0, 7)) for _ in range(2))
    machine = dataclasses.replace(H100 if rng.random() < 0.5 else H200, l2=float(10 ** rng.uniform(12.6, 13.3)))
    row_major, canonical = bool(rng.random() < 0.7), bool(rng.random() < 0.2)
    op = str(rng.choice(("allgather_gemm", REDUCE_SCATTER, ALLREDUCE)))
    if op == "allgather_gemm":
        problem: Any = AllGatherGemmProblem(world, n, k, "bfloat16", row_major, canonical)
    else:
        partials = str(rng.choice(("output", "float32")))
        problem = ReduceProblem(op, world, n, k, "bfloat16", row_major, partials, canonical=canonical)
    return problem, class_of(int(2 ** rng.uniform(0, 17))), machine


def thorough(problem: Any, rows: int, machine: Machine, kept: frozenset[Any]) -> Any:
    """The choice among all plans."""
    plans = list(choice.candidates(problem, rows, SMS))
    seconds = [choice._weighed(plans[0], plan, machine) for plan in plans]
    allowed = [at for at, plan in enumerate(plans) if plan.spec in kept] or [0]
    worth = [at for at in allowed if at and seconds[at] < choice._worth(plans[0], plans[at]) * seconds[0]]
    return plans[min(worth or (allowed if 0 not in allowed else [0]), key=seconds.__getitem__)]


def test_what_a_plan_must_save() -> None:
    """Little where predictions are good, or as far off for both: between ranks for plans that differ in how B is loaded alone."""
    world = Topology(2, 2)
    problem = ReduceProblem(REDUCE_SCATTER, world, 2488, 5000, "bfloat16", True)
    plans = {
        (width, cluster): reduce.make_plan(problem, 4096, SMS, tiling=Tiling(width, cluster=cluster))
        for width in (128, 256)
        for cluster in (1, 2)
    }
    alone, pair, narrow = plans[256, 1], plans[256, 2], plans[128, 2]
    assert choice._worth(alone, pair) == choice._WORTH > choice._WORTH_OF_TILES
    assert choice._worth(alone, narrow) == choice._worth(pair, alone) == choice._WORTH_OF_TILES
    four, five, narrow = (
        reduce.make_plan(problem, 100, SMS, tiling=Tiling(width, shares=shares, packets=1))
        for width, shares in ((128, 4), (128, 5), (64, 4))
    )
    assert choice._worth(four, five) == 1.0, "by the same kernel"
    assert choice._worth(four, narrow) == choice._WORTH


def test_in_a_world_of_one_the_fastest_is_chosen(rng: np.random.Generator) -> None:
    for _ in range(40):
        problem, rows, machine = drawn(rng, Topology(1, 1))
        plans = list(choice.candidates(problem, rows, SMS))
        chosen = choice._fastest(problem, rows, SMS, machine, None, frozenset(plan.spec for plan in plans))
        assert choice._predicted(chosen, machine).seconds == min(choice._weighed(plans[0], plan, machine) for plan in plans)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_is_chosen_is_the_best_of_all(world: Topology, rng: np.random.Generator) -> None:
    """Among all kernels, or some, also where the rules' is none of these."""
    for _ in range(60):
        problem, rows, machine = drawn(rng, world)
        specs = list(dict.fromkeys(plan.spec for plan in choice.candidates(problem, rows, SMS)))
        share = rng.choice((0.6, 1.0))
        kept = frozenset(spec for spec in specs if rng.random() < share)
        assert choice._fastest(problem, rows, SMS, machine, None, kept) == thorough(problem, rows, machine, kept)
