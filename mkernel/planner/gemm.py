"""What the plans of all fused GEMMs share (``kernels_src/tile/gemm.cuh``): tile, stages, shared memory, the order of tiles."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from mkernel.jit.spec import KernelSpec
from mkernel.planner.derived import derived, fields_of
from mkernel.planner.heights import SWAPPED_COLUMNS
from mkernel.planner.specialize import constants_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

__all__ = [
    "BLOCK_K",
    "BLOCK_M",
    "GROUP_M",
    "THREADS",
    "between",
    "GemmPlan",
    "GemmProblem",
    "GemmTile",
    "choose_ctas",
    "choose_load_rows",
    "choose_put",
    "choose_tile",
    "digest_of",
    "raster",
    "raster_number",
    "row_of_b",
    "seconds_to_multiply",
    "shift_of",
    "tail_of",
]

BLOCK_M = 128
BLOCK_K = 64
THREADS = 384
GROUP_M = 16  # tile rows that share their columns of B in L2; 16 measured best of 4, 8, 16
SHARED_LIMIT = 232448  # dynamic shared memory of one CTA on sm_90
_RESULT_BYTES = 2 * 64 * 128  # a buffer of 64 rows x 128 bytes for each consumer warpgroup
_BARRIER_BYTES = 2048  # barriers and the tile queue, with padding to 1 KiB
_PIECES_BYTES = 8 * 16 * 1024 + 16 * 48  # the ring of pieces of CTAs that copy shares the memory of the stages (kernels_src/comm/copy.cuh)

# What a put should reach, several times what the engine takes for it, and what it may reach where the shard is large. Tiles wait for whole
# puts.
_PUT_BYTES = (128 * 1024, 4 * 1024 * 1024)
_PUTS = 16  # per shard

WARP_ROWS = 16  # of a tile: a warp's are loaded all, or none
_PANEL = 64  # columns whose values have 128 bytes

_SM_FLOPS = 5.3e12  # per second, of the tile loop on one SM
# Throughput of one SM against the 128 x 256 tile, measured on H200.
_RELATIVE_SPEED = {256: 1.0, 192: 0.97, 128: 0.88, 64: 0.58}


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTile:
    """A tile of ``BLOCK_M x block_n`` with ``stages`` stages of ``BLOCK_K``; 16-bit elements.

    ``block_n``: 64, 128, 192 or 256; of allgather_gemm in a world of one any multiple of 16 between (``kernels_src/tile/shape.cuh``).
    ``buffers``: of 64 columns each, where results wait to be stored. ``exact``: stages have room for ``block_n`` columns, no more.
    """

    block_n: int
    stages: int
    buffers: int = 2
    exact: bool = False

    @property
    def shared_bytes(self) -> int:
        stages = self.stages * (BLOCK_M + self.room) * BLOCK_K * 2
        return max(stages + self.buffers * _RESULT_BYTES, _PIECES_BYTES) + _BARRIER_BYTES

    @property
    def room(self) -> int:
        """Columns that a stage has room for, and that are loaded: whole panels, unless a transposed B has fewer."""
        return self.block_n if self.exact else self.panels * _PANEL

    @property
    def panels(self) -> int:
        """How many panels of 64 columns: the last one may have fewer."""
        return -(-self.block_n // _PANEL)

    @property
    def cut(self) -> bool:
        """Whether its last panel is not a whole one."""
        return self.block_n % _PANEL != 0

    @property
    def low_stages(self) -> int:
        """Stages in kernels that have more where tiles have at most 64 rows (``kernels_src/tile/storage.cuh``)."""
        return self.stages * (BLOCK_M + self.block_n) // (BLOCK_M // 2 + self.block_n)

    def stages_of(self, height: int, columns: int = SWAPPED_COLUMNS) -> int:
        """Stages of a kernel with swapped operands, in a call whose tiles have so many rows and columns: as many as fit."""
        return self.stages * (BLOCK_M + self.block_n) // (columns + height)

    def seconds(self, k: int) -> float:
        """How long an SM multiplies one."""
        return seconds_to_multiply(BLOCK_M, self.block_n, k, 1)

    @property
    def relative_speed(self) -> float:
        """Throughput of an SM with this tile against one of 256 columns."""
        return between(_RELATIVE_SPEED, self.block_n)

    @classmethod
    @functools.cache
    def deepest(cls, block_n: int, *, sent: bool = False, row_major: bool = True) -> GemmTile:
        """With as many stages as fit, at most 8, and as many buffers as then fit, at most those of a whole tile.

        ``sent``: to other ranks; then there is room for a whole tile, so that no thread that multiplies waits for stores over NVLink.
        ``row_major``: whether B is, of which whole panels are loaded.
        """
        panels, room = math.ceil(block_n / _PANEL), SHARED_LIMIT - _BARRIER_BYTES
        stage, whole = (BLOCK_M + panels * _PANEL) * BLOCK_K * 2, max(2, panels)
        stages = min(8, (room - (whole if sent else 2) * _RESULT_BYTES) // stage)
        buffers, exact = min(whole, (room - stages * stage) // _RESULT_BYTES), not row_major and block_n % _PANEL != 0
        if exact:  # more stages beside as many buffers: one buffer less costs more (docs/speed_log.md, "Widths that fit N")
            stage = (BLOCK_M + block_n) * BLOCK_K * 2
            stages = min(8, (room - buffers * _RESULT_BYTES) // stage)
            buffers = min(whole, (room - stages * stage) // _RESULT_BYTES)
        return cls(block_n, stages, buffers, exact)

    @classmethod
    @functools.cache
    def summing(cls, block_n: int, ctas: int) -> GemmTile:
        """The deepest of which so many CTAs share K, with room for what all have of the slice of one of them."""
        packets = math.ceil(block_n // 8 / ctas) * ctas  # of a thread, 16 bytes each
        buffers = max(2, math.ceil(packets * BLOCK_M * 2 * 16 / _RESULT_BYTES))
        stages = min(8, (SHARED_LIMIT - _BARRIER_BYTES - buffers * _RESULT_BYTES) // ((BLOCK_M + block_n) * BLOCK_K * 2))
        return cls(block_n, stages, buffers)


def between(by_columns: Mapping[int, float], columns: int) -> float:
    """The value for so many columns of a tile: of whole panels, else on the line between the values of fewer and of more."""
    part, low = columns % _PANEL / _PANEL, columns // _PANEL * _PANEL
    return by_columns[low] if part == 0 else (1 - part) * by_columns[low] + part * by_columns[low + _PANEL]


def fitting(block_n: int, bytes_beside: int) -> GemmTile:
    """The deepest tile that leaves room for so many bytes of shared memory."""
    tile = GemmTile.deepest(block_n)
    while tile.shared_bytes + bytes_beside > SHARED_LIMIT:
        tile = dataclasses.replace(tile, stages=tile.stages - 1)
    return tile


class GemmProblem(Protocol):
    """What the ranks agree on once; the number of rows is each call's. ``n`` and ``k``: of a rank's operands or result, as the op says."""

    @property
    def topology(self) -> Topology: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def b_row_major(self) -> bool: ...

    def result_shape(self, rows: int) -> tuple[int, int]: ...

    def __hash__(self) -> int: ...


Problem = TypeVar("Problem", bound=GemmProblem)


@dataclasses.dataclass(frozen=True)
class GemmPlan(Generic[Problem]):
    """Tile and split for one problem and one number of rows, on one kind of device.

    Attributes
    ----------
    of_class
        Names of what is worked out once for all plans of a class of rows.
    """

    problem: Problem
    rows: int
    split: Split
    tile: GemmTile

    of_class: ClassVar[tuple[str, ...]] = ("spec", "fields", "grid", "tiles_n")

    @property
    def specialize(self) -> frozenset[str]:
        """Fields that are compiled in (``planner/specialize.py``)."""
        raise NotImplementedError

    def of_rows(self, rows: int) -> Self:
        """The plan of another number of rows of the same class: as here, for so many."""
        if rows == self.rows:
            return self
        plan = object.__new__(type(self))
        vars(plan).update(self._alike, rows=rows)
        return plan

    @derived
    def _alike(self) -> dict[str, Any]:
        """What plans of other rows of the class have in common with this one."""
        return fields_of(self) | {name: getattr(self, name) for name in self.of_class}

    @derived
    def digest(self) -> int:
        return digest_of(self)

    @derived
    def may_be_low(self) -> bool:
        """Whether the kernel is one that has more stages where tiles have at most 64 rows."""
        return False

    def stages_of(self, load_rows: int) -> int:
        """How many stages a call has of whose tiles so many rows are loaded."""
        return self.tile.low_stages if self.may_be_low and load_rows <= BLOCK_M // 2 else self.tile.stages

    def spec_with(
        self, name: str, parameter_bytes: int, more: Mapping[str, int], cluster: int = 1, early: bool = False, apart: bool = False
    ) -> KernelSpec:
        """The kernel of this plan, in clusters of so many CTAs; ``more``: constants beside those of every op.

        In a world of one: ``early`` if it touches no memory before ``compute_role``, ``apart`` if no CTA waits for one of another cluster.
        """
        ctas = tuple(self.fields[2:5])
        if "split" not in self.specialize:
            ctas = tuple(min(number, 1) for number in ctas)  # which roles there are
        return _spec(self.problem, self.tile, self.specialize, ctas, name, parameter_bytes, cluster, early, apart, tuple(more.items()))

    @derived
    def fields(self) -> tuple[int, int, int, int, int, int]:
        """What the parameters of a launch hold as ``abi.Fields``: what is not compiled in is read there."""
        problem, split = self.problem, self.split
        return problem.n, problem.k, split.intra_comm or 0, split.inter_send or 0, split.inter_reduce or 0, split.total

    @derived
    def grid(self) -> int:
        return self.split.total

    @property
    def staging_bytes(self) -> int:
        """Bytes of the data heap that only this rank's own engine reads: what it puts from there may be written before peers enter."""
        return 0

    @derived
    def tile_rows(self) -> int:
        """Rows of tiles."""
        return math.ceil(self.rows / BLOCK_M)

    @property
    def swapped(self) -> int:
        """Rows of tiles whose operands are swapped; 0: they are not."""
        return 0

    @derived
    def columns(self) -> int:
        """Columns of a tile."""
        return SWAPPED_COLUMNS if self.swapped else self.tile.block_n

    @derived
    def tiles_n(self) -> int:
        return math.ceil(self.problem.n / self.columns)


@functools.lru_cache(maxsize=4096)
def _spec(
    problem: GemmProblem,
    tile: GemmTile,
    specialize: frozenset[str],
    ctas: tuple[int, ...],
    name: str,
    parameter_bytes: int,
    cluster: int,
    early: bool,
    apart: bool,
    more: tuple[tuple[str, int], ...],
) -> KernelSpec:
    """Calls of many sizes have the same kernel. But for what is specialized, it depends on the world, the operands and the tile."""
    fields = {"kN": problem.n, "kK": problem.k} | dict(zip(("kIntraComm", "kInterSend", "kInterReduce"), ctas, strict=True))
    # A single k step that is known makes a tile straight code, for whose wgmma ptxas may find no registers: then it serializes them.
    compiled_in = specialize - {"k"} if problem.k <= BLOCK_K else specialize
    constants = constants_of(fields, compiled_in) | {
        "kBlockN": tile.panels * _PANEL,
        **({"kWidth": tile.block_n} if tile.cut else {}),
        "kStages": tile.stages,
        "kResultBuffers": tile.buffers,
        "kFloat16": int(problem.dtype == "float16"),
        "kBRowMajor": int(problem.b_row_major),
        "kNumNodes": problem.topology.num_nodes,
        "kRanksPerNode": problem.topology.ranks_per_node,
    }
    alone = problem.topology.size == 1  # of several ranks a kernel that waits would take SMs from what others wait for
    sizes = THREADS, tile.shared_bytes, parameter_bytes
    return KernelSpec(
        name,
        (*constants.items(), *more),
        *sizes,
        cluster=cluster,
        early=alone and early,
        clusters_are_apart=alone and apart and cluster > 1,
    )


def digest_of(plan: object) -> int:
    """64 bits that differ between any two plans; the low 24 travel in the entry flags. A plan's ``repr`` says all of it."""
    return int.from_bytes(hashlib.blake2b(repr(plan).encode(), digest_size=8).digest(), "little")


def raster(tile: int, tile_rows: int, tiles_n: int, group_m: int) -> tuple[int, int]:
    """Row and column of a tile: groups of ``group_m`` rows, which share columns of B, column by column."""
    group, inside = divmod(tile, group_m * tiles_n)
    rows = min(group_m, tile_rows - group * group_m)
    return group * group_m + inside % rows, inside // rows


def raster_number(row: int, column: int, tile_rows: int, tiles_n: int, group_m: int) -> int:
    """The number of the tile there."""
    first = row // group_m * group_m
    return first * tiles_n + column * min(group_m, tile_rows - first) + row - first


def row_of_b(n: int, k: int, row_major: bool) -> int:
    """Values of a row of B (``k x n``, or transposed) as it is stored."""
    return n if row_major else k


def shift_of(power: int) -> int:
    """The exponent of a power of two: kernels shift where they would divide.

    Raises
    ------
    ValueError
        It is none.
    """
    if power < 1 or power & (power - 1):
        raise ValueError(f"{power}: must be a power of two")
    return power.bit_length() - 1


def seconds_to_multiply(m: int, n: int, k: int, sm_count: int) -> float:
    """How long so many SMs take for a product of these sizes."""
    return 2 * m * n * k / (_SM_FLOPS * sm_count)


def choose_ctas(seconds_of_one: float, seconds: float, fewest: int, most: int) -> int:
    """How few CTAs, of ``fewest`` to ``most``, move in so many seconds what takes one CTA ``seconds_of_one``."""
    return next((ctas for ctas in range(fewest, most) if seconds_of_one <= ctas * seconds), most)


def choose_load_rows(rows: int) -> int:
    """How many rows of a tile of A to load, at most, where the matrix has ``rows``: whole warps' rows."""
    return tail_of(rows)[0]


def tail_of(rows: int, height: int = BLOCK_M, unit: int = WARP_ROWS) -> tuple[int, int, int]:
    """How many rows of a tile to load where A has ``rows``, at most; the last row of tiles; and how many for those: whole warps' rows.

    ``height``: rows of a tile; ``unit``: what is loaded is a multiple of it.
    """
    last = (rows - 1) // height if rows else 0
    tail = -(-(rows - last * height) // unit) * unit or unit
    return height if last else tail, last, tail


def choose_put(shard_bytes: int) -> int:
    """About how many bytes of a shard to put at a time. A power of two: kernels are compiled for few sizes."""
    size, most = _PUT_BYTES
    while size < most and 2 * size * _PUTS <= shard_bytes:
        size *= 2
    return size


@functools.lru_cache(maxsize=4096)
def choose_tile(tile_rows: int, n: int, sm_count: int, tail: float = 0.0, *, sent: bool = False) -> GemmTile:
    """The tile width that finishes ``tile_rows`` rows of tiles over ``n`` columns soonest, by counting waves.

    ``tail``: tiles' time that the end of a call costs, where tiles wait for data that comes until the end. ``sent``: as in ``deepest``.
    """

    def cost(block_n: int) -> tuple[float, int]:
        tiles = tile_rows * math.ceil(n / block_n)
        waves = tiles / sm_count if tiles > 4 * sm_count else math.ceil(tiles / sm_count)
        return (waves + tail) * block_n / _RELATIVE_SPEED[block_n], -block_n

    return GemmTile.deepest(min(_RELATIVE_SPEED, key=cost), sent=sent)
