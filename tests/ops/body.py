"""What every rank does in the tests of the fused GEMMs, the same as a thread of ``mk.launch``, as a process and under mpirun."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import mkernel as mk
from mkernel import env
from mkernel.ops.schedule import Choice
from mkernel.planner import reduce
from mkernel.planner.reduce import ReduceProblem, make_plan
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from mkernel.tools.check import node_sums, worst_product, worst_sum

ROWS = (0, 1, 7, 64, 129, 300)  # M / W (M of an all-reduce): nothing, less than a tile, a chunk's edge, several tiles
SHAPES = ((64, 256), (136, 264), (8, 8), (200, 72), (72, 520), (4096, 8))  # (K, N); of the last, K travels in parts
WORLDS = ("1x1", "1x2", "1x4", "2x2", "4x1")  # nodes x ranks per node
SPLITS = ("default", "narrow", "wide")
CALLS = 8  # of one run
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_SMS = 132  # how many there are does not change what is rounded
_PADDING = 8  # elements between rows of a strided array


def topology(world: str) -> Topology:
    nodes, per_node = map(int, world.split("x"))
    return Topology(nodes * per_node, per_node)


def split(name: str, shape: Topology, op: str = "allgather_gemm", algorithm: str | None = None) -> mk.Split | None:
    """The default, one SM per role, as many for communication as leave one for compute, or one that moves data inside a node."""
    used = roles(shape, op, algorithm)
    if name == "narrow":
        return mk.Split(compute=1, **dict.fromkeys(used, 1))
    if name == "one":  # SM that computes
        return mk.Split(compute=1)
    if name in ("pairs", "few pairs"):  # two SMs per role, whose CTAs may be pairs; all the rest computes, or no more
        return mk.Split(compute=2 if name == "few pairs" else None, **dict.fromkeys(used, 2))
    if name == "few movers":  # and all the rest computes
        return mk.Split(**dict.fromkeys(used, 1))
    if name == "mover":  # where the default may do without: packets in an all-reduce, warps that push in an allgather_gemm
        return mk.Split(intra_comm=1) if "intra_comm" in used else None
    if name == "warps":  # allgather_gemm on one node without communication CTAs
        return mk.Split(intra_comm=0) if op == "allgather_gemm" and shape.num_nodes == 1 < shape.size else None
    if name == "wide":
        others = env.CPU_SMS.get() - 1
        return mk.Split(**{role: len(range(i, others, len(used))) for i, role in enumerate(used)})
    return None


def roles(shape: Topology, op: str, algorithm: str | None) -> list[str]:
    """That move data there."""
    remote, reduces, two_shot = shape.num_nodes > 1, op != "allgather_gemm", algorithm == "two_shot"
    used = {
        "intra_comm": two_shot and shape.size > 1 if reduces else shape.ranks_per_node > 1,
        "inter_send": remote,
        "inter_reduce": remote and reduces and algorithm != "one_shot",
    }
    return [role for role, needed in used.items() if needed]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is compiled into a kernel, but for the tile. K and N: of one rank's operands."""

    dtype: str
    k: int
    n: int
    row_major: bool = True
    split: str = "default"
    op: str = "allgather_gemm"
    partials: str = "output"  # of the reductions
    algorithm: str | None = None  # of gemm_allreduce
    tiling: Tiling | None = None  # what tiles cover, where that is not predicted
    canonical: bool = False  # of the reductions, in a world with batch_invariant

    @property
    def reduces(self) -> bool:
        return self.op != "allgather_gemm"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        partials = {"partials": self.partials} if self.reduces else {}
        return partials | ({"algorithm": self.algorithm} if self.op == "gemm_allreduce" else {})

    def rows_of_a(self, rows: int, size: int) -> int:
        return rows * size if self.op == "gemm_reduce_scatter" else rows

    def rows_of_c(self, rows: int, size: int) -> int:
        return rows if self.reduces else rows * size


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """How a call's arrays lie in memory."""

    on_heap: bool
    out: str  # "none", "given" or "strided"
    padded: bool  # rows (columns) of b lie apart
    a_apart: bool = False  # rows of a lie apart: of the reductions


USES = tuple(Use(*use) for use in itertools.product((False, True), ("none", "given", "strided"), (False, True)))


def scatters_tiles(patch: pytest.MonkeyPatch) -> None:
    """Have a gemm_reduce_scatter copy partial tiles in bulk, however few its values are."""
    patch.setattr(reduce, "fits_packets", lambda plan, fits=reduce.fits_packets: plan.op != "gemm_reduce_scatter" and fits(plan))


def use_of(number: int, case: Case) -> Use:
    """One after the other."""
    use = USES[number % len(USES)]
    return dataclasses.replace(use, a_apart=case.reduces and number % 3 == 1)


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
        self.shape = case.rows_of_a(max(*rows, 1), world.size), case.k
        size = (self.shape[0] * (case.k + (_PADDING if case.reduces else 0)),)
        self.on_heap = world.empty(size, case.dtype)
        self.ordinary = aligned(size, case.dtype)
        self.split: Any = split(case.split, world.topology, case.op, case.algorithm)
        if case.tiling is not None:
            self.split = Choice(self.split, None, case.tiling)  # as a PreparedPlan passes it on

    def call(self, number: int, rows: int, use: Use, delay: float = 0.0) -> Result:
        """One call on fresh inputs, which are overwritten as soon as it returns."""
        case, world = self.case, self.world
        a = self._plane(use)[: case.rows_of_a(rows, world.size)]
        a[...] = _operand_a(self.seed, number, world.rank, len(a), case)
        b = _operand_b(self.seed, number, world.rank, case, use.padded)
        out = self._poisoned(rows, use)
        if delay:
            time.sleep(delay)
        c = getattr(mk, case.op)(a, b, world=world, out=out, split=self.split, **case.options)
        assert out is None or c is out, "out is returned as given"
        result = Result(number, rows, case, self.seed, world.rank, world.topology, use, np.array(c), _spilled(out))
        a[...] = np.nan  # the call has ended: its inputs may be reused
        return result

    def _plane(self, use: Use) -> NDArray[Any]:
        memory = self.on_heap if use.on_heap else self.ordinary
        rows, columns = self.shape
        if use.a_apart:
            memory[...] = np.nan
            plane: NDArray[Any] = memory.reshape(rows, columns + _PADDING)[:, :columns]
            return plane
        return memory[: rows * columns].reshape(rows, columns)

    def _poisoned(self, rows: int, use: Use) -> NDArray[Any] | None:
        if use.out == "none":
            return None
        columns = self.case.n + (_PADDING if use.out == "strided" else 0)
        out = aligned((self.case.rows_of_c(rows, self.world.size), columns), self.case.dtype)
        out[...] = np.nan
        return out[:, : self.case.n]


def _operand_a(seed: int, number: int, rank: int, rows: int, case: Case) -> NDArray[Any]:
    return random((rows, case.k), case.dtype, np.random.default_rng([seed, number, 0, rank]))


def _operand_b(seed: int, number: int, rank: int, case: Case, padded: bool) -> NDArray[Any]:
    outer, inner = (case.k, case.n) if case.row_major else (case.n, case.k)
    b = random((outer, inner + (_PADDING if padded else 0)), case.dtype, np.random.default_rng([seed, number, 1, rank]))
    b[:, inner:] = np.nan
    return b[:, :inner] if case.row_major else b[:, :inner].T


def _spilled(out: NDArray[Any] | None) -> bool:
    """Whether anything was written between the rows of a strided result."""
    if out is None or out.base is None or out.shape[0] == 0 or out.strides[0] == out.shape[1] * 2:
        return False
    whole = np.lib.stride_tricks.as_strided(out, (out.shape[0], out.strides[0] // 2), out.strides)
    return not np.isnan(whole[:, out.shape[1] :].astype(np.float32)).all()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a call gave, and all that is needed to check it."""

    number: int
    rows: int
    case: Case
    seed: int
    rank: int
    topology: Topology
    use: Use
    c: NDArray[Any]
    spilled: bool

    def problem(self) -> str | None:
        """What is wrong with it, every element compared with float64."""
        case, size = self.case, self.topology.size
        shape, dtype = (case.rows_of_c(self.rows, size), case.n), np.dtype(_DTYPES[case.dtype])
        if self.c.shape != shape or self.c.dtype != dtype:
            return f"{self}: the result is {self.c.shape} {self.c.dtype}"
        worst, far = self._of_sum() if case.reduces else self._of_product()
        if worst > 1.0:
            return f"{self}: {worst:.3g} times the bound; far off at {far[:4].tolist()} and {len(far)} in all"
        return f"{self}: wrote between the rows of out" if self.spilled else None

    def _of_product(self) -> tuple[float, NDArray[Any]]:
        """The largest error over its bound, and where errors are large."""
        a = np.concatenate([self._a(rank) for rank in range(self.topology.size)])
        b = self._b(self.rank)
        wrong = ~(np.abs(self.c.astype(np.float64) - a.astype(np.float64) @ b.astype(np.float64)) <= 0.1)
        return worst_product(np, self.c, a, b), np.argwhere(wrong)

    def _of_sum(self) -> tuple[float, NDArray[Any]]:
        """The same."""
        case = self.case
        if not self.rows:
            return 0.0, np.argwhere(self.c)
        problem = ReduceProblem(case.op, self.topology, case.n, case.k, case.dtype, case.row_major, case.partials, case.algorithm)
        problem = dataclasses.replace(problem, canonical=case.canonical)
        nodes = node_sums(make_plan(problem, self.rows, _SMS), self.rank, lambda rank: (self._a(rank), self._b(rank)))
        products = [(p.a.astype(np.float64), p.b.astype(np.float64)) for node in nodes for p in node.products]
        far = np.abs(self.c.astype(np.float64) - sum(a @ b for a, b in products))
        return worst_sum(np, self.c, nodes), np.argwhere(~(far <= 0.2))

    def _a(self, rank: int) -> NDArray[Any]:
        return _operand_a(self.seed, self.number, rank, self.case.rows_of_a(self.rows, self.topology.size), self.case)

    def _b(self, rank: int) -> NDArray[Any]:
        return _operand_b(self.seed, self.number, rank, self.case, self.use.padded)

    def __str__(self) -> str:
        return f"call {self.number} of {self.rows} rows, {self.case}, seed {self.seed}"


def rows_of(k: int) -> tuple[int, ...]:
    """Fewer of them where a tile is much work."""
    return ROWS if k < 1024 else (0, 1, 64, 129)


def schedule(case: Case, seed: int, rows: tuple[int, ...] = ROWS) -> list[tuple[int, Use]]:
    """Different ways to lay arrays out, every number of rows about equally often, in an order of the seed's."""
    rng = np.random.default_rng([seed, 7])
    uses = [use_of(i, case) for i in rng.permutation(len(USES))[:CALLS]]
    order = [rows[i % len(rows)] for i in rng.permutation(CALLS)]
    return list(zip(order, uses, strict=True))


def back_to_back(world: Any, case: Case, seed: int, longest_delay: float = 0.0, rows: tuple[int, ...] = ROWS) -> list[Result]:
    """Calls of alternating plans without a barrier; the results are looked at afterwards, so that nothing holds up a rank that is fast."""
    rank = Rank(world, case, seed, rows)
    delays = np.random.default_rng([seed, 8, world.rank]).random(CALLS) * longest_delay
    return [rank.call(i, m, use, delays[i]) for i, (m, use) in enumerate(schedule(case, seed, rows))]


def problems(results: list[Result]) -> list[str]:
    return [problem for result in results if (problem := result.problem()) is not None]


def bits(results: list[Result]) -> list[bytes]:
    return [result.c.tobytes() for result in results]


def checked_bits(world: Any, case: Case, seed: int, rows: tuple[int, ...]) -> tuple[list[str], list[bytes]]:
    """What is wrong with calls one behind the other, and the bits of their results, to be compared with those of another plan."""
    results = back_to_back(world, case, seed, 0.0, rows)
    return problems(results), bits(results)
