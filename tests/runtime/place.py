"""A world of one rank on the model of a GPU (gpu_model.py), and what a program does there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import mkernel as mk
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.gpu_libraries import DTYPES
from tests.runtime.gpu_model import Gpu
from tests.runtime.model_device import model

M, N, K = 16, 16, 16


class Place:
    """A world of one rank on the model, and what a program does there."""

    def __init__(self, world: World, gpu: Gpu, cupy: Any, torch: Any) -> None:
        self.world, self.gpu, self.cupy, self.torch = world, gpu, cupy, torch
        self.now = {"cupy": cupy.now, "torch": torch.now}

    def array(self, library: str, shape: tuple[int, int] = (M, K)) -> Any:
        if library == "cupy":
            return self.cupy.empty(shape, DTYPES["float16"])
        return self.torch.empty(shape, "float16", "cuda:0")

    def arrays(self) -> tuple[Any, Any, Any]:
        """Operands a and b of CuPy, and an array for the result."""
        return self.array("cupy"), self.array("cupy", (K, N)), self.array("cupy", (M, N))

    def use(self, library: str, stream: int) -> None:
        self.now[library].stream = stream

    def call(self, a: Any = None, b: Any = None, **options: Any) -> Any:
        a = self.array("cupy") if a is None else a
        return mk.allgather_gemm(a, self.array("cupy", (K, N)) if b is None else b, world=self.world, **options)

    def nothing(self, stream: int) -> None:
        """What comes in the order of calls, and launches nothing, as a copy of no rows."""
        self.world.backend.after(stream, lambda: None)

    def work(self, stream: int, label: str = "work") -> int:
        return self.gpu.work(stream, label)

    @property
    def last(self) -> int:
        """The node of the call that has run last."""
        return self.calls[-1][0]

    @property
    def calls(self) -> list[tuple[int, int | None]]:
        """All calls that have run, replays included, in the order in which the host has launched them: nodes, and of copies behind them."""
        found: list[tuple[int, int | None]] = []
        for label, node in self.gpu.ran:
            if label[0] == "call":
                found.append((node, None))
            elif label[0] == "copy":
                found[-1] = found[-1][0], node
        return found

    def check(self) -> None:
        """Every call of the world, and what it keeps, is ordered after the one before."""
        nodes = [node for pair in self.calls for node in pair if node is not None]
        for before, after in itertools.pairwise(nodes):
            assert self.gpu.ordered(before, after), "two calls of the world are not ordered"


def on_model(monkeypatch: pytest.MonkeyPatch, fn: Callable[[Place], Any]) -> Any:
    gpu, cupy, torch, device = model(monkeypatch)
    options = Options(target="cuda", timeout=5.0, entry_timeout=20.0, heap_bytes=1 << 20)
    return run(lambda world: fn(Place(world, gpu, cupy, torch)), 1, options, make_backend=device)[0]
