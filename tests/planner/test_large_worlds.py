"""Plans for as many ranks as a world may have: their flags have room, and one op says where it has not enough SMs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mkernel import abi
from mkernel.bench.cases import ops
from mkernel.errors import ArgumentError
from mkernel.jit import cpu
from mkernel.ops.moe import check_columns
from mkernel.ops.op import BUILT_IN, find
from mkernel.ops.ring_attention import checked_problem
from mkernel.planner import moe_combine, moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.ring_attention import make_plan
from mkernel.planner.ring_problem import MOST_RANKS, RingAttentionProblem, Sizes
from mkernel.planner.split import SplitError
from mkernel.planner.topology import Topology
from mkernel.runtime.arrays.views import TensorView

FLAG_WORDS = (abi.COUNTED_OFFSET - abi.SIGNAL_FLAGS) // 8
SMS = 132


def moe_plan(op: str, topology: Topology) -> Any:
    """4096 tokens of each rank, each to 8 of as many experts as there are ranks; dispatched over as many nodes as that can be."""
    combined = moe_combine.MoeCombineProblem(topology, 7168, "bfloat16", 8, 1, 4096, 32768, True)
    if op == "moe_combine":
        return moe_combine.make_plan(combined, 0, SMS)
    if op == "moe_gemm_combine":
        return moe_gemm_combine.make_plan(moe_gemm_combine.MoeGemmCombineProblem(combined, 2048, True), 0, SMS)
    with pytest.raises(ArgumentError, match=r"choices and nodes \(\d+\) together fewer than 63"):
        check_columns(topology, 8)
    topology = Topology(54 * topology.ranks_per_node, topology.ranks_per_node)
    check_columns(topology, 8)
    dispatched = moe_dispatch_gemm.MoeDispatchGemmProblem(
        topology, 2048, 7168, "bfloat16", True, 1, 8, 4096, 32768, 128, True, False, 0.0
    )  # fmt: skip
    return moe_dispatch_gemm.make_plan(dispatched, SMS)


def plans(op: str, per_node: int) -> list[Any]:
    """Plans of the largest world in which an op can be called."""
    topology = Topology((MOST_RANKS if op == "ring_attention" else abi.MAX_RANKS) // per_node * per_node, per_node)
    if op.startswith("moe"):
        return [moe_plan(op, topology)]
    return [ops()[op].case(size, topology, "bfloat16").plan(SMS) for size in ops()[op].demo_sizes("cuda", topology.size)]


OPS = [name for name in BUILT_IN if find(name).bench]


@pytest.mark.parametrize("per_node", [8, 4])
@pytest.mark.parametrize("op", OPS)
def test_plans(op: str, per_node: int) -> None:
    for plan in plans(op, per_node):
        assert 0 < plan.flag_words <= FLAG_WORDS
        assert getattr(plan, "counted_words", 0) <= abi.COUNTED_WORDS


@pytest.mark.parametrize("op", OPS)
@pytest.mark.drawn(1)
def test_kernels_compile(op: str) -> None:
    """What is asserted of constants holds there: sizes of tables, bits of what names a rank."""
    assert cpu.compile(plans(op, 8)[-1].spec).exists()


def test_a_ring_has_fewer_ranks() -> None:
    world: Any = SimpleNamespace(size=MOST_RANKS + 1)
    q = TensorView(0, (1, 8, 16, 128), (32768, 4096, 256, 2), "bfloat16")
    with pytest.raises(ArgumentError, match="world = 254 ranks: at most 253 attend together"):
        checked_problem(world, q, q, 8, 8, causal=True, scale=None, layout="contiguous", packed=False)
    largest = RingAttentionProblem(Topology(MOST_RANKS, 11), 8, 8, 128, "bfloat16", True, "zigzag", 0.1, False, True)
    assert cpu.compile(make_plan(largest, Sizes(1, 256).code, SMS).spec).exists()


def test_attention_needs_an_sm_for_each_node_that_it_sends_to() -> None:
    with pytest.raises(SplitError, match=f"inter_send needs an SM for each rank that it writes to.*{abi.MAX_RANKS // 2 - 1}"):
        ops()["ring_attention"].case("1x16x16x8192x128", Topology(abi.MAX_RANKS, 2), "bfloat16").plan(SMS)
