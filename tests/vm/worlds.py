"""Worlds whose nodes are machines: the jobs of their ranks, and what they tell."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.ops.body import topology
from tests.vm.machines import Job, Outcome, Round

__all__ = ["JOBS", "jobs", "texts", "wait_until_calls_go_well"]

JOBS = Path(__file__).parent / "jobs"
SECRET = secrets.token_hex(32)


def jobs(script: str, scenario: str, world: str, **environment: str) -> list[list[Job]]:
    """A rank's job is ``python <script> <scenario>``. Compiling is an error there."""
    shape = topology(world)
    common = {"MKERNEL_RENDEZVOUS": "10.77.0.1:5555", "MKERNEL_SIZE": str(shape.size), "MKERNEL_NO_COMPILE": "1"}
    common |= {"MKERNEL_SECRET": SECRET, "MKERNEL_ENGINE": "compiled", **environment}
    ranks = [Job(JOBS / script, (scenario,), {**common, "MKERNEL_RANK": str(rank)}) for rank in range(shape.size)]
    return [ranks[node * shape.ranks_per_node : (node + 1) * shape.ranks_per_node] for node in range(shape.num_nodes)]


def texts(outcomes: list[Outcome]) -> str:
    return "\n".join(map(str, outcomes))


def wait_until_calls_go_well(running: Round, world: str) -> None:
    """On all ranks: what happens next may not be seen before."""
    shape = topology(world)
    for rank in range(shape.size):
        running.wait_for(rank // shape.ranks_per_node, f"going{rank}")
