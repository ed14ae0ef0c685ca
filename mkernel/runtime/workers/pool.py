"""The worker processes of one world, and the thread that looks after them: it starts, relays, interrupts, replaces and ends them.

Everything happens on that thread, which Ctrl-C never interrupts; callers wait for events that it sets.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from mkernel.errors import AbortedError, PeerLostError
from mkernel.runtime.workers import relay
from mkernel.runtime.workers.messages import Kind, Order, Report, Stop
from mkernel.runtime.workers.process import WorkerProcess

__all__ = ["Call", "Pool"]

_log = logging.getLogger("mkernel")

_LEAVE_SECONDS = 5.0  # how long the other ranks' functions may go on after a failure before they are interrupted
_KILL_SECONDS = 10.0  # from the interrupt until the process is killed
_END_SECONDS = 10.0  # for closing the world together and leaving the interpreter
_TICK_SECONDS = 1.0  # how soon the end of a process is noticed whose child still holds its socket
_BACKLOG = 1 << 24  # characters that wait to be printed, before workers have to wait


class Call:
    """One ``mk.launch``, between the caller's thread and the pool's.

    Attributes
    ----------
    shows
        What to do in the caller's thread while it waits: print, log, warn. None: the call is over.
    finished
        Set when every rank has reported or died.
    failures
        By time: the rank, and its report or how its process ended.
    """

    def __init__(self, orders: list[Order], idle_limit: float) -> None:
        self.orders, self.idle_limit = orders, idle_limit
        self.number = orders[0].call
        self.shows: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.finished = threading.Event()
        self.results: dict[int, bytes] = {}
        self.failures: list[tuple[int, Report | BaseException]] = []
        self.error: BaseException | None = None  # the pool's own failure: a process could not be started
        self.text_put = self.text_shown = 0  # characters in ``shows`` so far: counted by the pool's thread, and by the caller's
        # used by the pool's thread alone
        self.parts: dict[int, bytes] = {}  # contributions to the bootstrap's present collective
        self.stop: Stop | None = None
        self.interrupt_at = self.kill_at = float("inf")
        self.fresh_processes = 0
        self.retried = False

    @property
    def waiting_text(self) -> int:
        """Characters that have yet to be printed."""
        return self.text_put - self.text_shown

    @property
    def unopened(self) -> bool:
        """The world could not be opened, on any rank."""
        return bool(self.failures) and all(isinstance(what, Report) and not what.opened for _, what in self.failures)


class Pool:
    """Processes for one kind of world, and their thread; ``key`` says which calls they are for.

    It has a thread and is none: names of its own would meet private ones of ``threading.Thread``, which change between versions of Python.

    Parameters
    ----------
    environment
        Of the processes when they start.
    clock
        Seconds; tests give another one, and call ``wake`` when they have moved it.
    """

    def __init__(self, size: int, key: Any, environment: dict[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = threading.Thread(target=self._run, name="mkernel-workers", daemon=True)
        self.size, self.key = size, key
        self._environment, self._clock = environment, clock
        self._workers: list[WorkerProcess | None] = [None] * size
        self._call: Call | None = None
        self._calls = 0
        self._world_open = False
        self._lock = threading.Lock()
        self._requests: list[Callable[[], None]] = []
        self._ending = False  # no more calls are taken
        self._end_at = float("inf")
        self._idle_limit, self._idle_since = float("inf"), clock()
        self._warnings = relay.WarningLog()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- for other threads
    def start(self) -> None:
        """Start the thread; processes are started by the first call."""
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, or for so long."""
        self._thread.join(seconds)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, orders: Callable[[int], list[Order]], idle_limit: float) -> Call | None:
        """Start a call; ``orders`` of its number gives what to send, by rank. None if the pool is ending."""
        self._calls += 1
        call = Call(orders(self._calls), idle_limit)
        with self._lock:
            if self._ending:
                return None
            self._requests.append(lambda: self._start(call))
        self.wake()
        return call

    def interrupt(self, call: Call, reason: str, raises: str = "KeyboardInterrupt") -> None:
        """Give a call up. It is ``finished`` soon, because a process that does not leave is killed."""
        self._request(lambda: self._interrupt(call, reason, raises))

    def kill(self, call: Call) -> None:
        """Give a call up without waiting: its processes are killed."""
        self._request(lambda: self._kill_busy(call))

    def end(self) -> None:
        """End the processes: politely, or by force where a call is under way. ``join`` waits for it."""
        self._request(self._begin_end)

    def wake(self) -> None:
        """Make the pool's thread look again, now."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def forget(self) -> None:
        """Drop what is the parent's, in a forked child."""
        for worker in self._workers:
            if worker is not None:
                worker.forget()

    def _request(self, what: Callable[[], None]) -> None:
        with self._lock:
            self._requests.append(what)
        self.wake()

    # ---- the thread
    def _run(self) -> None:
        try:
            while not (self._ending and not any(self._workers)):
                self._turn()
        except BaseException as error:
            _log.exception("the thread that looks after mk.launch's worker processes failed")
            self._give_up(error)
        finally:
            with self._lock:
                self._ending = True
                late = self._requests
                self._requests = []
                os.close(self._wake)
                self._wake = -1
            for request in late:  # a call that came too late learns that it was not taken
                request()

    def _turn(self) -> None:
        self._poll()
        with self._lock:
            requests, self._requests = self._requests, []
        for request in requests:
            request()
        for worker in self._living():
            if not worker.alive:
                self._bury(worker)
        self._look_at_clock()

    def _poll(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        listen = self._call is None or self._call.waiting_text < _BACKLOG
        owners = {}
        for worker in self._living():
            for fd, events in worker.files(listen=listen):
                poll.register(fd, events)
                owners[fd] = worker
        for fd, _ in poll.poll(self._poll_seconds() * 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd in owners:
                self._serve(owners[fd], fd)
        for worker in self._living():
            worker.write()

    def _poll_seconds(self) -> float:
        """Seconds to sleep at most."""
        if self._requests:
            return 0.0
        if self._call is not None or self._ending:
            return _TICK_SECONDS if self._call is None or self._call.waiting_text < _BACKLOG else 0.05
        return min(max(self._idle_since + self._idle_limit - self._clock(), 0.0) + 0.001, 1e6)

    def _living(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker is not None]

    def _serve(self, worker: WorkerProcess, fd: int) -> None:
        for lines in worker.lines:
            if lines.fd == fd:
                self._show_text(lines.name, lines.read())
                return
        for kind, body in worker.read():
            self._handle(worker, kind, body)

    def _handle(self, worker: WorkerProcess, kind: Kind, body: Any) -> None:
        if kind == Kind.log:
            self._show(lambda: relay.show_log(body))
        elif kind == Kind.warning:
            self._show(lambda: self._warnings.show(*body))
        elif self._call is None:
            return
        elif kind == Kind.gather:
            self._gather(worker, *body)
        elif kind == Kind.report and worker.busy:
            self._print_rest(worker, last=False)
            self._end_of_rank(worker, body)

    # ---- what workers say
    def _show(self, what: Callable[[], object]) -> None:
        if self._call is not None:
            self._call.shows.put(what)
            return
        try:
            what()
        except Exception:
            _log.debug("what a worker said between calls could not be shown", exc_info=True)

    def _show_text(self, name: str, text: str) -> None:
        if not text:
            return
        call = self._call
        if call is None:
            self._show(lambda: relay.write(name, text))
            return
        call.text_put += len(text)

        def print_it() -> None:
            call.text_shown += len(text)
            relay.write(name, text)

        call.shows.put(print_it)

    def _print_rest(self, worker: WorkerProcess, *, last: bool) -> None:
        """Print what a rank has left in its pipes, also an unfinished ``last`` line: else it would run into another rank's."""
        for lines in worker.lines:
            if lines.fd >= 0:
                self._show_text(lines.name, lines.drain())
                if last:
                    self._show_text(lines.name, lines.rest())

    def _gather(self, worker: WorkerProcess, number: int, data: bytes) -> None:
        call = self._call
        if call is None or number != call.number:
            return
        if call.stop is not None:
            worker.send(Kind.stop_call, call.stop)
            return
        call.parts[worker.rank] = data
        if len(call.parts) == self.size:
            parts = [call.parts[rank] for rank in range(self.size)]
            call.parts.clear()
            for member in self._living():
                member.send(Kind.gathered, (number, parts))

    # ---- a call
    def _start(self, call: Call) -> None:
        if self._ending:
            call.error = AbortedError("mk.shutdown() has ended the worker processes")
            self._finish(call)
            return
        self._call, self._idle_limit = call, call.idle_limit
        for worker in self._living():
            if not worker.alive:
                self._bury(worker)
        try:
            for rank in range(self.size):
                if self._workers[rank] is None:
                    self._workers[rank] = WorkerProcess(rank, self._environment)
                    call.fresh_processes += 1
        except Exception as error:
            call.error = error
            self._finish(call)
            return
        fresh_world = call.fresh_processes > 0 or not self._world_open
        self._world_open = False  # until all have reported
        for worker, order in zip(self._living(), call.orders, strict=True):
            worker.busy = True
            worker.send(Kind.order, dataclasses.replace(order, fresh_world=fresh_world))
            worker.write()

    def _end_of_rank(self, worker: WorkerProcess, what: Report | BaseException) -> None:
        """Note that a rank has reported, or that its process has ended."""
        call = self._call
        worker.busy = False
        if call is None:
            return
        if isinstance(what, Report) and what.result is not None:
            call.results[worker.rank] = what.result
        else:
            call.failures.append((worker.rank, what))
            if not (isinstance(what, Report) and what.usable):
                text = what.summary if isinstance(what, Report) else str(what)
                self._stop_call(call, Stop(call.number, f"rank {worker.rank} failed: {text}", worker.rank), _LEAVE_SECONDS)
        if not any(member.busy for member in self._living()):
            self._over(call)

    def _stop_call(self, call: Call, stop: Stop, seconds: float) -> None:
        """Tell the ranks that a call is given up: first with the reason, later with an interrupt."""
        if call.stop is not None and not stop.raises:
            return
        call.stop = stop
        for member in self._living():
            member.send(Kind.stop_call, stop)
            member.write()
        if stop.raises:
            call.interrupt_at, call.kill_at = float("inf"), self._clock() + _KILL_SECONDS
        else:
            call.interrupt_at = self._clock() + seconds

    def _interrupt(self, call: Call, reason: str, raises: str) -> None:
        if self._call is call and not call.finished.is_set():
            self._stop_call(call, Stop(call.number, reason, -1, raises), 0.0)

    def _kill_busy(self, call: Call) -> None:
        if self._call is not call:
            return
        for worker in self._living():
            if worker.busy:
                worker.kill()
                reason = call.stop.reason if call.stop is not None else "the caller gave up"
                self._bury(worker, AbortedError(f"rank {worker.rank} did not leave the call ({reason}): its process was killed"))

    def _over(self, call: Call) -> None:
        if call.unopened and not call.retried and call.fresh_processes < self.size and (call.stop is None or call.stop.origin >= 0):
            # An earlier call may have left these processes unfit: with a failed GPU context, or memory that could not be freed.
            call.retried = True
            call.failures.clear()
            call.parts.clear()
            call.stop, call.interrupt_at, call.kill_at = None, float("inf"), float("inf")
            for worker in self._living():
                worker.kill()
                self._bury(worker)
            self._start(call)
            return
        reports_usable = all(isinstance(what, Report) and what.usable for _, what in call.failures)
        self._world_open = reports_usable and call.stop is None and len(self._living()) == self.size
        self._finish(call)

    def _finish(self, call: Call) -> None:
        for worker in self._living():
            self._print_rest(worker, last=True)
        self._call = None
        self._idle_since = self._clock()
        call.finished.set()
        call.shows.put(None)

    def _bury(self, worker: WorkerProcess, why: BaseException | None = None) -> None:
        """Free the place of a process that has ended, or shall; its last messages still count."""
        if self._workers[worker.rank] is not worker:
            return
        self._workers[worker.rank] = None
        self._world_open = False
        for kind, body in worker.rest():
            self._handle(worker, kind, body)
        how = worker.reap()
        self._print_rest(worker, last=True)
        worker.forget()
        if self._ending:
            return
        text = f"the process of rank {worker.rank} (process {worker.pid}) {how}"
        if worker.busy:
            self._end_of_rank(worker, why or PeerLostError(f"{text} inside mk.launch", worker.rank))
        elif self._call is None:
            _log.warning("%s between two calls of mk.launch; the next one starts another", text)

    # ---- time, and the end
    def _look_at_clock(self) -> None:
        now, call = self._clock(), self._call
        if call is not None:
            if now >= call.interrupt_at and call.stop is not None:
                self._stop_call(call, dataclasses.replace(call.stop, raises="AbortedError"), 0.0)
            if now >= call.kill_at:
                call.kill_at = float("inf")
                self._kill_busy(call)
        elif now >= self._idle_since + self._idle_limit:
            self._begin_end(idle=True)
        if now >= self._end_at:
            for worker in self._living():
                worker.kill()
                self._bury(worker)

    def _begin_end(self, *, idle: bool = False) -> None:
        with self._lock:
            if self._ending or (idle and self._requests):  # a call has just come
                return
            self._ending = True
        if self._call is not None:
            self._give_up(AbortedError("mk.shutdown() has ended the worker processes"))
        self._end_at = self._clock() + _END_SECONDS
        for worker in self._living():
            worker.send(Kind.end, None)
            worker.write()

    def _give_up(self, error: BaseException) -> None:
        """Kill all processes, and let the caller know."""
        with self._lock:
            self._ending = True
        workers, self._workers = self._living(), [None] * self.size
        try:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.reap()
                worker.forget()
        finally:
            if self._call is not None:
                self._call.error = error
                self._finish(self._call)
