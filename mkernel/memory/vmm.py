"""Symmetric segments in GPU memory (target cuda): one allocation per rank, those of a node in one address reservation.

The only file that makes the driver's virtual-memory calls. Never NVLink multicast, never managed memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from mkernel.errors import Error
from mkernel.memory.driver import call, check, current, driver, native, unwind
from mkernel.memory.segment import Holder, Segment

__all__ = ["VmmMapping", "VmmSegment", "granularity", "import_fd"]


class VmmSegment(Segment):
    """``size`` bytes (rounded up to the granularity) of GPU ``ordinal``, zeroed, shared through a POSIX file descriptor.

    Works between threads of one process and between processes: what the other ranks need is the ``fd``. The memory may be registered with a
    network card where the GPU can do that.

    Parameters
    ----------
    ordinal, context
        The GPU and its primary context.
    size
        Bytes of every rank's part; the same on all ranks of the node.
    local_rank, ranks_per_node
        This rank's place in the node.

    Raises
    ------
    DriverError
        Out of memory or address space, or the GPU cannot share memory by file descriptor.
    """

    mappable = False

    def __init__(self, ordinal: int, context: Any, size: int, local_rank: int, ranks_per_node: int) -> None:
        self._fd = self._dmabuf = -1
        self._undo: list[Callable[[], None]] = []
        if size < 0 or not 0 <= local_rank < ranks_per_node:
            raise ValueError(f"segment of {size} bytes for local rank {local_rank} of {ranks_per_node}")
        unit = granularity(ordinal)
        self.ordinal = ordinal
        self.size = self.stride = _round_up(max(size, 1), unit)
        self.local_rank = local_rank
        self.ranks_per_node = ranks_per_node
        try:
            self.base = _reserve(self.stride * ranks_per_node, unit, self._undo)
            handle = _create(ordinal, self.size)
            try:
                self._fd = _export(handle)
                _map(handle, self.address(), self.size, ordinal, self._undo)
            finally:
                _release(handle)  # the mapping and the descriptor keep the memory
            _zero(context, self.address(), self.size)
        except BaseException:
            self.close()
            raise

    def dmabuf(self) -> int:
        if self._dmabuf < 0:
            _require_rdma(self.ordinal)
            kind = driver().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            what = f"exporting {self.size} bytes of GPU {self.ordinal} as a dma-buf"
            self._dmabuf = int(call(driver().cuMemGetHandleForAddressRange(self.address(), self.size, kind, 0), what))
            os.set_inheritable(self._dmabuf, False)
        return self._dmabuf

    def _map_part(self, local_rank: int, fd: int) -> None:
        handle = _import(fd, f"the segment of local rank {local_rank}")
        try:
            _map(handle, self.address(local_rank), self.size, self.ordinal, self._undo)
        finally:
            _release(handle)

    def close(self) -> None:
        if self._dmabuf >= 0:
            os.close(self._dmabuf)
            self._dmabuf = -1
        unwind(self._undo)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class VmmMapping(Holder):
    """One rank's part of a segment of another node, mapped for the engine."""

    def __init__(self, fd: int, size: int, ordinal: int) -> None:
        self._undo: list[Callable[[], None]] = []
        unit = granularity(ordinal)
        self.size = _round_up(max(size, 1), unit)
        try:
            self.address = _reserve(self.size, unit, self._undo)
            handle = _import(fd, f"descriptor {fd}")
            try:
                _map(handle, self.address, self.size, ordinal, self._undo)
            finally:
                _release(handle)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not getattr(self, "_undo", None)

    def close(self) -> None:
        unwind(self._undo)


def import_fd(fd: int, size: int, ordinal: int) -> VmmMapping:
    """Map ``size`` bytes of another rank's segment so that GPU ``ordinal`` reaches them. The fd stays the caller's."""
    return VmmMapping(fd, size, ordinal)


def granularity(ordinal: int) -> int:
    """Sizes of segments are multiples of this many bytes."""
    cuda = driver()
    flag = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    unit: int = call(cuda.cuMemGetAllocationGranularity(_properties(ordinal), flag), f"granularity of GPU {ordinal}")
    return unit


def _require_rdma(ordinal: int) -> None:
    """Check that a network card can write to this GPU's memory. Raises Error."""
    cuda = driver()
    numbers = cuda.CUdevice_attribute
    for number, least, what, remedy in (
        (numbers.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1, "cannot export memory as a dma-buf", "use the open GPU kernel modules"),
        (numbers.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1, "does not let network cards reach its memory", ""),
        # OWNER: writes that have arrived are visible to the GPU that owns the memory, without a flush
        (numbers.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, 100, "does not order the writes of network cards", ""),
    ):
        if int(call(cuda.cuDeviceGetAttribute(number, ordinal), f"attributes of GPU {ordinal}")) < least:
            raise Error(f"GPU {ordinal} {what}: no RDMA" + (f" ({remedy})" if remedy else "; see `python -m mkernel doctor`"))


# ---- the driver's calls, each with what undoes it
def _properties(ordinal: int) -> Any:
    cuda = driver()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    rdma = call(cuda.cuDeviceGetAttribute(attribute, ordinal), f"attributes of GPU {ordinal}")
    properties.allocFlags.gpuDirectRDMACapable = 1 if rdma else 0
    return properties


def _reserve(size: int, alignment: int, undo: list[Callable[[], None]]) -> int:
    cuda = driver()
    base = int(call(cuda.cuMemAddressReserve(size, alignment, 0, 0), f"reserving {size} bytes of address space"))
    undo.append(lambda: call(cuda.cuMemAddressFree(base, size), f"freeing {size} bytes of address space"))
    return base


def _create(ordinal: int, size: int) -> Any:
    return call(driver().cuMemCreate(size, _properties(ordinal), 0), f"allocating {size} bytes on GPU {ordinal}")


def _release(handle: Any) -> None:
    call(driver().cuMemRelease(handle), "releasing a memory handle")


def _export(handle: Any) -> int:
    cuda = driver()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = int(call(cuda.cuMemExportToShareableHandle(handle, kind, 0), "exporting GPU memory as a file descriptor"))
    os.set_inheritable(fd, False)
    return fd


def _import(fd: int, what: str) -> Any:
    cuda = driver()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return call(cuda.cuMemImportFromShareableHandle(fd, kind), f"importing {what} from a file descriptor")


def _map(handle: Any, address: int, size: int, ordinal: int, undo: list[Callable[[], None]]) -> None:
    """Map an allocation and let GPU ``ordinal`` read and write it."""
    cuda = driver()
    call(cuda.cuMemMap(address, size, 0, handle, 0), f"mapping {size} bytes (the size must be equal on all ranks)")
    undo.append(lambda: call(cuda.cuMemUnmap(address, size), f"unmapping {size} bytes"))
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(cuda.cuMemSetAccess(address, size, [access], 1), f"giving GPU {ordinal} access to {size} bytes (is it a peer of their GPU?)")


def _zero(context: Any, address: int, size: int) -> None:
    """Zero the memory, on a stream of its own, because the legacy stream would wait for kernels of other worlds."""
    cuda = driver()
    with current(context):
        stream = call(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), "creating a stream")
        try:
            call(cuda.cuMemsetD8Async(address, 0, size, stream), f"zeroing {size} bytes")
            check(native("cuStreamSynchronize", ctypes.c_void_p)(int(stream)), f"zeroing {size} bytes")
        finally:
            call(cuda.cuStreamDestroy(stream), "destroying a stream")


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
