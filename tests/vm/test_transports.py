"""Transport rc over real verbs, between machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transport.contract import CHECKS
from tests.vm.machines import Job, Machines, Outcome

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]  # the machines end sooner by themselves
JOBS = Path(__file__).parent / "jobs"


def run(job: Job, machines: int, timeout: float) -> list[Outcome]:
    """The same job in every machine; all must succeed and leave nothing behind."""
    with Machines([[job]] * machines, timeout=timeout) as booted:
        outcomes = booted.wait()
    assert all(outcome.code == 0 and not outcome.left for outcome in outcomes), "\n".join(map(str, outcomes))
    return outcomes


@pytest.mark.parametrize(
    ("machines", "signal"),
    [(2, "atomic"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "imm"), (2, "write"), (4, "atomic")))],
)
def test_contract(machines: int, signal: str) -> None:
    outcomes = run(Job(JOBS / "contract.py", ("rc",), {"MKERNEL_RC_SIGNAL": signal}), machines, 200)
    assert [line["check"] for line in outcomes[0].lines] == list(CHECKS), str(outcomes[0])


@pytest.mark.parametrize(("machines", "small", "large"), [(2, 50_000, 150), pytest.param(4, 2_000, 30, marks=pytest.mark.slow)])
def test_pipelined_puts(machines: int, small: int, large: int, pytestconfig: pytest.Config) -> None:
    """10^5 puts of 8 to 256 bytes and 300 of up to 4 MiB, in two directions at once; in a ring of four machines fewer."""
    seed = str(pytestconfig.getoption("--seed"))
    outcomes = run(Job(JOBS / "puts.py", ("rc", str(small), str(large), seed)), machines, 280)
    assert [line["puts"] for outcome in outcomes for line in outcome.lines] == [small + large] * machines
