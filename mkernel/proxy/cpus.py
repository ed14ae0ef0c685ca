"""Which CPUs an engine runs on, and threads that compile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set as AbstractSet

__all__ = ["choose_cpus", "leave_single_cpu", "number_of_cpus"]


def choose_cpus(near: AbstractSet[int] = frozenset()) -> None:
    """Bind the calling thread to those CPUs ``near`` a card that it may use; to nothing new if it may use none of them.

    A process calls this before it has other threads. A launcher may have bound the rank to a single CPU (Open MPI does for up to two
    ranks). The rank's thread spins there while it waits for the GPU, and an engine beside it would run only every few milliseconds. So such
    a binding is left; the CPUs of the cgroup are not.
    """
    leave_single_cpu()
    allowed = os.sched_getaffinity(0)
    if near & allowed:
        os.sched_setaffinity(0, near & allowed)


def leave_single_cpu() -> None:
    """Let the calling thread, and those that it starts from now on, run on all CPUs if it has been bound to a single one."""
    if len(os.sched_getaffinity(0)) == 1:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


def number_of_cpus() -> int:
    """How many CPUs the calling thread may use, by ``leave_single_cpu`` if need be."""
    allowed = len(os.sched_getaffinity(0))
    return allowed if allowed > 1 else os.cpu_count() or 1
