"""Transport rc over real verbs, between machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel.proxy.compiled import library
from tests.transport.contract import CHECKS
from tests.vm.machines import Job, Machines, Outcome

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]  # the machines end sooner by themselves
JOBS = Path(__file__).parent / "jobs"


def run(machines: Machines, job: Job, count: int, timeout: float) -> list[Outcome]:
    """The same job in every machine; all must succeed and leave nothing behind."""
    outcomes = machines.run([[job]] * count, timeout=timeout)
    assert all(outcome.code == 0 and not outcome.left for outcome in outcomes), "\n".join(map(str, outcomes))
    return outcomes


@pytest.mark.parametrize(
    ("count", "signals"),
    [
        (2, "compiled-atomic"),
        *(pytest.param(2, signals, marks=pytest.mark.slow) for signals in ("atomic imm write", "classic-atomic classic-imm")),
        *(pytest.param(2, signals, marks=pytest.mark.slow) for signals in ("compiled-imm compiled-write", "classic-compiled-atomic")),
        *(pytest.param(4, signals, marks=pytest.mark.slow) for signals in ("atomic", "compiled-atomic")),
    ],
)
def test_contract(machines: Machines, count: int, signals: str) -> None:
    library()  # machines find it in the cache
    outcomes = run(machines, Job(JOBS / "contract.py", ("rc", *signals.split())), count, 200)
    expected = [(signal, check) for signal in signals.split() for check in CHECKS]
    assert [(line["signal"], line["check"]) for line in outcomes[0].lines] == expected, str(outcomes[0])


@pytest.mark.parametrize(
    ("count", "small", "large"),
    [(2, 4_000, 15), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 50_000, 150), (4, 2_000, 30)))],
)
def test_pipelined_puts(machines: Machines, count: int, small: int, large: int, pytestconfig: pytest.Config) -> None:
    """10^5 puts of 8 to 256 bytes and 300 of up to 4 MiB, in two directions at once; fewer without --full and between four machines."""
    seed = str(pytestconfig.getoption("--seed"))
    outcomes = run(machines, Job(JOBS / "puts.py", ("rc", str(small), str(large), seed)), count, 280)
    assert [line["puts"] for outcome in outcomes for line in outcome.lines] == [small + large] * count
