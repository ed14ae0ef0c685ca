"""The symmetric data heap of one rank: who uses which bytes, and when they may be used again."""

from __future__ import annotations

import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mkernel.errors import ArgumentError
from mkernel.memory.allocator import LARGE_ALIGNMENT, Allocator, OutOfMemory

if TYPE_CHECKING:
    from mkernel.memory.segment import Segment

__all__ = ["Heap", "Lease"]

_WORD = struct.Struct("!Q")


class Lease:
    """Owner of one array's bytes; when it is collected, the bytes may be used again (once all ranks have dropped theirs)."""

    def __init__(self, heap: Heap, number: int, offset: int) -> None:
        self.offset = offset
        weakref.finalize(self, heap._dropped, number).atexit = False


class Heap:
    """Allocations at equal offsets on every rank.

    Python drops arrays when it likes, on each rank in another order. So an array that is dropped here is only reported, with the next
    collective allocation, and freed when every rank has reported it: all ranks then free in the same order.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.address = segment.address()
        self.size = segment.size
        self._allocator = Allocator(segment.size)
        self._offsets: dict[int, int] = {}  # live leases: number -> offset
        self._numbers = 0
        self._drops: deque[int] = deque()  # what finalizers append to: they run anywhere, also inside this class
        self._reports: set[int] = set()
        self._lock = threading.RLock()
        self._closed = self._disowned = False

    def offset(self, address: int, size: int) -> int | None:
        """Offset of an address range that lies in this heap; else None."""
        offset = address - self.address
        return offset if offset >= 0 and offset + size <= self.size else None

    def report(self) -> bytes:
        """The leases dropped on this rank and not yet freed, for the other ranks."""
        with self._lock:
            self._drain()
            return b"".join(_WORD.pack(number) for number in sorted(self._reports))

    def reclaim(self, reports: Sequence[bytes]) -> None:
        """Free what every rank has dropped. The reports are those of all ranks, so that all free alike."""
        dropped = [{number for (number,) in _WORD.iter_unpack(report)} for report in reports]
        for number in sorted(set.intersection(*dropped)):
            self._allocator.free(self._offsets.pop(number))
            with self._lock:
                self._reports.discard(number)

    def lease(self, size: int) -> Lease:
        """Bytes for an array. All ranks alike, after ``reclaim``. Raises ArgumentError when the heap is too small."""
        offset = self.allocate(size)
        self._numbers += 1
        self._offsets[self._numbers] = offset
        return Lease(self, self._numbers, offset)

    def allocate(self, size: int) -> int:
        """Bytes that stay until ``free``."""
        return self.allocate_all([size])[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[int]:
        """Offsets of as many pieces, or of none: then the ArgumentError says how large a heap would have room for all."""
        offsets: list[int] = []
        try:
            for size in sizes:
                offsets.append(self._allocator.allocate(size))
        except OutOfMemory as error:
            required = error.required + sum(size + LARGE_ALIGNMENT for size in sizes[len(offsets) + 1 :])
            for offset in offsets:
                self._allocator.free(offset)
            raise ArgumentError("heap_bytes", self.size, f"too small: {error}", f"mk.init(heap_bytes={required})") from error
        return offsets

    def free(self, offset: int) -> None:
        self._allocator.free(offset)

    def close(self) -> None:
        """Unmap, or, while arrays still use the memory, leave that to the last of them."""
        with self._lock:
            self._closed = True
            self._release()

    def disown(self) -> None:
        """In a forked child: what it drops changes nothing, and another thread may have held the lock."""
        self._lock, self._disowned = threading.RLock(), True

    def _dropped(self, number: int) -> None:
        if self._disowned:
            return
        self._drops.append(number)
        if self._closed:
            with self._lock:
                self._release()

    def _drain(self) -> None:
        while self._drops:
            self._reports.add(self._drops.popleft())

    def _release(self) -> None:
        self._drain()
        if self._reports.issuperset(self._offsets):
            self.segment.close()
