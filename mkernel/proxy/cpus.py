"""Which CPUs an engine runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set as AbstractSet

__all__ = ["choose_cpus"]


def choose_cpus(near: AbstractSet[int] = frozenset()) -> None:
    """Let the calling thread, or a process that has no other yet, run on the CPUs ``near`` a card, as far as it may; else where it may.

    A launcher may have bound the rank to a single CPU (Open MPI does for up to two ranks). The rank's thread spins there while it waits for
    the GPU, and an engine would get its turn every few milliseconds: so it leaves such a binding, but not the cgroup's CPUs.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            allowed = os.sched_getaffinity(0)
    if near & allowed:
        os.sched_setaffinity(0, near & allowed)
