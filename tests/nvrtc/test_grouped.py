"""The grouped GEMM compiled for sm_90a without a GPU: what test_kernels.py asks of allgather_gemm."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.planner.gemm import GemmTile
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from tests.nvrtc.test_kernels import (
    _own_cache,  # noqa: F401 - a fixture for every test here
    compiled,
    relative_cost,
)
from tests.ops.grouped_op import GroupedPlan, GroupedProblem

_EXPERTS = 32


def plan_of(block_n: int, row_major: bool, dtype: str, gated: bool, specialized: bool, k: int = 4096) -> GroupedPlan:
    problem = GroupedProblem(
        Topology(4, 4), 4 * block_n + 64, k, _EXPERTS, dtype, row_major, gated=gated, block_n=block_n, specialized=specialized
    )
    return GroupedPlan(problem, 8192, Split(128, 4, 0, 0), GemmTile.deepest(block_n).stages, _EXPERTS)


def _valid(block_n: int, gated: bool, **_: object) -> bool:
    return not gated or block_n % 128 == 0


@pytest.mark.cases(
    block_n=(64, 128, 192, 256),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    gated=(False, True),
    specialized=(True, False),
    valid=_valid,
)
@pytest.mark.drawn(3)
def test_kernel(caplog: pytest.LogCaptureFixture, block_n: int, row_major: bool, dtype: str, gated: bool, specialized: bool) -> None:
    instructions = compiled(caplog, plan_of(block_n, row_major, dtype, gated, specialized).spec)
    operations = {name.split(".")[0] for name in instructions}
    widths = {block_n}
    if block_n // 2 % (128 if gated else 64) == 0:
        widths.add(block_n // 2)  # of short tiles
    kind = ".BF16" if dtype == "bfloat16" else ""
    assert {name for name in instructions if name.startswith("HGMMA")} == {f"HGMMA.64x{n}x16.F32{kind}" for n in widths}
    assert {"UTMALDG", "UTMASTG"} <= operations, "TMA"
    assert "STG.E.128" in instructions, "masked blocks"
    assert ("MUFU.EX2" in instructions) == gated
    assert not operations & {"STL", "LDL", "STACK"}, "local memory"


def test_a_table_of_many_experts_fits(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(256, True, "bfloat16", gated=True, specialized=False)
    assert plan.spec.shared_bytes <= 232448
    compiled(caplog, dataclasses.replace(plan, stages=plan.stages - 1, max_experts=2048).spec)


@pytest.mark.slow
def test_compiling_is_about_as_quick_as_allgather_gemm() -> None:
    assert relative_cost(lambda k: plan_of(256, True, "bfloat16", True, True, k).spec) < 1.5
