"""Target cpu's scheduler: the native library (kernels_src/cpu) that emulates CTAs, and the kernels that it runs."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkernel.errors import ArgumentError, CompileError, Error
from mkernel.jit import cpu as compiler
from mkernel.jit.spec import KernelSpec
from mkernel.runtime.backend import Kernel

__all__ = ["BLOCKED", "LAUNCH_DONE", "TURNS", "CpuKernel", "Scheduler", "SchedulerLibrary", "scheduler_library"]

_BUDGET, LAUNCH_DONE, BLOCKED = 1, 2, 3  # mkcpu::Stop
_RUNNING, _SUCCEEDED = 0, 1  # mkcpu::Finished
TURNS = 1 << 22  # at most, between two looks at what goes on in Python


class SchedulerLibrary:
    """The scheduler library's functions (kernels_src/cpu/interface.h). Every call releases the GIL."""

    def __init__(self) -> None:
        # Global: kernels find the scheduler's functions there.
        _, library = compiler.open_library(compiler.core_library, ctypes.RTLD_GLOBAL)
        u64, u32, i32, p, text = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p
        self.create = self._function(library, "create", p, u64, ctypes.c_bool)
        self.destroy = self._function(library, "destroy", None, p)
        self.launch = self._function(
            library, "launch", u64, p, p, text, ctypes.c_size_t, u32, u32, u32, u32, ctypes.c_bool, ctypes.c_bool, u32
        )
        self.hold = self._function(library, "hold", None, p, u64, u32, u32, u64)
        self.end_hold = self._function(library, "end_hold", ctypes.c_bool, p)
        self.run = self._function(library, "run", i32, p, u64, u64)
        self.finished = self._function(library, "finished", i32, p, u64)
        self.cancel = self._function(library, "cancel", None, p, u64)
        self.forget = self._function(library, "forget", None, p, u64)
        self.error = self._function(library, "error", ctypes.c_size_t, p, u64, p, ctypes.c_size_t)
        self.report = self._function(library, "report", ctypes.c_size_t, p, p, ctypes.c_size_t)
        self.now = self._function(library, "now", u64, p)
        self.advance_to = self._function(library, "advance_to", None, p, u64)
        self.next_deadline = self._function(library, "next_deadline", u64, p)
        self.next_timer = self._function(library, "next_timer", u64, p)
        self.poke = self._function(library, "poke", None, p)
        self.turns = self._function(library, "turns", u64, p)
        self.trace = self._function(library, "trace", u64, p)
        self.filled_rows = self._function(library, "filled_rows", u64)
        self.name = self._function(library, "name", None, p, u64, u64, text)
        self.copy = self._function(library, "copy", None, p, p, p, ctypes.c_size_t)
        self.put_begins = self._function(library, "put_begins", u64, p, p, p, ctypes.c_size_t, text)
        self.put_lands = self._function(library, "put_lands", None, p, u64)
        self.put_ends = self._function(library, "put_ends", None, p, u64)
        self.signal = self._function(library, "signal", None, p, u64)
        self.load = self._function(library, "load", u64, p)
        self.engine_acquire = self._function(library, "engine_acquire", None, p)

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(library, f"mkc_{name}")
        function.restype, function.argtypes = result, list(arguments)
        checked: Callable[..., Any] = function
        return checked


@functools.lru_cache(maxsize=1)
def scheduler_library() -> SchedulerLibrary:
    return SchedulerLibrary()


class CpuKernel(Kernel):
    """A kernel's shared object, loaded."""

    def __init__(self, spec: KernelSpec, path: Path, max_ctas: int, library: ctypes.CDLL | None = None) -> None:
        self.spec = spec
        # Of a device whose GPCs leave SMs over, of which no cluster of four can be.
        self._max_ctas = max_ctas if spec.cluster <= 2 else (max_ctas - max_ctas // 11) // spec.cluster * spec.cluster
        scheduler_library()  # the kernel's symbols are there
        self._library = library or ctypes.CDLL(str(path))
        threads, size = self._library.mkernel_threads(), self._library.mkernel_parameter_bytes()
        if (threads, size) != (spec.threads, spec.parameter_bytes):
            raise CompileError(
                f"{spec.name}: the kernel has {threads} threads and {size} bytes of parameters, "
                f"its plan says {spec.threads} and {spec.parameter_bytes}",
                path=str(path.with_suffix(".cpp")),
            )
        self.entry = ctypes.cast(self._library.mkernel_invoke, ctypes.c_void_p).value

    def max_ctas(self) -> int:
        return self._max_ctas


class Scheduler:
    """One native scheduler; used by one thread at a time. Closed with its owner, or dropped with it."""

    def __init__(self, seed: int, *, virtual_time: bool) -> None:
        self.library = scheduler_library()
        self.handle = self.library.create(seed, virtual_time)
        if not self.handle:
            raise MemoryError("target cpu: no memory for a scheduler")
        self._destroy = weakref.finalize(self, self.library.destroy, self.handle)
        self._destroy.atexit = False

    def start(self, kernel: CpuKernel, grid: int, parameters: bytes, rank: int) -> int:
        spec = kernel.spec
        if len(parameters) != spec.parameter_bytes:
            raise ArgumentError("parameters", f"{len(parameters)} bytes", f"{spec.name} takes {spec.parameter_bytes}")
        shape = (grid, spec.threads, spec.shared_bytes)
        clusters = spec.cluster, spec.clusters_are_apart
        launch: int = self.library.launch(self.handle, kernel.entry, parameters, len(parameters), *shape, *clusters, spec.early, rank)
        if not launch:
            raise Error("target cpu cannot launch {}: {} CTAs of {} threads with {} bytes of shared memory each".format(spec.name, *shape))
        return launch

    def result(self, launch: int) -> Error | bool:
        """False while the launch is running, True when it has succeeded, else its Error. A launch that has ended is then forgotten."""
        state = self.library.finished(self.handle, launch)
        if state == _RUNNING:
            return False
        text = self._text(self.library.error, launch)
        self.library.forget(self.handle, launch)
        return True if state == _SUCCEEDED else Error(f"target cpu: {text}")

    def report(self) -> str:
        return self._text(self.library.report)

    def _text(self, function: Callable[..., int], *arguments: int) -> str:
        size = function(self.handle, *arguments, None, 0)
        buffer = ctypes.create_string_buffer(size + 1)
        function(self.handle, *arguments, buffer, size + 1)
        return buffer.value.decode(errors="replace")

    def close(self) -> None:
        self.handle = None
        self._destroy()
