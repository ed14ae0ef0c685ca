"""Swapped operands (kernels_src/tile/shape.cuh): tiles of any height are right, and have the bits of tiles of 128 rows."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan, may_travel_in_packets
from mkernel.planner.choice import plan_allgather_gemm
from mkernel.planner.heights import every_height, height_of, unit_of, usual_heights
from mkernel.planner.machine import H200
from mkernel.planner.spans import spans_of
from mkernel.planner.tiling import Tiling, TilingError
from tests.ops.body import WORLDS, Case, checked_bits, topology
from tests.ops.test_allgather_gemm import ranks, seeds

_SMS = 16
# Of tiles, by their columns.
_HEIGHTS = dict.fromkeys((64, 128), (*range(16, 129, 16), 160, 192, 224, 256)) | {
    192: tuple(range(64, 193, 16)),
    256: tuple(range(64, 161, 16)),
}
_Two = tuple[int | None, int | None]


@pytest.fixture(autouse=True)
def _sms() -> Any:
    with env.override(MKERNEL_CPU_SMS=_SMS):
        yield


def _same(request: pytest.FixtureRequest, world: str, case: Case, rows: tuple[int, ...]) -> None:
    """Every element is right, and results are those of the same call by CTAs alone, operands not swapped."""
    plain = dataclasses.replace(case, tiling=Tiling(64, 1, 1, 1, 0))
    for seed in seeds(request):
        of_swapped, of_plain = (ranks(checked_bits, world, one, seed, rows, seed=seed) for one in (case, plain))
        for rank, ((wrong, bits), (_, same)) in enumerate(zip(of_swapped, of_plain, strict=True)):
            assert wrong == [], f"rank {rank}"
            assert case.tiling is None or case.tiling.shares != 1 or bits == same, f"rank {rank}"


def _tiling(tile: _Two, plane: _Two, shares: int, cluster: _Two, height: _Two, **_: Any) -> Tiling:
    (columns, at_once), (span, packets), (tile_rows, block_m) = tile, plane, height
    return Tiling(columns, span, shares, cluster[0], packets, cluster[1], tile_rows, tiles_at_once=at_once, block_m=block_m)


def _valid(world: str, split: str, shape: tuple[int, int], **case: Any) -> bool:
    tiling = _tiling(**case)
    possible = every_height(tiling.block_n or 128, tiling.tiles_at_once or 1, unit=unit_of(tiling.cluster_n or 1))
    if tiling.block_m is not None and tiling.block_m not in possible:
        return False
    if (tiling.shares or 1) * 64 > shape[0]:  # fewer k steps
        return False
    if tiling.tiles_at_once == 2 and (world != "1x1" or tiling.shares != 1):
        return False
    if (tiling.block_n and tiling.shares != 1) or (tiling.block_n == 64 and world != "1x1" and not tiling.packets):
        return False
    at, together = topology(world), (tiling.cluster or 1) * (tiling.cluster_n or 1)
    inside = at.num_nodes == 1 < at.size
    if tiling.packets:
        return inside and split == "default" and tiling.span is None
    fits = split == "default" or (together == 1 and inside)
    return fits and tiling.span in spans_of(at) and (tiling.shares == 1 or (at.num_nodes == 1 and together == 1))


@pytest.mark.cases(
    world=WORLDS,
    tile=((None, 1), (64, 1), (192, 1), (256, 1), (None, 2)),  # columns, and tiles at once
    plane=((1, 0), (2, 0), (4, 0), (None, 1)),  # shards that a tile spans, and whether they come in packets
    shares=(1, 3),
    cluster=((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    height=(
        *((tile_rows, None) for tile_rows in (1, 2, 3, 5)),
        *((None, block_m) for block_m in (48, 72, 96, 112, 136, 144, 152, 224, 232)),
    ),
    shape=((64, 256), (136, 264), (520, 136), (1032, 8)),
    split=("default", "warps"),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    valid=_valid,
)
@pytest.mark.drawn(3)
def test_every_element_and_the_bits_of_operands_as_they_are(
    request: pytest.FixtureRequest,
    world: str,
    tile: _Two,
    plane: _Two,
    shares: int,
    cluster: _Two,
    height: _Two,
    shape: tuple[int, int],
    split: str,
    dtype: str,
    row_major: bool,
) -> None:
    tiling = _tiling(tile, plane, shares, cluster, height)
    rows = tuple(int(rows) for rows in np.random.default_rng(request.config.getoption("--seed")).integers(1, 400, 4))
    _same(request, world, Case(dtype, *shape, row_major, split, tiling=tiling), (*rows, 0, 129))


@pytest.mark.parametrize("cluster_n", [1, 2, 4])
def test_tiles_of_all_heights(request: pytest.FixtureRequest, cluster_n: int, rng: np.random.Generator) -> None:
    """Each height with a last row of tiles that is as high, and with one of any number of rows."""
    row_major = bool(rng.integers(2))
    for columns, tile_rows in ((128, 1), (128, 2), (64, 1), (192, 1), (192, 2), (256, 1)):
        rows = [both for height in _HEIGHTS[columns] for both in (height, height + int(rng.integers(1, height + 1)))]
        tiling = Tiling(columns, 1, 1, 1, None, cluster_n, tile_rows)
        _same(request, "1x1", Case("bfloat16", 72, 8 + columns, row_major, "default", tiling=tiling), tuple(rows))


@pytest.mark.parametrize("row_major", [True, False])
def test_tiles_that_warpgroups_have_in_turn(request: pytest.FixtureRequest, row_major: bool, rng: np.random.Generator) -> None:
    """Any number of tiles of a CTA, and of laps of the stages of each, whose last one may begin anywhere."""
    for cluster, cluster_n in ((1, 1), (2, 1), (1, 2), (2, 2)):
        k, n = 8 * int(rng.integers(1, 200)), 8 * int(rng.integers(1, 150))
        tiling = Tiling(None, 1, 1, cluster, None, cluster_n, int(rng.integers(1, 9)), tiles_at_once=2)
        with env.override(MKERNEL_CPU_SMS=int(rng.integers(4, 9))):
            _same(request, "1x1", Case("bfloat16", k, n, row_major, "default", tiling=tiling), tuple(rng.integers(1, 700, 2).tolist()))


def _turns(world: mk.World) -> Any:
    a, b = (np.ones(shape, "float16") for shape in ((700, 136), (136, 1304)))
    plan = mk.plan("allgather_gemm", a, b, tiling={"tile_rows": 5, "tiles_at_once": 2}, world=world)
    with mk.trace(world) as trace:
        plan.run(a, b)
    return trace.events


def test_both_warpgroups_compute_in_turn() -> None:
    with env.override(MKERNEL_CPU_SMS=4):
        (events,) = mk.launch(_turns, ranks=1, target="cpu")
    assert not events["role"].any(), "compute"
    tiles = collections.Counter(zip(events["cta"].tolist(), events["lane"].tolist(), strict=True))
    assert all(0 <= tiles[cta, 1] - tiles[cta, 2] <= 1 for cta in range(4))
    assert sorted(events["argument"].tolist()) == list(range(55))


def test_heights_are_the_least_that_kernels_have(rng: np.random.Generator) -> None:
    for (columns, at_once), heights in (*(((columns, 1), one) for columns, one in _HEIGHTS.items()), ((128, 2), _HEIGHTS[256])):
        assert usual_heights(columns, at_once) == heights
        for rows, tile_rows in rng.integers(1, (4000, 40), (100, 2)).tolist():
            wanted = max(tile_rows, -(-rows // heights[-1]))
            assert height_of(rows, wanted, heights) == min(one for one in heights if one * wanted >= rows)


def test_a_plan_has_as_many_rows_of_tiles_as_it_needs(rng: np.random.Generator) -> None:
    """No tile is empty, the last one is loaded as far as there are rows, and stages are as many as fit."""
    for size, n, rows, tile_rows in rng.integers((1, 1, 1, 1), (5, 200, 3000, 9), (200, 4)).tolist():
        problem = AllGatherGemmProblem(topology(f"1x{size}"), 8 * n, 520, "bfloat16", False)
        columns = (64, 128, 192, 256)[n % 4]
        packets = int(size > 1 and columns == 64)
        if packets and not may_travel_in_packets(problem, rows):
            continue
        cluster_n = (1, 2, 4)[rows % 3]  # which load rows of A together, as many each, in units of 8
        tiling = Tiling(columns, span=size, packets=packets, tile_rows=tile_rows, cluster=1, cluster_n=cluster_n)
        plan = make_plan(problem, rows, 132, tiling=tiling)
        assert (plan.columns, plan.narrow, plan.wide) == (columns, columns == 64, columns > 128)
        assert plan.tile_rows <= max(tile_rows, -(-size * rows // _HEIGHTS[columns][-1]) + 1, plan.swapped)
        assert (plan.tile_rows - 1) * plan.block_rows < size * rows <= plan.tile_rows * plan.block_rows
        left = size * rows - plan.sizes.last_row * plan.block_rows
        assert left <= plan.sizes.tail_rows < left + 8 * cluster_n
        assert plan.sizes.tail_rows % (8 * cluster_n) == plan.block_rows % (8 * cluster_n) == 0
        assert plan.sizes.tail_rows <= plan.block_rows
        stage = (columns + plan.block_rows) * 128
        assert plan.sizes.stages * stage <= plan.tile.stages * 49152 < (plan.sizes.stages + 1) * stage


def test_what_does_not_go_with_swapped_operands() -> None:
    canonical = AllGatherGemmProblem(topology("1x2"), 72, 136, "bfloat16", True, canonical=True)
    problem = dataclasses.replace(canonical, canonical=False)
    for one, tiling in ((canonical, Tiling(tile_rows=1)), (problem, Tiling(packets=2, tile_rows=1))):
        with pytest.raises(TilingError, match="swapped operands have no tagged packets"):
            make_plan(one, 16, 132, tiling=tiling)
    for tiling in (Tiling(tile_rows=1, tiles_at_once=2), Tiling(tiles_at_once=2)):
        with pytest.raises(TilingError, match="in turn"):
            make_plan(problem, 16, 132, tiling=tiling)
    with pytest.raises(TilingError, match="with nothing else"):
        make_plan(problem, 16, 132, tiling=Tiling(tiles_at_once=2, cluster_k=2))
    for columns in (64, 192, 256):
        with pytest.raises(TilingError, match="CTAs share K of tiles of 128 columns only"):
            make_plan(problem, 16, 132, tiling=Tiling(columns, tile_rows=1, shares=2))
    with pytest.raises(TilingError, match="shards travel in packets"):
        make_plan(problem, 16, 132, tiling=Tiling(64, tile_rows=1, packets=0))
    assert make_plan(problem, 16, 132, tiling=Tiling(128, tile_rows=1)).swapped == 1


def test_the_model_chooses_them_where_tiles_of_128_rows_do_not_fit() -> None:
    """448 rows are six tiles of 80, whose columns fill one wave of the SMs (measured: docs/speed_log.md); a full wave of 128 rows stays."""
    problem = AllGatherGemmProblem(topology("1x1"), 2560, 8192, "bfloat16", False)
    chosen = plan_allgather_gemm(problem, 448, 132, machine=H200)
    assert (chosen.swapped, chosen.block_rows, chosen.num_tiles) == (6, 80, 120)
    whole = AllGatherGemmProblem(topology("1x1"), 132 * 256, 8192, "bfloat16", False)
    assert not plan_allgather_gemm(whole, 128, 132, machine=H200).swapped
    invariant = dataclasses.replace(problem, canonical=True)
    assert not plan_allgather_gemm(invariant, 448, 132, machine=H200).swapped
