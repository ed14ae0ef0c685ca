"""What a random program may call: one class per op, each drawing its sizes and options and knowing what is right.

Another op joins with a subclass of ``Call`` and a line in ``OPS``. Everything else (where arrays lie, order, streams, shrinking, printing)
goes by the methods below and needs no change.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Self

import mkernel as mk
from mkernel.ops.schedule import Choice
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.choice import plan_allgather_gemm, plan_reduce
from mkernel.planner.split import SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology
from mkernel.tools.check import node_sums as node_sums_of
from mkernel.tools.check import worst_product, worst_sum
from tests.ops.body import roles

__all__ = ["OPS", "AllGatherGemm", "AllReduce", "Array", "Call", "Gemm", "Limits", "ReduceScatter", "all_rows", "fits", "log_uniform"]

DTYPES = ("bfloat16", "float16")
PACKETS = ("packets", "shares")  # how few values of a reduction travel inside a node; with shares, of K of a tile
_H200_SMS = 132  # what is rounded on the way does not depend on their number
_PAIRED = 0.25  # of the calls, in clusters:
_CLUSTERS = ((2, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
_MACS_PER_ROW = 128  # a tile has so many rows, however few of them exist


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How large calls may be. ``macs``: multiplications of all ranks together, of whole tiles."""

    rows: int = 2048  # M / W, or M of an all-reduce
    columns: int = 640
    depth: int = 2048  # K of a rank
    macs: float = 150e6


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """A matrix that a call takes or makes. ``transposed``: it is the transpose view of a row-major one."""

    rows: int
    columns: int
    dtype: str
    transposed: bool = False
    padded: bool = False  # whether its rows may lie apart

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns as they lie in memory."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)


Inputs = Callable[[int], Mapping[str, Any]]  # rank -> its operands


class Call(abc.ABC):
    """One call of an op, but for where its arrays lie. Subclasses are frozen dataclasses, so that ``repr`` makes an equal one."""

    op: ClassVar[str]
    mechanisms: ClassVar[tuple[str, ...]] = ("",)  # ways to do it that leave different things in memory
    same_on_all_ranks: ClassVar[bool] = False  # the result, bit for bit

    @classmethod
    def mechanisms_in(cls, world: Topology) -> tuple[str, ...]:
        """Those of ``mechanisms`` that are possible in a world."""
        return cls.mechanisms

    @classmethod
    @abc.abstractmethod
    def draw(cls, rng: random.Random, world: Topology, limits: Limits, mechanism: str) -> Self:
        """Any legal call that is done in one of ``mechanisms``."""

    @property
    def mechanism(self) -> str:
        """Which of ``mechanisms`` it is."""
        return self.mechanisms[0]

    @abc.abstractmethod
    def resized(self, rng: random.Random, world: Topology, limits: Limits) -> Self:
        """The same with other sizes of those that a program changes between calls."""

    @property
    @abc.abstractmethod
    def sizes(self) -> int:
        """The rows that a program changes between calls."""

    @abc.abstractmethod
    def sized(self, rows: int) -> Self:
        """The same call of so many rows."""

    @abc.abstractmethod
    def kernel(self, world: Topology, sm_count: int) -> Hashable:
        """What is compiled for it. Raises ``SplitError`` or ``TilingError`` where the call's split or tiles do not fit."""

    @abc.abstractmethod
    def workspace(self, world: Topology, sm_count: int) -> int:
        """Bytes of the heap that it uses, beside its arrays."""

    @abc.abstractmethod
    def inputs(self, world: Topology, rank: int) -> dict[str, Array]:
        """Operands of a rank, in the order in which the op takes them."""

    @abc.abstractmethod
    def result(self, world: Topology, rank: int) -> Array:
        """What ``out`` is on a rank."""

    def keeps(self, world: Topology) -> Array | None:
        """What the argument ``gathered`` is on every rank, if the op has it: all of its rows of A."""
        return None

    @property
    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """Keyword arguments beside world, out and stream."""

    @abc.abstractmethod
    def worst(self, xp: Any, world: Topology, rank: int, inputs: Inputs, result: Any) -> float:
        """The largest error of a rank's result over its bound: right if at most 1. ``xp``: numpy or CuPy."""

    def run(self, arrays: Sequence[Any], **where: Any) -> Any:
        """Call the op. ``where``: world, out, stream, gathered."""
        return getattr(mk, self.op)(*arrays, **self.options, **where)

    def plan(self, world: Any, arrays: Sequence[Any], most: int = 0, **where: Any) -> Any:
        """Prepare the call, or all of it with up to ``most`` rows: collective."""
        more = {"max_rows": self.sized(most).inputs(world.topology, world.rank)["a"].rows} if most else {}
        return mk.plan(self.op, *arrays, world=world, **more, **self.options, **where)


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    return min(most, int(math.exp(rng.uniform(math.log(least), math.log(most + 1)))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm(Call):
    """``rows``: of one rank, as the op's plan has it."""

    rows: int
    n: int
    k: int
    dtype: str
    transposed: bool
    split: mk.Split | None = None
    cluster: int = 1  # CTAs of a cluster that are neighbours in M,
    cluster_n: int = 1  # and in N

    @classmethod
    def draw(cls, rng: random.Random, world: Topology, limits: Limits, mechanism: str) -> Self:
        while True:
            n, k = (8 * log_uniform(rng, 1, most // 8) for most in (limits.columns, limits.depth))
            more = cls._draw_options(rng, mechanism)
            call = cls(rows=1, n=n, k=k, dtype=rng.choice(DTYPES), transposed=rng.random() < 0.5, **more)
            if call._macs(world) <= limits.macs:
                call = dataclasses.replace(call, split=call._draw_split(rng, world))
                return call._perhaps_paired(rng, world).resized(rng, world, limits)

    def resized(self, rng: random.Random, world: Topology, limits: Limits) -> Self:
        if rng.random() < 0.05:
            return dataclasses.replace(self, rows=0)
        while True:
            call = dataclasses.replace(self, rows=log_uniform(rng, 1, limits.rows))
            if call._macs(world) <= limits.macs:
                return call

    @property
    def sizes(self) -> int:
        return self.rows

    def sized(self, rows: int) -> Self:
        return dataclasses.replace(self, rows=rows)

    @classmethod
    def _draw_options(cls, rng: random.Random, mechanism: str) -> dict[str, Any]:
        return {}

    def _draw_split(self, rng: random.Random, world: Topology) -> mk.Split | None:
        """Mostly none or a single CTA per role: what is not waited for shows when one CTA does everything in order, or two overtake."""
        if rng.random() < 0.4:
            return None
        needed = roles(world, self.op, getattr(self, "algorithm", None))
        if self.op == AllGatherGemm.op and world.num_nodes == 1 and rng.random() < 0.3:
            return mk.Split(intra_comm=0)
        compute = rng.choice((None, None, 1, 2))
        return mk.Split(compute=compute, **{role: rng.choice((1, 1, 1, 2)) for role in needed})

    def _perhaps_paired(self, rng: random.Random, world: Topology) -> Self:
        """Some calls in clusters of CTAs, each role with one or more."""
        if rng.random() >= _PAIRED:
            return self
        needed, (cluster, cluster_n) = roles(world, self.op, "two_shot" if self.op == AllReduce.op else None), rng.choice(_CLUSTERS)
        each = dict.fromkeys(needed, cluster * cluster_n)
        split = rng.choice((None, mk.Split(**each), mk.Split(compute=cluster * cluster_n, **each)))
        return dataclasses.replace(self, split=split, cluster=cluster, cluster_n=cluster_n)

    @property
    def together(self) -> int:
        """CTAs of a cluster."""
        return self.cluster * self.cluster_n

    @property
    def tiling(self) -> Tiling | None:
        return Tiling(cluster=self.cluster, cluster_n=self.cluster_n) if self.together > 1 else None

    def _high(self, block_m: int) -> int | None:
        """Rows of tiles of swapped operands, at least so many, of which CTAs that are neighbours in N load as many each."""
        unit = 8 * self.cluster_n
        return -(-block_m // unit) * unit or None

    def _macs(self, world: Topology) -> float:
        tiles = -(-self._all_rows(world) // _MACS_PER_ROW)
        return float(world.size * tiles * _MACS_PER_ROW * (-(-self.n // 64) * 64) * self.k)

    def _all_rows(self, world: Topology) -> int:
        """Rows of the product that each rank makes."""
        return self.rows * world.size

    @abc.abstractmethod
    def _plan(self, world: Topology, sm_count: int) -> Any: ...

    def kernel(self, world: Topology, sm_count: int) -> Hashable:
        spec: Hashable = self._plan(world, sm_count).spec
        return spec

    def workspace(self, world: Topology, sm_count: int) -> int:
        return int(self._plan(world, sm_count).workspace_bytes)

    def inputs(self, world: Topology, rank: int) -> dict[str, Array]:
        a = Array(self._rows_of_a(world), self.k, self.dtype, padded=self.op != AllGatherGemm.op)
        return {"a": a, "b": Array(self.k, self.n, self.dtype, self.transposed, padded=True)}

    def result(self, world: Topology, rank: int) -> Array:
        return Array(self._rows_of_result(world), self.n, self.dtype, padded=True)

    def _rows_of_a(self, world: Topology) -> int:
        return self._all_rows(world)

    def _rows_of_result(self, world: Topology) -> int:
        return self.rows

    @property
    def options(self) -> dict[str, Any]:
        if self.tiling is not None:
            return {"split": Choice(self.split, None, self.tiling)}  # as a PreparedPlan passes it on
        return {} if self.split is None else {"split": self.split}


_SHARING = 2, 3, 4  # CTAs of a cluster that share K: programs have few SMs


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGatherGemm(Gemm):
    """``packets``: 1, shards travel in packets, as far as there is room; 2, in tagged ones; 0, in what is chosen, or ``split`` asks for.

    ``tile_rows``: of swapped operands; 0: they are not. ``block_m``: how high those tiles are instead, where not 0. ``columns``: of those
    tiles; 64 only with packets. ``tiles_at_once``: 2, the warpgroups have them in turn, in a world of one; and ``cluster_k``: CTAs of a
    cluster that share K there. ``shares``: of K of a tile, by CTAs or clusters. ``width``: columns of tiles that are not swapped, 0: as is
    chosen; in a world of one any multiple of 32.
    """

    op: ClassVar[str] = "allgather_gemm"
    mechanisms: ClassVar[tuple[str, ...]] = ("chunks", "packets", "tagged packets")
    packets: int = 0
    tile_rows: int = 0
    block_m: int = 0
    columns: int = 128
    tiles_at_once: int = 1
    cluster_k: int = 1
    shares: int = 1
    width: int = 0

    @classmethod
    def mechanisms_in(cls, world: Topology) -> tuple[str, ...]:
        return cls.mechanisms if world.num_nodes == 1 < world.size <= 8 else ("chunks",)

    @property
    def mechanism(self) -> str:
        return self.mechanisms[self.packets]

    @classmethod
    def _draw_options(cls, rng: random.Random, mechanism: str) -> dict[str, Any]:
        packets = cls.mechanisms.index(mechanism)
        tile_rows = rng.choice((0, 0, 1, 2, 5)) if packets < 2 else 0
        columns = rng.choice((64, 128, 192, 256)) if tile_rows else 128
        columns = columns if packets == 1 else max(128, columns)
        block_m = rng.choice((0, 0, 80, 144) if columns > 128 else (0, 0, 72, 136)) if tile_rows else 0
        return {"packets": packets, "tile_rows": tile_rows, "block_m": block_m, "columns": columns}

    def _draw_split(self, rng: random.Random, world: Topology) -> mk.Split | None:
        if self.packets:
            return rng.choice((None, None, mk.Split(compute=1), mk.Split(intra_comm=0)))
        return super()._draw_split(rng, world)

    def _perhaps_paired(self, rng: random.Random, world: Topology) -> Self:
        if self.packets == 2:
            return self
        possible = [ctas for ctas in _SHARING if ctas <= -(-self.k // 64)] if world.size == 1 and not self.tile_rows else []
        if possible and rng.random() < _PAIRED:
            return dataclasses.replace(self, split=None, cluster_k=rng.choice(possible))
        if possible and rng.random() < _PAIRED:
            return super(AllGatherGemm, dataclasses.replace(self, width=rng.choice((96, 160, 224))))._perhaps_paired(rng, world)
        in_turn = world.size == 1 and self.tile_rows > 0 and self.columns == 128 and rng.random() < _PAIRED
        turns = dataclasses.replace(self, tiles_at_once=2, block_m=80 if self.block_m else 0) if in_turn else self
        found = super(AllGatherGemm, turns)._perhaps_paired(rng, world)
        shared = _PAIRED if found.together == 1 else 0.5  # in clusters, a few of all calls
        if not self.packets and not self.tile_rows and world.num_nodes == 1 and self.k > 64 and rng.random() < shared:
            return dataclasses.replace(found, shares=rng.randint(2, min(4, -(-self.k // 64))))
        if self.packets == 0 or found.together == 1:
            return found
        return dataclasses.replace(found, split=rng.choice((None, mk.Split(compute=found.together))))

    @property
    def tiling(self) -> Tiling | None:
        if self.cluster_k > 1:
            return Tiling(cluster_k=self.cluster_k)
        if self.shares > 1:
            return Tiling(shares=self.shares, cluster=self.cluster, cluster_n=self.cluster_n)
        if self.width:
            return Tiling(self.width, cluster=self.cluster, cluster_n=self.cluster_n)
        if not self.packets and not self.tile_rows:
            return super().tiling
        width = 64 if self.packets == 2 else self.columns if self.columns != 128 else None
        packets, block_m = self.packets or None, self._high(self.block_m)
        tile_rows = None if block_m else self.tile_rows or None
        at_once = self.tiles_at_once if self.tiles_at_once > 1 else None
        return Tiling(width, None, None, self.cluster, packets, self.cluster_n, tile_rows, tiles_at_once=at_once, block_m=block_m)

    def _plan(self, world: Topology, sm_count: int) -> allgather_gemm.AllGatherGemmPlan:
        problem = allgather_gemm.AllGatherGemmProblem(world, self.n, self.k, self.dtype, not self.transposed)
        return plan_allgather_gemm(problem, self.rows, sm_count, self.split, tiling=self.tiling)

    def _rows_of_a(self, world: Topology) -> int:
        return self.rows

    def _rows_of_result(self, world: Topology) -> int:
        return self._all_rows(world)

    def keeps(self, world: Topology) -> Array:
        return Array(self._all_rows(world), self.k, self.dtype)

    def worst(self, xp: Any, world: Topology, rank: int, inputs: Inputs, result: Any) -> float:
        return worst_product(xp, result, all_rows(xp, world, inputs).view(result.dtype), _contiguous(xp, inputs(rank)["b"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reduction(Gemm):
    """``shares``: of K of a tile; 1: as the planner chooses. ``packets``: 1, values travel in these; 0, in tiles; None: as it chooses.

    ``tile_rows``: of swapped operands; 0: they are not. ``block_m``: how high those tiles are instead, where not 0.
    """

    partials: str = "output"
    shares: int = 1
    packets: int | None = None
    tile_rows: int = 0
    block_m: int = 0

    @classmethod
    def mechanisms_in(cls, world: Topology) -> tuple[str, ...]:
        packets = world.num_nodes == 1 < world.size <= 8
        return tuple(name for name in cls.mechanisms if packets or name not in PACKETS)

    @classmethod
    def _draw_options(cls, rng: random.Random, mechanism: str) -> dict[str, Any]:
        partials = "output" if mechanism in PACKETS else rng.choice(("output", "output", "float32"))
        tile_rows = rng.choice((0, 0, 1, 2, 5)) if mechanism in PACKETS else 0
        shares, block_m = rng.choice((2, 3, 4, 7)) if mechanism == "shares" else 1, rng.choice((0, 0, 48, 144))
        return {"partials": partials, "shares": shares, "tile_rows": tile_rows, "block_m": block_m}

    def _draw_split(self, rng: random.Random, world: Topology) -> mk.Split | None:
        if self.mechanism in PACKETS:  # CTAs that pull would ask for tiles
            return rng.choice((None, None, mk.Split(compute=1), mk.Split(compute=2)))
        return super()._draw_split(rng, world)

    def _perhaps_paired(self, rng: random.Random, world: Topology) -> Self:
        found = super()._perhaps_paired(rng, world) if self.shares == 1 else self
        if found.together == 1:
            return found
        if "packets" in self.mechanisms_in(world) and self.partials == "output" and rng.random() < 0.5:
            return dataclasses.replace(
                found, packets=1, tile_rows=rng.choice((0, 1, 3)), split=rng.choice((None, mk.Split(compute=found.together)))
            )
        in_line = 1 in (found.cluster, found.cluster_n)  # beside sums
        own_rows = world.size == 1 or (self.op == ReduceScatter.op and world.num_nodes == 1 and in_line)
        may = getattr(self, "algorithm", None) != "one_shot" and (own_rows or (found.cluster, found.cluster_n) == (2, 1))
        return dataclasses.replace(found, packets=0, tile_rows=0) if may else self

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"partials": self.partials}

    @property
    def tiling(self) -> Tiling | None:
        if self.tile_rows:
            shares = self.shares if self.together == 1 else 1
            block_m = self._high(self.block_m)
            tile_rows = None if block_m else self.tile_rows
            return Tiling(None, None, shares, self.cluster, 1, self.cluster_n, tile_rows, block_m=block_m)
        if self.shares > 1:
            return Tiling(shares=self.shares)
        return None if self.together == 1 else Tiling(cluster=self.cluster, packets=self.packets, cluster_n=self.cluster_n)

    def problem(self, world: Topology) -> reduce.ReduceProblem:
        return reduce.ReduceProblem(self.op, world, self.n, self.k, self.dtype, not self.transposed, self.partials)

    def _plan(self, world: Topology, sm_count: int) -> reduce.ReducePlan:
        return plan_reduce(self.problem(world), self.rows, sm_count, self.split, tiling=self.tiling)

    def is_packed(self, world: Topology, sm_count: int) -> bool:
        """Whether its values travel in packets."""
        return self._plan(world, sm_count).packets

    def workspace(self, world: Topology, sm_count: int) -> int:
        """Bytes of the signal segment that packets use, whose beginning all such calls share."""
        plan = self._plan(world, sm_count)
        return plan.packet_bytes or plan.workspace_bytes

    def worst(self, xp: Any, world: Topology, rank: int, inputs: Inputs, result: Any) -> float:
        def operands(source: int) -> tuple[Any, Any]:
            of = inputs(source)
            return of["a"], _contiguous(xp, of["b"])

        tiling = None if self.shares > 1 else self.tiling
        plan = reduce.make_plan(self.problem(world), self.rows, _H200_SMS, self.split, tiling=tiling)
        return worst_sum(xp, result, node_sums_of(plan, rank, operands))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(_Reduction):
    op: ClassVar[str] = "gemm_reduce_scatter"
    mechanisms: ClassVar[tuple[str, ...]] = ("tiles", *PACKETS)

    @property
    def mechanism(self) -> str:
        return "shares" if self.shares > 1 else "tiles" if self.partials == "float32" or self.packets == 0 else "packets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(_Reduction):
    op: ClassVar[str] = "gemm_allreduce"
    mechanisms: ClassVar[tuple[str, ...]] = ("two_shot", "one_shot", *PACKETS)
    same_on_all_ranks: ClassVar[bool] = True
    algorithm: str | None = None

    @classmethod
    def _draw_options(cls, rng: random.Random, mechanism: str) -> dict[str, Any]:
        algorithm = rng.choice(reduce.ALGORITHMS) if mechanism in PACKETS else mechanism
        return super()._draw_options(rng, mechanism) | {"algorithm": rng.choice((None, algorithm, algorithm, algorithm))}

    @property
    def mechanism(self) -> str:
        return "shares" if self.shares > 1 else self.algorithm or "two_shot"

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"algorithm": self.algorithm}

    def _all_rows(self, world: Topology) -> int:
        return self.rows

    def problem(self, world: Topology) -> reduce.ReduceProblem:
        return dataclasses.replace(super().problem(world), algorithm=self.algorithm)


OPS: tuple[type[Call], ...] = (AllGatherGemm, ReduceScatter, AllReduce)


def all_rows(xp: Any, world: Topology, inputs: Inputs) -> Any:
    """The bits of the operands ``a`` of all ranks, one below the other."""
    return xp.concatenate([xp.ascontiguousarray(inputs(rank)["a"].view(xp.uint16)) for rank in range(world.size)])


def fits(call: Call, world: Topology, sm_count: int) -> bool:
    """Whether its split and its tiles are possible there."""
    try:
        call.kernel(world, sm_count)
    except (SplitError, TilingError):
        return False
    return True


def _contiguous(xp: Any, matrix: Any) -> Any:
    """Row-major, whatever it was. CuPy cannot copy bfloat16 from a transpose view, so by its bits."""
    if matrix.flags.c_contiguous:
        return matrix
    bits = matrix.T.view(xp.uint16).T if matrix.T.flags.c_contiguous else matrix.view(xp.uint16)
    return xp.ascontiguousarray(bits).view(matrix.dtype)
