"""What the cost model chooses in place of the rules runs, and is right (target cpu)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.planner import choice
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.topology import Topology
from mkernel.tools.check import worst_product
from tests.ops.body import random

_K, _N, _ROWS = 200, 72, (129,)  # rows of a rank's operand
_WORLD = Topology(2, 2)


def _inputs(seed: int, rank: int, rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([seed, rank, rows])
    return random((rows, _K), "bfloat16", rng), random((_K, _N), "bfloat16", rng)


def _rank(world: Any, seed: int) -> list[float]:
    """Largest error over its bound of each call."""
    found = []
    for rows in _ROWS:
        a, b = _inputs(seed, world.rank, rows)
        c = mk.allgather_gemm(a, b, world=world)
        world.barrier()
        every = np.concatenate([_inputs(seed, rank, rows)[0].view(np.uint16) for rank in range(world.size)]).view(a.dtype)
        found.append(float(worst_product(np, c, every, b)))
    return found


@pytest.mark.slow
def test_calls_of_the_model_s_plans_are_right(rng: np.random.Generator) -> None:
    with env.override(MKERNEL_SPECIALIZE="k"):
        _both(int(rng.integers(1 << 30)))


def _both(seed: int) -> None:
    problem = AllGatherGemmProblem(_WORLD, _N, _K, "bfloat16", True)
    rules = [choice.plan_allgather_gemm(problem, rows, 4) for rows in _ROWS]
    with env.override(MKERNEL_PLANNER="model"):
        chosen = [choice.plan_allgather_gemm(problem, rows, 4) for rows in _ROWS]
        assert [plan.digest for plan in chosen] != [plan.digest for plan in rules], "sizes at which both differ"
        results = mk.launch(_rank, 2, target="cpu", args=(seed,), max_sms=4, heap_bytes=64 << 20)
    assert max(map(max, results)) <= 1
