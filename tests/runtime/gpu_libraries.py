"""A CuPy and a torch over the model of a GPU (gpu_model.py), as much of them as mkernel touches."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.runtime.gpu_model import ORDINAL, PER_THREAD

__all__ = ["DTYPES", "Cupy", "CupyArray", "Tensor", "Torch"]

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


class Current(threading.local):
    """A library's current stream, per thread."""

    stream = 0


class CupyArray:
    """As much of cupy.ndarray as mkernel touches."""

    def __init__(self, host: Any, made_on: int = 0) -> None:
        self.host, self.made_on = host, made_on
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self.data = types.SimpleNamespace(ptr=host.ctypes.data, device_id=ORDINAL)

    @property
    def T(self) -> CupyArray:  # noqa: N802
        return CupyArray(self.host.T, self.made_on)


class Cupy:
    """The module."""

    ndarray = CupyArray
    dtype = staticmethod(np.dtype)

    def __init__(self) -> None:
        self.now = now = Current()

        class Stream:
            null: Any
            ptds: Any

            def __init__(self, ptr: int) -> None:
                self.ptr = ptr

            @classmethod
            def from_external(cls, owner: Any) -> Stream:
                return cls(owner.__cuda_stream__()[1])

            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, self.ptr

            def __enter__(self) -> None:
                self.then, now.stream = now.stream, self.ptr

            def __exit__(self, *exc: object) -> None:
                now.stream = self.then

        Stream.null, Stream.ptds = Stream(0), Stream(PER_THREAD)
        runtime = types.SimpleNamespace(
            getDevice=lambda: ORDINAL, pointerGetAttributes=lambda address: types.SimpleNamespace(type=2, device=ORDINAL)
        )
        self.cuda = types.SimpleNamespace(get_current_stream=lambda ordinal=0: Stream(now.stream), Stream=Stream, runtime=runtime)

    def empty(self, shape: Any, dtype: Any) -> CupyArray:
        return CupyArray(_aligned(shape, dtype), self.now.stream)


class Tensor:
    """As much of torch.Tensor as mkernel touches."""

    def __init__(self, torch: Torch, host: Any, made_on: int = 0) -> None:
        self.torch, self.host, self.made_on = torch, host, made_on
        self.shape, self.device, self.layout, self.requires_grad = host.shape, f"cuda:{ORDINAL}", torch.strided, False
        self.dtype = next(name for name, kind in DTYPES.items() if kind == host.dtype)
        self.recorded: list[int] = []

    def data_ptr(self) -> int:
        return int(self.host.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.host.itemsize for step in self.host.strides)

    def element_size(self) -> int:
        return int(self.host.itemsize)

    def get_device(self) -> int:
        return ORDINAL

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.handle)

    def t(self) -> Tensor:
        return type(self)(self.torch, self.host.T, self.made_on)


class Torch(types.ModuleType):
    """The module."""

    Tensor = Tensor  # type: ignore[misc]
    bfloat16, float16, float32, float64, int32, int64 = "bfloat16", "float16", "float32", "float64", "int32", "int64"
    strided = "strided"

    def __init__(self) -> None:
        super().__init__("torch")
        self.now = now = Current()

        @contextlib.contextmanager
        def stream(new: Any) -> Iterator[None]:
            then, now.stream = now.stream, new.handle
            yield
            now.stream = then

        def handle(value: int, device: int = 0) -> Any:
            return types.SimpleNamespace(handle=value)

        self._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: now.stream)
        self.cuda = types.SimpleNamespace(stream=stream, ExternalStream=handle, default_stream=lambda ordinal: handle(0))

    @staticmethod
    def device(name: str) -> str:
        return name

    def empty(self, shape: Any, dtype: str, device: str) -> Tensor:
        return Tensor(self, _aligned(shape, DTYPES[dtype]), self.now.stream)


def _aligned(shape: Any, dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
