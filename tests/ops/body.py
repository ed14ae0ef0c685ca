"""What every rank does in the tests of allgather_gemm, the same as a thread of ``mk.launch``, as a process and under mpirun."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import mkernel as mk
from mkernel.cli.check import worst_over_bound
from mkernel.plan.topology import Topology

ROWS = (0, 1, 7, 64, 129, 300)  # M / W: nothing, less than a tile, a chunk's edge, several tiles
SHAPES = ((64, 256), (136, 264), (8, 8), (200, 72), (72, 520), (4096, 8))  # (K, N); of the last, K travels in parts
WORLDS = ("1x1", "1x2", "1x4", "2x2", "4x1")  # nodes x ranks per node
SPLITS = ("default", "narrow", "wide")
CALLS = 8  # of one run
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_PADDING = 8  # elements between rows of a strided array


def topology(world: str) -> Topology:
    nodes, per_node = map(int, world.split("x"))
    return Topology(nodes * per_node, per_node)


def split(name: str, shape: Topology) -> mk.Split | None:
    """Splits of four SMs: the default, one SM per role, and as many for communication as leave one for compute."""
    local, remote = shape.ranks_per_node > 1, shape.num_nodes > 1
    if name == "narrow":
        return mk.Split(compute=1, intra_comm=1 if local else None, inter_send=1 if remote else None)
    if name == "wide":
        return mk.Split(intra_comm=(2 if remote else 3) if local else None, inter_send=(1 if local else 3) if remote else None)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is compiled into a kernel, but for the tile."""

    dtype: str
    k: int
    n: int
    row_major: bool = True
    split: str = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """How a call's arrays lie in memory."""

    on_heap: bool
    out: str  # "none", "given" or "strided"
    padded: bool  # rows (columns) of b lie apart


USES = tuple(Use(*use) for use in itertools.product((False, True), ("none", "given", "strided"), (False, True)))


def aligned(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Uninitialized, at a multiple of 16 bytes and no larger power of two."""
    kind = np.dtype(_DTYPES[dtype])
    memory = np.empty(math.prod(shape) * kind.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 32 + 16
    return memory[start : start + math.prod(shape) * kind.itemsize].view(kind).reshape(shape)


def random(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> NDArray[Any]:
    array = aligned(shape, dtype)
    array[...] = rng.standard_normal(shape, np.float32)
    return array


class Rank:
    """One rank's arrays. Buffers are used again from call to call, as an application would."""

    def __init__(self, world: Any, case: Case, seed: int, rows: tuple[int, ...] = ROWS) -> None:
        self.world, self.case, self.seed = world, case, seed
        # One plane of the heap, and one of ordinary memory; calls of fewer rows use a part.
        self.on_heap = world.empty((max(*rows, 1), case.k), case.dtype)
        self.ordinary = aligned((max(*rows, 1), case.k), case.dtype)
        self.split = split(case.split, world.topology)

    def call(self, number: int, rows: int, use: Use, delay: float = 0.0) -> Result:
        """One call on fresh inputs, which are overwritten as soon as it returns."""
        case, world = self.case, self.world
        shard = _shard(self.seed, number, world.rank, rows, case)
        a = (self.on_heap if use.on_heap else self.ordinary)[:rows]
        a[...] = shard
        b = self._columns(number, use)
        out = self._poisoned(rows, use)
        if delay:
            time.sleep(delay)
        c = mk.allgather_gemm(a, b, world=world, out=out, split=self.split)
        assert out is None or c is out, "out is returned as given"
        result = Result(number, rows, case, self.seed, world.size, np.array(c), np.array(b), _spilled(out))
        a[...] = np.nan  # the call has ended: its inputs may be reused
        return result

    def _columns(self, number: int, use: Use) -> NDArray[Any]:
        case, rng = self.case, np.random.default_rng([self.seed, number, 1, self.world.rank])
        outer, inner = (case.k, case.n) if case.row_major else (case.n, case.k)
        b = random((outer, inner + (_PADDING if use.padded else 0)), case.dtype, rng)
        b[:, inner:] = np.nan
        return b[:, :inner] if case.row_major else b[:, :inner].T

    def _poisoned(self, rows: int, use: Use) -> NDArray[Any] | None:
        if use.out == "none":
            return None
        columns = self.case.n + (_PADDING if use.out == "strided" else 0)
        out = aligned((rows * self.world.size, columns), self.case.dtype)
        out[...] = np.nan
        return out[:, : self.case.n]


def _spilled(out: NDArray[Any] | None) -> bool:
    """Whether anything was written between the rows of a strided result."""
    if out is None or out.base is None or out.shape[0] == 0 or out.strides[0] == out.shape[1] * 2:
        return False
    whole = np.lib.stride_tricks.as_strided(out, (out.shape[0], out.strides[0] // 2), out.strides)
    return not np.isnan(whole[:, out.shape[1] :].astype(np.float32)).all()


def _shard(seed: int, number: int, rank: int, rows: int, case: Case) -> NDArray[Any]:
    return random((rows, case.k), case.dtype, np.random.default_rng([seed, number, 0, rank]))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a call gave, and all that is needed to check it."""

    number: int
    rows: int
    case: Case
    seed: int
    size: int
    c: NDArray[Any]
    b: NDArray[Any]
    spilled: bool

    def problem(self) -> str | None:
        """What is wrong with it, every element compared with float64."""
        a = np.concatenate([_shard(self.seed, self.number, rank, self.rows, self.case) for rank in range(self.size)])
        if self.c.shape != (a.shape[0], self.case.n) or self.c.dtype != a.dtype:
            return f"{self}: the result is {self.c.shape} {self.c.dtype}"
        worst = worst_over_bound(self.c, a, self.b, self.case.dtype)
        if worst > 1.0:
            wrong = np.argwhere(~(np.abs(self.c.astype(np.float64) - a.astype(np.float64) @ self.b.astype(np.float64)) <= 0.1))
            return f"{self}: {worst:.3g} times the bound; far off at {wrong[:4].tolist()} and {len(wrong)} in all"
        return f"{self}: wrote between the rows of out" if self.spilled else None

    def __str__(self) -> str:
        return f"call {self.number} of {self.rows} rows, {self.case}, seed {self.seed}"


def rows_of(k: int) -> tuple[int, ...]:
    """Fewer of them where a tile is much work."""
    return ROWS if k < 1024 else (0, 1, 64, 129)


def schedule(seed: int, rows: tuple[int, ...] = ROWS) -> list[tuple[int, Use]]:
    """Different ways to lay arrays out, every number of rows about equally often, in an order of the seed's."""
    rng = np.random.default_rng([seed, 7])
    uses = [USES[i] for i in rng.permutation(len(USES))[:CALLS]]
    order = [rows[i % len(rows)] for i in rng.permutation(CALLS)]
    return list(zip(order, uses, strict=True))


def back_to_back(world: Any, case: Case, seed: int, longest_delay: float = 0.0, rows: tuple[int, ...] = ROWS) -> list[Result]:
    """Calls of alternating plans without a barrier; the results are looked at afterwards, so that nothing holds up a rank that is fast."""
    rank = Rank(world, case, seed, rows)
    delays = np.random.default_rng([seed, 8, world.rank]).random(CALLS) * longest_delay
    return [rank.call(i, m, use, delays[i]) for i, (m, use) in enumerate(schedule(seed, rows))]


def problems(results: list[Result]) -> list[str]:
    return [problem for result in results if (problem := result.problem()) is not None]
