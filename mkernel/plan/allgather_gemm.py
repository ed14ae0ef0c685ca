"""AllGather+GEMM: problem, plan and schedule. Pure Python; ``kernels_src/allgather_gemm.cuh`` is the device side of the same choices."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator

from mkernel.jit.spec import KernelSpec
from mkernel.plan.gemm import BLOCK_M, THREADS, GemmTile, choose_tile
from mkernel.plan.split import Split
from mkernel.plan.topology import Topology

__all__ = ["OP", "AllGatherGemmPlan", "AllGatherGemmProblem", "Tile", "make_plan"]

OP = "allgather_gemm"
PARAMETER_BYTES = 704  # sizeof(Parameters); ops/allgather_gemm.py mirrors the struct
_CHUNK_BYTES = 256 * 1024  # what a push must reach to use the link well
_PUT_BYTES = 512 * 1024  # the same for a put
_GROUP_M = 16  # tile rows that share their columns of B in L2; 16 measured best of 4, 8, 16


@dataclasses.dataclass(frozen=True, slots=True)
class AllGatherGemmProblem:
    """What the ranks must agree on. ``rows`` is M / W."""

    topology: Topology
    rows: int
    n: int
    k: int
    dtype: str
    b_row_major: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """One tile of C: rows from ``m * BLOCK_M`` of rank ``source``'s shard, columns from ``n * block_n``."""

    source: int
    m: int
    n: int


@dataclasses.dataclass(frozen=True)
class AllGatherGemmPlan:
    """Tile, chunks, split and buffers for one problem on one kind of device."""

    problem: AllGatherGemmProblem
    split: Split
    tile: GemmTile
    chunk_rows: int
    group_m: int = _GROUP_M

    op = OP

    @functools.cached_property
    def spec(self) -> KernelSpec:
        problem, topology = self.problem, self.problem.topology
        constants = {
            "kN": problem.n,
            "kK": problem.k,
            "kBlockN": self.tile.block_n,
            "kStages": self.tile.stages,
            "kFloat16": int(problem.dtype == "float16"),
            "kBRowMajor": int(problem.b_row_major),
            "kNumNodes": topology.num_nodes,
            "kRanksPerNode": topology.ranks_per_node,
            "kIntraComm": self.split.intra_comm or 0,
            "kInterSend": self.split.inter_send or 0,
            "kChunkRows": self.chunk_rows,
            "kGroupM": self.group_m,
        }
        return KernelSpec(OP, tuple(constants.items()), THREADS, self.tile.shared_bytes, PARAMETER_BYTES)

    @functools.cached_property
    def digest(self) -> int:
        """64 bits that differ between any two plans; the low 24 travel in the entry flags."""
        text = repr((OP, self.problem, self.split, self.tile, self.chunk_rows, self.group_m))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    @property
    def grid(self) -> int:
        return self.split.total

    @property
    def plane_bytes(self) -> int:
        return self.problem.rows * self.problem.k * 2

    @property
    def workspace_bytes(self) -> int:
        """Of the data heap: the gather buffer, one plane per rank."""
        size = self.problem.topology.size
        return size * self.plane_bytes if size > 1 else 0

    @property
    def chunks(self) -> int:
        """Per shard."""
        return math.ceil(self.problem.rows / self.chunk_rows)

    @property
    def flag_words(self) -> int:
        return self.problem.topology.size * self.chunks

    def describe(self) -> str:
        p = self.problem
        layout = "row-major" if p.b_row_major else "transposed"
        world, split = f"{p.topology.num_nodes}x{p.topology.ranks_per_node}", self.split
        sms = f"{split.compute}/{split.intra_comm}/{split.inter_send}"
        return (  # the first line stands for the plan in messages: it tells any two apart
            f"{OP}: a ({p.rows}, {p.k}) per rank, b ({p.k}, {p.n}) {layout}, {p.dtype}, {world} ranks, {sms} SMs\n"
            f"tile {BLOCK_M}x{self.tile.block_n}, {self.tile.stages} stages; {self.num_tiles} tiles, "
            f"{self.chunks} chunks of {self.chunk_rows} rows per shard\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm}, inter_send {split.inter_send}; "
            f"workspace {self.workspace_bytes} bytes"
        )

    # ---- the schedule (the mirror of Tiles in the kernel; a test compares them)
    @property
    def tile_rows(self) -> int:
        """Rows of tiles per shard."""
        return math.ceil(self.problem.rows / BLOCK_M)

    @property
    def tiles_n(self) -> int:
        return math.ceil(self.problem.n / self.tile.block_n)

    @property
    def num_tiles(self) -> int:
        return self.problem.topology.size * self.tile_rows * self.tiles_n

    def source(self, rank: int, distance: int) -> int:
        """The rank at a distance: 0 itself, then its node's others from the next on, then the other nodes', own rail first."""
        topology = self.problem.topology
        per_node = topology.ranks_per_node
        node = (topology.node(rank) + distance // per_node) % topology.num_nodes
        return topology.rank(node, (topology.local_rank(rank) + distance % per_node) % per_node)

    def tiles(self, rank: int) -> Iterator[Tile]:
        """The tiles of C on ``rank``, in the order in which its CTAs take them."""
        topology = self.problem.topology
        local, remote = topology.ranks_per_node - 1, topology.size - topology.ranks_per_node
        for shards, first in ((1, 0), (local, 1), (remote, topology.ranks_per_node)):
            rows = self.tile_rows * shards
            for group in range(0, rows, self.group_m):
                in_group = min(self.group_m, rows - group)
                for n in range(self.tiles_n):
                    for row in range(group, group + in_group):
                        yield Tile(self.source(rank, first + row % shards), row // shards, n)

    def tile_chunks(self, tile: Tile) -> range:
        """The chunks of its source's shard that a tile reads."""
        begin = tile.m * BLOCK_M
        end = min(begin + BLOCK_M, self.problem.rows)
        return range(begin // self.chunk_rows, (end - 1) // self.chunk_rows + 1)

    def chunk_writer(self, reader: int, source: int) -> int:
        """The rank that raises ``reader``'s flags for ``source``'s chunks."""
        topology = self.problem.topology
        if topology.node(reader) == topology.node(source) or topology.local_rank(reader) == topology.local_rank(source):
            return source
        return topology.rank(topology.node(reader), topology.local_rank(source))


def make_plan(problem: AllGatherGemmProblem, sm_count: int, split: Split | None = None, tile: GemmTile | None = None) -> AllGatherGemmPlan:
    """The plan for a problem on a device with ``sm_count`` SMs.

    Raises
    ------
    SplitError
        ``split`` does not fit.
    """
    topology = problem.topology
    chunk_bytes = _PUT_BYTES if topology.num_nodes > 1 else _CHUNK_BYTES
    chunk_rows = max(1, min(BLOCK_M, _ceil_power_of_two(chunk_bytes // (problem.k * 2))))
    chosen = (split or Split()).complete(default_split(topology, sm_count), sm_count)
    if tile is None:
        tile = choose_tile(max(1, math.ceil(problem.rows / BLOCK_M)) * topology.size, problem.n, sm_count)
    return AllGatherGemmPlan(problem, chosen, tile, chunk_rows)


def default_split(topology: Topology, sm_count: int) -> Split:
    """Measured on H200: pushing to three peers peaks at 9 CTAs and falls beyond (docs/architecture.md)."""
    intra = min(8, max(1, sm_count // 4)) if topology.ranks_per_node > 1 else 0
    send = min(4, max(1, sm_count // 8)) if topology.num_nodes > 1 else 0
    return Split(intra_comm=intra, inter_send=send, inter_reduce=0)


def _ceil_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
