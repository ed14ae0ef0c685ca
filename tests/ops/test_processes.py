"""The body of the thread tests with a process per rank: their kernels wait for each other in real time, through shared memory."""

from __future__ import annotations

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


@pytest.mark.parametrize("world", ["1x2", "2x2", "4x1"])
@pytest.mark.parametrize("how", CASES)
def test_plain_processes(request: pytest.FixtureRequest, world: str, how: str) -> None:
    shape = topology(world)
    results = start("calls", shape.size, _SECONDS, _WORKER, **_environment(request, world, how))
    assert [result.code for result in results] == [0] * shape.size, results
    assert all(len(result.lines) == 1 for result in results), results
    _check([result.lines[0] for result in results], world, how, "".join(result.errors for result in results))


@pytest.mark.mpi
@pytest.mark.parametrize("world", ["1x4", "2x2"])
@pytest.mark.parametrize("how", CASES)
def test_mpirun(request: pytest.FixtureRequest, world: str, how: str) -> None:
    shape = topology(world)
    result = start_mpi("calls", shape.size, _SECONDS, _WORKER, **_environment(request, world, how))
    assert result.code == 0, result
    _check(result.lines, world, how, result.errors)
