"""The kernels of MoE as a layer has them: compiled for sm_90a, without spills, and with tensor cores at work where they multiply."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.planner import moe_combine, moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombineProblem
from mkernel.planner.topology import Topology
from tests.nvrtc.test_kernels import (
    _own_cache,  # noqa: F401 - a fixture for every test here
    compiled,
)

_SMS, _EXPERTS = 132, 256
_WORLDS = {"1x1": Topology(1, 1), "1x2": Topology(2, 2), "1x4": Topology(4, 4), "2x2": Topology(4, 2), "4x8": Topology(32, 8)}


@pytest.mark.cases(
    world=tuple(_WORLDS),
    n=(128, 2048, 3368, 13280),
    k=(7168, 7432),
    experts=(4, 29, _EXPERTS // 4),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    topk=(1, 8),
    weighted=(True, False),
    gated=(True, False),
    width=(64, 128, 192, 256),
    valid=lambda gated, width, **_: not gated or width in (128, 256),
)
@pytest.mark.drawn(2)
def test_dispatch(
    caplog: pytest.LogCaptureFixture, world: str, n: int, k: int, experts: int, dtype: str, row_major: bool, topk: int, weighted: bool,
    gated: bool, width: int,
) -> None:  # fmt: skip
    problem = MoeDispatchGemmProblem(_WORLDS[world], n, k, dtype, row_major, experts, topk, 8192, 65536, 1, weighted, gated, 0.0)
    plan = moe_dispatch_gemm.make_plan(problem, _SMS, tile=moe_dispatch_gemm.fitting_tile(problem)(width))
    assert any(name.startswith("HGMMA") for name in compiled(caplog, plan.spec))


def _combined(world: str, dtype: str, topk: int, weighted: bool, canonical: bool) -> MoeCombineProblem:
    topology = _WORLDS[world]
    return MoeCombineProblem(
        topology, 7168, dtype, topk, _EXPERTS // topology.size, max_tokens=8192, max_rows=65536, weighted=weighted, canonical=canonical
    )


@pytest.mark.cases(
    world=tuple(_WORLDS),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    topk=(1, 8),
    weighted=(True, False),
    canonical=(True, False),
    width=(64, 128, 192, 256),
)
@pytest.mark.drawn(2)
def test_gemm_combine(
    caplog: pytest.LogCaptureFixture, world: str, dtype: str, row_major: bool, topk: int, weighted: bool, canonical: bool, width: int
) -> None:
    problem = MoeGemmCombineProblem(_combined(world, dtype, topk, weighted, canonical), 2048, row_major)
    plan = moe_gemm_combine.make_plan(problem, 0, _SMS, tile=moe_gemm_combine.fitting_tile(problem)(width))
    assert any(name.startswith("HGMMA") for name in compiled(caplog, plan.spec))


@pytest.mark.cases(world=tuple(_WORLDS), dtype=("bfloat16", "float16"), topk=(1, 8), weighted=(True, False), canonical=(True, False))
@pytest.mark.drawn(1)
def test_combine(caplog: pytest.LogCaptureFixture, world: str, dtype: str, topk: int, weighted: bool, canonical: bool) -> None:
    assert compiled(caplog, moe_combine.make_plan(_combined(world, dtype, topk, weighted, canonical), 0, _SMS).spec)
