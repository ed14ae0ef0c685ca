"""The control channel: host collectives, failures, lost peers. This file has the interface, and the channel of ranks that are threads."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mkernel.runtime.failure import Failure, Kind

__all__ = ["POSITION_BITS", "Collector", "Control", "Failed", "Listener", "LocalControl", "LocalHub", "Request", "Waiting", "not_told"]

POSITION_BITS = 32  # of a rank's position: the calls since its last CallError; above them, how many it has raised

# A context around every host wait, made from a function that tells whether the wait is over: target cpu runs kernels meanwhile.
Waiting = Callable[[Callable[[], bool]], contextlib.AbstractContextManager[object]]


def not_told(over: Callable[[], bool]) -> contextlib.AbstractContextManager[object]:
    """The context where nobody needs to know that the host waits."""
    return contextlib.nullcontext()


class Failed(Exception):  # noqa: N818
    """A collective did not complete. Never leaves the runtime: the world turns it into the user's exception."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One rank's arrival at a collective."""

    rank: int
    sequence: int  # number of this collective of the rank, from 1
    call: int  # the rank's position (mkernel.runtime.call_errors): calls that it has launched so far
    key: str  # must be the same on all ranks
    what: str  # the same, for messages
    data: bytes = b""
    last: str = ""  # the last call of the rank, for messages

    def __str__(self) -> str:
        return f"rank {self.rank} asked for {self.what} after {self.call & ((1 << POSITION_BITS) - 1)} calls"


class Listener(Protocol):
    """The world, as its control channel sees it. Called on any thread; must not call back into a collective."""

    def on_failure(self, failure: Failure) -> None:
        """Another rank failed or has gone."""

    def on_pending(self, requests: Sequence[Request]) -> Failure | None:
        """These ranks wait in a collective. A failure in return says that this rank will never come to it, and ends the world."""


class Collector:
    """Gathers the arrivals at one collective after the other. Not thread-safe; lives on rank 0, or in the hub of a process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived: dict[int, Request] = {}
        self.departed: set[int] = set()
        self.broken: Failure | None = None  # once the ranks disagreed nothing can complete any more

    def arrive(self, request: Request) -> list[bytes] | Failure | None:
        """Everybody's data when this was the last; a failure when the ranks disagree or one has left; else None."""
        first = next(iter(self.arrived.values()), request)
        self.arrived[request.rank] = request
        if self.broken is None and (first.key, first.sequence) != (request.key, request.sequence):
            fewest = min(r.call for r in self.arrived.values())  # whoever launched more calls may have come to another question for that
            told = (f"{r}, the last of them {r.last}" if r.call > fewest else str(r) for _, r in sorted(self.arrived.items()))
            self.broken = Failure(Kind.mismatch, f"the ranks disagree: {'; '.join(told)}", request.rank)
        if self.broken is not None:
            return self.broken
        if self.departed:
            return self._left()
        if len(self.arrived) < self.size:
            return None
        result = [self.arrived[rank].data for rank in range(self.size)]
        self.arrived.clear()
        return result

    def depart(self, rank: int) -> Failure | None:
        """A rank has closed its world. A failure when others wait for it."""
        self.departed.add(rank)
        return self._left() if self.arrived and rank not in self.arrived else None

    def _left(self) -> Failure:
        gone = ", ".join(map(str, sorted(self.departed)))
        waiting = "; ".join(str(r) for _, r in sorted(self.arrived.items()))
        return Failure(Kind.aborted, f"rank {gone} has closed its world; {waiting}", min(self.departed))


class Control(abc.ABC):
    """The channel of one rank. One collective at a time; ``abort`` and ``close`` from any thread.

    Attributes
    ----------
    started
        Collectives this rank has begun.
    failure
        What ended the world, as far as this rank knows.
    """

    def __init__(self, rank: int, size: int, waiting: Waiting = not_told) -> None:
        self.rank, self.size = rank, size
        self.started = 0
        self.failure: Failure | None = None
        self._waiting = waiting
        self._listener: Listener | None = None

    @abc.abstractmethod
    def start(self, listener: Listener) -> None:
        """From now on report failures. Before this only ``exchange_fds`` and ``close`` may be used."""

    @abc.abstractmethod
    def collective(self, key: str, what: str, *, call: int, timeout: float, data: bytes = b"", last: str = "") -> list[bytes]:
        """Every rank's data, by rank, once all have come with the same ``key``. Collective, sleeps.

        Raises
        ------
        Failed
            The ranks disagree, one has gone or given up, or ``timeout`` seconds passed.
        """

    @abc.abstractmethod
    def abort(self, failure: Failure) -> None:
        """Tell all ranks that the world has failed. Does not wait for them, never raises."""

    @abc.abstractmethod
    def exchange_fds(self, fds: Sequence[int], timeout: float) -> contextlib.AbstractContextManager[dict[int, list[int]]]:
        """The descriptors of every rank of this host, by rank; valid inside the block. Collective."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave, telling the others that it is on purpose. Safe to call twice."""

    def _timed_out(self, what: str, timeout: float, arrived: Sequence[int]) -> Failure:
        missing = sorted(set(range(self.size)) - {self.rank, *arrived})
        who = f"rank {', '.join(map(str, missing))}" if missing else "an answer"
        return Failure(Kind.timeout, f"rank {self.rank} waited {timeout:.1f} s in {what} for {who}", self.rank)


class LocalHub:
    """What the ranks of one process share."""

    def __init__(self, size: int, release: Callable[[int], None] | None = None) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.collector = Collector(size)
        self.results: dict[int, list[bytes]] = {}  # rank -> result not yet taken
        self.members: dict[int, LocalControl] = {}
        self.fds: dict[int, list[int]] = {}
        self.left_exchange = 0
        self.release = release  # called with each rank whose wait may have ended, before it wakes

    def broadcast(self, failure: Failure, source: int | None) -> None:
        """Tell every member of a failure. Called under the condition."""
        for member in list(self.members.values()):
            member._learn(failure, tell=member.rank != source)
        self.wake(self.members)

    def wake(self, ranks: Sequence[int] | dict[int, LocalControl]) -> None:
        if self.release is not None:
            for rank in ranks:
                self.release(rank)
        self.condition.notify_all()


class LocalControl(Control):
    """Ranks are threads of this process: one lock instead of sockets."""

    def __init__(self, hub: LocalHub, rank: int, waiting: Waiting = not_told) -> None:
        super().__init__(rank, hub.size, waiting)
        self._hub = hub
        self._left = False
        with hub.condition:
            hub.members[rank] = self

    def start(self, listener: Listener) -> None:
        with self._hub.condition:
            self._listener = listener
            if self.failure is not None:
                listener.on_failure(self.failure)

    def collective(self, key: str, what: str, *, call: int, timeout: float, data: bytes = b"", last: str = "") -> list[bytes]:
        hub = self._hub
        with hub.condition:
            if self.failure is not None:
                raise Failed(self.failure)
            self.started += 1
            outcome = hub.collector.arrive(Request(self.rank, self.started, call, key, what, data, last))
            if isinstance(outcome, list):
                hub.results.update((rank, outcome) for rank in range(hub.size))
                hub.wake([rank for rank in range(hub.size) if rank != self.rank])
                return hub.results.pop(self.rank)
            if outcome is None:
                outcome = self._ask_others()
            if outcome is not None:
                hub.broadcast(outcome, None)
                raise Failed(outcome)
        deadline = time.monotonic() + timeout
        with self._waiting(self._over), hub.condition:
            hub.condition.wait_for(self._over, max(deadline - time.monotonic(), 0.0))
        with hub.condition:
            if self.rank in hub.results:
                return hub.results.pop(self.rank)
            failure = self.failure
            if failure is None:
                failure = self._timed_out(what, timeout, list(hub.collector.arrived))
                hub.broadcast(failure, None)
            raise Failed(failure)

    def _over(self) -> bool:
        return self.rank in self._hub.results or self.failure is not None

    def _ask_others(self) -> Failure | None:
        pending = list(self._hub.collector.arrived.values())
        for member in list(self._hub.members.values()):
            if member.rank not in self._hub.collector.arrived and member._listener is not None:
                failure = member._listener.on_pending(pending)
                if failure is not None:
                    return failure
        return None

    def _learn(self, failure: Failure, *, tell: bool) -> None:
        if not failure.replaces(self.failure):
            return
        self.failure = failure = failure.joined(self.failure)
        if tell and self._listener is not None:
            self._listener.on_failure(failure)

    def abort(self, failure: Failure) -> None:
        with self._hub.condition:
            self._hub.broadcast(failure, self.rank)

    @contextlib.contextmanager
    def exchange_fds(self, fds: Sequence[int], timeout: float) -> Iterator[dict[int, list[int]]]:
        hub = self._hub
        with hub.condition:
            hub.fds[self.rank] = list(fds)
            hub.condition.notify_all()
        self._meet(lambda: len(hub.fds) == hub.size, timeout)
        yield dict(hub.fds)
        # The descriptors are the other ranks' own: nobody may go on, and close them, before all have mapped them.
        with hub.condition:
            hub.left_exchange += 1
            hub.condition.notify_all()
        self._meet(lambda: hub.left_exchange == hub.size, timeout)

    def _meet(self, reached: Callable[[], bool], timeout: float) -> None:
        with self._hub.condition:
            self._hub.condition.wait_for(lambda: reached() or self.failure is not None, timeout)
            if self.failure is not None:
                raise Failed(self.failure)
            if not reached():
                raise Failed(self._timed_out("init", timeout, list(self._hub.fds)))

    def close(self) -> None:
        with self._hub.condition:
            if self._left:
                return
            self._left = True
            self._hub.members.pop(self.rank, None)
            failure = self._hub.collector.depart(self.rank)
            if failure is not None:
                self._hub.broadcast(failure, self.rank)
