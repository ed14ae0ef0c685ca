"""Which clusters of CTAs have tiles of swapped operands, where no row is aligned: what the model takes of what was measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mkernel.planner import pairs, tile_cost
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from tests.planner.measured import is_near, lost, seconds_alone

# Microseconds of isolated calls by columns and rows of a tile (0: 128 rows, operands as they are), and CTAs of a cluster in M and N; M
# x N x K, a world of one, B transposed, bfloat16. Development runs with the clocks of mkernel.bench.timing, one H200, torch 2.11.0,
# driver 580.159.04, 2026-11-30.
Kind = tuple[int, int, int, int]
Times = dict[str, dict[Kind, float]]
HALVES: Times = {  # rows of which every second begins in the middle of a sector
    "127x2408x2328": {(64, 64, 2, 2): 12.4, (64, 64, 1, 4): 13.0, (128, 32, 4, 1): 13.4},
    "2958x1320x1192": {(192, 192, 2, 1): 21.7, (128, 160, 1, 4): 23.9, (192, 0, 2, 2): 26.2},
    "7078x5952x728": {(256, 0, 2, 2): 115.5, (192, 0, 2, 2): 108.5},
    "1653x10712x1000": {(256, 0, 2, 2): 63.9, (192, 0, 2, 2): 66.8},
    "486x2208x3528": {(128, 88, 1, 1): 32.4, (128, 88, 2, 1): 24.7},
    "1027x1568x3912": {(128, 0, 1, 1): 42.0, (128, 0, 2, 1): 35.0, (128, 0, 1, 2): 35.7, (64, 224, 1, 2): 34.1, (64, 224, 1, 1): 49.8},
    "2795x2400x4040": {(128, 224, 1, 1): 109.5, (128, 240, 4, 1): 95.2},
}
SECTORS: Times = {  # rows of whole sectors, most of which lie in two lines
    "753x2872x2576": {(128, 160, 1, 4): 24.8, (64, 160, 1, 4): 28.3, (128, 160, 1, 2): 25.7, (128, 160, 1, 1): 24.6, (128, 80, 2, 2): 30.1},
    "772x1400x2320": {(128, 80, 2, 1): 17.7, (128, 104, 1, 1): 17.7, (64, 160, 1, 4): 17.1},
    "2795x2400x4048": {(128, 224, 1, 1): 85.7, (128, 240, 4, 1): 89.3, (128, 160, 1, 4): 90.2},
    "2074x1624x2224": {(128, 216, 1, 1): 28.2, (256, 0, 1, 1): 31.2, (128, 216, 2, 1): 27.9, (128, 240, 1, 2): 30.8, (256, 0, 2, 1): 30.8},
    "1988x2304x2704": {(64, 160, 1, 4): 49.1, (128, 152, 2, 1): 41.6, (64, 208, 2, 2): 48.7},
    "486x2208x3552": {(128, 88, 1, 1): 21.9, (128, 88, 2, 1): 20.5},
    "486x2208x3568": {(128, 88, 1, 1): 25.5, (128, 88, 2, 1): 22.3},
    "289x1200x4592": {(64, 80, 1, 1): 18.0, (64, 64, 1, 1): 18.9, (64, 64, 1, 4): 19.5, (64, 80, 4, 1): 20.7, (64, 64, 2, 1): 18.9},
    "1027x1568x3936": {(128, 0, 1, 1): 26.8, (128, 0, 2, 1): 26.9, (128, 0, 1, 2): 33.8, (64, 224, 1, 2): 28.8, (128, 120, 1, 1): 26.8},
}


def _seconds(size: str, tile: Kind) -> float:
    columns, height, cluster, cluster_n = tile
    return seconds_alone(size, False, Tiling(columns, shares=1, cluster=cluster, cluster_n=cluster_n, block_m=height or None))


# What is chosen may take of the best, in the worst case and in the mean.
_HALVES, _SECTORS = (HALVES, 1.06, 1.025), (SECTORS, 1.12, 1.04)


@pytest.mark.parametrize(("measured", "worst", "mean"), [_HALVES, _SECTORS], ids=["halves", "sectors"])
def test_what_is_predicted_to_be_the_fastest_is(measured: Times, worst: float, mean: float) -> None:
    assert is_near(lost(measured, _seconds), worst, mean), lost(measured, _seconds)


@pytest.mark.parametrize(
    ("measured", "name", "wrong"),
    [(_HALVES, "_RECEIVED", 1.2), (_SECTORS, "_TOGETHER", {1: 1.0, 2: 0.6, 4: 0.4})],
    ids=["halves", "sectors"],
)
def test_a_wrong_cost_of_loads_in_clusters_is_found(
    monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None], measured: tuple[Times, float, float], name: str, wrong: object
) -> None:
    forget_choices()
    monkeypatch.setattr(tile_cost, name, wrong)
    times, *bounds = measured
    assert not is_near(lost(times, _seconds), *bounds), lost(times, _seconds)


def test_clusters_have_all_sms_that_they_find_room_on(monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]) -> None:
    """120 tiles, three rows of 40, are one wave of 30 clusters of four; of 29 they would be two, as they were."""

    def plan() -> AllGatherGemmPlan:
        forget_choices()
        problem = AllGatherGemmProblem(Topology(1, 1), 5064, 2600, "bfloat16", False)
        return make_plan(problem, 436, 132, tiling=Tiling(cluster_n=4, block_m=160))

    assert (plan().split.compute, plan().num_tiles) == (120, 120)
    predicted = predict(plan(), H200)
    monkeypatch.setattr(pairs, "_LEFT_OVER_ALONE", pairs._LEFT_OVER)
    before = predict(plan(), H200)
    assert plan().split.compute == 116
    assert predicted is not None and before is not None and before.seconds > 1.3 * predicted.seconds
