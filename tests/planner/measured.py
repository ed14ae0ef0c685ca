"""What the model takes of what was measured: for the tests that hold tables of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology

Kind = TypeVar("Kind")  # of tile


def seconds_alone(size: str, row_major: bool, tiling: Tiling) -> float:
    """Predicted, of a product of M x N x K in a world of one."""
    m, n, k = map(int, size.split("x"))
    problem = AllGatherGemmProblem(Topology(1, 1), n, k, "bfloat16", row_major)
    predicted = predict(make_plan(problem, m, H200.sms, tiling=tiling), H200)
    return math.inf if predicted is None else predicted.seconds


def lost(measured: Mapping[str, Mapping[Kind, float]], seconds: Callable[[str, Kind], float]) -> dict[str, float]:
    """What is predicted to be the fastest takes of the time of the fastest, by shape. ``seconds``: what is predicted."""
    found = {}
    for size, times in measured.items():
        predicted = {tile: seconds(size, tile) for tile in times}
        found[size] = times[min(times, key=predicted.__getitem__)] / min(times.values())
    return found


def is_near(found: Mapping[str, float], worst: float, mean: float) -> bool:
    return max(found.values()) <= worst and statistics.geometric_mean(found.values()) <= mean
