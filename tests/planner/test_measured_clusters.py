"""Which clusters of CTAs have tiles of swapped operands, where no row is aligned: what the model takes of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest

from mkernel.planner import pairs, prediction
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology

_MEAN, _WORST = 1.04, 1.08  # of the best

# Microseconds of isolated calls by columns and rows of a tile, and CTAs of a cluster in M and N; M x N x K, a world of one, B transposed,
# bfloat16. Development runs with the clocks of mkernel.bench.timing, one H200, torch 2.11.0, driver 580.159.04, 2026-11-30.
MEASURED: dict[str, dict[tuple[int, int, int, int], float]] = {
    "785x1152x1464": {(128, 80, 2, 2): 13.3, (128, 72, 4, 1): 12.4, (192, 64, 4, 1): 14.4, (64, 160, 1, 4): 12.9},
    "436x5064x2600": {(192, 112, 2, 2): 25.8, (192, 112, 4, 1): 26.2, (256, 112, 4, 1): 30.0, (128, 152, 1, 4): 25.8},
    "680x12368x2920": {(128, 120, 2, 2): 87.7, (192, 176, 4, 1): 104.2, (128, 176, 4, 1): 99.0, (128, 232, 1, 4): 92.3},
    "3172x1080x2552": {(192, 160, 2, 2): 32.8, (192, 160, 4, 1): 31.5, (256, 144, 4, 1): 39.5, (128, 168, 1, 4): 42.3},
    "98x4536x6152": {(128, 64, 2, 2): 33.1, (128, 48, 4, 1): 43.4, (64, 48, 4, 1): 52.2, (64, 104, 1, 4): 24.9},
    "9032x512x728": {(128, 152, 2, 2): 18.7, (256, 160, 4, 1): 19.5, (128, 152, 4, 1): 19.6, (128, 168, 1, 4): 18.4},
    "1520x1664x1976": {(128, 192, 2, 2): 22.9, (192, 128, 4, 1): 22.6, (128, 192, 4, 1): 25.8, (128, 224, 1, 4): 24.0},
}


def lost() -> dict[str, float]:
    """What is predicted to be the fastest takes, of the time of the fastest."""
    found = {}
    for size, times in MEASURED.items():
        m, n, k = map(int, size.split("x"))
        problem = AllGatherGemmProblem(Topology(1, 1), n, k, "bfloat16", False)

        def seconds(tile: tuple[int, int, int, int], rows: int = m, problem: AllGatherGemmProblem = problem) -> float:
            columns, height, cluster, cluster_n = tile
            tiling = Tiling(columns, cluster=cluster, cluster_n=cluster_n, block_m=height)
            predicted = predict(make_plan(problem, rows, H200.sms, tiling=tiling), H200)
            return math.inf if predicted is None else predicted.seconds

        found[size] = times[min(times, key=seconds)] / min(times.values())
    return found


def test_what_is_predicted_to_be_the_fastest_is() -> None:
    found = lost()
    assert max(found.values()) <= _WORST, found
    assert statistics.geometric_mean(found.values()) <= _MEAN, found


def test_a_wrong_cost_of_what_others_load_is_found(monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]) -> None:
    forget_choices()
    monkeypatch.setattr(prediction, "_RECEIVED", 0.9)
    assert max(lost().values()) > _WORST, lost()


def test_clusters_have_all_sms_that_they_find_room_on(monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]) -> None:
    """120 tiles, three rows of 40, are one wave of 30 clusters of four; of 29 they would be two, as they were."""

    def plan() -> AllGatherGemmPlan:
        forget_choices()
        problem = AllGatherGemmProblem(Topology(1, 1), 5064, 2600, "bfloat16", False)
        return make_plan(problem, 436, 132, tiling=Tiling(cluster_n=4, block_m=152))

    assert (plan().split.compute, plan().num_tiles) == (120, 120)
    predicted = predict(plan(), H200)
    monkeypatch.setattr(pairs, "_LEFT_OVER_ALONE", pairs._LEFT_OVER)
    before = predict(plan(), H200)
    assert plan().split.compute == 116
    assert predicted is not None and before is not None and before.seconds > 1.3 * predicted.seconds
