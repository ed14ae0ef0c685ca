"""Arrays on the symmetric heap: what all ranks agree on before one of them gets its array."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mkernel.runtime.arrays.shapes import dtype_of, extents_of

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend
    from mkernel.runtime.heap import Heap
    from mkernel.typing import Array, DType

__all__ = ["HeapWorld", "new_array"]


class HeapWorld(Protocol):
    """What a new array needs of its world."""

    @property
    def lock(self) -> threading.RLock: ...
    @property
    def heap(self) -> Heap: ...
    @property
    def backend(self) -> Backend: ...
    def check(self) -> None: ...
    def wait_for_kernels(self) -> None: ...
    def collective(self, key: str, what: str, data: bytes = b"", timeout: float | None = None) -> list[bytes]: ...


def new_array(world: HeapWorld, shape: int | Sequence[int], dtype: DType, *, zero: bool) -> Array:
    """An array at the same offset of every rank's heap. Collective. Raises what ``World.empty`` names."""
    name, item = dtype_of(dtype)
    extents = extents_of(shape, item)
    size = math.prod(extents) * item
    heap, backend = world.heap, world.backend
    with world.lock:
        world.check()
        dropped = heap.report()
        if dropped:  # memory that is used again is idle on every rank, so that the workspace may grow over it in a later call
            world.wait_for_kernels()
        digest, words = heap.state()
        what = f"an array of {size} bytes: {list(extents)} {name}, on a heap with {words}"
        heap.reclaim(world.collective(f"empty {size} {digest}", what, dropped))
        lease = heap.lease(size)
        address = heap.address + lease.offset
        if zero and size:
            backend.wrap(address, (size,), "uint8", lease).fill(0)  # as bytes: array modules differ in what they do to bfloat16
        array: Array = backend.wrap(address, extents, name, lease)
        return array
