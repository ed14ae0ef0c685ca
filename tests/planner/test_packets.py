"""The plans of the reductions in packets: few values, inside a node. tests/ops/test_mirror_packets.py looks at the kernel's copy."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import pytest

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.planner.gemm import BLOCK_M, GemmTile
from mkernel.planner.proofs.reduce import wait_graph
from mkernel.planner.reduce import ALGORITHMS, ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem, make_plan
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology

SIZES = [(0, 64), (1, 8), (7, 72), (16, 256), (17, 8192), (128, 256), (129, 264), (300, 520), (600, 1000)]  # rows, N
each_size = pytest.mark.parametrize("size", range(2, 9))
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
each_how = pytest.mark.parametrize("how", [*ALGORITHMS, REDUCE_SCATTER])


def plan_of(
    size: int, how: str, rows: int, n: int, sms: int = 12, split: Split | None = None, shares: int | None = None, **changes: Any
) -> ReducePlan:
    """``rows``: of a rank's result."""
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(size, size), n, 64 if shares is None else 64 * shares, "bfloat16", True, "output", algorithm)
    return make_plan(dataclasses.replace(problem, **changes), rows, sms, split, tiling=Tiling(shares=shares))


def few_enough(size: int, how: str, rows: int, n: int) -> int:
    """As many of the rows as travel in packets."""
    most = (4 << 20) // (2 * size * n)
    return min(rows, most // (16 if most <= 256 else 64) * (16 if most <= 256 else 64)) if how == REDUCE_SCATTER else rows


@each_size
@each_how
def test_every_rank_computes_every_tile(size: int, how: str) -> None:
    """Tiles of a reduce-scatter have rows of several owners."""
    for most, n in SIZES:
        rows = few_enough(size, how, most, n)
        plan = plan_of(size, how, rows, n)
        assert plan.packets
        assert plan.everywhere
        assert plan.tile_rows == -(-rows * (size if how == REDUCE_SCATTER else 1) // BLOCK_M)
        assert plan.tiles == plan.tile_rows * plan.tiles_n
        assert plan.tile.block_n <= 128, "registers"
        for rank in range(size):
            tiles = list(plan.tiles_of(rank))
            assert sorted((tile.m, tile.n) for tile in tiles) == [(m, n) for m in range(plan.tile_rows) for n in range(plan.tiles_n)]
            assert [(tile.m, tile.n) for tile in tiles] == [(tile.m, tile.n) for tile in plan.tiles_of(0)], "all in the same order"
            assert not any(tile.is_sum for tile in tiles)
            assert list(plan.sums_of(rank)) == []


@each_size
@each_algorithm
def test_room(size: int, algorithm: str) -> None:
    """Two bytes for every value to send, of whole warps, and each owner's last warp; nothing on the heap, and no flags."""
    for rows, n in SIZES:
        plan = plan_of(size, algorithm, rows, n)
        assert plan.workspace_bytes == plan.flag_words == 0
        values = plan.tiles * min(BLOCK_M, -(-rows // 16) * 16) * plan.tile.block_n
        sent = values * (size if algorithm == "one_shot" else 2)  # that a rank receives, its own places included
        uneven = 0 if algorithm == "one_shot" else (size - 1) * 16 * plan.tile.block_n
        assert 2 * sent <= plan.packet_bytes <= 2 * (sent + uneven)
        assert plan.packet_bytes <= abi.PACKET_BYTES


@each_size
def test_a_reduce_scatter_has_room_for_its_own_rows_of_each_rank(size: int) -> None:
    for most, n in SIZES:
        rows = few_enough(size, REDUCE_SCATTER, most, n)
        plan = plan_of(size, REDUCE_SCATTER, rows, n)
        assert plan.workspace_bytes == plan.flag_words == 0
        assert plan.packet_bytes == 2 * size * rows * plan.tiles_n * plan.tile.block_n <= abi.PACKET_BYTES


@each_size
@each_how
@pytest.mark.parametrize("sms", [1, 4, 132])
def test_all_ctas_compute(size: int, how: str, sms: int) -> None:
    split = plan_of(size, how, 64, 512, sms).split
    assert split == Split(sms, 0, 0, 0)
    assert plan_of(size, how, 64, 512, sms, Split(compute=1)).split == Split(1, 0, 0, 0)


@each_how
@pytest.mark.parametrize(
    ("changes", "packets"),
    [
        ({}, True),
        ({"topology": Topology(1, 1)}, False),
        ({"topology": Topology(4, 2)}, False),
        ({"topology": Topology(9, 9)}, False),
        ({"partials": "float32"}, False),
        ({"dtype": "float16", "b_row_major": False}, True),
    ],
    ids=str,
)
def test_few_values_inside_a_node_travel_in_packets(how: str, changes: dict[str, Any], packets: bool) -> None:
    assert plan_of(2, how, 128, 256, 132, **changes).packets == packets


def test_as_much_as_there_is_room_for() -> None:
    """Up to eight MiB in two steps, four of a reduce-scatter; between eight ranks one step needs more room."""
    for size in range(2, 9):
        assert plan_of(size, "two_shot", 512, 8192, 132).packets
        assert plan_of(size, "two_shot", 508, 8192, 132).packets, "tiles that are not full"
        assert not plan_of(size, "two_shot", 508, 8248, 132).packets, "the class of 508 rows has up to 512"
        assert not plan_of(size, "two_shot", 512, 8200, 132).packets
        assert plan_of(size, REDUCE_SCATTER, 256 // size // 16 * 16, 8192, 132).packets
        assert not plan_of(size, REDUCE_SCATTER, 256, 8192, 132).packets, "of all ranks together"
    plans = [plan_of(8, "one_shot", rows, 8192, 132) for rows in range(16, 321, 16)]
    fits = [plan.packets for plan in plans]
    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}
    assert all(plan.packet_bytes == 0 for plan in plans if not plan.packets)


def test_ctas_that_pull_ask_for_bulk_copies() -> None:
    assert not plan_of(4, "two_shot", 64, 256, 12, Split(intra_comm=1)).packets
    assert plan_of(4, "two_shot", 64, 256, 12, Split(intra_comm=0)).packets
    with pytest.raises(SplitError, match="intra_comm has nothing to do"):
        plan_of(4, "one_shot", 64, 256, 12, Split(intra_comm=1))


@each_size
@each_how
def test_nobody_waits_for_ever(size: int, how: str) -> None:
    for rows, n in SIZES:
        for sms in (4, 132):
            plan = plan_of(size, how, few_enough(size, how, min(rows, 300), min(n, 1000)), min(n, 1000), sms)
            graph = wait_graph(plan)
            assert graph.find_cycle() is None
            assert graph.missing() == set()
            each = size * plan.tiles
            assert collections.Counter(step[0] for step in graph) == +collections.Counter(
                enter=size, tile=each, partials=each, packets=each
            )


@each_how
@pytest.mark.parametrize("size", [2, 3, 8])
def test_nobody_waits_for_ever_where_k_is_shared(size: int, how: str) -> None:
    """A slice waits for all shares of its tile, and then for the same slice of all ranks."""
    for (rows, n), shares in itertools.product(SIZES[:6], (2, 3, 5)):
        plan = plan_of(size, how, min(rows, 20), min(n, 300), 4, shares=shares)
        graph = wait_graph(plan)
        assert graph.find_cycle() is None
        assert graph.missing() == set()
        items = size * plan.tiles * shares
        assert collections.Counter(step[0] for step in graph) == +collections.Counter(
            enter=size, tile=2 * items, partials=items, packets=items
        )
        for item in range(plan.tiles * shares):
            multiplied = {("tile", 0, item // shares * shares + share) for share in range(shares)}
            assert multiplied <= set(graph.before(("partials", 0, item)))


@each_how
@pytest.mark.parametrize("clusters", [(2, 1), (1, 2), (2, 2), (1, 4), (4, 1)])
def test_clusters_do_not_wait_in_a_circle(how: str, clusters: tuple[int, int]) -> None:
    """A cluster takes no tile before all its CTAs have what the other ranks send of those before."""
    for (rows, n), sms in itertools.product(SIZES, (8, 132)):
        problem = plan_of(3, how, few_enough(3, how, min(rows, 300), min(n, 1000)), min(n, 1000), sms).problem
        plan = make_plan(
            problem, few_enough(3, how, min(rows, 300), min(n, 1000)), sms, tiling=Tiling(64, None, 1, clusters[0], 1, clusters[1])
        )
        assert (plan.packets, plan.cluster, plan.cluster_n) == (True, *clusters)
        graph = wait_graph(plan)
        assert graph.find_cycle() is None
        assert graph.missing() == set()
        taken = list(plan.taken_of(0))
        assert sorted(tile.index for together in taken for tile in together) == list(range(plan.tiles))
        assert all(len(together) <= clusters[0] * clusters[1] for together in taken)
        assert all(len({plan.cta_of(tile) for tile in together}) == len(together) for together in taken)


@each_how
def test_sums_before_shares_would_deadlock(how: str) -> None:
    plan = plan_of(3, how, 16, 256, shares=2)
    graph = wait_graph(plan)
    graph.add(("tile", 0, 1), [("tile", 0, plan.tiles * 2)])
    assert graph.find_cycle() is not None


@each_how
def test_tiles_in_another_order_would_deadlock(how: str) -> None:
    """Rank 0 sends its first tile after the second; the others wait for the first before they send theirs."""
    plan = plan_of(3, how, 16, 256)
    graph = wait_graph(plan)
    assert plan.tiles >= 2
    assert graph.find_cycle() is None
    graph.add(("partials", 0, 0), [("partials", 1, 1)])
    assert graph.find_cycle() is not None


def test_the_graph_knows_what_is_waited_for() -> None:
    for how in (*ALGORITHMS, REDUCE_SCATTER):
        plan = plan_of(3, how, 16, 256)
        graph = wait_graph(plan)
        sent = {("partials", rank, 1) for rank in range(3)}
        assert {("packets", rank, 1) for rank in range(3)} <= set(graph.before(("tile", 2, 1)))
        assert set(graph.before(("packets", 0, 1))) == (sent if how == "two_shot" else {("partials", 0, 1)})
        assert set(graph.before(("partials", 0, 1))) == {("enter", rank) for rank in range(3)} | {("tile", 0, 0)}


def test_plans_that_differ_have_other_digests() -> None:
    plans = [plan_of(4, algorithm, rows, 256, 12, split) for algorithm in ALGORITHMS for rows in (16, 17) for split in (None, Split(1))]
    plans.append(plan_of(4, "two_shot", 16, 256, 12, Split(intra_comm=1)))
    plans.append(dataclasses.replace(plans[0], tile=GemmTile(64, 3)))
    assert len({plan.digest & 0xFFFFFF for plan in plans}) == len(plans)
    assert len({plan.spec.name for plan in plans}) == 2


@each_algorithm
def test_the_number_of_rows_is_no_compile_time_constant(algorithm: str) -> None:
    def specs(*all_rows: int) -> set[KernelSpec]:
        problem = ReduceProblem(ALLREDUCE, Topology(4, 4), 512, 64, "bfloat16", True, "output", algorithm)
        return {make_plan(problem, rows, 12, None, GemmTile.deepest(64), 4).spec for rows in all_rows}

    assert len(specs(1, 16, 17, 32, 33, 64, 65, 100, 128, 700)) == 1
