"""Whole runs of the benchmark, most of them with a stand-in for the op."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from typing import Any

import numpy as np
import pytest

import mkernel
from mkernel import env
from mkernel.bench.cases.allgather_gemm import AllgatherGemm
from mkernel.bench.puts import PutsPlan, puts
from mkernel.bench.report import ENGINE, FUSED, MODES, TUNED, Report, render
from mkernel.bench.timing import CpuTiming, CudaTiming
from mkernel.bench.worker import measure
from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology
from tests.bench.stand_in import World, settings, stand_in

needs_a_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="target cpu needs a C++ compiler")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_measures_every_split_in_both_modes(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    calls = stand_in(monkeypatch)
    held_to: list[bool] = []  # results are held to the bound of the split that wrote them
    worst = AllgatherGemm.worst

    def checked(case: AllgatherGemm, index: int, split: Any = None) -> float:
        held_to.append(split == calls[-1]["split"])
        return worst(case, index, split)

    monkeypatch.setattr(AllgatherGemm, "worst", checked)
    report = measure(World(), settings(dtype=dtype, splits={FUSED: None, "fused compute=4": {"compute": 4}}))
    assert report.correct
    assert held_to
    assert all(held_to)
    assert [row.label for row in report.rows] == ["64x72x520", "40x8x8"]
    for row in report.rows:
        assert set(row.times) == {FUSED, "fused compute=4"}
        for modes in row.times.values():
            assert set(modes) == {"isolated", "back-to-back"}
            assert all(len(m.samples[0]) == 3 and m.median > 0 for m in modes.values())
        assert row.host[FUSED].unit == "us"
    assert {str(call["split"]) for call in calls} == {"None", "{'compute': 4}"}
    assert len({id(call["out"]) for call in calls}) == 4  # two input sets per shape, used in turn
    assert Report.from_json(report.to_json()) == report
    assert "none on target cpu" in render(report)


@pytest.mark.parametrize(
    ("cooldown_ms", "last_ms", "seconds"),
    [(30.0, 0.0, 0.03), (30.0, 5.0, 0.03), (30.0, 22.0, 0.088), (30.0, 500.0, 0.3), (0.0, 500.0, None)],
    ids=["first", "short", "long", "very long", "none"],
)
def test_gpus_rest_before_a_sample(monkeypatch: pytest.MonkeyPatch, cooldown_ms: float, last_ms: float, seconds: float | None) -> None:
    """Four times as long as the sample before took: what works a fifth of the time does not reach its power limit."""
    slept: list[float] = []
    monkeypatch.setattr("mkernel.bench.timing.time.sleep", slept.append)
    timing = object.__new__(CudaTiming)
    timing.cooldown_ms, timing._last_ms, timing._exposed = cooldown_ms, last_ms, False
    timing._cool_down()
    assert slept == ([] if seconds is None else [pytest.approx(seconds)])
    assert ("rest" in timing._method("events")) == (cooldown_ms > 0)


@needs_a_compiler
@pytest.mark.parametrize("fastest", [0, 2])
def test_tuned_and_untuned_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
    """``fastest``: CTAs that push, of the split that the tuner is made to prefer; none is mkernel's own choice."""
    splits = []

    def measured(world: Any, calls: list[list[Any]], samples: int, queue: Any) -> list[list[float]]:
        return [[1.0 if some[0].keywords["split"].intra_comm == fastest else 2.0] for some in calls]

    class _Timing(CpuTiming):
        tunes = True

        def isolated(self, calls: Any, samples: int) -> Any:
            before = len(self.world.bound_calls)
            result = super().isolated(calls, samples)
            assert len(self.world.bound_calls) == before, "warm"
            splits.append({bound.executable.plan.split.intra_comm for bound in self.world.bound_calls.values()})
            return result

    monkeypatch.setattr("mkernel.ops.split_search._measure", measured)
    monkeypatch.setattr("mkernel.bench.worker.open_timing", _Timing)

    def go(world: Any) -> Report:
        world.tuned["somebody's problem"] = mkernel.Split(intra_comm=1)
        return measure(world, settings(op="allgather_gemm", sizes=("260x72x80",), samples=2))

    report = mkernel.launch(go, ranks=2, target="cpu", heap_bytes=1 << 26)[0]
    (row,) = report.rows
    assert row.correct
    assert row.tuned is not None
    assert row.tuned["intra_comm"] == fastest
    assert (TUNED in row.times) == (fastest != 0)
    assert (TUNED in row.missing) == (fastest == 0)
    assert splits[-1] == {0, fastest}, "the untuned calls stay untuned"
    assert Report.from_json(report.to_json()) == report


@needs_a_compiler
@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_between_nodes_the_engine_is_measured_alone(op: str) -> None:
    """The op's bytes in the op's puts, in the table beside the network."""
    asked = settings(op=op, sizes=("260x72x80",), samples=2)
    reports = mkernel.launch(lambda world: measure(world, asked), ranks=2, ranks_per_node=1, target="cpu", heap_bytes=1 << 26)
    (row,) = reports[0].rows
    assert [len(samples) for samples in row.times[ENGINE]["isolated"].samples] == [2, 2]
    text = render(reports[0])
    assert ENGINE in text
    assert f"b2b {ENGINE}" not in text


@needs_a_compiler
@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (3, 1)], ids=["2x2", "3x1"])
def test_the_kernel_that_only_sends(ranks: int, per_node: int) -> None:
    """Everything arrives, the last put shorter than the others, call after call."""
    plan = PutsPlan(Topology(ranks, per_node), 300_008, 65_536)

    def use(world: Any) -> bool:
        call = puts(world, plan)
        base = world.heap_address + world.executable(plan, lambda: plan).scratch_offset
        right = True
        for number in range(3):
            sent = [np.random.default_rng((number, rank)).bytes(plan.bytes) for rank in range(ranks)]
            world.barrier()
            ctypes.memmove(base, sent[world.rank], plan.bytes)
            call()
            for distance in range(1, world.num_nodes):
                source = (world.node + distance) % world.num_nodes * per_node + world.local_rank
                right &= ctypes.string_at(base + distance * plan.bytes, plan.bytes) == sent[source]
        return right

    assert mkernel.launch(use, ranks=ranks, ranks_per_node=per_node, target="cpu", heap_bytes=1 << 24) == [True] * ranks


@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_a_run_with_wrong_results_has_no_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float) -> None:
    def spoil(out: Any) -> None:
        out[-1, -1] = value

    stand_in(monkeypatch, spoil)
    report = measure(World(), settings())
    assert not report.correct
    assert not any(row.times or row.host for row in report.rows)
    assert render(report).count("WRONG") == 2
    assert capsys.readouterr().err.count(": WRONG\n") == 2


def test_a_result_that_goes_wrong_while_it_is_timed_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def spoil(out: Any) -> None:
        nonlocal count
        count += 1
        if count > 8:
            out[0, 0] = 1e4

    stand_in(monkeypatch, spoil)
    report = measure(World(), settings(sizes=("64x72x520",)))
    assert count > 8
    assert not report.correct
    assert not report.rows[0].times


def test_a_failure_of_the_op_is_never_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(out: Any) -> None:
        raise RuntimeError("the op failed")

    stand_in(monkeypatch, spoil)
    with pytest.raises(RuntimeError, match="the op failed"):
        measure(World(), settings())


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    four = {"compute": 4}
    report = measure(World(), settings(sizes=("64x72x520",), splits={FUSED: None, "fused 4": four}, samples=5))
    order = [key for key, _ in itertools.groupby(str(call["split"]) for call in calls)]
    # Checked, then timed in this order, in reverse (where two runs of one contestant meet), and at last by the host's clock.
    assert order == [str(None), order[1]] * 3
    assert [len(m.samples[0]) for modes in report.rows[0].times.values() for m in modes.values()] == [5] * 4


def test_what_is_measured_is_told_row_by_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_later(out: Any) -> None:
        if out.shape[1] != 520:
            raise RuntimeError("the second shape failed")

    stand_in(monkeypatch, fail_later)
    told: list[Report] = []
    with pytest.raises(RuntimeError, match="the second shape failed"):
        measure(World(), settings(sizes=("64x520x64", "64x72x64")), lambda report: told.append(Report.from_json(report.to_json())))
    assert [[row.shape["N"] for row in report.rows] for report in told] == [[520]]
    times = told[0].rows[0].times[FUSED]
    assert times
    first, second = (f"{times[mode].median:.4f}" for mode in MODES)
    assert f"64x520x64: fused {first} (b2b {second})" in capsys.readouterr().err


def test_target_cpu_is_refused_unless_asked_for() -> None:
    with pytest.raises(ArgumentError, match="mean nothing"):
        measure(World(), settings(allow_cpu=False))


def test_a_run_that_was_cut_short_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that have a row are not measured again, wrong ones neither; whatever rows may depend on must be as it was."""
    calls = stand_in(monkeypatch)
    first = measure(World(), settings(sizes=("64x72x520",)))
    first.rows[0].worst = 2.0
    earlier = Report.from_json(first.to_json())
    calls.clear()
    written: list[int] = []
    report = measure(World(), settings(), lambda report: written.append(len(report.rows)), earlier)
    assert [row.label for row in report.rows] == ["64x72x520", "40x8x8"]
    assert {call["out"].shape for call in calls} == {(40, 8)}
    assert written == [2]
    assert not report.correct, "a wrong row stays"
    assert (report.date, report.rows[0], len(report.resumed)) == (first.date, earlier.rows[0], 1)
    assert report.resumed[0]["machine"].keys() == first.machine.keys()
    again = measure(World(), settings(sizes=("40x8x16", "40x8x8")), earlier=Report.from_json(report.to_json()))
    assert ([row.label for row in again.rows][2:], len(again.resumed)) == (["40x8x16"], 2)
    assert Report.from_json(again.to_json()) == again


@pytest.mark.parametrize("changed", ["op", "world", "versions", "settings", "machine"])
def test_rows_of_something_else_are_not_resumed(monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    calls = stand_in(monkeypatch)
    earlier = measure(World(), settings(sizes=("64x72x520",)))
    calls.clear()
    if changed == "op":
        earlier.op = "gemm_allreduce"
    else:
        values = getattr(earlier, changed)
        name = "name" if changed == "machine" else next(iter(values))
        values[name] = "another"
    with pytest.raises(ArgumentError, match="another" if changed != "op" else "gemm_allreduce"):
        measure(World(), settings(), earlier=earlier)
    assert not calls


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"graph": True}, "graph"), ({"without": ("fused tuned",)}, "without"), ({"samples": 4}, "samples"), ({}, "MKERNEL_SPECIALIZE")],
)
def test_rows_measured_otherwise_are_not_resumed(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str) -> None:
    """What was asked for is part of a report, and so is the environment that kernels are chosen by."""
    stand_in(monkeypatch)
    with env.override(MKERNEL_SPECIALIZE="" if asked else "none"):
        earlier = measure(World(), settings(sizes=("64x72x520",), **asked))
    with pytest.raises(ArgumentError, match=said):
        measure(World(), settings(), earlier=earlier)
