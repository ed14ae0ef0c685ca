"""Target cpu: a device whose CTAs a scheduler emulates (scheduler.py), alone or with the other ranks of mk.launch (thread_ranks.py)."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mkernel import env
from mkernel.errors import ArgumentError, Error
from mkernel.jit import cpu as compiler
from mkernel.jit.spec import KernelSpec
from mkernel.memory.memfd import Mapping, MemfdSegment, SharedMemory, import_fd
from mkernel.memory.segment import Segment
from mkernel.runtime.arrays import dlpack
from mkernel.runtime.backend import Backend, Extents, HostMemory, Kernel, Strides, TensorView
from mkernel.runtime.cpu.copier import CpuCopier
from mkernel.runtime.cpu.memory import File, ThreadSegment, aligned, file_of
from mkernel.runtime.cpu.scheduler import BLOCKED, TURNS, CpuKernel, Scheduler, scheduler_library
from mkernel.runtime.cpu.thread_ranks import ThreadRanks

__all__ = ["ThreadRanks", "CpuCopier", "CpuBackend", "CpuKernel"]

_TENSOR_MAP = struct.Struct("=QQII4Q3Q4II28x")  # mkcpu::CpuTensorMap
_TENSOR_MAP_MAGIC = 0x70616D2D7570636D
_BOX_ROW_BYTES = 128
_SLICE_NS = 50_000_000  # of a launch, between two looks at signals


class CpuBackend(Backend):
    """A GPU's stand-in for one rank. See ``Backend``; launches return when the kernel has ended.

    Parameters
    ----------
    rank
        For messages; with thread ranks, the rank's number there.
    thread_ranks
        The ranks of this process; None: this process is one rank, and time is real.
    seed
        Of the interleaving without thread ranks (default: ``MKERNEL_CPU_SEED`` + rank).
    sm_count
        CTAs at once (default: ``MKERNEL_CPU_SMS``).
    """

    def __init__(
        self, rank: int = 0, thread_ranks: ThreadRanks | None = None, *, seed: int | None = None, sm_count: int | None = None
    ) -> None:
        self.target = "cpu"
        self.sm_count = env.CPU_SMS.get() if sm_count is None else sm_count
        self.name = f"cpu ({self.sm_count} emulated SMs)"
        self.xp = np
        self.rank, self.thread_ranks = rank, thread_ranks
        self._library = scheduler_library()
        self._seed = env.CPU_SEED.get() + rank if seed is None else seed
        self._own: Scheduler | None = None
        self._segments = 0
        self._lock = threading.Lock()
        self._memory: list[np.ndarray[Any, Any]] = []
        self._imported: list[tuple[Mapping, File]] = []
        self._shared: list[SharedMemory] = []
        self._kept: list[Callable[[], None]] = []  # gives back what ``kernel_address`` has told
        self._companions: list[tuple[CpuKernel, int, bytes]] = []  # of the next launch: kernel, grid, parameters

    # ---- memory
    def segment(self, size: int, local_rank: int, ranks_per_node: int, *, host: bool = False) -> Segment:
        if self.thread_ranks is not None:
            self._segments += 1
            name = f"rank {self.rank}, segment {self._segments} ({size >> 10} KiB)"
            return ThreadSegment(self.thread_ranks.segments, self.thread_ranks.name, name, size, local_rank, ranks_per_node)
        return MemfdSegment(size, local_rank, ranks_per_node)

    def import_segment(self, fd: int, size: int, *, host: bool = False) -> int:
        mapping = import_fd(fd, size)
        self._imported.append((mapping, file_of(fd)))
        return mapping.address

    def kernel_address(self, address: int) -> int:
        if self.thread_ranks is None:
            return address
        for mapping, file in self._imported:
            if mapping.address <= address < mapping.address + mapping.size:
                kept = self.thread_ranks.segments.keep(file)
                if kept is not None:
                    self._kept.append(kept[1])
                    return kept[0] + address - mapping.address
        return address

    def copier(self) -> CpuCopier:
        return CpuCopier(self._library, self.thread_ranks, self._imported)

    def allocate(self, size: int) -> int:
        return self._allocate(size).ctypes.data

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def allocate_host(self, size: int, *, shared: bool = False) -> HostMemory:
        if shared:
            memory = SharedMemory(size)
            self._shared.append(memory)
            view = memoryview((ctypes.c_char * size).from_address(memory.address)).cast("B")
            return HostMemory(view, memory.address, memory.address, memory.fd)
        array = self._allocate(size)
        return HostMemory(array.data, array.ctypes.data, array.ctypes.data)

    def _allocate(self, size: int) -> np.ndarray[Any, Any]:
        array = aligned(size)
        array[:] = 0
        self._memory.append(array)
        return array

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    # ---- arrays
    def view(self, array: Any) -> TensorView:
        return dlpack.host_view(array)

    def wrap(self, address: int, shape: Sequence[int], dtype: str, owner: object) -> Any:
        kind = dlpack.numpy_dtype(dtype)
        count = math.prod(shape)
        if count == 0:
            return np.empty(tuple(shape), kind)
        memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]  # lives as long as any array over the memory
        return np.frombuffer(memory, dtype=kind).reshape(tuple(shape))  # type: ignore[call-overload]

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        kind = dlpack.numpy_dtype(dtype)
        return aligned(math.prod(shape) * kind.itemsize).view(kind).reshape(tuple(shape))

    # ---- kernels
    def compile(self, spec: KernelSpec) -> None:
        compiler.compile(spec)

    def load(self, spec: KernelSpec) -> CpuKernel:
        scheduler_library()  # loaded first, because kernels look up the scheduler's functions in it
        path, library = compiler.open_library(functools.partial(compiler.compile, spec))
        return CpuKernel(spec, path, self.sm_count, library)

    def tensor_map(self, address: int, dtype: str, shape: Extents, strides: Strides, box: Extents, swizzled: bool = True) -> bytes:
        size = dlpack.numpy_dtype(dtype).itemsize
        for name, value, ok, rule in (
            ("address", address, address % 16 == 0, "must be 16-byte aligned"),
            ("strides", strides, not any(stride % 16 for stride in strides), "must be multiples of 16 bytes"),
            ("box", box, box[0] * size == _BOX_ROW_BYTES, f"its rows must have {_BOX_ROW_BYTES} bytes"),
            ("box", box, all(0 < extent <= 256 for extent in box), "must be 1 to 256 in each dimension"),
            ("shape", shape, all(0 <= extent < 2**32 for extent in shape), "must fit 32 bits"),
        ):
            if not ok:
                raise ArgumentError(f"tensor map {name}", value, rule)
        rank = len(shape)
        if rank == 3:
            shape, strides, box = (*shape, 1), (*strides, 0), (*box, 1)
        return _TENSOR_MAP.pack(_TENSOR_MAP_MAGIC, address, rank, size, *shape, *strides, *box, swizzled)

    # ---- streams
    def stream(self, stream: Any) -> Any:
        if stream is not None:
            raise ArgumentError("stream", stream, "target cpu has no streams", "leave it out")
        return None

    def capturing(self, stream: Any) -> bool:
        return False

    def milliseconds(self, stream: Any, calls: Sequence[Callable[[], object]], untimed: int) -> float:
        begin = time.perf_counter()
        for i, one in enumerate(calls):
            if i == untimed:
                begin = time.perf_counter()
            one()
        return (time.perf_counter() - begin) * 1e3

    def launch(self, kernel: Kernel, turn: Any, grid: int, parameters: bytes | bytearray | memoryview | ctypes.Structure) -> None:
        assert isinstance(kernel, CpuKernel)
        companions, self._companions = self._companions, []
        if not 0 < grid <= kernel.max_ctas():
            raise ArgumentError("grid", grid, f"must be 1 to {kernel.max_ctas()}: that many CTAs run at once", "raise MKERNEL_CPU_SMS")
        launches = [(kernel, grid, bytes(parameters)), *companions]
        if self.thread_ranks is not None:
            self.thread_ranks.launch(self.rank, *launches[0], beside=companions)
        else:
            with self._lock:
                self._run(launches)

    def accompany(self, kernel: Kernel, turn: Any, grid: int, parameters: bytes | ctypes.Structure) -> None:
        assert isinstance(kernel, CpuKernel)
        self._companions.append((kernel, grid, bytes(parameters)))

    def _run(self, launches: Sequence[tuple[CpuKernel, int, bytes]]) -> None:
        """Run kernels beside each other on this thread, in real time. Returns to Python now and then, for its signals."""
        if self._own is None:
            self._own = Scheduler(self._seed, virtual_time=False)
        scheduler, library = self._own, self._library
        running: list[int] = []
        try:
            for launch in launches:
                running.append(scheduler.start(*launch, self.rank))
            while running:
                for number in list(running):
                    result = scheduler.result(number)
                    if isinstance(result, Error):
                        raise result
                    if result:
                        running.remove(number)
                if running and library.run(scheduler.handle, TURNS, library.now(scheduler.handle) + _SLICE_NS) == BLOCKED:
                    raise Error(f"target cpu: deadlock: nothing can run, and nothing is under way\n{scheduler.report()}")
        finally:
            for number in running:
                library.forget(scheduler.handle, number)

    @property
    def trace(self) -> int:
        """Hash of the interleaving of all launches so far (without thread ranks)."""
        value: int = self._library.trace(self._own.handle) if self._own is not None else 0
        return value

    def synchronize(self) -> None:
        """Return at once, because calls are synchronous."""

    def close(self) -> None:
        with self._lock:
            if self._own is not None:
                self._own.close()
                self._own = None
            for give_back in self._kept:
                give_back()
            self._kept.clear()
            for mapping, _ in self._imported:
                mapping.close()
            self._imported.clear()
            for memory in self._shared:
                memory.close()
            self._shared.clear()
            self._memory.clear()
