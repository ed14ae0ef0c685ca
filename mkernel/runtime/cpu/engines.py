"""The engines of thread ranks, which take their steps between those of the kernels, on the same thread."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from mkernel.runtime.cpu.scheduler import Scheduler

__all__ = ["Engines"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Engine:
    rank: int
    step: Callable[[], bool]
    next_event_ns: Callable[[], int | None]
    on_error: Callable[[Exception], object]


class Engines:
    """A list of engines, stepped in the order of their ranks. Methods may be called from any thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._engines: list[_Engine] = []
        self._lock = threading.RLock()  # an engine's failure may remove it

    def __len__(self) -> int:
        return len(self._engines)

    def add(
        self, rank: int, step: Callable[[], bool], next_event_ns: Callable[[], int | None], on_error: Callable[[Exception], object]
    ) -> Callable[[], None]:
        """Add an engine. A step that raises is its last; ``on_error`` hears of it.

        Returns what removes the engine again; after that no step of it is running.
        """
        engine = _Engine(rank, step, next_event_ns, on_error)
        with self._lock:
            self._engines.append(engine)
            self._engines.sort(key=lambda e: e.rank)
        return lambda: self._remove(engine)

    def _remove(self, engine: _Engine) -> None:
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)

    def step(self) -> tuple[bool, int | None]:
        """Let every engine take a step; whether any moved, and the time of the earliest event."""
        moved, first = False, None
        with self._lock:
            if not self._engines:
                return False, None
            self._scheduler.library.engine_acquire(self._scheduler.handle)
            for engine in list(self._engines):
                try:
                    moved = engine.step() or moved
                    event = engine.next_event_ns()
                except Exception as error:
                    self._remove(engine)
                    engine.on_error(error)
                    moved = True
                    continue
                if event is not None and (first is None or event < first):
                    first = event
        return moved, first
