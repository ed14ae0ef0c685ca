"""Symmetric segments in host memory that a GPU addresses too (target cuda): for flags that a host process raises, which never uses CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mkernel.errors import Error
from mkernel.memory.driver import call, current, driver, unwind
from mkernel.memory.memfd import MemfdSegment

__all__ = ["PinnedSegment", "pin"]


class PinnedSegment(MemfdSegment):
    """A memfd segment whose parts are pinned, so that kernels on GPU ``ordinal`` address them as the host does.

    Kernels only load and store there: a GPU's atomics on host memory need PCIe atomics.

    Parameters
    ----------
    ordinal, context
        The GPU and its primary context.
    size, local_rank, ranks_per_node
        As for a ``MemfdSegment``.

    Raises
    ------
    Error
        Flags in host memory do not work with this GPU.
    DriverError
        The memory cannot be pinned.
    OSError
        The host is out of address space, descriptors or memory.
    """

    def __init__(self, ordinal: int, context: Any, size: int, local_rank: int, ranks_per_node: int) -> None:
        self._context = context
        self._undo: list[Callable[[], None]] = []
        _require_flags_in_host_memory(ordinal)
        super().__init__(size, local_rank, ranks_per_node)

    def _map_part(self, local_rank: int, fd: int) -> None:
        super()._map_part(local_rank, fd)
        self._undo.append(pin(self._context, self.address(local_rank), self.size))

    def close(self) -> None:
        unwind(self._undo)  # before the memory goes
        super().close()


def pin(context: Any, address: int, size: int) -> Callable[[], None]:
    """Let every GPU of the process address host memory that is there already. Returns what undoes it."""
    cuda = driver()
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    with current(context):
        call(cuda.cuMemHostRegister(address, size, flags), f"pinning {size} bytes of shared host memory")

    def undo() -> None:
        with current(context):
            call(cuda.cuMemHostUnregister(address), f"unpinning {size} bytes of shared host memory")

    return undo


def _require_flags_in_host_memory(ordinal: int) -> None:
    cuda = driver()
    numbers = cuda.CUdevice_attribute
    for number, wanted, what in (
        (numbers.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1, "does not address host memory as the host does"),
        # C2C: a flag may reach the GPU that way before what a network card wrote reaches it over PCIe, unless the host flushes by CUDA
        (
            numbers.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            0,
            "reaches host memory by another way than network cards reach its own (C2C)",
        ),
    ):
        if int(call(cuda.cuDeviceGetAttribute(number, ordinal), f"attributes of GPU {ordinal}")) != wanted:
            raise Error(f"GPU {ordinal} {what}: no flags raised by the host (use rc with MKERNEL_RC_SIGNAL=atomic)")
