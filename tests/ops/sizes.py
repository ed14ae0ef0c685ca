"""What tests of calls of any size share: a device without kernels that counts what is asked of it, and calls on arrays of any size."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mkernel as mk
from mkernel import abi
from mkernel.ops import allgather_gemm, reduce
from mkernel.planner.row_classes import class_of
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.ops.body import Case, aligned, topology
from tests.runtime.fake import FakeBackend, FakeKernel, Parameters

__all__ = ["OPS", "Ahead", "Caller", "Launched", "counted", "draw_case", "draw_rows", "mismatch_of", "ranks", "wrongly_told"]

OPS = (
    ("allgather_gemm", None),
    ("gemm_reduce_scatter", None),
    ("gemm_allreduce", None),
    ("gemm_allreduce", "one_shot"),
    ("gemm_allreduce", "two_shot"),
)
SMS = 16


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch: the kernel and its parameters, as a graph would keep them."""

    kernel: Any
    grid: int
    raw: bytes

    @property
    def parameters(self) -> Any:
        of = allgather_gemm.Parameters if self.kernel.spec.name == "allgather_gemm" else reduce.Parameters
        return of.from_buffer_copy(self.raw)

    @property
    def chosen(self) -> dict[str, Any]:
        """All that is chosen for a call, and not where its arrays or the staging area lie: names of fields and their values."""
        parameters, told = self.parameters, {}
        for name, *_ in type(parameters)._fields_:
            if name not in ("world", "a", "c", "send_offset") and not name.endswith("_map"):
                value = getattr(parameters, name)
                told[name] = value if isinstance(value, int) else bytes(value)
        header = parameters.world
        return told | {name: getattr(header, name) for name in ("problem", "rows", "schedule", "check")} | {"grid": self.grid}


class _Kernel(FakeKernel):
    def max_ctas(self) -> int:
        return SMS


class Ahead(FakeBackend):
    """A device of target cuda without kernels, which are compiled ahead. Every launch enters and leaves, as sync.cuh does."""

    compiles_ahead = True

    def __init__(self, target: str, device: int | str, rank: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.launched: list[Launched] = []
        super().__init__(target, device, rank)
        self.sm_count = SMS

    def compile(self, spec: Any) -> None:
        self.counts["compile"] += 1

    def load(self, spec: Any) -> _Kernel:
        self.counts["load"] += 1
        return _Kernel(spec)

    def allocate(self, size: int) -> int:
        self.counts["allocate"] += 1
        return super().allocate(size)

    def allocate_host(self, size: int, *, shared: bool = False) -> Any:
        self.counts["allocate_host"] += 1
        return super().allocate_host(size, shared=shared)

    def segment(self, *args: Any, **options: Any) -> Any:
        self.counts["segment"] += 1
        return super().segment(*args, **options)

    def synchronize(self) -> None:
        self.counts["synchronize"] += 1
        super().synchronize()

    def launch(self, kernel: Any, turn: Any, grid: int, parameters: ctypes.Structure) -> None:
        self.launched.append(Launched(kernel, grid, bytes(parameters)))
        super().launch(kernel, turn, grid, Parameters(world=abi.World.from_buffer_copy(parameters)))  # the fake's kernel, of every op


def ranks(fn: Callable[..., Any], world: str, *args: Any, device: Any = Ahead, **options: Any) -> list[Any]:
    """``fn(world, *args)`` on every rank of a world of such devices."""
    shape = topology(world)
    defaults = {"target": "cuda", "timeout": 100.0, "entry_timeout": 100.0, "heap_bytes": 256 << 20}
    return run(fn, shape.size, Options(ranks_per_node=shape.ranks_per_node, **{**defaults, **options}), args, make_backend=device)


@contextmanager
def counted(world: World) -> Iterator[collections.Counter[str]]:
    """What is asked meanwhile of the device, of the heap and of the control channel, on this rank. Then it is complete."""
    found: collections.Counter[str] = collections.Counter()
    targets = [(world._control, "collective", "collective"), (world.heap, "allocate", "heap")]
    if not isinstance(world.backend, Ahead):  # which counts itself
        targets += [(world.backend, name, name) for name in ("compile", "load", "allocate", "allocate_host", "segment", "synchronize")]

    def wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            found[name] += 1
            return function(*args, **options)

        return count

    before = collections.Counter(getattr(world.backend, "counts", {}))
    for owner, name, told in targets:
        setattr(owner, name, wrapped(getattr(owner, name), told))
    try:
        yield found
    finally:
        for owner, name, _ in targets:
            delattr(owner, name)
        found.update(collections.Counter(getattr(world.backend, "counts", {})) - before)


def draw_case(rng: np.random.Generator, op: str, algorithm: str | None, columns: int = 1024, depth: int = 64) -> Case:
    """Any dtype, layout, partials and extents."""
    n, k = (8 * int(2 ** rng.uniform(0, math.log2(most // 8))) for most in (columns, depth))
    partials = str(rng.choice(("output", "float32"))) if op != "allgather_gemm" else "output"
    return Case(str(rng.choice(("bfloat16", "float16"))), k, n, bool(rng.integers(2)), op=op, partials=partials, algorithm=algorithm)


def draw_rows(rng: np.random.Generator, most: int) -> int:
    """None, any number, and those at the ends of classes, up to ``most``."""
    rows, how = int(2 ** rng.uniform(0, math.log2(most + 1))), rng.random()
    if how < 0.1:
        return 0
    end = class_of(rows)
    return min(most, end + int(rng.integers(2)) if how < 0.4 else rows)


class Caller:
    """One rank's arrays, of which calls of fewer rows use a part. What is in them does not matter. Collective."""

    def __init__(self, world: World, case: Case, most: int) -> None:
        self.world, self.case, self.most = world, case, most
        size = (case.rows_of_a(most, world.size) * case.k,)
        self.planes = {True: world.empty(size, case.dtype), False: aligned(size, case.dtype)}
        outer, inner = (case.k, case.n) if case.row_major else (case.n, case.k)
        b = aligned((outer, inner), case.dtype)
        self.b: NDArray[Any] = b if case.row_major else b.T
        self.out = aligned((case.rows_of_c(most, world.size), case.n), case.dtype)

    def a(self, rows: int, *, on_heap: bool = False) -> NDArray[Any]:
        rows_of_a = self.case.rows_of_a(rows, self.world.size)
        plane: NDArray[Any] = self.planes[on_heap][: rows_of_a * self.case.k].reshape(rows_of_a, self.case.k)
        return plane

    def plan(self, rows: int, max_rows: int | None = None, **more: Any) -> Any:
        """``mk.plan`` for calls of up to ``max_rows``, both counted as ``call`` does."""
        most = None if max_rows is None else self.case.rows_of_a(max_rows, self.world.size)
        return mk.plan(self.case.op, self.a(rows), self.b, world=self.world, max_rows=most, **self.case.options, **more)

    def call(self, rows: int, *, on_heap: bool = False, given: bool = False, planned: Any = None, split: mk.Split | None = None) -> Any:
        """One call; ``rows``: of the op's plan (M / W, or M of an all-reduce)."""
        a, out = self.a(rows, on_heap=on_heap), self.out[: self.case.rows_of_c(rows, self.world.size)] if given else None
        if planned is not None:
            return planned.run(a, self.b, out=out)
        return getattr(mk, self.case.op)(a, self.b, world=self.world, out=out, split=split, **self.case.options)


def mismatch_of(world: World, error: Exception, calls: int) -> tuple[str, bool]:
    """What a rank was told, and whether it had launched as many calls: if so, it has asked for something, and the others say what."""
    return f"{type(error).__name__}: {error}", world.call_number >= calls


# "rank 1 asked for TITLE", "rank 1 has launched TITLE", "rank 1 asked for a barrier after 7 calls, the last of them TITLE"
_TOLD = re.compile(r"rank (\d+) (?:asked for|has launched) (?:[^;]*? the last of them )?(.*?)(?=; rank|, but rank|$)")

_STILL, _CALL = re.compile(r"rank (\d+) was still in call (\d+),"), re.compile(r" entered call (\d+) ")


def wrongly_told(told: list[tuple[str, bool]], asked: list[str]) -> list[str]:
    """What is wrong with what ranks were told, where each asked for the beginning of a plan's title."""
    wrong, heard = [], set[int]()
    for rank, (text, launched) in enumerate(told):
        named = {int(who): what for who, what in _TOLD.findall(text)}
        # A kernel may be asked to leave before it has come to the call that ranks disagree in.
        still, found = {int(who): int(call) for who, call in _STILL.findall(text)}, _CALL.search(text)
        heard |= named.keys() | still.keys()
        false = [who for who, what in named.items() if not what.startswith(asked[who])]
        false += [who for who, call in still.items() if found is None or call >= int(found[1])]
        if not text.startswith("MismatchError") or false or (launched and rank not in named.keys() | still.keys()):
            wrong.append(f"rank {rank}: something else of {false}, or nothing of itself: {text}")
    # Others wait for what a rank asked for, but not long: on a busy machine one of them may not hear it.
    missing = {rank for rank, (_, launched) in enumerate(told) if launched} - heard
    return [*wrong, *([f"nobody heard of {missing}"] if missing else [])]
