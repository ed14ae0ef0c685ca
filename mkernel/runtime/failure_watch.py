"""How a rank learns that its world has failed: from its own kernels, from peers, from the engine, or from the program itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mkernel import abi
from mkernel.runtime import ending
from mkernel.runtime.failure import Failure, Kind, read_host_block

if TYPE_CHECKING:
    from mkernel.runtime.backend import HostMemory
    from mkernel.runtime.options import Options
    from mkernel.runtime.plan import Plan
    from mkernel.runtime.ranks.control import Control, Request, Waiting

__all__ = ["FailureWatch", "Watched"]

_log = logging.getLogger("mkernel")

_POLL_SECONDS = 0.02  # between two looks of the watchdog
_EXPLANATION_SECONDS = 2.0  # how long a rank that was asked to leave waits to hear why


class Watched(Protocol):
    """What the watch needs of its world."""

    failure: Failure | None  # what ended the world; the watch sets it
    attention: bool  # something must be looked at before the next launch; the watch sets it

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def over_mpi(self) -> bool: ...
    @property
    def options(self) -> Options: ...
    @property
    def position(self) -> int:
        """How far this rank is, comparable with ``Request.call``."""

    def title_of(self, position: int) -> str: ...
    def plan_of(self, problem: int, rows: int, schedule: int) -> Plan | None: ...
    def put_destination(self, ticket: int) -> int | None: ...
    def let_go(self) -> None:
        """Let go of memory that was kept for launches which have ended."""

    def abort(self, reason: str) -> None:
        """Give the world up, unless it is closed."""


class FailureWatch:
    """Decides what ended a world: keeps the failure that says most, tells the other ranks, and raises it.

    Methods may be called from any thread. It is the ``Listener`` of the world's control channel.

    Attributes
    ----------
    state
        ``HostBlock.state`` and ``reported`` of this rank's kernels: ``state[0]`` is one load without a system call, 0 while all is well.
    surfaced
        Whether the program has seen the failure.
    """

    def __init__(self, world: Watched, block: HostMemory, control: Control, waiting: Waiting, poke: Callable[[], None] | None) -> None:
        self._world, self._control, self._waiting, self._poke = world, control, waiting, poke
        self._memory = block
        self._block = abi.HostBlock.from_address(block.host_address)
        self.state = block.view.cast("B").cast("Q")
        self.surfaced = False
        self._report: Failure | None = None  # of this rank's kernel
        self._pending: list[Request] = []  # other ranks that wait for an agreement
        self._explained, self._news = threading.Event(), threading.Event()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="mkernel-watchdog", daemon=True)

    # ---- what others tell (any thread)
    def on_failure(self, failure: Failure) -> None:
        """The control channel tells that another rank failed or has gone."""
        self.fail(failure, relay=False)

    def on_pending(self, requests: Sequence[Request]) -> Failure | None:
        """The control channel tells who waits in a collective; the answer is a mismatch if this rank will never come to it."""
        with self._lock:
            self._pending = [request for request in requests if request.rank != self._world.rank]
            self._world.attention = True
            return self._passed_by()

    def on_transport_error(self, error: Exception) -> None:
        """The engine tells that it has stopped."""
        details = {name: getattr(error, name, None) for name in ("peer", "op", "status", "queue_pair", "remedy")}
        rank = self._world.rank if details["peer"] is None else details["peer"]
        self.fail(Failure(Kind.transport, str(error), rank, details=details))

    def told(self, failure: Failure) -> None:
        """Whoever started the ranks gives the world up, and tells all of them: nothing is logged."""
        self.fail(failure, relay=False)
        self._control.abort(failure)

    # ---- failing
    def fail(self, failure: Failure, *, relay: bool = True) -> None:
        """End the world by this failure, unless a known one says more. ``relay``: the other ranks are told."""
        world = self._world
        with self._lock:
            if not failure.replaces(world.failure):
                return
            known, failure = world.failure, failure.joined(world.failure)
            world.failure = failure
            world.attention = True
            self._block.abort = 1
            if not failure.derived:
                self._explained.set()
            self._news.set()
        if world.over_mpi:
            seconds = world.options.entry_timeout + world.options.timeout
            ending.note_failure(peer_lost=failure.kind == Kind.lost, seconds=seconds)
        if not failure.derived:
            # The failure is logged once per job, where it happened; a rank that has gone cannot log it itself.
            level = logging.ERROR if relay or failure.kind == Kind.lost or failure.rank == world.rank else logging.INFO
            if known is None or known.derived or known.kind != failure.kind:
                _log.log(level, "rank %d: the world of %d ranks has failed: %s", world.rank, world.size, failure.message)
            if relay:
                self._control.abort(failure)
        if self._poke is not None:
            self._poke()

    def look(self) -> None:
        """Notice a failure that a kernel of this rank has reported."""
        if not self.state[0]:
            return
        world = self._world
        if self._report is None:
            timeout_ns, entry_timeout_ns = (int(seconds * 1e9) for seconds in (world.options.timeout, world.options.entry_timeout))
            self._report = read_host_block(
                self._block,
                timeout_ns=timeout_ns,
                entry_timeout_ns=entry_timeout_ns,
                plan_of=world.plan_of,
                destination_of=world.put_destination,
            )
        report, known = self._report, world.failure
        if report is None:
            return
        if known is None or known.derived:
            self.fail(report)
        known = world.failure
        if known is not None and known.kind == Kind.mismatch and known.record is not None:
            self.fail(known.answered(report))

    def check(self) -> None:
        """Raise what has failed, if anything has. A rank that only heard an echo of the failure waits a little for the reason."""
        self.look()
        failure = self._world.failure
        if failure is None:
            return
        if failure.derived:
            with self._waiting(self._explained.is_set):
                self._explained.wait(_EXPLANATION_SECONDS)
            failure = self._world.failure or failure
        if failure.kind == Kind.mismatch and failure.record is not None:
            failure = self._hear_all(failure)
        self.surfaced = True
        raise failure.error()

    def settle(self) -> bool:
        """Before a launch: whether it may go on, as far as other ranks' agreements are concerned; if not, the world has failed."""
        with self._lock:
            failure = self._passed_by()
            if failure is None:
                self._pending = [request for request in self._pending if request.sequence > self._control.started]
                self._world.attention = bool(self._pending)
        if failure is not None:
            self.fail(failure)
        return failure is None

    def _passed_by(self) -> Failure | None:
        """A mismatch, if this rank has launched a call before which others still wait for it in a collective."""
        world = self._world
        for request in self._pending:
            if request.sequence > self._control.started and world.position > request.call:
                mine = world.title_of(request.call)
                return Failure(Kind.mismatch, f"the ranks disagree: {request}, but rank {world.rank} has launched {mine} next", world.rank)
        return None

    def _hear_all(self, mismatch: Failure) -> Failure:
        """What all ranks say that they asked for, as far as they say it soon."""
        self.look()
        end = time.monotonic() + _EXPLANATION_SECONDS
        while len(mismatch.asked) < self._world.size and (left := end - time.monotonic()) > 0:
            with self._waiting(self._news.is_set):
                self._news.wait(left)
            self._news.clear()
            mismatch = self._world.failure or mismatch
        return mismatch

    # ---- the watchdog
    def start(self) -> None:
        """Look again and again from now on, on a thread of its own: where launches return before their kernels have ended."""
        self._watchdog.start()

    def stop(self) -> None:
        """End the watchdog."""
        self._stop.set()
        if self._watchdog.ident is not None:
            self._watchdog.join()

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_POLL_SECONDS):
                self.look()
                known = self._world.failure
                if known is not None and not known.derived and (known.kind != Kind.mismatch or self._report is not None):
                    return
                self._world.let_go()
        except BaseException as error:  # of any kind: else nobody would notice what kernels report
            _log.exception("rank %d: the watchdog failed", self._world.rank)
            self._world.abort(f"its watchdog failed: {type(error).__name__}: {error}")

    # ---- the end
    def disown(self) -> None:
        """In a forked child: another thread, which is not here, may have held the lock."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Let go of the memory that kernels report in, before it is freed."""
        self.state.release()
        self._block = abi.HostBlock()  # the memory behind it goes
        self._memory.view.release()
