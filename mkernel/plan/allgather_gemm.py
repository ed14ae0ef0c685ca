"""AllGather+GEMM: problem, plan and schedule. Pure Python; ``kernels_src/allgather_gemm.cuh`` is the device side of the same choices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from mkernel.jit.spec import KernelSpec
from mkernel.plan.gemm import (
    BLOCK_K,
    BLOCK_M,
    GROUP_M,
    THREADS,
    GemmPlan,
    GemmTile,
    choose_ctas,
    choose_load_rows,
    choose_put,
    choose_tile,
    raster,
    seconds_to_multiply,
)
from mkernel.plan.split import Split
from mkernel.plan.topology import Topology
from mkernel.plan.wait_graph import Step, WaitGraph

__all__ = ["OP", "AllGatherGemmPlan", "AllGatherGemmProblem", "Tile", "make_plan", "wait_graph"]

OP = "allgather_gemm"
PARAMETER_BYTES = 832  # sizeof(Parameters); ops/allgather_gemm.py mirrors the struct
_CHUNK_BYTES = 256 * 1024  # what a push must reach to use the link well
_WARP_CHUNK_BYTES = 32 * 1024  # what a warp pushes before it raises a flag, and waits; of all warps together it should be few tiles' rows
_PIECE_UNITS = 128  # of 128 bytes: the pieces of a copy (kernels_src/copy.cuh)
_SLICES = 2  # of a left-over tile
_SLICE_N = 64  # columns that a slice is a multiple of
_TAIL = 0.35  # of a tile's time: measured, where the last data come late
_PART_BYTES = 4096  # of a row: shorter ones cost more to copy than they save (measured, docs/benchmarks.md)
_FEW_WAVES = 6  # tiles per SM up to which the tail counts, and K travels in parts
_WARPS_BYTES, _LINK_BYTES = 220e9, 310e9  # per second, that the warps of all computing CTAs read, and send to all peers together
_CTA_READS, _CTA_WRITES = 40e9, 40e9  # the same for one CTA of intra_comm, beside the others' tiles
_IN_TIME = 0.45  # of the time that multiplying takes: when the last chunk should have come
_WARPS_GAIN = 1.05  # in waves of tiles, from which they are worth it
_HALVES = 0.57  # of a tile's time, that all SMs take for the halves of the last ones


@dataclasses.dataclass(frozen=True, slots=True)
class AllGatherGemmProblem:
    """What the ranks must agree on. ``rows`` is M / W."""

    topology: Topology
    rows: int
    n: int
    k: int
    dtype: str
    b_row_major: bool

    @property
    def result_shape(self) -> tuple[int, int]:
        return self.rows * self.topology.size, self.n


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """One tile of C: rows from ``m * BLOCK_M`` of rank ``source``'s shard, columns from ``n * block_n``.

    ``slice``: 0 for the whole tile, 1, 2 ... for that slice of its columns.
    """

    source: int
    m: int
    n: int
    slice: int = 0


@dataclasses.dataclass(frozen=True)
class AllGatherGemmPlan(GemmPlan[AllGatherGemmProblem]):
    """Tile, chunks, split and buffers for one problem on one kind of device."""

    chunk_rows: int  # rows of a chunk
    group_m: int = GROUP_M  # tile rows that share columns of B
    parts: int = 1  # K travels in this many parts
    part_blocks: int = 1  # blocks of chunk_rows whose first parts travel before their second parts
    slices: int = 1  # into which the tiles that would not fill the SMs once more are cut

    op = OP

    @functools.cached_property
    def spec(self) -> KernelSpec:
        constants = self.constants | {
            "kChunkRows": self.chunk_rows,
            "kParts": self.parts,
            "kPieceRows": self.piece_box[0],
            "kPieceUnits": self.piece_box[1],
            "kSlices": self.slices,
            "kLoadRows": self.load_rows,
        }
        return KernelSpec(OP, tuple(constants.items()), THREADS, self.tile.shared_bytes, PARAMETER_BYTES)

    @property
    def pushers(self) -> int:
        """Computing CTAs with a warp that pushes chunks, where the split has no intra_comm; else 0."""
        return self.grid if warps_push(self.problem.topology, self.split) else 0

    @property
    def piece_box(self) -> tuple[int, int]:
        """What one load of a copy gathers of a part of K: so many rows, and units of 64 elements of each."""
        return choose_piece(self.problem.k // self.parts) if self.parts > 1 else (1, 1)  # whole rows are contiguous

    @property
    def put_bytes(self) -> int:
        """Of a chunk on its way to another node."""
        return self.chunk_rows * self.problem.k * 2

    @property
    def plane_bytes(self) -> int:
        return self.problem.rows * self.problem.k * 2

    @property
    def workspace_bytes(self) -> int:
        """Of the data heap: the gather buffer, one plane per rank."""
        size = self.problem.topology.size
        return size * self.plane_bytes if size > 1 else 0

    @property
    def staging_bytes(self) -> int:
        """A copy of the shard for the network, unless the caller's lies on the heap."""
        return self.plane_bytes if self.problem.topology.num_nodes > 1 else 0

    @property
    def blocks(self) -> int:
        """Blocks of ``chunk_rows`` rows per shard."""
        return math.ceil(self.problem.rows / self.chunk_rows)

    @property
    def chunks(self) -> int:
        """Per shard."""
        return self.blocks * self.parts

    def chunk_index(self, block: int, part: int) -> int:
        """The number of a chunk in the order in which the chunks of a shard travel."""
        first = block // self.part_blocks * self.part_blocks
        return first * self.parts + part * min(self.part_blocks, self.blocks - first) + block - first

    packet_bytes = 0  # no packets in the signal segment

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
            f"{self.chunks} chunks of {self.chunk_rows} rows and 1/{self.parts} of K per shard\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm}, inter_send {split.inter_send}; "
            f"{f'chunks pushed by a warp of {self.pushers} of them; ' if self.pushers else ''}"
            f"workspace {self.workspace_bytes} bytes"
        )

    @property
    def load_rows(self) -> int:
        """Of a tile of A."""
        return choose_load_rows(self.problem.rows)

    # ---- the schedule (the mirror of Tiles in the kernel; a test compares them)
    @property
    def num_tiles(self) -> int:
        """Whole tiles, before any is halved."""
        return self.problem.topology.size * self.tile_rows * self.tiles_n

    @property
    def whole_tiles(self) -> int:
        """Tiles up to here are whole; the others are sliced."""
        return self.num_tiles - self.num_tiles % (self.split.compute or 1) if self.slices > 1 else self.num_tiles

    @property
    def b_columns(self) -> int:
        """Columns of one TMA load of a transposed ``b``."""
        return self.tile.block_n // self.slices

    def source(self, rank: int, distance: int) -> int:
        """The rank at a distance: 0 itself, then its node's others from the next on, then the other nodes', own rail first."""
        topology = self.problem.topology
        per_node = topology.ranks_per_node
        node = (topology.node(rank) + distance // per_node) % topology.num_nodes
        return topology.rank(node, (topology.local_rank(rank) + distance % per_node) % per_node)

    def tiles(self, rank: int) -> Iterator[Tile]:
        """The tiles of C on ``rank``, in the order in which its CTAs take them."""
        for index, tile in enumerate(self._whole(rank)):
            if index < self.whole_tiles:
                yield tile
            else:
                yield from (dataclasses.replace(tile, slice=part) for part in range(1, self.slices + 1))

    def _whole(self, rank: int) -> Iterator[Tile]:
        topology = self.problem.topology
        local, remote = topology.ranks_per_node - 1, topology.size - topology.ranks_per_node
        for shards, first in ((1, 0), (local, 1), (remote, topology.ranks_per_node)):
            rows = self.tile_rows * shards
            for index in range(rows * self.tiles_n):
                row, n = raster(index, rows, self.tiles_n, self.group_m)
                yield Tile(self.source(rank, first + row % shards), row // shards, n)

    def tile_chunks(self, tile: Tile) -> list[int]:
        """The chunks of its source's shard that a tile reads, part by part."""
        begin = tile.m * BLOCK_M
        end = min(begin + BLOCK_M, self.problem.rows)
        blocks = range(begin // self.chunk_rows, (end - 1) // self.chunk_rows + 1)
        return [self.chunk_index(block, part) for part in range(self.parts) for block in blocks]

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
    spared = ("intra_comm",) if topology.num_nodes == 1 else ()
    tile_rows = math.ceil(problem.rows / BLOCK_M)
    if tile is None:
        tile = choose_tile(max(1, tile_rows) * topology.size, problem.n, sm_count, _TAIL if topology.size > 1 else 0.0)
    tiles_n = math.ceil(problem.n / tile.block_n)
    tiles = tile_rows * topology.size * tiles_n
    wanted = split or Split()
    default = default_split(problem, sm_count, tiles)
    if wanted.compute is wanted.intra_comm is None and warps_pay(problem, tile, tiles, default.complete(default, sm_count)):
        wanted = dataclasses.replace(wanted, intra_comm=0)
    chosen = wanted.complete(default, sm_count, spared)
    few_waves = tiles <= _FEW_WAVES * sm_count
    parts = choose_parts(problem.k) if few_waves and topology.num_nodes == 1 < topology.size else 1
    chunk_bytes = _WARP_CHUNK_BYTES if warps_push(topology, chosen) else _CHUNK_BYTES
    if topology.num_nodes > 1:
        chunk_bytes = choose_put(problem.rows * problem.k * 2)
    chunk_rows = max(1, min(BLOCK_M, _ceil_power_of_two(chunk_bytes * parts // (problem.k * 2))))
    slices = choose_slices(tiles, tile, chosen) if few_waves else 1
    if parts == 1:
        return AllGatherGemmPlan(problem, chosen, tile, chunk_rows, slices=slices)
    # One group of blocks is what all SMs can work on at once: their tiles wait inside for the later parts.
    at_once = max(1, sm_count // (tiles_n * (topology.size - 1)))
    groups = math.ceil(max(1, tile_rows) / at_once)
    group_rows = math.ceil(max(1, tile_rows) / groups)
    return AllGatherGemmPlan(
        problem, chosen, tile, chunk_rows, group_rows * (topology.size - 1), parts, group_rows * (BLOCK_M // chunk_rows), slices
    )


def warps_push(topology: Topology, split: Split) -> bool:
    """Whether computing CTAs move the data inside a node."""
    return topology.ranks_per_node > 1 and not split.intra_comm


def choose_slices(tiles: int, tile: GemmTile, split: Split) -> int:
    """Into how many slices to cut the tiles that are left over when every compute CTA has had the same number.

    2 where all SMs can take the halves at once, the communication CTAs (which are done by then) included; else 1. Four slices were
    measured: so narrow, they are slower than two (docs/benchmarks.md).
    """
    compute = split.compute or 1
    odd = tiles % compute
    fits = tiles > compute and 0 < _SLICES * odd <= split.total
    return _SLICES if fits and tile.block_n % (_SLICES * _SLICE_N) == 0 else 1


def choose_parts(k: int) -> int:
    """Parts of K: whole steps of the main loop each, and rows long enough to be copied piecemeal, in pieces that are not small."""

    def good(parts: int) -> bool:
        return k % (parts * BLOCK_K) == 0 and k * 2 >= parts * _PART_BYTES and 2 * math.prod(choose_piece(k // parts)) >= _PIECE_UNITS

    return next((parts for parts in (4, 2) if good(parts)), 1)


def choose_piece(part_k: int) -> tuple[int, int]:
    """Rows, and units of 64 elements of each, that one load of a copy gathers: several whole rows, or an equal share of one."""
    units = part_k // BLOCK_K
    if units <= _PIECE_UNITS:
        return _PIECE_UNITS // units, units
    return 1, next(share for share in range(_PIECE_UNITS, 0, -1) if units % share == 0)


def default_split(problem: AllGatherGemmProblem, sm_count: int, tiles: int) -> Split:
    """Measured on H200: pushing to three peers peaks at 9 CTAs and falls beyond (docs/architecture.md).

    Where there is time, fewer push: tiles are multiplied faster beside a steady flow than beside a short flood (docs/benchmarks.md).
    """
    topology = problem.topology
    intra = min(8, max(1, sm_count // 4)) if topology.ranks_per_node > 1 else 0
    if topology.num_nodes == 1 < topology.size and tiles > _FEW_WAVES * sm_count:
        multiplying = seconds_to_multiply(problem.rows * topology.size, problem.n, problem.k, sm_count)
        pushing = _seconds_to_push(problem, _CTA_READS, _CTA_WRITES)
        intra = choose_ctas(pushing, _IN_TIME * multiplying, 2, intra)
    send = min(4, max(1, sm_count // 8)) if topology.num_nodes > 1 else 0
    return Split(intra_comm=intra, inter_send=send, inter_reduce=0)


def warps_pay(problem: AllGatherGemmProblem, tile: GemmTile, tiles: int, split: Split) -> bool:
    """Whether a call ends sooner if a warp of every CTA pushes than with ``split``, which has CTAs for it (docs/benchmarks.md).

    So between two ranks where all SMs need fewer waves for the tiles, and multiply longer than their warps push. What goes to several
    peers takes the link longer, and what the link cannot take yet stands in front of the loads of all SMs: on four GPUs a tile took 1.5
    times as long.
    """
    size, compute = problem.topology.size, split.compute or 1
    waves = math.ceil(tiles / split.total)
    otherwise = tiles // compute + _HALVES if choose_slices(tiles, tile, split) > 1 else math.ceil(tiles / compute)
    fewer = tiles <= _FEW_WAVES * split.total and otherwise >= _WARPS_GAIN * waves
    in_time = waves * tile.seconds(problem.k) >= _seconds_to_push(problem, _WARPS_BYTES, _LINK_BYTES)
    return problem.topology.num_nodes == 1 and size == 2 and fewer and in_time


def _seconds_to_push(problem: AllGatherGemmProblem, reads: float, writes: float) -> float:
    """The shard to all others, where so many bytes a second are read, and written to all of them together."""
    return problem.rows * problem.k * 2 * max(1 / reads, (problem.topology.size - 1) / writes)


def wait_graph(plan: AllGatherGemmPlan) -> WaitGraph:
    """Who waits for whom in one call, on all ranks (the roles of ``kernels_src/allgather_gemm.cuh``).

    Steps: ``("enter", rank)``, ``("push", rank, chunk)`` to the node, ``("put", rank, chunk, peer)``, ``("forward", rank, source, chunk)``
    to the node, ``("tile", rank, index)``. A rank's tiles are one chain, as if a single CTA computed: with more CTAs a tile waits for
    fewer.
    """
    graph, topology = WaitGraph(), plan.problem.topology
    for rank in range(topology.size):
        graph.add(("enter", rank))
        entered: list[Step] = [("enter", other) for other in range(topology.size)]
        if topology.ranks_per_node > 1:
            _intra_comm_steps(graph, plan, rank, entered)
        if topology.num_nodes > 1:
            _inter_send_steps(graph, plan, rank, entered)
        tiles = list(plan.tiles(rank))
        for i, tile in enumerate(tiles):
            chunks = plan.tile_chunks(tile) if tile.source != rank else ()
            graph.add(("tile", rank, i), [*entered, *(_arrival(plan, rank, tile.source, chunk) for chunk in chunks)])
        graph.chain(("tile", rank, i) for i in range(len(tiles)))
    return graph


def _arrival(plan: AllGatherGemmPlan, reader: int, source: int, chunk: int) -> Step:
    """The step that raises ``reader``'s flag for a chunk."""
    topology, writer = plan.problem.topology, plan.chunk_writer(reader, source)
    if writer != source:
        return ("forward", writer, source, chunk)
    return ("push", source, chunk) if topology.node(reader) == topology.node(source) else ("put", source, chunk, reader)


def _intra_comm_steps(graph: WaitGraph, plan: AllGatherGemmPlan, rank: int, entered: list[Step]) -> None:
    ctas, peers = plan.split.intra_comm or plan.pushers, plan.problem.topology.rail_peers(rank)
    for cta in range(ctas):
        own: list[Step] = [("push", rank, chunk) for chunk in range(cta, plan.chunks, ctas)]
        items = [divmod(item, len(peers)) for item in range(cta, plan.chunks * len(peers), ctas)] if peers else []
        forwarded: list[Step] = [("forward", rank, peers[peer], chunk) for chunk, peer in items]
        for step in own:
            graph.add(step, entered)
        for step, (chunk, peer) in zip(forwarded, items, strict=True):
            graph.add(step, [*entered, ("put", peers[peer], chunk, rank)])
        graph.chain([*own, *forwarded])


def _inter_send_steps(graph: WaitGraph, plan: AllGatherGemmPlan, rank: int, entered: list[Step]) -> None:
    ctas = plan.split.inter_send or 0
    for cta in range(ctas):
        puts: list[Step] = []
        for chunk in range(cta, plan.chunks, ctas):
            for peer in plan.problem.topology.rail_peers(rank):
                puts.append(graph.add(("put", rank, chunk, peer), entered))
        graph.chain(puts)


def _ceil_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
