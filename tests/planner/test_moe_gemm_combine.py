"""Plans of moe_gemm_combine: no deadlock, no two calls that meet in memory, names of flags, and the kernels compiled for a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel.ops.moe_gemm_combine import OP
from mkernel.planner import moe_combine
from mkernel.planner.gemm import SHARED_LIMIT
from mkernel.planner.moe_gemm_combine import MoeGemmCombinePlan, MoeGemmCombineProblem, make_plan
from mkernel.planner.proofs.areas import Call
from mkernel.planner.proofs.moe_gemm_combine import call_of
from mkernel.planner.split import Split
from mkernel.tools.routing import reference_routing
from tests.ops.combine_body import KINDS, WORLDS, draw_ids
from tests.planner import test_areas, test_moe_combine, test_moe_dispatch_gemm
from tests.shared import proofs


def plan_of(
    world: str, *, k: int = 64, row_major: bool = True, sms: int = 5, window_rows: int = 1 << 30, **combined: Any
) -> MoeGemmCombinePlan:
    problem = MoeGemmCombineProblem(test_moe_combine.plan_of(world, **combined).problem, k, row_major)
    return dataclasses.replace(make_plan(problem, 0, sms, Split(intra_comm=2)), scale=moe_combine.Scale(512, 512, window_rows))


def draw(rng: np.random.Generator, world: str) -> Call:
    """A call of any routing, whose areas begin and end anywhere; some experts have several rows of tiles."""
    sizes = {"topk": int(rng.integers(1, 4)), "columns": 8 * int(rng.integers(1, 20)), "max_tokens": int(rng.integers(1, 60))}
    plan = plan_of(world, **sizes, weighted=bool(rng.integers(2)), max_rows=1000, window_rows=int(rng.choice([0, 1 << 30])))
    problem = plan.problem.combined
    size = problem.topology.size
    ids = draw_ids(rng, str(rng.choice(KINDS)), size, problem.experts, problem.topk, problem.max_tokens)
    return call_of(plan, reference_routing(ids, problem.topology, problem.experts * size, problem.max_tokens, problem.max_rows))


@pytest.mark.parametrize("world", WORLDS)
def test_proofs(rng: np.random.Generator, world: str) -> None:
    for _ in range(2):
        call = draw(rng, world)
        proofs.check_call(call)
        proofs.check_order(draw(rng, world), draw(rng, world), "moe_gemm_combine twice")
        others = {"moe_combine": test_moe_combine.draw(rng, world), "moe_dispatch_gemm": test_moe_dispatch_gemm.draw(rng, world)}
        for how in test_areas.ops_of(world) if world in test_areas.WORLDS else ():
            others[how] = test_areas.draw(rng, how, world)
        for how, other in others.items():
            proofs.check_order(call, other, f"moe_gemm_combine, then {how}")
            proofs.check_order(other, call, f"{how}, then moe_gemm_combine")


def full(world: str) -> Call:
    """Every rank has tokens for every expert."""
    plan = plan_of(world, window_rows=0, topk=3)
    assert plan.windows == 3
    problem = plan.problem.combined
    size = problem.topology.size
    rng = np.random.default_rng(1)
    ids = [np.array([rng.permutation(problem.experts * size)[: problem.topk] for _ in range(problem.max_tokens)]) for _ in range(size)]
    return call_of(plan, reference_routing(ids, problem.topology, problem.experts * size, problem.max_tokens, problem.max_rows))


def test_steps_that_do_not_wait_for_entries_are_found() -> None:
    """The proof can fail: of each kind of step that writes, one that waits for nothing meets the call before."""
    call = full("2x2")
    kinds = {str(access.step[0]) for access in call.accesses if access.writes} - {"weigh"}
    assert kinds == {"zero", "tile", "finish", "post", "serve", "put", "fetch", "fetched"}
    for kind in kinds - {"zero", "fetched"}:  # what only this rank's own kernels access needs no entry
        with pytest.raises(AssertionError, match=r"moe_gemm_combine: .*, and then"):
            proofs.check_order(call, proofs.with_waits(call, kind, for_peer=False), "moe_gemm_combine")
    other = test_moe_combine.full("2x2")
    with pytest.raises(AssertionError, match=r"tells where rows are: .*, and then .*'zero'"):
        proofs.check_order(other, proofs.with_waits(call, "zero", for_peer=False), "tells where rows are")


def test_docs_list_the_areas() -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory_model.md").read_text()
    rows = [
        test_areas.row("moe_gemm_combine", area).replace("gemm_allreduce, moe-gemm-combine", "moe_gemm_combine")
        for area in full("2x2").areas
        if area.bytes
    ]
    assert [row for row in rows if row not in text] == []


@pytest.mark.parametrize("world", WORLDS)
def test_flags_have_names(world: str) -> None:
    plan = plan_of(world)
    for rank in range(plan.problem.topology.size):
        names = [plan.flag_name(rank, index) for index in range(plan.flag_words)]
        assert len(set(names)) == len(names)
    assert plan.flag_name(0, plan.expert_flag(0, 2)) == "products of expert 2 of rank 0"


def test_plans_differ_in_their_first_line() -> None:
    more: list[dict[str, Any]] = [{}, {"k": 72}, {"row_major": False}, {"topk": 5}, {"weighted": False}, {"max_rows": 77}, {"columns": 72}]
    more += [{"max_tokens": 9}, {"experts": 4}]
    plans = [*(plan_of("2x2", **kind) for kind in more), plan_of("4x1")]
    assert len({plan.describe().splitlines()[0] for plan in plans}) == len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize("experts", [1, 8, 256, 1024])
def test_the_table_of_experts_has_room(experts: int) -> None:
    plan = plan_of("1x4", experts=experts, columns=4096, max_rows=4096, sms=132)
    assert plan.spec.shared_bytes <= SHARED_LIMIT
    assert plan.tile.stages >= 3
    assert plan.flag_words < 1 << 17
    assert OP.make_plan(plan.problem, 16, 132).of_rows(0).digest == OP.make_plan(plan.problem, 0, 132).digest


@pytest.mark.parametrize(
    ("topk", "world", "row_major"),
    [
        (2, "2x2", True),
        (8, "1x4", False),
        (16, "2x2", True),
        *(
            pytest.param(topk, world, row_major, marks=pytest.mark.slow)
            for topk in (1, 2, 4, 8, 16)
            for world in ("1x1", "1x4", "2x2", "4x1")
            for row_major in (True, False)
        ),
    ],
)
def test_kernels_for_the_gpu(caplog: pytest.LogCaptureFixture, topk: int, world: str, row_major: bool) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    columns, dtype = (128, "float16") if topk == 2 else (7168, "bfloat16")
    combined = dataclasses.replace(plan_of(world, topk=topk, columns=columns, max_rows=32768).problem.combined, dtype=dtype)
    used: Any = cuda.resources(cuda.compile(make_plan(MoeGemmCombineProblem(combined, 2048, row_major), 0, 132).spec))
    assert used.local_bytes == 0, "spills"
    assert caplog.text == "", "no warning, such as wgmma serialized by the compiler"
