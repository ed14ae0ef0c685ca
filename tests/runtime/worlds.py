"""Worlds over a device without kernels (fake.py), one thread per rank: opening them, calling, waiting for their failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkernel.errors import Error
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan, Parameters

__all__ = ["call", "open_memory", "ranks", "surfaced", "until_failed"]


def ranks(fn: Callable[..., Any], count: int = 3, target: str = "cuda", args: tuple[Any, ...] = (), **options: Any) -> list[Any]:
    defaults = {"timeout": 600.0, "entry_timeout": 600.0, "heap_bytes": 1 << 20}  # longer than a test may take
    return run(fn, count, Options(target=target, **{**defaults, **options}), args, make_backend=FakeBackend)


def call(world: World, plan: FakePlan | None = None, stream: Any = None, **parameters: int) -> None:
    plan = plan or FakePlan()
    world.launch(world.executable(plan, lambda: plan, stream), Parameters(**parameters), stream)


def surfaced(action: Callable[[], Any]) -> Error:
    with pytest.raises(Error) as caught:
        action()
    return caught.value


def until_failed(world: World) -> None:
    """Make public calls until the failure surfaces."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        world.check()
        time.sleep(0.005)
    raise AssertionError("no failure surfaced")


def open_memory() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().count("memfd:mkernel")
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return maps, sum("memfd:mkernel" in link for link in links)
