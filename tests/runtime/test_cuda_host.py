"""runtime/cuda/backend.py without a GPU: what the host does around a launch, over the model of streams and a driver that says yes."""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel.errors import ArgumentError
from mkernel.jit.spec import KernelSpec
from mkernel.memory import driver as real_driver
from mkernel.memory.driver import DriverError
from mkernel.runtime.cuda import backend as cuda
from mkernel.runtime.cuda import gpus, streams
from mkernel.runtime.cuda.backend import CudaBackend
from mkernel.runtime.cuda.kernel import Config, CudaKernel
from tests.runtime.gpu_libraries import Cupy, CupyArray, Tensor, Torch
from tests.runtime.gpu_model import CONTEXT, LEGACY, PER_THREAD, Gpu
from tests.runtime.model_device import model

REFUSED = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE


class Driver:
    """The bindings: everything succeeds; streams, events and graphs are the model's."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.said = gpu, list[str]()

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.gpu, name):
            return getattr(self.gpu, name)
        if not name.startswith("cu"):
            return types.SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16, CU_STREAM_NON_BLOCKING=1)
        answers = {"cuStreamCreate": lambda flags: (0, self.gpu.stream()), "cuDevicePrimaryCtxRetain": lambda ordinal: (0, CONTEXT)}

        def function(*arguments: Any) -> tuple[Any, ...]:
            self.said.append(name)
            return answers[name](*arguments) if name in answers else (0, b"name" if "Get" in name and "Attribute" not in name else 132)

        return function


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaBackend, Gpu, Cupy, Torch]:
    gpu, cupy, torch, _ = model(monkeypatch)
    driver = Driver(gpu)
    cupy.cuda.Device = lambda ordinal: types.SimpleNamespace(use=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]

    def launch(config: Any, function: Any, arguments: Any, extra: None) -> int:
        if config._obj.grid[0] > 132:
            return REFUSED
        gpu.work(config._obj.stream, ("call", arguments._obj[0]))
        return 0

    def native(name: str, *kinds: Any) -> Callable[..., int]:
        return launch if name == "cuLaunchKernelEx" else lambda *arguments: 0

    for module in (cuda, gpus):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "native", native)
    for module in (cuda, real_driver):
        monkeypatch.setattr(module, "current", streams.current)
    monkeypatch.setattr(real_driver, "driver", lambda: driver)
    return CudaBackend(0), gpu, cupy, torch


def kernel() -> CudaKernel:
    made = object.__new__(CudaKernel)
    made.spec = KernelSpec("null", (), 128, 0, 16)
    made.function, made.argument_list = 1, (ctypes.c_void_p * 1)()
    made.config = Config((1, 1, 1), (128, 1, 1), 0, None, None, 0)
    return made


def test_launches_are_ordered(parts: tuple[CudaBackend, Gpu, Cupy, Torch]) -> None:
    device, gpu, _, _ = parts
    streams = [gpu.stream() for _ in range(3)]
    for stream in (*streams, *streams, LEGACY):
        device.launch(kernel(), device.order(device.stream(stream)), 4, bytes(16))
    nodes = [node for _, node in gpu.ran]
    assert len(nodes) == 7
    assert all(gpu.ordered(before, after) for before, after in itertools.pairwise(nodes))
    device.synchronize()


def test_private_memory_is_written_at_once(parts: tuple[CudaBackend, Gpu, Cupy, Torch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes may go, and kernels may run, when it returns."""
    device, said = parts[0], list[tuple[Any, ...]]()
    monkeypatch.setattr(cuda, "native", lambda name, *kinds: lambda *arguments: said.append((name, *arguments)) or 0)
    device.write(4096, b"12345678")
    (copied, address, data, size, stream), waited = said
    assert (copied, address, data, size) == ("cuMemcpyHtoDAsync_v2", 4096, b"12345678", 8)
    assert waited == ("cuStreamSynchronize", stream)


def test_refused_launches(parts: tuple[CudaBackend, Gpu, Cupy, Torch]) -> None:
    device, gpu, _, _ = parts
    with pytest.raises(DriverError, match="launching null with 133 CTAs"):
        device.launch(kernel(), device.order(LEGACY), 133, bytes(16))
    with pytest.raises(ArgumentError, match="null takes 16"):
        device.launch(kernel(), device.order(LEGACY), 1, bytes(15))
    assert gpu.ran == []


def test_the_context_is_asked_for_once(parts: tuple[CudaBackend, Gpu, Cupy, Torch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Per turn. Where it is not the thread's own it is made so for the launch, and the thread gets its own back, also after a refusal."""
    device, gpu, _, _ = parts
    stream, driver = gpu.stream(), cuda.driver()
    device.launch(kernel(), device.order(stream), 4, bytes(16))
    driver.said.clear()
    gpu.calls.clear()
    device.launch(kernel(), device.order(stream), 4, bytes(16))
    assert gpu.calls == ["cuCtxGetCurrent", "cuStreamGetCaptureInfo_v2", "cuStreamGetId", "cuEventRecord"]
    assert driver.said == []

    def another(address: int) -> int:
        ctypes.c_uint64.from_address(address).value = CONTEXT + 1
        return 0

    monkeypatch.setattr(device._queue, "_get_context", another)
    device.launch(kernel(), device.order(stream), 4, bytes(16))
    assert driver.said == ["cuCtxPushCurrent", "cuCtxPopCurrent"]
    with pytest.raises(DriverError):
        device.launch(kernel(), device.order(stream), 133, bytes(16))
    assert driver.said == ["cuCtxPushCurrent", "cuCtxPopCurrent"] * 2


def test_parameters_of_the_right_size(parts: tuple[CudaBackend, Gpu, Cupy, Torch]) -> None:
    """A struct's type is checked once per kernel; another type is checked again, and so are bytes."""

    class Right(ctypes.Structure):
        _fields_ = [("values", ctypes.c_uint64 * 2)]

    class Wrong(ctypes.Structure):
        _fields_ = [("values", ctypes.c_uint64 * 3)]

    device, gpu, _, _ = parts
    one, other = kernel(), kernel()
    other.spec = KernelSpec("other", (), 128, 0, 24)
    for _ in range(2):
        device.launch(one, device.order(LEGACY), 1, Right())
        for launched, parameters in ((one, Wrong()), (other, Right()), (one, bytes(24))):
            with pytest.raises(ArgumentError, match="takes"):
                device.launch(launched, device.order(LEGACY), 1, parameters)
    device.launch(other, device.order(LEGACY), 1, Wrong())
    assert len(gpu.ran) == 3


def test_streams_by_any_name(parts: tuple[CudaBackend, Gpu, Cupy, Torch]) -> None:
    device, gpu, cupy, torch = parts
    stream = gpu.stream()
    for name in (stream, type("Handle", (int,), {})(stream), cupy.cuda.Stream(stream), types.SimpleNamespace(cuda_stream=stream)):
        assert device.stream(name) == stream
    for name in (None, 0, LEGACY, cupy.cuda.Stream.null):
        assert device.stream(name) == LEGACY
    assert device.stream(2) == PER_THREAD
    cupy.now.stream, torch.now.stream = stream, gpu.stream()
    assert device.stream(None) == stream
    assert device.libraries[Tensor].stream() == torch.now.stream
    for bad in ("default", True, 1.5):
        with pytest.raises(ArgumentError, match="must be None, an integer or an object with __cuda_stream__"):
            device.stream(bad)


def test_arrays_by_their_library(parts: tuple[CudaBackend, Gpu, Cupy, Torch]) -> None:
    device, _, cupy, torch = parts
    array, tensor = cupy.empty((4, 8), np.float16), torch.empty((4, 8), "float16", "cuda:0")
    for one in (array, tensor):
        view = device.view(one)
        assert (view.address, view.shape, view.strides, view.dtype) == (one.host.ctypes.data, (4, 8), (16, 2), "float16")
        assert device.key(one) == device.key(one) != device.key(one.t() if one is tensor else one.T)
    assert isinstance(device.empty((2, 3), "bfloat16"), CupyArray)
    array.data.device_id = 1
    with pytest.raises(ArgumentError, match="is on GPU 1, this rank works on GPU 0"):
        device.view(array)
    with pytest.raises(ArgumentError, match="is not in GPU memory"):
        device.view(np.zeros(3))
    with pytest.raises(ArgumentError, match="is no GPU array"):
        device.view("an array")


def test_close_gives_everything_back(parts: tuple[CudaBackend, Gpu, Cupy, Torch]) -> None:
    device, gpu, _, _ = parts
    for _ in range(40):
        device.launch(kernel(), device.order(gpu.stream()), 4, bytes(16))
    gpu.slow()
    device._queue.hold(LEGACY, object())
    gpu.pending.clear()
    device.close()
    device.close()
    assert gpu.events == {}
