"""Starts helper processes of mkernel (engines, ranks of ``mk.launch`` on GPUs), which never outlive the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkernel.errors import Error

__all__ = ["die_with", "how_it_ended", "scrubbed_environment", "spawn", "without_launcher"]

# MPI, PMI and batch systems know their processes by these variables. A child that inherited them might be taken for a rank.
_LAUNCHER_PREFIXES = (
    *("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "MPI_", "MPIR_", "MPICH_", "MV2_", "I_MPI_", "HYDRA_", "HYDI_"),
    *("SLURM_", "FLUX_", "PALS_", "JSM_", "ALPS_", "TORCHELASTIC_"),
)
_MEETING = ("MKERNEL_RENDEZVOUS", "MKERNEL_RANK", "MKERNEL_SIZE", "MKERNEL_SECRET", "MKERNEL_LISTEN")
_LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *_MEETING}


class _Spawner:
    """Starts processes on a thread that lives as long as this process.

    The kernel kills a child that called ``die_with`` when the *thread* that started it ends.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mkernel-spawner", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            order, answer = self._orders.get()
            try:
                answer.put((order(), None))
            except BaseException as error:
                answer.put((None, error))

    def do(self, order: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put((order, answer))
        result, error = answer.get()
        if error is not None:
            raise error
        return result


_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def spawn(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    fds: Collection[int],
    *,
    own_session: bool = False,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments`` with this process's interpreter. The child is expected to call ``die_with``.

    Parameters
    ----------
    environment
        All environment variables of the child.
    fds
        Descriptors that the child inherits; -1 counts as none.
    own_session
        Whether signals for this process's group, such as Ctrl-C in a terminal, are kept from the child.
    stdout, stderr
        Descriptors for the child's output; None: this process's own.

    Raises
    ------
    Error
        This program does not name a Python interpreter.
    OSError
        The interpreter could not be started.
    """
    global _spawner
    if not sys.executable:
        raise Error(f"{module} runs in a process of its own, which needs a Python interpreter, and this program does not name one")
    with _spawner_lock:
        if _spawner is None or not _spawner.is_alive() or _spawner.pid != os.getpid():  # a forked child has no threads
            _spawner = _Spawner()
        spawner = _spawner
    command = [sys.executable, "-P", "-m", module, *arguments]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=sorted(set(fds) - {-1}),
            env=dict(environment),
            start_new_session=own_session,
        )

    process: subprocess.Popen[bytes] = spawner.do(start)
    return process


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables by which a process might be taken for a rank of a job that is already running."""
    return {name: value for name, value in environment.items() if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES}


def scrubbed_environment(environment: Mapping[str, str], *, gpus: bool) -> dict[str, str]:
    """``environment`` for a helper process: without launchers' variables, with this process's path for modules, with GPUs or without."""
    kept = without_launcher(environment)
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([package, *(entry for entry in sys.path if entry)]))
    if not gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def die_with(parent: int) -> None:
    """Let the kernel kill this helper process when the process ``parent`` ends. Raises EOFError if it has ended already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise EOFError


def how_it_ended(code: int) -> str:
    """An exit status of ``subprocess`` in words, e.g. ``was killed by signal 9 (SIGKILL)`` or ``ended with code 1``."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"was killed by signal {-code} ({name})"
