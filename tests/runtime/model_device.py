"""A device of target cuda over the model of a GPU (gpu_model.py), with CuPy and torch (gpu_libraries.py) in their places."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mkernel.memory import driver as real_driver
from mkernel.runtime.arrays.libraries import Libraries, TorchLibrary
from mkernel.runtime.cuda import backend as cuda
from mkernel.runtime.cuda import events, queries, streams
from mkernel.runtime.cuda.libraries import CupyLibrary, ForeignLibrary, GpuTorchLibrary
from mkernel.runtime.cuda.streams import LaunchQueue, Turn
from tests.runtime.fake import FakeBackend
from tests.runtime.gpu_libraries import Cupy, CupyArray, Torch
from tests.runtime.gpu_model import CONTEXT, ORDINAL, Gpu

__all__ = ["ModelBackend", "model"]


class ModelBackend(FakeBackend):
    """A device of target cuda with the real order of launches and the real libraries over the model; its kernels do nothing."""

    ROOM = 132  # SMs
    gpu: Gpu  # set by ``model``
    cupy: Cupy

    def __init__(self, target: str, device: int | str, rank: int) -> None:
        super().__init__(target, device, rank)
        self.xp = self.cupy
        self.queue = LaunchQueue(CONTEXT)
        self.cupy_library = CupyLibrary(self, self.cupy, ORDINAL, self.queue)
        self.libraries = Libraries(self, ForeignLibrary(self.cupy_library, self.queue, ORDINAL), [(CupyArray, self.cupy_library)])
        self.launched: list[int] = []  # a number for each launch

    torch_library: Callable[..., TorchLibrary] = lambda self, torch: GpuTorchLibrary(self, torch, ORDINAL, self.queue)
    stream: Callable[..., int] = cuda.CudaBackend.stream

    @property
    def _cupy(self) -> CupyLibrary:
        return self.cupy_library

    def key(self, array: Any) -> Any:
        return self.libraries[type(array)].key(array)

    def view(self, array: Any) -> Any:
        return self.libraries[type(array)].view(array)

    def capturing(self, stream: int) -> bool:
        return self.queue.capturing(stream)

    def join(self, ctas: int) -> None:
        self.queue.join(ctas, self.ROOM)

    def order(self, stream: int) -> Turn:
        return self.queue.order(stream)

    def launch(self, kernel: Any, turn: Any, grid: int, parameters: Any) -> None:
        self.launched.append(self.gpu.work(turn[0], ("call", len(self.launched))))
        self.queue.launched(turn)

    def proceed(self, turn: Any, action: Callable[[int], None]) -> None:
        action(turn[0])
        self.queue.launched(turn)

    def copying(self, moves: Any) -> Callable[[Any], None]:
        return lambda stream: self.launched.append(self.gpu.work(stream, ("copy", len(self.launched))))

    def after(self, stream: int, action: Callable[[], object]) -> None:
        turn = self.queue.order(stream)
        action()
        self.queue.launched(turn)

    def release(self) -> None:
        self.queue.release()

    def synchronize(self) -> None:
        self.queue.synchronize()

    def close(self) -> None:
        for event in self.queue.close():
            self.gpu.cuEventDestroy(event)
        super().close()


def model(monkeypatch: Any) -> tuple[Gpu, Cupy, Torch, type[ModelBackend]]:
    """A GPU without a GPU: the driver's functions in mkernel's modules, CuPy and torch."""
    gpu, cupy, torch = Gpu(), Cupy(), Torch()

    @contextlib.contextmanager
    def current(context: Any) -> Iterator[None]:
        yield

    for name, value in (("prompt", gpu.prompt), ("driver", lambda: gpu), ("current", current)):
        for module in (events, queries, streams):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(real_driver, "driver", lambda: gpu)
    monkeypatch.setattr(streams, "_joined", [])  # worlds of tests that failed, or were made to, are never closed
    monkeypatch.setitem(sys.modules, "torch", torch)
    return gpu, cupy, torch, type("Device", (ModelBackend,), {"gpu": gpu, "cupy": cupy})
