"""Parameter structs exist once: what the host fills in lies where the kernel of each op reads it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mkernel.jit.spec import KernelSpec
from mkernel.ops.op import BUILT_IN, Op, find
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombineProblem
from mkernel.planner.reduce import ReduceProblem
from mkernel.planner.ring_problem import RingAttentionProblem
from mkernel.planner.topology import Topology
from tests.shared.mirrors import errors_of_mirror, layout

TOPOLOGY = Topology(4, 2)
PROBLEMS: dict[str, list[Any]] = {
    "allgather_gemm": [AllGatherGemmProblem(TOPOLOGY, 256, 64, "bfloat16", True)],
    "gemm_reduce_scatter": [ReduceProblem("gemm_reduce_scatter", TOPOLOGY, 256, 64, "bfloat16", True)],
    "gemm_allreduce": [
        ReduceProblem("gemm_allreduce", topology, 256, 64, "bfloat16", True, "output", algorithm)
        for topology in (TOPOLOGY, Topology(4, 4))
        for algorithm in ("one_shot", "two_shot")
    ],
    "moe_dispatch_gemm": [MoeDispatchGemmProblem(TOPOLOGY, 256, 64, "bfloat16", True, 2, 4, 64, 512, 1, True, True, 7.0)],
    "moe_combine": [MoeCombineProblem(TOPOLOGY, 256, "bfloat16", 2, 4, 64, 512, True)],
    "moe_gemm_combine": [MoeGemmCombineProblem(MoeCombineProblem(TOPOLOGY, 256, "bfloat16", 2, 4, 64, 512, True), 64, True)],
    "ring_attention": [RingAttentionProblem(TOPOLOGY, 8, 2, 64, "bfloat16", True, "zigzag", 0.125)],
    "ring_attention_varlen": [RingAttentionProblem(TOPOLOGY, 8, 2, 64, "bfloat16", True, "zigzag", 0.125, packed=True)],
}


def specs(op: Op[Any]) -> set[KernelSpec]:
    """Kernels of every template of an op."""
    plans = [op.make_plan(problem, rows, 16) for problem in PROBLEMS[op.name] for rows in (8, 4096)]
    return set({plan.spec.name: plan.spec for plan in plans}.values())


def test_all_ops_are_checked() -> None:
    assert set(PROBLEMS) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_mirror_is_of_the_header(name: str) -> None:
    op = find(name)
    assert ctypes.sizeof(op.parameters) == layout(op.parameters)["sizeof(mkernel::Parameters)"]
    for spec in specs(op):
        assert spec.parameter_bytes == ctypes.sizeof(op.parameters)
        assert errors_of_mirror(spec, op.parameters) == "", spec.name


def test_fields_that_changed_places_are_found() -> None:
    op = find("gemm_reduce_scatter")
    fields = list(op.parameters._fields_)
    first = next(i for i, (name, *_) in enumerate(fields) if name == "partial_offset")
    fields[first], fields[first + 1] = fields[first + 1], fields[first]
    wrong = type("Wrong", (ctypes.Structure,), {"_fields_": fields})
    found = errors_of_mirror(next(iter(specs(op))), wrong)
    assert "offsetof(mkernel::Parameters, partial_offset) is not" in found
    assert "offsetof(mkernel::Parameters, sum_offset) is not" in found
