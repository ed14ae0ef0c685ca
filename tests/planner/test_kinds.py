"""The kernels that serve all N and K: sixteen at most, whatever is asked, and hardly slower than if there were all (planner/kinds.py)."""

from __future__ import annotations

import numpy as np
import pytest

from mkernel.planner import choice, kinds
from mkernel.planner.candidates import candidates
from mkernel.planner.machine import H200
from mkernel.planner.reduce import ALLREDUCE, ReduceProblem
from mkernel.planner.reduce_problem import ALGORITHMS
from mkernel.planner.row_classes import class_of
from mkernel.planner.topology import Topology
from tests.planner.kernels import of_any_height
from tests.planner.kinds import LARGE, Case, cases, cost, extents, problems

WORLDS = [Topology(1, 1), Topology(2, 2), Topology(3, 3), Topology(8, 8), Topology(2, 1), Topology(6, 2)]


def some_rows(rng: np.random.Generator) -> int:
    return class_of(int(2 ** rng.uniform(0, 14)))


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_kind_is_a_kernel(world: Topology, rng: np.random.Generator) -> None:
    """So that there are no more kernels than kinds, of which sixteen are kept at most."""
    kernels: dict[tuple[str, kinds.Kind], set[object]] = {}
    kept: dict[str, set[kinds.Kind]] = {}
    for _ in range(12):
        for problem in problems(world, *extents(rng)):
            for plan in candidates(problem, some_rows(rng), int(rng.choice((132, 132, 78))), "none"):
                op, kind = kinds.op_of(problem), kinds.kind_of(plan)
                kernels.setdefault((op, kind), set()).add(plan.spec)
                if choice._may_be_chosen(plan):
                    kept.setdefault(op, set()).add(kind)
    assert {len(specs) for specs in kernels.values()} == {1}
    assert all(1 < len(some) <= kinds.MOST_KINDS for some in kept.values())


@pytest.mark.parametrize("op", kinds.OPS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_more_are_kept(op: str, ranks: int) -> None:
    assert 1 < len(kinds.kept(op, Topology(ranks, ranks))) <= kinds.MOST_KINDS


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_call_can_have_one(world: Topology, rng: np.random.Generator) -> None:
    """Also where the algorithm is asked for, sums are canonical, or operands are tiny."""
    for _ in range(20):
        n, k = extents(rng) if rng.random() < 0.7 else (8 * int(x) for x in rng.integers(1, 40, 2))
        canonical = bool(rng.random() < 0.3)
        asked = ReduceProblem(ALLREDUCE, world, n, k, "bfloat16", True, algorithm=str(rng.choice(ALGORITHMS)), canonical=canonical)
        for problem in (*problems(world, n, k), asked):
            rows = some_rows(rng)
            assert any(map(choice._may_be_chosen, candidates(problem, rows, 132, "none"))), (problem, rows)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_choosing_among_them_costs_little(world: Topology, rng: np.random.Generator) -> None:
    by_op: dict[str, list[Case]] = {}
    for op, case in cases(world, 12, rng):
        by_op.setdefault(op, []).append(case)
    for op, found in by_op.items():
        mean, _ = cost(found, set().union(*(case.kept for case in found)))
        assert mean <= 1.02, op
        assert mean == pytest.approx(1.0) or world.num_nodes == 1, op


def test_what_is_missed_is_told(rng: np.random.Generator) -> None:
    """So the check above can fail: few kernels are the fastest everywhere."""
    found = [case for op, case in cases(Topology(1, 1), 12, rng) if op == "allgather_gemm"]
    assert cost(found, {kinds.Kind(width) for width in (128, 256)})[0] > 1.02
    assert cost(found, set()) == (pytest.approx(LARGE), LARGE)


def test_what_is_compiled_in_counts_for_one_n_and_k_alone() -> None:
    """These have eight kernels at most of their own: any plan may be chosen."""
    problem = problems(Topology(1, 1), 4104, 4104)[0]
    plans = list(candidates(problem, 1024, 132, "n,k"))
    assert not all(map(kinds.serves_all, plans))
    assert all(map(choice._may_be_chosen, plans))
    assert of_any_height(choice.choose(problem, 1024, 132, H200, "n,k")) in map(of_any_height, plans)
