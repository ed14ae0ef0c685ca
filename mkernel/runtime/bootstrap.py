"""How the ranks of a world find each other. Used inside ``init`` only; afterwards they talk over the control channel."""

from __future__ import annotations

import abc
import contextlib
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from mkernel import env, errors
from mkernel.errors import AbortedError, ArgumentError, Error

__all__ = ["Bootstrap", "SingleBootstrap", "ThreadBootstrap", "ThreadGroup", "choose", "host_identity", "launcher_size", "under_launcher"]

# Variables that MPI launchers set for each process (Open MPI, MPICH and Intel MPI through PMI, PMIx servers).
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LAUNCHER_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PMI_FD")


class Bootstrap(abc.ABC):
    """What ``init`` needs: numbers and one collective. A rank that leaves makes the others' ``allgather`` raise."""

    rank: int
    size: int
    mpi: bool = False  # dying must not leave the others in MPI_Finalize
    root_address: str = ""  # on rank 0: where it listens for other hosts, if that was named

    @abc.abstractmethod
    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective, blocking."""

    def shared_secret(self) -> bytes:
        """32 bytes that the ranks know and nobody else, as long as nobody overhears ``allgather``; other ones at each call. Collective."""
        return self.allgather(secrets.token_bytes(32) if self.rank == 0 else b"")[0]

    @abc.abstractmethod
    def close(self) -> None: ...


class SingleBootstrap(Bootstrap):
    """A world of one."""

    rank, size = 0, 1

    def allgather(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self) -> None:
        pass


class ThreadGroup:
    """What the threads of one ``mk.launch`` share while they start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.shared: dict[str, Any] = {}  # objects of this process that the ranks use together (control hub)
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = {}  # number of the allgather -> contributions
        self._taken: dict[int, int] = {}
        self._reason = ""

    def bootstrap(self, rank: int) -> ThreadBootstrap:
        return ThreadBootstrap(self, rank)

    def once(self, name: str, build: Any) -> Any:
        """The object of this name, built by whoever asks first."""
        with self._condition:
            if name not in self.shared:
                self.shared[name] = build()
            return self.shared[name]

    def abort(self, reason: str) -> None:
        """Release every thread that waits in ``allgather``, now and later."""
        with self._condition:
            self._reason = self._reason or reason
            self._condition.notify_all()

    def exchange(self, rank: int, number: int, data: bytes, timeout: float) -> list[bytes]:
        """The ``number``-th allgather of every rank. One that all have come to is completed even after an abort."""
        with self._condition:
            parts = self._rounds.setdefault(number, {})
            parts[rank] = data
            self._condition.notify_all()
            self._condition.wait_for(lambda: len(parts) == self.size or self._reason, timeout)
            if len(parts) < self.size:
                if self._reason:
                    raise AbortedError(self._reason)
                raise errors.TimeoutError(f"rank {rank} waited {timeout:g} s in init for the other ranks of mk.launch")
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                del self._rounds[number], self._taken[number]
            return [parts[peer] for peer in range(self.size)]


class ThreadBootstrap(Bootstrap):
    """Ranks are threads of this process."""

    def __init__(self, group: ThreadGroup, rank: int, timeout: float = 600.0) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._timeout = timeout
        self._number = 0

    def allgather(self, data: bytes) -> list[bytes]:
        self._number += 1
        return self.group.exchange(self.rank, self._number, data, self._timeout)

    def close(self) -> None:
        pass


def host_identity() -> str:
    """Equal for processes that can meet over abstract sockets: the same boot of the same host, in one network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    return " ".join(parts)


def launcher_size() -> int:
    """Number of ranks that an MPI launcher says there are; 1 without a launcher."""
    for name in _LAUNCHER_SIZES:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 1:
            return int(text)
    return 1


def under_launcher() -> bool:
    """Whether an MPI launcher started this process."""
    return any(os.environ.get(name) for name in (*_LAUNCHER_MARKS, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


def choose(comm: Any = None) -> Bootstrap:
    """The way in that the caller, or else the environment, asks for.

    An explicit communicator; else ``MKERNEL_RENDEZVOUS``; else an MPI launcher; else torchrun's or Slurm's variables; else a world of one.

    Raises
    ------
    ArgumentError
        ``comm`` is no communicator, or the variables are incomplete.
    Error
        A launcher started several ranks, but MPI sees one.
    """
    from mkernel.runtime import rendezvous

    if comm is not None:
        if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "allgather")):
            raise ArgumentError("comm", comm, "must be an mpi4py communicator", "omit it to use COMM_WORLD")
        return _mpi(comm)
    if env.RENDEZVOUS.get():
        return rendezvous.from_environment()
    if under_launcher():
        return _mpi(None)
    if rendezvous.offered():
        return rendezvous.from_environment()
    if (env.SIZE.get() or 1) > 1:
        raise ArgumentError("MKERNEL_SIZE", env.SIZE.get(), "says nothing without MKERNEL_RENDEZVOUS", "set both, and MKERNEL_RANK")
    return SingleBootstrap()


def _mpi(comm: Any) -> Bootstrap:
    try:
        from mkernel.runtime import mpi

        bootstrap = mpi.MpiBootstrap(comm)
    except ImportError as error:
        if launcher_size() == 1:
            return SingleBootstrap()
        raise Error(
            f"an MPI launcher started {launcher_size()} ranks, but mpi4py cannot be imported ({error}): install mpi4py, or set "
            "MKERNEL_RENDEZVOUS=host:port, MKERNEL_RANK and MKERNEL_SIZE"
        ) from error
    expected = launcher_size()
    if expected > 1 and bootstrap.size == 1 and mpi.world_size() == 1:
        raise Error(
            f"the launcher started {expected} ranks, but MPI sees one: mpi4py uses another MPI ({mpi.library()}) than the launcher. "
            "Start with the mpirun of that MPI, or rebuild mpi4py against the launcher's"
        )
    return bootstrap
