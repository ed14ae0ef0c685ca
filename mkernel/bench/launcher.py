"""Starts the ranks of a benchmark: mpirun where there is one that mpi4py can use, else plain processes that meet over TCP."""

from __future__ import annotations

import contextlib
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
from types import FrameType
from typing import IO

from mkernel.errors import Error

__all__ = ["LauncherError", "launched_size", "run", "under_launcher"]

# What launchers set in the processes they start.
_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MKERNEL_RENDEZVOUS", "TORCHELASTIC_RUN_ID")
_SIZES = ("MKERNEL_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


class LauncherError(Error):
    """Ranks could not be started, or did not end in time."""


def under_launcher() -> bool:
    """Whether this process is one rank of something that was already started."""
    # A Slurm step of one task is an interactive shell more often than a world of one.
    return any(os.environ.get(mark) for mark in _MARKS) or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def launched_size() -> int:
    """How many ranks the launcher of this process started; 0: there is none, or it does not say."""
    return next((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()), 0) if under_launcher() else 0


def run(ranks: int, arguments: Sequence[str], *, timeout: float, kind: str = "auto", output: IO[bytes] | None = None) -> int:
    """``python ARGUMENTS`` on every rank; returns the exit status, the first that is not 0. At the deadline all ranks are killed.

    kind: "mpi", "processes", or "auto" (mpi if it can work). One rank is a plain process. ``output`` takes what the ranks print.
    """
    command = [sys.executable, *arguments]
    variables = dict(os.environ)
    if ranks == 1:
        return _wait([_start(command, variables, output)], timeout)
    mpirun = None if kind == "processes" else _mpirun()
    if mpirun:
        return _wait([_start([*mpirun, "-n", str(ranks), *command], variables, output)], timeout)
    if kind == "mpi":
        raise LauncherError("no mpirun with mpi4py found (remedy: install the extra `demo`, or use --launcher processes)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {**variables, "MKERNEL_RENDEZVOUS": address, "MKERNEL_SIZE": str(ranks)}
    return _wait([_start(command, {**shared, "MKERNEL_RANK": str(rank)}, output) for rank in range(ranks)], timeout)


def _mpirun() -> list[str] | None:
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent  # an MPI from a package lies beside its interpreter
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=os.pathsep.join([str(beside), os.environ.get("PATH", "")]))
        if found is None:
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        return [found, *(["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else [])]
    return None


def _start(command: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    # Its own group, so that all of it can be ended.
    errors = None if output is None else subprocess.STDOUT
    return subprocess.Popen(command, env=dict(variables), stdout=output, stderr=errors, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """The first failure ends the others after a grace time in which they report theirs."""
    deadline, failed_at = time.monotonic() + timeout, None
    # The ranks are in groups of their own: whoever ends this process must not leave them behind.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if failed_at is None and any(process.poll() for process in processes):
                failed_at = now
            if now > deadline:
                raise LauncherError(f"the ranks did not end within {timeout:.0f} s")
            if failed_at is not None and now > failed_at + 20:
                break
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            _end(process)
    return next((abs(process.returncode) for process in processes if process.returncode), 0)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: politely, so that mpirun can end its ranks elsewhere; then whatever is left of it here."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
        os.killpg(process.pid, number)
