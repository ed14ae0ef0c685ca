"""Recording what the CTAs of this rank do: the memory that kernels write their records to, and when they do."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Protocol

from mkernel import abi
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.clock import Clock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mkernel.runtime.backend import Backend

__all__ = ["Recorded", "Recorder"]


class Recorded(Protocol):
    """What a recorder needs of its world."""

    tracing: int  # how often recording has begun or ended: calls then take over the header's trace

    @property
    def lock(self) -> threading.RLock: ...
    @property
    def foreign(self) -> str: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def header(self) -> abi.World: ...
    def check(self) -> None: ...
    def wait_for_kernels(self) -> None: ...


class Recorder:
    """The records of one world's kernels on this rank."""

    def __init__(self, world: Recorded) -> None:
        self._world = world
        self._now: tuple[int, int] | None = None  # address and capacity of the buffer that is being recorded to
        self._buffers: dict[int, int] = {}  # capacity -> address
        self._clocks = Clock(0, 0), Clock(0, 0)  # when the recording began, and when it ended

    def begin(self, capacity: int) -> None:
        """Record up to ``capacity - 1`` intervals per lane from the next call on. Waits for earlier calls."""
        world = self._world
        with world.lock:
            world.check()
            if self._now is not None:
                raise ArgumentError("trace", "begin", "this world is already being traced", "end the other trace first")
            world.wait_for_kernels()
            size = self._bytes(capacity)
            if capacity in self._buffers:
                world.backend.clear(self._buffers[capacity], size)
            else:
                self._buffers[capacity] = world.backend.allocate(size)
            now = world.backend.clock()
            self._clocks = now, now
            self._record_to((self._buffers[capacity], capacity))

    def end(self) -> NDArray[Any]:
        """Stop recording; the records as a structured array [cta, lane, record] (fields of ``abi.TraceRecord``)."""
        import numpy as np

        world = self._world
        with world.lock:
            if world.foreign:
                raise Error(world.foreign)
            if self._now is None:
                raise ArgumentError("trace", "end", "this world is not being traced")
            records, capacity = self._now
            world.wait_for_kernels()
            self._record_to(None)
            world.check()
            raw = world.backend.read(records, self._bytes(capacity))
            self._clocks = self._clocks[0], world.backend.clock()
        fields = np.dtype([("kind", np.uint32), ("argument", np.uint32), ("begin", np.uint64), ("end", np.uint64)])
        return np.frombuffer(raw, fields).reshape(world.backend.sm_count, abi.TRACE_LANES, capacity)

    def clock(self) -> Clock:
        """How the device's clock differed from the host's during the last recording, in which one may have drifted from the other."""
        before, after = self._clocks
        offset = (before.offset_ns + after.offset_ns) // 2
        drift = abs(after.offset_ns - before.offset_ns) // 2 + 1
        return Clock(offset, max(before.error_ns, after.error_ns) + (drift if drift > 1 else 0))

    def _bytes(self, capacity: int) -> int:
        return self._world.backend.sm_count * abi.TRACE_LANES * capacity * ctypes.sizeof(abi.TraceRecord)

    def _record_to(self, buffer: tuple[int, int] | None) -> None:
        self._now = buffer
        self._world.header.trace, self._world.header.trace_capacity = buffer or (0, 0)
        self._world.tracing += 1
