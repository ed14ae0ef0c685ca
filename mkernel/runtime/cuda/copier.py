"""What moves bytes for the emulated transport on GPUs: the copy engines, beside running kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from mkernel.memory.driver import call, check, current, destroyer, driver, free_all, native, new_stream, prompt
from mkernel.runtime.cuda.events import happened, new_event

__all__ = ["CudaCopier"]

_NOTHING = contextlib.nullcontext()
_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


class CudaCopier:
    """Copies by the copy engines, beside running kernels. One engine thread uses it.

    It has a context of its own. Calls of the program that wait for a kernel with their context locked (``cudaFree``, the first launch of
    a kernel, a copy to the host on the legacy stream) would otherwise hold up the copies that this kernel waits for. What touches the
    own GPU's memory only, and small copies from the host, wait for a time slice there (2.4 ms beside a kernel); copies to others do not.
    """

    def __init__(self, ordinal: int) -> None:
        cuda = driver()
        self._context = context = _new_context(ordinal)
        self._maker, self._engine = threading.get_ident(), 0
        # None of these waits for anything here, so that giving up the GIL would only cost time.
        self._copy_async = prompt("cuMemcpyAsync", _pointer, _pointer, _size, _pointer)
        self._write = prompt("cuStreamWriteValue64_v2", _pointer, _pointer, ctypes.c_uint64, ctypes.c_uint)
        self._record = prompt("cuEventRecord", _pointer, _pointer)
        self._events: list[Any] = []  # all of them
        self._idle: list[int] = []  # those to be used next
        self._frees: list[Callable[[], object]] = [lambda: call(cuda.cuCtxDestroy(context), "closing the engine's context")]
        try:
            with current(context):
                # Signals do not queue behind the data of later puts: their own data is known to have arrived.
                self._data, self._flags = self._new_stream(), self._new_stream()
                self._value = int(call(cuda.cuMemAlloc(8), "allocating a flag's value"))
                self._frees.append(lambda: call(cuda.cuMemFree(self._value), "freeing a flag's value"))
        except BaseException:
            self.close()
            raise

    def _new_stream(self) -> int:
        stream = new_stream()
        self._frees.append(functools.partial(_end_stream, stream))
        return stream

    def _new_event(self) -> int:
        event = new_event()
        self._events.append(event)
        return int(event)

    def _here(self) -> contextlib.AbstractContextManager[None]:
        """The context, for the calling thread. An engine's thread does nothing else: it is set up once, for good; saves 3 us a call."""
        thread = threading.get_ident()
        if thread != self._engine:
            if thread == self._maker:
                return current(self._context)
            current(self._context).__enter__()
            self._engine = thread
        return _NOTHING

    def start(self, dst: int, src: int, size: int) -> Any:
        with self._here():
            event = self._idle.pop() if self._idle else self._new_event()
            check(self._copy_async(dst, src, size, self._data), f"copying {size} bytes to {dst:#x}")
            check(self._record(event, self._data), "recording an event")
        return event

    def done(self, token: Any) -> bool:
        with self._here():
            if not happened(token):
                return False
        self._idle.append(token)
        return True

    def signal(self, address: int, value: int) -> None:
        with self._here():  # from memory of the GPU, in the order of the stream: a value from the host would wait for a time slice
            check(self._write(self._flags, self._value, value, 0), "writing a flag's value")
            check(self._copy_async(address, self._value, 8, self._flags), f"signal at {address:#x}")

    def close(self) -> None:
        self._frees += map(destroyer, self._events)
        self._events.clear()
        free_all(self._frees, self._context)


def _new_context(ordinal: int) -> Any:
    """Another context of a GPU, which is nobody's current one."""
    handle = _pointer()
    create = native("cuCtxCreate_v2", ctypes.POINTER(_pointer), ctypes.c_uint, ctypes.c_int)
    check(create(ctypes.byref(handle), 0, ordinal), f"opening GPU {ordinal} for the engine")
    call(driver().cuCtxPopCurrent(), "cuCtxPopCurrent")
    return driver().CUcontext(handle.value)


def _end_stream(stream: int) -> None:
    check(native("cuStreamSynchronize", _pointer)(stream), "waiting for copies")  # which never wait for kernels
    call(driver().cuStreamDestroy(stream), "destroying a stream")
