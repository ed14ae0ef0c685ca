"""How long a call takes, by its plan: the cost model's one entrance (docs/model.md)."""

from __future__ import annotations

from typing import Any

from mkernel.planner.allgather_gemm import AllGatherGemmPlan
from mkernel.planner.machine import Machine
from mkernel.planner.moe_combine import MoeCombinePlan
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmPlan
from mkernel.planner.moe_gemm_combine import MoeGemmCombinePlan
from mkernel.planner.predict_attention import predict_ring_attention
from mkernel.planner.predict_gemm import predict_allgather_gemm, predict_reduce
from mkernel.planner.predict_moe import predict_moe_combine, predict_moe_dispatch_gemm, predict_moe_gemm_combine
from mkernel.planner.prediction import ALONE, Conditions, Prediction
from mkernel.planner.reduce import ReducePlan
from mkernel.planner.ring_attention import RingAttentionPlan

__all__ = ["predict"]


def predict(plan: Any, machine: Machine, conditions: Conditions = ALONE, tokens: int | None = None) -> Prediction | None:
    """The time of one call of ``plan``; None where nothing is known of its op.

    Parameters
    ----------
    tokens
        Of all ranks: of the MoE ops, whose plans do not say how many a call has. Their routing is taken for uniform.
    """
    if isinstance(plan, AllGatherGemmPlan):
        return predict_allgather_gemm(plan, machine, conditions)
    if isinstance(plan, ReducePlan):
        return predict_reduce(plan, machine, conditions)
    if isinstance(plan, RingAttentionPlan):
        return predict_ring_attention(plan, machine, conditions)
    if tokens is not None and isinstance(plan, MoeDispatchGemmPlan):
        return predict_moe_dispatch_gemm(plan, machine, conditions, tokens)
    if tokens is not None and isinstance(plan, MoeGemmCombinePlan):
        return predict_moe_gemm_combine(plan, machine, conditions, tokens)
    if tokens is not None and isinstance(plan, MoeCombinePlan):
        return predict_moe_combine(plan, machine, conditions, tokens)
    return None
