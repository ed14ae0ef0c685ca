"""The symmetric data heap of one rank: who uses which bytes, and when they may be used again."""

from __future__ import annotations

import struct
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mkernel.errors import ArgumentError
from mkernel.memory.allocator import Allocator, OutOfMemory

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
    """Allocations at equal offsets on every rank, and at the other end the workspace that all calls share.

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
        self._drops: deque[int] = deque()  # finalizers append here, because they may run anywhere, also inside this class
        self._reports: set[int] = set()
        self._lock = threading.RLock()
        self._closed = self._disowned = False

    def offset(self, address: int, size: int) -> int | None:
        """Offset of an address range that lies in this heap; else None."""
        offset = address - self.address
        return offset if offset >= 0 and offset + size <= self.size else None

    def report(self) -> bytes:
        """The numbers of leases that were dropped on this rank and are not yet freed, for the other ranks."""
        with self._lock:
            self._drain()
            return b"".join(_WORD.pack(number) for number in sorted(self._reports))

    def state(self) -> tuple[str, str]:
        """What decides where the next array lies, as a digest; and in words, for ranks in which it differs."""
        found = self._allocator
        return f"{zlib.crc32(repr(found.layout).encode()):08x}", f"{found.used} bytes taken, {found.workspace} of workspace"

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
        """Bytes that stay until ``free``, beside the arrays."""
        try:
            return self._allocator.allocate(size)
        except OutOfMemory as error:
            raise self._too_small(error) from error

    def reserve(self, size: int, beside: int = 0) -> None:
        """Let the workspace, which begins at offset 0, have at least so many bytes. Raises ArgumentError where it meets the arrays.

        ``beside``: bytes that are to be allocated next.
        """
        if size > self._allocator.workspace or beside:
            try:
                self._allocator.reserve(size, beside)
            except OutOfMemory as error:
                raise self._too_small(error) from error

    def _too_small(self, error: OutOfMemory) -> ArgumentError:
        return ArgumentError("heap_bytes", self.size, f"too small: {error}", f"mk.init(heap_bytes={error.required})")

    def free(self, offset: int) -> None:
        self._allocator.free(offset)

    def close(self) -> None:
        """Unmap the memory; while arrays still use it, the last of them does that."""
        with self._lock:
            self._closed = True
            self._release()

    def disown(self) -> None:
        """Make drops without effect, in a forked child. The lock is new: a thread of the parent may have held it."""
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
