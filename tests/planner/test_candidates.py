"""What the cost model compares: each plan once, and all that there are."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.planner import allgather_gemm, choice, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem
from mkernel.planner.derived import replaced
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmTile
from mkernel.planner.heights import every_height
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem
from mkernel.planner.row_classes import class_of
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

WIDTHS = (256, 192, 128, 64)
WORLDS = [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(4, 2)]


def every(problem: Any, rows: int, sms: int) -> Iterator[Any]:
    """All plans, as many times as there are ways to ask for them."""
    topology = problem.topology
    inside = topology.num_nodes == 1 < topology.size
    if isinstance(problem, AllGatherGemmProblem):
        rules = allgather_gemm.make_plan(problem, rows, sms)
        yield rules
        if inside and 0 < topology.size * rows * problem.k * 2 <= abi.AHEAD_BYTES:
            yield from every_gather_in_packets(problem, rows, sms, rules)
        if rules.packets:
            return
        pushing = (0, 12, 16) if topology.size == 2 else (0, 8)
        for split in [Split(intra_comm=ctas) for ctas in pushing if ctas <= max(1, sms // 4)] if inside else [Split()]:
            for width in WIDTHS:
                yield allgather_gemm.make_plan(problem, rows, sms, split, GemmTile.deepest(width))
                if inside and may_span(topology, rows, BLOCK_M) and (split.intra_comm or topology.size == 2):
                    yield allgather_gemm.make_plan(problem, rows, sms, split, tiling=Tiling(width, topology.size, 1))
                yield from every_sharing_of_shards(problem, rows, sms, split, width) if inside and split.intra_comm else ()
                pushed_by_warps = inside and not split.intra_comm
                paired = topology.size > 1 and not pushed_by_warps and width in (256, 192, 128)
                for m, n in clusters_of(problem, rows, fours=False) if paired else ():
                    with contextlib.suppress(SplitError):
                        yield allgather_gemm.make_plan(problem, rows, sms, split, tiling=Tiling(width, 1, 1, m, None, n))
                        if inside and may_span(topology, rows, m * BLOCK_M):
                            yield allgather_gemm.make_plan(problem, rows, sms, split, tiling=Tiling(width, topology.size, 1, m, None, n))
        for width in WIDTHS if topology.size == 1 else ():
            for m, n in clusters_of(problem, rows):
                yield allgather_gemm.make_plan(problem, rows, sms, Split(), tiling=Tiling(width, 1, 1, m, None, n))
            most = min(sms // (-(-rows // BLOCK_M) * -(-problem.n // width) or 1), -(-problem.k // BLOCK_K) // 4)
            for shares in {most, max(2, most // 2), 2, min(4, most)} if most >= 2 and not problem.canonical else ():
                yield allgather_gemm.make_plan(problem, rows, sms, Split(), tiling=Tiling(width, 1, shares))
        yield from every_sharing_in_clusters(problem, rows, sms) if topology.size == 1 and not problem.canonical else ()
        yield from every_fitting(problem, rows, sms)
        return
    yield from every_reduction(problem, rows, sms)
    yield from every_all_reduce_by_the_other_algorithm(problem, rows, sms)


def fitting(problem: AllGatherGemmProblem, rows: int, sms: int) -> list[int]:
    """The two widths that are no whole panels for which SMs have least to do, if that is less than of any other width."""
    if problem.topology.size > 1 or rows <= 64:
        return []

    def columns(width: int) -> float:  # one after the other, by what an SM multiplies of such tiles
        speed = float(np.interp(width, (64, 128, 192, 256), (0.58, 0.88, 0.97, 1.0)))
        tiles = -(-rows // BLOCK_M) * -(-problem.n // width)
        loaded = -(-width // 64) * 64 if problem.b_row_major else width
        return (-(-tiles // sms) if tiles <= 4 * sms else tiles / sms) * (width + loaded) / 2 / speed

    of_whole = min(columns(width) for width in (128, 192, 256))
    return sorted((width for width in range(80, 257, 16) if columns(width) < of_whole), key=columns)[:2]


def every_fitting(problem: AllGatherGemmProblem, rows: int, sms: int) -> Iterator[Any]:
    for width, (m, n) in itertools.product(fitting(problem, rows, sms), [(1, 1), *clusters_of(problem, rows)]):
        with contextlib.suppress(SplitError):
            yield allgather_gemm.make_plan(problem, rows, sms, Split(), tiling=Tiling(width, 1, 1, m, None, n))


def alike(plan: Any) -> Any:
    """Plans in packets put nothing: they do not differ in how much."""
    return dataclasses.replace(plan, chunk_tiles=1) if isinstance(plan, ReducePlan) and plan.packets else plan


def may_bind(problem: Any, rows: int) -> bool:
    return rows > BLOCK_M and bool(problem.n % BLOCK_K or problem.k % BLOCK_K)


def clusters_of(problem: AllGatherGemmProblem | ReduceProblem, rows: int, *, fours: bool = True) -> list[tuple[int, int]]:
    of_a = problem.k % BLOCK_K != 0
    return [
        *([(2, 1)] if may_bind(problem, rows) else []),
        *([(1, 2)] if of_a else []),
        *([(2, 2)] if of_a and fours and rows > BLOCK_M else []),
        *([(1, 4)] if of_a and fours and rows <= BLOCK_M else []),
    ]


def may_span(topology: Topology, rows: int, of_tiles: int) -> bool:
    return rows > of_tiles and -(-topology.size * rows // of_tiles) < topology.size * -(-rows // of_tiles)


def every_sharing_of_shards(problem: AllGatherGemmProblem, rows: int, sms: int, split: Split, width: int) -> Iterator[Any]:
    tiles = problem.topology.size * -(-rows // BLOCK_M) * -(-problem.n // width)
    for shares in (2, 3, 4) if tiles <= sms and width in (192, 128) and not problem.canonical else ():
        with contextlib.suppress(TilingError):
            yield allgather_gemm.make_plan(problem, rows, sms, split, tiling=Tiling(width, 1, shares, 1, 0))


def every_sharing_in_clusters(problem: AllGatherGemmProblem, rows: int, sms: int) -> Iterator[Any]:
    for width, (ctas, left_over) in itertools.product((64, 128), ((2, sms + 1), (3, 8), (4, 11), (8, 11))):
        clusters = (sms - sms // left_over) // ctas
        if -(-rows // BLOCK_M) * -(-problem.n // width) <= clusters and -(-problem.k // BLOCK_K) >= 4 * ctas:
            yield allgather_gemm.make_plan(problem, rows, sms, Split(), tiling=Tiling(width, cluster_k=ctas))


def every_gather_in_packets(problem: AllGatherGemmProblem, rows: int, sms: int, rules: Any) -> Iterator[Any]:
    packets = None if rules.packets else 1
    if rules.packets and rules.tile.block_n == 64 and rules.rounds <= 2:  # also where the rules share K among other numbers of CTAs
        yield allgather_gemm.make_plan(problem, rows, sms, tiling=Tiling(64, None, rules.shares, 1, packets=2))
    for width in WIDTHS:
        tiles = -(-rows * problem.topology.size // BLOCK_M) * -(-problem.n // width)
        if width == 64 and tiles > sms:
            continue
        most = 1 if problem.canonical else min(sms // (tiles or 1), -(-problem.k // BLOCK_K) // 4)
        for shares in {1, most, max(2, most // 2), 2, min(4, most)} if most >= 2 else {1}:
            plan = allgather_gemm.make_plan(problem, rows, sms, tiling=Tiling(width, None, shares, 1, packets))
            yield plan
            if width == 64 and plan.rounds <= 2:
                yield allgather_gemm.make_plan(problem, rows, sms, tiling=Tiling(width, None, shares, 1, packets=2))
    for (m, n), width in itertools.product(clusters_of(problem, rows * problem.topology.size), (256, 192, 128)):
        with contextlib.suppress(SplitError):
            yield allgather_gemm.make_plan(problem, rows, sms, tiling=Tiling(width, None, 1, m, packets, n))


def every_reduction(problem: ReduceProblem, rows: int, sms: int) -> Iterator[ReducePlan]:
    rules = reduce.make_plan(problem, rows, sms)
    yield rules
    inside = problem.topology.num_nodes == 1 < problem.topology.size
    pulls = inside and problem.op == ALLREDUCE and not rules.one_shot  # in one step nobody pulls
    all_rows = rows * (problem.topology.size if problem.op == REDUCE_SCATTER else 1)
    for width in WIDTHS[-2:] if inside else ():
        if width == 64 and -(-all_rows // BLOCK_M) * -(-problem.n // width) > sms:
            continue
        most = min(sms // (-(-all_rows // BLOCK_M) * -(-problem.n // width) or 1), -(-problem.k // BLOCK_K) // 4)
        for shares in {1} if problem.canonical else {1, max(1, most), max(1, most // 2), *(min(max(1, most), few) for few in (2, 4))}:
            plan = reduce.make_plan(problem, rows, sms, Split(), tiling=Tiling(width, shares=shares))
            if plan.packets and plan.shares == shares:
                yield plan
    yield from every_reduction_in_clusters(problem, rows, sms, rules)
    widths = WIDTHS if problem.topology.size == 1 and rows <= 2048 else WIDTHS[:-1]
    for width in widths if inside and problem.op == REDUCE_SCATTER else ():
        yield reduce.make_plan(problem, rows, sms, Split(), tiling=Tiling(width, 1))
    for split in (Split(), *(Split(intra_comm=ctas) for ctas in (14,) if pulls and ctas <= max(1, sms // 4))):
        for width in widths:
            tile = GemmTile.deepest(width, sent=True)
            plan = reduce.make_plan(problem, rows, sms, split, tile)
            if plan.tile.block_n == width:
                yield plan
            if pulls and not plan.everywhere and plan.group_tiles < plan.tiles and width > 64:
                yield reduce.make_plan(problem, rows, sms, split, tile, plan.tiles)
            pairs = [(2, 1)] if width in (256, 192, 128) and may_bind(problem, rows) and not plan.everywhere else []
            for m, n in clusters_of(problem, rows) if problem.topology.size == 1 else pairs:
                with contextlib.suppress(SplitError, TilingError):
                    yield reduce.make_plan(problem, rows, sms, split, tiling=Tiling(width, None, 1, m, 0, n))


def every_reduction_in_clusters(problem: ReduceProblem, rows: int, sms: int, rules: ReducePlan) -> Iterator[ReducePlan]:
    """In packets: where these are what the rules have, or, of a reduce-scatter, where there is room for them."""
    topology, scatters = problem.topology, problem.op == REDUCE_SCATTER
    inside = topology.num_nodes == 1 < topology.size <= 8 and problem.partials == "output"
    clusters = clusters_of(problem, rows * (topology.size if scatters else 1)) if rules.packets or (inside and scatters) else []
    for width, (m, n) in itertools.product(WIDTHS[-2:] if rules.packets else WIDTHS[-2:-1], clusters):
        with contextlib.suppress(SplitError):
            plan = reduce.make_plan(problem, rows, sms, tiling=Tiling(width, None, 1, m, 1, n))
            if plan.packets:
                yield plan


def every_all_reduce_by_the_other_algorithm(problem: ReduceProblem, rows: int, sms: int) -> Iterator[ReducePlan]:
    if problem.op != ALLREDUCE or problem.topology.num_nodes > 1 or problem.topology.size == 1:
        return
    other = "two_shot" if reduce.make_plan(problem, rows, sms).one_shot else "one_shot"
    for width in WIDTHS[:-1]:
        plan = reduce.make_plan(problem, rows, sms, Split(), GemmTile.deepest(width, sent=True), algorithm=other)
        assert plan.algorithm == other
        if plan.tile.block_n == width and (other == "two_shot" or plan.workspace_bytes <= 64 << 20):
            yield plan


def lowest_of_as_many_waves(plan: AllGatherGemmPlan | ReducePlan, least: int) -> int:
    """Rows of tiles of swapped operands that are as low as they can be, and take no more waves than ``least`` rows of them do."""
    clusters = (plan.split.compute or 1) // plan.ctas_together
    columns = -(-plan.problem.n // (plan.columns * plan.cluster_n))

    def waves(tile_rows: int) -> int:
        return -(-(-(-tile_rows // plan.cluster) * columns) // clusters)

    return next(more for more in itertools.count(least) if waves(more + 1) > waves(least))


def check_swapped(found: list[AllGatherGemmPlan], problem: AllGatherGemmProblem, rows: int, sms: int) -> None:
    """Swapped operands where all rows are one plane: of each kind of cluster the fastest of all heights of tiles is among them."""
    size, all_rows = problem.topology.size, rows * problem.topology.size
    assert len({plan.digest for plan in found}) == len(found)
    one_plane = size == 1 or allgather_gemm.may_travel_in_packets(problem, rows)
    if not one_plane or problem.canonical or (size == 1 and rows <= 48) or not rows:
        assert not found
        return
    assert all(plan.packets == (size > 1) and plan.plane_rows == all_rows for plan in found)
    in_line = [(1, 4), (4, 1)] if size == 1 and problem.k % BLOCK_K else []
    clusters = [(1, 1), *clusters_of(problem, max(all_rows, BLOCK_M + 1)), *in_line]
    for (columns, at_once), (cluster, cluster_n) in itertools.product(((128, 1), (64, 1), (192, 1), (256, 1), (128, 2)), clusters):
        kind = columns, at_once, cluster, cluster_n
        of_kind = [plan for plan in found if (plan.columns, plan.tiles_at_once, plan.cluster, plan.cluster_n) == kind]
        if sms < 2 * cluster * cluster_n:
            continue
        several = columns > 128 or at_once > 1  # blocks of columns of a warpgroup
        if several and (size > 1 or cluster * cluster_n > (2 if at_once > 1 else 4) or max(cluster, cluster_n) == 4):
            assert not of_kind
            continue
        turns = [plan.taken * cluster * cluster_n > (plan.split.compute or 1) for plan in of_kind]
        assert at_once == 1 or all(turns), "some CTA has two tiles"
        may_share = cluster * cluster_n == 1 and (columns, at_once) == (128, 1)
        assert len(of_kind) <= (18 if may_share else 9)
        assert all(plan.shares == 1 for plan in of_kind) or may_share
        assert len({(plan.block_rows, plan.shares) for plan in of_kind}) == len(of_kind)
        best = min((predict(plan, H200).seconds for plan in of_kind), default=math.inf)  # type: ignore[union-attr]
        heights = every_height(columns, at_once, unit=8 * cluster_n)
        least = max(cluster, -(-all_rows // heights[-1]))
        lowest = lowest_of_as_many_waves(of_kind[0], least) if of_kind else least
        for tile_rows in (*range(least, least + 8), lowest):
            tiling = Tiling(columns, None, 1, cluster, 1 if size > 1 else None, cluster_n, tile_rows, tiles_at_once=at_once)
            other = replaced(allgather_gemm.make_plan(problem, rows, sms, tiling=tiling), heights=heights)
            several = at_once == 1 or other.taken * cluster * cluster_n > (other.split.compute or 1)
            assert not several or best <= predict(other, H200).seconds, (other.describe(), tile_rows)  # type: ignore[union-attr]


def check_swapped_sums(found: list[ReducePlan], problem: ReduceProblem, rows: int, sms: int) -> None:
    """The same in reductions, where few values travel in packets; none is left out for lack of room but what has none."""
    topology, all_rows = problem.topology, rows * (problem.topology.size if problem.op == REDUCE_SCATTER else 1)
    assert len({plan.digest for plan in found}) == len(found)
    if not reduce.may_be_packed(problem) or problem.canonical or not 48 < all_rows <= 2048:
        assert not found
        return
    assert all(plan.packets and reduce.fits_packets(plan) and plan.block_rows <= 192 for plan in found)
    for cluster, cluster_n in [(1, 1), *clusters_of(problem, max(all_rows, BLOCK_M + 1))]:
        of_kind = [plan for plan in found if (plan.cluster, plan.cluster_n) == (cluster, cluster_n)]
        assert len(of_kind) <= (18 if cluster * cluster_n == 1 else 9)
        assert all(plan.shares == 1 for plan in of_kind) or cluster * cluster_n == 1
        if of_kind and sms >= 2 * cluster * cluster_n:
            best, least = min(predict(plan, H200).seconds for plan in of_kind), max(cluster, -(-all_rows // 192))  # type: ignore[union-attr]
            for tile_rows in (*range(least, least + 8), lowest_of_as_many_waves(of_kind[0], least)):
                other = reduce.make_plan(problem, rows, sms, tiling=Tiling(None, None, 1, cluster, 1, cluster_n, tile_rows))
                other = replaced(other, heights=of_kind[0].heights) if other.swapped else other
                assert not other.swapped or best <= predict(other, H200).seconds, other.describe()  # type: ignore[union-attr]
    assert found or topology.size * all_rows * problem.n > 1 << 20, "few values have room"


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_each_plan_is_compared_once_and_none_is_left_out(world: Topology, rng: np.random.Generator) -> None:
    """So the least predicted time is what it is with all ways to ask."""
    known = (416, 8952, 2, 132, False)  # few rows, for which the rules between two take the kernel of another class, without packets
    for i in range(7):
        n, k = 8 * int(2 ** rng.uniform(3, 11)), 8 * int(2 ** rng.uniform(3, 11))
        rows, sms, canonical = class_of(int(2 ** rng.uniform(0, 14))), int(rng.choice((132, 132, 78, 16))), bool(rng.random() < 0.3)
        n, k, rows, sms, canonical = (n, k, rows, sms, canonical) if i else known
        for problem in (
            AllGatherGemmProblem(world, n, k, "bfloat16", bool(rng.random() < 0.5), canonical),
            ReduceProblem(REDUCE_SCATTER, world, n, k, "bfloat16", True, canonical=canonical),
            ReduceProblem(ALLREDUCE, world, n, k, "bfloat16", True, canonical=canonical),
        ):
            found, all_of_them = list(choice.candidates(problem, rows, sms)), [*map(alike, every(problem, rows, sms))]
            found = [*map(alike, found)]
            if isinstance(problem, AllGatherGemmProblem):
                check_swapped([plan for plan in found if plan.swapped], problem, rows, sms)
            else:
                check_swapped_sums([plan for plan in found if plan.swapped], problem, rows, sms)
            found = [plan for plan in found if not plan.swapped]
            assert found[0] == all_of_them[0]
            assert {plan.digest for plan in found} == {plan.digest for plan in all_of_them}, problem
            if world.size == 1 or isinstance(problem, AllGatherGemmProblem):
                assert len({plan.digest for plan in found}) == len(found), problem
            seconds = [[predict(plan, H200).seconds for plan in plans] for plans in (found, all_of_them)]  # type: ignore[union-attr]
            assert found[int(np.argmin(seconds[0]))] == all_of_them[int(np.argmin(seconds[1]))], "of equals the first"


@pytest.mark.parametrize("world", [world for world in WORLDS if world.num_nodes == 1], ids=str)
def test_swapped_operands_on_any_device(world: Topology, rng: np.random.Generator) -> None:
    """Any number of SMs, and so of clusters."""
    for _ in range(40):
        n, k, sms = 8 * int(2 ** rng.uniform(4, 10)), 8 * int(2 ** rng.uniform(7, 11)), int(rng.integers(12, 160))
        rows = class_of(math.ceil(2 ** rng.uniform(6, 11) / world.size))
        problem = AllGatherGemmProblem(world, n, k, "bfloat16", True)
        check_swapped([plan for plan in choice.candidates(problem, rows, sms) if plan.swapped], problem, rows, sms)
        for op in (REDUCE_SCATTER, ALLREDUCE):
            sums = ReduceProblem(op, world, n, k, "bfloat16", True)
            check_swapped_sums([plan for plan in choice.candidates(sums, rows, sms) if plan.swapped], sums, rows, sms)


@pytest.mark.parametrize("world", WORLDS[:3], ids=str)
def test_only_plans_by_kernels_that_are_kept_are_made(world: Topology, rng: np.random.Generator) -> None:
    """As many as if all were made, whatever rows a kind's kernel was learned from."""
    for _ in range(24):
        n, k = (8 * int(2 ** rng.uniform(3, 10)) for _ in range(2))
        problem = AllGatherGemmProblem(world, n, k, "bfloat16", bool(rng.random() < 0.5))
        classes = sorted({class_of(int(2 ** rng.uniform(0, 14))) for _ in range(6)})
        of_all = {rows: list(choice.candidates(problem, rows, 132, "n,k")) for rows in classes}
        specs = dict.fromkeys(plan.spec for plans in of_all.values() for plan in plans)
        kept = frozenset(spec for spec in specs if rng.random() < 0.5)
        for rows, plans in of_all.items():
            wanted = [plan for at, plan in enumerate(plans) if at == 0 or plan.spec in kept]
            assert list(choice.candidates(problem, rows, 132, "n,k", kept)) == wanted


def test_tiles_span_shards_that_end_with_an_empty_tile_row() -> None:
    """Four shards of 295 rows are twelve rows of tiles, ten if all is one plane; of 384 rows nothing is saved."""
    problem = AllGatherGemmProblem(Topology(4, 4), 6880, 896, "bfloat16", True)
    plans = {rows: [plan for plan in choice.candidates(problem, rows, 132) if not plan.packets] for rows in (295, 384)}
    spans = {rows: {plan.span for plan in found if plan.cluster == 1} for rows, found in plans.items()}
    assert spans == {295: {1, 4}, 384: {1}}
    chosen = choice.plan_allgather_gemm(problem, 295, 132, machine=H200)
    assert chosen.span > 1, "which is predicted to save a fifth"


def test_k_of_single_shards_is_shared_where_tiles_are_few() -> None:
    """What is left to do when the last chunk has come is a share, so that shares may be more than SMs (measured, docs/speed_log.md)."""
    problem = AllGatherGemmProblem(Topology(4, 4), 776, 6744, "bfloat16", False)
    chosen = choice.plan_allgather_gemm(problem, 241, 132, machine=H200)
    assert chosen.shares * chosen.num_tiles > 132
    assert chosen.span == 1
    assert not chosen.packets
    canonical = dataclasses.replace(problem, canonical=True)
    assert all(plan.shares == 1 for plan in choice.candidates(canonical, 241, 132))


def test_parts_of_k_are_multiplied_while_the_next_ones_come() -> None:
    """Also in tiles that span shards."""
    problem = AllGatherGemmProblem(Topology(4, 4), 2048, 8192, "bfloat16", True)
    plan = allgather_gemm.make_plan(problem, 425, 132, Split(intra_comm=8), tiling=Tiling(256, 4, 1))
    assert plan.parts == 4
    in_parts, whole = predict(plan, H200), predict(dataclasses.replace(plan, parts=1, part_blocks=1), H200)
    assert in_parts is not None
    assert whole is not None
    assert in_parts.seconds < 0.9 * whole.seconds
