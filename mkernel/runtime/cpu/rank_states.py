"""What the threads of ranks are doing: kernels go on only while none of them is in Python."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["WAKING_SECONDS", "RankStates"]

WAKING_SECONDS = 1.0  # how long a rank whose wait has ended may take to wake up


def _yes() -> bool:
    return True


class RankStates:
    """Whether each rank's thread is running (in Python), waking up, waiting on the host, inside a launch, or finished.

    All under ``_condition``, which is notified of every change.
    """

    def __init__(self, ranks: int) -> None:
        self._condition = threading.Condition()
        self._state = ["running"] * ranks
        self._over: list[Callable[[], bool]] = [_yes] * ranks  # whether what a rank waits for has come
        self._waking_since = [0.0] * ranks

    @contextlib.contextmanager
    def blocked(self, rank: int, over: Callable[[], bool]) -> Iterator[None]:
        """A context around every host wait of a rank's thread: the other ranks' kernels go on meanwhile.

        ``over``: whether what it waits for has come; asked from any thread, under no lock. Who makes it true calls ``release`` after that.
        """
        with self._condition:
            self._over[rank] = over
            self._set(rank, "waking" if over() else "waiting")
        try:
            yield
        finally:
            with self._condition:
                self._set(rank, "running")

    def release(self, rank: int) -> None:
        """Tell that a rank's host wait may have ended. Kernels then wait until its thread has woken up."""
        with self._condition:
            if self._state[rank] == "waiting" and self._over[rank]():
                self._set(rank, "waking")

    def finish(self, rank: int) -> None:
        """Tell that the rank's thread has ended."""
        with self._condition:
            self._set(rank, "finished")

    def _set(self, rank: int, state: str) -> None:
        self._state[rank] = state
        if state == "waking":
            self._waking_since[rank] = time.monotonic()
        self._condition.notify_all()

    def _quiet(self) -> bool:
        """Whether no rank's thread is in Python."""
        late = time.monotonic() - WAKING_SECONDS
        ranks = zip(self._state, self._waking_since, strict=True)
        return not any(state == "running" or (state == "waking" and since > late) for state, since in ranks)
