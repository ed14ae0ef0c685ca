"""Target cuda: one GPU of this process, through the driver. Its arrays are CuPy's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from mkernel.errors import ArgumentError, Error
from mkernel.jit import cuda as compiler
from mkernel.jit.spec import KernelSpec
from mkernel.memory import vmm
from mkernel.memory.driver import call, check, current, destroyer, driver, free_all, native, new_stream
from mkernel.memory.memfd import SharedMemory, import_fd
from mkernel.memory.pinned import PinnedSegment, pin
from mkernel.memory.segment import Segment
from mkernel.runtime.arrays import dlpack
from mkernel.runtime.arrays.libraries import Libraries, TorchLibrary
from mkernel.runtime.backend import Backend, Extents, HostMemory, Kernel, Rows, Strides, TensorView
from mkernel.runtime.clock import Clock
from mkernel.runtime.cuda.clock import ClockReader
from mkernel.runtime.cuda.copier import CudaCopier
from mkernel.runtime.cuda.events import happened, sleep_until
from mkernel.runtime.cuda.gpus import name_of, pci_address_of
from mkernel.runtime.cuda.kernel import CudaKernel
from mkernel.runtime.cuda.libraries import CupyLibrary, ForeignLibrary, GpuTorchLibrary
from mkernel.runtime.cuda.queries import LEGACY_STREAM
from mkernel.runtime.cuda.row_copies import RowCopies
from mkernel.runtime.cuda.side_stream import SideStream
from mkernel.runtime.cuda.streams import LaunchQueue, Turn
from mkernel.runtime.cuda.tensor_map import TensorMaps

__all__ = ["CudaBackend"]

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_address_of = ctypes.addressof


class CudaBackend(Backend):
    """GPU ``ordinal`` of this process, through its primary context (the one CuPy and torch use).

    Makes it the calling thread's current CuPy device: what a rank allocates with CuPy is then on its own GPU.

    Raises
    ------
    Error
        No CuPy, or the GPU cannot be opened.
    """

    target = "cuda"
    compiles_ahead = True

    def __init__(self, ordinal: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise Error(f"target cuda needs CuPy ({error}): pip install cupy-cuda13x, or cupy-cuda12x for a driver of CUDA 12") from error
        compiler.begin_compiling()  # beside the driver, which takes its time to open a GPU
        cuda = driver()
        self.ordinal = ordinal
        self.name = name_of(ordinal)
        self.pci_address = pci_address_of(ordinal)
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.sm_count = self._sms = int(call(cuda.cuDeviceGetAttribute(attribute, ordinal), f"attributes of GPU {ordinal}"))
        self.xp = cupy
        self._context = call(cuda.cuDevicePrimaryCtxRetain(ordinal), f"opening GPU {ordinal}")
        self._frees: list[Callable[[], object]] = [lambda: call(cuda.cuDevicePrimaryCtxRelease(ordinal), f"closing GPU {ordinal}")]
        self._queue = LaunchQueue(self._context)
        self._lock = self._queue.lock
        self.order = self._queue.order  # type: ignore[method-assign]  # as attributes: one call less on the path of every call
        self._cupy = CupyLibrary(self, cupy, ordinal, self._queue)
        self.libraries = Libraries(self, ForeignLibrary(self._cupy, self._queue, ordinal), [(cupy.ndarray, self._cupy)])
        self._launch_kernel = native("cuLaunchKernelEx")  # no types: see ``launch_arguments``
        with self._current():
            self._stream = self._new_stream()
        self._maps = TensorMaps(lambda: self._some_address)
        self.tensor_map, self.matrix_maps = self._maps.get, self._maps.matrices  # type: ignore[method-assign]
        self._beside: SideStream | None = None  # of kernels beside those of the world
        cupy.cuda.Device(ordinal).use()
        compiler.warm_up()

    def _current(self) -> Any:
        return current(self._context)

    def _new_stream(self) -> int:
        stream = new_stream()
        self._frees.append(lambda: call(driver().cuStreamDestroy(stream), "destroying a stream"))
        return stream

    # ---- memory
    def segment(self, size: int, local_rank: int, ranks_per_node: int, *, host: bool = False) -> Segment:
        if host:
            return PinnedSegment(self.ordinal, self._context, size, local_rank, ranks_per_node)
        return vmm.VmmSegment(self.ordinal, self._context, size, local_rank, ranks_per_node)

    def import_segment(self, fd: int, size: int, *, host: bool = False) -> int:
        mapping = import_fd(fd, size) if host else vmm.import_fd(fd, size, self.ordinal)
        with self._lock:
            self._frees.append(mapping.close)
        return mapping.address

    def copier(self) -> CudaCopier:
        return CudaCopier(self.ordinal)

    def allocate(self, size: int) -> int:
        cuda = driver()
        with self._lock, self._current():
            address = int(call(cuda.cuMemAlloc(max(size, 1)), f"allocating {size} bytes on GPU {self.ordinal}"))
            self._frees.append(lambda: call(cuda.cuMemFree(address), f"freeing {size} bytes"))
        self.clear(address, max(size, 1))
        return address

    def clear(self, address: int, size: int) -> None:
        with self._lock, self._current():
            call(driver().cuMemsetD8Async(address, 0, size, self._stream), f"zeroing {size} bytes")
            self._finish(self._stream, f"zeroing {size} bytes")

    def write(self, address: int, data: bytes) -> None:
        with self._lock, self._current():
            copy = native("cuMemcpyHtoDAsync_v2", _pointer, _pointer, _size, _pointer)
            check(copy(address, data, len(data), self._stream), f"writing {len(data)} bytes")
            self._finish(self._stream, f"writing {len(data)} bytes")

    def allocate_host(self, size: int, *, shared: bool = False) -> HostMemory:
        cuda = driver()
        fd = -1
        with self._lock, self._current():
            if shared:
                memory = SharedMemory(size)
                self._frees.append(memory.close)
                host, fd = memory.address, memory.fd
                self._frees.append(pin(self._context, host, memory.size))
            else:
                host, free = _pinned(size)
                self._frees.append(free)
            address = int(call(cuda.cuMemHostGetDevicePointer(host, 0), f"address of {size} bytes of host memory"))
        ctypes.memset(host, 0, size)
        return HostMemory(memoryview((ctypes.c_char * size).from_address(host)).cast("B"), address, host, fd)

    def read(self, address: int, size: int) -> bytes:
        self.synchronize()
        buffer = ctypes.create_string_buffer(size)
        with self._lock, self._current():
            copy = native("cuMemcpyDtoHAsync_v2", _pointer, _pointer, _size, _pointer)
            check(copy(buffer, address, size, self._stream), f"reading {size} bytes")
            self._finish(self._stream, f"reading {size} bytes")
        return buffer.raw

    def _finish(self, stream: int, what: str) -> None:
        check(native("cuStreamSynchronize", _pointer)(stream), what)

    # ---- arrays
    def torch_library(self, torch: Any) -> TorchLibrary:
        return GpuTorchLibrary(self, torch, self.ordinal, self._queue)

    def key(self, array: Any) -> Hashable:
        return self.libraries[type(array)].key(array)

    def view(self, array: Any) -> TensorView:
        return self.libraries[type(array)].view(array)

    def wrap(self, address: int, shape: Sequence[int], dtype: str, owner: object) -> Any:
        cupy, kind = self.xp, dlpack.numpy_dtype(dtype)
        extents = tuple(shape)
        memory = cupy.cuda.UnownedMemory(address, math.prod(extents) * kind.itemsize, owner, self.ordinal)
        return cupy.ndarray(extents, dtype=kind, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self._cupy.empty(shape, dtype, self._cupy.stream())

    # ---- kernels
    def compile(self, spec: KernelSpec) -> None:
        compiler.compile(spec)

    def load(self, spec: KernelSpec) -> CudaKernel:
        cubin = compiler.compile(spec)
        with self._lock, self._current():
            return CudaKernel(spec, cubin, self.sm_count, self.ordinal)

    def tensor_map(self, address: int, dtype: str, shape: Extents, strides: Strides, box: Extents, swizzled: bool = True) -> bytes:
        return self._maps.get(address, dtype, shape, strides, box, swizzled)

    @functools.cached_property
    def _some_address(self) -> int:
        """An address for tensor maps of empty arrays, whose own address may be 0."""
        return self.allocate(256)

    @functools.cached_property
    def _clock(self) -> ClockReader:
        return ClockReader(self)

    def clock(self) -> Clock:
        return self._clock.read()

    # ---- streams
    def stream(self, stream: Any) -> int:
        """A CUstream as an integer."""
        if type(stream) is int:
            handle = stream
        elif stream is None:
            handle = self._cupy.stream()
        elif hasattr(stream, "__cuda_stream__"):
            handle = int(stream.__cuda_stream__()[1])
        elif isinstance(stream, int) and not isinstance(stream, bool):
            handle = int(stream)
        elif hasattr(stream, "cuda_stream"):  # torch before it learnt the protocol
            handle = int(stream.cuda_stream)
        else:
            rule = "must be None, an integer or an object with __cuda_stream__"
            raise ArgumentError("stream", type(stream).__name__, rule, "e.g. a cupy.cuda.Stream")
        return handle or LEGACY_STREAM

    def capturing(self, stream: int) -> bool:
        return self._queue.capturing(stream)

    def order(self, stream: int) -> Turn:
        return self._queue.order(stream)

    def join(self, ctas: int) -> None:
        self._queue.join(ctas, self._sms)

    def captures(self, turn: Turn) -> bool:
        return turn[2] is not None

    def release(self) -> None:
        self._queue.release()

    def milliseconds(self, stream: int, calls: Sequence[Callable[[], object]], untimed: int) -> float:
        with self._timed_event() as begin, self._timed_event() as end:
            for i, one in enumerate(calls):
                if i == untimed:
                    self._mark(begin, stream)
                one()
            self._mark(end, stream)
            sleep_until(lambda: self._passed(int(end)))
            with self._current():
                return float(call(driver().cuEventElapsedTime(begin, end), "reading the time between two events"))

    @contextlib.contextmanager
    def _timed_event(self) -> Iterator[Any]:
        cuda = driver()
        with self._current():
            event = call(cuda.cuEventCreate(cuda.CUevent_flags.CU_EVENT_DEFAULT), "creating an event")
        try:
            yield event
        finally:
            with self._current():
                cuda.cuEventDestroy(event)  # a lost context has been reported elsewhere

    def _passed(self, event: int) -> bool:
        with self._current():
            return happened(event)

    def _mark(self, event: Any, stream: int) -> None:
        with self._lock, self._current():
            call(driver().cuEventRecord(event, stream), "recording an event")

    def launch(self, kernel: Kernel, turn: Turn, grid: int, parameters: bytes | bytearray | memoryview | ctypes.Structure) -> None:
        assert isinstance(kernel, CudaKernel)
        if not turn[3]:  # the context is not the thread's own, as ``order`` has found
            # Not self._current(): its opting out of other threads' captures costs a microsecond and nothing here needs it.
            cuda = driver()
            call(cuda.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
            try:
                self.launch(kernel, (*turn[:3], True), grid, parameters)
            finally:
                cuda.cuCtxPopCurrent()
            return
        struct: Any = parameters if type(parameters) is kernel.taken else kernel.take(parameters)
        extents, arguments = kernel.launch_arguments
        kernel.argument_list[0] = _address_of(struct)
        extents[0] = grid
        kernel.config.stream = turn[0]
        launched = self._launch_kernel(*arguments)
        if launched:
            check(launched, f"launching {kernel.spec.name} with {grid} CTAs on GPU {self.ordinal}")
        self._queue.launched(turn)

    def accompany(self, kernel: Kernel, turn: Turn, grid: int, parameters: bytes | ctypes.Structure) -> None:
        assert isinstance(kernel, CudaKernel)
        with self._lock, self._current():
            if self._beside is None:
                self._beside = SideStream()
                self._frees += self._beside.frees
            self._beside.launch(kernel, turn[0], grid, kernel.take(parameters))

    def proceed(self, turn: Turn, action: Callable[[int], None]) -> None:
        if not turn[3]:
            with self._current():
                self.proceed((*turn[:3], True), action)
            return
        action(turn[0])
        self._queue.launched(turn)  # so that calls on other streams wait for it, too

    def after(self, stream: int, action: Callable[[], object]) -> None:
        turn = self._queue.order(stream)
        with self._current():
            action()
            self._queue.launched(turn)

    def copying(self, moves: Sequence[Rows]) -> Callable[[int], None]:
        return RowCopies(moves)

    def synchronize(self) -> None:
        self._queue.synchronize()
        if self._beside is not None:
            sleep_until(self._alone)

    def _alone(self) -> bool:
        assert self._beside is not None
        with self._lock, self._current():
            return self._beside.idle()

    def close(self) -> None:
        with self._lock:
            if not self._frees:
                return
            self.__dict__.pop("_some_address", None)
            self.__dict__.pop("_clock", None)
            self._frees += map(destroyer, self._queue.close())
            free_all(self._frees, self._context)


def _pinned(size: int) -> tuple[int, Callable[[], object]]:
    """Host memory that every GPU of the process can address, and what frees it."""
    cuda = driver()
    flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
    host = int(call(cuda.cuMemHostAlloc(size, flags), f"allocating {size} bytes of pinned host memory"))
    return host, lambda: call(cuda.cuMemFreeHost(host), f"freeing {size} bytes of pinned host memory")
