"""Plans for as many ranks as a world may have: their flags have room, and one op says where it has not enough SMs."""

from __future__ import annotations

from typing import Any

import pytest

from mkernel import abi
from mkernel.bench.cases import ops
from mkernel.errors import ArgumentError
from mkernel.ops.moe import check_columns
from mkernel.ops.op import BUILT_IN, find
from mkernel.planner import moe_combine, moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.split import SplitError
from mkernel.planner.topology import Topology

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


@pytest.mark.parametrize("per_node", [8, 4])
@pytest.mark.parametrize("op", [name for name in BUILT_IN if find(name).bench])
def test_plans(op: str, per_node: int) -> None:
    topology = Topology(abi.MAX_RANKS, per_node)
    if op.startswith("moe"):
        assert 0 < moe_plan(op, topology).flag_words <= FLAG_WORDS
        return
    for size in ops()[op].demo_sizes("cuda", topology.size):
        plan: Any = ops()[op].case(size, topology, "bfloat16").plan(SMS)
        assert 0 < plan.flag_words <= FLAG_WORDS
        assert getattr(plan, "counted_words", 0) <= abi.COUNTED_WORDS


def test_attention_needs_an_sm_for_each_node_that_it_sends_to() -> None:
    with pytest.raises(SplitError, match=r"compute gets -?\d+ of 132 SMs"):
        ops()["ring_attention"].case("1x16x16x8192x128", Topology(abi.MAX_RANKS, 2), "bfloat16").plan(SMS)
