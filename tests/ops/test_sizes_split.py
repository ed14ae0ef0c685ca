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

_ROWS = [1, 100, 900, 1100, 2000]
_SPLITS = [mk.Split(*roles) for roles in itertools.product((None, SMS), *[(None, 0, 1, 2)] * 3)]


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
    """One that does not fit other sizes than the call's is no error of the call; the first that it fits prepares all that it fits.

    Few rows in packets need no CTA beside those that compute; across nodes a split fits all sizes, or none (tests/planner/test_splits.py).
    """
    shown = 0
    for op, algorithm, n in (("gemm_allreduce", None, 1024), ("gemm_allreduce", "two_shot", 64), ("allgather_gemm", None, 512)):
        case = Case("bfloat16", 64, n, op=op, algorithm=algorithm)
        fits = {split: [_fits(world, case, split, one) for one in _ROWS] for split in _SPLITS}
        mixed = [split for split, some in fits.items() if len(set(some)) == 2]
        for split in [_SPLITS[int(at)] for at in rng.permutation(len(_SPLITS))[:3]] + [
            mixed[int(at)] for at in rng.permutation(len(mixed))[:5]
        ]:
            order = rng.permutation(len(_ROWS))
            by_rank = ranks(_split_of_some, world, case, split, [_ROWS[at] for at in order])
            assert by_rank == [by_rank[0]] * topology(world).size
            refused = [one for one, _ in by_rank[0]]
            assert refused == [not fits[split][at] for at in order], (case, split, order)
            assert not any(costs for no, costs in by_rank[0][refused.index(False) + 1 :] if not no) if False in refused else True
            shown += len(set(refused)) == 2
    assert shown or world != "1x2", "every split fits all sizes, or none: nothing was shown"


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
