"""The plans that the cost model chooses from: the rules' own, and others that kernels can do (docs/planner.md, "Choosing")."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from mkernel.jit.spec import KernelSpec
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem
from mkernel.planner.derived import replaced
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmTile
from mkernel.planner.heights import (
    NARROW_COLUMNS,
    SWAPPED_COLUMNS,
    SWAPPED_ROWS,
    SWAPPED_UNIT,
    WIDE_COLUMNS,
    Heights,
    every_height,
    height_of,
    may_take_turns,
    unit_of,
    usual_heights,
)
from mkernel.planner.pairs import ctas_of_clusters
from mkernel.planner.pushing import pushing_ctas
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem
from mkernel.planner.spans import FEWEST_STEPS, most_shares
from mkernel.planner.specialize import Specialized, parse
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import CLUSTER_K, Tiling, TilingError
from mkernel.planner.topology import Topology

__all__ = ["PAIRED_WIDTHS", "WIDTHS", "candidates", "compiled_in"]

WIDTHS = (256, 192, 128, 64)
PAIRED_WIDTHS = (256, 192, 128)  # of several ranks: narrower tiles load nearly as much of A as alone
_SHARED_WIDTHS, _SHARES_OF_SHARDS = (192, 128), (2, 3, 4)  # of tiles of single shards
_PULLING = (14,)  # beside what the rules have
_TAGGED_WIDTH, _TAGGED_ROUNDS = 64, 2  # of gathers: more rounds never pay, and wider tiles would be more kernels (docs/speed_log.md)
# Of workspace: in one step every rank has room for all partial tiles of all ranks. Larger results are no faster by it (docs/benchmarks.md).
_ONE_STEP_BYTES = 64 << 20
_MORE_TILE_ROWS = 8  # of swapped operands: how many more rows of tiles than needed are looked at
_ADDED_AT_ONCE = 4  # shares of K whose packets a thread looks at together (kernels_src/tile/shares.cuh)
_LOW_ROWS = 48  # up to so many rows swapped operands gain nothing in a world of one (docs/speed_log.md)
# Widths that are no whole panels, of which so many are looked at; and waves from which on who is free takes the next tile.
_CUT_WIDTHS, _FITTING, _FEW_WAVES = tuple(width for width in range(80, 256, 16) if width % BLOCK_K), 2, 4
_FEW_ROWS = 2048  # of a reduction: beyond, tiles of 64 columns never pay


def compiled_in(problem: AllGatherGemmProblem | ReduceProblem, specialize: str | None) -> Specialized:
    """Fields that are, of the problem's kernels."""
    default = allgather_gemm.SPECIALIZED if isinstance(problem, AllGatherGemmProblem) else reduce.SPECIALIZED[problem.op]
    return parse(specialize, default)


def _rules(problem: Any, rows: int, sm_count: int, specialize: str | None) -> Any:
    if isinstance(problem, AllGatherGemmProblem):
        return allgather_gemm.make_plan(problem, rows, sm_count, specialize=specialize)
    return reduce.make_plan(problem, rows, sm_count, specialize=specialize)


def candidates(
    problem: AllGatherGemmProblem | ReduceProblem,
    rows: int,
    sm_count: int,
    specialize: str | None = None,
    kept: frozenset[KernelSpec] | None = None,
) -> Iterator[Any]:
    """Plans that kernels can do, each once: first that of the rules, then other tile widths, SMs that push or pull, and groups of tiles.

    ``kept``: but for the rules' only those by these kernels.
    """
    rules = _rules(problem, rows, sm_count, specialize)
    yield rules
    kinds = _Kinds(_kernels(problem, sm_count, compiled_in(problem, specialize)), kept)
    for plan in _others(problem, rows, sm_count, specialize, rules, kinds):
        if kept is None or plan.spec in kept:
            yield plan


@functools.lru_cache(maxsize=64)
def _kernels(problem: AllGatherGemmProblem | ReduceProblem, sm_count: int, specialize: Specialized) -> dict[Hashable, KernelSpec]:
    """By kind of tile: the kernel of its plans, which rows do not change. Filled as plans are made."""
    return {}


class _Kinds:
    """Kinds of tiles, of which only those with a kernel that is kept are wanted. That is known once a plan of the kind was made."""

    def __init__(self, kernels: dict[Hashable, KernelSpec], kept: frozenset[KernelSpec] | None) -> None:
        self._kernels, self._kept = kernels, kept

    def plan(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, of a kind not known yet also where it is not wanted; None if it is known not to be, or there is none."""
        if self._kept is not None and kind in self._kernels and self._kernels[kind] not in self._kept:
            return None
        with contextlib.suppress(SplitError, TilingError):  # few SMs, or k steps
            plan = make()
            self._kernels[kind] = plan.spec
            return plan
        return None


def _others(
    problem: AllGatherGemmProblem | ReduceProblem,
    rows: int,
    sm_count: int,
    specialize: str | None,
    rules: Any,
    kinds: _Kinds,
) -> Iterator[Any]:
    if isinstance(problem, AllGatherGemmProblem):
        yield from _gathers(problem, rows, sm_count, specialize, rules, kinds)
        yield from _swapped_gathers(problem, rows, sm_count, specialize, kinds)
    else:
        yield from _reductions(problem, rows, sm_count, specialize, rules)
        if problem.op == ALLREDUCE and problem.algorithm is None and problem.topology.num_nodes == 1 < problem.topology.size:
            yield from _by_another_algorithm(problem, rows, sm_count, specialize, rules)


def _gathers(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, rules: AllGatherGemmPlan, kinds: _Kinds
) -> Iterator[AllGatherGemmPlan]:
    topology = problem.topology
    if topology.size == 1:
        yield from _products(problem, rows, sm_count, specialize, rules, kinds)
        return
    if allgather_gemm.may_travel_in_packets(problem, rows):
        yield from _in_packets(problem, rows, sm_count, specialize, rules)
    if rules.packets:
        return
    inside, most = topology.num_nodes == 1, max(1, sm_count // 4)
    spans = _spans(topology, rows)
    pushing = 0, *pushing_ctas(topology)  # CTAs; none: a warp of every computing one
    for split in [Split(intra_comm=ctas) for ctas in pushing if ctas <= most] if inside else [Split()]:
        pushed_by_warps = inside and not split.intra_comm  # a warp that pushes stands in front of the loads of both CTAs of a pair
        for width in WIDTHS:
            plan = allgather_gemm.make_plan(problem, rows, sm_count, split, GemmTile.deepest(width), specialize)
            if plan != rules and not plan.packets:  # where the rules' kernel is another class's
                yield plan
            for span in spans if split.intra_comm or topology.size == 2 else ():
                tiling = Tiling(width, span, 1)
                spanning = allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)
                if spanning not in (plan, rules):
                    yield spanning
            yield from (plan for plan in _sharing_of_shards(problem, rows, sm_count, split, specialize, width) if plan != rules)
            for clusters in _pairs(problem, rows) if width in PAIRED_WIDTHS and not pushed_by_warps else ():
                plans = _in_pairs(problem, rows, sm_count, split, specialize, width, clusters)
                yield from (plan for plan in plans if plan != rules)


def _in_pairs(
    problem: AllGatherGemmProblem,
    rows: int,
    sm_count: int,
    split: Split,
    specialize: str | None,
    width: int,
    clusters: tuple[int, int],
) -> Iterator[AllGatherGemmPlan]:
    cluster, cluster_n = clusters
    for span in (1, *_spans(problem.topology, rows, cluster * BLOCK_M)):
        with contextlib.suppress(SplitError):  # few SMs
            pairs = Tiling(width, span, 1, cluster, None, cluster_n)
            yield allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=pairs)


def _sharing_of_shards(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, split: Split, specialize: str | None, width: int
) -> Iterator[AllGatherGemmPlan]:
    """K of the tiles of single shards shared by CTAs, where tiles are few: what is left to do when the last chunk has come is a share.

    So shares may be more than there are SMs.
    """
    tiles = problem.topology.size * math.ceil(rows / BLOCK_M) * math.ceil(problem.n / width)
    if width not in _SHARED_WIDTHS or not split.intra_comm or problem.canonical or tiles > sm_count:
        return
    for shares in _SHARES_OF_SHARDS:
        tiling = Tiling(width, 1, shares, 1, 0)
        with contextlib.suppress(TilingError):  # fewer k steps
            yield allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)


def _spans(topology: Topology, rows: int, of_tiles: int = BLOCK_M) -> list[int]:
    """Numbers of shards for tiles to span: all, where there are fewer tiles then. Some begin as early as those of single shards.

    ``of_tiles``: the rows that CTAs take together. Of shards that are no higher the rules see to it.
    """
    size = topology.size
    fewer = rows > of_tiles and math.ceil(size * rows / of_tiles) < size * math.ceil(rows / of_tiles)
    return [size] if fewer and topology.num_nodes == 1 else []


def _shares(problem: AllGatherGemmProblem | ReduceProblem, rows: int, sm_count: int, width: int) -> list[int]:
    """Numbers of shares of K that may be worth their sums: as many as there are SMs, half as many, two, or as many as are added at once.

    ``rows``: that tiles lie in.
    """
    most = 0 if problem.canonical else most_shares(rows, problem.n, problem.k, width, sm_count)
    return sorted({most, max(2, most // 2), 2, min(_ADDED_AT_ONCE, most)}) if most >= 2 else []


def _sharings(
    problem: AllGatherGemmProblem | ReduceProblem,
    rows: int,
    sm_count: int,
    widths: tuple[int, ...],
    known: tuple[int, int] | None,
) -> Iterator[tuple[int, int]]:
    """Widths of tiles and shares of their K, one of them among these, but ``known``; narrow tiles only where all are worked on at once."""
    for width in widths:
        if width == WIDTHS[-1] and math.ceil(rows / BLOCK_M) * math.ceil(problem.n / width) > sm_count:
            continue
        for shares in (1, *_shares(problem, rows, sm_count, width)):
            if (width, shares) != known:
                yield width, shares


def _in_packets(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, rules: AllGatherGemmPlan
) -> Iterator[AllGatherGemmPlan]:
    """Where shards travel in packets, or could: as in a world of one; in tagged ones, where each CTA takes its rows in few rounds."""
    all_rows, asked = rows * problem.topology.size, None if rules.packets else 1
    known = (rules.tile.block_n, rules.shares) if rules.packets else None
    alone = (Tiling(width, None, shares, 1, asked) for width, shares in _sharings(problem, all_rows, sm_count, WIDTHS, known))
    pairs = (
        Tiling(width, None, 1, cluster, asked, cluster_n)
        for width, (cluster, cluster_n) in itertools.product(PAIRED_WIDTHS, _clusters(problem, all_rows))
    )
    for tiling in itertools.chain([None] if rules.packets else [], alone, pairs):
        plan = rules
        if tiling is not None:
            try:
                plan = allgather_gemm.make_plan(problem, rows, sm_count, specialize=specialize, tiling=tiling)
            except SplitError:  # one SM is no pair
                continue
            yield plan
        if plan.tile.block_n == _TAGGED_WIDTH and plan.rounds <= _TAGGED_ROUNDS:
            yield replaced(plan, tagged=True)


def _may_bind(problem: AllGatherGemmProblem | ReduceProblem, rows: int) -> bool:
    """Whether loads may bind, so that pairs of CTAs may pay: elsewhere one N and K would have too many kernels to choose from."""
    return rows > BLOCK_M and (problem.n % BLOCK_K != 0 or problem.k % BLOCK_K != 0)


def _pairs(problem: AllGatherGemmProblem | ReduceProblem, rows: int) -> list[tuple[int, int]]:
    """Clusters of two that may pay: neighbours in M, or, where rows of A are not aligned, in N."""
    return [(2, 1)] * _may_bind(problem, rows) + [(1, 2)] * (problem.k % BLOCK_K != 0)


def _fours(problem: AllGatherGemmProblem | ReduceProblem, rows: int) -> list[tuple[int, int]]:
    """Clusters of four that may pay, where all CTAs multiply: in N, or, if there are several rows of tiles, in both."""
    return [(2, 2) if rows > BLOCK_M else (1, 4)] * (problem.k % BLOCK_K != 0)


def _clusters(problem: AllGatherGemmProblem | ReduceProblem, rows: int) -> list[tuple[int, int]]:
    return [*_pairs(problem, rows), *_fours(problem, rows)]


def _products(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, rules: AllGatherGemmPlan, kinds: _Kinds
) -> Iterator[AllGatherGemmPlan]:
    """In a world of one, where the width, shares and pairs are all that plans of a class differ in."""
    for width in WIDTHS:
        if (width, 1, 1) != (rules.tile.block_n, rules.shares, rules.cluster):
            yield allgather_gemm.make_plan(problem, rows, sm_count, Split(), GemmTile.deepest(width), specialize)
        pairs = [Tiling(width, 1, 1, cluster, None, cluster_n) for cluster, cluster_n in _clusters(problem, rows)]
        known = rules.shares if width == rules.tile.block_n else None
        sharing = [Tiling(width, 1, shares) for shares in _shares(problem, rows, sm_count, width) if shares != known]
        yield from _tiled(problem, rows, sm_count, specialize, (*pairs, *sharing), kinds)
    yield from _tiled(problem, rows, sm_count, specialize, _sharing_in_clusters(problem, rows, sm_count), kinds)
    if compiled_in(problem, specialize) & {"n", "k"}:  # elsewhere all N and K would have too many kernels
        of_cut = itertools.product(_fitting_widths(problem, rows, sm_count), [(1, 1), *_clusters(problem, rows)])
        cut = (Tiling(width, 1, 1, cluster, None, cluster_n) for width, (cluster, cluster_n) in of_cut)
        yield from _tiled(problem, rows, sm_count, specialize, cut, kinds)


def _fitting_widths(problem: AllGatherGemmProblem, rows: int, sm_count: int) -> list[int]:
    """Widths that are no whole panels for which SMs have least to do one after the other, if it is less than for those that are.

    Of a row-major B whole panels are loaded all the same, which counts as much as what is multiplied.
    """
    tile_rows = math.ceil(rows / BLOCK_M)

    def work(width: int) -> float:
        tile, waves = GemmTile.deepest(width, row_major=problem.b_row_major), tile_rows * math.ceil(problem.n / width) / sm_count
        columns = (width + tile.room) / 2
        return (math.ceil(waves) if waves <= _FEW_WAVES else waves) * columns / tile.relative_speed

    if rows <= BLOCK_M // 2:  # one warpgroup multiplies so few
        return []
    whole = min(map(work, PAIRED_WIDTHS))
    return sorted((width for width in _CUT_WIDTHS if work(width) < whole), key=work)[:_FITTING]


def _tiled(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, tilings: Iterable[Tiling], kinds: _Kinds
) -> Iterator[AllGatherGemmPlan]:
    """Plans that have these tilings, with K shared where CTAs are no neighbors."""
    for tiling in tilings:
        kind = tiling.block_n, tiling.cluster, tiling.cluster_n, tiling.cluster_k
        make = functools.partial(allgather_gemm.make_plan, problem, rows, sm_count, Split(), specialize=specialize, tiling=tiling)
        if (plan := kinds.plan(kind, make)) is not None:
            yield plan


def _sharing_in_clusters(problem: AllGatherGemmProblem, rows: int, sm_count: int) -> Iterator[Tiling]:
    """K shared by the CTAs of clusters, all of which work at once."""
    most = 1 if problem.canonical else math.ceil(problem.k / BLOCK_K) // FEWEST_STEPS
    for width, ctas in itertools.product(allgather_gemm.CLUSTER_K_WIDTHS, CLUSTER_K):
        taken = math.ceil(rows / BLOCK_M) * math.ceil(problem.n / width) * ctas
        if ctas <= most and 0 < taken <= ctas_of_clusters(sm_count, ctas, alone=True):
            yield Tiling(width, cluster_k=ctas)


def _swapped_gathers(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, kinds: _Kinds
) -> Iterator[AllGatherGemmPlan]:
    """Operands swapped, where all ranks' rows are one plane, in packets if there are several."""
    size = problem.topology.size
    if size > 1 and not allgather_gemm.may_travel_in_packets(problem, rows):
        return

    def make(tiling: Tiling, heights: Heights) -> AllGatherGemmPlan:
        plan = allgather_gemm.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=tiling)
        return replaced(plan, heights=heights)

    for tiling, heights in _swapped(problem, rows * size, sm_count, specialize, 1 if size > 1 else None):
        kind = tiling.block_n, tiling.cluster, tiling.cluster_n, tiling.tiles_at_once, "swapped"
        plan = kinds.plan(kind, functools.partial(make, tiling, heights))
        if plan is not None and may_take_turns(plan):
            yield plan


def _heights(problem: AllGatherGemmProblem | ReduceProblem, specialize: str | None, columns: int, at_once: int, cluster_n: int) -> Heights:
    """That tiles of swapped operands may have: any, where kernels are for one N and K and have those that are chosen; else the usual."""
    gathers = isinstance(problem, AllGatherGemmProblem)
    most = SWAPPED_ROWS if gathers else reduce.SWAPPED_TILE.block_n
    if compiled_in(problem, specialize) & {"n", "k"}:
        return every_height(columns, at_once, most, unit_of(cluster_n, SWAPPED_UNIT if gathers else reduce.GROUP_ROWS))
    return usual_heights(columns, at_once, most, unit_of(cluster_n))


def _swapped(
    problem: AllGatherGemmProblem | ReduceProblem, rows: int, sm_count: int, specialize: str | None, packets: int | None
) -> Iterator[tuple[Tiling, Heights]]:
    """Operands swapped, where all rows are one plane: of each kind of cluster all numbers of rows of tiles that may be of use.

    And the heights that these may have. ``rows``: of the plane; ``packets``: as tilings have it.
    """
    if problem.canonical or rows <= (0 if problem.topology.size > 1 else _LOW_ROWS):
        return
    in_line = [(1, 4), (4, 1)] if problem.topology.size == 1 and problem.k % BLOCK_K != 0 else []
    for cluster, cluster_n in [(1, 1), *_clusters(problem, max(rows, BLOCK_M + 1)), *in_line]:
        for columns, at_once in _kinds_of_swapped(problem, (cluster, cluster_n)):
            heights = _heights(problem, specialize, columns, at_once, cluster_n)
            for tile_rows, shares in _rows_of_tiles(problem, rows, sm_count, (cluster, cluster_n), heights, columns, at_once):
                block_n = None if columns == SWAPPED_COLUMNS else columns
                yield Tiling(block_n, None, shares, cluster, packets, cluster_n, tile_rows, tiles_at_once=at_once), heights


def _kinds_of_swapped(problem: AllGatherGemmProblem | ReduceProblem, clusters: tuple[int, int]) -> list[tuple[int, int]]:
    """Columns that tiles may have, and how many the warpgroups have at once; ``clusters``: CTAs in M and in N.

    Those that were the fastest of some shape, of such clusters (docs/speed_log.md, "Clusters that find room, and wide tiles in fours").
    """
    if not isinstance(problem, AllGatherGemmProblem):
        return [(SWAPPED_COLUMNS, 1)]
    found = [(SWAPPED_COLUMNS, 1), (NARROW_COLUMNS, 1)]
    if problem.topology.size == 1 and max(clusters) <= 2:  # several blocks of columns of a warpgroup
        found += [(columns, 1) for columns in WIDE_COLUMNS]
        found += [(SWAPPED_COLUMNS, 2)] if math.prod(clusters) <= 2 else []
    return found


def _rows_of_tiles(
    problem: AllGatherGemmProblem | ReduceProblem,
    rows: int,
    sm_count: int,
    clusters_of: tuple[int, int],
    heights: Heights,
    columns_of_tile: int,
    at_once: int,
) -> list[tuple[int, int]]:
    """Rows of tiles of swapped operands, each height once, and shares of their K.

    ``clusters_of``: CTAs in M and in N; ``heights``: that tiles may have; ``at_once``: tiles that the warpgroups have.
    """
    cluster, cluster_n = clusters_of
    least, columns = max(cluster, math.ceil(rows / heights[-1])), math.ceil(problem.n / (columns_of_tile * cluster_n))
    may_share = cluster * cluster_n * at_once == 1 and columns_of_tile == SWAPPED_COLUMNS
    most = math.ceil(problem.k / BLOCK_K) // FEWEST_STEPS
    clusters = max(1, ctas_of_clusters(sm_count, cluster * cluster_n, problem.topology.size == 1) // (cluster * cluster_n))
    waves = math.ceil(math.ceil(least / cluster) * columns / clusters)
    filling = waves * clusters // max(1, columns) * cluster  # as low as fit into as many waves
    possible: dict[tuple[int, int], int] = {}  # by height and shares
    for tile_rows in (*range(least, least + _MORE_TILE_ROWS), max(least, filling)):
        height = height_of(rows, tile_rows, heights)
        taken = math.ceil(math.ceil(rows / height) / cluster) * columns
        fit = max(1, min(clusters // taken, most)) if may_share and taken else 1
        for shares in {1, fit} if taken else ():
            possible.setdefault((height, shares), tile_rows)
    return [(tile_rows, shares) for (_, shares), tile_rows in possible.items()]


def _reductions(problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, rules: ReducePlan) -> Iterator[ReducePlan]:
    topology = problem.topology
    most = max(1, sm_count // 4)
    pulls = problem.op == ALLREDUCE and topology.num_nodes == 1 < topology.size and not rules.one_shot
    # Partial tiles of 64 columns take up to twice as long as predicted: many small stores, and flags, over the links.
    widths = WIDTHS if topology.size == 1 and rows <= _FEW_ROWS else WIDTHS[:-1]
    if rules.span > 1:  # a reduce-scatter in packets: or by partial tiles
        for width in widths:
            yield reduce.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=Tiling(width, 1))
    if rules.packets:
        yield from _sharing(problem, rows, sm_count, specialize, rules)
    if rules.packets or (problem.op == REDUCE_SCATTER and reduce.may_be_packed(problem)):
        yield from _in_clusters(problem, rows, sm_count, specialize, WIDTHS[-2:] if rules.packets else WIDTHS[-2:-1])
        yield from _of_swapped(problem, rows, sm_count, specialize)
    for split in [Split(), *(Split(intra_comm=ctas) for ctas in _PULLING if pulls and ctas <= most)]:
        for width in widths:
            tile = GemmTile.deepest(width, sent=True)
            clusters = _clusters_of_tiles(problem, rows, width)
            # Where everyone adds up everything, groups are those of the tile that was made narrower.
            known = split == Split() and width == rules.tile.block_n and not rules.everywhere and rules.cluster == 1
            plan = rules if known else reduce.make_plan(problem, rows, sm_count, split, tile, specialize=specialize)
            if plan.tile.block_n == width and plan != rules:  # packets, and one step, have no wider tiles than 128 columns
                yield plan
            if pulls and not plan.everywhere and plan.group_tiles < plan.tiles and width > 64:
                yield reduce.make_plan(problem, rows, sm_count, split, tile, plan.tiles, specialize)
            # Of several ranks not where values travel in packets, or in one step, which add in another order.
            for cluster, cluster_n in clusters if topology.size == 1 or not plan.everywhere else ():
                with contextlib.suppress(SplitError, TilingError):  # few SMs, or one step is asked for
                    tiling = Tiling(width, None, 1, cluster, 0, cluster_n)
                    yield reduce.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)


def _clusters_of_tiles(problem: ReduceProblem, rows: int, width: int) -> list[tuple[int, int]]:
    """Beside sums of several ranks only pairs in M: clusters in N were no faster there (docs/speed_log.md)."""
    if problem.topology.size == 1:
        return _clusters(problem, rows)
    return [(2, 1)] * (width in PAIRED_WIDTHS and _may_bind(problem, rows))


def _by_another_algorithm(
    problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, rules: ReducePlan
) -> Iterator[ReducePlan]:
    """Plans of an all-reduce, whose problem leaves it open, by the algorithm that the rules did not choose."""
    other = "two_shot" if rules.one_shot else "one_shot"
    for width in WIDTHS[:-1]:
        tile = GemmTile.deepest(width, sent=True)
        plan = reduce.make_plan(problem, rows, sm_count, Split(), tile, specialize=specialize, algorithm=other)
        if plan.tile.block_n == width and (not plan.one_shot or plan.workspace_bytes <= _ONE_STEP_BYTES):
            yield plan


def _sharing(problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, rules: ReducePlan) -> Iterator[ReducePlan]:
    """Reductions in packets, with K shared and without."""
    known = rules.tile.block_n, rules.shares
    for width, shares in _sharings(problem, rows * rules.span, sm_count, WIDTHS[-2:], known):
        plan = reduce.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=Tiling(width, None, shares))
        if plan.packets and plan.shares == shares:  # there is room
            yield plan


def _in_clusters(problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, widths: tuple[int, ...]) -> Iterator[ReducePlan]:
    """In packets, by clusters of CTAs, as far as there is room: tiles of a reduce-scatter then have rows of several owners."""
    all_rows = rows * (problem.topology.size if problem.op == REDUCE_SCATTER else 1)
    for width, (cluster, cluster_n) in itertools.product(widths, _clusters(problem, all_rows)):
        with contextlib.suppress(SplitError):  # few SMs
            tiling = Tiling(width, None, 1, cluster, 1, cluster_n)
            plan = reduce.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=tiling)
            if plan.packets:
                yield plan


def _of_swapped(problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None) -> Iterator[ReducePlan]:
    """In packets, with swapped operands, as far as there is room."""
    all_rows = rows * (problem.topology.size if problem.op == REDUCE_SCATTER else 1)
    if not _LOW_ROWS < all_rows <= _FEW_ROWS:
        return
    for tiling, heights in _swapped(problem, all_rows, sm_count, specialize, 1):
        with contextlib.suppress(SplitError, TilingError):  # few SMs, or k steps
            plan = reduce.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=tiling)
            if plan.swapped:
                yield replaced(plan, heights=heights)
