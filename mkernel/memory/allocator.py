"""Where arrays lie on the symmetric heap: a deterministic allocator of offsets, so that ranks that call alike agree without talking."""

from __future__ import annotations

import bisect

from mkernel.errors import Error

__all__ = ["Allocator", "OutOfMemory"]

ALIGNMENT = 256
LARGE = 64 * 1024
LARGE_ALIGNMENT = 1024  # alignment of a 128-byte-swizzled TMA box


class OutOfMemory(Error, MemoryError):  # noqa: N818 - says what happened, like MemoryError's own kin
    """The symmetric heap is too small.

    Attributes
    ----------
    needed
        Bytes asked for, with alignment.
    available
        Bytes free in all, not necessarily in one piece.
    required
        Heap size with which this would have succeeded.
    """

    def __init__(self, needed: int, available: int, largest: int, capacity: int, required: int) -> None:
        self.needed, self.available, self.largest, self.capacity, self.required = needed, available, largest, capacity, required
        super().__init__(
            f"symmetric heap: {needed} bytes needed, {available} of {capacity} free (largest piece {largest}); "
            f"free arrays of world.empty, or pass heap_bytes={required} or more to mk.init"
        )


class Allocator:
    """Allocations from the end of ``capacity`` bytes down, first fit; a workspace grows from the beginning up.

    Offsets are 256-byte aligned, 1024-byte aligned from 64 KiB on. The same sequence of calls gives the same offsets on every rank. Not
    thread-safe: the world serializes.

    Attributes
    ----------
    workspace
        Bytes at the beginning that are no array's.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity = {capacity}: must not be negative")
        self.capacity = capacity
        self.used = 0
        self.workspace = 0
        self._holes: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # (start, end), by start, never adjacent
        self._sizes: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Free bytes in all."""
        return self.capacity - self.used - self.workspace

    @property
    def layout(self) -> tuple[object, ...]:
        """What decides where the next allocation lies: equal on all ranks whose calls were."""
        return self.workspace, *self._holes

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return max((end - max(start, self.workspace) for start, end in self._holes if end > self.workspace), default=0)

    def allocate(self, size: int) -> int:
        """Offset of ``size`` free bytes (0 counts as 1, so that offsets of live allocations are distinct). Raises OutOfMemory."""
        if size < 0:
            raise ValueError(f"size = {size}: must not be negative")
        alignment = LARGE_ALIGNMENT if size >= LARGE else ALIGNMENT
        needed = _align(max(size, 1), ALIGNMENT)
        for index in range(len(self._holes) - 1, -1, -1):
            start, end = self._holes[index]
            offset = (end - needed) // alignment * alignment
            if offset >= max(start, self.workspace):
                self._holes[index : index + 1] = [(low, high) for low, high in ((start, offset), (offset + needed, end)) if low < high]
                self._sizes[offset] = needed
                self.used += needed
                return offset
        # In a longer heap the arrays also lie at the end: the room between them and the workspace is what grows.
        missing = self.workspace + needed - self._lowest
        raise OutOfMemory(needed, self.available, self.largest, self.capacity, self.capacity + _align(missing + alignment, LARGE_ALIGNMENT))

    def reserve(self, size: int, beside: int = 0) -> None:
        """Make the workspace at least ``size`` bytes. Raises OutOfMemory where it would meet the lowest allocation, and changes nothing.

        ``beside``: bytes that are to be allocated next, which there must be room for, too.
        """
        if size <= self.workspace and beside == 0:
            return
        room = _align(beside, ALIGNMENT) + LARGE_ALIGNMENT if beside else 0
        missing = max(size, self.workspace) + room - self._lowest
        if missing > 0:
            required = self.capacity + _align(missing, LARGE_ALIGNMENT)
            raise OutOfMemory(size + room, self.available + self.workspace, self._lowest, self.capacity, required)
        self.workspace = max(size, self.workspace)

    def free(self, offset: int) -> None:
        """Give an allocation back. Raises ValueError when ``offset`` is not live."""
        try:
            size = self._sizes.pop(offset)
        except KeyError:
            raise ValueError(f"offset = {offset}: not allocated (freed twice?)") from None
        self.used -= size
        start, end = offset, offset + size
        index = bisect.bisect_left(self._holes, (start, end))
        low = high = index
        if low > 0 and self._holes[low - 1][1] == start:
            low -= 1
            start = self._holes[low][0]
        if high < len(self._holes) and self._holes[high][0] == end:
            end = self._holes[high][1]
            high += 1
        self._holes[low:high] = [(start, end)]

    def size(self, offset: int) -> int:
        """Bytes of a live allocation."""
        return self._sizes[offset]

    @property
    def _lowest(self) -> int:
        """Where the lowest allocation begins."""
        return min(self._sizes, default=self.capacity)


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
