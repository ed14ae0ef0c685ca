"""AllGather+GEMM: problem, plan and schedule. Pure Python; the device side is ``kernels_src/ops/allgather_gemm.cuh``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.planner import pairs
from mkernel.planner.derived import derived, hashed_once
from mkernel.planner.gather_sizes import Sizes, sizes_of
from mkernel.planner.gemm import (
    BLOCK_M,
    GROUP_M,
    GemmPlan,
    GemmTile,
    choose_load_rows,
    choose_put,
    raster,
    shift_of,
)
from mkernel.planner.k_parts import choose_piece
from mkernel.planner.pairs import Paired
from mkernel.planner.pushing import FEW_WAVES, default_split, most_parts, warps_pay, warps_push
from mkernel.planner.row_classes import EXAMINED_ROWS, MOST_KERNELS, class_of, classes, most_chosen
from mkernel.planner.slices import choose_slices, most_slices
from mkernel.planner.spans import Product, choose, spans_of
from mkernel.planner.specialize import Specialized, parse, remark
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

__all__ = ["OP", "SHARE", "SUM", "AllGatherGemmPlan", "AllGatherGemmProblem", "Tile", "make_plan"]

OP = "allgather_gemm"
SHARE, SUM = 1, 2  # what a tile stands for, if not for all of itself
SPECIALIZED = Specialized(["k"])  # by default: K with every call costs 1.3 % at 2048 and 0.4 % at 16384 (docs/benchmarks.md)
PARAMETER_BYTES = 1088  # sizeof(Parameters); ops/allgather_gemm.py mirrors the struct
_CHUNK_BYTES = 256 * 1024  # what a push must reach to use the link well
_WARP_CHUNK_BYTES = 32 * 1024  # what a warp pushes before it raises a flag, and waits; of all warps together it should be few tiles' rows
_TAIL = 0.35  # of a tile's time: measured, where the last data come late
_ARGUMENTS = (  # of a launch
    *("rows", "whole_tiles", "group_m", "part_blocks", "chunk_shift", "part_shift", "piece_rows", "piece_units"),
    *("load_rows", "span", "shares"),
)
# What the 16 to 18 SMs of a GPC read at the same time is read from L2 once, and CTAs that follow each other are of one GPC: so where
# all tiles are worked on at once, or in two waves, blocks of 4 x 4 of them read least (docs/speed_log.md).
_GPC_GROUP_M, _GPC_WAVES = 4, 2
_PACKET_RANKS = 8  # of a node: more would need more registers
_PACKET_SHARDS = 16 << 10  # bytes of all shards, for each SM, up to which they travel in packets
_FEW_CHUNK_BYTES = 8 * 1024  # where tiles wait for all shards, which then travel by as many CTAs as there are, in no smaller pieces


@hashed_once
@dataclasses.dataclass(frozen=True)
class AllGatherGemmProblem:
    """What the ranks agree on once; each call has its own number of rows (M / W)."""

    topology: Topology
    n: int
    k: int
    dtype: str
    b_row_major: bool
    canonical: bool = False  # a row's bits do not depend on the number of rows: K is added in one order, by one CTA

    def result_shape(self, rows: int) -> tuple[int, int]:
        return rows * self.topology.size, self.n


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """One tile of C: rows from ``m * BLOCK_M`` of plane ``plane``, columns from ``n * block_n``.

    A plane is the shards of ``span`` ranks that follow each other: of ranks ``plane * span`` on. ``slice``: 0 for the whole tile, 1, 2 ...
    for that slice of its columns. Where CTAs share K: ``kind`` SHARE for share ``share`` of K, SUM for that slice of the sum of all shares.
    """

    plane: int
    m: int
    n: int
    slice: int = 0
    kind: int = 0
    share: int = 0


@dataclasses.dataclass(frozen=True)
class AllGatherGemmPlan(GemmPlan[AllGatherGemmProblem]):
    """Tile, chunks, split and buffers for one problem and one number of rows (M / W), on one kind of device."""

    chunk_rows: int  # rows of a chunk
    group_m: int = GROUP_M  # tile rows that share columns of B
    parts: int = 1  # K travels in this many parts
    part_blocks: int = 1  # blocks of chunk_rows whose first parts travel before their second parts
    slices: int = 1  # into which the tiles that would not fill the SMs once more are cut
    span: int = 1  # ranks whose shards are one plane of tiles; with more than one, the own shard is kept in the gather buffer, too
    shares: int = 1  # CTAs, or pairs, that share K of a tile, as far as there is room for packets
    cluster: int = 1  # CTAs that take tiles, and load B, together: neighbours in M (kernels_src/tile/pair.cuh)
    packets: bool = False  # inside a node: shards travel in words that are their own flags, moved by the consumers of all CTAs
    specialize: frozenset[str] = SPECIALIZED  # fields that are compiled in

    op = OP
    of_class = (
        *("spec", "fields", "tiles_n", "piece_box", "shifts", "planes", "pushers", "taken_group_m"),
        *("of_sizes", "of_arguments", "of_maps"),
    )

    @derived
    def spec(self) -> KernelSpec:
        plain = self.shares == self.cluster == 1 and not self.packets
        slices, parts = (most_slices(self.tile), int(most_parts(self.problem) > 1)) if plain else (1, 0)
        more = {"kSlices": slices, "kHasParts": parts, "kShares": int(self.shares > 1 or self.packets), "kPackets": int(self.packets)}
        return self.spec_with(OP, PARAMETER_BYTES, self.cluster, alone=1, **more)

    @property
    def arguments(self) -> dict[str, int]:
        """What the parameters of a launch say of the schedule, in their order."""
        return dict(zip(_ARGUMENTS, self.arguments_of(self.rows, self.sizes), strict=True))

    def arguments_of(self, rows: int, sizes: Sizes) -> tuple[int, ...]:
        """The values of ``arguments`` in a call of so many rows of the class."""
        return rows, sizes.whole_tiles, *self.of_arguments, sizes.load_rows, self.span, sizes.shares

    @derived
    def of_arguments(self) -> tuple[int, ...]:
        """Those of them that all calls of a class have in common, from ``group_m`` on."""
        return self.taken_group_m, self.part_blocks, *self.shifts, *self.piece_box

    @derived
    def of_maps(self) -> tuple[int, int, int, int, int, int]:
        """What tensor maps are made by: parts, planes, columns of a tile and of a slice's load, CTAs of a cluster, whether K is shared."""
        sliced = self.b_columns if self.slices > 1 and not self.problem.b_row_major else 0
        return self.parts, self.planes, self.tile.block_n, sliced, self.cluster, int(self.shares > 1)

    @derived
    def sizes(self) -> Sizes:
        return self.sizes_of(self.rows)

    def sizes_of(self, rows: int) -> Sizes:
        """What follows from the rows of a call of the class: all at once, because every call of a new size needs all."""
        span, cluster, columns, computing, grid, slices, shares, pushers, share_bytes = self.of_sizes
        plane_rows = span * rows
        tile_rows = -(-plane_rows // BLOCK_M)
        taken_rows = -(-tile_rows // cluster)
        tiles, taken = columns * tile_rows, columns * taken_rows
        sliced = tiles % (computing or 1) if slices > 1 else 0
        if shares > 1 and taken:
            shares = max(1, min(shares, abi.PACKET_BYTES // (taken * share_bytes)))
        if not pushers:  # else each has chunks to push
            grid += min(0, max(1, taken * shares + (slices - 1) * sliced) * cluster - computing)
        return sizes_of((plane_rows, tile_rows, taken_rows, taken, tiles, tiles - sliced, grid, choose_load_rows(plane_rows), shares))

    @derived
    def of_sizes(self) -> tuple[int, ...]:
        """What ``sizes_of`` starts from: span, cluster, columns of tiles, CTAs, slices, shares, and bytes of packets of a share."""
        split, share_bytes = self.split, self.cluster * BLOCK_M * self.tile.block_n * 4
        computing, columns = split.compute or 0, self.planes * self.tiles_n
        return self.span, self.cluster, columns, computing, split.total, self.slices, self.shares, self.pushers, share_bytes

    @derived
    def pushers(self) -> int:
        """Computing CTAs with a warp that pushes chunks, where the split has no intra_comm; else 0."""
        return (self.split.compute or 0) if not self.packets and warps_push(self.problem.topology, self.split, self.span) else 0

    @derived
    def shifts(self) -> tuple[int, int]:
        """Shifts by which to divide by the rows of a chunk, and by the parts of K."""
        return shift_of(self.chunk_rows), shift_of(self.parts)

    @derived
    def piece_box(self) -> tuple[int, int]:
        """What one load of a copy gathers of a part of K: so many rows, and units of 64 elements of each."""
        return choose_piece(self.problem.k // self.parts) if self.parts > 1 else (1, 1)  # whole rows are contiguous

    @property
    def grid(self) -> int:
        return self.sizes.grid

    @property
    def put_bytes(self) -> int:
        """Bytes of a chunk on its way to another node."""
        return self.chunk_rows * self.problem.k * 2

    @derived
    def shard_bytes(self) -> int:
        return self.shard_bytes_of(self.rows)

    def shard_bytes_of(self, rows: int) -> int:
        """In a call of so many rows."""
        return rows * self.problem.k * 2

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the data heap: the gather buffer, one shard per rank."""
        size = self.problem.topology.size
        return size * self.shard_bytes if size > 1 else 0

    @property
    def staging_bytes(self) -> int:
        """A copy of the shard for the network, unless the caller's lies on the heap."""
        return self.shard_bytes if self.problem.topology.num_nodes > 1 else 0

    @property
    def blocks(self) -> int:
        """Blocks of ``chunk_rows`` rows per shard."""
        return math.ceil(self.rows / self.chunk_rows)

    @property
    def chunks(self) -> int:
        """Per shard."""
        return self.blocks * self.parts

    def chunk_index(self, block: int, part: int) -> int:
        """The number of a chunk in the order in which the chunks of a shard travel."""
        first = block // self.part_blocks * self.part_blocks
        return first * self.parts + part * min(self.part_blocks, self.blocks - first) + block - first

    @property
    def packet_bytes(self) -> int:
        """Bytes of the range of packets in the signal segment: unrounded sums of all shares."""
        shares = self.sizes.shares if self.sizes.shares > 1 else 0
        return self.taken * shares * self.cluster * BLOCK_M * self.tile.block_n * 4

    @property
    def ahead_bytes(self) -> int:
        """Bytes of packets of shards, a range for each source, that are sent before their rank has entered."""
        return self.problem.topology.size * self.shard_bytes if self.packets else 0

    @property
    def flag_words(self) -> int:
        return 0 if self.packets else self.problem.topology.size * self.chunks

    def describe(self) -> str:
        p = self.problem
        layout = "row-major" if p.b_row_major else "transposed"
        world, split = f"{p.topology.num_nodes}x{p.topology.ranks_per_node}", self.split
        sms = f"{split.compute}/{split.intra_comm}/{split.inter_send}"
        return (  # the first line stands for the plan in messages: it tells any two apart
            f"{OP}: a ({self.rows}, {p.k}) per rank, b ({p.k}, {p.n}) {layout}, {p.dtype}, {world} ranks, {sms} SMs"
            f"{remark(self.specialize, SPECIALIZED)}\n"
            f"tile {BLOCK_M}x{self.tile.block_n}, {self.tile.stages} stages; {self.num_tiles} tiles"
            f"{f' over the shards of {self.span} ranks each' if self.span > 1 else ''}"
            f"{f', K shared by {self.sizes.shares} CTAs' if self.sizes.shares > 1 else ''}{', pairs of CTAs' if self.cluster > 1 else ''}, "
            f"{'packets' if self.packets else f'{self.chunks} chunks of {self.chunk_rows} rows and 1/{self.parts} of K per shard'}\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm}, inter_send {split.inter_send}; "
            f"{f'chunks pushed by a warp of {self.pushers} of them; ' if self.pushers else ''}"
            f"workspace {self.workspace_bytes} bytes"
        )

    def flag_name(self, rank: int, index: int) -> str:
        """What a flag tells ``rank``, for reports."""
        if self.packets:
            return "packets of the shards"
        source, chunk = divmod(index, self.chunks)
        block, part = next((b, p) for b in range(self.blocks) for p in range(self.parts) if self.chunk_index(b, p) == chunk)
        begin = block * self.chunk_rows
        rows = f"rows {begin} to {min(begin + self.chunk_rows, self.rows) - 1}"
        return f"chunk {chunk} of rank {source}'s shard: {rows}{f', part {part} of K' if self.parts > 1 else ''}"

    @property
    def load_rows(self) -> int:
        return self.sizes.load_rows

    # ---- the schedule (the mirror of Tiles in the kernel; a test compares them)
    @derived
    def planes(self) -> int:
        return self.problem.topology.size // self.span

    @property
    def near_planes(self) -> int:
        """Planes with shards of one node."""
        return max(1, self.problem.topology.ranks_per_node // self.span)

    @property
    def plane_rows(self) -> int:
        return self.sizes.plane_rows

    @property
    def tile_rows(self) -> int:
        return self.sizes.tile_rows

    @derived
    def taken_group_m(self) -> int:
        """``group_m`` in what clusters take at a time."""
        return max(1, self.group_m // self.cluster)

    @property
    def num_tiles(self) -> int:
        return self.sizes.num_tiles

    @property
    def taken(self) -> int:
        """Tiles, or pairs of them, that clusters take at a time."""
        return self.sizes.taken

    @property
    def whole_tiles(self) -> int:
        return self.sizes.whole_tiles

    @property
    def b_columns(self) -> int:
        """Columns of one TMA load of a transposed ``b``, for a sliced tile."""
        return self.tile.block_n // most_slices(self.tile)

    def plane(self, rank: int, distance: int) -> int:
        """The plane at a distance: 0 has the rank's own shard, then come its node's others from the next on, then the other nodes'.

        Of each other node comes first the plane in the own one's place: with a shard per plane that of the own rail.
        """
        near, own = self.near_planes, rank // self.span
        group = (own // near + distance // near) % (self.planes // near)
        return group * near + (own + distance) % near

    def waits(self, rank: int, tile: Tile) -> bool:
        """Whether a tile waits for chunks: it is no sum of shares, and does not read the rank's own array alone."""
        return tile.kind != SUM and (self.span > 1 or tile.plane != rank)

    def tiles(self, rank: int) -> Iterator[Tile]:
        """The tiles of C on ``rank``, in the order in which its CTAs take them."""
        taken = list(self._taken(rank))
        shared, whole = (taken, []) if self.sizes.shares > 1 else ([], taken)
        for index, tile in enumerate(itertools.chain.from_iterable(whole)):
            if index < self.whole_tiles:
                yield tile
            else:
                yield from (dataclasses.replace(tile, slice=part) for part in range(1, self.slices + 1))
        for kind, together in itertools.product((SHARE, SUM), shared):
            for share in range(self.sizes.shares):
                yield from (dataclasses.replace(tile, kind=kind, share=share) for tile in together)

    def _taken(self, rank: int) -> Iterator[list[Tile]]:
        """Whole tiles, together those that the CTAs of a cluster take together."""
        near = self.near_planes
        for planes, first in ((1, 0), (near - 1, 1), (self.planes - near, near)):
            rows = self.sizes.taken_rows * planes
            for index in range(rows * self.tiles_n):
                row, n = raster(index, rows, self.tiles_n, self.taken_group_m)
                together = range(row // planes * self.cluster, (row // planes + 1) * self.cluster)
                yield [Tile(self.plane(rank, first + row % planes), m, n) for m in together if m < self.tile_rows]

    def tile_chunks(self, tile: Tile) -> list[tuple[int, int]]:
        """What a tile reads, part by part: the ranks whose shards it covers, and chunks of these."""
        begin = tile.m * BLOCK_M
        last = min(begin + BLOCK_M, self.plane_rows) - 1
        blocks = [
            (tile.plane * self.span + shard, block)
            for shard in range(begin // self.rows, last // self.rows + 1)
            for block in range(
                max(begin - shard * self.rows, 0) // self.chunk_rows,
                min(last - shard * self.rows, self.rows - 1) // self.chunk_rows + 1,
            )
        ]
        return [(source, self.chunk_index(block, part)) for part in range(self.parts) for source, block in blocks]

    def chunk_writer(self, reader: int, source: int) -> int:
        """The rank that raises ``reader``'s flags for ``source``'s chunks."""
        topology = self.problem.topology
        if topology.node(reader) == topology.node(source) or topology.local_rank(reader) == topology.local_rank(source):
            return source
        return topology.rank(topology.node(reader), topology.local_rank(source))


def make_plan(
    problem: AllGatherGemmProblem,
    rows: int,
    sm_count: int,
    split: Split | None = None,
    tile: GemmTile | None = None,
    specialize: str | Iterable[str] | None = None,
    tiling: Tiling | None = None,
) -> AllGatherGemmPlan:
    """The plan for ``rows`` rows of each rank on a device with ``sm_count`` SMs. All choices are those for the most rows of their class.

    ``specialize``: as ``planner/specialize.py`` parses it. ``tiling``: what is not predicted, but asked for.

    Raises
    ------
    SplitError
        ``split`` does not fit.
    TilingError
        Shards of ``tiling.span`` ranks cannot be a plane in this world, or K cannot be shared.
    """
    compiled_in, of_class = parse(specialize, SPECIALIZED), class_of(rows)
    asked = tiling or Tiling()
    if problem.canonical:
        if asked.shares not in (None, 1):
            raise TilingError(f"{asked}: with batch_invariant one CTA adds up all of K")
        asked = dataclasses.replace(asked, shares=1)
    if asked.cluster == 2 and asked.shares is None:
        asked = dataclasses.replace(asked, shares=1)
    if asked.block_n is not None:
        tile = GemmTile.deepest(asked.block_n)
    if tile is not None:
        asked = dataclasses.replace(asked, cluster=asked.cluster or 1)
    plan = _plan_of_class(problem, of_class, sm_count, split, tile, compiled_in, asked)
    if (asked.shares is None and plan.shares > 1) or (asked.cluster is None and plan.cluster > 1):
        room = _room(problem, sm_count, compiled_in)
        asked = dataclasses.replace(asked, shares=asked.shares or room.shares, cluster=asked.cluster or room.cluster)
        plan = _plan_of_class(problem, of_class, sm_count, split, tile, compiled_in, asked)
    if split is None and tile is None and (asked.shares, asked.cluster) == (None, None) and "split" in compiled_in:
        kept = _kept_kernels(problem, sm_count, compiled_in)
        if all(plan.spec != other.spec for other in kept):
            near = min(kept, key=lambda other: (abs(other.rows - of_class), other.rows))
            alike = dataclasses.replace(asked, shares=near.shares, cluster=near.cluster)
            plan = _plan_of_class(problem, of_class, sm_count, near.split, near.tile, compiled_in, alike)
    return plan.of_rows(rows)


@functools.lru_cache(maxsize=64)
def _room(problem: AllGatherGemmProblem, sm_count: int, specialize: Specialized) -> Tiling:
    """What is left out, by the value 1, so that all classes together have few enough kernels: nothing, shares of K, pairs of CTAs, both."""
    if problem.topology.size != 2 or "split" in specialize:  # warps push between two ranks only; of splits, few are kept anyway
        return Tiling()
    for room in (Tiling(), Tiling(shares=1), Tiling(cluster=1)):
        plans = (_plan_of_class(problem, rows, sm_count, None, None, specialize, room) for rows in classes(EXAMINED_ROWS))
        if len({plan.spec for plan in plans}) <= MOST_KERNELS:
            return room
    return Tiling(shares=1, cluster=1)  # a kernel for each tile width, whoever pushes


@functools.lru_cache(maxsize=64)
def _kept_kernels(problem: AllGatherGemmProblem, sm_count: int, specialize: Specialized) -> list[AllGatherGemmPlan]:
    """Plans of the classes that choose one of the kernels that the most classes choose.

    A class whose own choice is not among them takes the kernel of the nearest plan. Classes beyond those that are looked at, too.
    """
    plans = [_plan_of_class(problem, rows, sm_count, None, None, specialize, Tiling()) for rows in classes(EXAMINED_ROWS)]
    kept = most_chosen(plan.spec for plan in plans)
    return [plan for plan in plans if plan.spec in kept]


def _plan_of_class(
    problem: AllGatherGemmProblem,
    rows: int,
    sm_count: int,
    split: Split | None,
    tile: GemmTile | None,
    specialize: Specialized,
    asked: Tiling,
) -> AllGatherGemmPlan:
    topology = problem.topology
    if _takes_packets(problem, rows, sm_count, split, asked):
        return _plan_with_packets(problem, rows, sm_count, split, tile, specialize, asked)
    spared = ("intra_comm",) if topology.num_nodes == 1 else ()
    tail = _TAIL if topology.size > 1 else 0.0
    covering = choose(Product(topology, rows, problem.n, problem.k, sm_count), tail, tile, asked.span, asked.shares)
    if covering is None:
        possible = ", ".join(map(str, spans_of(topology)))
        rule = f"span must be one of {possible} in this world, and shares at most the k steps, on one node"
        raise TilingError(f"{asked}: {rule}")
    span, tile, shares = covering
    tile_rows, tiles_n = math.ceil(span * rows / BLOCK_M), math.ceil(problem.n / tile.block_n)
    tiles = tile_rows * (topology.size // span) * tiles_n
    wanted, default = split or Split(), default_split(problem, rows, sm_count, tiles)
    cluster, paired = asked.cluster or 1, None
    if asked.cluster is None and span == shares == 1 < topology.size:  # in a world of one the model decides
        product = Paired(topology.size, rows, problem.n, problem.k, problem.b_row_major)
        paired = pairs.choose(product, tile, wanted, default, sm_count, spared)
    if paired is not None:
        cluster, (tile, wanted) = 2, paired
    if wanted.compute is wanted.intra_comm is None and span == shares == cluster == 1 and warps_pay(problem, rows, tile, sm_count):
        wanted = dataclasses.replace(wanted, intra_comm=0)
    chosen = pairs.complete(wanted, default, sm_count, spared, cluster)
    few_waves = tiles <= FEW_WAVES * sm_count
    all_at_once = tiles <= (chosen.compute or 1)  # tiles that span shards wait for all chunks of a part, wherever they begin
    plain = shares == cluster == 1
    parts = most_parts(problem) if plain and (few_waves if span == 1 else all_at_once) else 1
    chunk_bytes = _WARP_CHUNK_BYTES if warps_push(topology, chosen) else _CHUNK_BYTES
    if topology.num_nodes > 1:
        chunk_bytes = choose_put(rows * problem.k * 2)
    elif span > 1:
        movers = chosen.intra_comm or chosen.compute or 1
        chunk_bytes = min(chunk_bytes, max(_FEW_CHUNK_BYTES, rows * problem.k * 2 // movers))
    chunk_rows = max(1, min(BLOCK_M, _ceil_power_of_two(chunk_bytes * parts // (problem.k * 2))))
    slices = choose_slices(tiles, tile, chosen) if few_waves and plain else 1
    if parts == 1:
        group_m = _GPC_GROUP_M if topology.size == 1 and tiles <= _GPC_WAVES * (chosen.compute or 1) else GROUP_M
        return AllGatherGemmPlan(
            problem, rows, chosen, tile, chunk_rows, group_m, 1, 1, slices, span, shares, cluster, specialize=specialize
        )
    if span > 1:  # all first parts, then all second parts
        blocks = math.ceil(rows / chunk_rows)
        return AllGatherGemmPlan(
            problem, rows, chosen, tile, chunk_rows, parts=parts, part_blocks=blocks, slices=slices, span=span, specialize=specialize
        )
    # One group of blocks is what all SMs can work on at once: their tiles wait inside for the later parts.
    at_once = max(1, sm_count // (tiles_n * (topology.size - 1)))
    groups = math.ceil(max(1, tile_rows) / at_once)
    group_rows = math.ceil(max(1, tile_rows) / groups)
    return AllGatherGemmPlan(
        problem,
        rows,
        chosen,
        tile,
        chunk_rows,
        group_rows * (topology.size - 1),
        parts,
        group_rows * (BLOCK_M // chunk_rows),
        slices,
        specialize=specialize,
    )


def _takes_packets(problem: AllGatherGemmProblem, rows: int, sm_count: int, split: Split | None, asked: Tiling) -> bool:
    """Whether shards travel in packets: few rows inside a node, if neither CTAs that push nor narrower planes are asked for.

    Raises TilingError where packets are asked for and the world has none. More bytes than there is room for travel in chunks all the same.
    """
    topology, shards = problem.topology, problem.topology.size * rows * problem.k * 2
    inside = topology.num_nodes == 1 < topology.size <= _PACKET_RANKS
    possible = inside and not (split and split.intra_comm) and asked.span in (None, topology.size)
    if asked.packets and not possible:
        rule = f"shards travel in packets inside a node of 2 to {_PACKET_RANKS} ranks, without intra_comm, in one plane"
        raise TilingError(f"{asked}: {rule}")
    if asked.packets is None:
        return possible and asked.span is None and 0 < shards <= min(_PACKET_SHARDS * sm_count, abi.AHEAD_BYTES)
    return bool(asked.packets) and 0 < shards <= abi.AHEAD_BYTES


def _plan_with_packets(
    problem: AllGatherGemmProblem,
    rows: int,
    sm_count: int,
    split: Split | None,
    tile: GemmTile | None,
    specialize: Specialized,
    asked: Tiling,
) -> AllGatherGemmPlan:
    """Tiles as of a rank that has all rows: none begins before all shards are there."""
    size, wanted, cluster = problem.topology.size, dataclasses.replace(split or Split(), intra_comm=0), asked.cluster or 1
    covering = choose(Product(Topology(1, 1), size * rows, problem.n, problem.k, sm_count), 0.0, tile, None, asked.shares)
    if covering is None:
        raise TilingError(f"{asked}: shares must be at most the k steps")
    _, tile, shares = covering
    chosen = pairs.complete(wanted, Split(None, 0, 0, 0), sm_count, (), cluster)
    tiles = math.ceil(size * rows / BLOCK_M) * math.ceil(problem.n / tile.block_n)
    group_m = _GPC_GROUP_M if tiles <= _GPC_WAVES * (chosen.compute or 1) else GROUP_M
    return AllGatherGemmPlan(
        problem, rows, chosen, tile, BLOCK_M, group_m, 1, 1, 1, size, shares, cluster, packets=True, specialize=specialize
    )


def _ceil_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
