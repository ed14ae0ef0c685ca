"""Whole programs that meet without MPI: what torchrun, Slurm and people set, with a secret where one is needed, without one elsewhere."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from mkernel.runtime.ranks import addresses
from tests.runtime.processes import WORKER, clean_environment, free_port

SIZE = 3
SECRET = "of tests alone, 32 characters long"


def torchrun(rank: int, port: int) -> dict[str, object]:
    """As of one node: the address is this host's name, whatever that resolves to."""
    names = {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": SIZE, "TORCHELASTIC_RUN_ID": "x"}
    return {**names, "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": port}


def slurm(rank: int, port: int) -> dict[str, object]:
    names = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": SIZE, "SLURM_NTASKS": SIZE, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_ID": 0}
    return {**names, "SLURM_JOB_ID": port, "SLURM_STEP_NODELIST": "gpu03", "SLURM_LOCALID": rank}


def by_hand(rank: int, port: int) -> dict[str, object]:
    return {"MKERNEL_RANK": rank, "MKERNEL_SIZE": SIZE, "MKERNEL_RENDEZVOUS": f"localhost:{port}"}


def over_the_network(rank: int, port: int) -> dict[str, object]:
    return {**by_hand(rank, port), "MKERNEL_RENDEZVOUS": f"{addresses.own_addresses()[0]}:{port}", "MKERNEL_SECRET": SECRET}


def start(variables: list[dict[str, object]]) -> list[subprocess.CompletedProcess[str]]:
    command = [sys.executable, str(WORKER), "ok"]
    processes = [
        subprocess.Popen(
            command,
            env=clean_environment(**{name: str(value) for name, value in of_rank.items()}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for of_rank in variables
    ]
    try:
        told = [process.communicate(timeout=150.0) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [subprocess.CompletedProcess(command, p.returncode, out, err) for p, (out, err) in zip(processes, told, strict=True)]


@pytest.mark.parametrize("launcher", [torchrun, slurm, by_hand, over_the_network])
@pytest.mark.drawn(1)
def test_ranks_meet(launcher: object) -> None:
    port = free_port()
    for done in start([launcher(rank, port) for rank in range(SIZE)]):  # type: ignore[operator]
        assert (done.returncode, done.stderr) == (0, ""), done
        assert '"size": 3' in done.stdout


def test_several_hosts_without_a_secret() -> None:
    """Every rank says at once what to do; nobody waits."""
    port = free_port()
    for done in start([{**over_the_network(rank, port), "MKERNEL_SECRET": ""} for rank in range(SIZE)]):
        assert done.returncode == 1
        assert "ArgumentError: MKERNEL_SECRET = unset" in done.stderr
        assert "export MKERNEL_SECRET=$(python -c" in done.stderr
