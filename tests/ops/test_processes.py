"""The body of test_allgather_gemm.py with a process per rank: their kernels wait for each other in real time, through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.body import CALLS, topology
from tests.ops.worker import CASES
from tests.runtime.processes import start, start_mpi

_WORKER = Path(__file__).with_name("worker.py")
_SECONDS = 240.0


@pytest.mark.parametrize("world", ["1x2", "2x2", "4x1"])
def test_plain_processes(request: pytest.FixtureRequest, world: str) -> None:
    shape = topology(world)
    environment = {"TEST_SEED": str(request.config.getoption("--seed")), "MKERNEL_RANKS_PER_NODE": str(shape.ranks_per_node)}
    results = start("calls", shape.size, _SECONDS, _WORKER, **environment)
    assert [result.code for result in results] == [0] * shape.size, results
    for rank, result in enumerate(results):
        assert result.lines == [{"rank": rank, "shape": world, "calls": len(CASES) * CALLS, "problems": []}], result.errors


@pytest.mark.mpi
@pytest.mark.parametrize("world", ["1x4", "2x2"])
def test_mpirun(request: pytest.FixtureRequest, world: str) -> None:
    shape = topology(world)
    environment = {"TEST_SEED": str(request.config.getoption("--seed")), "MKERNEL_RANKS_PER_NODE": str(shape.ranks_per_node)}
    result = start_mpi("calls", shape.size, _SECONDS, _WORKER, **environment)
    assert result.code == 0, result
    assert result.lines == [{"rank": rank, "shape": world, "calls": len(CASES) * CALLS, "problems": []} for rank in range(shape.size)], (
        result.errors
    )
