"""Tiles whose columns are no whole panels of 64 (kernels_src/tile/shape.cuh): as right as others, with the same bits, in a world of one."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan
from mkernel.planner.gemm import SHARED_LIMIT, GemmTile
from mkernel.planner.reduce import REDUCE_SCATTER, ReduceProblem
from mkernel.planner.reduce import make_plan as plan_of_sums
from mkernel.planner.tiling import Tiling, TilingError
from tests.ops.body import Case, checked_bits, topology
from tests.ops.test_allgather_gemm import ranks, seeds

WIDTHS = tuple(width for width in range(80, 256, 16) if width % 64)


@pytest.fixture(autouse=True)
def _sms() -> Any:
    with env.override(MKERNEL_CPU_SMS=16):
        yield


@pytest.mark.cases(
    width=WIDTHS,
    cluster=((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    k=(64, 136, 520, 1032),
    tiles=(1, 2, 5),  # columns of tiles
    beyond=(0, 8, 72),  # columns of the last one that there are not
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    specialize=("n,k", "none"),
    valid=lambda width, cluster, **_: width % (8 * cluster[0]) == 0,
)
@pytest.mark.drawn(6)
def test_every_element_and_the_bits_of_whole_panels(
    request: pytest.FixtureRequest,
    width: int,
    cluster: tuple[int, int],
    k: int,
    tiles: int,
    beyond: int,
    dtype: str,
    row_major: bool,
    specialize: str,
    rng: np.random.Generator,
) -> None:
    case = Case(dtype, k, tiles * width - beyond, row_major, "default", tiling=Tiling(width, 1, 1, cluster[0], None, cluster[1]))
    plain = dataclasses.replace(case, tiling=Tiling(64, 1, 1, 1, 0))
    rows = (*rng.integers(1, 600, 3).tolist(), 0, 128)
    for seed in seeds(request):
        with env.override(MKERNEL_SPECIALIZE=specialize):
            ((wrong, bits),), ((_, same),) = (ranks(checked_bits, "1x1", one, seed, rows, seed=seed) for one in (case, plain))
        assert wrong == []
        assert bits == same


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_stored_beside_the_result(width: int, rng: np.random.Generator) -> None:
    """Rows of the result may be apart: what lies between them is the caller's, also behind the last column of tiles."""

    def rank(world: mk.World) -> None:
        m, n, k = (int(one) for one in rng.integers((1, width // 8 + 1, 1), (300, 90, 9)) * (1, 8, 8))
        a, b = rng.integers(-3, 4, (m, k)).astype("float16"), rng.integers(-3, 4, (n, k)).astype("float16").T
        into = np.full((m + 1, n + 16), np.nan, "float16")
        mk.plan("allgather_gemm", a, b, tiling={"block_n": width}, world=world).run(a, b, out=into[:m, :n])
        assert np.array_equal(into[:m, :n], (a.astype("float32") @ b.astype("float32")).astype("float16"))
        assert np.isnan(into[m]).all()
        assert np.isnan(into[:, n:]).all()

    mk.launch(rank, ranks=1, target="cpu")


def test_where_there_are_no_such_tiles() -> None:
    alone, two = (AllGatherGemmProblem(topology(world), 520, 520, "bfloat16", False) for world in ("1x1", "1x2"))
    possible = Tiling(176)
    for problem, tiling in (
        (two, possible),
        *((alone, dataclasses.replace(possible, **more)) for more in ({"shares": 2}, {"cluster": 4}, {"cluster_k": 2}, {"packets": 1})),
    ):
        with pytest.raises(TilingError):
            make_plan(problem, 300, 132, tiling=tiling)
    for more in ({"tile_rows": 2}, {"block_m": 128}):
        with pytest.raises(TilingError, match="swapped operands have 64, 128, 192, 256 columns"):
            make_plan(alone, 300, 132, tiling=dataclasses.replace(possible, **more))
    with pytest.raises(TilingError, match="a reduction have 64, 128, 192 or 256 columns"):
        plan_of_sums(ReduceProblem(REDUCE_SCATTER, topology("1x2"), 520, 520, "bfloat16", False), 300, 132, tiling=possible)
    for block_n in (48, 72, 100, 272):
        with pytest.raises(ValueError, match="block_n"):
            Tiling.parse({"block_n": block_n})


def test_a_stage_has_room_for_what_is_loaded() -> None:
    """Whole panels of a row-major B; and as many stages, and buffers of results, as beside these at least."""
    for width, cluster, row_major in itertools.product(WIDTHS, (1, 2), (True, False)):
        problem = AllGatherGemmProblem(topology("1x1"), 1056, 520, "bfloat16", row_major)
        plan = make_plan(problem, 300, 132, tiling=Tiling(width, cluster=cluster))
        constants = dict(plan.spec.constants)
        assert (plan.columns, plan.tiles_n, plan.shares, plan.slices) == (width, -(-1056 // width), 1, 1)
        assert constants["kWidth"] == width < constants["kBlockN"] == -(-width // 64) * 64
        stage = (128 + (constants["kBlockN"] if row_major else width)) * 128
        assert (
            plan.tile.stages * stage + plan.tile.buffers * 16384 <= plan.spec.shared_bytes <= SHARED_LIMIT < plan.spec.shared_bytes + stage
        )
        whole = GemmTile.deepest(constants["kBlockN"])
        assert plan.tile.stages >= whole.stages
        assert plan.tile.buffers >= whole.buffers
