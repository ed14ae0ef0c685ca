"""The engine: turns the commands of one rank's ring into puts, and completions into credits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from mkernel.errors import TransportError
from mkernel.proxy.cpus import choose_cpus
from mkernel.proxy.pace import GRAPH_SPIN_NS, Pace
from mkernel.proxy.ring import RingReader
from mkernel.transport.base import Put, Transport

__all__ = ["BATCH", "Engine", "EngineThread", "as_transport_error", "pace_of"]

_log = logging.getLogger("mkernel")

BATCH = 64  # commands per step: enough to amortize a doorbell, few enough to poll completions often


class Engine:
    """One rank's engine. Not thread-safe: one thread steps it.

    Parameters
    ----------
    ring
        The ring from which commands come and to which credits go.
    transport
        Carries the puts. Closed with the engine.
    clock_ns
        The clock that ``transport`` was given, real or virtual.
    """

    def __init__(self, ring: RingReader, transport: Transport, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.ring = ring
        self.transport = transport
        self.clock_ns = clock_ns
        self.error: TransportError | None = None
        self._held: dict[int, deque[Put]] = {}  # by destination: taken from the ring and not yet accepted by the transport, in order
        self._arrived = transport.arrived
        self._closed = False

    def step(self) -> bool:
        """Take commands, post, flush, poll and return credits, once. Never blocks. Returns whether anything moved, arrivals included.

        A put that the transport refuses is held, and with it all later puts to its destination; puts to other ranks go on.

        Raises
        ------
        TransportError
            Something failed. The engine stays failed: every later call raises the same error, and no credits are returned.
        """
        if self.error is not None:
            raise self.error
        if self._closed:
            return False
        put: Put | None = None
        try:
            transport = self.transport
            posted = self._post_held() if self._held else 0
            for put in self.ring.take(BATCH):
                if put.dst_rank in self._held:
                    self._held[put.dst_rank].append(put)
                elif transport.post(put):
                    posted += 1
                else:
                    self._held[put.dst_rank] = deque((put,))
            put = None
            if posted:
                transport.flush()
            done = transport.poll()
            if done:
                self.ring.complete_all(done)
            arrived, self._arrived = self._arrived, transport.arrived
        except Exception as error:
            self._fail(error, put)
        return bool(posted or done or arrived != self._arrived)

    def _fail(self, error: Exception, put: Put | None) -> NoReturn:
        """Stay failed, and raise the error as a TransportError."""
        self.error = self.error or as_transport_error(error, put)
        if self.error is error:
            raise error
        raise self.error from error

    def spin(self, pace: Pace, moved: bool, limit_ns: int) -> int:
        """Step until it may nap, or ``limit_ns`` nanoseconds are over; returns how long it may nap. Raises as ``step`` does.

        ``moved``: something has happened that no step sees, such as a launch.
        """
        began = time.monotonic_ns()
        while True:
            nap = pace.nap(self.step() or moved)
            moved = False
            if nap or time.monotonic_ns() - began >= limit_ns:
                return nap
            os.sched_yield()

    def _post_held(self) -> int:
        """Offer what the transport has refused again; returns how many puts it took."""
        posted = 0
        for rank, queue in list(self._held.items()):
            try:
                while queue and self.transport.post(queue[0]):
                    queue.popleft()
                    posted += 1
            except Exception as error:
                self.error = as_transport_error(error, queue[0])
                raise
            if not queue:
                del self._held[rank]
        return posted

    def next_event_ns(self) -> int | None:
        """When ``step`` may next do something, on ``clock_ns``. 0: now. None: not before the device issues another command."""
        if self.error is not None or self._closed:
            return None
        if self.ring.waiting():
            return 0
        return self.transport.next_event_ns()

    def close(self) -> None:
        """Close the transport and drop the ring. Puts in flight are abandoned. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._held.clear()
            self.transport.close()
            self.ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def pace_of(ring: RingReader, spin_ns: int, *, follows: bool, graph_spin_ns: int = GRAPH_SPIN_NS) -> Pace:
    """The pace of the engine of that ring. ``follows``: it stays awake while calls are under way."""
    return Pace((lambda: ring.launching) if follows else None, lambda: ring.captured, spin_ns, graph_spin_ns)


class EngineThread:
    """Runs an engine on a daemon thread beside the rank's own.

    It spins as its ``Pace`` says, and yields the processor at every turn. Else it sleeps until the next event that the transport knows of,
    at most as long as the pace says. ``wake`` ends the sleep: call it before each launch.

    Parameters
    ----------
    engine
        The engine. Only this thread steps it; ``close`` closes it.
    on_error
        Called once, on the engine's thread, with the error that stopped the engine.
    pace
        When it sleeps.
    """

    def __init__(
        self,
        engine: Engine,
        on_error: Callable[[TransportError], object],
        *,
        name: str = "mkernel-engine",
        pace: Pace | None = None,
    ) -> None:
        self.engine = engine
        self._on_error = on_error
        self._pace = pace or Pace()
        self._stop = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> EngineThread:
        """Start the thread; returns self."""
        self._thread.start()
        return self

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Spin again: commands are about to come."""
        self._wake.set()

    def close(self, timeout: float = 10.0) -> None:
        """Stop the thread and close the engine. Safe to call twice, and from ``on_error``."""
        self._stop = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                # Closing now would unmap memory that the thread still uses. A leak is the lesser evil.
                _log.error("%s did not stop within %g s: its memory is left to the end of the process", self._thread.name, timeout)
                return
        self.engine.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        try:
            choose_cpus()
            self._loop()
        except TransportError as error:
            _log.error("engine stopped: %s", error)
            self._on_error(error)
        except BaseException as error:  # whatever it is: kernels would wait for an engine that ended in silence
            _log.exception("%s failed", self._thread.name)
            self._on_error(as_transport_error(error, None))

    def _loop(self) -> None:
        engine, wake, pace = self.engine, self._wake, self._pace
        while not self._stop:
            moved = engine.step()
            if wake.is_set():
                wake.clear()
                moved = True
            nap = pace.nap(moved)
            if nap and (event := engine.next_event_ns()) is not None:
                nap = min(nap, event - engine.clock_ns())
            if nap > 0:
                wake.wait(nap * 1e-9)
            else:
                os.sched_yield()  # time.sleep(0) would take 80 us


def as_transport_error(error: BaseException, put: Put | None) -> TransportError:
    """What an engine reports when anything fails, at a put or at no particular one."""
    if isinstance(error, TransportError):
        return error
    peer = None if put is None else put.dst_rank
    where = "completions" if put is None else f"put {put.ticket} to rank {peer}"
    return TransportError(
        f"the engine failed at {where}: {type(error).__name__}: {error}",
        peer=peer,
        op="poll" if put is None else "put_signal",
        status=type(error).__name__,
    )
