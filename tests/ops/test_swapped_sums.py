"""Swapped operands in reductions in packets (kernels_src/reduce/groups.cuh): every element right, and the bits of operands as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.planner.choice import plan_reduce
from mkernel.planner.machine import H200
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, SWAPPED_TILE, ReduceProblem, make_plan
from mkernel.planner.tiling import Tiling, TilingError
from tests.ops.body import Case, checked_bits, topology
from tests.ops.test_allgather_gemm import ranks, seeds

_HEIGHTS = (*range(16, 129, 16), 160, 192)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
_HOWS = (REDUCE_SCATTER, "one_shot", "two_shot")


@pytest.fixture(autouse=True)
def _sms() -> Any:
    with env.override(MKERNEL_CPU_SMS=8):
        yield


def _case(how: str, dtype: str, shape: tuple[int, int], row_major: bool, tiling: Tiling) -> Case:
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    return Case(dtype, *shape, row_major, "default", op, "output", algorithm, tiling)


def _check(request: pytest.FixtureRequest, world: str, case: Case, rows: tuple[int, ...]) -> None:
    """Every element is right, and the same on all ranks that have it; with all of K in one CTA it has the bits of other tiles.

    (Of an all-reduce in two steps others may begin a sum.)
    """
    problem = ReduceProblem(case.op, topology(world), case.n, case.k, case.dtype, case.row_major, "output", case.algorithm)
    assert all(make_plan(problem, some, 8, tiling=case.tiling).swapped for some in rows)
    plain = dataclasses.replace(case, tiling=Tiling(64, None, 1, 1, 1))
    for seed in seeds(request):
        of_swapped, of_plain = (ranks(checked_bits, world, one, seed, rows, seed=seed) for one in (case, plain))
        for rank, ((wrong, bits), (_, same)) in enumerate(zip(of_swapped, of_plain, strict=True)):
            assert wrong == [], f"rank {rank}"
            if case.op == ALLREDUCE:
                assert bits == of_swapped[0][1], f"rank {rank} has other bits than rank 0"
            if case.tiling is not None and case.tiling.shares == 1 and case.algorithm != "two_shot":
                assert bits == same, f"rank {rank}"


@pytest.mark.cases(
    world=("1x2", "1x3", "1x4", "1x5", "1x7", "1x8"),
    how=_HOWS,
    clusters=_CLUSTERS,
    how_high=(*(("tile_rows", number) for number in (1, 2, 3, 5)), *(("block_m", rows) for rows in (48, 96, 112, 144, 176))),
    shares=(1, 2, 3, 7),
    shape=((72, 256), (136, 264), (520, 136), (1032, 8)),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    valid=lambda shape, clusters, shares, how_high, **_: (
        (shares == 1 or (max(clusters) == 1 and shares * 64 <= shape[0]))
        and (how_high[0] != "block_m" or how_high[1] % (8 * clusters[1]) == 0)
    ),
)
@pytest.mark.drawn(5)
def test_every_element_and_the_bits_of_operands_as_they_are(
    request: pytest.FixtureRequest,
    world: str,
    how: str,
    clusters: tuple[int, int],
    how_high: tuple[str, int],
    shares: int,
    shape: tuple[int, int],
    dtype: str,
    row_major: bool,
) -> None:
    size = topology(world).size
    most = min(400, 1200 // size) // (size if how == REDUCE_SCATTER else 1)  # every rank multiplies all rows
    rng = np.random.default_rng([request.config.getoption("--seed"), 23])
    tiling = dataclasses.replace(Tiling(None, None, shares, clusters[0], 1, clusters[1]), **dict([how_high]))
    rows = (*map(int, rng.integers(1, most, 2)), *map(int, rng.integers(1, 17, 2)), 0)
    _check(request, world, _case(how, dtype, shape, row_major, tiling), rows)


@pytest.mark.cases(world=("1x2", "1x3"), how=_HOWS, row_major=(True, False))
@pytest.mark.drawn(1)
def test_tiles_of_all_heights(request: pytest.FixtureRequest, world: str, how: str, row_major: bool, rng: np.random.Generator) -> None:
    """One row of tiles of each height; owners' rows begin anywhere in it."""
    size = topology(world).size if how == REDUCE_SCATTER else 1
    rows = [int(height - rng.integers(0, 8)) // size for height in _HEIGHTS]
    _check(request, world, _case(how, "bfloat16", (72, 72), row_major, Tiling(tile_rows=1, shares=1)), tuple(rows))


def test_a_plan_has_as_many_rows_of_tiles_as_it_needs(rng: np.random.Generator) -> None:
    """No tile is empty or too high, the last one is loaded as far as there are rows, and stages are as many as fit."""
    for size, n, rows, tile_rows in rng.integers((2, 1, 1, 1), (9, 200, 600, 9), (200, 4)).tolist():
        problem = ReduceProblem(REDUCE_SCATTER, topology(f"1x{size}"), 8 * n, 520, "bfloat16", False)
        plan = make_plan(problem, rows, 132, tiling=Tiling(tile_rows=tile_rows))
        if not plan.swapped:
            assert not plan.packets, "there is no room"
            continue
        all_rows, sizes = size * rows, plan.sizes_of(rows)
        assert plan.block_rows == sizes.block_rows <= SWAPPED_TILE.block_n
        assert (plan.tile_rows - 1) * plan.block_rows < all_rows <= plan.tile_rows * plan.block_rows
        assert (plan.tile_rows - 1, sizes.tiles) == (sizes.last_row, plan.tile_rows * plan.tiles_n)
        left = all_rows - sizes.last_row * plan.block_rows
        assert left <= sizes.tail_rows < left + 8
        stage = (128 + plan.block_rows) * 128
        assert sizes.stages * stage <= SWAPPED_TILE.stages * (128 + SWAPPED_TILE.block_n) * 128 < (sizes.stages + 1) * stage


@pytest.mark.parametrize("op", [REDUCE_SCATTER, ALLREDUCE])
def test_what_does_not_go_with_swapped_operands(op: str) -> None:
    problem = ReduceProblem(op, topology("1x2"), 72, 136, "bfloat16", True)
    canonical, exact = dataclasses.replace(problem, canonical=True), dataclasses.replace(problem, partials="float32")
    far = dataclasses.replace(problem, topology=topology("2x2"))
    for one, tiling in (
        *((other, Tiling(tile_rows=1)) for other in (canonical, exact, far)),
        (problem, Tiling(64, tile_rows=1)),
        (problem, Tiling(packets=0, tile_rows=1)),
    ):
        with pytest.raises(TilingError, match="swapped operands have tiles of 128 columns"):
            make_plan(one, 16, 132, tiling=tiling)
    assert make_plan(problem, 16, 132, tiling=Tiling(128, tile_rows=1)).swapped == 1


def test_the_model_chooses_them_where_tiles_of_128_rows_do_not_fit() -> None:
    """170 rows are one tile, whose columns fill one wave of the SMs (measured: docs/speed_log.md)."""
    problem = ReduceProblem(REDUCE_SCATTER, topology("1x2"), 14976, 6016, "bfloat16", False)
    chosen = plan_reduce(problem, 85, 132, machine=H200)
    assert (chosen.swapped, chosen.block_rows, chosen.tiles) == (1, 192, 117)
    assert not plan_reduce(dataclasses.replace(problem, canonical=True), 85, 132, machine=H200).swapped
