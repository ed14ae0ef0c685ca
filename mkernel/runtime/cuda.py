"""Target cuda: one GPU of this process, through the driver. Arrays are CuPy's."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from mkernel.errors import ArgumentError, CompileError, Error
from mkernel.jit import cuda as compiler
from mkernel.jit.source import ENTRY
from mkernel.jit.spec import KernelSpec
from mkernel.memory import vmm
from mkernel.memory.driver import DriverError, call, check, current, driver, native, prompt
from mkernel.memory.memfd import SharedMemory, import_fd
from mkernel.memory.pinned import PinnedSegment, pin
from mkernel.memory.segment import Segment
from mkernel.runtime import dlpack
from mkernel.runtime.arrays import Libraries, TorchLibrary
from mkernel.runtime.device import Device, Extents, HostMemory, Kernel, TensorView
from mkernel.runtime.gpu_arrays import CupyLibrary, ForeignLibrary, GpuTorchLibrary
from mkernel.runtime.streams import LEGACY_STREAM, LaunchQueue, Turn, happened, new_event, sleep_until

__all__ = ["CudaDevice", "CudaKernel", "Gpu", "available"]

_BOX_BYTES = 128  # the swizzle's row
_NOTHING = contextlib.nullcontext()
_pointer, _size, _u32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process sees."""

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    peers: tuple[int, ...]  # ordinals whose memory it reaches directly


def available() -> list[Gpu]:
    """The GPUs that this process sees; none when there is no driver. Raises ImportError without the package cuda-bindings."""
    try:
        cuda = driver()
    except DriverError:
        return []
    number = cuda.CUdevice_attribute
    major, minor = number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    gpus = []
    count = call(cuda.cuDeviceGetCount(), "counting GPUs")
    for ordinal in range(count):
        what = f"attributes of GPU {ordinal}"
        others = (peer for peer in range(count) if peer != ordinal)
        gpus.append(
            Gpu(
                ordinal,
                bytes(call(cuda.cuDeviceGetUuid(ordinal), what).bytes).hex(),
                _name(ordinal),
                (call(cuda.cuDeviceGetAttribute(major, ordinal), what), call(cuda.cuDeviceGetAttribute(minor, ordinal), what)),
                call(cuda.cuDeviceTotalMem(ordinal), what),
                tuple(peer for peer in others if call(cuda.cuDeviceCanAccessPeer(ordinal, peer), what)),
            )
        )
    return gpus


def _name(ordinal: int) -> str:
    name: bytes = call(driver().cuDeviceGetName(128, ordinal), f"name of GPU {ordinal}")
    return name.split(b"\0")[0].decode()


# ---- kernels


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", _u32 * 3),
        ("block", _u32 * 3),
        ("shared_bytes", _u32),
        ("stream", _pointer),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", _u32),
    ]


_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE


class CudaKernel(Kernel):
    """A kernel in a GPU's memory, with everything its launches need prepared."""

    def __init__(self, spec: KernelSpec, cubin: bytes, sm_count: int, ordinal: int) -> None:
        """With the GPU's context current."""
        from cuda.core import ObjectCode

        cuda = driver()
        self.spec = spec
        self._code = ObjectCode.from_cubin(cubin, name=spec.name)  # owns the module
        self._kernel = self._code.get_kernel(ENTRY)
        what = f"loading {spec.name} on GPU {ordinal}"
        function = call(cuda.cuKernelGetFunction(self._kernel.handle), what)
        call(cuda.cuFuncLoad(function), what)  # now: a lazy load at the first launch would wait for kernels that wait for this one
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(cuda.cuFuncSetAttribute(function, attribute, spec.shared_bytes), f"{what}: {spec.shared_bytes} bytes of shared memory")
        per_sm = call(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, spec.threads, spec.shared_bytes), what)
        if per_sm < 1:
            raise CompileError(f"{spec.name}: {spec.threads} threads with {spec.shared_bytes} bytes of shared memory do not fit an SM")
        self._max_ctas = int(per_sm) * sm_count
        self.function = int(function)
        self.argument_list = (_pointer * 1)()  # the struct travels by value: the driver copies it during the launch
        self._cooperative = _Attribute(id=_COOPERATIVE, value=1)  # all CTAs are resident at once, or the launch fails
        self.config = _Config((1, 1, 1), (spec.threads, 1, 1), spec.shared_bytes, None, ctypes.pointer(self._cooperative), 1)

    def max_ctas(self) -> int:
        return self._max_ctas


# ---- the device


class CudaDevice(Device):
    """GPU ``ordinal`` of this process, through its primary context (the one CuPy and torch use).

    Makes it the calling thread's current CuPy device: what a rank allocates with CuPy is then on its own GPU.

    Raises
    ------
    Error
        No CuPy, or the GPU cannot be opened.
    """

    target = "cuda"

    def __init__(self, ordinal: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise Error(f"target cuda needs CuPy ({error}): pip install cupy-cuda13x, or cupy-cuda12x for a driver of CUDA 12") from error
        cuda = driver()
        self.ordinal = ordinal
        self.name = _name(ordinal)
        self.pci_address = _pci_address(ordinal)
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.sm_count = int(call(cuda.cuDeviceGetAttribute(attribute, ordinal), f"attributes of GPU {ordinal}"))
        self.xp = cupy
        self._context = call(cuda.cuDevicePrimaryCtxRetain(ordinal), f"opening GPU {ordinal}")
        self._frees: list[Callable[[], object]] = [lambda: call(cuda.cuDevicePrimaryCtxRelease(ordinal), f"closing GPU {ordinal}")]
        self._queue = LaunchQueue(self._context)
        self._lock = self._queue.lock
        self._cupy = CupyLibrary(self, cupy, ordinal, self._queue)
        self.libraries = Libraries(self, ForeignLibrary(self._cupy, self._queue, ordinal), [(cupy.ndarray, self._cupy)])
        self._launch_kernel = native("cuLaunchKernelEx", ctypes.POINTER(_Config), _pointer, _pointer, _pointer)
        with self._current():
            self._stream = self._new_stream()
        self._encode = functools.lru_cache(maxsize=4096)(_encode)
        cupy.cuda.Device(ordinal).use()

    def _current(self) -> Any:
        return current(self._context)

    def _new_stream(self) -> int:
        stream = _new_stream()
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

    def tensor_map(self, address: int, dtype: str, shape: Extents, strides: tuple[int, int], box: Extents, swizzled: bool = True) -> bytes:
        return self._encode(address or self._some_address, dtype, shape, strides, box, swizzled)

    @functools.cached_property
    def _some_address(self) -> int:
        """Stands for the memory of empty arrays, whose address may be 0: a tensor map needs some."""
        return self.allocate(256)

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
                cuda.cuEventDestroy(event)  # where the context is lost, others have said so

    def _passed(self, event: int) -> bool:
        with self._current():
            return happened(event)

    def _mark(self, event: Any, stream: int) -> None:
        with self._lock, self._current():
            call(driver().cuEventRecord(event, stream), "recording an event")

    def launch(self, kernel: Kernel, turn: Turn, grid: int, parameters: bytes | bytearray | memoryview | ctypes.Structure) -> None:
        assert isinstance(kernel, CudaKernel)
        struct = parameters if isinstance(parameters, ctypes.Structure) else (ctypes.c_char * len(parameters)).from_buffer_copy(parameters)
        if ctypes.sizeof(struct) != kernel.spec.parameter_bytes:
            rule = f"{kernel.spec.name} takes {kernel.spec.parameter_bytes}"
            raise ArgumentError("parameters", f"{ctypes.sizeof(struct)} bytes", rule)
        with self._lock:
            # Not self._current(): its opting out of other threads' captures costs a microsecond and nothing here needs it.
            if self._queue.is_current():
                self._launch(kernel, turn, grid, ctypes.addressof(struct))
                return
            cuda = driver()
            call(cuda.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
            try:
                self._launch(kernel, turn, grid, ctypes.addressof(struct))
            finally:
                cuda.cuCtxPopCurrent()

    def _launch(self, kernel: CudaKernel, turn: Turn, grid: int, address: int) -> None:
        kernel.argument_list[0] = address
        config = kernel.config
        config.grid[0] = grid
        config.stream = turn[0]
        launched = self._launch_kernel(config, kernel.function, kernel.argument_list, None)
        if launched:
            check(launched, f"launching {kernel.spec.name} with {grid} CTAs on GPU {self.ordinal}")
        self._queue.launched(turn)

    def synchronize(self) -> None:
        self._queue.synchronize()

    def close(self) -> None:
        with self._lock:
            if not self._frees:
                return
            self._encode.cache_clear()
            self.__dict__.pop("_some_address", None)
            self._frees += map(_destroyer, self._queue.close())
            _free_all(self._frees, self._context)


def _new_stream() -> int:
    """A stream that never waits for the legacy stream."""
    cuda = driver()
    return int(call(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), "creating a stream"))


def _pinned(size: int) -> tuple[int, Callable[[], object]]:
    """Host memory that every GPU of the process can address, and what frees it."""
    cuda = driver()
    flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
    host = int(call(cuda.cuMemHostAlloc(size, flags), f"allocating {size} bytes of pinned host memory"))
    return host, lambda: call(cuda.cuMemFreeHost(host), f"freeing {size} bytes of pinned host memory")


def _pci_address(ordinal: int) -> str:
    name: bytes = call(driver().cuDeviceGetPCIBusId(32, ordinal), f"PCI address of GPU {ordinal}")
    return name.split(b"\0")[0].decode().lower()


def _destroyer(event: Any) -> Callable[[], object]:
    return lambda: call(driver().cuEventDestroy(event), "destroying an event")


def _free_all(frees: list[Callable[[], object]], context: Any) -> None:
    """Newest first, the context itself last. What fails keeps nothing else from being freed; the first failure is raised at the end."""
    failure: DriverError | None = None
    while frees:
        free = frees.pop()
        try:
            with current(context) if frees else contextlib.nullcontext():
                free()
        except DriverError as error:
            if not error.gone:
                failure = failure or error
    if failure is not None:
        raise failure


def _encode(address: int, dtype: str, shape: Extents, strides: tuple[int, int], box: Extents, swizzled: bool) -> bytes:
    cuda = driver()
    kinds = cuda.CUtensorMapDataType
    kind = {"bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}.get(dtype)
    if kind is None:
        raise ArgumentError("dtype", dtype, "tensor maps are made of bfloat16 or float16")
    if box[0] * 2 != _BOX_BYTES:
        raise ArgumentError("box", box, f"the inner extent must be {_BOX_BYTES // 2} elements")
    # Nothing is read through the map of an empty array, but the encoder refuses extents of 0; and strides that no element uses may be odd.
    extents = [max(1, extent) for extent in shape]
    steps, least = [], extents[0] * 2
    for extent, stride in zip(extents[1:], strides, strict=True):
        steps.append(stride if extent > 1 else -(-least // 16) * 16)
        least = steps[-1] * extent
    status, tensor_map = cuda.cuTensorMapEncodeTiled(
        kind,
        3,
        address,
        [cuda.cuuint64_t(extent) for extent in extents],
        [cuda.cuuint64_t(step) for step in steps],
        [cuda.cuuint32_t(extent) for extent in box],
        [cuda.cuuint32_t(1)] * 3,
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        value = f"{dtype} {shape}, strides {strides}, box {box} at {address:#x}"
        raise ArgumentError(
            "tensor", value, f"no tensor map can describe it ({status.name})", "16-byte aligned base and strides are needed"
        )
    return ctypes.string_at(tensor_map.getPtr(), 128)


def _end_stream(stream: int) -> None:
    check(native("cuStreamSynchronize", _pointer)(stream), "waiting for copies")  # which never wait for kernels
    call(driver().cuStreamDestroy(stream), "destroying a stream")


# ---- the emulated transport's hands


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
        stream = _new_stream()
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
        self._frees += map(_destroyer, self._events)
        self._events.clear()
        _free_all(self._frees, self._context)


def _new_context(ordinal: int) -> Any:
    """Another context of a GPU, which is nobody's current one."""
    handle = _pointer()
    create = native("cuCtxCreate_v2", ctypes.POINTER(_pointer), ctypes.c_uint, ctypes.c_int)
    check(create(ctypes.byref(handle), 0, ordinal), f"opening GPU {ordinal} for the engine")
    call(driver().cuCtxPopCurrent(), "cuCtxPopCurrent")
    return driver().CUcontext(handle.value)
