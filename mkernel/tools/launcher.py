"""Starts the ranks of a command on this machine: through mpirun where mpi4py can use one, else as plain processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from mkernel import env
from mkernel.errors import Error
from mkernel.proxy.spawn import without_launcher
from mkernel.runtime.ranks import rendezvous
from mkernel.runtime.ranks.choice import launcher_size, under_mpi

__all__ = ["LauncherError", "TimeLimitError", "find_mpirun", "is_rank", "launched_size", "mpi_flavour", "run"]

_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")
GRACE_SECONDS = 10.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LauncherError(Error):
    """Ranks could not be started, or did not end in time."""


class TimeLimitError(LauncherError):
    """Ranks did not end in time."""


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank, by the same variables that ``mk.init`` reads."""
    # torchrun may start one rank. A Slurm step of one task is an interactive shell more often than a world of one.
    return env.RENDEZVOUS.is_set() or under_mpi() or rendezvous.offered() or bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def launched_size() -> int:
    """Number of ranks that the launcher of this process started; 0 if there is none."""
    if not is_rank():
        return 0
    if under_mpi() and not env.RENDEZVOUS.is_set() and launcher_size() > 1:
        return launcher_size()
    meeting = rendezvous.read_environment()
    return meeting.size if meeting else 1


def find_mpirun() -> Path | None:
    """The mpirun beside this interpreter (an MPI from a package, the one mpi4py then finds), else the first on PATH."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = next(filter(None, (shutil.which(name, path=folders) for name in _NAMES)), None)
    return Path(found) if found else None


def mpi_flavour(mpirun: Path) -> str:
    """``openmpi``, or ``mpich`` for all whose command line is Hydra's (Intel MPI, MVAPICH)."""
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return "openmpi" if any(name in answer.stdout + answer.stderr for name in ("Open MPI", "OpenRTE")) else "mpich"


def run(
    ranks: int,
    arguments: Sequence[str],
    *,
    timeout: float,
    kind: str = "auto",
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run ``python ARGUMENTS`` on every rank; returns the first exit status that is not 0, else 0. No process outlives the call.

    Parameters
    ----------
    ranks, arguments
        Number of processes, and their arguments. One rank is a plain process without launcher variables.
    timeout
        Seconds after which all ranks are killed.
    kind
        ``"mpi"``, ``"processes"`` or ``"auto"``: MPI if there is one.
    environment
        Variables added to this process's.
    output
        Takes what the ranks print (default: this process's own output).
    grace
        Seconds that the other ranks have after the first has failed, to say what they saw.

    Raises
    ------
    LauncherError
        There is no mpirun with mpi4py and ``kind`` is ``"mpi"``.
    TimeLimitError
        The ranks ran past ``timeout``.
    """
    command = [sys.executable, *arguments]
    variables = {**os.environ, **(environment or {})}
    if ranks == 1:
        return _supervise([(command, {**without_launcher(os.environ), **(environment or {})})], output, timeout, grace)
    mpirun = None if kind == "processes" or importlib.util.find_spec("mpi4py") is None else find_mpirun()
    if mpirun is not None:
        return _supervise([([*_mpirun_line(mpirun, ranks), *command], variables)], output, timeout, grace)
    if kind == "mpi":
        raise LauncherError("no mpirun with mpi4py found (pip install 'mkernel[demo]' brings both)")
    with _reserved_port() as port:
        variables = {**without_launcher(os.environ), **(environment or {})}
        variables |= {"MKERNEL_RENDEZVOUS": f"127.0.0.1:{port}", "MKERNEL_SIZE": str(ranks), "MKERNEL_SECRET": secrets.token_hex(32)}
        return _supervise([(command, {**variables, "MKERNEL_RANK": str(rank)}) for rank in range(ranks)], output, timeout, grace)


def _mpirun_line(mpirun: Path, ranks: int) -> list[str]:
    line = [str(mpirun), "-n", str(ranks)]
    if mpi_flavour(mpirun) == "openmpi":
        # Open MPI counts cores and refuses root, which does not matter here, and binds a rank to one core, where its threads would queue.
        line += ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return line


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port number that no other launcher takes meanwhile. Ranks of one host meet at a Unix socket of that name, not at the port."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _start(command: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    errors = None if output is None else subprocess.STDOUT
    # A session of its own, so that mpirun and the ranks under it can be ended together.
    return subprocess.Popen(command, env=dict(variables), stdout=output, stderr=errors, start_new_session=True)


def _supervise(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], output: IO[bytes] | None, timeout: float, grace: float) -> int:
    """Start processes, of commands and their variables, and wait for all of them.

    The first failure ends the others, after ``grace`` seconds in which they report theirs; so does a signal that ends this process.
    """
    deadline, failed_at = time.monotonic() + timeout, None
    processes: list[subprocess.Popen[bytes]] = []
    with _caught_signals() as caught:
        try:
            processes.extend(_start(command, variables, output) for command, variables in commands)
            while any(process.poll() is None for process in processes):
                now = time.monotonic()
                if caught:
                    raise SystemExit(128 + caught[0])
                if now > deadline:
                    raise TimeLimitError(f"the ranks did not end within {timeout:.0f} s")
                if failed_at is None and any(process.poll() for process in processes):
                    failed_at = now
                if failed_at is not None and now > failed_at + grace:
                    break
                time.sleep(0.05)
            return next((abs(process.returncode) for process in processes if process.returncode), 0)
        finally:
            for process in processes:  # all of them before any is waited for: else the others report that it has gone
                if process.poll() is None:
                    _signal(process, signal.SIGTERM)
            for process in processes:
                _end(process)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The signals that came meanwhile and would have ended this process: the ranks have sessions of their own, and must be ended first.

    They are caught before the first rank is started, and raise nothing: it would be raised in the middle of starting a rank.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield caught
        return
    # An ignored signal (nohup) stays ignored; None is a handler that is not Python's.
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has got SIGTERM, so that mpirun could end its ranks, and its session: later, or when interrupted, by SIGKILL."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, number)
