"""Starting ranks as processes, with every wait bounded and every process reaped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 200.0  # a test's patience: far more than a loaded machine needs
RUN_ID = f"mkernel-test-{secrets.token_hex(8)}"  # in the environment of every process we start
_LAUNCHER_PREFIXES = ("MKERNEL_", "PMI_", "PMIX_", "OMPI_", "SLURM_", "MPI_")
_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclasses.dataclass
class Result:
    code: int
    lines: list[dict[str, Any]]
    errors: str


def free_port() -> int:
    """A port that nobody listens at, below those that the system gives to whoever asks for any.

    One of the latter may be taken before it is used: by any connection that another test opens meanwhile, even by the socket that tries
    to connect to it, which then talks to itself.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 1024 + secrets.randbelow(first_given - 1024)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES) and k not in _TORCHRUN}
    kept.update({k: os.environ[k] for k in ("MKERNEL_CACHE_DIR",) if k in os.environ})
    return {**kept, "TEST_RUN_ID": RUN_ID, **extra}


def start(scenario: str, ranks: int, timeout: float = SECONDS, worker: Path = WORKER, **extra: str) -> list[Result]:
    """Plain processes that meet over TCP. By rank."""
    rendezvous = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), scenario],
            env=clean_environment(MKERNEL_RENDEZVOUS=rendezvous, MKERNEL_RANK=str(rank), MKERNEL_SIZE=str(ranks), **extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            results.append(Result(process.returncode, _parse(out), err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(ValueError):
                    sys.stderr.write(process.communicate()[1])
    return results


def mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun here: install mpich or Open MPI")
    pytest.importorskip("mpi4py")
    return found


def start_mpi(scenario: str, ranks: int, timeout: float = SECONDS, worker: Path = WORKER, **extra: str) -> Result:
    """Ranks under mpirun."""
    command = [mpirun(), "-n", str(ranks)]
    if "Open MPI" in subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout:
        command += ["--allow-run-as-root", "--oversubscribe"]
    done = subprocess.run(
        [*command, sys.executable, str(worker), scenario],
        env=clean_environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, _parse(done.stdout), done.stderr)


def _parse(text: str) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in text.splitlines() if line.startswith("{")), key=lambda fields: fields.get("rank", 0))
