"""GEMM+ReduceScatter and GEMM+AllReduce: problem, plan and schedule. Pure Python; ``kernels_src/reduce.cuh`` is the device side."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.plan.gemm import (
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

__all__ = [
    "ALGORITHMS",
    "ALLREDUCE",
    "PARAMETER_BYTES",
    "PARTIALS",
    "REDUCE_SCATTER",
    "ReducePlan",
    "ReduceProblem",
    "Tile",
    "choose_algorithm",
    "make_plan",
    "wait_graph",
]

REDUCE_SCATTER, ALLREDUCE = "gemm_reduce_scatter", "gemm_allreduce"
ALGORITHMS = ("one_shot", "two_shot")  # of the all-reduce
PARTIALS = ("output", "float32")  # what partial tiles travel as
PARAMETER_BYTES = 576  # sizeof(Parameters); ops/reduce.py mirrors the struct
_TAIL = 1.5  # of a tile's time: what comes last is sent, waited for and added (measured, docs/benchmarks.md)
_GROUPS = 8  # of an owner's tiles: few enough that a group shares what it loads, many enough that the link is busy all the time;
_ALLREDUCE_GROUPS = 32  # in an all-reduce of three ranks or more inside a node (measured, docs/benchmarks.md)
_ONE_SHOT_BYTES = 2 * 1024 * 1024  # up to so much sent per rank, one step costs less than two
_PULL_CTAS = 4, 12  # of the all-reduce: at least, and at most,
_LINK_PULL_CTAS = 14  # and where the links take longer than the products
_CTA_PULLS = 40e9  # bytes per second
_LINK_BYTES = 250e9  # per second, that a link takes without much waiting,
_LINK_PEAK = 310e9  # and at most
_IN_TIME = 0.45  # of the time that multiplying takes: when so many CTAs could have pulled everything (measured, docs/benchmarks.md)
_PACKET_RANKS = 8  # more would need more registers,
_FEW_BLOCK_N = 128  # and so would wider tiles
_PACKET_VALUES = 8 << 20  # bytes of a result up to which packets are faster
_PANEL = 64  # columns of a block of a result: 128 bytes
_BLOCK_BYTES = 64 * 128  # of one warpgroup


@dataclasses.dataclass(frozen=True, slots=True)
class ReduceProblem:
    """What the ranks must agree on. ``rows``: of a rank's result (M / W for the reduce-scatter, M for the all-reduce); ``k``: of a rank."""

    op: str
    topology: Topology
    rows: int
    n: int
    k: int
    dtype: str
    b_row_major: bool
    partials: str = "output"
    algorithm: str = "two_shot"

    @property
    def result_shape(self) -> tuple[int, int]:
        return self.rows, self.n

    @property
    def one_shot(self) -> bool:
        return self.algorithm == "one_shot"


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Tile ``index`` of those that ``owner`` reduces: at tile row ``m`` (of the owner's rows, or of all) and tile column ``n``.

    ``is_sum``: not multiplied, but added up from partial tiles.
    """

    owner: int
    index: int
    m: int
    n: int
    is_sum: bool = False


@dataclasses.dataclass(frozen=True)
class ReducePlan(GemmPlan[ReduceProblem]):
    """Tile, order, split and buffers for one problem on one kind of device."""

    group_tiles: int  # of an owner, that are computed one after the other
    chunk_tiles: int  # of one put
    group_m: int = GROUP_M  # tile rows that share columns of B
    load_rows: int = BLOCK_M  # of a tile of A: fewer where there are no more
    packets: bool = False  # all-reduce inside a node: values travel in words that are their own flags
    interleaved: bool = False  # own tiles, and those of each other rank, are computed in turn, not one owner's after the other's

    @property
    def op(self) -> str:
        return self.problem.op

    @property
    def everywhere(self) -> bool:
        """Every rank computes and stores every tile; else a tile has an owner."""
        return self.problem.one_shot or self.packets

    @functools.cached_property
    def spec(self) -> KernelSpec:
        problem = self.problem
        constants = self.constants | {
            "kPartialFloat32": int(problem.partials == "float32"),
            "kChunkTiles": self.chunk_tiles,
            "kLoadRows": self.load_rows,
            "kTwoShot": int(not problem.one_shot),
            "kInterleaved": int(self.interleaved),
            "kSlices": 1,
        }
        name = f"{self.op}_packets" if self.packets else f"{self.op}_one_shot" if problem.one_shot else self.op
        return KernelSpec(name, tuple(constants.items()), THREADS, self.tile.shared_bytes, PARAMETER_BYTES)

    def describe(self) -> str:
        p, split = self.problem, self.split
        layout = "row-major" if p.b_row_major else "transposed"
        rows = p.rows * p.topology.size if self.op == REDUCE_SCATTER else p.rows
        sms = f"{split.compute}/{split.intra_comm}/{split.inter_send}/{split.inter_reduce}"
        how = f"{p.algorithm}{' in packets' if self.packets else ''}, " if self.op == ALLREDUCE else ""
        travel = "packets of eight values" if self.packets else f"groups of {self.group_tiles}, puts of {self.chunk_tiles} tiles"
        return (  # the first line stands for the plan in messages: it tells any two apart
            f"{self.op}: a ({rows}, {p.k}), b ({p.k}, {p.n}) {layout}, {p.dtype}, partials {p.partials}, {how}"
            f"{p.topology.num_nodes}x{p.topology.ranks_per_node} ranks, {sms} SMs\n"
            f"tile {BLOCK_M}x{self.tile.block_n}, {self.tile.stages} stages; {self.tiles} tiles per owner in {travel}"
            f"{', the owners in turn' if self.interleaved and len(self.groups()) > 1 else ''}\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm}, inter_send {split.inter_send}, "
            f"inter_reduce {split.inter_reduce}; workspace {self.workspace_bytes} bytes"
        )

    # ---- sizes
    @property
    def tiles(self) -> int:
        """Per owner; all tiles where everyone adds up everything."""
        grid = self.tile_rows * self.tiles_n
        owners = 1 if self.op == REDUCE_SCATTER or self.everywhere else self.problem.topology.size
        return math.ceil(grid / owners)

    @property
    def put_bytes(self) -> int:
        """Of a chunk on its way to another node."""
        return self.chunk_tiles * self.partial_bytes

    @property
    def num_chunks(self) -> int:
        return math.ceil(self.tiles / self.chunk_tiles)

    @property
    def result_bytes(self) -> int:
        """Of a finished tile on the heap: 16-bit elements, whole panels."""
        return self.tile.block_n // _PANEL * 2 * _BLOCK_BYTES

    @property
    def partial_bytes(self) -> int:
        return self.result_bytes * (2 if self.problem.partials == "float32" else 1)

    # ---- the data heap and the flags: offsets from the start of the workspace, in the order of Parameters in the kernel
    @property
    def areas(self) -> dict[str, int]:
        """Bytes of each area of the workspace."""
        size, others = self.problem.topology.size, self.problem.topology.num_nodes - 1
        partials = size if self.problem.one_shot else size - 1
        finished = others + 1 if self.op == ALLREDUCE and size > 1 else 0
        return {
            "partial": 0 if self.packets else partials * self.tiles * self.partial_bytes,
            "sum": 0 if self.everywhere else others * self.tiles * self.partial_bytes,
            "arrived": 0 if self.everywhere else others * self.tiles * self.partial_bytes,
            "result": 0 if self.everywhere else finished * self.tiles * self.result_bytes,
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Where each area begins."""
        offsets, at = {}, 0
        for name, size in self.areas.items():
            offsets[name] = at
            at += size
        return offsets

    @property
    def workspace_bytes(self) -> int:
        """Of the data heap: partial tiles on their way, and finished tiles of an all-reduce."""
        return sum(self.areas.values())

    @property
    def packet_bytes(self) -> int:
        """Of the range of packets in the signal segment: 16 bytes for eight values, for whole warps of 16 rows."""
        if not self.packets:
            return 0
        size, warps = self.problem.topology.size, self.tiles * math.ceil(min(self.problem.rows, BLOCK_M) / 16)
        blocks = size * warps if self.problem.one_shot else size * math.ceil(warps / size) + warps
        return blocks * 16 * self.tile.block_n * 2

    @property
    def flag_words(self) -> int:
        topology, others = self.problem.topology, self.problem.topology.num_nodes - 1
        if self.packets:
            return 0
        if self.problem.one_shot:
            return topology.size * self.tiles
        finished = topology.size * self.tiles if self.op == ALLREDUCE else 0
        return (topology.size - 1 + others) * self.tiles + others * self.num_chunks + finished

    # ---- the schedule (the mirror of OwnedTiles in the kernel; a test compares them)
    def exists(self, owner: int, index: int) -> bool:
        """The last owners of an all-reduce in two steps may have fewer tiles."""
        return self.op == REDUCE_SCATTER or self.everywhere or owner * self.tiles + index < self.tile_rows * self.tiles_n

    def at(self, owner: int, index: int, is_sum: bool = False) -> Tile:
        if not self.exists(owner, index):
            return Tile(owner, index, 0, 0, is_sum)
        of_all = index if self.op == REDUCE_SCATTER or self.everywhere else owner * self.tiles + index
        return Tile(owner, index, *raster(of_all, self.tile_rows, self.tiles_n, self.group_m), is_sum)

    def peers(self, rank: int) -> list[int]:
        """The other owners in the order in which their tiles are computed: other nodes' (own rail last), then the node's."""
        topology = self.problem.topology
        node, local, per_node = topology.node(rank), topology.local_rank(rank), topology.ranks_per_node
        remote = [(n, i) for i in range(1, per_node + 1) for n in range(1, topology.num_nodes)]
        near = [(0, i) for i in range(1, per_node)]
        return [topology.rank((node + n) % topology.num_nodes, (local + i) % per_node) for n, i in remote + near]

    def groups(self) -> list[range]:
        return [range(i, min(i + self.group_tiles, self.tiles)) for i in range(0, self.tiles, self.group_tiles)]

    def tiles_of(self, rank: int) -> Iterator[Tile]:
        """What ``rank`` computes, in the order in which its CTAs take it; tiles that do not exist included."""
        if self.everywhere:
            for is_sum in (False,) if self.packets else (False, True):
                yield from (self.at(rank, index, is_sum) for index in range(self.tiles))
            return
        peers, before = self.peers(rank), range(0)
        for group in [*self.groups(), range(0)]:
            in_turn = len(group) if self.interleaved and before else 0
            for i in range(in_turn):
                yield from (self.at(owner, group[i]) for owner in peers)
                yield self.at(rank, before[i])
            yield from (self.at(owner, index) for owner in peers for index in group[in_turn:])
            yield from (self.at(rank, index) for index in before[in_turn:])
            before = group

    def sums_of(self, rank: int) -> Iterator[Tile]:
        """The sums of its node that ``rank`` makes for the owners on its rail, in order."""
        if not self.everywhere:
            for group in self.groups():
                for owner in self.problem.topology.rail_peers(rank):
                    yield from (self.at(owner, index, True) for index in group)


def choose_algorithm(topology: Topology, rows: int, n: int, item: int = 2) -> str:
    """Of the all-reduce: one step between two ranks, and across nodes, where little is sent; else two.

    Inside a node of four, two steps in packets were faster even for a single row (docs/benchmarks.md).
    """
    near = topology.num_nodes == 1 and topology.size > 2
    return "one_shot" if not near and rows * n * item * (topology.size - 1) <= _ONE_SHOT_BYTES else "two_shot"


def make_plan(
    problem: ReduceProblem, sm_count: int, split: Split | None = None, tile: GemmTile | None = None, group_tiles: int | None = None
) -> ReducePlan:
    """The plan for a problem on a device with ``sm_count`` SMs.

    Raises
    ------
    SplitError
        ``split`` does not fit.
    """
    owners = problem.topology.size if problem.op == REDUCE_SCATTER else 1
    tile_rows = max(1, math.ceil(problem.rows / BLOCK_M))
    if tile is None:
        tile = choose_tile(tile_rows * owners, problem.n, sm_count, _TAIL if problem.topology.size > 1 else 0.0, sent=True)
        if problem.one_shot:
            tile = GemmTile.deepest(min(tile.block_n, _FEW_BLOCK_N), sent=True)
    wanted = split or Split()
    plan = ReducePlan(problem, wanted, tile, 1, 1, load_rows=choose_load_rows(problem.rows))
    if group_tiles is None:
        group_tiles = choose_group(plan, sm_count)
    # An own tile waits for all of its chunk: what is computed before it reaches to the end of the next group, and a chunk no further.
    put_tiles = max(1, min(group_tiles, choose_put(plan.tiles * plan.partial_bytes) // plan.partial_bytes))
    chunk_tiles = 1 << put_tiles.bit_length() - 1
    plan = dataclasses.replace(plan, group_tiles=group_tiles, chunk_tiles=chunk_tiles, interleaved=floods(plan, sm_count))
    if not wanted.intra_comm:  # a split with CTAs that pull asks for the other kernel
        packed = dataclasses.replace(plan, tile=GemmTile.deepest(min(tile.block_n, _FEW_BLOCK_N), sent=True), packets=True)
        if fits_packets(packed):
            return dataclasses.replace(packed, split=wanted.complete(Split(0, 0, 0, 0), sm_count))
    return dataclasses.replace(plan, split=wanted.complete(default_split(problem, sm_count), sm_count))


def choose_group(plan: ReducePlan, sm_count: int) -> int:
    """How many tiles of an owner are computed one after the other, before own ones follow.

    All of them where the links are what an all-reduce waits for: they carry partial tiles first, and then results, faster than both at once
    (measured, docs/benchmarks.md).
    """
    if link_bound(plan.problem, sm_count):
        return plan.tiles
    rows = min(GROUP_M, plan.tile_rows or 1)
    topology = plan.problem.topology
    near = plan.op == ALLREDUCE and topology.num_nodes == 1 and topology.size > 2
    wanted = plan.tiles // (_ALLREDUCE_GROUPS if near else _GROUPS)
    return max(1, max(sm_count // 2, wanted) // rows) * rows


def link_bound(problem: ReduceProblem, sm_count: int) -> bool:
    """Whether an all-reduce inside a node keeps the links busy for longer than its products take."""
    near = problem.op == ALLREDUCE and problem.topology.num_nodes == 1 and not problem.one_shot
    times = 3 if problem.partials == "float32" else 2  # partial tiles, and results
    return near and _sent_bytes(problem, times) / _LINK_PEAK > seconds_to_multiply(problem.rows, problem.n, problem.k, sm_count)


def _sent_bytes(problem: ReduceProblem, times: int) -> float:
    """Of an all-reduce, what a rank sends inside its node if its 16-bit values for every other rank travel so many times."""
    size = problem.topology.size
    return times * 2 * problem.rows * problem.n * (size - 1) / size


def floods(plan: ReducePlan, sm_count: int) -> bool:
    """Whether all SMs together compute tiles of others faster than the links of a node take them.

    Measured on four GPUs (docs/benchmarks.md). Between two, with half of the tiles own ones, and in an all-reduce, whose links are busy
    anyway, one owner's after the other's was faster.
    """
    problem = plan.problem
    inside = problem.op == REDUCE_SCATTER and problem.topology.num_nodes == 1 and problem.topology.size > 2
    return inside and sm_count * plan.partial_bytes > plan.tile.seconds(problem.k) * _LINK_BYTES


def fits_packets(plan: ReducePlan) -> bool:
    """An all-reduce of few values inside a node, in the output dtype."""
    problem = plan.problem
    inside = problem.op == ALLREDUCE and problem.topology.num_nodes == 1 and 1 < problem.topology.size <= _PACKET_RANKS
    few = problem.rows * problem.n * 2 <= _PACKET_VALUES and plan.packet_bytes <= abi.PACKET_BYTES
    return inside and few and problem.partials == "output"


def default_split(problem: ReduceProblem, sm_count: int) -> Split:
    """Partial tiles are sent by the CTAs that compute them; an all-reduce has CTAs that pull finished tiles, as many as are in time."""
    topology = problem.topology
    several = topology.num_nodes > 1
    pull = problem.op == ALLREDUCE and topology.size > 1 and not problem.one_shot
    all_the_time = link_bound(problem, sm_count)
    fewest, most = _PULL_CTAS
    intra = min(_LINK_PULL_CTAS if all_the_time else most, max(1, sm_count // 4)) if pull else 0
    if pull and not several and not all_the_time:
        multiplying = seconds_to_multiply(problem.rows, problem.n, problem.k, sm_count)
        intra = choose_ctas(_sent_bytes(problem, 1) / _CTA_PULLS, _IN_TIME * multiplying, fewest, intra)
    return Split(
        intra_comm=intra,
        inter_send=min(2, max(1, sm_count // 8)) if several else 0,
        inter_reduce=min(4, max(1, sm_count // 8)) if several and not problem.one_shot else 0,
    )


def wait_graph(plan: ReducePlan) -> WaitGraph:
    """Who waits for whom in one call, on all ranks (the roles of ``kernels_src/reduce.cuh``).

    Steps: ``("enter", rank)``, ``("tile", rank, index in tiles_of)``, ``("sum", rank, owner, tile)``, ``("put", rank, owner, chunk)`` of
    sums, ``("send", rank, peer, chunk)`` of finished or partial tiles, ``("pull", rank, owner, tile or chunk)``, and of packets
    ``("partials", rank, tile)``, ``("packets", rank, tile)``. A rank's tiles are one chain, as if a single CTA computed: with more CTAs a
    tile waits for fewer.
    """
    graph, topology = WaitGraph(), plan.problem.topology
    steps = _Steps(plan)
    for rank in range(topology.size):
        graph.add(("enter", rank))
        entered: list[Step] = [("enter", other) for other in range(topology.size)]
        for i, tile in enumerate(steps.tiles[rank]):
            graph.add(("tile", rank, i), [*entered, *steps.inputs(rank, tile)])
        if plan.packets:
            _packet_steps(graph, plan, rank, entered)
        graph.chain(("tile", rank, i) for i in range(len(steps.tiles[rank])))
        for cta in range(plan.split.inter_reduce or 0):
            sums = list(plan.sums_of(rank))[cta :: plan.split.inter_reduce]
            for tile in (tile for tile in sums if plan.exists(tile.owner, tile.index)):
                graph.add(("sum", rank, tile.owner, tile.index), [*entered, *steps.inputs(rank, tile)])
            graph.chain(("sum", rank, tile.owner, tile.index) for tile in sums if plan.exists(tile.owner, tile.index))
        for cta in range(plan.split.inter_send or 0):
            for sends in steps.sends(rank, cta):
                for step, before in sends:
                    graph.add(step, [*entered, *before])
                graph.chain(step for step, _ in sends)
        for cta in range(plan.split.intra_comm or 0):
            pulls = steps.pulls(rank, cta)
            for step, before in pulls:
                graph.add(step, [*entered, *before])
            graph.chain(step for step, _ in pulls)
    return graph


def _packet_steps(graph: WaitGraph, plan: ReducePlan, rank: int, entered: list[Step]) -> None:
    """A tile's packets are sent, then (two-shot) sums of everyone's sent back, and then the tile is done; one tile after the other."""
    for i in range(plan.tiles):
        sent: list[Step] = [("partials", source, i) for source in range(plan.problem.topology.size)]
        graph.add(("partials", rank, i), [*entered, *([("tile", rank, i - 1)] if i > 0 else [])])
        graph.add(("packets", rank, i), [("partials", rank, i)] if plan.problem.one_shot else sent)


class _Steps:
    """Which step raises which flag."""

    def __init__(self, plan: ReducePlan) -> None:
        self.plan, self.topology = plan, plan.problem.topology
        ranks = range(self.topology.size)
        self.tiles = [[tile for tile in plan.tiles_of(rank) if plan.exists(tile.owner, tile.index)] for rank in ranks]
        self._position = {(rank, tile.owner, tile.index, tile.is_sum): i for rank in ranks for i, tile in enumerate(self.tiles[rank])}

    def computed(self, rank: int, owner: int, index: int) -> Step:
        return ("tile", rank, self._position[rank, owner, index, False])

    def chunk(self, chunk: int, owner: int) -> list[int]:
        """Its tiles."""
        begin = chunk * self.plan.chunk_tiles
        return [i for i in range(begin, min(begin + self.plan.chunk_tiles, self.plan.tiles)) if self.plan.exists(owner, i)]

    def inputs(self, rank: int, tile: Tile) -> list[Step]:
        """What a tile of ``rank`` adds."""
        topology, chunk = self.topology, tile.index // self.plan.chunk_tiles
        node = topology.node(rank)
        if self.plan.packets:
            return [("packets", source, tile.index) for source in range(topology.size)]
        if self.plan.problem.one_shot:
            if not tile.is_sum:
                return []
            near: list[Step] = [self.computed(source, source, tile.index) for source in topology.node_ranks(node)]
            far: list[Step] = [("send", source, rank, chunk) for source in range(topology.size) if topology.node(source) != node]
            return near + far
        if tile.is_sum:
            return [self.computed(source, tile.owner, tile.index) for source in topology.node_ranks(node)]
        if tile.owner != rank:
            return []
        sent = [self.computed(source, rank, tile.index) for source in topology.node_ranks(node) if source != rank]
        return [*sent, *(("put", peer, rank, chunk) for peer in topology.rail_peers(rank))]

    def sends(self, rank: int, cta: int) -> list[list[tuple[Step, list[Step]]]]:
        """Of each thread of an inter_send CTA, in order."""
        plan, topology, stride = self.plan, self.topology, self.plan.split.inter_send or 1
        remote = [peer for peer in range(topology.size) if topology.node(peer) != topology.node(rank)]
        puts: list[tuple[Step, list[Step]]] = []
        if plan.problem.one_shot:
            for chunk in range(cta, plan.num_chunks, stride):
                ready = [self.computed(rank, rank, index) for index in self.chunk(chunk, rank)]
                puts += [(("send", rank, peer, chunk), ready) for peer in remote]
            return [puts]
        peers = topology.rail_peers(rank)
        items = [(chunk, peer) for chunk in range(plan.num_chunks) for peer in peers][cta::stride]
        for chunk, peer in items:
            if tiles := self.chunk(chunk, peer):
                puts.append((("put", rank, peer, chunk), [("sum", rank, peer, index) for index in tiles]))
        if plan.op == REDUCE_SCATTER:
            return [puts]
        results: list[tuple[Step, list[Step]]] = []
        for chunk, peer in items:
            if tiles := self.chunk(chunk, rank):
                results.append((("send", rank, peer, chunk), [self.computed(rank, rank, index) for index in tiles]))
        return [puts, results]

    def pulls(self, rank: int, cta: int) -> list[tuple[Step, list[Step]]]:
        """Of an intra_comm CTA, in order."""
        plan, topology, stride = self.plan, self.topology, self.plan.split.intra_comm or 1
        node, local, per_node = topology.node(rank), topology.local_rank(rank), topology.ranks_per_node
        items: list[tuple[Step, list[Step]] | None] = []
        for index in range(plan.tiles):
            for owner in (topology.rank(node, (local + i) % per_node) for i in range(1, per_node)):
                there = plan.exists(owner, index)
                items.append((("pull", rank, owner, index), [self.computed(owner, owner, index)]) if there else None)
        for chunk in range(plan.num_chunks):
            for distance in range(1, topology.num_nodes):
                for i in range(per_node):
                    owner = topology.rank((node + distance) % topology.num_nodes, (local + i) % per_node)
                    proxy = topology.rank(node, topology.local_rank(owner))
                    source: Step = ("send", owner, rank, chunk) if proxy == rank else ("pull", proxy, owner, chunk)
                    items.append((("pull", rank, owner, chunk), [source]) if self.chunk(chunk, owner) else None)
        return [item for item in items[cta::stride] if item is not None]
