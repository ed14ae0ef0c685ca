"""How the ranks of a world find each other. Used inside ``init`` only; afterwards they talk over the control channel."""

from __future__ import annotations

import abc
import contextlib
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from mkernel import errors
from mkernel.errors import AbortedError

__all__ = ["Bootstrap", "SingleBootstrap", "ThreadBootstrap", "ThreadGroup", "host_identity"]


class Bootstrap(abc.ABC):
    """What ``init`` needs: numbers and one collective. A rank that leaves makes the others' ``allgather`` raise."""

    rank: int
    size: int
    mpi: bool = False  # a rank that dies must not leave the others in MPI_Finalize
    process_group: str = ""  # of torch, whose ranks they are: its name
    root_address: str = ""  # on rank 0: where it listens for other hosts, if that was named

    @abc.abstractmethod
    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective, blocking."""

    def shared_secret(self) -> bytes:
        """32 secret bytes that all ranks know, new at each call; secret as long as nobody overhears ``allgather``. Collective."""
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
    """A text that is equal for processes which can meet over abstract sockets: one boot of one host, one network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    return " ".join(parts)
