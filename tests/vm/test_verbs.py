"""The machines themselves, and what the real pyverbs does in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vm.machines import Job, Machines

pytestmark = pytest.mark.rdma
VERBS = Path(__file__).parent / "jobs/verbs.py"


def test_write_then_fetch_add_between_two_machines() -> None:
    with Machines([[Job(VERBS)], [Job(VERBS)]], timeout=90) as machines:
        outcomes = machines.wait()
    for machine, outcome in enumerate(outcomes):
        assert outcome.code == 0, str(outcome)
        (line,) = outcome.lines
        assert (line["machine"], line["flag"], line["arrived"]) == (machine, 5, True), str(outcome)
        assert not outcome.left, f"left behind: {outcome.left}"
        # Built, and refused by the driver, which has neither: EOPNOTSUPP, not a TypeError of the binding.
        assert {name: line["refusals"][name].split(":")[0] for name in line["refusals"]} == dict.fromkeys(
            ("dmabuf", "srd", "srdex"), "PyverbsRDMAError 95"
        ), str(outcome)


def test_a_machine_that_is_killed_is_seen() -> None:
    script = Path(__file__).parent / "jobs/sleeper.py"
    with Machines([[Job(script)], [Job(script)]], timeout=60) as machines:
        machines.wait_for(1, "started")
        machines.kill(1)
        machines.file(0, "go").touch()
        outcomes = machines.wait()
    assert [outcome.code for outcome in outcomes] == [0, None], "\n".join(map(str, outcomes))
