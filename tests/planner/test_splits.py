"""A split that fits a number of rows fits fewer, too: a plan is prepared for all of them, and a program changes M with every call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mkernel.ops.op import find
from mkernel.planner import reduce
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.reduce import ALGORITHMS, ALLREDUCE, REDUCE_SCATTER, ReduceProblem
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology

WORLDS = [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(2, 1), Topology(4, 2), Topology(6, 2)]
GATHER = "allgather_gemm"


def drawn(rng: np.random.Generator, world: Topology, op: str) -> tuple[Any, int, Split]:
    """A problem, how many SMs there are, and a split that names some roles, which the op may not have."""
    n, k = (8 * int(2 ** rng.uniform(0, 10)) for _ in range(2))
    sms, row_major, canonical = int(rng.choice((4, 8, 78, 132))), bool(rng.random() < 0.7), bool(rng.random() < 0.3)
    if op == GATHER:
        problem: Any = AllGatherGemmProblem(world, n, k, "bfloat16", row_major, canonical)
    else:
        partials = str(rng.choice(("output", "float32")))
        algorithm = None if op != ALLREDUCE or canonical or rng.random() < 0.7 else str(rng.choice(ALGORITHMS))
        problem = ReduceProblem(op, world, n, k, "bfloat16", row_major, partials, algorithm, canonical)
    roles = [None if rng.random() < 0.5 else int(rng.choice((0, 1, 2))) for _ in range(3)]
    compute = None if rng.random() < 0.7 else int(rng.integers(1, sms + 1))
    return problem, sms, Split(compute, *roles)


def _rows(rng: np.random.Generator) -> int:
    return int(2 ** rng.uniform(0, 17))


def fits(op: str, problem: Any, rows: int, sms: int, split: Split) -> bool:
    try:
        return bool(find(op).make_plan(problem, rows, sms, split).split.compute)
    except SplitError:
        return False


@pytest.mark.parametrize("packed", [False, True], ids=["ring_attention", "ring_attention_varlen"])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world.num_nodes}x{world.ranks_per_node}")
def test_a_split_of_attention_fits_any_rows_or_none(world: Topology, packed: bool, rng: np.random.Generator) -> None:
    """And where the caller leaves it to the planner there is one, on as few SMs as have a role each."""
    verdicts = set()
    for _ in range(40):
        kv_heads, group = (int(rng.integers(1, 5)) for _ in range(2))
        causal, sms = bool(rng.random() < 0.5), int(rng.choice((world.size + 1, 8, 78, 132)))
        layout = "zigzag" if causal and rng.random() < 0.5 else "contiguous"
        shape = kv_heads * group, kv_heads, int(rng.choice((64, 128)))
        problem = RingAttentionProblem(world, *shape, "bfloat16", causal, layout, 0.1, packed=packed, canonical=bool(rng.random() < 0.3))
        roles = [None if rng.random() < 0.5 else int(rng.choice((0, 1, 2, 5))) for _ in range(2)]
        split = Split(None if rng.random() < 0.7 else int(rng.integers(1, sms + 1)), *roles)
        op = "ring_attention_varlen" if packed else "ring_attention"
        codes = [0, *(int(2 ** rng.uniform(0, 17)) if packed else Sizes(*_sizes(rng)).code for _ in range(6))]
        found = {code: fits(op, problem, code, sms, split) for code in codes}
        assert len(set(found.values())) == 1, f"{problem}, {sms} SMs, {split}: {found}"
        verdicts |= set(found.values())
        assert all(fits(op, problem, code, sms, Split()) for code in codes), f"{problem}, {sms} SMs: {codes}"
    assert verdicts == {True, False}, "both were drawn"


def _sizes(rng: np.random.Generator) -> tuple[int, int]:
    """Sequences, and rows of each on a rank."""
    return int(rng.integers(1, 17)), 2 * int(2 ** rng.uniform(0, 14))


@pytest.mark.parametrize("op", [GATHER, REDUCE_SCATTER, ALLREDUCE])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world.num_nodes}x{world.ranks_per_node}")
def test_a_split_that_fits_many_rows_fits_fewer(world: Topology, op: str, rng: np.random.Generator) -> None:
    verdicts = set()
    for _ in range(40):
        problem, sms, split = drawn(rng, world, op)
        found = {rows: fits(op, problem, rows, sms, split) for rows in sorted(_rows(rng) for _ in range(8))}
        assert sorted(found.values(), reverse=True) == list(found.values()), f"{problem}, {sms} SMs, {split}: {found}"
        verdicts |= set(found.values())
    assert verdicts == {True, False}, "both were drawn"


@pytest.mark.parametrize("op", [GATHER, ALLREDUCE])
def test_what_some_rows_leave_to_compute_fits_fewer_rows(op: str, rng: np.random.Generator) -> None:
    """The SMs that roles ask for by default depend on the rows, and not monotonically: they are no reason to refuse a split."""
    defaults = set()
    for _ in range(120):
        world = WORLDS[int(rng.integers(1, 4))]  # one node, and nodes of one rank
        problem, sms, _ = drawn(rng, world, op)
        problem = dataclasses.replace(problem, n=problem.n + 4096)
        rows = sorted(_rows(rng) for _ in range(8))
        left = [find(op).make_plan(problem, count, sms).split.compute for count in rows]
        defaults.add(len(set(left)) > 1)
        for compute in set(left):
            found = {count: fits(op, problem, count, sms, Split(compute)) for count in rows}
            assert sorted(found.values(), reverse=True) == list(found.values()), f"{problem}, {sms} SMs, {compute}: {found}"
    assert True in defaults, "defaults that depend on the rows were drawn"


def test_an_open_all_reduce_has_the_roles_that_a_split_names() -> None:
    """In one step nobody pulls, and nobody adds up what other nodes send."""
    node, nodes = (ReduceProblem(ALLREDUCE, world, 512, 512, "bfloat16", True) for world in (Topology(2, 2), Topology(4, 2)))
    assert reduce.make_plan(node, 8, 132).one_shot, "which few rows are otherwise"
    assert not reduce.make_plan(node, 8, 132, Split(intra_comm=4)).one_shot
    assert reduce.make_plan(node, 8, 132, Split(intra_comm=0)).one_shot
    assert not reduce.make_plan(nodes, 8, 132, Split(inter_reduce=4)).one_shot
    assert not reduce.make_plan(node, 1 << 16, 132).one_shot, "which many rows are otherwise"
    assert reduce.make_plan(node, 1 << 16, 132, Split(intra_comm=0)).one_shot
    one_step = dataclasses.replace(node, algorithm="one_shot")
    with pytest.raises(SplitError):
        reduce.make_plan(one_step, 8, 132, Split(intra_comm=4))
    with pytest.raises(SplitError):  # as the choice asks for it
        reduce.make_plan(node, 8, 132, Split(intra_comm=4), algorithm="one_shot")
    assert reduce.make_plan(node, 300, 132, Split(intra_comm=4), tiling=Tiling(cluster=2)).cluster == 2
