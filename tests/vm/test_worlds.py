"""Worlds whose nodes are machines: GEMM ops over rc on target cpu, and what everybody hears when something breaks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import mkernel as mk
from mkernel.proxy.compiled import library
from tests.ops.body import USES, Case, Rank, topology
from tests.vm.jobs import worker
from tests.vm.machines import Machines, Outcome, Round
from tests.vm.worlds import JOBS, jobs, texts, wait_until_calls_go_well

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]  # the machines end sooner by themselves


@functools.cache
def compile(world: str, *cases: Case) -> None:
    """Fill the cache of kernels: compiling is an error in the machines."""
    shape = topology(world)

    def fill(world: Any) -> None:
        for case in cases:
            rank = Rank(world, case, 0, worker.ROWS)
            for number, rows in enumerate(worker.ROWS):  # plans may depend on them
                rank.call(number, rows, USES[0])

    library()  # of the engines
    mk.launch(fill, shape.size, ranks_per_node=shape.ranks_per_node, target="cpu", heap_bytes=worker.HEAP)


@pytest.mark.slow  # test_sequences.py has fewer calls of every op
@pytest.mark.parametrize("world", ["2x2", "4x1"])
def test_fused_operations(machines: Machines, world: str, pytestconfig: pytest.Config) -> None:
    cases, calls = worker.cases(), 20
    compile(world, *(case for some in cases.values() for case in some))
    environment = {"TEST_SEED": str(pytestconfig.getoption("--seed")), "TEST_CALLS": str(calls)}
    outcomes = machines.run(jobs("worker.py", "calls", world, **environment), timeout=540)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        assert line.pop("packets") > 0, "nothing went over the card"
        assert line == {"rank": rank, "shape": world, "calls": dict.fromkeys(cases, calls), "problems": []}, texts(outcomes)


def fails(machines: Machines, scenario: str, world: str, meanwhile: Any = None, **environment: str) -> list[Outcome]:
    """Outcomes of a scenario in which something breaks. Every rank whose machine stays: an error, in time, after calls that went well."""
    compile(world, worker.SMALL)
    outcomes = machines.run(jobs("worker.py", scenario, world, **environment), timeout=280, meanwhile=meanwhile)
    for outcome in outcomes:
        if outcome.code is None:
            continue
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        assert line["error"] is not None and line["good"] >= worker.GOOD, texts(outcomes)
        assert line["seconds"] <= worker.TIMEOUT + 5, texts(outcomes)
        assert line.get("closing", 0) <= 10, texts(outcomes)
    return outcomes


@pytest.mark.parametrize("world", ["2x1", pytest.param("2x2", marks=pytest.mark.slow)])
def test_a_killed_machine(machines: Machines, world: str) -> None:
    def kill(running: Round) -> None:
        wait_until_calls_go_well(running, world)
        running.kill(1)

    outcomes = fails(machines, "fails", world, kill)
    lost = [rank for rank, outcome in enumerate(outcomes) if outcome.machine == 1]
    assert [rank for rank, outcome in enumerate(outcomes) if outcome.code is None] == lost, texts(outcomes)
    for outcome in outcomes[: lost[0]]:
        (line,) = outcome.lines
        assert line["error"] in ("PeerLostError", "TransportError", "TimeoutError"), texts(outcomes)
        assert any(f"rank {rank}" in line["message"] for rank in lost), texts(outcomes)


@pytest.mark.parametrize(
    ("fault", "signal", "statuses"),
    [
        ("rkey:0", "atomic", {"IBV_WC_REM_ACCESS_ERR", "IBV_EVENT_QP_ACCESS_ERR"}),
        ("qp:0", "atomic", {"IBV_WC_WR_FLUSH_ERR", "IBV_WC_RETRY_EXC_ERR", "EINVAL"}),
        ("deaf:1", "imm", {"IBV_WC_RNR_RETRY_EXC_ERR"}),
    ],
)
@pytest.mark.parametrize("engine", ["compiled", pytest.param("python", marks=pytest.mark.slow)])
def test_a_fault_inside_an_engine(machines: Machines, fault: str, signal: str, statuses: set[str], engine: str) -> None:
    faults = {"TEST_FAULT": fault, "PYTHONPATH": str(JOBS / "faults"), "MKERNEL_RC_SIGNAL": signal, "MKERNEL_ENGINE": engine}
    outcomes = fails(machines, "fails", "2x1", **faults)
    for outcome in outcomes:
        (line,) = outcome.lines
        assert line["error"] == "TransportError" and line["status"] in statuses, texts(outcomes)


def test_a_link_that_goes_down_and_up(machines: Machines) -> None:
    def cut(running: Round) -> None:
        wait_until_calls_go_well(running, "2x1")
        running.file(1, "cut").touch()

    for outcome in (outcomes := fails(machines, "link_down", "2x1", cut)):
        (line,) = outcome.lines
        assert line["error"] == "TransportError" and line["second"] == 2, texts(outcomes)
