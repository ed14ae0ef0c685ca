"""The CUDA driver: loaded on first use, and one place where its status codes become exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

from mkernel.errors import Error

__all__ = ["DriverError", "call", "check", "current", "destroyer", "driver", "free_all", "native", "new_stream", "prompt", "unwind"]

_REMEDIES = {
    2: "free GPU memory, or pass a smaller heap_bytes",
    100: "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    304: "check the limits on locked memory and open files (ulimit -l -n)",
    700: "a kernel of this process touched memory it must not: the GPU context is lost, restart the process",
    719: "a kernel of this process failed: the GPU context is lost, restart the process",
    720: "more CTAs than fit on the GPU at once: does another program use it?",
    900: "not allowed while a CUDA graph is being captured",
}
_GONE = (4, 709)  # DEINITIALIZED, CONTEXT_IS_DESTROYED: the process is ending


class DriverError(Error):
    """A driver call failed. ``status`` is the CUresult."""

    def __init__(self, what: str, status: int, name: str) -> None:
        self.status = status
        remedy = _REMEDIES.get(status, "")
        super().__init__(f"{what}: {name}" + (f" ({remedy})" if remedy else ""))

    @property
    def gone(self) -> bool:
        """The driver has shut down, and has freed everything."""
        return self.status in _GONE


@functools.cache
def driver() -> Any:
    """``cuda.bindings.driver``, initialized. Raises ImportError (no such package) or DriverError (no driver, no GPU)."""
    from cuda.bindings import driver as bindings

    try:
        status = bindings.cuInit(0)[0]
    except RuntimeError as error:
        raise DriverError("the CUDA driver cannot be loaded", 100, str(error).splitlines()[0]) from error
    if int(status) != 0:
        raise DriverError("cuInit", int(status), status.name)
    return bindings


def call(result: tuple[Any, ...], what: str) -> Any:
    """The result of a function of ``driver()``; raises DriverError if it failed. ``what``: what was being done, with its values."""
    status = result[0]
    if status:  # CUDA_SUCCESS is 0
        raise DriverError(what, int(status), status.name)
    return result[1] if len(result) == 2 else result[1:] or None


@functools.cache
def native(name: str, *types: Any) -> Any:
    """A function of the driver that releases the GIL while it runs, which the bindings' functions do not. Returns a status: ``check``.

    Use it for functions that may wait: the thread that would end the wait (the engine's, another rank's) needs the GIL.
    """
    driver()
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.restype, function.argtypes = ctypes.c_int, list(types)
    return function


@functools.cache
def prompt(name: str, *types: Any) -> Any:
    """A function of the driver that returns at once, several times cheaper than through the bindings. Keeps the GIL. Returns a status.

    A thread that gives up the GIL for less than a microsecond may have to wait for another thread to return it.
    """
    driver()
    function = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    function.restype, function.argtypes = ctypes.c_int, list(types)
    return function


def check(status: int, what: str) -> None:
    """Raise DriverError unless a ``native`` function succeeded."""
    if status:
        raise DriverError(what, status, driver().CUresult(status).name)


class current:  # noqa: N801
    """``with current(context)``: that context is the calling thread's current one, and another thread's graph capture does not matter.

    In the default capture mode the driver refuses, and ends the capture, when any thread asks for events or memory meanwhile. Nothing done
    here belongs to a capture by accident, so the thread opts out of that for the duration.
    """

    __slots__ = ("_context", "_mode")

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        cuda = driver()
        call(cuda.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
        self._mode = cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)[1]

    def __exit__(self, *exc: object) -> None:
        cuda = driver()
        cuda.cuThreadExchangeStreamCaptureMode(self._mode)
        call(cuda.cuCtxPopCurrent(), "cuCtxPopCurrent")


def unwind(undo: list[Callable[[], None]]) -> None:
    """Undo steps, newest first. At the end of the process the driver may be gone already, and has freed everything."""
    while undo:
        try:
            undo.pop()()
        except DriverError as error:
            if not error.gone:
                raise


def new_stream() -> int:
    """A stream that never waits for the legacy stream."""
    cuda = driver()
    return int(call(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), "creating a stream"))


def destroyer(event: Any) -> Callable[[], object]:
    """What destroys an event."""
    return lambda: call(driver().cuEventDestroy(event), "destroying an event")


def free_all(frees: list[Callable[[], object]], context: Any) -> None:
    """Free everything, newest first, the context last. A failure stops nothing; the first one is raised at the end."""
    failure: DriverError | None = None
    while frees:
        free = frees.pop()
        try:
            with current(context) if frees else contextlib.nullcontext():
                free()
        except DriverError as error:
            if not error.gone:
                failure = failure or error
    if failure is not None:
        raise failure
