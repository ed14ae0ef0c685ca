"""Plans that an earlier process has made come from the cache: nothing is planned again, and nothing else is launched."""

from __future__ import annotations

import contextlib
import dataclasses
import pickletools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.ops import remembered, schedule
from mkernel.ops.op import find
from mkernel.planner import allgather_gemm, gemm, moe_dispatch_gemm, reduce, ring_attention
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.machine import H100, H200
from mkernel.planner.topology import Topology
from mkernel.runtime.world import World
from tests.ops.body import Case
from tests.ops.sizes import OPS, Ahead, Caller, draw_case, draw_rows, ranks


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path))
    return tmp_path / remembered.FOLDER


class Whole(Ahead):
    """As many SMs as where the model chooses."""

    def __init__(self, target: str, device: int | str, rank: int) -> None:
        super().__init__(target, device, rank)
        self.sm_count = 132

    def load(self, spec: Any) -> Any:
        kernel: Any = super().load(spec)
        kernel.max_ctas = lambda: 132
        return kernel


@contextlib.contextmanager
def planned(name: str) -> Iterator[set[int]]:
    """The classes of rows that any rank makes plans for meanwhile."""
    op: Any = find(name)
    made, make = set[int](), op.make_plan

    def noted(problem: Any, rows: int, *args: Any, **options: Any) -> Any:
        made.add(rows)
        return make(problem, rows, *args, **options)

    op.make_plan = noted
    try:
        yield made
    finally:
        del op.make_plan


def _launched(world: World, case: Case, most: int, rows: list[int]) -> list[Any]:
    """What is launched by calls of these rows, after a preparation."""
    caller = Caller(world, case, most)
    caller.plan(1, max_rows=most)
    for one in rows:
        caller.call(one)
    world.barrier()
    return [launched.chosen for launched in world.backend.launched]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("op", "algorithm"), OPS)
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
def test_nothing_is_planned_twice(folder: Path, rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """A second process launches the same as the first, of any size, and has planned nothing; what is damaged is planned again."""
    case, most = draw_case(rng, op, algorithm), 1 + draw_rows(rng, 3000)
    rows = [draw_rows(rng, most) for _ in range(4)]

    def run() -> tuple[set[int], list[Any]]:
        with planned(op) as made:
            return made, ranks(_launched, world, case, most, rows, device=Whole)

    (first, launched), second = run(), run()
    assert first
    assert second == (set(), launched)
    (file,) = folder.glob("*.plans")
    data = bytearray(file.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1
    file.write_bytes(bytes(data))
    assert run() == (first, launched)


def test_what_was_sealed_may_be_of_no_use(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Plans are made again where the bytes are those that were kept, and no plans."""
    remembered.cache.keep(remembered.FOLDER, "x.plans", b"x.plans", b"cmissing_module\nName\n.")
    assert remembered.recall("x.plans") == {}
    assert "made again" in caplog.text
    remembered.keep("x.plans", {3: H200})
    assert remembered.recall("x.plans") == {3: H200}
    assert remembered.recall("y.plans") == {}


def test_a_file_is_for_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may change a plan changes the name of the file."""
    op: Any = types.SimpleNamespace(name="op", modelled=True)
    world: Any = types.SimpleNamespace(machine=H200, backend=types.SimpleNamespace(sm_count=132))
    problem, choice = ("problem", Topology(2, 2)), schedule.Choice(None, None)

    def name(world: Any = world, op: Any = op, problem: Any = problem, choice: Any = choice, specialize: Any = None) -> str:
        return remembered.name_of(world, op, problem, choice, specialize)

    def other(**more: Any) -> Any:
        return types.SimpleNamespace(**{**vars(world), **more})

    names = [
        name(),
        name(other(machine=H100)),
        name(other(machine=dataclasses.replace(H200, l2=H200.l2 * 1.01))),
        name(other(backend=types.SimpleNamespace(sm_count=131))),
        name(op=types.SimpleNamespace(name="another", modelled=True)),
        name(problem=("problem", Topology(4, 2))),
        name(choice=schedule.Choice(mk.Split(intra_comm=8), None)),
        name(specialize="all"),
    ]
    for variable, value in ((env.PLANNER, "rules"), (env.MACHINE, "h100"), (env.SPECIALIZE, "n,k")):
        with monkeypatch.context() as changed:
            changed.setenv(variable.name, value)
            names.append(name())
    with monkeypatch.context() as changed:
        changed.setattr(remembered, "code_digest", lambda: "other code")
        names.append(name())
    # What tests scale down.
    of_puts, of_keys = (gemm, "_PUT_BYTES", (1, 2)), (ring_attention, "SCALE", dataclasses.replace(ring_attention.SCALE, chunk_bytes=3))
    for module, constant, value in (of_puts, of_keys, (moe_dispatch_gemm, "PUT_BYTES", 77), (reduce, "SPECIALIZED", {})):
        with monkeypatch.context() as changed:
            changed.setattr(module, constant, value)
            names.append(name())
    assert len(set(names)) == len(names)
    assert name() == names[0]


def test_code_that_is_not_known() -> None:
    """Ops that others have registered plan in every process."""
    own = find("allgather_gemm")
    assert all(remembered.may_be_known(find(op)) for op, _ in OPS)

    class Foreign(type(own)):  # type: ignore[misc]
        pass

    assert not remembered.may_be_known(Foreign())


def test_others_may_work_out_properties_meanwhile(folder: Path) -> None:
    """Ranks that are threads share plans: what one of them derives while another one keeps them changes nothing."""

    class Busy(dict[str, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a dictionary that others change")

        items = __iter__  # type: ignore[assignment]

    plan = allgather_gemm.make_plan(AllGatherGemmProblem(Topology(2, 2), 512, 512, "bfloat16", True), 100, 132)
    for part in (plan, plan.problem, plan.tile, plan.split, plan.problem.topology):
        if hasattr(part, "__dict__"):
            object.__setattr__(part, "__dict__", Busy(vars(part), later="derived"))
    remembered.keep("busy.plans", {100: plan})
    (recalled,) = remembered.recall("busy.plans").values()
    assert recalled == plan
    assert "later" not in vars(recalled)


@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_allreduce"])
def test_plans_are_of_nothing_that_the_name_leaves_out(folder: Path, op: str) -> None:
    """Their classes are all defined where the digest of the planner's code looks: or else an old plan could be read as a new one."""
    ranks(_launched, "1x2", Case("bfloat16", 64, 512, op=op), 300, [], device=Whole)
    (file,) = folder.glob("*.plans")
    data = remembered.recall(file.name)
    found, strings = set(), []
    for code, argument, _ in pickletools.genops(remembered.pickle.dumps(data)):
        if "UNICODE" in code.name:
            strings.append(str(argument))
        if code.name == "STACK_GLOBAL":
            found.add(strings[-2] if "." in strings[-2] else next(each for each in reversed(strings) if "." in each))
    assert found
    for module in found:
        path = module.removeprefix("mkernel.").replace(".", "/")
        assert any(path == part.removesuffix(".py") or path.startswith(f"{part}/") for part in remembered.CODE), module
