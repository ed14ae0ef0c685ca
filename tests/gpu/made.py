"""Calls of any sizes on one rank: made with fresh operands, timed, and checked element by element. What ``sizes.py`` works with."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import mkernel as mk
from mkernel.bench.peers import gather
from tests.gpu.counters import Counters
from tests.gpu.machines import GpuMachine, Machine
from tests.programs.calls import AllGatherGemm, AllReduce, Array, Gemm, ReduceScatter
from tests.programs.memory import KINDS, NAN, pitch

__all__ = ["BATCH", "CONFIGS", "OPS", "Config", "Made", "NewSizes", "Site", "microseconds", "new_sizes"]

OPS: tuple[type[Gemm], ...] = (AllGatherGemm, ReduceScatter, AllReduce)
BATCH = 10  # sizes between two waits, so that the queue is never full


@dataclasses.dataclass(frozen=True)
class Config:
    """How large everything is. ``max_rows``: of a's, in every stage but ``grow``."""

    n: int
    k: int
    max_rows: int
    calls: int
    checked: int  # more calls, between which results are checked
    pieces: int  # calls whose pieces are timed
    heap: int
    grow_n: int
    grow_k: int
    grow_step: int
    grow_heap: int
    loop: int
    turns: int  # of either order
    graphs: int
    replays: int


CONFIGS = {
    "cuda": Config(4096, 4096, 16384, 200, 100, 60, 4 << 30, 512, 16384, 64, 1 << 30, 500, 5, 20, 60),
    "cpu": Config(64, 64, 300, 12, 12, 6, 16 << 20, 16, 256, 16, 512 << 10, 12, 2, 4, 6),
}


@dataclasses.dataclass(eq=False, slots=True)
class Made:
    """One call with its arrays. ``words``: (rows, pitch) of a, b and out, as 16-bit words."""

    call: Gemm
    seeds: tuple[int, int]
    words: dict[str, Any]
    arrays: dict[str, Any]
    saved: Any

    def operands(self) -> list[Any]:
        return [self.arrays["a"], self.arrays["b"]]


class Site:
    """A world with its machine, and how calls are made and checked there. Every rank draws the same numbers."""

    def __init__(self, world: Any, options: argparse.Namespace, counters: Counters, stage: str) -> None:
        self.world, self.config, self.counters = world, CONFIGS[world.target], counters
        self.machine = (GpuMachine if world.target == "cuda" else Machine)(world)
        self.topology = world.topology
        self.rng = random.Random(f"{stage} {options.seed}")
        self.libraries = ("cupy", "torch", "mixed") if self.machine.torch is not None else ("cupy",)
        self._made = 0
        counters.watch(world)

    @property
    def speaks(self) -> bool:
        return bool(self.world.rank == 0)

    def call(self, op: type[Gemm], rows: int, n: int = 0, k: int = 0) -> Gemm:
        """``rows``: as the op's plans count them."""
        return op(rows=rows, n=n or self.config.n, k=k or self.config.k, dtype="bfloat16", transposed=False)

    def most(self, op: type[Gemm]) -> int:
        """Rows, as the op's plans count them, of a call whose a has ``max_rows``."""
        return self.config.max_rows // (self.world.size if op is ReduceScatter else 1)

    def sizes(self, op: type[Gemm], count: int) -> list[int]:
        """So many different numbers of rows, log-uniform."""
        most = self.most(op)
        found: dict[int, None] = {}
        while len(found) < min(count, most):
            found[min(most, int((most + 1) ** self.rng.random()))] = None
        return list(found)

    def make(self, call: Gemm, library: str = "cupy", buffers: dict[str, Any] | None = None, views: bool | None = None) -> Made:
        """Filled operands, and NaN in ``out``.

        ``views``: arrays lie within larger ones, rows apart where they may; None: those of every other call. ``buffers``: planes at whose
        beginning arrays lie instead; operands are not filled.
        """
        self._made += 1
        seed = self._made << 8
        if views is None:
            views = self._made % 2 == 0 and buffers is None
        arrays: dict[str, Array] = {**call.inputs(self.topology, self.world.rank), "out": call.result(self.topology, self.world.rank)}
        words, given = {}, {}
        for name, array in arrays.items():
            step = pitch(array, views and array.padded)
            count, start = array.stored[0] * step, 8 * (self._made % 509) if views else 0
            plane = (buffers or {}).get(name)
            if plane is None:
                plane = self.machine.plane(max(count, 8) + start)
            words[name] = plane[start : start + count].reshape(array.stored[0], step)
            matrix = words[name].view(KINDS[array.dtype])[:, : array.stored[1]]
            torch = library == "torch" or (library == "mixed" and name != "b")
            given[name] = self.machine.to_torch(matrix, array.dtype) if torch else matrix
        saved = None
        if buffers is None:
            saved = self.machine.plane(max(words["out"].size, 8))[: words["out"].size].reshape(words["out"].shape)
        made = Made(call, (seed, seed + 128), words, given, saved)
        if buffers is None:
            self.fill(made)
        self.poison(made)
        return made

    def fill(self, made: Made) -> None:
        for name, seed in zip(("a", "b"), made.seeds, strict=True):
            columns = made.call.inputs(self.topology, self.world.rank)[name].columns
            self.machine.fill(made.words[name][:, :columns], seed + self.world.rank, made.call.dtype)

    def poison(self, made: Made) -> None:
        made.words["out"][...] = NAN

    def bound(self, made: Made) -> Callable[[], Any]:
        """The call itself."""
        op = getattr(mk, made.call.op)
        return functools.partial(op, *made.operands(), out=made.arrays["out"], world=self.world, **made.call.options)

    def error(self, made: Made, words: Any, rows: int | None = None) -> float:
        """The worst error over its bound of a result's words; inf where something was written between its rows. Not collective.

        ``rows``: how many rows a was filled with, where they are more than the call's.
        """
        columns, xp = made.call.n, self.world.xp
        if bool((words[:, columns:] != NAN).any()):
            return float("inf")

        def inputs(rank: int) -> dict[str, Any]:
            found = {}
            for (name, array), seed in zip(made.call.inputs(self.topology, rank).items(), made.seeds, strict=True):
                stored = xp.empty(((rows or array.rows) if name == "a" else array.rows, array.columns), xp.uint16)
                self.machine.fill(stored, seed + rank, array.dtype)
                found[name] = stored[: array.rows].view(KINDS[array.dtype])
            return found

        result = xp.ascontiguousarray(words[:, :columns]).view(KINDS[made.call.dtype])
        return float(made.call.worst(xp, self.topology, self.world.rank, inputs, result))

    def worst(self, error: float) -> float:
        """The largest error of all ranks. Collective."""
        return max(float(text) for text in gather(self.world, repr(error)))

    def together(self) -> None:
        """Every rank's device is idle. Collective."""
        self.machine.synchronize()
        self.world.barrier()

    def free_bytes(self) -> int:
        return int(self.world.xp.cuda.runtime.memGetInfo()[0]) if self.world.target == "cuda" else 0

    def forget(self) -> None:
        """Give memory back between stages."""
        if isinstance(self.machine, GpuMachine):
            self.machine.forget()
            self.world.xp.get_default_memory_pool().free_all_blocks()
            if self.machine.torch is not None:
                self.machine.torch.cuda.empty_cache()

    def plan(self, call: Gemm, max_rows: int | None) -> Any:
        """Prepare the problem of a call. Collective."""
        made = self.make(call)
        return mk.plan(call.op, *made.operands(), world=self.world, max_rows=max_rows, **call.options)


def microseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


@dataclasses.dataclass
class NewSizes:
    """Microseconds of calls by what was new, the largest error of their results over its bound, and device memory taken meanwhile."""

    times: dict[str, list[float]]
    error: float = 0.0
    taken: int = 0


def new_sizes(site: Site, calls: Sequence[Gemm], together: int) -> NewSizes:
    """Time calls of sizes never seen. Results are checked after so many ``together``; every ten wait, so that no queue is full."""
    counters, found = site.counters, NewSizes({"new": [], "other arrays": [], "again": []})
    for first in range(0, len(calls), together):
        pairs = []
        for i, call in enumerate(calls[first : first + together], first):
            library = site.libraries[i // len(OPS) % len(site.libraries)]
            pairs.append((site.make(call, library), site.make(call, library)))
        bound = [[site.bound(made) for made in pair] for pair in pairs]
        gc.collect()
        site.together()
        free = site.free_bytes()
        for i, ((one, _), (call, other)) in enumerate(zip(pairs, bound, strict=True)):
            if i % BATCH == 0:
                site.machine.synchronize()
            with counters.armed():
                found.times["new"].append(microseconds(call))
            one.saved[...] = one.words["out"]
            site.poison(one)
            with counters.armed():
                found.times["other arrays"].append(microseconds(other))
                found.times["again"].append(microseconds(call))
        found.taken = max(found.taken, free - site.free_bytes())
        site.together()
        for one, two in pairs:
            found.error = max(found.error, site.error(one, one.saved), site.error(two, two.words["out"]))
            if bool((one.saved != one.words["out"]).any()):
                found.error = float("inf")
    return found
