"""AllGather+GEMM: problem, plan and schedule, which ``allgather_gemm.py`` chooses.

The device side is ``kernels_src/ops/allgather_gemm.cuh``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.planner.derived import derived, hashed_once
from mkernel.planner.gather_sizes import Sizes, sizes_of
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GROUP_M, WARP_ROWS, GemmPlan, raster, shift_of, tail_of
from mkernel.planner.heights import SWAPPED_COLUMNS, SWAPPED_UNIT, Heights, bits_of, halves_rows, height_of, several_blocks, unit_of
from mkernel.planner.k_parts import choose_piece
from mkernel.planner.pairs import clusters_name, tiles_of_cluster
from mkernel.planner.pushing import most_parts, warps_push
from mkernel.planner.slices import most_slices, sliced_tiles
from mkernel.planner.specialize import Specialized, remark
from mkernel.planner.topology import Topology

__all__ = ["OP", "PARAMETER_BYTES", "SHARE", "SPECIALIZED", "SUM", "AllGatherGemmPlan", "AllGatherGemmProblem", "Tile"]

OP = "allgather_gemm"
SHARE, SUM = 1, 2  # what a tile stands for, if not for all of itself
SPECIALIZED = Specialized(["k"])  # by default: K with every call costs 1.3 % at 2048 and 0.4 % at 16384 (docs/benchmarks.md)
PARAMETER_BYTES = 1472  # sizeof(Parameters); ops/allgather_gemm.py mirrors the struct
_LOW_WIDTH = 128  # columns of tiles, at most, of kernels with more stages where rows are few
_TAKEN_ROWS = 128  # rows of a k step times k steps that the consumers of a CTA take in a round
_ARGUMENTS = (  # of a launch
    *("rows", "whole_tiles", "group_m", "part_blocks", "chunk_shift", "part_shift", "piece_rows", "piece_units"),
    *("load_rows", "span", "shares", "last_row", "tail_rows", "block_rows", "stages", "columns"),
)


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
    """One tile of C: rows from ``m * block_rows`` of plane ``plane``, columns from ``n * columns``, of the plan.

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
    slices: int = 1  # into which the tiles that would not fill the SMs once more are cut, where few are left
    span: int = 1  # ranks whose shards are one plane of tiles; with more than one, the own shard is kept in the gather buffer, too
    shares: int = 1  # CTAs, or pairs, that share K of a tile, as far as there is room for packets
    cluster: int = 1  # CTAs that take tiles, and load B, together: neighbours in M (kernels_src/tile/pair.cuh)
    cluster_n: int = 1  # the same of neighbours in N, which load A together
    packets: bool = False  # inside a node: shards travel in words that are their own flags, moved by the consumers of all CTAs
    tagged: bool = False  # packets of which each CTA takes the rows of its tile, out of as many bytes again (comm/tagged_packets.cuh)
    # Rows of tiles of a plane whose operands are swapped: they are as high as that needs. 0: tiles have BLOCK_M rows.
    swapped: int = 0
    swapped_columns: int = SWAPPED_COLUMNS  # of those tiles
    heights: Heights = ()  # that they have in the kernel
    tiles_at_once: int = 1  # 2: the warpgroups have those tiles in turn
    cluster_k: int = 1  # CTAs of a cluster that share K: all shares, or 1 (kernels_src/tile/cluster_sums.cuh)
    specialize: frozenset[str] = SPECIALIZED  # fields that are compiled in

    op = OP
    of_class = (
        *("spec", "fields", "columns", "tiles_n", "taken_columns", "ctas_together"),
        *("piece_box", "shifts", "planes", "pushers", "taken_group_m"),
        *("of_sizes", "of_arguments", "of_maps"),
    )

    @derived
    def spec(self) -> KernelSpec:
        plain = self.shares == self.ctas_together == 1 and not self.packets and not self.swapped
        slices, parts = (most_slices(self.tile), int(self._may_have_parts)) if plain else (1, 0)
        # With swapped operands one kernel is for several heights of tiles, and, of CTAs alone, for all shares of K.
        alone = self.ctas_together == 1 and self.problem.topology.num_nodes == 1
        several = several_blocks(self.swapped_columns, self.tiles_at_once)
        may_share = self.shares > 1 or (alone and not several if self.swapped else self.packets)
        packets = {"kShares": int(may_share), "kPackets": self.packets + self.tagged}
        more = {"kSlices": slices, "kHasParts": parts, "kLow": int(self.may_be_low), **packets}
        more |= {"kClusterN": self.cluster_n} if self.cluster_n > 1 else {}
        more |= {"kClusterK": self.cluster_k} if self.cluster_k > 1 else {}
        more |= {"kSwapped": 1, "kHeights": bits_of(self.heights)} if self.swapped else {}
        more |= {"kNarrow": 1} if self.swapped and not several and (self.packets or self.problem.topology.size == 1) else {}
        more |= {"kColumns": self.swapped_columns} if self.wide else {}
        more |= {"kAlternates": 1} if self.tiles_at_once > 1 else {}
        apart = not may_share or self.cluster_k > 1  # who adds up shares waits for those who multiply them
        return self.spec_with(OP, PARAMETER_BYTES, more, self.ctas_together * self.cluster_k, early=True, apart=apart)

    @derived
    def may_be_low(self) -> bool:
        # Wide tiles have no registers for it, and would gain none.
        narrow, together = self.tile.block_n <= _LOW_WIDTH, self.packets or self.shares > 1 or self.tile.block_n == 64
        return self.ctas_together == 1 and narrow and together

    @property
    def wide(self) -> bool:
        """Whether operands are swapped, of tiles with more columns than others: their kernels have no others."""
        return self.swapped > 0 and self.swapped_columns > SWAPPED_COLUMNS

    @property
    def narrow(self) -> bool:
        """Whether operands are swapped, of tiles with half as many columns: as the call says."""
        return self.swapped > 0 and self.swapped_columns < SWAPPED_COLUMNS

    @derived
    def columns(self) -> int:
        return self.swapped_columns if self.swapped else self.tile.block_n

    @derived
    def ctas_together(self) -> int:
        """CTAs of a cluster."""
        return self.cluster * self.cluster_n

    @property
    def _may_have_parts(self) -> bool:
        """Whether some K that the kernel is for may travel in parts: at run time any, so that all K have at most 16 kernels."""
        topology = self.problem.topology
        return most_parts(self.problem) > 1 if "k" in self.specialize else topology.num_nodes == 1 < topology.size

    @property
    def arguments(self) -> dict[str, int]:
        """What the parameters of a launch say of the schedule, in their order."""
        return dict(zip(_ARGUMENTS, self.arguments_of(self.rows, self.sizes), strict=True))

    def arguments_of(self, rows: int, sizes: Sizes) -> tuple[int, ...]:
        """The values of ``arguments`` in a call of so many rows of the class."""
        of_tiles = sizes.last_row, sizes.tail_rows, sizes.block_rows, sizes.stages, self.columns
        return rows, sizes.whole_tiles, *self.of_arguments, sizes.load_rows, self.span, sizes.shares, *of_tiles

    @derived
    def of_arguments(self) -> tuple[int, ...]:
        """Those of them that all calls of a class have in common, from ``group_m`` on."""
        return self.taken_group_m, self.part_blocks, *self.shifts, *self.piece_box

    @derived
    def of_maps(self) -> tuple[int, int, int, int, int, int, int, bool]:
        """What tensor maps are made by.

        Parts, planes, columns of a tile and of a slice's load, CTAs of a cluster, whether K is shared, in how many blocks the rows of a
        tile of swapped operands are stored (those of each consumer warpgroup, where each has half of them), and whether a panel is cut.
        """
        sliced = self.b_columns if self.slices > 1 and not self.problem.b_row_major else 0
        blocks = 2 if self.swapped and halves_rows(self.swapped_columns) else 1
        return self.parts, self.planes, self.columns, sliced, self.cluster, int(self.shares > 1), blocks, self.tile.cut

    @derived
    def sizes(self) -> Sizes:
        return self.sizes_of(self.rows)

    def sizes_of(self, rows: int) -> Sizes:
        """What follows from the rows of a call of the class: all at once, because every call of a new size needs all."""
        span, cluster, together, columns, taken_columns, computing, total, slices, shares, pushers, row_bytes, swapped, least, unit = (
            self.of_sizes
        )
        plane_rows = span * rows
        block_rows = height_of(plane_rows, swapped, self.heights) if swapped else BLOCK_M
        stages = self.tile.stages_of(block_rows, self.columns) if swapped else 0
        tail = tail_of(plane_rows, block_rows, unit)
        tile_rows, share_bytes = -(-plane_rows // block_rows), block_rows * row_bytes
        taken_rows = -(-tile_rows // cluster)
        tiles, taken = columns * tile_rows, taken_columns * taken_rows
        sliced = sliced_tiles(tiles, computing or 1, total) if slices > 1 else 0
        if shares > 1 and taken and share_bytes:
            shares = max(1, min(shares, abi.PACKET_BYTES // (taken * share_bytes)))
        grid = total
        if not pushers:  # else each has chunks to push
            grid += min(0, max(least, taken * shares + (slices - 1) * sliced) * together - computing)
        return sizes_of((plane_rows, tile_rows, taken_rows, taken, tiles, tiles - sliced, grid, shares, *tail, block_rows, stages))

    @property
    def rounds(self) -> int:
        """Rounds in which a CTA takes a tile's rows, or its share of them, from tagged packets (kernels_src/tile/taken.cuh)."""
        rows = 1 << (min(self.plane_rows, BLOCK_M) - 1).bit_length()
        steps = math.ceil(math.ceil(self.problem.k / BLOCK_K) / self.sizes.shares)
        return math.ceil(steps / min(self.stages_of(self.load_rows), _TAKEN_ROWS // rows))

    @derived
    def of_sizes(self) -> tuple[int, ...]:
        """What ``sizes_of`` starts from.

        Span, clusters, columns of tiles and of what clusters take, CTAs, slices, shares, bytes of packets of a row of a share's tile (0:
        there are none), rows of tiles of swapped operands, the fewest CTAs, and of how many rows of A a multiple is loaded.
        """
        split, together = self.split, self.ctas_together
        columns, taken_columns = self.planes * self.tiles_n, self.planes * self.taken_columns
        of_packets = together * self.columns * 4 if self.cluster_k == 1 else 0
        shared = self.slices, self.shares, self.pushers, of_packets
        unit = unit_of(self.cluster_n, SWAPPED_UNIT if self.swapped else WARP_ROWS)
        ctas, last = (split.compute or 0, split.total), (self.swapped, self.cluster_k, unit)
        return self.span, self.cluster, together, columns, taken_columns, *ctas, *shared, *last

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
        shares = self.sizes.shares if self.sizes.shares > 1 and self.cluster_k == 1 else 0
        return self.taken * shares * self.ctas_together * self.block_rows * self.columns * 4

    @property
    def ahead_bytes(self) -> int:
        """Bytes of packets of shards, a range for each source, that are sent before their rank has entered."""
        return self.problem.topology.size * self.shard_bytes * (1 + self.tagged) if self.packets else 0

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
            f"tile {self.block_rows}x{self.columns}{' of swapped operands' if self.swapped else ''}"
            f"{', of each warpgroup in turn' if self.tiles_at_once > 1 else ''}, "
            f"{self.sizes.stages or self.tile.stages} stages; {self.num_tiles} tiles"
            f"{f' over the shards of {self.span} ranks each' if self.span > 1 else ''}"
            f"{f', K shared by {self.sizes.shares} CTAs' if self.sizes.shares > 1 else ''}"
            f"{' of a cluster' if self.cluster_k > 1 else ''}"
            f"{f', {clusters_name(self.cluster, self.cluster_n)}' if self.ctas_together > 1 else ''}, "
            f"{self.packets_name or f'{self.chunks} chunks of {self.chunk_rows} rows and 1/{self.parts} of K per shard'}\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm}, inter_send {split.inter_send}; "
            f"{f'chunks pushed by a warp of {self.pushers} of them; ' if self.pushers else ''}"
            f"workspace {self.workspace_bytes} bytes"
        )

    @property
    def packets_name(self) -> str:
        return "tagged packets" if self.tagged else "packets" if self.packets else ""

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

    @property
    def block_rows(self) -> int:
        """Rows of a tile."""
        return self.sizes.block_rows

    @property
    def packets_of_thread(self) -> int:
        """Packets that a thread has of a share of K of a tile: for 8 columns each, or with swapped operands for 8 rows."""
        return (self.block_rows if self.swapped else self.columns) // 8

    def stages_of(self, load_rows: int) -> int:
        return self.sizes.stages or super().stages_of(load_rows)

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

    @derived
    def taken_columns(self) -> int:
        """Columns of tiles that clusters take at a time."""
        return math.ceil(self.tiles_n / self.cluster_n)

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
        """Whether a tile is offered only when its rows have come: no sum, none of the own array, and none of tagged packets."""
        is_own = tile.plane == rank // self.span and tile.m // self.cluster in self.own_rows(rank)
        return tile.kind != SUM and not is_own and not self.tagged

    def own_rows(self, rank: int) -> range:
        """Rows of tiles of the rank's plane, as clusters take them, that have rows of its own shard only, and read the caller's array."""
        return range(0) if self.packets else self._rows_of(rank % self.span)

    @property
    def fewest_own(self) -> int:
        """Rows of tiles that read the caller's array, on the rank that has the fewest."""
        rows = min(len(self._rows_of(shard)) for shard in range(self.span))
        return min(self.tile_rows, rows * self.cluster)

    @property
    def some_follow(self) -> bool:
        """Whether some tiles need rows of one shard only, and begin as its chunks come."""
        return self.span == 1 or self.rows > self.block_rows

    def _beginning(self, shard: int) -> int:
        """The row of tiles, as clusters take them, in which a shard of a plane begins."""
        return shard * self.rows // (self.cluster * self.block_rows) if shard < self.span else self.sizes.taken_rows

    def _rows_of(self, shard: int) -> range:
        """Rows of tiles that have rows of this shard only."""
        first = math.ceil(shard * self.rows / (self.cluster * self.block_rows))
        return range(first, max(first, self._beginning(shard + 1)))

    def _order_of_rows(self, rank: int) -> list[list[int]]:
        """Rows of tiles of the rank's plane, as clusters take them: the own ones, then the others, in turn from all shards."""
        if self.packets:
            return [list(range(self.sizes.taken_rows))]
        own, of_each, shard = self.own_rows(rank), self.rows // (self.cluster * self.block_rows), rank % self.span
        begun = range(self._beginning(shard), min(own.start, self._beginning(shard + 1)))
        others = [(rank + distance) % self.span for distance in range(1, self.span)]
        later = [self._beginning(shard) + row for row in range(of_each) for shard in others]
        last = [row for shard in others for row in range(self._beginning(shard) + of_each, self._beginning(shard + 1))]
        return [list(own), [*begun, *later, *last]]

    def tiles(self, rank: int) -> Iterator[Tile]:
        """The tiles of C on ``rank``, in the order in which its CTAs take them."""
        taken = list(self._taken(rank))
        shared, whole = (taken, []) if self.sizes.shares > 1 else ([], taken)
        for index, tile in enumerate(itertools.chain.from_iterable(whole)):
            if index < self.whole_tiles:
                yield tile
            else:
                yield from (dataclasses.replace(tile, slice=part) for part in range(1, self.slices + 1))
        kinds = (SHARE, SUM) if self.cluster_k == 1 else (SHARE,)  # CTAs of a cluster add up what they have multiplied
        for kind, together in itertools.product(kinds, shared):
            for share in range(self.sizes.shares):
                yield from (dataclasses.replace(tile, kind=kind, share=share) for tile in together)

    def _taken(self, rank: int) -> Iterator[list[Tile]]:
        """Whole tiles, together those that the CTAs of a cluster take together."""
        near, all_rows = self.near_planes, range(self.sizes.taken_rows)
        classes = [(rows, 1, 0) for rows in self._order_of_rows(rank)]
        for order, planes, first in (*classes, (all_rows, near - 1, 1), (all_rows, self.planes - near, near)):
            rows = len(order) * planes
            for index in range(rows * self.taken_columns):
                row, column = raster(index, rows, self.taken_columns, self.taken_group_m)
                plane, taken = self.plane(rank, first + row % planes), order[row // planes]
                places = tiles_of_cluster((taken, column), (self.cluster, self.cluster_n), self.tile_rows, self.tiles_n)
                yield [Tile(plane, m, n) for m, n in places]

    def place_of(self, tile: Tile) -> tuple[int, int, int]:
        """Plane, row and column of what a cluster takes, of which the tile is one."""
        return tile.plane, tile.m // self.cluster, tile.n // self.cluster_n

    def sources(self, tile: Tile) -> range:
        """The ranks whose shards a tile covers."""
        begin = tile.m * self.block_rows
        last = min(begin + self.block_rows, self.plane_rows) - 1
        return range(tile.plane * self.span + begin // self.rows, tile.plane * self.span + last // self.rows + 1)

    def tile_chunks(self, tile: Tile) -> list[tuple[int, int]]:
        """What a tile reads, part by part: the ranks whose shards it covers, and chunks of these."""
        begin = tile.m * self.block_rows
        last = min(begin + self.block_rows, self.plane_rows) - 1
        blocks = [
            (source, block)
            for shard, source in enumerate(self.sources(tile), begin // self.rows)
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
