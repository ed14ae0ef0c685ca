"""Calls of any size with a split that somebody has asked for, which may fit some sizes and not others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.split import SplitError
from tests.ops.body import Case, topology
from tests.ops.sizes import SMS, Caller, counted, ranks


def _split_of_some(world: Any, case: Case, split: mk.Split, rows: list[int]) -> list[tuple[bool, bool]]:
    """Of each call: whether the split was refused, and whether it cost more than a launch."""
    caller, found = Caller(world, case, max(rows)), []
    for one in rows:
        with counted(world) as costs:
            try:
                caller.call(one, split=split)
                refused = False
            except ArgumentError as error:
                assert error.argument == "split"
                refused = True
        world.barrier()
        del costs["heap"]
        found.append((refused, bool(costs)))
    return found


@pytest.mark.parametrize("world", ["1x2", "2x1", "2x2"])
def test_a_split_is_for_the_sizes_that_it_fits(rng: np.random.Generator, world: str) -> None:
    """One that does not fit other sizes than the call's is no error of the call; the first that it fits prepares all that it fits."""
    mixed = 0
    for op, algorithm, n in (("gemm_allreduce", None, 1024), ("gemm_allreduce", "two_shot", 64), ("allgather_gemm", None, 512)):
        case = Case("bfloat16", 64, n, op=op, algorithm=algorithm)
        for roles in itertools.product(*((None, int(rng.integers(0, 3))) for _ in range(3))):
            split = mk.Split(None, *roles)
            rows = [int(one) for one in rng.permutation([1, 100, 900, 1100, 2000])]
            by_rank = ranks(_split_of_some, world, case, split, rows)
            assert by_rank == [by_rank[0]] * topology(world).size
            refused = [one for one, _ in by_rank[0]]
            assert refused == [not _fits(world, case, split, one) for one in rows], (case, split, rows)
            assert not any(costs for no, costs in by_rank[0][refused.index(False) + 1 :] if not no) if False in refused else True
            mixed += 0 < sum(refused) < len(rows)
    assert mixed, "every split fitted all sizes, or none: nothing was shown"


def _fits(world: str, case: Case, split: mk.Split, rows: int) -> bool:
    shape, common = topology(world), (case.n, case.k, case.dtype, case.row_major)
    try:
        if case.op == "allgather_gemm":
            allgather_gemm.make_plan(allgather_gemm.AllGatherGemmProblem(shape, *common), rows, SMS, split)
        else:
            reduce.make_plan(reduce.ReduceProblem(case.op, shape, *common, case.partials, case.algorithm), rows, SMS, split)
    except SplitError:
        return False
    return True
