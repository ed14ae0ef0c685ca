"""Worlds whose nodes are machines: fused operations over rc on target cpu, and what everybody hears when something breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mkernel as mk
from tests.ops.body import CALLS, USES, Rank, topology
from tests.vm.jobs import worker
from tests.vm.machines import Job, Machines, Outcome

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]  # the machines end sooner by themselves
JOBS = Path(__file__).parent / "jobs"
WORLDS = ("2x2", "4x1")


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every kernel of these tests in the cache: compiling is an error in the machines."""

    def fill(world: Any) -> None:
        for case in (*worker.cases(), worker.Case("float16", 72, 520)):
            rank = Rank(world, case, 0, worker.ROWS)
            for number, rows in enumerate(worker.ROWS):  # plans may depend on them
                rank.call(number, rows, USES[0])

    for shape in map(topology, (*WORLDS, "2x1")):
        mk.launch(fill, shape.size, ranks_per_node=shape.ranks_per_node, target="cpu", heap_bytes=worker.HEAP)


def jobs(scenario: str, world: str, **environment: str) -> list[list[Job]]:
    shape = topology(world)
    common = {"MKERNEL_RENDEZVOUS": "10.77.0.1:5555", "MKERNEL_SIZE": str(shape.size), "MKERNEL_NO_COMPILE": "1", **environment}
    ranks = [Job(JOBS / "worker.py", (scenario,), {**common, "MKERNEL_RANK": str(rank)}) for rank in range(shape.size)]
    return [ranks[node * shape.ranks_per_node : (node + 1) * shape.ranks_per_node] for node in range(shape.num_nodes)]


def run(some: list[list[Job]], meanwhile: Callable[[Machines], None] | None = None, timeout: float = 280) -> list[Outcome]:
    with Machines(some, timeout=timeout) as machines:
        if meanwhile is not None:
            meanwhile(machines)
        return machines.wait()


def texts(outcomes: list[Outcome]) -> str:
    return "\n".join(map(str, outcomes))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("world", ["2x2", pytest.param("4x1", marks=pytest.mark.slow)])
def test_fused_operations(world: str, pytestconfig: pytest.Config) -> None:
    outcomes = run(jobs("calls", world, TEST_SEED=str(pytestconfig.getoption("--seed"))), timeout=540)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        assert line.pop("packets") > 0, "nothing went over the card"
        assert line == {"rank": rank, "shape": world, "calls": CALLS * len(worker.cases()), "problems": []}, texts(outcomes)


def check(line: dict[str, Any], outcomes: list[Outcome]) -> None:
    """An error, in time, after calls that went well."""
    assert line["error"] is not None and line["good"] >= 3, texts(outcomes)
    assert line["seconds"] <= worker.TIMEOUT + 5, texts(outcomes)
    assert line["closing"] <= 10 if "closing" in line else True, texts(outcomes)


@pytest.mark.usefixtures("compiled")
def test_a_killed_machine() -> None:
    def kill(machines: Machines) -> None:
        machines.wait_for(1, "going1", 200)
        machines.kill(1)

    outcomes = run(jobs("fails", "2x1"), kill)
    assert [outcome.code for outcome in outcomes] == [0, None], texts(outcomes)
    (line,) = outcomes[0].lines
    check(line, outcomes)
    assert line["error"] in ("PeerLostError", "TransportError", "TimeoutError") and "rank 1" in line["message"], texts(outcomes)
    assert not outcomes[0].left, texts(outcomes)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("fault", "signal", "statuses"),
    [
        ("rkey:0", "atomic", {"IBV_WC_REM_ACCESS_ERR", "IBV_EVENT_QP_ACCESS_ERR"}),
        ("qp:0", "atomic", {"IBV_WC_WR_FLUSH_ERR", "IBV_WC_RETRY_EXC_ERR", "ENOTSUP", "EINVAL"}),
        ("deaf:1", "imm", {"IBV_WC_RNR_RETRY_EXC_ERR"}),
    ],
)
def test_a_fault_inside_an_engine(fault: str, signal: str, statuses: set[str]) -> None:
    environment = {"TEST_FAULT": fault, "PYTHONPATH": str(JOBS / "faults"), "MKERNEL_RC_SIGNAL": signal}
    outcomes = run(jobs("fails", "2x1", **environment))
    for outcome in outcomes:
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        check(line, outcomes)
        assert line["error"] == "TransportError" and line["status"] in statuses, texts(outcomes)


@pytest.mark.usefixtures("compiled")
def test_a_link_that_goes_down_and_up() -> None:
    outcomes = run(jobs("link_down", "2x1"))
    for outcome in outcomes:
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        check(line, outcomes)
        assert line["error"] == "TransportError" and line["second"] == 2, texts(outcomes)
