"""Which tiles the MoE ops multiply, and how many CTAs fetch rows: what is predicted to be fastest with as many tokens as there may be.

A plan serves calls of any number of tokens. Where GPUs have not confirmed the model, the rules of each op choose, as in ``planner.choice``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
_DISPATCHED_WIDTHS = (256, 128)  # with others, tiles of few rows would load slots of the next expert, which are being written
_FETCHING, _COMBINING = (8, 16, 24, 32, 48, 64), (8, 12, 16, 24, 32)  # CTAs
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
    rules = moe_dispatch_gemm.make_plan(problem, sm_count, split, specialize=specialize)
    if not model_decides(problem, sm_count):
        return rules
    return _dispatch(problem, sm_count, split, specialize, machine or machine_named(env.MACHINE.get(), sm_count), rules)


@functools.lru_cache(maxsize=256)
def _dispatch(
    problem: MoeDispatchGemmProblem,
    sm_count: int,
    split: Split | None,
    specialize: str | None,
    machine: Machine,
    rules: MoeDispatchGemmPlan,
) -> MoeDispatchGemmPlan:
    def plans() -> Iterable[MoeDispatchGemmPlan]:
        splits = [split] if split is not None else [None, *(Split(intra_comm=n) for n in _FETCHING if n <= sm_count // 2)]
        widths = () if problem.gated else _DISPATCHED_WIDTHS
        for tile in _tiles(rules.tile, moe_dispatch_gemm.widest(problem), moe_dispatch_gemm.fitting_tile(problem), widths):
            for one in splits:
                yield moe_dispatch_gemm.make_plan(problem, sm_count, one, tile, specialize)

    return _fastest(rules, plans(), machine, problem.max_tokens * problem.topology.size)


def plan_moe_gemm_combine(
    problem: MoeGemmCombineProblem,
    sm_count: int,
    split: Split | None = None,
    *,
    specialize: str | None = None,
    machine: Machine | None = None,
) -> MoeGemmCombinePlan:
    """The plan of all calls of a problem on ``machine`` (None: as the environment says). Raises SplitError."""
    rules = moe_gemm_combine.make_plan(problem, 0, sm_count, split, specialize=specialize)
    if not model_decides(problem, sm_count):
        return rules
    return _combine(problem, sm_count, split, specialize, machine or machine_named(env.MACHINE.get(), sm_count), rules)


@functools.lru_cache(maxsize=256)
def _combine(
    problem: MoeGemmCombineProblem, sm_count: int, split: Split | None, specialize: str | None, machine: Machine, rules: MoeGemmCombinePlan
) -> MoeGemmCombinePlan:
    def plans() -> Iterable[MoeGemmCombinePlan]:
        splits = [split] if split is not None else [None, *(Split(intra_comm=n) for n in _COMBINING if n <= sm_count // 4)]
        for tile in _tiles(rules.tile, problem.n, moe_gemm_combine.fitting_tile(problem), _WIDTHS):
            for one in splits:
                yield moe_gemm_combine.make_plan(problem, 0, sm_count, one, tile, specialize)

    return _fastest(rules, plans(), machine, problem.combined.max_tokens * problem.topology.size)


def _tiles(usual: GemmTile, columns: int, fitting: Callable[[int], GemmTile], widths: Iterable[int]) -> Iterable[GemmTile]:
    """What the rules take, and tiles of other widths, none of them wider than needed by a panel or more."""
    yield usual
    for width in widths:
        if width != usual.block_n and width < columns + 64:
            yield fitting(width)


def _fastest(rules: _Plan, plans: Iterable[_Plan], machine: Machine, tokens: int) -> _Plan:
    def seconds(plan: Any) -> float:
        prediction = predict(plan, machine, tokens=tokens)
        known = prediction.seconds if prediction is not None else float("inf")
        return known if plan.tile == rules.tile else known / _TILE_WORTH

    best = min(plans, key=seconds)
    return best if seconds(best) < _WORTH * seconds(rules) else rules
