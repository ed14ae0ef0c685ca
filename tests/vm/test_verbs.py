"""The machines themselves, and what the real pyverbs does in them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.vm.machines import Job, Machines, Round

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]  # the machines end sooner by themselves
VERBS = Path(__file__).parent / "jobs/verbs.py"


def test_write_then_fetch_add_between_two_machines(machines: Machines) -> None:
    outcomes = machines.run([[Job(VERBS)], [Job(VERBS)]])
    for machine, outcome in enumerate(outcomes):
        assert outcome.code == 0, str(outcome)
        (line,) = outcome.lines
        assert (line["machine"], line["flag"], line["arrived"]) == (machine, 5, True), str(outcome)
        assert not outcome.left, f"left behind: {outcome.left}"
        # Built, and refused by the driver, which has neither: EOPNOTSUPP, not a TypeError of the binding.
        assert {name: line["refusals"][name].split(":")[0] for name in line["refusals"]} == dict.fromkeys(
            ("dmabuf", "srd", "srdex"), "PyverbsRDMAError 95"
        ), str(outcome)


def test_a_machine_that_is_killed_is_seen(machines: Machines) -> None:
    def kill(running: Round) -> None:
        running.wait_for(1, "started")
        running.kill(1)
        running.file(0, "go").touch()

    sleeper = Job(Path(__file__).parent / "jobs/sleeper.py")
    outcomes = machines.run([[sleeper], [sleeper]], meanwhile=kill)
    assert [outcome.code for outcome in outcomes] == [0, None], "\n".join(map(str, outcomes))


def test_the_boundary_over_the_real_pyverbs(machines: Machines) -> None:
    (outcome,) = machines.run([[Job(VERBS.with_name("boundary.py"))]])
    assert outcome.code == 0 and not outcome.left, str(outcome)
    (line,) = outcome.lines
    assert line["port"] == ["rxe0", 5, False] and line["gid"] == "10.78.0.1", line
    assert all(line["features"].values()) and line["version"] and line["events"] == [], line
    # All arguments are built, and the driver says that it has no such thing.
    assert line["refused"]["srd"] == ["creating an SRD queue pair", errno.EOPNOTSUPP], line
    assert line["refused"]["dmabuf"][1] == errno.EOPNOTSUPP and "dma-buf" in line["refused"]["dmabuf"][0], line
    assert line["refused"]["device"][0] == "opening mlx5_9", line
    assert line["datagram"] == {
        "sent": [1, 2, 3],
        "sizes": [8, 4, 6],
        "imms": [None, 0x10002, None],
        "sources": [True, True, True],
        "bytes": ["datagram", "gram", "tagram"],
    }, line


def test_doctor_puts_through_the_card(machines: Machines) -> None:
    (outcome,) = machines.run([[Job(VERBS.with_name("doctor.py"))]], timeout=240)
    assert outcome.code == 0 and not outcome.left, str(outcome)
    lines = [line.split() for line in outcome.out.splitlines()]
    assert any(line[:2] == ["ok", "rxe0:1"] and "10.78.0.1" in line for line in lines), str(outcome)
    assert any(line[:3] == ["ok", "rxe0:1", "loopback"] for line in lines), str(outcome)
    assert "Traceback" not in outcome.out + outcome.errors, str(outcome)
