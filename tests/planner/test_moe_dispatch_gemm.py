"""Plans of moe_dispatch_gemm: no deadlock, no two calls that meet in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mkernel.planner.moe import most_rows
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmPlan, MoeDispatchGemmProblem, make_plan
from mkernel.planner.proofs.areas import Call
from mkernel.planner.proofs.moe_dispatch_gemm import call_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from tests.ops.moe_body import ROUTINGS, Model, draw_ids, draw_model
from tests.planner import test_areas
from tests.planner.test_moe_combine import draw as draw_combine
from tests.shared import proofs

WORLDS = {"1x1": (1, 1), "1x3": (3, 3), **test_areas.WORLDS}


def plan_of(world: str, model: Model, put_rows: int = 3) -> MoeDispatchGemmPlan:
    topology = Topology(*WORLDS[world])
    rows = most_rows(topology.size, model.max_tokens, model.topk, model.experts, model.alignment)
    problem = MoeDispatchGemmProblem(
        topology, model.f, model.h, model.dtype, True, model.experts, model.topk, model.max_tokens, rows, model.alignment,
        model.weighted, model.gated, 0.0,
    )  # fmt: skip
    return dataclasses.replace(make_plan(problem, 6, Split(intra_comm=2)), put_rows=put_rows)


def draw(rng: np.random.Generator, world: str) -> Call:
    """A call of any routing, whose areas begin and end anywhere; on some ranks x lies on the heap."""
    size = WORLDS[world][0]
    model = dataclasses.replace(draw_model(rng, size), max_tokens=int(rng.integers(1, 40)))
    ids: list[Any] = draw_ids(rng, model, size, str(rng.choice(ROUTINGS)))
    return call_of(plan_of(world, model, int(rng.integers(1, 9))), ids, np.flatnonzero(rng.random(size) < 0.4).tolist())


@pytest.mark.parametrize("world", WORLDS)
def test_proofs(rng: np.random.Generator, world: str) -> None:
    for _ in range(2):
        call = draw(rng, world)
        proofs.check_call(call)
        proofs.check_order(draw(rng, world), draw(rng, world), "moe_dispatch_gemm twice")
        others = [(how, test_areas.draw(rng, how, world)) for how in (test_areas.ops_of(world) if world in test_areas.WORLDS else ())]
        if world in ("1x1", "1x2", "1x4", "2x2", "4x1", "3x2"):
            others.append(("moe_combine", draw_combine(rng, world)))
        for how, other in others:
            proofs.check_order(call, other, f"moe_dispatch_gemm, then {how}")
            proofs.check_order(other, call, f"{how}, then moe_dispatch_gemm")


def full(world: str) -> Call:
    """Every rank has tokens for every expert, and no x on the heap."""
    rng, model = np.random.default_rng(1), Model(64, 64, 2, 2, "float16", True, False, True, 1, 40)
    size = WORLDS[world][0]
    ids = [np.array([rng.permutation(2 * size)[:2] for _ in range(40)]) for _ in range(size)]
    return call_of(plan_of(world, model), ids)


def test_steps_that_do_not_wait_for_entries_are_found() -> None:
    """The proof can fail: of each kind of step that writes to what ranks share, one that waits for nothing meets the call before."""
    call = full("2x2")
    for kind in ("tell", "stage", "post", "put"):
        with pytest.raises(AssertionError, match=r"moe_dispatch_gemm: .*, and then"):
            proofs.check_order(call, proofs.with_waits(call, kind, for_peer=False), "moe_dispatch_gemm")


def test_docs_list_the_areas() -> None:
    text = (test_areas.Path(__file__).parents[2] / "docs" / "memory_model.md").read_text()
    rows = [test_areas.row("moe_dispatch_gemm", area) for area in full("2x2").areas if area.bytes]
    assert [row for row in rows if row not in text] == []
