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
from tests.runtime.model_device import ModelBackend, model

M, N, K = 16, 16, 16


class Place:
    """Worlds of one rank on the model, and what a program does there: ``world`` is the first of those that are open."""

    def __init__(self, worlds: list[World], gpu: Gpu, cupy: Any, torch: Any) -> None:
        self.worlds, self.gpu, self.cupy, self.torch = worlds, gpu, cupy, torch
        self.ended = 0  # so many calls had ended when a world was closed last, which waits for its own
        self.now = {"cupy": cupy.now, "torch": torch.now}

    @property
    def world(self) -> World:
        return self.worlds[0]

    def array(self, library: str, shape: tuple[int, int] = (M, K)) -> Any:
        if library == "cupy":
            return self.cupy.empty(shape, DTYPES["float16"])
        return self.torch.empty(shape, "float16", "cuda:0")

    def arrays(self) -> tuple[Any, Any, Any]:
        """Operands a and b of CuPy, and an array for the result."""
        return self.array("cupy"), self.array("cupy", (K, N)), self.array("cupy", (M, N))

    def use(self, library: str, stream: int) -> None:
        self.now[library].stream = stream

    def call(self, a: Any = None, b: Any = None, world: World | None = None, **options: Any) -> Any:
        a = self.array("cupy") if a is None else a
        return mk.allgather_gemm(a, self.array("cupy", (K, N)) if b is None else b, world=world or self.world, **options)

    def close(self, world: World) -> None:
        self.worlds.remove(world)
        world.close()
        self.ended = len(self.calls)

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
        """Every call, and what it keeps, is ordered after the one before: of one world, or of worlds that do not fit beside each other."""
        nodes = [node for pair in self.calls[self.ended :] for node in pair if node is not None]
        for before, after in itertools.pairwise(nodes):
            assert self.gpu.ordered(before, after), "two calls are not ordered"


def on_model(monkeypatch: pytest.MonkeyPatch, fn: Callable[[Place], Any], worlds: int = 1, sms: int = ModelBackend.ROOM) -> Any:
    """``worlds``: so many, each of which takes ``sms`` SMs, and all unless given."""
    gpu, cupy, torch, device = model(monkeypatch)
    options = Options(target="cuda", timeout=5.0, entry_timeout=20.0, heap_bytes=1 << 20)

    def opened(*others: World) -> Any:
        if len(others) < worlds:
            return run(lambda world: opened(*others, world), 1, options, make_backend=device)[0]
        for world in others if worlds > 1 else ():
            world.backend.join(sms)
        return fn(Place(list(others), gpu, cupy, torch))

    return opened()
