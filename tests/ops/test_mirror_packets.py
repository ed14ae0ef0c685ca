"""The schedule of gemm_allreduce in packets, and the room for them, in kernel and plan."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from mkernel.plan.gemm import BLOCK_M, GemmTile
from mkernel.plan.reduce import ALGORITHMS, ALLREDUCE, ReduceProblem, make_plan
from mkernel.plan.split import Split
from mkernel.plan.topology import Topology
from tests.ops.test_mirror_reduce import Mirror, check_order, check_roles


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("size", "n", "block_n"), [(2, 264, 64), (3, 1000, 128), (5, 72, 128), (8, 264, 64)])
def test_tiles_and_room(algorithm: str, size: int, n: int, block_n: int) -> None:
    for rows in (0, 1, 16, 17, 128, 129, 300):
        problem = ReduceProblem(ALLREDUCE, Topology(size, size), rows, n, 64, "bfloat16", False, "output", algorithm)
        plan = make_plan(problem, 4, Split(compute=4), GemmTile.deepest(block_n))
        plan = dataclasses.replace(plan, load_rows=BLOCK_M)  # one kernel for all rows
        assert plan.packets
        mirror = Mirror(plan)
        for rank in range(size):
            check_order(mirror, rank)
        mirror.library.mirror_packet_bytes.restype = ctypes.c_uint64
        assert mirror.library.mirror_packet_bytes(ctypes.byref(mirror.shape)) == plan.packet_bytes
        check_roles(mirror)
