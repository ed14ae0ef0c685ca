"""What a piece of a copy takes: one thread copies, and each of its instructions delays all pieces (kernels_src/comm/copy.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.jit import cuda
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.choice import plan_allgather_gemm, plan_reduce
from mkernel.planner.choose_moe import plan_moe_dispatch_gemm, plan_moe_gemm_combine
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombineProblem
from mkernel.planner.reduce import ReduceProblem
from mkernel.planner.ring_problem import RingAttentionProblem
from mkernel.planner.topology import Topology
from mkernel.runtime.plan import Plan
from tests.nvrtc.loops import Flow
from tests.nvrtc.test_attention import ring_plan
from tests.nvrtc.test_kernels import _own_cache  # noqa: F401 - a fixture for every test here
from tests.ops.planted_bug import Bug

_SMS = 132


def _gather(world: Topology) -> Plan:
    return plan_allgather_gemm(AllGatherGemmProblem(world, 4096, 8192, "bfloat16", False), 8192, _SMS)


def _reduce(world: Topology) -> Plan:
    return plan_reduce(ReduceProblem("gemm_allreduce", world, 8192, 4096, "bfloat16", False), 8192, _SMS)


def _ring(world: Topology, *, packed: bool = False) -> Plan:
    return ring_plan(RingAttentionProblem(world, 8, 2, 128, "bfloat16", False, "contiguous", 0.125, packed=packed))


def _packed(world: Topology) -> Plan:
    return _ring(world, packed=True)


def _dispatch(world: Topology) -> Plan:
    sizes = world, 2048, 4096, "bfloat16", True, 128, 8, 1024, 8192
    return plan_moe_dispatch_gemm(MoeDispatchGemmProblem(*sizes, alignment=1, weighted=False, gated=True, clamp=0.0), _SMS)


def _combine(world: Topology) -> Plan:
    combined = MoeCombineProblem(world, 4096, "bfloat16", 8, 128, 1024, 8192, weighted=True)
    return plan_moe_gemm_combine(MoeGemmCombineProblem(combined, 2048, True), _SMS)


def rounds(plan: Plan) -> list[int]:
    """The fewest instructions from the load of a piece to the store of another and to the next load, of each copy of a kernel."""
    sass = cuda.disassemble(cuda.compile(plan.spec))
    assert sass is not None, "no nvdisasm: pip install 'mkernel[test]'"
    flow = Flow(sass)
    stores = flow.places(lambda one: one.startswith(("UBLKCP.G.S", "UTMASTG")))
    return flow.shortest_round(stores, flow.places(lambda one: one.startswith(("UBLKCP.S.G", "UTMALDG"))))


# A tenth more than NVRTC 13.5 makes. With 158 in place of 128 a gather took 1.09 times as long (docs/speed_log.md).
@pytest.mark.parametrize(
    ("make", "world", "most"),
    [
        (_gather, (2, 2), [105]),
        (_gather, (8, 8), [131]),
        (_gather, (4, 2), [97, 98, 98]),
        (_reduce, (4, 4), [101]),
        (_reduce, (4, 2), [101]),
        (_ring, (4, 4), [107]),
        (_packed, (4, 2), [98, 99]),
        (_dispatch, (4, 2), [120, 159]),
        (_combine, (4, 4), [130]),
    ],
)
@pytest.mark.drawn(3)
def test_instructions_of_a_piece(make: Callable[[Topology], Plan], world: tuple[int, int], most: list[int]) -> None:
    found = rounds(make(Topology(*world)))
    assert len(found) == len(most)
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), (found, most)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("ops/allgather_gemm.cuh", "ptx::bulk_store(heaps[i] + to", "ptx::bulk_store(shared_heap(*entered, local_peer(p.world, i)) + to"),
        ("comm/copy.cuh", "if (storing.bytes == 0) {", "storing.item = item<Chunks>(stored - 1);\n      if (storing.bytes == 0) {"),
    ],
    ids=("heaps of the node", "item of the chunk"),
)
def test_what_is_worked_out_for_each_piece_is_seen(file: str, before: str, after: str, tmp_path: Path) -> None:
    plan = _gather(Topology(8, 8))
    (without,) = rounds(plan)
    with Bug("more for each piece", file, before, after).in_force(tmp_path / "kernels_src"):
        (found,) = rounds(plan)
    assert found > 1.1 * without
