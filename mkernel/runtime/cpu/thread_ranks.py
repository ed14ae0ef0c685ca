"""The ranks of ``mk.launch`` on target cpu: one scheduler and one thread run the kernels and engines of all of them in virtual time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from mkernel import env
from mkernel.errors import Error
from mkernel.runtime.cpu.engines import Engines
from mkernel.runtime.cpu.memory import SharedSegments
from mkernel.runtime.cpu.rank_states import WAKING_SECONDS, RankStates
from mkernel.runtime.cpu.scheduler import BLOCKED, LAUNCH_DONE, TURNS, CpuKernel, Scheduler

__all__ = ["ThreadRanks"]

_log = logging.getLogger("mkernel")

_NEVER = 2**64 - 1
_EVERY_CTA = 2**32 - 1  # mkcpu::kEveryCta
_TURNS_BETWEEN_STEPS = 4096  # between two steps of the engines
_IMPATIENT_SECONDS = 5.0  # a rank that stays in Python this long no longer holds up the others


class _Launch:
    """A launch that a rank's thread waits for."""

    def __init__(self, rank: int, kernel: CpuKernel, grid: int, parameters: bytes, late: Sequence[tuple[int, int, int]]) -> None:
        self.rank, self.kernel, self.grid, self.parameters, self.late = rank, kernel, grid, parameters, late
        self.native = 0
        self.result: Error | bool = False
        self.beside: list[_Launch] = [self]  # the launches that the rank waits for together, this one included


class ThreadRanks(RankStates):
    """The ranks of one ``mk.launch``: their kernels and engines run on one thread, in virtual time, in an order that the seed decides.

    A rank's own thread is running (in Python), inside a launch, waiting on the host (``blocked``), or finished. Kernels go on only while
    no rank is running, so that what they see of each other does not depend on the host's timing.

    Parameters
    ----------
    ranks
        Number of ranks, all of them running at first.
    seed
        Of the interleaving (default: ``MKERNEL_CPU_SEED``).

    Attributes
    ----------
    report
        Who waited for what when nothing could move any more; empty as long as that never happened.
    """

    def __init__(self, ranks: int, seed: int | None = None) -> None:
        super().__init__(ranks)
        self.report = ""
        self._scheduler = Scheduler(env.CPU_SEED.get() if seed is None else seed, virtual_time=True)
        self._late: dict[int, list[tuple[int, int, int]]] = {}  # by rank, of its next launch: CTA, copies, turns
        self._pending: list[_Launch] = []
        self._active: list[_Launch] = []
        self._engines = Engines(self._scheduler)
        self._poked = False
        self._noisy_since: float | None = None  # kernels have been waiting for a rank's thread since
        self.segments = SharedSegments()  # of all ranks
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken = ""  # why nothing can run any more

    # ---- for rank threads
    def launch(
        self, rank: int, kernel: CpuKernel, grid: int, parameters: bytes, beside: Sequence[tuple[CpuKernel, int, bytes]] = ()
    ) -> None:
        """Run a kernel as this rank; returns when it has ended. Raises Error when the emulator found a fault.

        ``beside``: kernels that run beside it, which end by themselves: kernel, grid, parameters of each.
        """
        launch = _Launch(rank, kernel, grid, parameters, self._late.pop(rank, ()))
        launch.beside += (_Launch(rank, *other, ()) for other in beside)
        with self._condition:
            if self._closing:
                raise Error("the ranks of this mk.launch are closed")
            if self._broken:
                raise Error(self._broken)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mkernel-cpu", daemon=True)
                self._thread.start()
            for one in launch.beside:
                one.beside = launch.beside
            self._pending += launch.beside
            self._set(rank, "launched")
            try:
                self._condition.wait_for(lambda: all(one.result is not False for one in launch.beside))
            finally:
                self._set(rank, "running")
        for one in launch.beside:
            if isinstance(one.result, Error):
                raise one.result

    def hold(self, rank: int, turns: int, after: int = 0, cta: int | None = None) -> None:
        """The rank's next kernel, or one CTA of it, rests for so many turns, and with it the copies that it has issued.

        Where nobody else can go on, the hold that has least left ends: whoever is held longest falls behind all others.
        A CTA does whenever it has issued ``after`` asynchronous copies, in the midst of what it reads and writes; with 0 once, at its
        beginning. It is lateness that the seed repeats, where a sleeping thread would depend on the host's clock.
        """
        self._late.setdefault(rank, []).append((_EVERY_CTA if cta is None else cta, after, turns))

    # ---- for engines
    def add_engine(
        self,
        rank: int,
        step: Callable[[], bool],
        next_event_ns: Callable[[], int | None],
        on_error: Callable[[Exception], object] | None = None,
    ) -> Callable[[], None]:
        """Step an engine on the scheduler's thread, in virtual time (``now``). A step that raises is the last; ``on_error`` hears of it.

        Returns what removes the engine again; after that no step of it is running.
        """
        return self._engines.add(rank, step, next_event_ns, on_error or (lambda error: self._engine_failed(rank, error)))

    def _engine_failed(self, rank: int, error: Exception) -> None:
        self._fail_all(Error(f"the engine of rank {rank} failed: {error}"))

    def now(self) -> int:
        """Virtual time, ns."""
        value: int = self._scheduler.library.now(self._scheduler.handle) if self._scheduler.handle else 0
        return value

    # ---- for everybody
    def poke(self) -> None:
        """Make every thread of a kernel that waits for a system flag look again: an abort was written."""
        if self._scheduler.handle:
            self._scheduler.library.poke(self._scheduler.handle)

    def name(self, address: int, size: int, name: str) -> None:
        """Give memory a name for reports; a size of 0 takes it away."""
        with self._condition:
            if self._scheduler.handle:
                self._scheduler.library.name(self._scheduler.handle, address, size, name.encode())

    @property
    def turns(self) -> int:
        """Thread switches so far."""
        value: int = self._scheduler.library.turns(self._scheduler.handle)
        return value

    @property
    def trace(self) -> int:
        """Hash of the interleaving so far: equal for equal runs."""
        value: int = self._scheduler.library.trace(self._scheduler.handle)
        return value

    def close(self) -> None:
        """Stop everything. Launches under way raise. Safe to call twice."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the scheduler's thread
    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._slice()
        except BaseException as error:  # of any kind: ranks wait for this thread
            _log.exception("target cpu's scheduler failed")
            with self._condition:
                self._broken = f"target cpu's scheduler failed: {type(error).__name__}: {error}"
                launches, self._pending, self._active = [*self._pending, *self._active], [], []
                for launch in launches:
                    self._end(launch, Error(self._broken))

    def _wait_for_work(self) -> bool:
        """Wait until there is a kernel to run and no rank's thread is in Python, or one was for too long. False: all is being closed."""
        with self._condition:
            while not self._closing:
                if not self._pending and not self._active:
                    self._noisy_since = None
                    self._condition.wait()
                elif self._quiet():
                    self._noisy_since = None
                    break
                else:
                    if self._noisy_since is None:
                        self._noisy_since = time.monotonic()
                    left = self._noisy_since + _IMPATIENT_SECONDS - time.monotonic()
                    if left <= 0:
                        break
                    self._condition.wait(min(left, WAKING_SECONDS))
            if self._closing:
                self._stop()
                return False
            self._submit()
            return True

    def _submit(self) -> None:
        pending, self._pending = sorted(self._pending, key=lambda launch: launch.rank), []
        for launch in pending:
            if launch.result is not False:  # one beside it could not be started
                continue
            try:
                launch.native = self._scheduler.start(launch.kernel, launch.grid, launch.parameters, launch.rank)
            except Error as error:
                self._end(launch, error)
            else:
                for late in launch.late:
                    self._scheduler.library.hold(self._scheduler.handle, launch.native, *late)
                self._active.append(launch)

    def _end(self, launch: _Launch, result: Error | bool) -> None:
        launch.result = result
        if isinstance(result, Error):  # those beside it would wait for it
            for other in launch.beside:
                if other in self._active and other is not launch:
                    self._active.remove(other)
                    self._scheduler.library.forget(self._scheduler.handle, other.native)
                other.result = other.result or True
        if all(one.result is not False for one in launch.beside):
            self._set(launch.rank, "running")

    def _stop(self) -> None:
        for launch in (*self._pending, *self._active):
            if launch.native:
                self._scheduler.library.forget(self._scheduler.handle, launch.native)
            self._end(launch, Error("the ranks of this mk.launch were closed while a kernel was running"))
        self._pending, self._active = [], []

    def _slice(self) -> None:
        """Run the engines once, then the kernels for a while."""
        library, handle = self._scheduler.library, self._scheduler.handle
        moved, event = self._engines.step()
        until = _NEVER if not event else max(event, library.now(handle) + 1)
        stop = library.run(handle, _TURNS_BETWEEN_STEPS if self._engines else TURNS, until)
        if stop == LAUNCH_DONE:
            with self._condition:
                for launch in list(self._active):
                    result = launch.result or self._scheduler.result(launch.native)  # one beside it may have failed
                    if result is not False and launch in self._active:
                        self._active.remove(launch)
                        self._end(launch, result)
        elif stop == BLOCKED and not moved:
            self._advance()

    def _advance(self) -> None:
        """Let time pass until somebody can go on: every thread of every kernel waits for something outside."""
        library, handle = self._scheduler.library, self._scheduler.handle
        moved, event = self._engines.step()
        if not self._poked:  # an abort may have been written
            self._poked = True
            library.poke(handle)
            return
        if moved:
            return
        self._poked = False
        now, deadline, timer = library.now(handle), library.next_deadline(handle), library.next_timer(handle)
        if event is not None:
            event = max(event, now + 1000)
        if timer != _NEVER:
            event = timer if event is None else min(event, timer)
        if event is not None:
            if event < deadline or not library.end_hold(handle):  # time does not pass beyond a deadline while a CTA is held
                library.advance_to(handle, min(event, deadline))
            return
        with self._condition:
            if not self._quiet():  # a rank has been in Python for long: virtual time follows the real one
                begin = time.monotonic_ns()
                self._condition.wait(0.01)
                library.advance_to(handle, min(now + time.monotonic_ns() - begin, deadline))
                return
            if self._pending:
                return
        if library.end_hold(handle):
            return
        with self._condition:  # other threads give names to memory
            report = f"deadlock at {now} ns: nothing can run, and nothing is under way\n{self._scheduler.report()}"
            self.report = self.report or report
        if deadline == _NEVER:
            self._fail_all(Error(f"target cpu: {report}"))
        else:
            library.advance_to(handle, deadline)

    def _fail_all(self, error: Error) -> None:
        with self._condition:
            while self._active:
                launch = self._active.pop(0)
                self._scheduler.library.forget(self._scheduler.handle, launch.native)
                self._end(launch, Error(str(error)))
