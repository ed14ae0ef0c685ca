"""GEMM+ReduceScatter and GEMM+AllReduce: the choice of a plan, by rules of thumb."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mkernel import abi
from mkernel.planner import pairs
from mkernel.planner.derived import replaced
from mkernel.planner.gemm import (
    BLOCK_K,
    BLOCK_M,
    GROUP_M,
    GemmTile,
    choose_ctas,
    choose_load_rows,
    choose_put,
    choose_tile,
    seconds_to_multiply,
)
from mkernel.planner.heights import SWAPPED_COLUMNS, asked_heights
from mkernel.planner.reduce_plan import PARAMETER_BYTES, SPECIALIZED, ReducePlan, Tile
from mkernel.planner.reduce_problem import (
    ALGORITHMS,
    ALLREDUCE,
    PARTIALS,
    REDUCE_SCATTER,
    ReduceProblem,
    choose_algorithm,
    sums_by_node,
)
from mkernel.planner.row_classes import EXAMINED_ROWS, MOST_KERNELS, class_of, classes
from mkernel.planner.spans import Product, choose_shares
from mkernel.planner.specialize import Specialized, parse
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

__all__ = [
    "ALGORITHMS",
    "ALLREDUCE",
    "GROUP_ROWS",
    "PARAMETER_BYTES",
    "PARTIALS",
    "REDUCE_SCATTER",
    "SPECIALIZED",
    "SWAPPED_TILE",
    "ReducePlan",
    "ReduceProblem",
    "Tile",
    "choose_algorithm",
    "make_plan",
    "sums_by_node",
]

_TAIL = 1.5  # of a tile's time: what comes last is sent, waited for and added (measured, docs/speed_log.md)
_GROUPS = 8  # of an owner's tiles: few enough that a group shares what it loads, many enough that the link is busy all the time;
_ALLREDUCE_GROUPS = 32  # in an all-reduce of three ranks or more inside a node (measured, docs/speed_log.md)
_ADDING_CTAS = 4, 16  # that make a node's sums: few, or many
_RAIL_BYTES = 50e9  # per second, from a rank to other nodes: a card of 400 Gb/s
_PULL_CTAS = 4, 12  # of the all-reduce: at least, and at most,
_LINK_PULL_CTAS = 14  # and where the links take longer than the products
_CTA_PULLS = 40e9  # bytes per second
_LINK_BYTES = 250e9  # per second, that a link takes without much waiting,
_LINK_PEAK = 310e9  # and at most
_IN_TIME = 0.45  # of the time that multiplying takes: when so many CTAs could have pulled everything (measured, docs/speed_log.md)
_PACKET_RANKS = 8  # more would need more registers,
_FEW_BLOCK_N = 128  # and so would wider tiles
# Of swapped operands: rows at most, since higher tiles leave no registers. The threads that multiply store the result: one buffer.
SWAPPED_TILE = GemmTile(192, 5, 1)
GROUP_ROWS = 16  # that are sent together: a multiple of them are a tile's (kernels_src/reduce/groups.cuh)
# Bytes of the result of all ranks up to which packets are faster (docs/speed_log.md): owners' tiles overlap with what is sent.
_PACKET_BYTES = {REDUCE_SCATTER: 4 << 20, ALLREDUCE: 8 << 20}


def make_plan(
    problem: ReduceProblem,
    rows: int,
    sm_count: int,
    split: Split | None = None,
    tile: GemmTile | None = None,
    group_tiles: int | None = None,
    specialize: str | Iterable[str] | None = None,
    tiling: Tiling | None = None,
    algorithm: str | None = None,
) -> ReducePlan:
    """The plan for ``rows`` rows of a rank's result on a device with ``sm_count`` SMs. All choices are those for the most of their class.

    ``specialize``: as ``planner/specialize.py`` parses it. ``tiling``: what tiles cover, where it is asked for. Of a reduce-scatter a
    ``span`` of 1 asks for partial tiles that are copied in bulk, too, and one of all ranks for packets. ``algorithm``: of an all-reduce
    whose problem leaves it open.

    Raises
    ------
    SplitError
        ``split`` does not fit.
    TilingError
        A reduction cannot have such tiles, whatever its rows. (Where packets have no room, K is not shared, and tiles travel, which CTAs
        take alone where they cannot take them in such clusters.)
    """
    fields, asked, of_class = parse(specialize, SPECIALIZED[problem.op]), tiling or Tiling(), class_of(rows)
    _check_tiling(problem, asked, split)
    if problem.canonical:
        asked = replaced(asked, shares=1)
    if asked.swaps:
        asked = replaced(asked, block_n=None, packets=1)
    elif asked.block_n is not None:
        tile = GemmTile.deepest(asked.block_n, sent=True)
    plan = _plan_of_class(problem, of_class, sm_count, split, tile, group_tiles, fields, asked, algorithm)
    if (asked.shares is None and plan.shares > 1) or (asked.cluster is None and plan.cluster > 1):
        room = _room(problem, sm_count, fields)
        asked = replaced(asked, shares=asked.shares or room.shares, cluster=asked.cluster or room.cluster)
        plan = _plan_of_class(problem, of_class, sm_count, split, tile, group_tiles, fields, asked, algorithm)
    return plan.of_rows(rows)


def _check_tiling(problem: ReduceProblem, asked: Tiling, split: Split | None) -> None:
    """Raises TilingError where no number of rows could have such tiles."""
    size, steps = problem.topology.size, math.ceil(problem.k / BLOCK_K)
    packets = may_be_packed(problem) and _leaves_packets(asked, split)
    if asked.swaps and (problem.canonical or asked.block_n not in (None, SWAPPED_COLUMNS) or not packets):
        raise TilingError(f"{asked}: swapped operands have tiles of {SWAPPED_COLUMNS} columns, in packets, and no batch_invariant")
    if asked.block_n is not None and asked.block_n % BLOCK_K:
        raise TilingError(f"{asked}: tiles of a reduction have 64, 128, 192 or 256 columns")
    if asked.packets not in (None, 0) and (asked.packets == 2 or not packets):
        raise TilingError(f"{asked}: values travel in packets inside a node of 2 to {_PACKET_RANKS} ranks, unrounded sums not")
    clusters = asked.cluster or 1, asked.cluster_n or 1
    if not packets and _clusters_of_tiles(problem, clusters) != clusters:
        of_one = problem.algorithm == "one_shot"
        raise TilingError(
            f"{asked}: an all-reduce in one step has no clusters of CTAs, if not in packets"
            if of_one
            else f"{asked}: runs of tiles, and other nodes', have no clusters but pairs of neighbours in M, sums none of two by two"
        )
    if max(clusters) > 1 and (asked.shares or 1) > 1:
        raise TilingError(f"{asked}: CTAs that share K of tiles take them alone")
    if asked.span not in (None, 1) and not (problem.op == REDUCE_SCATTER and asked.span == size and packets):
        raise TilingError(f"{asked}: span must be 1, or, of a reduce-scatter that may travel in packets, all {size} ranks")
    if asked.shares not in (None, 1):
        if problem.canonical:
            raise TilingError(f"{asked}: with batch_invariant one CTA adds up all of K")
        if not packets or (problem.op == REDUCE_SCATTER and asked.span == 1) or (asked.shares or 1) > steps:
            raise TilingError(f"{asked}: K is shared in packets only, by at most {steps} CTAs, which is as many as it has steps")


def _clusters_of_tiles(problem: ReduceProblem, asked: tuple[int, int]) -> tuple[int, int]:
    """CTAs in M and N that take tiles together, not in packets: those asked for, if all of a cluster's tiles may be one owner's.

    Where owners have runs of tiles, or these travel between nodes, pairs in M have runs of them; else CTAs take them alone.
    """
    topology = problem.topology
    # Beside sums all CTAs of a cluster share a row or a column (kernels_src/tile/gemm.cuh).
    in_line = problem.op == REDUCE_SCATTER and topology.num_nodes == 1 and 1 in asked
    own_rows = topology.size == 1 or in_line
    return asked if (own_rows or asked == (2, 1)) and problem.algorithm != "one_shot" else (1, 1)


def _takes_packets(problem: ReduceProblem, rows: int, split: Split | None, asked: Tiling) -> bool:
    """Whether values travel in packets, if there is room: few, or where that is asked for. Tiles of one owner ask for the other kernel."""
    few = are_few(problem, rows) or (asked.packets == 1 and may_be_packed(problem))
    return few and _leaves_packets(asked, split) and not (problem.op == REDUCE_SCATTER and asked.span == 1)


def _leaves_packets(asked: Tiling, split: Split | None) -> bool:
    """Whether packets are left possible: CTAs that pull, and wider tiles, ask for the other kernel."""
    return asked.packets != 0 and (asked.block_n or 0) <= _FEW_BLOCK_N and not (split and split.intra_comm)


@functools.lru_cache(maxsize=64)
def _room(problem: ReduceProblem, sm_count: int, specialize: Specialized) -> Tiling:
    """What is left out, by the value 1, so that all classes together have few enough kernels: nothing, shares of K, pairs of CTAs, both."""
    for room in (Tiling(), Tiling(shares=1), Tiling(cluster=1)):
        plans = (_plan_of_class(problem, rows, sm_count, None, None, None, specialize, room) for rows in classes(EXAMINED_ROWS))
        if len({plan.spec for plan in plans}) <= MOST_KERNELS:
            return room
    return Tiling(shares=1, cluster=1)


@functools.lru_cache(maxsize=4096)  # calls of a class, and all choices among a problem's kernels, ask for the same ones
def _plan_of_class(
    problem: ReduceProblem,
    rows: int,
    sm_count: int,
    split: Split | None,
    tile: GemmTile | None,
    group_tiles: int | None,
    specialize: Specialized,
    asked: Tiling,
    algorithm: str | None = None,
) -> ReducePlan:
    scatters, topology = problem.op == REDUCE_SCATTER, problem.topology
    packs = _takes_packets(problem, rows, split, asked)
    clusters = (1, 1) if packs else _clusters_of_tiles(problem, (asked.cluster or 1, asked.cluster_n or 1))
    algorithm = "two_shot" if scatters or max(clusters) > 1 else problem.algorithm or algorithm
    if algorithm is None:
        first, *others = _algorithms(problem, rows, split)
        make = functools.partial(_plan_of_class, problem, rows, sm_count, split, tile, group_tiles, specialize, asked)
        try:
            return make(first)
        except SplitError:
            for other in others:
                with contextlib.suppress(SplitError):
                    return make(other)
            raise
    wanted, tail, given = split or Split(), _TAIL if topology.size > 1 else 0.0, tile
    if tile is None:
        tile_rows, owners = math.ceil(rows / BLOCK_M), topology.size if scatters else 1
        tile = choose_tile(tile_rows * owners, problem.n, sm_count, tail, sent=True)
        if algorithm == "one_shot":
            tile = GemmTile.deepest(min(tile.block_n, _FEW_BLOCK_N), sent=True)
    load_rows = choose_load_rows(rows)
    cluster, cluster_n = clusters
    how: dict[str, Any] = {"algorithm": algorithm, "cluster": cluster, "cluster_n": cluster_n, "specialize": specialize}
    plan = ReducePlan(problem, rows, wanted, tile, 1, 1, load_rows=load_rows, **how)
    group_was_chosen, wanted_tiles = group_tiles is None, group_tiles
    if group_tiles is None:
        group_tiles = choose_group(plan, sm_count)
    # An own tile waits for all of its chunk: what is computed before it reaches to the end of the next group, and a chunk no further, also
    # where each pair of a group has one tile.
    put_tiles = max(1, min(group_tiles, choose_put(plan.tiles * plan.partial_bytes) // plan.partial_bytes))
    chunk_tiles = 1 << put_tiles.bit_length() - 1
    if packs:
        packed = next(filter(fits_packets, _packed(plan, sm_count, given, asked)), None)
        if packed is not None:
            chosen = pairs.complete(wanted, Split(0, 0, 0, 0), sm_count, (), packed.ctas_together, alone=False)
            return replaced(packed, split=chosen, group_tiles=group_tiles, chunk_tiles=chunk_tiles)
        if max(asked.cluster or 1, asked.cluster_n or 1) > 1:  # that may also add up partial tiles
            in_tiles = replaced(asked, packets=0)
            return _plan_of_class(problem, rows, sm_count, split, given, wanted_tiles, specialize, in_tiles, algorithm)
    default = default_split(plan, sm_count, wanted)
    is_open = asked.cluster is None and asked.cluster_n in (None, 1) and given is None
    if is_open and topology.num_nodes == 1 < topology.size and not plan.one_shot and group_was_chosen:
        product = pairs.Paired(topology.size if scatters else 1, rows, problem.n, problem.k, problem.b_row_major)
        paired = pairs.choose(product, tile, wanted, default, sm_count, (), sent=True)
        if paired is not None:
            in_two = replaced(asked, cluster=2)
            return _plan_of_class(problem, rows, sm_count, split, paired[0], None, specialize, in_two)
    chosen = pairs.complete(wanted, default, sm_count, (), plan.ctas_together, alone=topology.size == 1)
    interleaved = saturates_link(plan, sm_count)
    return replaced(plan, split=chosen, group_tiles=group_tiles, chunk_tiles=chunk_tiles, interleaved=interleaved)


def _algorithms(problem: ReduceProblem, rows: int, split: Split | None) -> list[str]:
    """Algorithms of an all-reduce that leaves it open, the better one first. The other one may have the roles that ``split`` names.

    So a split that fits many rows fits fewer, for which one step would be faster.
    """
    found = choose_algorithm(problem.topology, rows, problem.n, canonical=problem.canonical)
    others = [] if split is None else [one for one in ALGORITHMS if one != found]
    return [found, *(one for one in others if not problem.canonical or sums_by_node(one, problem.topology))]


def _packed(plan: ReducePlan, sm_count: int, tile: GemmTile | None, asked: Tiling) -> Iterator[ReducePlan]:
    """The plan with packets, if they have room: K shared where that is asked for, or saves more than predictions are off, then without.

    Clusters are those asked for, which do not share K.

    ``tile``: where it is given.
    """
    problem, scatters = plan.problem, plan.op == REDUCE_SCATTER
    rows = plan.rows * (problem.topology.size if scatters else 1)  # of a reduce-scatter a tile has those of several owners
    whole = tile or (choose_tile(math.ceil(rows / BLOCK_M), problem.n, sm_count, _TAIL, sent=True) if scatters else plan.tile)
    whole = SWAPPED_TILE if asked.swaps else GemmTile.deepest(min(whole.block_n, _FEW_BLOCK_N), sent=True)
    cluster, cluster_n = asked.cluster or 1, asked.cluster_n or 1
    shares = 1 if cluster * cluster_n > 1 else asked.shares
    packed = replaced(plan, tile=whole, load_rows=choose_load_rows(rows), packets=True, cluster=cluster, cluster_n=cluster_n)
    if asked.swaps:
        heights = asked_heights(asked, most=whole.block_n, unit=GROUP_ROWS)
        swapped = max(asked.tile_rows or 1, math.ceil(rows / heights[-1]))
        yield replaced(packed, swapped=swapped, heights=heights, shares=asked.shares or 1)
        return
    product = Product(Topology(1, 1), rows, problem.n, problem.k, sm_count)
    if shares != 1 and rows and problem.n:
        # The threads that add up shares store the result: there are no buffers for more than two blocks of it.
        widths = (64, _FEW_BLOCK_N) if tile is None else (whole.block_n,)
        shared = choose_shares(product, whole, [GemmTile.deepest(width) for width in widths], shares)
        if shared is not None:
            yield replaced(packed, tile=shared.tile, shares=shared.shares)
    yield packed


def choose_group(plan: ReducePlan, sm_count: int) -> int:
    """How many tiles of an owner, or pairs of them, are computed one after the other, before own ones follow.

    All of them where the links are what an all-reduce waits for: they carry partial tiles first, and then results, faster than both at once
    (measured, docs/speed_log.md).
    """
    if link_bound(plan, sm_count):
        return plan.taken
    rows = math.ceil(min(GROUP_M, plan.tile_rows or 1) / plan.cluster)
    topology = plan.problem.topology
    near = plan.op == ALLREDUCE and topology.num_nodes == 1 and topology.size > 2
    wanted = plan.taken // (_ALLREDUCE_GROUPS if near else _GROUPS)
    return max(1, max(sm_count // (2 * plan.ctas_together), wanted) // rows) * rows


def link_bound(plan: ReducePlan, sm_count: int) -> bool:
    """Whether an all-reduce inside a node keeps the links busy for longer than its products take."""
    problem = plan.problem
    near = problem.op == ALLREDUCE and problem.topology.num_nodes == 1 and not plan.one_shot
    times = 3 if problem.partials == "float32" else 2  # partial tiles, and results
    return near and _sent_bytes(plan, times) / _LINK_PEAK > seconds_to_multiply(plan.rows, problem.n, problem.k, sm_count)


def _sent_bytes(plan: ReducePlan, times: int) -> float:
    """Bytes of an all-reduce that a rank sends inside its node if its 16-bit values for every other rank travel so many times."""
    size = plan.problem.topology.size
    return times * 2 * plan.rows * plan.problem.n * (size - 1) / size


def saturates_link(plan: ReducePlan, sm_count: int) -> bool:
    """Whether all SMs together compute tiles of others faster than the links of a node take them.

    Measured on four GPUs (docs/speed_log.md). Between two, with half of the tiles own ones, and in an all-reduce, whose links are busy
    anyway, one owner's after the other's was faster.
    """
    problem = plan.problem
    inside = problem.op == REDUCE_SCATTER and problem.topology.num_nodes == 1 and problem.topology.size > 2
    return inside and sm_count * plan.partial_bytes > plan.tile.seconds(problem.k) * _LINK_BYTES


def may_be_packed(problem: ReduceProblem) -> bool:
    """Whether values travel in packets where they are few: inside a node, in the output dtype."""
    topology = problem.topology
    return topology.num_nodes == 1 and 1 < topology.size <= _PACKET_RANKS and problem.partials == "output"


def are_few(problem: ReduceProblem, rows: int) -> bool:
    """Whether values may travel in packets, and are so few that these are faster; ``rows``: of a rank's result."""
    ranks = problem.topology.size if problem.op == REDUCE_SCATTER else 1
    return may_be_packed(problem) and rows * ranks * problem.n * 2 <= _PACKET_BYTES[problem.op]


def fits_packets(plan: ReducePlan) -> bool:
    """Whether there is room for a plan's packets."""
    return plan.packet_bytes <= abi.PACKET_BYTES


def fewest_pulling(sm_count: int) -> int:
    """CTAs that pull in an all-reduce of a node in two steps, by tiles, unless fewer are asked for."""
    return min(_PULL_CTAS[0], max(1, sm_count // 4))


def default_split(plan: ReducePlan, sm_count: int, wanted: Split) -> Split:
    """Partial tiles are sent by the CTAs that compute them; an all-reduce has CTAs that pull finished tiles, as many as are in time.

    What it has beside ``wanted`` fits where it fits more rows.
    """
    problem, topology = plan.problem, plan.problem.topology
    several = topology.num_nodes > 1
    pull = problem.op == ALLREDUCE and topology.size > 1 and not plan.one_shot
    all_the_time = link_bound(plan, sm_count)
    fewest, most = _PULL_CTAS
    intra = min(_LINK_PULL_CTAS if all_the_time else most, max(1, sm_count // 4)) if pull else 0
    if pull and not several and not all_the_time:
        multiplying = seconds_to_multiply(plan.rows, problem.n, problem.k, sm_count)
        intra = choose_ctas(_sent_bytes(plan, 1) / _CTA_PULLS, _IN_TIME * multiplying, fewest, intra)
    if not several:
        return Split(intra_comm=intra, inter_send=0, inter_reduce=0)
    senders, adding = min(2, max(1, sm_count // 8)), 0
    if not plan.one_shot:
        others = (wanted.compute or 1, intra if wanted.intra_comm is None else wanted.intra_comm, wanted.inter_send or senders)
        adding = min(_choose_adding(plan, sm_count, sm_count - sum(others)), max(1, sm_count // 8))
    return Split(intra_comm=intra, inter_send=senders, inter_reduce=adding)


def _choose_adding(plan: ReducePlan, sm_count: int, left: int) -> int:
    """How many CTAs, of those ``left``, add up their node's partial tiles before they compute.

    The first put waits for sums, so that many are better where the network binds: where all products are done by the other SMs before
    everything is sent.
    """
    problem, topology, (few, many) = plan.problem, plan.problem.topology, _ADDING_CTAS
    rows = plan.rows * (topology.size if problem.op == REDUCE_SCATTER else 1)
    sent = (topology.num_nodes - 1) * plan.tiles * plan.partial_bytes * (2 if problem.op == ALLREDUCE else 1)
    if many > left or seconds_to_multiply(rows, problem.n, problem.k, sm_count - many) > sent / _RAIL_BYTES:
        return few
    return many
