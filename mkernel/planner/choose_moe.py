"""Which tiles the MoE ops multiply, and how many CTAs fetch rows: what is predicted to be fastest with as many tokens as there may be.

A plan serves calls of any number of tokens. Where GPUs have not confirmed the model, the rules of each op choose, as in ``planner.choice``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from mkernel import env
from mkernel.planner import moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.choice import model_decides
from mkernel.planner.gemm import GemmTile
from mkernel.planner.machine import Machine, machine_named
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmPlan, MoeDispatchGemmProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombinePlan, MoeGemmCombineProblem
from mkernel.planner.predict import predict
from mkernel.planner.split import Split

__all__ = ["plan_moe_dispatch_gemm", "plan_moe_gemm_combine"]

_WIDTHS = (256, 192, 128, 64)
_GATED_WIDTHS = (256, 128)  # of gate and up together
_FETCHING, _COMBINING = (8, 16, 24, 32, 48, 64), (8, 12, 16, 24, 32)  # CTAs
_ALIKE = 1.015  # of the shortest time: CTAs that copy and save no more than that multiply instead
_WORTH, _TILE_WORTH = 0.97, 0.95  # of the time of what the rules choose, and with their tile, at most: the model is not better than that

_Plan = TypeVar("_Plan", MoeDispatchGemmPlan, MoeGemmCombinePlan)


def plan_moe_dispatch_gemm(
    problem: MoeDispatchGemmProblem,
    sm_count: int,
    split: Split | None = None,
    *,
    specialize: str | None = None,
    machine: Machine | None = None,
) -> MoeDispatchGemmPlan:
    """The plan of all calls of a problem on ``machine`` (None: as the environment says). Raises SplitError."""

    def make(split: Split | None, tile: GemmTile | None = None) -> MoeDispatchGemmPlan:
        return moe_dispatch_gemm.make_plan(problem, sm_count, split, tile, specialize)

    if not model_decides(problem, sm_count):
        return make(split)
    widths = _fitting(_GATED_WIDTHS, 2 * problem.n) if problem.gated else _fitting(_WIDTHS, problem.n)
    tiles = map(moe_dispatch_gemm.fitting_tile(problem), widths)
    return _fastest(make, tiles, _splits(split, _FETCHING, sm_count // 2), machine, sm_count, problem.max_tokens * problem.topology.size)


def plan_moe_gemm_combine(
    problem: MoeGemmCombineProblem,
    sm_count: int,
    split: Split | None = None,
    *,
    specialize: str | None = None,
    machine: Machine | None = None,
) -> MoeGemmCombinePlan:
    """The plan of all calls of a problem on ``machine`` (None: as the environment says). Raises SplitError."""

    def make(split: Split | None, tile: GemmTile | None = None) -> MoeGemmCombinePlan:
        return moe_gemm_combine.make_plan(problem, 0, sm_count, split, tile, specialize)

    if not model_decides(problem, sm_count):
        return make(split)
    tiles = map(moe_gemm_combine.fitting_tile(problem), _fitting(_WIDTHS, problem.n))
    tokens = problem.combined.max_tokens * problem.topology.size
    return _fastest(make, tiles, _splits(split, _COMBINING, sm_count // 4), machine, sm_count, tokens)


def _fitting(widths: Iterable[int], columns: int) -> Iterable[int]:
    """Those that are no wider than needed by a panel or more."""
    return (width for width in widths if width < columns + 64)


def _splits(asked: Split | None, counts: Iterable[int], most: int) -> list[Split | None]:
    """The split that was asked for, or the rules' and those with so many CTAs that copy rows."""
    return [asked] if asked is not None else [None, *(Split(intra_comm=n) for n in counts if n <= most)]


def _fastest(
    make: Callable[..., _Plan],
    tiles: Iterable[GemmTile],
    splits: Sequence[Split | None],
    machine: Machine | None,
    sm_count: int,
    tokens: int,
) -> _Plan:
    """What the rules choose, or the fastest of all tiles with all splits, if it is faster by more than the model can tell apart."""
    machine, rules = machine or machine_named(env.MACHINE.get(), sm_count), make(splits[0])

    def seconds(plan: Any) -> float:
        prediction = predict(plan, machine, tokens=tokens)
        known = prediction.seconds if prediction is not None else float("inf")
        return known if plan.tile == rules.tile else known / _TILE_WORTH

    plans = {plan: seconds(plan) for plan in (make(split, tile) for tile in (rules.tile, *tiles) for split in splits)}
    best = min(plans, key=lambda plan: plans[plan])
    alike = [plan for plan, known in plans.items() if plan.tile == best.tile and known <= _ALIKE * plans[best]]
    best = min(alike, key=lambda plan: plan.split.intra_comm or 0)
    return best if plans[best] < _WORTH * plans[rules] else rules
