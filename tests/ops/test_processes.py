"""The body of the thread tests with a process per rank: their kernels wait for each other in real time, through shared memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ops.body import CALLS, topology
from tests.ops.worker import CASES
from tests.runtime.processes import start, start_mpi

_WORKER = Path(__file__).with_name("worker.py")
_SECONDS = 240.0


def _environment(request: pytest.FixtureRequest, world: str, how: str) -> dict[str, str]:
    per_node = topology(world).ranks_per_node
    return {"TEST_SEED": str(request.config.getoption("--seed")), "TEST_HOW": how, "MKERNEL_RANKS_PER_NODE": str(per_node)}


def _check(lines: list[dict[str, Any]], world: str, how: str, errors: str) -> None:
    """One line of each rank, by rank."""
    said = {"shape": world, "calls": len(CASES[how]) * CALLS, "problems": []}
    assert [{key: line[key] for key in line if key != "same"} for line in lines] == [
        {"rank": rank, **said} for rank in range(topology(world).size)
    ], errors
    assert len({line["same"] for line in lines}) == 1, "the ranks have different bits"


def kinds(op_in: dict[str, str]) -> pytest.MarkDecorator:
    """One op in each world: what all ops do there, ``mk.launch`` has shown already. The others with --full."""
    cases = itertools.product(op_in, CASES)
    chosen = [pytest.param(world, how, marks=() if op_in[world] == how else pytest.mark.slow) for world, how in cases]
    return pytest.mark.parametrize(("world", "how"), chosen)


@kinds({"1x2": "gemm_allreduce", "2x2": "allgather_gemm", "4x1": "gemm_reduce_scatter"})
@pytest.mark.drawn(1)
def test_plain_processes(request: pytest.FixtureRequest, world: str, how: str) -> None:
    shape = topology(world)
    results = start("calls", shape.size, _SECONDS, _WORKER, **_environment(request, world, how))
    assert [result.code for result in results] == [0] * shape.size, results
    assert all(len(result.lines) == 1 for result in results), results
    _check([result.lines[0] for result in results], world, how, "".join(result.errors for result in results))


@pytest.mark.mpi
@kinds({"1x4": "gemm_reduce_scatter", "2x2": "gemm_allreduce"})
@pytest.mark.drawn(1)
def test_mpirun(request: pytest.FixtureRequest, world: str, how: str) -> None:
    shape = topology(world)
    result = start_mpi("calls", shape.size, _SECONDS, _WORKER, **_environment(request, world, how))
    assert result.code == 0, result
    _check(result.lines, world, how, result.errors)
