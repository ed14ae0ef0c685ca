"""Starts the ranks of a command on this machine: through mpirun where there is one, else as plain processes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["find_mpirun", "mpi_flavour", "run_ranks"]

_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")


def find_mpirun() -> Path | None:
    """The mpirun beside this interpreter (the one its mpi4py was installed with), else the first on PATH."""
    beside = [Path(sys.executable).with_name(name) for name in _NAMES]
    found = next((str(path) for path in beside if os.access(path, os.X_OK)), None) or next(filter(None, map(shutil.which, _NAMES)), None)
    return Path(found) if found else None


def mpi_flavour(mpirun: Path) -> str:
    """``mpich`` (also Intel MPI and others that use Hydra) or ``openmpi``."""
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return "openmpi" if "open mpi" in (answer.stdout + answer.stderr).lower().replace("-", " ").replace("openrte", "open mpi") else "mpich"


def _mpirun_line(mpirun: Path, ranks: int) -> list[str]:
    line = [str(mpirun), "-n", str(ranks)]
    if mpi_flavour(mpirun) == "openmpi":
        # Open MPI counts cores and refuses root; neither matters for ranks that mostly wait.
        line += ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
    return line


def run_ranks(arguments: Sequence[str], ranks: int, environment: Mapping[str, str], timeout: float) -> int:
    """Run ``python -m mkernel arguments`` in ``ranks`` processes; the exit status, 124 when they ran past ``timeout`` seconds."""
    command = [sys.executable, "-m", "mkernel", *arguments]
    env = {**os.environ, **environment}
    mpirun = find_mpirun()
    if mpirun is not None and importlib.util.find_spec("mpi4py") is not None:
        return _wait([subprocess.Popen([*_mpirun_line(mpirun, ranks), *command], env=env, start_new_session=True)], timeout)
    print("no mpirun or no mpi4py here: the ranks meet over TCP (MKERNEL_RENDEZVOUS)", flush=True)
    env |= {"MKERNEL_RENDEZVOUS": f"127.0.0.1:{_free_port()}", "MKERNEL_SIZE": str(ranks)}
    by_rank = [{**env, "MKERNEL_RANK": str(rank)} for rank in range(ranks)]
    return _wait([subprocess.Popen(command, env=e, start_new_session=True) for e in by_rank], timeout)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """First failure ends the others; nothing that was started here survives this function."""
    deadline = time.monotonic() + timeout
    try:
        while True:
            states = [process.poll() for process in processes]
            failed = next((state for state in states if state), None)
            if failed is not None:
                return failed
            if None not in states:
                return 0
            if time.monotonic() > deadline:
                return 124
            time.sleep(0.05)
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for signum, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, signum)  # its own session: mpirun and the ranks under it
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
