"""What the model chooses for the MoE ops: never slower than the rules by its own account, and within what was asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.planner import moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.choose_moe import plan_moe_dispatch_gemm, plan_moe_gemm_combine
from mkernel.planner.gemm import SHARED_LIMIT
from mkernel.planner.machine import H100, H200
from mkernel.planner.moe import LINE, rows_per_piece
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombineProblem
from mkernel.planner.predict import predict
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

PIECE = 16 << 10


def drawn(rng: np.random.Generator) -> tuple[MoeDispatchGemmProblem, MoeGemmCombineProblem]:
    """Both kernels of a layer of any size."""
    ranks = int(rng.choice([1, 2, 4, 8]))
    world = Topology(ranks, ranks)
    hidden, inner = (8 * int(2 ** rng.uniform(4, top)) for top in (10, 11))
    experts, tokens = int(2 ** rng.uniform(0, 6)), int(2 ** rng.uniform(0, 14))
    topk = min(int(rng.integers(1, 9)), experts * ranks)
    most, gated, row_major = 64 + tokens * topk, bool(rng.integers(2)), bool(rng.integers(2))
    dispatched = MoeDispatchGemmProblem(world, inner, hidden, "bfloat16", row_major, experts, topk, tokens, most, 1, True, gated, 0.0)
    combined = MoeCombineProblem(world, hidden, "bfloat16", topk, experts, max_tokens=tokens, max_rows=most, weighted=True)
    return dispatched, MoeGemmCombineProblem(combined, inner, row_major)


def plans(machine: Any, problems: tuple[MoeDispatchGemmProblem, MoeGemmCombineProblem], sms: int, split: Split | None) -> list[Any]:
    """Chosen, then by the rules, of each kernel."""
    first, second = problems
    return [
        plan_moe_dispatch_gemm(first, sms, split, machine=machine),
        moe_dispatch_gemm.make_plan(first, sms, split),
        plan_moe_gemm_combine(second, sms, split, machine=machine),
        moe_gemm_combine.make_plan(second, 0, sms, split),
    ]


@pytest.mark.parametrize("machine", [H100, H200], ids=lambda machine: str(machine.name))
def test_what_is_chosen_is_no_slower_than_the_rules(rng: np.random.Generator, machine: Any) -> None:
    changed = 0
    for _ in range(30):
        problems = drawn(rng)
        tokens = problems[0].max_tokens * problems[0].topology.size
        found = plans(machine, problems, 132, None)
        for chosen, rules in zip(found[::2], found[1::2], strict=True):
            seconds = [predict(plan, machine, tokens=tokens).seconds for plan in (chosen, rules)]  # type: ignore[union-attr]
            assert chosen == rules or seconds[0] < seconds[1], problems
            assert chosen.spec.shared_bytes <= SHARED_LIMIT
            assert sum(n or 0 for n in dataclasses.astuple(chosen.split)) == 132
            changed += chosen != rules
    assert changed, "the rules were best everywhere, so that nothing was looked at"


def test_a_split_that_is_asked_for_is_taken(rng: np.random.Generator) -> None:
    for _ in range(20):
        asked = Split(intra_comm=int(rng.integers(1, 30)))
        for plan in plans(H200, drawn(rng), 132, asked):
            assert plan.split.intra_comm == asked.intra_comm


def test_few_sms_have_plans_too(rng: np.random.Generator) -> None:
    """Target cpu has a dozen, or fewer: nobody who fetches may be missing."""
    with env.override(MKERNEL_PLANNER="model"):
        for sms in (2, 3, 5, 8, 12, 16, 31):
            for plan in plans(H200, drawn(rng), sms, None):
                assert plan.split.intra_comm >= 1
                assert plan.split.compute >= 1


def test_slots_are_lines_and_pieces_hold_rows(rng: np.random.Generator) -> None:
    for _ in range(200):
        problem, _ = drawn(rng)
        assert problem.slot_bytes % LINE == 0
        assert 0 <= problem.slot_bytes - problem.row_bytes < LINE
        rows = rows_per_piece(problem.row_bytes)
        assert rows == 1 or rows * problem.row_bytes <= PIECE
        assert 32 % rows == 0, "a batch of 32 rows fills its pieces"
