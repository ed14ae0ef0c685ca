"""The plan and schedule of GEMM+ReduceScatter and GEMM+AllReduce. Pure Python; ``kernels_src/reduce`` is the device side."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from mkernel.jit.spec import KernelSpec
from mkernel.planner.derived import derived
from mkernel.planner.gemm import (
    BLOCK_M,
    GROUP_M,
    WARP_ROWS,
    GemmPlan,
    raster,
    raster_number,
    shift_of,
    tail_of,
)
from mkernel.planner.heights import SWAPPED_UNIT, Heights, bits_of, height_of, unit_of
from mkernel.planner.pairs import clusters_name, lone_row, tiles_of_cluster, upper_tile
from mkernel.planner.reduce_problem import ALLREDUCE, REDUCE_SCATTER, ReduceProblem
from mkernel.planner.reduce_sizes import Sizes, sizes_of
from mkernel.planner.specialize import Specialized, remark

__all__ = ["PARAMETER_BYTES", "SPECIALIZED", "ReducePlan", "Tile"]

# By default (docs/benchmarks.md): an all-reduce of few rows takes 1 us less with K compiled in, 4096 with N; a reduce-scatter nothing.
SPECIALIZED = {REDUCE_SCATTER: Specialized(), ALLREDUCE: Specialized(["n", "k"])}
PARAMETER_BYTES = 832  # sizeof(Parameters); ops/reduce.py mirrors the struct
_ARGUMENTS = (  # of a launch
    *("rows", "tiles", "taken", "group_taken", "group_m", "chunk_shift", "load_rows", "shares", "interleaved"),
    *("whole_pairs", "last_pairs", "last_row", "tail_rows", "block_rows", "stages"),
)
_PANEL = 64  # columns of a block of a result: 128 bytes
_BLOCK_BYTES = 64 * 128  # of one warpgroup


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Tile ``index`` of those that ``owner`` reduces: at tile row ``m`` (of the owner's rows, or of all) and tile column ``n``.

    ``is_sum``: not multiplied, but added up from partial tiles, or, where CTAs share K, from what those have multiplied. ``share``: which
    share of K, or slice of the sum.
    """

    owner: int
    index: int
    m: int
    n: int
    is_sum: bool = False
    share: int = 0


@dataclasses.dataclass(frozen=True)
class ReducePlan(GemmPlan[ReduceProblem]):
    """Tile, order, split and buffers for one problem and one number of rows, on one kind of device.

    ``rows``: of a rank's result (M / W for the reduce-scatter, M for the all-reduce).
    """

    group_tiles: int  # of an owner, that are computed one after the other; with clusters of CTAs so many times what they take
    chunk_tiles: int  # of one put
    group_m: int = GROUP_M  # tile rows that share columns of B
    load_rows: int = BLOCK_M  # of a tile of A: fewer where there are no more
    packets: bool = False  # inside a node: values travel in words that are their own flags
    shares: int = 1  # CTAs that share K of a tile, in packets
    algorithm: str = "two_shot"
    interleaved: bool = False  # own tiles, and those of each other rank, are computed in turn, not one owner's after the other's
    cluster: int = 1  # CTAs that take tiles, and load B, together: neighbours in M (kernels_src/tile/pair.cuh); divides group_m
    cluster_n: int = 1  # the same of neighbours in N, which load A together
    swapped: int = 0  # rows of tiles whose operands are swapped, in packets: they are as high as that needs. 0: tiles have BLOCK_M rows
    heights: Heights = ()  # that they have in the kernel
    specialize: frozenset[str] = Specialized()  # fields that are compiled in

    of_class = (
        *(name for name in GemmPlan.of_class if name != "grid"),  # which, where K is shared, goes by the tiles that there are
        *("op", "one_shot", "everywhere", "span", "owners", "chunk_shift", "area_of_tile", "flags_of_tile", "ctas_together", "columns"),
        *("taken_columns", "load_unit"),
        *("ends_of_tile", "of_arguments", "of_maps"),
    )

    @derived
    def op(self) -> str:
        return self.problem.op

    @derived
    def one_shot(self) -> bool:
        return self.algorithm == "one_shot"

    @derived
    def everywhere(self) -> bool:
        """Every rank computes every tile, and stores it, or its own rows of it; else a tile has an owner."""
        return self.one_shot or self.packets

    @derived
    def span(self) -> int:
        """Ranks whose rows a tile may have: of a reduce-scatter in packets all, else one."""
        return self.problem.topology.size if self.packets and self.op == REDUCE_SCATTER else 1

    @derived
    def may_be_low(self) -> bool:
        return self.packets and self.ctas_together == 1 and not self.swapped

    @property
    def block_rows(self) -> int:
        """Rows of a tile."""
        return self._block_rows_of(self.rows)

    def _block_rows_of(self, rows: int) -> int:
        return height_of(rows * self.span, self.swapped, self.heights) if self.swapped else BLOCK_M

    def stages_of(self, load_rows: int) -> int:
        return self.tile.stages_of(self.block_rows) if self.swapped else super().stages_of(load_rows)

    @derived
    def ctas_together(self) -> int:
        """CTAs of a cluster."""
        return self.cluster * self.cluster_n

    @derived
    def taken_columns(self) -> int:
        """Columns of tiles that clusters take at a time."""
        return math.ceil(self.tiles_n / self.cluster_n)

    @derived
    def spec(self) -> KernelSpec:
        name = f"{self.op}_packets" if self.packets else f"{self.op}_one_shot" if self.one_shot else self.op
        float32 = int(self.problem.partials == "float32")
        canonical, two_shot = int(self.problem.canonical), int(not self.one_shot)
        more = {"kPartialFloat32": float32, "kCanonical": canonical, "kTwoShot": two_shot, "kSlices": 1}
        more |= {"kShares": int(self.shares > 1), "kLow": int(self.may_be_low)} if self.packets else {}
        more |= {"kClusterN": self.cluster_n} if self.cluster_n > 1 else {}
        more |= {"kSwapped": 1, "kHeights": bits_of(self.heights)} if self.swapped else {}
        return self.spec_with(name, PARAMETER_BYTES, more, self.ctas_together, early=True, apart=True)

    @property
    def arguments(self) -> dict[str, int]:
        """What the parameters of a launch say of the schedule, in their order."""
        return dict(zip(_ARGUMENTS, self.arguments_of(self.rows, self.sizes_of(self.rows)), strict=True))

    def arguments_of(self, rows: int, sizes: Sizes) -> tuple[int, ...]:
        """The values of ``arguments`` in a call of so many rows of the class."""
        of_tiles = sizes.whole_pairs, sizes.last_pairs, sizes.last_row, sizes.tail_rows, sizes.block_rows, sizes.stages
        return rows, sizes.tiles, sizes.taken, *self.of_arguments, *of_tiles

    @derived
    def of_arguments(self) -> tuple[int, ...]:
        """Those of them that all calls of a class have in common, from ``group_tiles`` on."""
        return self.group_tiles, self.group_m, self.chunk_shift, self.load_rows, self.shares, int(self.interleaved)

    @derived
    def of_maps(self) -> tuple[int, int, bool, bool, int]:
        """By which tensor maps are made: columns of a tile, ranks of a tile's rows.

        Whether in packets; whether threads store rows; and CTAs of a cluster that are neighbours in M.
        """
        stores_rows = self.shares > 1 or (self.packets and self.op == REDUCE_SCATTER) or self.swapped > 0
        return self.columns, self.span, self.packets, stores_rows, self.cluster

    def describe(self) -> str:
        p, split = self.problem, self.split
        layout = "row-major" if p.b_row_major else "transposed"
        rows = self.rows * p.topology.size if self.op == REDUCE_SCATTER else self.rows
        sms = f"{split.compute}/{split.intra_comm}/{split.inter_send}/{split.inter_reduce}"
        how = f"{self.algorithm}, " if self.op == ALLREDUCE else ""
        how += "in packets, " if self.packets else ""
        how += f"K shared by {self.shares} CTAs, " if self.shares > 1 else ""
        how += "added by rank, " if p.canonical else ""
        travel = "packets of eight values" if self.packets else f"groups of {self.group_tiles}, puts of {self.chunk_tiles} tiles"
        return (  # the first line stands for the plan in messages: it tells any two apart
            f"{self.op}: a ({rows}, {p.k}), b ({p.k}, {p.n}) {layout}, {p.dtype}, partials {p.partials}, {how}"
            f"{p.topology.num_nodes}x{p.topology.ranks_per_node} ranks, {sms} SMs{remark(self.specialize, SPECIALIZED[self.op])}\n"
            f"tile {self.block_rows}x{self.columns}{' of swapped operands' if self.swapped else ''}, "
            f"{self.stages_of(BLOCK_M)} stages; {self.tiles} tiles per owner in {travel}"
            f"{f', {self.taken} times for {clusters_name(self.cluster, self.cluster_n)}' if self.ctas_together > 1 else ''}"
            f"{', the owners in turn' if self.interleaved and len(self.groups()) > 1 else ''}\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm}, inter_send {split.inter_send}, "
            f"inter_reduce {split.inter_reduce}; workspace {self.workspace_bytes} bytes"
        )

    # ---- sizes
    @derived
    def owners(self) -> int:
        """Ranks among which the tiles are divided: one where a plan has one owner's tiles only, or everyone adds up everything."""
        return 1 if self.op == REDUCE_SCATTER or self.everywhere else self.problem.topology.size

    @derived
    def tile_rows(self) -> int:
        """Rows of tiles: of an owner's rows, or of all where a tile has several owners' rows."""
        return -(-self.rows * self.span // self.block_rows)

    @derived
    def tiles(self) -> int:
        """Per owner, at most; all tiles where everyone computes everything."""
        return self._tiles_of(self.rows, self.block_rows)[0]

    @derived
    def taken(self) -> int:
        """The same in what clusters take at a time."""
        return self._tiles_of(self.rows, self.block_rows)[1]

    def _tiles_of(self, rows: int, block_rows: int) -> tuple[int, int]:
        """Both, of so many rows, in tiles of so many."""
        tile_rows, cluster = -(-rows * self.span // block_rows), self.cluster
        taken = -(-(-(-tile_rows // cluster) * self.taken_columns) // self.owners)
        return tile_rows * self.tiles_n if self.owners == 1 else cluster * taken, taken

    def sizes_of(self, rows: int) -> Sizes:
        """What follows from the rows of a call of the class."""
        # Every call of a new size comes here: without functions between.
        block_rows = height_of(rows * self.span, self.swapped, self.heights) if self.swapped else BLOCK_M
        tiles, taken = self._tiles_of(rows, block_rows)
        lone = (
            lone_row(-(-rows * self.span // BLOCK_M), self.tiles_n, self.group_m)
            if self.cluster == 2 and self.cluster_n == 1 and not self.packets
            else (0, 0)
        )
        exchanged = self.exchanged_bytes(rows, tiles) if self.shares > 1 else 0
        stages, tail = self.tile.stages_of(block_rows) if self.swapped else 0, tail_of(rows * self.span, block_rows, self.load_unit)
        return sizes_of((self.grid, tiles, taken, *lone, exchanged, *tail[1:], block_rows, stages))

    @derived
    def load_unit(self) -> int:
        """What is loaded of a tile of A is a multiple of so many rows."""
        return unit_of(self.cluster_n, SWAPPED_UNIT if self.swapped else WARP_ROWS)

    @derived
    def grid(self) -> int:
        """CTAs: as many as have a tile where the others would have nothing to do; the device spreads fewer of them over what SMs share."""
        total = self.split.total
        only_multiplies = self.shares > 1 or self.packets or self.problem.topology.size == 1
        return min(total, max(1, self.taken * self.shares) * self.ctas_together) if only_multiplies else total

    @derived
    def chunk_shift(self) -> int:
        return shift_of(self.chunk_tiles)

    @property
    def put_bytes(self) -> int:
        """Bytes of a chunk on its way to another node."""
        return self.chunk_tiles * self.partial_bytes

    @property
    def num_chunks(self) -> int:
        return math.ceil(self.tiles / self.chunk_tiles)

    @property
    def result_bytes(self) -> int:
        """Bytes of a finished tile on the heap: 16-bit elements, whole panels."""
        return self.tile.block_n // _PANEL * 2 * _BLOCK_BYTES

    @property
    def partial_bytes(self) -> int:
        return self.result_bytes * (2 if self.problem.partials == "float32" else 1)

    # ---- the data heap and the flags: offsets from the start of the workspace, in the order of Parameters in the kernel
    @derived
    def area_of_tile(self) -> dict[str, int]:
        """Bytes of each area of the workspace for one tile of an owner."""
        size, others = self.problem.topology.size, self.problem.topology.num_nodes - 1
        partials = size if self.one_shot else size - 1
        finished = others + 1 if self.op == ALLREDUCE and size > 1 else 0
        return {
            "partial": 0 if self.packets else partials * self.partial_bytes,
            "sum": 0 if self.everywhere else others * self.partial_bytes,
            "arrived": 0 if self.everywhere else others * self.partial_bytes,
            "result": 0 if self.everywhere else finished * self.result_bytes,
        }

    @property
    def areas(self) -> dict[str, int]:
        """Bytes of each area of the workspace."""
        return {name: size * self.tiles for name, size in self.area_of_tile.items()}

    @property
    def offsets(self) -> dict[str, int]:
        """Where each area begins."""
        return {name: end * self.tiles for name, end in zip(self.area_of_tile, self.ends_of_tile, strict=True)}

    @derived
    def ends_of_tile(self) -> tuple[int, ...]:
        """Bytes of the areas before each, for one tile of an owner."""
        return tuple(itertools.accumulate(self.area_of_tile.values(), initial=0))[:-1]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the data heap: partial tiles on their way, and finished tiles of an all-reduce."""
        return sum(self.area_of_tile.values()) * self.tiles

    @property
    def packet_bytes(self) -> int:
        """Bytes of the range of packets in the signal segment: those of the ranks, then those of shares of K, which are unrounded sums."""
        if not self.packets:
            return 0
        shared = self.tiles * self.shares * self.block_rows * self.columns * 4 if self.shares > 1 else 0
        return self.exchanged_bytes(self.rows, self.tiles) + shared

    def exchanged_bytes(self, rows: int, tiles: int) -> int:
        """Bytes of the packets of the ranks, in a call of so many rows and tiles: 16 for eight values.

        An all-reduce sends whole warps of 16 rows; of a reduce-scatter a rank has room for its own rows from each rank. Where K is shared,
        each slice of a tile's columns has packets of its own. With swapped operands groups of 16 rows have packets, of all columns of a
        tile: a rank's own rows lie in as many groups, at most, and of an all-reduce those of a tile belong together.
        """
        if self.swapped:
            return self._exchanged_in_groups(rows, tiles)
        size, words = self.problem.topology.size, math.ceil(self.tile.block_n // 8 / self.shares)  # of a thread's row of a slice
        row_bytes = math.ceil(words / 4) * 64  # of a slice
        if self.op == REDUCE_SCATTER:
            return size * self.tiles_n * rows * self.shares * row_bytes
        warps = tiles * self.shares * math.ceil(min(rows, BLOCK_M) / 16)
        blocks = size * warps if self.one_shot else size * math.ceil(warps / size) + warps
        return blocks * 16 * row_bytes

    def _exchanged_in_groups(self, rows: int, tiles: int) -> int:
        size, group_bytes = self.problem.topology.size, WARP_ROWS * self.columns * 2
        if self.op == REDUCE_SCATTER:
            return size * self.tiles_n * ((rows + WARP_ROWS - 2) // WARP_ROWS + 1) * group_bytes if rows else 0
        warps = self.columns // WARP_ROWS  # of a tile, each with 16 of its columns
        blocks = tiles * warps
        of_ranks = size * blocks if self.one_shot else size * math.ceil(blocks / size) + blocks
        return of_ranks * (self._block_rows_of(rows) // WARP_ROWS) * (group_bytes // warps)

    @derived
    def flags_of_tile(self) -> tuple[int, int]:
        """Flags for one tile of an owner, and for one chunk of them."""
        topology, others = self.problem.topology, self.problem.topology.num_nodes - 1
        if self.packets:
            return 0, 0
        if self.one_shot:
            return topology.size, 0
        return topology.size - 1 + others + (topology.size if self.op == ALLREDUCE else 0), others

    @property
    def flag_words(self) -> int:
        of_tile, of_chunk = self.flags_of_tile
        return of_tile * self.tiles + (of_chunk and of_chunk * self.num_chunks)

    def flag_name(self, rank: int, index: int) -> str:
        """What a flag tells ``rank``, for reports."""
        topology, tiles = self.problem.topology, self.tiles
        if self.packets:
            return "packets"
        if self.one_shot:
            source, tile = divmod(index, tiles)
            return f"{self._tile_name(rank, tile)}, as rank {source} has it"
        others, per_node = topology.num_nodes - 1, topology.ranks_per_node
        node, local = topology.node(rank), topology.local_rank(rank)

        def at(distance: int, of_rail: int) -> int:
            return topology.rank((node + distance) % topology.num_nodes, of_rail)

        block, tile = divmod(index, tiles)
        if (
            block < topology.size - 1
        ):  # partial tiles: of own tiles by the node's others, then of those of each rail peer by all of the node
            near = block < per_node - 1
            distance, source = (0, block + 1) if near else (1 + (block - per_node + 1) // per_node, (block - per_node + 1) % per_node)
            owner = at(distance, local)
            return f"{self._tile_name(owner, tile)}, as rank {at(0, (local + source) % per_node)} has it"
        if block < topology.size - 1 + others:
            owner = at(block - topology.size + 2, local)
            return f"{self._tile_name(owner, tile)}, summed over this node"
        index -= (topology.size - 1 + others) * tiles
        if index < others * self.num_chunks:
            distance, chunk = index // self.num_chunks + 1, index % self.num_chunks
            return f"chunk {chunk} of tiles of rank {rank}, summed over node {(node + distance) % topology.num_nodes}"
        place, tile = divmod(index - others * self.num_chunks, tiles)
        owner = at(place // per_node, place % per_node)
        return f"{self._tile_name(owner, tile)}, finished"

    def _tile_name(self, owner: int, index: int) -> str:
        tile = self.at(owner, index)
        return f"tile {index} of rank {owner} (row {tile.m}, column {tile.n})" if not self.everywhere else f"tile {index}"

    # ---- the schedule (the mirror of OwnedTiles in the kernel; a test compares them)
    def exists(self, owner: int, index: int) -> bool:
        """The last owners of an all-reduce in two steps may have fewer tiles; with pairs of CTAs others, too."""
        return index < self.tiles if self.owners == 1 else self.first_tile(owner) + index < self.first_tile(owner + 1)

    def first_tile(self, owner: int) -> int:
        """Among all tiles in raster order the first one of an owner, or the end of them."""
        if self.owners == 1:
            return 0
        first = min(owner * self.taken, math.ceil(self.tile_rows / self.cluster) * self.tiles_n)
        return self.upper_tile(first) if self.cluster > 1 else first

    def upper_tile(self, pair: int) -> int:
        """The number of a pair's upper tile among all tiles in raster order."""
        return upper_tile(pair, *lone_row(self.tile_rows, self.tiles_n, self.group_m))

    def at(self, owner: int, index: int, is_sum: bool = False, share: int = 0) -> Tile:
        if not self.exists(owner, index):
            return Tile(owner, index, 0, 0, is_sum)
        of_all = self.first_tile(owner) + index
        return Tile(owner, index, *raster(of_all, self.tile_rows, self.tiles_n, self.group_m), is_sum, share)

    def taken_at(self, owner: int, number: int, is_sum: bool = False) -> list[Tile]:
        """What a cluster takes of an owner's tiles: one, or those of its tiles that exist; all keep their numbers."""
        if self.ctas_together == 1:
            return [self.at(owner, number, is_sum)]
        of_all, rows = (owner if self.owners > 1 else 0) * self.taken + number, math.ceil(self.tile_rows / self.cluster)
        if of_all >= rows * self.taken_columns:
            return []
        taken = raster(of_all, rows, self.taken_columns, self.group_m // self.cluster)
        places = tiles_of_cluster(taken, (self.cluster, self.cluster_n), self.tile_rows, self.tiles_n)
        first = self.first_tile(owner)
        return [self.at(owner, raster_number(m, n, self.tile_rows, self.tiles_n, self.group_m) - first, is_sum) for m, n in places]

    def cta_of(self, tile: Tile) -> int:
        """Which CTA of a cluster has the tile."""
        return tile.m % self.cluster * self.cluster_n + tile.n % self.cluster_n

    def peers(self, rank: int) -> list[int]:
        """The other owners in the order in which their tiles are computed: other nodes' (own rail last), then the node's."""
        topology = self.problem.topology
        node, local, per_node = topology.node(rank), topology.local_rank(rank), topology.ranks_per_node
        remote = [(n, i) for i in range(1, per_node + 1) for n in range(1, topology.num_nodes)]
        near = [(0, i) for i in range(1, per_node)]
        return [topology.rank((node + n) % topology.num_nodes, (local + i) % per_node) for n, i in remote + near]

    def groups(self) -> list[range]:
        """Numbers, among what clusters take of an owner's tiles, that follow each other."""
        return [range(i, min(i + self.group_tiles, self.taken)) for i in range(0, self.taken, self.group_tiles)]

    def taken_of(self, rank: int) -> Iterator[list[Tile]]:
        """What ``rank`` computes, in the order in which its clusters take it; CTAs alone also take tiles that do not exist."""
        if self.packets and self.shares == 1:
            yield from (self.taken_at(rank, number) for number in range(self.taken))
            return
        if self.everywhere:
            for is_sum in (False, True):
                yield from ([self.at(rank, index, is_sum, share)] for index in range(self.tiles) for share in range(self.shares))
            return
        peers, before = self.peers(rank), range(0)
        for group in [*self.groups(), range(0)]:
            in_turn = len(group) if self.interleaved and before else 0
            for i in range(in_turn):
                yield from (self.taken_at(owner, group[i]) for owner in peers)
                yield self.taken_at(rank, before[i])
            yield from (self.taken_at(owner, index) for owner in peers for index in group[in_turn:])
            yield from (self.taken_at(rank, index) for index in before[in_turn:])
            before = group

    def tiles_of(self, rank: int) -> Iterator[Tile]:
        """The tiles of ``taken_of``."""
        return itertools.chain.from_iterable(self.taken_of(rank))

    def taken_sums_of(self, rank: int) -> Iterator[list[Tile]]:
        """The sums of its node that ``rank`` makes for the owners on its rail, in the order in which its clusters take them."""
        if not self.everywhere:
            for group in self.groups():
                for owner in self.problem.topology.rail_peers(rank):
                    yield from (self.taken_at(owner, index, True) for index in group)

    def sums_of(self, rank: int) -> Iterator[Tile]:
        """The sums of ``taken_sums_of``."""
        return itertools.chain.from_iterable(self.taken_sums_of(rank))
