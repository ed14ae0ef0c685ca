"""What plans of one class have in common is worked out once (``GemmPlan.of_class``): it says the same as plans made for themselves."""

from __future__ import annotations

import dataclasses
import pickle
import random
from typing import Any

import pytest

from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.allgather_gemm import make_plan as plan_allgather
from mkernel.planner.derived import derived
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReduceProblem
from mkernel.planner.reduce import make_plan as plan_reduce
from mkernel.planner.ring_attention import make_plan as plan_ring
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes
from mkernel.planner.ring_varlen import make_plan as plan_varlen
from mkernel.planner.row_classes import class_of, span
from mkernel.planner.topology import Topology

TOPOLOGIES = [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(2, 1), Topology(4, 2)]


def said(plan: Any) -> dict[str, Any]:
    """Everything that a plan says of itself without being asked for a rank or a tile."""
    names = {name for kind in type(plan).__mro__ for name, value in vars(kind).items() if isinstance(value, (property, derived))}
    return {name: getattr(plan, name) for name in sorted(names) if not name.startswith("_")} | {"describe": plan.describe()}


def same(plan: Any, rows: int) -> None:
    """``of_rows`` of a plan of which everything has been asked says what a plan that is made for itself says."""
    said(plan)
    alone = dataclasses.replace(plan, rows=rows)
    assert "spec" not in vars(alone)
    assert said(plan.of_rows(rows)) == said(alone)
    assert plan.of_rows(rows) == alone


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_plans_of_a_class_differ_in_their_rows_alone(topology: Topology, rng: Any) -> None:
    draw = random.Random(int(rng.integers(2**31)))
    for _ in range(12):
        n, k = 8 * draw.randint(1, 1024), 8 * draw.randint(1, 1024)
        rows = round(2 ** draw.uniform(0, 14))
        other = draw.choice(span(rows))
        partials, algorithm = draw.choice(["output", "float32"]), draw.choice([None, "one_shot", "two_shot"])
        same(plan_allgather(AllGatherGemmProblem(topology, n, k, "bfloat16", draw.random() < 0.5), class_of(rows), 132), other)
        same(plan_reduce(ReduceProblem(REDUCE_SCATTER, topology, n, k, "float16", True, partials), class_of(rows), 132), other)
        same(plan_reduce(ReduceProblem(ALLREDUCE, topology, n, k, "float16", True, partials, algorithm), class_of(rows), 132), other)


def test_a_problem_keeps_its_hash_to_its_process() -> None:
    """Hashes of strings differ by process: what is pickled has fields alone."""
    problem, other = (AllGatherGemmProblem(Topology(2, 2), 64, 64, "bfloat16", True) for _ in range(2))
    assert {problem: 1}[other] == 1
    assert problem.__getstate__() == dataclasses.asdict(problem) | {"topology": Topology(2, 2)}
    copy = pickle.loads(pickle.dumps(problem))
    assert (copy, hash(copy), vars(copy).keys() - {"_hash"}) == (problem, hash(problem), vars(other).keys() - {"_hash"})
    assert "_hash" not in repr(problem)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_plans_of_attention_are_made_of_one(topology: Topology, rng: Any) -> None:
    draw = random.Random(int(rng.integers(2**31)))
    for _ in range(6):
        group, kv_heads, causal = draw.choice([1, 4]), draw.choice([1, 8]), draw.random() < 0.5
        about = (
            topology,
            group * kv_heads,
            kv_heads,
            draw.choice([64, 128]),
            "bfloat16",
            causal,
            draw.choice(["contiguous", "zigzag"]),
            1.0,
        )
        first, second = (Sizes(draw.randint(0, 4), 2 * draw.choice((0, draw.randint(1, 500)))).code for _ in range(2))
        same(plan_ring(RingAttentionProblem(*about), first, 132), second)
        same(plan_varlen(RingAttentionProblem(*about, packed=True), draw.randint(0, 4000), 132), draw.randint(0, 4000))
