"""Virtual time of ``mk.launch`` on target cpu, for tests: a rank that is late by seconds costs none."""

from __future__ import annotations

import threading
import time
from typing import Any

_SECONDS = 100.0  # of real time, until something must have gone wrong
_LOOK_SECONDS = 0.05


def sleep(world: Any, seconds: float) -> None:
    """Let so much virtual time pass for this rank on the host, while the other ranks' kernels and engines go on.

    They must launch a call meanwhile. When the world fails, this returns at once.
    """
    thread_ranks = world.failures._poke.__self__
    until, over = thread_ranks.now() + int(seconds * 1e9), threading.Event()

    def step() -> bool:
        if over.is_set() or thread_ranks.now() < until:
            return False
        over.set()
        thread_ranks.release(world.rank)  # kernels wait until this rank's thread has gone on
        return True

    remove = thread_ranks.add_engine(world.rank, step, lambda: None if over.is_set() else until)
    try:
        with thread_ranks.blocked(world.rank, lambda: over.is_set() or world.failure is not None):
            end = time.monotonic() + _SECONDS
            while not over.wait(_LOOK_SECONDS) and world.failure is None:  # without kernels virtual time stands still
                assert time.monotonic() < end, "virtual time did not pass"
    finally:
        remove()
