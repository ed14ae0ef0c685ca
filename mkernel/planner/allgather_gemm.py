"""AllGather+GEMM: how a call will be done, by rules of thumb (docs/planner.md). Pure Python; problem and plan are in ``gather_plan.py``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from mkernel import abi
from mkernel.planner import pairs
from mkernel.planner.derived import replaced
from mkernel.planner.gather_plan import OP, PARAMETER_BYTES, SHARE, SPECIALIZED, SUM, AllGatherGemmPlan, AllGatherGemmProblem, Tile
from mkernel.planner.gemm import BLOCK_M, GROUP_M, GemmTile, choose_put
from mkernel.planner.heights import NARROW_COLUMNS, SWAPPED_COLUMNS, SWAPPED_ROWS, WIDE_COLUMNS, Heights, asked_heights
from mkernel.planner.pairs import Paired
from mkernel.planner.pushing import FEW_WAVES, default_split, most_parts, warps_pay, warps_push
from mkernel.planner.row_classes import EXAMINED_ROWS, class_of, classes, most_chosen
from mkernel.planner.slices import most_slices
from mkernel.planner.spans import Product, choose, spans_of
from mkernel.planner.specialize import Specialized, parse
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

__all__ = [
    "OP",
    "PARAMETER_BYTES",
    "SHARE",
    "SPECIALIZED",
    "SUM",
    "AllGatherGemmPlan",
    "AllGatherGemmProblem",
    "CLUSTER_K_WIDTHS",
    "Tile",
    "make_plan",
    "may_travel_in_packets",
]

_CHUNK_BYTES = 256 * 1024  # what a push must reach to use the link well
_WARP_CHUNK_BYTES = 32 * 1024  # what a warp pushes before it raises a flag, and waits; of all warps together it should be few tiles' rows
_TAIL = 0.35  # of a tile's time: measured, where the last data come late
# What the 16 to 18 SMs of a GPC read at the same time is read from L2 once, and CTAs that follow each other are of one GPC: so where
# all tiles are worked on at once, or in two waves, blocks of 4 x 4 of them read least (docs/speed_log.md).
_GPC_GROUP_M, _GPC_WAVES = 4, 2
_PACKET_RANKS = 8  # of a node: more would need more registers
_PACKET_SHARDS = 16 << 10  # bytes of all shards, for each SM, up to which they travel in packets
CLUSTER_K_WIDTHS = 64, 128  # columns of tiles whose K clusters share: beside more there is no room for enough stages
_SWAPPED_WIDTHS = NARROW_COLUMNS, SWAPPED_COLUMNS, *WIDE_COLUMNS
_TAGGED_MOST = 192  # columns of tiles: more leave no registers
_ROW_CHUNK_BYTES = 48 * 1024  # where that is less than a row of tiles (docs/speed_log.md),
_FLAG_BYTES = 12 * 1024  # and where a flag costs a CTA as long as so many bytes to one mate,
_FLAGGED_BYTES = 144 * 1024  # unless a chunk is so large, to all mates together
_FEW_CHUNK_BYTES = 8 * 1024  # where tiles wait for all shards, which then travel by as many CTAs as there are, in no smaller pieces


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
        asked = replaced(asked, shares=1)
    if max(asked.cluster or 1, asked.cluster_n or 1) > 1 and asked.shares is None:
        asked = replaced(asked, shares=1)
    if asked.cluster_k is not None and asked.cluster_k > 1:
        asked = _sharing_in_clusters(problem, asked)
        tile = GemmTile.summing(asked.block_n or CLUSTER_K_WIDTHS[0], asked.cluster_k)
    elif not asked.swaps and (asked.tiles_at_once or 1) > 1:
        raise TilingError(f"{asked}: warpgroups have tiles of swapped operands in turn, which tile_rows or block_m asks for")
    elif asked.swaps:
        asked = _swapped(problem, of_class, asked)
        tile = GemmTile.deepest(SWAPPED_ROWS)
    elif asked.block_n is not None:
        tile = GemmTile.deepest(asked.block_n, row_major=problem.b_row_major)
        if tile.cut:
            asked = _cut(problem, asked)
    if tile is not None:
        asked = replaced(asked, cluster=asked.cluster or 1, cluster_n=asked.cluster_n or 1)
    plan = _plan_of_class(problem, of_class, sm_count, split, tile, compiled_in, asked)
    if split is None and tile is None and ("split" in compiled_in or problem.topology.num_nodes == 1 < problem.topology.size):
        kept = _kept_kernels(problem, sm_count, compiled_in, asked)
        if all(plan.spec != other.spec for other in kept):
            fit = [other for other in kept if not other.packets or _shards_bytes(problem, of_class) <= abi.AHEAD_BYTES] or kept
            near = min(fit, key=lambda other: (abs(other.rows - of_class), other.rows))
            takes = near.packets and _takes_packets(problem, of_class, sm_count, split, asked)
            packets = asked.packets if takes else int(near.packets)
            alike = replaced(asked, shares=near.shares, cluster=near.cluster, packets=packets, cluster_n=near.cluster_n)
            plan = _plan_of_class(problem, of_class, sm_count, near.split, near.tile, compiled_in, alike)
    return plan.of_rows(rows)


@functools.lru_cache(maxsize=64)
def _kept_kernels(problem: AllGatherGemmProblem, sm_count: int, specialize: Specialized, asked: Tiling) -> list[AllGatherGemmPlan]:
    """Plans of the classes that choose one of the kernels that the most classes choose.

    A class whose own choice is not among them takes the kernel of the nearest plan. Classes beyond those that are looked at, too. So it
    is inside a node, where packets, warps that push, shares of K and pairs of CTAs are kernels of their own, each of several widths.
    """
    plans = [_plan_of_class(problem, rows, sm_count, None, None, specialize, asked) for rows in classes(EXAMINED_ROWS)]
    kept = most_chosen(plan.spec for plan in plans)
    return [plan for plan in plans if plan.spec in kept]


@functools.lru_cache(maxsize=4096)  # calls of a class, and all choices among a problem's kernels, ask for the same ones
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
    swapped = asked.tile_rows or 0
    covering = choose(Product(topology, rows, problem.n, problem.k, sm_count), tail, tile, asked.span, asked.shares)
    if covering is None:
        raise _no_covering(topology, asked)
    span, tile, shares = covering
    tile_rows, tiles_n = _tiles_of_plane(problem, span * rows, tile, asked)
    tiles = tile_rows * (topology.size // span) * tiles_n
    wanted, default = split or Split(), default_split(problem, rows, sm_count, tiles)
    cluster, cluster_n, paired, may_pay = asked.cluster or 1, asked.cluster_n or 1, None, False
    if asked.cluster is None and cluster_n == 1 and span == shares == 1 < topology.size:  # in a world of one the model decides
        product = Paired(topology.size, rows, problem.n, problem.k, problem.b_row_major)
        paired, may_pay = pairs.choose(product, tile, wanted, default, sm_count, spared), pairs.may_pay(product)
    if paired is not None:
        cluster, (tile, wanted) = 2, paired
    # Where pairs may pay no warps push, whose stores would stand in front of the loads that bind: so there are few enough kernels.
    asks = wanted.compute is wanted.intra_comm is None and span == shares == cluster == cluster_n == 1
    if asks and not may_pay and warps_pay(problem, rows, tile, sm_count):
        wanted = dataclasses.replace(wanted, intra_comm=0)
    together = cluster * cluster_n * (asked.cluster_k or 1)
    chosen = pairs.complete(wanted, default, sm_count, spared, together, alone=topology.size == 1)
    few_waves = tiles <= FEW_WAVES * sm_count
    all_at_once = tiles <= (chosen.compute or 1)  # tiles that span shards wait for chunks of several
    plain = shares == cluster == cluster_n == 1 and not swapped
    parts = most_parts(problem) if plain and (few_waves if span == 1 else all_at_once) else 1
    chunk_bytes = _WARP_CHUNK_BYTES if warps_push(topology, chosen) else _CHUNK_BYTES
    if topology.num_nodes > 1:
        chunk_bytes = choose_put(rows * problem.k * 2)
    elif span > 1 or chosen.intra_comm:  # all that push have something to
        movers = chosen.intra_comm or chosen.compute or 1
        chunk_bytes = min(chunk_bytes, max(_FEW_CHUNK_BYTES, rows * problem.k * 2 // movers))
        if parts == 1 and chosen.intra_comm:  # what they push at a time is a row of tiles: the first ones begin early
            chunk_bytes = min(chunk_bytes, max(_ROW_CHUNK_BYTES, BLOCK_M * problem.k * 2 // movers))
    chunk_rows = max(1, min(BLOCK_M, _ceil_power_of_two(chunk_bytes * parts // (problem.k * 2))))
    if parts == topology.num_nodes == 1 and chosen.intra_comm:
        chunk_rows = _fewer_flags(rows, problem.k * 2, chunk_rows, chosen.intra_comm, topology.size - 1)
    slices = most_slices(tile) if few_waves and plain else 1  # of each number of rows, whether tiles are cut
    if parts == 1:
        group_m = _GPC_GROUP_M if topology.size == 1 and tiles <= _GPC_WAVES * (chosen.compute or 1) else GROUP_M
        return AllGatherGemmPlan(
            *(problem, rows, chosen, tile, chunk_rows, group_m, 1, 1, slices, span, shares, cluster, cluster_n),
            swapped=swapped,
            swapped_columns=_columns_of_swapped(asked),
            heights=_heights(asked),
            tiles_at_once=asked.tiles_at_once or 1,
            cluster_k=asked.cluster_k or 1,
            specialize=specialize,
        )
    if span > 1 and rows <= BLOCK_M:  # all first parts, then all second parts
        blocks = math.ceil(rows / chunk_rows)
        return AllGatherGemmPlan(
            problem, rows, chosen, tile, chunk_rows, parts=parts, part_blocks=blocks, slices=slices, span=span, specialize=specialize
        )
    # One group of blocks is what all SMs can work on at once: their tiles wait inside for the later parts.
    at_once = max(1, sm_count // (tiles_n * (topology.size - 1)))
    of_shard = math.ceil(max(1, rows) / BLOCK_M)
    groups = math.ceil(of_shard / at_once)
    group_rows = math.ceil(of_shard / groups)
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
        span,
        specialize=specialize,
    )


def _fewer_flags(rows: int, row_bytes: int, chunk_rows: int, movers: int, mates: int) -> int:
    """Rows of a chunk, at least ``chunk_rows``: those by which the busiest of ``movers`` CTAs is done soonest, flags included."""

    def cost(chunk: int) -> int:
        return math.ceil(math.ceil(rows / chunk) / movers) * (chunk * row_bytes * mates + _FLAG_BYTES)

    possible = [chunk_rows]
    while possible[-1] < BLOCK_M and 2 * possible[-1] * row_bytes * mates <= _FLAGGED_BYTES:
        possible.append(2 * possible[-1])
    return min(possible, key=cost)


def may_travel_in_packets(problem: AllGatherGemmProblem, rows: int) -> bool:
    """Whether shards of so many rows could travel in packets, if that was asked for."""
    return _has_packets(problem.topology) and 0 < _shards_bytes(problem, rows) <= abi.AHEAD_BYTES


def _has_packets(topology: Topology) -> bool:
    return topology.num_nodes == 1 < topology.size <= _PACKET_RANKS


def _shards_bytes(problem: AllGatherGemmProblem, rows: int) -> int:
    """Bytes of all shards."""
    return problem.topology.size * rows * problem.k * 2


def _takes_packets(problem: AllGatherGemmProblem, rows: int, sm_count: int, split: Split | None, asked: Tiling) -> bool:
    """Whether shards travel in packets: few rows inside a node, if neither CTAs that push nor narrower planes are asked for.

    Raises TilingError where packets are asked for and the world has none. More bytes than there is room for travel in chunks all the same.
    """
    topology, have_room = problem.topology, may_travel_in_packets(problem, rows)
    possible = _has_packets(topology) and not (split and split.intra_comm) and asked.span in (None, topology.size)
    if asked.packets and not possible:
        rule = f"shards travel in packets inside a node of 2 to {_PACKET_RANKS} ranks, without intra_comm, in one plane"
        raise TilingError(f"{asked}: {rule}")
    if asked.packets is None:
        return possible and asked.span is None and have_room and _shards_bytes(problem, rows) <= _PACKET_SHARDS * sm_count
    return bool(asked.packets) and have_room


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
    cluster_n = asked.cluster_n or 1
    covering = choose(Product(Topology(1, 1), size * rows, problem.n, problem.k, sm_count), 0.0, tile, None, asked.shares)
    if covering is None:
        raise _no_covering(problem.topology, asked)
    _, tile, shares = covering
    chosen = pairs.complete(wanted, Split(None, 0, 0, 0), sm_count, (), cluster * cluster_n, alone=False)
    tiles = math.prod(_tiles_of_plane(problem, size * rows, tile, asked))
    group_m = _GPC_GROUP_M if tiles <= _GPC_WAVES * (chosen.compute or 1) else GROUP_M
    if asked.packets == 2 and (cluster * cluster_n > 1 or tile.block_n > _TAGGED_MOST):
        raise TilingError(
            f"{asked}: a CTA that takes its rows from tagged packets is alone, and has tiles of at most {_TAGGED_MOST} columns"
        )
    return AllGatherGemmPlan(
        *(problem, rows, chosen, tile, BLOCK_M, group_m, 1, 1, 1, size, shares, cluster, cluster_n),
        packets=True,
        tagged=asked.packets == 2,
        swapped=asked.tile_rows or 0,
        swapped_columns=_columns_of_swapped(asked),
        heights=_heights(asked),
        specialize=specialize,
    )


def _swapped(problem: AllGatherGemmProblem, rows: int, asked: Tiling) -> Tiling:
    """What is asked for of swapped operands, with as many rows of tiles, at least, as so many rows need.

    Raises TilingError where there can be none as asked for.
    """
    columns, at_once = _columns_of_swapped(asked), asked.tiles_at_once or 1
    if columns not in _SWAPPED_WIDTHS:
        raise TilingError(f"{asked}: tiles of swapped operands have {', '.join(map(str, _SWAPPED_WIDTHS))} columns")
    if problem.canonical or asked.packets == 2:
        raise TilingError(f"{asked}: swapped operands have no tagged packets, and no batch_invariant")
    if at_once > 1 and (columns != SWAPPED_COLUMNS or (asked.shares or 1) > 1 or problem.topology.size > 1):
        raise TilingError(f"{asked}: warpgroups have tiles of {SWAPPED_COLUMNS} columns in turn, in a world of one, with all of K")
    if columns != SWAPPED_COLUMNS and (asked.shares or 1) > 1:
        raise TilingError(f"{asked}: of swapped operands CTAs share K of tiles of {SWAPPED_COLUMNS} columns only")
    if columns == NARROW_COLUMNS and problem.topology.size > 1 and not asked.packets:
        raise TilingError(f"{asked}: between ranks with tiles of {NARROW_COLUMNS} columns of swapped operands shards travel in packets")
    span = problem.topology.size if asked.packets else asked.span or 1
    tile_rows = max(asked.tile_rows or 1, math.ceil(span * rows / _heights(asked)[-1]))
    return replaced(asked, shares=asked.shares or 1, span=span, packets=asked.packets or 0, tile_rows=tile_rows)


def _cut(problem: AllGatherGemmProblem, asked: Tiling) -> Tiling:
    """What is asked for of tiles whose columns are no whole panels. Raises TilingError where there can be none as asked for."""
    whole = all(getattr(asked, name) in (None, 1) for name in ("span", "shares")) and not asked.packets
    if problem.topology.size > 1 or not whole or (asked.block_n or 0) % (8 * (asked.cluster or 1)):
        rule = "tiles of 64, 128, 192 or 256 columns, or in a world of one, of all K, of multiples of 16, with clusters of four in M of 32"
        raise TilingError(f"{asked}: {rule}")
    return replaced(asked, shares=1)


def _sharing_in_clusters(problem: AllGatherGemmProblem, asked: Tiling) -> Tiling:
    """What is asked for of clusters that share K. Raises TilingError where there can be none as asked for."""
    alone = all(getattr(asked, name) in (None, 1) for name in ("span", "cluster", "cluster_n", "tiles_at_once")) and not asked.packets
    alone = alone and not asked.swaps and asked.shares in (None, asked.cluster_k) and asked.block_n in (None, *CLUSTER_K_WIDTHS)
    if problem.topology.size > 1 or problem.canonical or not alone:
        rule = "CTAs of a cluster share K of tiles of 64 or 128 columns in a world of one, without batch_invariant, and with nothing else"
        raise TilingError(f"{asked}: {rule}")
    return replaced(asked, shares=asked.cluster_k)


def _columns_of_swapped(asked: Tiling) -> int:
    """Columns of tiles, if their operands are swapped."""
    return (asked.block_n if asked.swaps else None) or SWAPPED_COLUMNS


def _heights(asked: Tiling) -> Heights:
    """Heights that tiles may have in the kernel, if their operands are swapped."""
    return asked_heights(asked, _columns_of_swapped(asked)) if asked.swaps else ()


def _tiles_of_plane(problem: AllGatherGemmProblem, plane_rows: int, tile: GemmTile, asked: Tiling) -> tuple[int, int]:
    """Rows and columns of tiles; ``asked``: rows of those of swapped operands, or None."""
    columns = tile.block_n if asked.tile_rows is None else _columns_of_swapped(asked)
    return asked.tile_rows or math.ceil(plane_rows / BLOCK_M), math.ceil(problem.n / columns)


def _no_covering(topology: Topology, asked: Tiling) -> TilingError:
    possible = ", ".join(map(str, spans_of(topology)))
    return TilingError(f"{asked}: span must be one of {possible} in this world, and shares at most the k steps, on one node")


def _ceil_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
