"""What compiling kernels in a process took: each by itself, and what NVRTC did in the background before the first."""

from __future__ import annotations

import functools
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Compilations", "shown"]


class Compilations:
    """From ``install`` on, notes what is compiled, in any thread: begin and seconds by the clock, and the thread's own seconds.

    Attributes
    ----------
    found
        One dictionary each: ``what``; ``begin`` (of ``time.perf_counter``), ``seconds``; ``running``: seconds that the thread ran;
        ``faults``: pages that it was the first to touch; ``from_disk``: those that had to be read.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Before the first world, whose opening begins to compile."""
        from mkernel.jit import cuda

        cuda._Job.nvrtc = self._noted(cuda._Job.nvrtc, _kernel)  # type: ignore[method-assign]
        cuda.warm_up = self._noted(cuda.warm_up, lambda: "warm_up")
        cuda._compile_nothing = self._noted(cuda._compile_nothing, lambda: "NVRTC's first")

    def _noted(self, function: Callable[..., Any], what: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def note(*arguments: Any, **keywords: Any) -> Any:
            begin, running, before = time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
            try:
                return function(*arguments, **keywords)
            finally:
                after = resource.getrusage(resource.RUSAGE_THREAD)
                one = {"what": what(*arguments[:1]), "begin": begin, "seconds": time.perf_counter() - begin}
                one |= {"running": time.thread_time() - running, "faults": after.ru_minflt - before.ru_minflt}
                with self._lock:
                    self.found.append(one | {"from_disk": after.ru_majflt - before.ru_majflt})

        return note

    def since(self, begin: float) -> list[dict[str, Any]]:
        """Those that ended since the last time, the first to begin first; times since ``begin``."""
        with self._lock:
            found, self.found = self.found, []
        return [one | {"begin": one["begin"] - begin} for one in sorted(found, key=lambda one: one["begin"])]


def _kernel(job: Any) -> str:
    constants = dict(job.spec.constants)
    roles = "".join(str(int(bool(constants.get(f"k{role}")))) for role in ("IntraComm", "InterSend", "InterReduce"))
    return f"{job.spec.name} {constants.get('kBlockN', '')}/{roles}"


def shown(one: dict[str, Any]) -> str:
    """One compilation in words."""
    end, pages = one["begin"] + one["seconds"], f"{one['faults']} faults, {one['from_disk']} from disk"
    return f"{one['what']}: {one['begin']:.2f} to {end:.2f} s, running {one['running']:.2f} s, {pages}"
