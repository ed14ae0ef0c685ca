"""Tilings of the reductions: what callers may ask for, and what the planner makes of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel import abi, env
from mkernel.planner import choice
from mkernel.planner.choice import candidates, choose, plan_reduce
from mkernel.planner.heights import MOST_MORE_KERNELS
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.predict_gemm import predict_reduce
from mkernel.planner.proofs.reduce_waits import wait_graph
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, SPECIALIZED, ReducePlan, ReduceProblem, make_plan
from mkernel.planner.row_classes import EXAMINED_ROWS, MOST_KERNELS, classes
from mkernel.planner.specialize import parse
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology
from tests.planner.kernels import kind_of_kernel

each_op = pytest.mark.parametrize("op", [REDUCE_SCATTER, ALLREDUCE])


def plan_of(op: str, rows: int, n: int, k: int, tiling: Tiling | None = None, world: str = "1x2", **changes: Any) -> ReducePlan:
    nodes, per_node = map(int, world.split("x"))
    problem = ReduceProblem(op, Topology(nodes * per_node, per_node), n, k, "bfloat16", True, **changes)
    return plan_reduce(problem, rows, 132, tiling=tiling)


@each_op
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
@pytest.mark.parametrize("block_n", [64, 128, 192, 256])
def test_tiles_are_as_wide_as_asked_for(op: str, world: str, block_n: int) -> None:
    for rows in (1, 600):
        plan = plan_of(op, rows, 4096, 2048, Tiling(block_n), world, algorithm="two_shot" if op == ALLREDUCE else None)
        assert plan.tile.block_n == block_n
        assert not plan.packets or block_n <= 128


def test_packets_have_no_wide_tiles() -> None:
    assert plan_of(ALLREDUCE, 1, 4096, 2048, Tiling(128), algorithm="one_shot").packets
    assert not plan_of(ALLREDUCE, 1, 4096, 2048, Tiling(192), algorithm="one_shot").packets


@each_op
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
def test_pairs_take_whole_pairs(op: str, world: str) -> None:
    """All tiles, each once, of which a pair's are neighbours in M; every role has an even number of CTAs."""
    for rows in (0, 100, 600, 1735, 4000):
        plan = plan_of(op, rows, 2904, 2048, Tiling(cluster=2, packets=0), world, algorithm="two_shot" if op == ALLREDUCE else None)
        assert (plan.cluster, plan.spec.cluster, plan.packets) == (2, 2, False)
        assert all((number or 0) % 2 == 0 for number in dataclasses.astuple(plan.split))
        assert plan.chunk_tiles <= plan.group_tiles
        tiles = list(plan.tiles_of(0))
        owners = plan.problem.topology.size if op == REDUCE_SCATTER else 1
        assert len(tiles) == len({(tile.owner, tile.m, tile.n) for tile in tiles}) == owners * plan.tile_rows * plan.tiles_n
        assert len({(tile.owner, tile.index) for tile in tiles}) == len(tiles)
        for pair in plan.taken_of(0):
            assert all(lower == dataclasses.replace(pair[0], m=pair[0].m + 1, index=pair[0].index + 1) for lower in pair[1:])
            assert not pair or (pair[0].m % 2 == 0 and len(pair) == min(2, plan.tile_rows - pair[0].m))


@each_op
@pytest.mark.parametrize("world", ["1x2", "1x3", "2x2", "3x2", "4x1"])
@pytest.mark.parametrize("schedule", [(1, 1, 2), (3, 2, 4), (5, 4, 2), (4, 4, 16)], ids=str)  # pairs of a group, tiles of a put, group_m
def test_pairs_of_tiles_do_not_wait_in_a_circle(op: str, world: str, schedule: tuple[int, int, int]) -> None:
    group, chunk, group_m = schedule
    for rows, split in itertools.product((1, 300, 700), (Split(2), Split(8, inter_reduce=4 if world[0] != "1" else None))):
        problem = plan_of(op, rows, 264, 64, None, world, algorithm="two_shot" if op == ALLREDUCE else None).problem
        plan = make_plan(problem, rows, 132, split, group_tiles=group, tiling=Tiling(64, cluster=2, packets=0))
        for interleaved in (False, True):
            graph = wait_graph(dataclasses.replace(plan, chunk_tiles=chunk, group_m=group_m, interleaved=interleaved))
            assert graph.find_cycle() is None
            assert graph.missing() == set()


def test_what_reductions_cannot_have() -> None:
    with pytest.raises(TilingError, match="in one step has no clusters"):
        plan_of(ALLREDUCE, 600, 4096, 2048, Tiling(cluster=2, packets=0), algorithm="one_shot")
    with pytest.raises(TilingError, match="inside a node"):
        plan_of(ALLREDUCE, 600, 4096, 2048, Tiling(packets=1), "2x2")
    with pytest.raises(TilingError, match="unrounded sums not"):
        plan_of(ALLREDUCE, 600, 4096, 2048, Tiling(packets=2))
    with pytest.raises(TilingError, match="take them alone"):
        plan_of(REDUCE_SCATTER, 600, 4096, 2048, Tiling(shares=2, cluster=2))
    with pytest.raises(SplitError, match="even number"):
        make_plan(plan_of(REDUCE_SCATTER, 600, 4096, 2048).problem, 600, 132, Split(compute=31), tiling=Tiling(cluster=2))
    with pytest.raises(TilingError, match="none of two by two"):
        plan_of(REDUCE_SCATTER, 600, 4096, 2048, Tiling(cluster=2, cluster_n=2, packets=0))
    for op, world in ((REDUCE_SCATTER, "2x2"), (ALLREDUCE, "1x2")):
        for tiling in (Tiling(cluster=4, packets=0), Tiling(cluster_n=2, packets=0)):
            with pytest.raises(TilingError, match="no clusters but pairs of neighbours in M"):
                plan_of(op, 600, 4096, 2048, tiling, world)


@each_op
def test_pairs_are_what_the_rules_choose_where_loads_bind(op: str) -> None:
    """Pairs pay with many rows, where those of B are not aligned."""
    for rows, n, cluster in ((16, 2904, 1), (3470, 3072, 1), (3470, 2904, 2)):
        with env.override(MKERNEL_PLANNER="rules"):
            plan = plan_of(op, rows, n, 6912)
        assert plan.cluster == cluster
        assert cluster == 1 or plan == plan_of(op, rows, n, 6912, Tiling(plan.tile.block_n, cluster=2))
        assert plan_of(op, rows, n, 6912, Tiling(cluster=1)).cluster == 1


@each_op
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
def test_the_model_offers_pairs_where_loads_may_bind(op: str, world: str) -> None:
    for n, k in ((2904, 6912), (3072, 6912)):
        problem = plan_of(op, 3470, n, k, world=world).problem
        plans = list(candidates(problem, 3470, 132))
        assert {plan.cluster for plan in plans} == ({1} if n % 64 == 0 else {1, 2})
        assert {plan.cluster for plan in candidates(problem, 100, 132) if not plan.packets} <= {1}
        specs = {choose(problem, rows, 132, H200, None).spec for rows in classes(1 << 13)}
        assert len(specs) <= MOST_KERNELS
        assert all(predict(plan, H200) is not None for plan in plans)


@pytest.mark.parametrize(("n", "k", "packets"), [(7424, 5304, True), (7424, 5320, True), (7424, 5312, True), (16384, 5304, False)])
def test_owners_of_few_rows_may_share_tiles(n: int, k: int, packets: bool) -> None:
    """In packets, where there is room: tiles of single owners would have 300 of 384 rows. In clusters where rows are not aligned."""
    problem = ReduceProblem(REDUCE_SCATTER, Topology(2, 2), n, k, "bfloat16", False)
    with env.override(MKERNEL_PLANNER="rules"):
        assert not plan_reduce(problem, 300, 132).packets
    plan = plan_reduce(problem, 300, 132)
    assert plan.packets == packets
    assert plan.packet_bytes <= abi.PACKET_BYTES
    assert not packets or (plan.swapped > 0 and plan.span == 2 and plan.shares == 1 and (plan.ctas_together > 1 or k % 64 == 0))
    assert not plan_reduce(dataclasses.replace(problem, partials="float32"), 300, 132).packets


@each_op
def test_pairs_load_less(op: str) -> None:
    """Where rows of A and B are not aligned, and nowhere else, pairs are predicted to be faster."""
    for n, k, gain in ((3432, 4568, True), (3584, 4608, False)):
        algorithm = "two_shot" if op == ALLREDUCE else None
        alone, paired = (plan_of(op, 7020, n, k, Tiling(256, cluster=cluster), "1x1", algorithm=algorithm) for cluster in (1, 2))
        assert (predict_reduce(paired, H200).seconds < 0.95 * predict_reduce(alone, H200).seconds) == gain


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_of_all_ranks_or_of_one_are_in_a_tile(size: int) -> None:
    """All of them where values travel in packets."""
    world = f"1x{size}"
    chosen, asked = (plan_of(REDUCE_SCATTER, 16, 4096, 2048, tiling, world) for tiling in (None, Tiling(span=size)))
    assert (chosen.packets, chosen.span) == (asked.packets, asked.span) == (True, size)
    together, apart = (plan_of(REDUCE_SCATTER, 16, 4096, 2048, Tiling(128, span), world) for span in (size, 1))
    assert (together.packets, together.span, together.tiles) == (True, size, 32)
    assert (apart.packets, apart.span, apart.tiles) == (False, 1, 32), "of each owner"
    with pytest.raises(TilingError, match="span must be 1, or"):
        plan_of(REDUCE_SCATTER, 16, 4096, 2048, Tiling(span=size + 1), world)
    with pytest.raises(TilingError, match="span must be 1, or"):
        plan_of(REDUCE_SCATTER, 16, 4096, 2048, Tiling(span=size), world, partials="float32")
    with pytest.raises(TilingError, match="span must be 1, or"):
        plan_of(ALLREDUCE, 16, 4096, 2048, Tiling(span=size), world)
    assert plan_of(REDUCE_SCATTER, 4096, 4096, 2048, Tiling(span=size), world).span == 1, "too many for packets"


@each_op
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ctas_share_k_as_asked_for(op: str, size: int) -> None:
    for block_n, shares in ((64, 2), (128, 5), (None, 8), (64, 40)):
        plan = plan_of(op, 7, 520, 64 * 40 - 8, Tiling(block_n, shares=shares), f"1x{size}")
        assert (plan.packets, plan.shares) == (True, shares)
        assert plan.tile.block_n == block_n or block_n is None
        assert plan.grid == min(132, plan.tiles * shares)
        assert plan.packet_bytes <= abi.PACKET_BYTES


@each_op
@pytest.mark.parametrize("world", ["1x1", "1x2", "1x5", "2x2"])
def test_no_cta_is_without_a_tile_where_all_of_them_multiply(op: str, world: str, rng: np.random.Generator) -> None:
    """In packets, or a world of one; the device spreads fewer CTAs over what SMs share. Where others push or add up, all SMs have CTAs."""
    trimmed = 0
    for _ in range(60):
        rows, n, k = (int(2 ** rng.uniform(0, 11)), *(8 * int(2 ** rng.uniform(4, 11)) for _ in range(2)))
        clusters = [(1, 1), (2, 1), (1, 2), (2, 2)][rng.integers(4)]
        tiling = Tiling(64, None, 1, clusters[0], None, clusters[1]) if rng.random() < 0.5 else None
        try:
            with env.override(MKERNEL_PLANNER="rules"):
                plan = plan_of(op, rows, n, k, tiling, world)
        except TilingError:  # not all have clusters
            continue
        if not plan.packets and world != "1x1":
            assert plan.grid == plan.split.total
            continue
        needed = plan.taken * plan.shares * plan.ctas_together
        assert plan.grid == min(needed, plan.split.total)
        assert plan.grid % plan.ctas_together == 0
        trimmed += needed < plan.split.total
    assert trimmed or world == "2x2"


@each_op
@pytest.mark.parametrize(
    ("world", "rows", "tiling", "changes"),
    [
        ("1x1", 7, Tiling(shares=2), {}),
        ("2x2", 7, Tiling(shares=2), {}),
        ("1x2", 7, Tiling(shares=2), {"partials": "float32"}),
        ("1x2", 7, Tiling(192, shares=2), {}),
        ("1x2", 7, Tiling(shares=41), {}),  # K has 40 steps
        ("1x9", 7, Tiling(shares=2), {}),
        ("1x2", 7, Tiling(shares=2), {"canonical": True}),
    ],
    ids=str,
)
def test_who_cannot_share_k(op: str, world: str, rows: int, tiling: Tiling, changes: dict[str, Any]) -> None:
    with pytest.raises(TilingError, match="batch_invariant one CTA" if changes.get("canonical") else "K is shared in packets only"):
        plan_of(op, rows, 520, 64 * 40, tiling, world, **changes)
    assert plan_of(op, rows, 520, 64 * 40, Tiling(shares=1), world, **changes).shares == 1


@each_op
def test_k_is_shared_as_far_as_there_is_room(op: str) -> None:
    """Calls of one problem and tiling have any number of rows."""
    plans = [plan_of(op, rows, 520, 2560, Tiling(64, shares=20)) for rows in classes(4096)]
    assert {plan.shares for plan in plans} == {1, 20}
    assert all(plan.packet_bytes <= abi.PACKET_BYTES for plan in plans)
    assert [plan.shares for plan in plans] == sorted((plan.shares for plan in plans), reverse=True)


@each_op
def test_k_is_shared_where_tiles_are_few_and_k_is_long(op: str) -> None:
    """Never in a canonical sum, nor where all SMs have tiles."""
    shapes = [(8, 896, 2632), (2, 1544, 7112)]
    for m, n, k in shapes:
        rows = m // 2 if op == REDUCE_SCATTER else m
        plan = plan_of(op, rows, n, k)
        assert 2 <= plan.shares <= 8
        assert plan.tiles * plan.shares <= 132
        assert plan_of(op, rows, n, k, canonical=True).shares == 1
        assert plan_of(op, rows, n, k, partials="float32").shares == 1
        assert plan_of(op, rows, n, 264).shares == 1, "the sums would take longer than what they save"
        assert plan_of(op, 64, 16384, k).shares == 1


@each_op
def test_the_model_weighs_shares(op: str, rng: np.random.Generator) -> None:
    """As the rules do where tiles are few; and predicts that they help there."""
    found = False
    for _ in range(10):
        n, k = 8 * int(rng.integers(8, 200)), 8 * int(rng.integers(200, 1000))
        plan = plan_of(op, 8, n, k)
        if plan.shares == 1:
            continue
        found = True
        whole, shared = (predict(one, H200) for one in (plan_of(op, 8, n, k, Tiling(shares=1)), plan))
        assert shared is not None
        assert whole is not None
        assert shared.seconds < whole.seconds
    assert found


@each_op
def test_few_kernels(op: str, rng: np.random.Generator) -> None:
    """Also with shares: at most 8 of one N and K, whatever is compiled in, and four that differ in heights of tiles."""
    shared = drawn = 0
    while drawn < 12 or (not shared and drawn < 60):  # of these sizes about 2 in 5 share K
        drawn += 1
        n, k = (8 * int(one) for one in 2 ** rng.uniform(3, 11, 2))
        plans = [plan_of(op, rows, n, k) for rows in classes(EXAMINED_ROWS)]
        kernels = {plan.spec for plan in plans}
        assert len(set(map(kind_of_kernel, kernels))) <= MOST_KERNELS, (n, k)
        assert len(kernels) <= MOST_KERNELS + MOST_MORE_KERNELS, (n, k)
        shared += any(plan.shares > 1 for plan in plans)
    assert shared, f"none of {drawn}"


def test_classes_that_were_not_examined_have_a_kernel_too(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]
) -> None:
    """Which classes are examined is drawn here: with the usual ones, 544 rows of the first problem can have none that others want."""
    problems = [ReduceProblem(ALLREDUCE, Topology(2, 2), 1744, 8944, "bfloat16", True)]
    for op in (REDUCE_SCATTER, ALLREDUCE) * 3:
        n, k = (8 * int(one) for one in 2 ** rng.uniform(7, 11, 2))
        problems.append(ReduceProblem(op, Topology(2, 2), n, k, "bfloat16", bool(rng.random() < 0.5)))
    few = list(classes(4096))
    for problem in problems:
        if problem is not problems[0]:
            examined = sorted(int(rows) for rows in rng.choice(list(classes(EXAMINED_ROWS)), 3, replace=False))
            monkeypatch.setattr(choice, "_CLASSES", tuple(examined))
            monkeypatch.setattr(choice, "_WEIGHTS", (1.0,) * len(examined))
        forget_choices()
        specialize = str(parse(None, SPECIALIZED[problem.op]))
        kept = choice._kept(problem, 132, H200, specialize)
        assert len(kept) <= MOST_KERNELS
        kinds = set(map(kind_of_kernel, kept))
        assert all(kind_of_kernel(choose(problem, rows, 132, H200, specialize).spec) in kinds for rows in few), problem
