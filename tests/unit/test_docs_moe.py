"""What docs/moe.md says of memory and of the routing arrays."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from mkernel.planner import moe_combine, moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.topology import Topology
from mkernel.tools.routing import reference_routing

PAGE = (Path(__file__).parents[2] / "docs" / "moe.md").read_text()


def test_the_example_of_routing_is_what_the_reference_says() -> None:
    (block,) = re.findall(r"```text\n +rank 0 +rank 1\n(.*?)```", PAGE, re.DOTALL)
    told: dict[str, list[str]] = {}
    name = ""
    for line in block.splitlines():
        name = line[:16].strip() or name  # a line without a name goes on
        for rank, cell in enumerate((line[16:73], line[73:])):
            told.setdefault(name, ["", ""])[rank] += cell.strip()
    arrays = {name: [ast.literal_eval(text) for text in texts] for name, texts in told.items()}
    ids = [np.array(of_rank, np.int32) for of_rank in arrays["topk_ids"]]
    known = reference_routing(ids, Topology(2, 1), num_experts=4, max_tokens=3, max_rows=6)
    assert arrays.keys() == {"topk_ids", "expert_offsets", "source", "rows", "sums", "listed", "counts"}
    for name, by_rank in arrays.items():
        for of_rank, text in zip(known, by_rank, strict=True):
            array = getattr(of_rank, name).tolist()
            assert (array[: len(text)] if name == "source" else array) == text, name


@pytest.mark.parametrize(("size", "per_node"), [(1, 1), (8, 8), (4, 2), (4, 1)])
def test_the_bytes_are_those_of_the_plans(size: int, per_node: int) -> None:
    """But for what barriers, counters and alignment need: less than a hundredth."""
    topology, h, f, experts, k, tokens, rows = Topology(size, per_node), 7168, 2048, 32, 8, 4096, 70_000
    w, n = topology.size, topology.num_nodes
    combined = moe_combine.MoeCombineProblem(topology, h, "bfloat16", k, experts, tokens, rows, weighted=True)
    sums = (n - 1) * tokens * (4 * h + 4 * k)
    dispatch = moe_dispatch_gemm.MoeDispatchGemmProblem(
        topology, f, h, "bfloat16", True, experts, k, tokens, rows, alignment=1, weighted=True, gated=False, clamp=0.0
    )
    second = moe_gemm_combine.make_plan(moe_gemm_combine.MoeGemmCombineProblem(combined, f, True), 0, 132)
    fetched = n * tokens * k * 2 * h * (second.windows > 1)
    expected = {
        moe_combine.make_plan(combined, 0, 132): rows * 2 * h * (per_node > 1) + sums,
        second: rows * 2 * h + sums + fetched,
        moe_dispatch_gemm.make_plan(dispatch, 132): (rows + 64 * experts) * 2 * h
        + tokens * 2 * h * (per_node > 1)
        + (n - 1) * tokens * 4 * h
        + w * tokens * (16 + 8 * k),
    }
    for plan, told in expected.items():
        assert told == pytest.approx(plan.workspace_bytes, rel=0.01, abs=16 << 10), plan.op
