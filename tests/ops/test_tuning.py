"""``mk.tune``: what is found is used, remembered, and changes no bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, CompileError, MismatchError
from mkernel.jit.cpu import core_library
from mkernel.ops import split_search as tuning
from mkernel.ops.schedule import tuning_name
from mkernel.runtime import tuning_cache as tuned

# Small, with several chunks and tiles on every rank: a split changes who does what. The all-reduce is too large, or not for packets.
OPS = [
    ("allgather_gemm", (96, 136), (136, 264), {}),
    ("gemm_reduce_scatter", (256, 72), (72, 264), {}),
    ("gemm_allreduce", (200, 72), (72, 264), {"partials": "float32", "algorithm": "two_shot"}),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tuned splits of this test only; compiled kernels stay where they are."""
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    return tmp_path


def times(monkeypatch: pytest.MonkeyPatch, time_of: Callable[[mk.Split], float]) -> None:
    """Splits take so long, whatever the clock says. Every call is made once."""

    def measure(world: Any, calls: list[list[Any]], samples: int, queue: Any) -> list[list[float]]:
        for (call,) in calls:
            call()
        return [[time_of(call.keywords["split"])] * samples for (call,) in calls]

    monkeypatch.setattr(tuning, "_measure", measure)


def communicating(split: mk.Split) -> int:
    return sum(getattr(split, role) or 0 for role in ("intra_comm", "inter_send", "inter_reduce"))


def operands(world: mk.World, *shapes: tuple[int, int]) -> list[Any]:
    rng = np.random.default_rng(world.rank)
    return [rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in shapes]


launch = functools.partial(mk.launch, target="cpu", timeout=20.0, entry_timeout=20.0)


@pytest.mark.parametrize(("op", "a", "b", "options"), OPS, ids=[op for op, *_ in OPS])
def test_what_is_found_is_used_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, op: str, a: tuple[int, int], b: tuple[int, int], options: dict[str, Any]
) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SMS", "6")
    times(monkeypatch, lambda split: 10.0 - communicating(split))

    def go(world: mk.World) -> tuple[str, mk.Split]:
        arrays, call = operands(world, a, b), getattr(mk, op)
        before = call(*arrays, **options)
        planned = mk.plan(op, *arrays, **options)
        default = planned.split()
        result = mk.tune(op, *arrays, **options)
        assert default == result.default
        assert communicating(result.best) > communicating(result.default)
        assert result.best.total == 6
        assert {trial.split for trial in result.table} > {result.default, result.best}
        assert mk.plan(op, *arrays, **options).split() == result.best
        some = mk.Split(intra_comm=result.default.intra_comm)  # the other roles stay open
        merged = mk.plan(op, *arrays, split=some, **options).split()
        assert merged.intra_comm == result.default.intra_comm
        assert merged.inter_send == result.best.inter_send
        after = call(*arrays, **options)
        assert world.bound_calls  # the call is known, and has the new split
        assert {bound.executable.plan.split for bound in world.bound_calls.values() if hasattr(bound, "executable")} == {result.best}
        assert before.tobytes() == after.tobytes()
        assert planned.run(*arrays).tobytes() == before.tobytes()
        assert planned.split() == result.best, "a plan without a split follows"
        assert mk.plan(op, *arrays, split=result.default, **options).split() == result.default
        return str(result), result.best

    results = launch(go, ranks=4, ranks_per_node=2)
    assert results == [results[0]] * 4


def test_later_worlds_know(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    times(monkeypatch, lambda split: 1.0 if split.intra_comm == 2 else 2.0)
    shapes = (96, 136), (136, 264)

    def found(world: mk.World, *, tune: bool = False, save: bool | None = None) -> mk.Split:
        arrays = operands(world, *shapes)
        if tune:
            mk.tune("allgather_gemm", *arrays, save=save)
        return mk.plan("allgather_gemm", *arrays).split()

    default = launch(found, ranks=2)
    assert launch(functools.partial(found, tune=True), ranks=2) == [mk.Split(2, 2, 0, 0)] * 2
    assert list(folder.iterdir()) == [], "times of target cpu say nothing"
    launch(functools.partial(found, tune=True, save=True), ranks=2)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    assert launch(found, ranks=2) == [mk.Split(2, 2, 0, 0)] * 2 != default
    assert launch(found, ranks=4)[0] != mk.Split(2, 2, 0, 0), "a world of another shape"
    monkeypatch.setenv("MKERNEL_CPU_SMS", "5")
    assert launch(found, ranks=2)[0].total == 5, "another device"
    monkeypatch.delenv("MKERNEL_CPU_SMS")
    monkeypatch.setattr("mkernel.runtime.world.sources_digest", lambda: "another")
    assert launch(found, ranks=2) == default, "another device code"
    monkeypatch.undo()


@pytest.mark.parametrize(("op", "rows"), [("allgather_gemm", [81, 96]), ("gemm_reduce_scatter", [196, 256])])
def test_a_file_says_which_rows_of_the_first_operand_it_is_for(
    monkeypatch: pytest.MonkeyPatch, folder: Path, op: str, rows: list[int]
) -> None:
    """The rows of a reduce-scatter are those of all ranks: each has 64 of the 256, of the class 49 to 64."""
    times(monkeypatch, lambda split: 1.0 if split.inter_send == 2 else 2.0)
    shapes = next((a, b) for name, a, b, _ in OPS if name == op)
    launch(lambda world: mk.tune(op, *operands(world, *shapes), save=True), ranks=4, ranks_per_node=2)
    (file,) = folder.iterdir()
    entry = json.loads(file.read_text())
    assert (entry["op"], entry["rows"]) == (op, rows)
    assert entry["asked"]["topology"] == {"size": 4, "ranks_per_node": 2}


def test_a_world_without_the_files_is_a_world(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong with them on rank 0: the others wait for it."""

    def load(place: Any) -> dict[str, mk.Split]:
        raise MemoryError

    monkeypatch.setattr(tuned, "load", load)
    assert launch(lambda world: len(world.tuned), ranks=2) == [0, 0]
    assert "tuned splits cannot be read" in caplog.text


def test_nothing_better_is_forgotten_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def go(world: mk.World) -> mk.Split:
        arrays = operands(world, (96, 136), (136, 264))
        mk.tune("allgather_gemm", *arrays, save=True)
        return mk.plan("allgather_gemm", *arrays).split()

    times(monkeypatch, lambda split: 1.0 if split.intra_comm == 2 else 2.0)
    assert launch(go, ranks=2) == [mk.Split(2, 2, 0, 0)] * 2
    assert len(list(folder.iterdir())) == 1
    times(monkeypatch, lambda split: 1.0)
    assert launch(go, ranks=2)[0] != mk.Split(2, 2, 0, 0)
    assert list(folder.iterdir()) == []


def test_a_tuned_split_that_does_not_fit_is_not_used() -> None:
    def go(world: mk.World) -> tuple[mk.Split, mk.Split]:
        arrays = operands(world, (96, 136), (136, 264))
        default = mk.plan("allgather_gemm", *arrays)
        name, before = tuning_name(*default._instance), default.split()
        nowhere = mk.Split(intra_comm=1, inter_send=1)  # no other node to send to
        world.set_tuned({name: nowhere})
        mk.allgather_gemm(*arrays)
        assert mk.plan("allgather_gemm", *arrays).split() == before
        with pytest.raises(ArgumentError, match="inter_send has nothing to do"):
            mk.plan("allgather_gemm", *arrays, split=nowhere)
        world.set_tuned({name: mk.Split(intra_comm=2)})
        return mk.plan("allgather_gemm", *arrays, split=mk.Split(compute=3)).split(), before

    for split, default in launch(go, ranks=2):
        assert split.compute == 3
        assert split != default


def test_a_tuned_split_of_another_kernel_is_not_used() -> None:
    """It would round elsewhere: few values travel in packets, unless a split asks for CTAs that pull."""

    def go(world: mk.World) -> None:
        arrays = operands(world, (200, 72), (72, 264))
        default = mk.plan("gemm_allreduce", *arrays, algorithm="two_shot")
        before = default.plan()
        assert before.packets  # type: ignore[attr-defined]
        world.set_tuned({tuning_name(*default._instance): mk.Split(intra_comm=2)})
        assert default.plan() == before

    launch(go, ranks=4)


def test_tuning_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, lambda split: 1.0)

    def go(world: mk.World) -> None:
        a, b = operands(world, (96, 136), (136, 264))
        tuned = {tuning_name(*mk.plan("allgather_gemm", a, b)._instance): mk.Split(intra_comm=2)}
        world.set_tuned(tuned)
        c = mk.allgather_gemm(a, b)
        with pytest.raises(ArgumentError):
            mk.tune("allgather_gemm", a, b, out=c[1:])
        assert world.tuned == tuned
        mk.allgather_gemm(a if world.rank else a.copy(), b, out=c)  # bound on one rank, new on the other: the same plan
        world.barrier()

    launch(go, ranks=2)


def test_tuning_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def go(world: mk.World) -> None:
        world.backend.capturing = lambda stream: True  # type: ignore[method-assign]
        with pytest.raises(ArgumentError, match="tune before the capture"):
            mk.tune("allgather_gemm", *operands(world, (8, 64), (64, 64)))

    launch(go, ranks=1)


def test_times_are_taken_and_shown(tmp_path: Path) -> None:
    """With the real clock: whatever it says, all ranks agree."""

    def go(world: mk.World) -> mk.TuneResult:
        return mk.tune("gemm_allreduce", *operands(world, (64, 64), (64, 64)), algorithm="one_shot", samples=2)

    results = launch(go, ranks=2, ranks_per_node=1)
    assert results[0] == results[1]
    result = results[0]
    assert result.table
    assert all(0 < trial.fastest <= trial.median <= trial.slowest for trial in result.table)
    assert {trial.split.inter_send for trial in result.table} == {1, 2, 3}
    assert "best" in str(result)
    text = result.plot(tmp_path / "x.svg")._repr_svg_()
    assert (tmp_path / "x.svg").read_text() == text
    assert text.count("<rect") == 1 + len(result.table)


def test_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, lambda split: pytest.fail("nothing to compare"))
    (result,) = launch(lambda world: mk.tune("allgather_gemm", *operands(world, (96, 136), (136, 264))), ranks=1)
    assert result.table == ()
    assert result.best == result.default
    assert result._repr_svg_().startswith("<svg")


def test_bad_arguments_leave_the_world_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, lambda split: 1.0)

    def go(world: mk.World) -> None:
        a, b = operands(world, (8, 64), (64, 64))
        for op, arrays, options in (
            ("moe", (a, b), {}),
            ("allgather_gemm", (a, a), {}),
            ("allgather_gemm", (a, b), {"samples": 0}),
            ("gemm_allreduce", (a, b), {"partials": "int8"}),
        ):
            with pytest.raises(ArgumentError):
                mk.tune(op, *arrays, **options)
        with pytest.raises(TypeError):
            mk.tune("allgather_gemm", a, b, split=mk.Split())
        mk.allgather_gemm(a, b)

    launch(go, ranks=2)


def test_a_kernel_that_cannot_be_compiled_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    core_library()  # compiled before compiling is an error
    monkeypatch.setenv("MKERNEL_NO_COMPILE", "1")

    def go(world: mk.World) -> str:
        with pytest.raises(CompileError):
            mk.tune("allgather_gemm", *operands(world, (24, 88), (88, 104)))  # no other test has this K and N
        world.barrier()
        return "usable"

    assert launch(go, ranks=2, specialize="all") == ["usable"] * 2


def test_ranks_that_tune_different_things_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, lambda split: 1.0)

    def go(world: mk.World) -> None:
        mk.tune("allgather_gemm", *operands(world, (8, 64), (64, 64 + 8 * world.rank)))

    with pytest.raises(MismatchError):
        launch(go, ranks=2)


def test_another_class_of_rows_keeps_its_own_choice(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is found for calls of one class is used by all of them, and by no call of another class; in later worlds, too."""
    times(monkeypatch, lambda split: 10.0 - communicating(split))
    monkeypatch.setenv("MKERNEL_CPU_SMS", "6")
    rows = (1, 64, 80, 81, 90, 96, 97, 112, 113, 256, 300)

    def splits(world: mk.World, tune: int | None = None) -> list[mk.Split]:
        a, b = operands(world, (300, 136), (136, 264))
        if tune is not None:
            result = mk.tune("allgather_gemm", a[:tune], b, save=True)
            assert result.best != result.default
        planned = mk.plan("allgather_gemm", a[:1], b)
        assert [mk.plan("allgather_gemm", a[:number], b).split() for number in rows] == [planned.split(number) for number in rows]
        return [planned.split(number) for number in rows]

    (before,) = set(map(tuple, launch(splits, ranks=2)))
    (tuned_once,) = set(map(tuple, launch(functools.partial(splits, tune=90), ranks=2)))
    changed = [number for number, one, other in zip(rows, before, tuned_once, strict=True) if one != other]
    assert changed == [81, 90, 96]
    assert len({tuned_once[rows.index(number)] for number in changed}) == 1
    (later,) = set(map(tuple, launch(splits, ranks=2)))
    assert later == tuned_once
    (tuned_twice,) = set(map(tuple, launch(functools.partial(splits, tune=112), ranks=2)))
    assert [number for number, one, other in zip(rows, tuned_once, tuned_twice, strict=True) if one != other] == [97, 112]
    assert len(list(folder.iterdir())) == 2
