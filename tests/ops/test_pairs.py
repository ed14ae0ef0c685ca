"""Clusters of CTAs that load B, or A, together (kernels_src/tile/pair.cuh): right, the bits of CTAs alone, and none waits for ever."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError, Error
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan
from mkernel.planner.choice import candidates, plan_allgather_gemm
from mkernel.planner.gemm import BLOCK_M
from mkernel.planner.machine import H200
from mkernel.planner.predict_gemm import predict_allgather_gemm
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER
from mkernel.planner.row_classes import MOST_KERNELS, classes
from mkernel.planner.spans import spans_of
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from tests.ops.body import WORLDS, Case, checked_bits, random, topology
from tests.ops.test_allgather_gemm import ranks, seeds
from tests.virtual_time import sleep

_DTYPES = ("bfloat16", "float16")
_SMS = 16
# The last row of tiles of a shard has a partner without rows, or both tiles have rows, or there is one row of tiles.
_ROWS = (300, 129, 7, 500, 0, 128)


@pytest.fixture(autouse=True)
def _sms() -> Any:
    with env.override(MKERNEL_CPU_SMS=_SMS):
        yield


def _valid(world: str, tiling: Tiling, split: str, **_: Any) -> bool:
    at, fours = topology(world), (tiling.cluster or 1) * (tiling.cluster_n or 1) == 4
    fits = split in ("default", "warps") or not fours  # splits of pairs are none of fours
    return fits and tiling.span in spans_of(at) and (split != "warps" or at.num_nodes == 1 < at.size)


@pytest.mark.cases(
    world=WORLDS,
    tiling=tuple(
        Tiling(block_n, span, None, cluster, None, cluster_n)
        for block_n, span in ((64, 1), (64, 2), (128, 2), (192, 1), (256, 1), (256, 2))
        for cluster, cluster_n in ((2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
    ),
    shape=((64, 256), (136, 264), (520, 136), (1032, 8)),
    split=("default", "pairs", "few pairs", "warps"),
    dtype=_DTYPES,
    row_major=(True, False),
    valid=_valid,
)
@pytest.mark.drawn(1)
def test_every_element_and_the_bits_of_ctas_alone(
    request: pytest.FixtureRequest, world: str, tiling: Tiling, shape: tuple[int, int], split: str, dtype: str, row_major: bool
) -> None:
    case = Case(dtype, *shape, row_major, split, tiling=tiling)
    alone = dataclasses.replace(case, tiling=dataclasses.replace(tiling, shares=1, cluster=1, cluster_n=1))
    for seed in seeds(request):
        of_pairs, of_ctas = (ranks(checked_bits, world, one, seed, _ROWS, seed=seed) for one in (case, alone))
        for rank, ((wrong, bits), (_, same)) in enumerate(zip(of_pairs, of_ctas, strict=True)):
            assert wrong == [], f"rank {rank}"
            assert bits == same, f"rank {rank}"


@pytest.mark.parametrize("clusters", [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_clusters_of_all_gpcs_begin_with_a_tile_each(
    request: pytest.FixtureRequest, rng: np.random.Generator, clusters: tuple[int, int]
) -> None:
    """In a world of one; of any number of clusters beyond one for each GPC."""
    case = Case("bfloat16", 136, 1032, tiling=Tiling(64, 1, None, clusters[0], None, clusters[1]))
    with env.override(MKERNEL_CPU_SMS=int(rng.integers(9, 14)) * clusters[0] * clusters[1]):
        ((wrong, _),) = ranks(checked_bits, "1x1", case, request.config.getoption("--seed"), (300, 700), seed=0)
    assert wrong == []


@pytest.mark.parametrize("clusters", [(2, 1), (1, 2)])
def test_clusters_that_share_k_in_packets_are_all_resident(rng: np.random.Generator, clusters: tuple[int, int]) -> None:
    """They wait for each other. For others of a world of one there may be no room (here in every second launch), until some have ended."""
    case = Case("bfloat16", 520, 72, tiling=Tiling(64, 1, 3, clusters[0], None, clusters[1]))
    for seed in rng.integers(1 << 30, size=4):
        ((wrong, _),) = ranks(checked_bits, "1x1", case, int(seed), (64, 129), seed=int(seed))
        assert wrong == []


@pytest.mark.parametrize("op", ["allgather_gemm", REDUCE_SCATTER, ALLREDUCE])
@pytest.mark.parametrize("world", ["1x2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_all_leave_where_a_rank_does_not_come(request: pytest.FixtureRequest, world: str, op: str) -> None:
    def calls(world: Any) -> str:
        rows = 300 * world.size if op == REDUCE_SCATTER else 300
        a, b = random((rows, 136), "float16", np.random.default_rng(0)), random((136, 264), "float16", np.random.default_rng(1))
        plan = mk.plan(op, a, b, world=world, tiling={"cluster": 2})
        plan.run(a, b)
        if world.rank == 1:
            sleep(world, 10.0)
        with pytest.raises(Error) as caught:
            plan.run(a, b)
        return f"{type(caught.value).__name__}: {caught.value}"

    told = ranks(calls, world, seed=request.config.getoption("--seed"), timeout=2.0, entry_timeout=3.0)
    assert all("never entered call 2" in text for text in told), told


def _plan(rows: int, sms: int, split: Split | None = None, world: str = "1x4", **tiling: int) -> Any:
    problem = AllGatherGemmProblem(topology(world), 1000, 4096, "bfloat16", True)
    return make_plan(problem, rows, sms, split, tiling=Tiling(cluster=2, **tiling))


@pytest.mark.parametrize("world", ["1x1", "1x4", "2x2", "4x8"])
def test_a_plan_of_pairs(world: str) -> None:
    for sms in (131, 132, 60, 7):
        if sms < 60 and world == "4x8":
            continue
        plan = _plan(1000, sms, world=world)
        assert all((number or 0) % 2 == 0 for number in dataclasses.astuple(plan.split))
        computing = plan.split.compute or 0
        assert sms - 1 <= plan.split.total <= sms
        tiles = plan.planes * math.ceil(plan.tile_rows / 2) * 2 * plan.tiles_n
        assert plan.grid == plan.split.total - computing + (computing if plan.pushers else min(computing, tiles))
        assert (plan.parts, plan.slices, plan.shares, plan.spec.cluster) == (1, 1, 1, 2)
        alone = make_plan(plan.problem, 1000, sms, tiling=Tiling(plan.tile.block_n, plan.span, 1))
        for rank in (0, plan.problem.topology.size - 1):
            tiles = list(plan.tiles(rank))
            whole = {dataclasses.replace(tile, slice=0) for tile in alone.tiles(rank)}
            assert set(tiles) == whole
            assert len(tiles) == plan.num_tiles
            for upper, lower in itertools.pairwise(tiles):
                if upper.m % 2 == 0 and (upper.m + 1) * BLOCK_M < plan.plane_rows:
                    assert lower == dataclasses.replace(upper, m=upper.m + 1)


def test_what_does_not_go_with_pairs() -> None:
    with pytest.raises(SplitError, match="even number"):
        _plan(100, 132, Split(intra_comm=3))
    with pytest.raises(SplitError, match="even number"):
        _plan(100, 132, Split(compute=31, intra_comm=2))
    for wrong in ({"cluster": 3}, {"cluster_n": 8}, {"cluster": 2, "cluster_n": 4}):
        with pytest.raises(ValueError, match="must be 1, 2 or 4, and of both 4 at most"):
            Tiling.parse(wrong)
    with pytest.raises(TilingError, match="alone"):
        make_plan(AllGatherGemmProblem(topology("1x2"), 72, 136, "bfloat16", True), 16, 132, tiling=Tiling(64, packets=2, cluster_n=2))

    def asked(world: Any) -> str:
        a, b = random((8, 64), "float16", np.random.default_rng(0)), random((64, 8), "float16", np.random.default_rng(1))
        with pytest.raises(ArgumentError, match="split") as caught:
            mk.plan("allgather_gemm", a, b, world=world, tiling={"cluster": 2}, split=mk.Split(compute=3))
        return str(caught.value)

    assert "even number" in ranks(asked, "1x1", seed=1)[0]


def test_kernels_of_a_problem_have_as_many_ctas_as_there_is_room_for() -> None:
    """A device has more of CTAs alone than of clusters of four, and one N and K has kernels of both."""

    def prepared(world: Any) -> str:
        problem = AllGatherGemmProblem(topology("1x1"), 72, 136, "bfloat16", False)
        alone, fours = (make_plan(problem, 1 << 14, 132, tiling=Tiling(64, 1, 1, m, None, m)) for m in (1, 2))
        assert (alone.grid, fours.grid) == (132, 120)
        world.problems.prepare(problem, "both", {alone.spec: 132, fours.spec: 120}, lambda *_: None)
        sharing = make_plan(dataclasses.replace(problem, k=520), 1 << 14, 132, tiling=Tiling(cluster_k=4))
        in_a_row = make_plan(problem, 1 << 14, 132, tiling=Tiling(64, 1, 1, 1, None, 4))
        apart = {sharing.spec: 132, in_a_row.spec: 132}  # as on a device that has room for fewer
        world.problems.prepare("apart", "clusters that wait for no other one", apart, lambda *_: None)
        of_two = AllGatherGemmProblem(topology("1x2"), 72, 136, "bfloat16", False)
        between = make_plan(of_two, 64, 132, tiling=Tiling(64, None, 1, 1, 1, 4))
        assert between.split.compute == 116
        with pytest.raises(ArgumentError, match="only 120 CTAs fit") as caught:
            world.problems.prepare("between ranks", "too many", {between.spec: 132}, lambda *_: None)
        return str(caught.value)

    with env.override(MKERNEL_CPU_SMS=132):
        ranks(prepared, "1x1", seed=1)


def test_plans_of_the_model_fit_the_device(rng: np.random.Generator) -> None:
    """Also where one problem has kernels of CTAs alone, of pairs, and of fours, for other numbers of rows."""
    most = {1: 132, 2: 132, 3: 117, 4: 120, 8: 120}
    found = set()
    for world in ("1x1", "1x2", "1x4"):
        for n, k in (8 * rng.integers(64, 1500, (6, 2))).tolist():
            problem = AllGatherGemmProblem(topology(world), n, k, "bfloat16", False)
            for rows in (1, 60, 124, 172, 300, 500, 1000, 4000):
                plan = plan_allgather_gemm(problem, rows, 132, machine=H200)
                found.add(plan.spec.cluster)
                assert plan.grid <= most[plan.spec.cluster], plan.describe()
    assert 2 in found


def _chosen(world: str, rows: int, n: int, k: int, split: Split | None = None, *, row_major: bool = True) -> int:
    return make_plan(AllGatherGemmProblem(topology(world), n, k, "bfloat16", row_major), rows, 132, split).cluster


def test_the_rules_choose_pairs_where_rows_of_b_are_not_aligned() -> None:
    """Between ranks: in a world of one the model decides."""
    for world in ("1x2", "1x4", "2x2", "4x1"):
        assert _chosen(world, 1735, 2904, 6912) == 2
        assert _chosen(world, 1735, 2904, 6912, Split(intra_comm=4 if world != "4x1" else 0)) == 2
        assert _chosen(world, 1735, 6912, 2904) == 1, "rows of A alone are not: pairs load no less of it"
        assert _chosen(world, 1735, 6912, 2904, row_major=False) == 2
        assert _chosen(world, 1735, 2904, 6912, row_major=False) == 1
        assert _chosen(world, 1735, 2904, 520) == 1, "K is short"
    assert _chosen("1x1", 7020, 3432, 4568) == 1
    for rows in (1, 100, 128):
        assert _chosen("1x2", rows, 3432, 4568) == 1, "there is one row of tiles"
    assert _chosen("1x2", 256, 520, 4568) == 1, "fewer tiles than SMs"
    assert _chosen("1x2", 1735, 2904, 6912, Split(intra_comm=3)) == 1, "an odd number of CTAs is asked for"
    assert _chosen("1x2", 1735, 2904, 6912, Split(intra_comm=0)) == 1, "warps are asked for"


def test_pairs_leave_few_kernels(rng: np.random.Generator) -> None:
    """One N and K has at most 8 of them, however many classes of rows choose pairs."""
    paired = 0
    for world in ("1x2", "1x4"):
        for n, k in (8 * rng.integers(128, 1024, (4, 2))).tolist():
            problem = AllGatherGemmProblem(topology(world), n, k, "bfloat16", True)
            specs = {make_plan(problem, rows, 132).spec for rows in classes(1 << 15)}
            assert len(specs) <= MOST_KERNELS, (n, k)
            paired += any(spec.cluster == 2 for spec in specs)
    assert paired, "nobody chose pairs: nothing was shown"


def test_the_model_offers_pairs_where_rows_are_not_aligned() -> None:
    def predicted(n: int, k: int, cluster: int) -> float:
        problem = AllGatherGemmProblem(topology("1x1"), n, k, "bfloat16", True)
        return predict_allgather_gemm(make_plan(problem, 7020, 132, tiling=Tiling(256, 1, 1, cluster)), H200).seconds

    assert predicted(3432, 4568, 2) < 0.95 * predicted(3432, 4568, 1)
    assert predicted(3584, 4608, 2) > predicted(3584, 4608, 1), "loads do not bind, and pairs wait for each other"
    for world, n, k in itertools.product(("1x1", "1x2", "2x2"), (3432, 3584), (4568, 4608)):
        plans = candidates(AllGatherGemmProblem(topology(world), n, k, "bfloat16", True), 7020, 132)
        clusters = {(plan.cluster, plan.cluster_n) for plan in plans}
        in_n = {(1, 2), (2, 2), (1, 4), (4, 1)} if world == "1x1" else {(1, 2)}
        assert clusters == {(1, 1)} | ({(2, 1)} if n % 64 or k % 64 else set()) | (in_n if k % 64 else set())
