"""Plans of moe_combine: no deadlock, no two calls that meet in memory, names of flags, and what the GPU's compiler makes of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkernel.ops.moe_combine import OP
from mkernel.planner.moe_combine import MoeCombinePlan, MoeCombineProblem, Scale, make_plan
from mkernel.planner.proofs.areas import Call
from mkernel.planner.proofs.moe_combine import call_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from mkernel.tools.routing import reference_routing
from tests.ops.combine_body import KINDS, WORLDS, draw_ids
from tests.planner import test_areas
from tests.shared import proofs


def plan_of(world: str, *, topk: int = 4, columns: int = 64, max_tokens: int = 20, experts: int = 3, max_rows: int = 0,
            weighted: bool = True, sms: int = 5, scale: Scale | None = None) -> MoeCombinePlan:  # fmt: skip
    topology = Topology(*WORLDS[world])
    room = max_rows or max_tokens * topology.size * min(topk, experts)
    problem = MoeCombineProblem(topology, columns, "float16", topk, experts, max_tokens, room, weighted)
    return make_plan(problem, 0, sms, Split(intra_comm=2), scale or Scale(512, 512))


def draw(rng: np.random.Generator, world: str) -> Call:
    """A call of any routing, whose areas begin and end anywhere; on some ranks the rows lie on the heap."""
    sizes = {"topk": int(rng.integers(1, 5)), "columns": 8 * int(rng.integers(1, 20)), "max_tokens": int(rng.integers(1, 24))}
    plan = plan_of(world, **sizes, weighted=bool(rng.integers(2)))
    problem = plan.problem
    size = problem.topology.size
    ids = draw_ids(rng, str(rng.choice(KINDS)), size, problem.experts, problem.topk, problem.max_tokens)
    routing = reference_routing(ids, problem.topology, problem.experts * size, problem.max_tokens, problem.max_rows)
    return call_of(plan, routing, np.flatnonzero(rng.random(size) < 0.5).tolist())


@pytest.mark.parametrize("world", WORLDS)
def test_proofs(rng: np.random.Generator, world: str) -> None:
    for _ in range(3):
        call = draw(rng, world)
        proofs.check_call(call)
        proofs.check_order(draw(rng, world), draw(rng, world), "moe_combine twice")
        for how in test_areas.ops_of(world) if world in test_areas.WORLDS else ():
            other = test_areas.draw(rng, how, world)
            proofs.check_order(call, other, f"moe_combine, then {how}")
            proofs.check_order(other, call, f"{how}, then moe_combine")


def full(world: str) -> Call:
    """Every rank has tokens for every expert, and no rows on the heap."""
    plan = plan_of(world)
    problem = plan.problem
    size = problem.topology.size
    rng = np.random.default_rng(1)
    ids = [np.array([rng.permutation(problem.experts * size)[: problem.topk] for _ in range(problem.max_tokens)]) for _ in range(size)]
    return call_of(plan, reference_routing(ids, problem.topology, problem.experts * size, problem.max_tokens, problem.max_rows))


def test_steps_that_do_not_wait_for_entries_are_found() -> None:
    """The proof can fail: of each kind of step that writes, one that waits for nothing meets the call before."""
    call = full("2x2")
    kinds = {str(access.step[0]) for access in call.accesses if access.writes} - {"weigh", "combine", "done"}
    assert kinds == {"tell", "stage", "post", "serve", "put"}
    for kind in kinds:
        with pytest.raises(AssertionError, match=r"moe_combine: .*, and then"):
            proofs.check_order(call, proofs.with_waits(call, kind, for_peer=False), "moe_combine")


def test_docs_list_the_areas() -> None:
    text = (test_areas.Path(__file__).parents[2] / "docs" / "memory_model.md").read_text()
    rows = [
        test_areas.row("moe_combine", area).replace("gemm_allreduce, moe-combine", "moe_combine")
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


def test_names_say_who_tells_what() -> None:
    plan = plan_of("3x2", topk=3, max_tokens=20)
    layout = plan.combining
    assert plan.flag_name(3, 0) == "where the rows of rank 2 are"
    assert plan.flag_name(3, plan.row_flag(1, 2)) == "rows 8 to 11 of rank 3"
    assert plan.flag_name(3, plan.done_flag(0, 1)) == "CTA 1 of rank 2 has read what it reads"
    assert plan.flag_name(3, layout.sum_flag(1, 7)) == "sums of tokens 7 to 7 in the list of rank 5"
    assert plan.flag_name(3, layout.arrived_flag(2, 5)) == "chunk 1 of the sums of node 0"
    assert plan.flag_name(3, layout.weights_flag(2)) == "weights of rank 1"


@pytest.mark.parametrize(("max_tokens", "max_rows"), [(1, 1), (1000, 8000), (65536, 524288)])
def test_flags_stay_few(max_tokens: int, max_rows: int) -> None:
    plan = plan_of("3x2", max_tokens=max_tokens, max_rows=max_rows, columns=7168, sms=132, scale=Scale())
    assert plan.flag_words < 1 << 16
    assert plan.combining.chunk % plan.combining.group == 0
    assert plan.combining.chunk * plan.problem.row_bytes >= 512 * 1024 or plan.combining.chunks == 1


def test_plans_differ_in_their_first_line() -> None:
    plans = [
        plan_of("2x2"),
        plan_of("2x2", topk=5),
        plan_of("2x2", weighted=False),
        plan_of("2x2", max_rows=77),
        plan_of("2x2", max_tokens=9),
    ]
    plans += [plan_of("4x1"), plan_of("2x2", columns=72), plan_of("2x2", experts=4)]
    assert len({plan.describe().splitlines()[0] for plan in plans}) == len({plan.digest for plan in plans}) == len(plans)


def test_every_call_has_the_same_plan_whatever_its_rows() -> None:
    plan = plan_of("2x2")
    assert plan.of_rows(0) is plan
    assert plan.of_rows(16).spec == plan.spec
    assert OP.make_plan(plan.problem, 16, 132).of_rows(0).digest == OP.make_plan(plan.problem, 0, 132).digest


@pytest.mark.parametrize(
    ("topk", "world", "dtype", "weighted"),
    [
        (2, "2x2", "float16", True),
        (8, "1x4", "bfloat16", False),
        (16, "8x8", "bfloat16", True),
        *(
            pytest.param(topk, world, dtype, weighted, marks=pytest.mark.slow)
            for topk in (1, 2, 3, 4, 6, 8, 9, 16)
            for world in ("1x1", "1x4", "2x2", "4x1", "8x8")
            for dtype, weighted in (("bfloat16", True), ("float16", False))
        ),
    ],
)
def test_kernels_for_the_gpu(caplog: pytest.LogCaptureFixture, topk: int, world: str, dtype: str, weighted: bool) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    nodes, per_node = map(int, world.split("x"))
    problem = MoeCombineProblem(Topology(nodes * per_node, per_node), 7168, dtype, topk, 8, 4096, 32768, weighted)
    used: Any = cuda.resources(cuda.compile(make_plan(problem, 0, 132).spec))
    assert used.local_bytes == 0, "spills"
    assert caplog.text == ""
