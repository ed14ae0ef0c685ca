"""How many CTAs share K of a reduction whose values travel in packets: what the model would take of what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mkernel.planner import choice, predict_gemm
from mkernel.planner.machine import H200
from mkernel.planner.reduce import REDUCE_SCATTER, ReduceProblem
from mkernel.planner.row_classes import class_of
from mkernel.planner.topology import Topology

WORLD = Topology(2, 2)
_NEAR = 1.06  # of the best

# Microseconds of isolated calls between two H200, by columns of a tile and shares of K; M x N x K of a rank, B transposed, bfloat16.
# tests/gpu/tilings.py --ranks 2 --samples 5 --b transposed --tilings block_n=64,shares=1 ..., 2026-11-28, torch 2.11, driver 580.159.04.
MEASURED: dict[tuple[str, str], dict[int, dict[int, float]]] = {
    ("gemm_allreduce", "90x2240x7424"): {
        64: {1: 34.0, 2: 24.1, 3: 21.8, 5: 26.4, 8: 29.4, 11: 33.3},
        128: {2: 32.2, 3: 27.2, 4: 22.8, 7: 26.2, 9: 30.4},
    },
    ("gemm_allreduce", "116x768x4736"): {
        64: {1: 25.2, 2: 18.7, 3: 16.6, 5: 16.1, 8: 16.7, 11: 17.9},
        128: {2: 25.6, 3: 21.9, 4: 19.5, 7: 19.2, 9: 17.9, 14: 19.8},
    },
    ("gemm_reduce_scatter", "116x768x4736"): {
        64: {1: 24.6, 2: 18.9, 3: 17.3, 5: 15.0, 8: 15.3, 11: 18.1},
        128: {2: 24.5, 3: 20.7, 4: 18.5, 7: 17.7, 9: 17.5, 14: 19.6},
    },
    ("gemm_allreduce", "24x1536x6144"): {
        64: {1: 25.3, 2: 18.6, 3: 16.6, 5: 16.3, 8: 20.0, 11: 22.0},
        128: {2: 21.2, 3: 19.1, 4: 16.8, 7: 17.1, 9: 18.3, 14: 23.5},
    },
    ("gemm_reduce_scatter", "90x2240x7424"): {
        64: {1: 33.9, 2: 24.0, 3: 21.5, 5: 25.9, 8: 28.7, 11: 32.4},
        128: {2: 31.1, 3: 26.4, 4: 22.6, 7: 25.8, 9: 29.7, 14: 32.6},
    },
    ("gemm_allreduce", "280x1024x5200"): {
        64: {1: 28.3, 2: 23.4, 3: 28.4, 5: 27.2, 8: 32.4},
        128: {2: 27.8, 3: 24.7, 4: 22.7, 7: 28.5, 9: 30.6},
    },
    ("gemm_allreduce", "60x1152x3072"): {
        64: {1: 17.6, 2: 15.4, 3: 14.0, 5: 14.2, 8: 17.1, 11: 18.3},
        128: {2: 17.8, 3: 15.6, 4: 14.5, 7: 15.5, 9: 16.4, 14: 17.5},
    },
    ("gemm_reduce_scatter", "280x1024x5200"): {
        64: {1: 29.4, 2: 22.6, 3: 27.9, 5: 26.6, 8: 31.6},
        128: {2: 26.3, 3: 22.9, 4: 21.2, 7: 27.5, 9: 30.3},
    },
    ("gemm_allreduce", "500x520x4096"): {
        64: {1: 24.1, 2: 20.3, 3: 19.4, 5: 23.7, 8: 28.1},
        128: {2: 25.9, 3: 22.7, 4: 20.2, 7: 27.6, 9: 27.7},
    },
}


def lost() -> dict[tuple[str, str], float]:
    """What is chosen takes, of the time of the fastest; at least what those take that have next fewer and more shares."""
    found = {}
    for (op, size), of_width in MEASURED.items():
        m, n, k = map(int, size.split("x"))
        problem = ReduceProblem(op, WORLD, n, k, "bfloat16", False)
        plan = choice.choose(problem, class_of(m // WORLD.size if op == REDUCE_SCATTER else m), 132, H200, "none")
        times = of_width.get(plan.tile.block_n, {})
        if not plan.packets or plan.ctas_together > 1 or not min(times, default=math.inf) <= plan.shares <= max(times):
            found[op, size] = math.inf  # nothing that was measured
            continue
        around = (max(s for s in times if s <= plan.shares), min(s for s in times if s >= plan.shares))
        found[op, size] = max(times[shares] for shares in around) / min(min(times.values()) for times in of_width.values())
    return found


def test_what_is_chosen_is_the_fastest() -> None:
    assert max(lost().values()) <= _NEAR, lost()


@pytest.mark.parametrize(("least", "of_share"), [(2e-6, 0.0), (1e-6, 2e-6)])
def test_a_wrong_cost_of_shares_is_found(
    least: float, of_share: float, monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]
) -> None:
    """Nothing for each share, as it was, or far too much."""
    forget_choices()
    monkeypatch.setattr(predict_gemm, "_SUMS_OF_SHARES", least)
    monkeypatch.setattr(predict_gemm, "_SUM_OF_SHARE", of_share)
    assert max(lost().values()) > _NEAR, lost()
