"""Libraries of arrays on a GPU: CuPy's, torch's, and whatever speaks DLPack or ``__cuda_array_interface__``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.errors import ArgumentError
from mkernel.runtime.arrays import dlpack
from mkernel.runtime.arrays.libraries import Library, TorchLibrary
from mkernel.runtime.arrays.views import TensorView, view_of
from mkernel.runtime.cuda.queries import LEGACY_STREAM, PER_THREAD_STREAM
from mkernel.runtime.cuda.streams import LaunchQueue

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend

__all__ = ["CupyLibrary", "ForeignLibrary", "GpuTorchLibrary"]

_STREAM_OBJECTS = 64  # of torch or CuPy, remembered by handle
_GPU_MEMORY = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
_DLPACK_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
_NAMES = {"<f2": "float16", "<f4": "float32", "<f8": "float64", "<i4": "int32", "<i8": "int64"}  # of __cuda_array_interface__


class _Streamed(Library):
    """A library of GPU arrays that are in use on its current stream, ``stream()``, and that has objects for streams of others."""

    _queue: LaunchQueue
    _streams: dict[int, Any]

    def _object(self, stream: int) -> Any:
        """The library's object for a stream that somebody else owns."""
        found = self._streams.get(stream)
        if found is None:
            if len(self._streams) >= _STREAM_OBJECTS:
                self._streams.clear()
            found = self._streams[stream] = self._new_object(stream)
        return found

    def _new_object(self, stream: int) -> Any:
        raise NotImplementedError

    def _keep(self, array: Any, stream: int) -> None:
        """Keep an array's memory until what is on ``stream`` now has ended."""
        raise NotImplementedError

    def enter(self, array: Any, stream: int) -> None:
        self._queue.follow(stream, self.stream())

    def leave(self, array: Any, stream: int, wait: bool) -> None:
        mine = self.stream()
        if mine == stream:
            return
        if wait:
            self._queue.lead(stream, mine)
        else:
            self._keep(array, stream)


class CupyLibrary(_Streamed):
    """CuPy's arrays on one GPU, on CuPy's current stream, in CuPy's memory pool."""

    def __init__(self, device: Backend, cupy: Any, ordinal: int, queue: LaunchQueue) -> None:
        self.device, self._cupy, self._ordinal, self._queue = device, cupy, ordinal, queue
        self._dtypes = {name: cupy.dtype(dlpack.numpy_dtype(name)) for name in ("bfloat16", "float16", "float32", "int32", "int64")}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._current_stream = cupy.cuda.get_current_stream
        self._streams = {}
        self.key = self._key

    @staticmethod
    def _key(array: Any) -> Hashable:
        memory = array.data
        return memory.ptr, array.shape, array.strides, array.dtype, memory.device_id

    def view(self, array: Any) -> TensorView:
        memory = array.data
        return self.seen(array, (memory.ptr, array.shape, array.strides, array.dtype, memory.device_id))

    def seen(self, array: Any, key: Any) -> TensorView:
        address, shape, strides, dtype, ordinal = key
        if ordinal != self._ordinal:
            raise elsewhere(array, ordinal, self._ordinal)
        return view_of((address, shape, strides, self._names.get(dtype) or dtype.name, True))

    def stream(self) -> int:
        return self._current_stream(self._ordinal).ptr or LEGACY_STREAM

    def empty(self, shape: Sequence[int], dtype: str, stream: int) -> Any:
        """A new CuPy array. Raises ArgumentError in a capture: CuPy's pool would reuse the memory while replays still write to it."""
        if self._queue.capturing(stream):
            rule = "the stream is being captured, and CuPy's memory pool does not know for how long replays need a result"
            raise ArgumentError("out", None, rule, "pass out=, an array that lives as long as the graph")
        kind = self._dtypes[dtype]
        if self._cupy.cuda.runtime.getDevice() != self._ordinal:
            with self._cupy.cuda.Device(self._ordinal):
                return self._empty(shape, kind, stream)
        return self._empty(shape, kind, stream)

    def _empty(self, shape: Sequence[int], kind: Any, stream: int) -> Any:
        if stream == self.stream():
            return self._cupy.empty(tuple(shape), dtype=kind)
        with self._object(stream):
            return self._cupy.empty(tuple(shape), dtype=kind)

    def _new_object(self, stream: int) -> Any:
        kind = self._cupy.cuda.Stream
        if stream in (LEGACY_STREAM, PER_THREAD_STREAM):
            return kind.null if stream == LEGACY_STREAM else kind.ptds
        if hasattr(kind, "from_external"):
            return kind.from_external(_Borrowed(stream))
        return self._cupy.cuda.ExternalStream(stream, self._ordinal)  # CuPy 13

    def _keep(self, array: Any, stream: int) -> None:
        self._queue.hold(stream, array)


@dataclasses.dataclass(frozen=True, slots=True)
class _Borrowed:
    """A stream by its handle, for libraries that ask by protocol."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class GpuTorchLibrary(_Streamed, TorchLibrary):
    """torch's tensors on one GPU, on torch's current stream, in torch's memory pools."""

    def __init__(self, device: Backend, torch: Any, ordinal: int, queue: LaunchQueue) -> None:
        super().__init__(device, torch, f"cuda:{ordinal}")
        self._ordinal, self._queue = ordinal, queue
        # What torch's own compiler calls; the public way makes an object each time.
        self._current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or self._ask
        self._streams = {}

    def _ask(self, ordinal: int) -> int:
        return int(self._torch.cuda.current_stream(ordinal).cuda_stream)

    def stream(self) -> int:
        return self._current_stream(self._ordinal) or LEGACY_STREAM

    def empty(self, shape: Sequence[int], dtype: str, stream: int) -> Any:
        """A new tensor; in a capture by torch, its memory comes from the graph's pool."""
        if stream == self.stream():
            return super().empty(shape, dtype, stream)
        with self._torch.cuda.stream(self._object(stream)):
            return super().empty(shape, dtype, stream)

    def _new_object(self, stream: int) -> Any:
        cuda = self._torch.cuda
        return cuda.default_stream(self._ordinal) if stream == LEGACY_STREAM else cuda.ExternalStream(stream, device=self._ordinal)

    def _keep(self, array: Any, stream: int) -> None:
        if not self._queue.capturing(stream):  # what a graph uses is kept by whoever keeps the graph
            array.record_stream(self._object(stream))


class ForeignLibrary(Library):
    """Arrays of any library that speaks DLPack or ``__cuda_array_interface__``. Results come as CuPy's."""

    one_stream = False

    def __init__(self, cupy: CupyLibrary, queue: LaunchQueue, ordinal: int) -> None:
        self.device, self._results, self._queue, self._ordinal = cupy.device, cupy, queue, ordinal
        self._attributes = cupy._cupy.cuda.runtime.pointerGetAttributes
        self.key = self.view

    def stream(self) -> int:
        return self._results.stream()

    def empty(self, shape: Sequence[int], dtype: str, stream: int) -> Any:
        return self._results.empty(shape, dtype, stream)

    def view(self, array: Any) -> TensorView:
        if _speaks_dlpack(array):
            return self._from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return self._from_interface(array)
        raise ArgumentError(
            "array",
            type(array).__name__,
            "is no GPU array: neither DLPack nor __cuda_array_interface__",
            "cupy.asarray copies it to the GPU",
        )

    def enter(self, array: Any, stream: int) -> None:
        """By DLPack the producer makes the stream wait itself; the interface names its stream."""
        if not _speaks_dlpack(array):
            producer = _stream_of(array)
            if producer is not None:
                self._queue.follow(stream, producer)
        elif not self._queue.capturing(stream):
            self._export(array, stream)

    def leave(self, array: Any, stream: int, wait: bool) -> None:
        consumer = None if _speaks_dlpack(array) else _stream_of(array)
        if wait and consumer is not None:
            self._queue.lead(stream, consumer)
        self._queue.hold(stream, array)

    def _export(self, array: Any, stream: int) -> object:
        try:
            return dlpack.export(array, stream=stream)
        except (BufferError, RuntimeError) as error:
            raise ArgumentError("array", type(array).__name__, f"does not give its memory away: {error}") from error

    def _from_dlpack(self, array: Any) -> TensorView:
        kind, ordinal = array.__dlpack_device__()
        if kind not in _DLPACK_GPU:
            raise ArgumentError("array", type(array).__name__, "is not in GPU memory", f"copy it to GPU {self._ordinal} (cupy.asarray)")
        if ordinal != self._ordinal:
            raise elsewhere(array, ordinal, self._ordinal)
        view = dlpack.capsule_view(self._export(array, -1))  # -1: no synchronization, see ``enter``
        return view._replace(writable=False) if dlpack.immutable(array) else view

    def _from_interface(self, array: Any) -> TensorView:
        interface = array.__cuda_array_interface__
        kind = interface["typestr"]
        if kind not in _NAMES:
            raise ArgumentError("array", kind, f"must be one of {', '.join(_NAMES)}", "bfloat16 arrays are taken from CuPy or by DLPack")
        shape = tuple(interface["shape"])
        strides = interface.get("strides") or _contiguous(shape, int(kind[2:]))
        address, read_only = interface["data"]
        address = address or 0
        if math.prod(shape) and (ordinal := self._ordinal_of(address)) != self._ordinal:
            raise elsewhere(array, ordinal, self._ordinal)
        return TensorView(address, shape, tuple(strides), _NAMES[kind], writable=not read_only)

    def _ordinal_of(self, address: int) -> int:
        with self._queue.here():  # by the runtime: cuPointerGetAttribute of cuda.bindings 13 said 0 of memory on GPU 1
            found = self._attributes(address)
        if found.type not in _GPU_MEMORY:
            raise ArgumentError("array", hex(address), "is not in GPU memory", f"copy it to GPU {self._ordinal} (cupy.asarray)")
        return int(found.device)


def elsewhere(array: Any, ordinal: int, here: int) -> ArgumentError:
    """The error for an array on another GPU."""
    rule = f"is on GPU {ordinal}, this rank works on GPU {here}"
    return ArgumentError("array", type(array).__name__, rule, f"allocate inside `with cupy.cuda.Device({here}):`")


def _speaks_dlpack(array: Any) -> bool:
    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")


def _stream_of(array: Any) -> int | None:
    """The stream that ``__cuda_array_interface__`` names, to be waited for; None: there is nothing to wait for."""
    stream = array.__cuda_array_interface__.get("stream")
    return None if stream is None else int(stream) or LEGACY_STREAM


def _contiguous(shape: Sequence[int], item: int) -> tuple[int, ...]:
    strides, step = [], item
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
