"""A stream for kernels that run beside those of a world."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from mkernel.memory.driver import call, check, destroyer, driver, native, new_stream
from mkernel.runtime.cuda.events import happened, new_event
from mkernel.runtime.cuda.kernel import Config, CudaKernel

__all__ = ["SideStream"]

_pointer = ctypes.c_void_p


class SideStream:
    """Launches kernels one after the other, each when what came before it on another stream has ended. The GPU's context is current.

    Attributes
    ----------
    frees
        What gives it back.
    """

    def __init__(self) -> None:
        self._record = native("cuEventRecord", _pointer, _pointer)
        self._wait = native("cuStreamWaitEvent", _pointer, _pointer, ctypes.c_uint)
        self._launch = native("cuLaunchKernelEx", ctypes.POINTER(Config), _pointer, _pointer, _pointer)
        stream = new_stream()
        events = [new_event(), new_event()]
        self._stream, (self._begin, self._end) = stream, (int(event) for event in events)
        self._arguments = (_pointer * 1)()
        self._launched = False
        self.frees: list[Callable[[], object]] = [
            lambda: call(driver().cuStreamDestroy(stream), "destroying a stream"),
            *map(destroyer, events),
        ]

    def launch(self, kernel: CudaKernel, before: int, grid: int, struct: Any) -> None:
        """Launch a kernel once what is on stream ``before`` now has ended. ``struct``: its parameters, which are copied."""
        spec = kernel.spec
        check(self._record(self._begin, before), "recording an event")
        check(self._wait(self._stream, self._begin, 0), "ordering two streams")
        self._arguments[0] = ctypes.addressof(struct)
        # Not a cooperative launch: its CTAs need not be there at once, and the driver may let one such kernel run at a time.
        config = Config((grid, 1, 1), (spec.threads, 1, 1), spec.shared_bytes, self._stream, None, 0)
        check(self._launch(config, kernel.function, self._arguments, None), f"launching {spec.name} with {grid} CTAs")
        check(self._record(self._end, self._stream), "recording an event")
        self._launched = True

    def idle(self) -> bool:
        """Whether all that was launched has ended."""
        return not self._launched or happened(self._end)
