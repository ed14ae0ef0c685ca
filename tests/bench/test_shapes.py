"""Shapes that are drawn or named, and what a run over many of them says: again, how many samples, graphs, the summary, the picture."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.bench import command
from mkernel.bench.baselines import NoBaselines
from mkernel.bench.cases import ops
from mkernel.bench.report import ALONE as COMPUTE
from mkernel.bench.report import FUSED, GRAPH, MODES, Report, Row, render
from mkernel.bench.shapes import MODELS, ROWS
from mkernel.bench.stats import slowest
from mkernel.bench.summary import plot, ratio, slower_than, summarize
from mkernel.bench.worker import measure
from mkernel.errors import ArgumentError
from mkernel.planner.machine import H200, save
from mkernel.planner.prediction import ALONE
from mkernel.planner.topology import Topology
from tests.bench.stand_in import World, settings, stand_in


# ---- names
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_split_over_the_ranks(model: str, ranks: int) -> None:
    world = Topology(ranks, ranks)
    for op in ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"):
        if any(size % (8 * ranks) for matrices in MODELS[model] for m in matrices for size in (m.inputs, m.outputs)):
            continue  # qwen2.5-7b over 8 ranks, say, of which the next test tells
        shapes = ops()[op].expand(f"{model}:tp{ranks}", world)
        assert len(shapes) == len(set(shapes)) > len(ROWS) - 1
        cases = [ops()[op].case(shape, world, "bfloat16") for shape in shapes]
        assert {case.shape["M"] for case in cases} == set(ROWS)
        assert ops()[op].expand(model, world) == shapes


def test_llama_on_four_gpus() -> None:
    world = Topology(4, 4)
    assert "256x14336x8192" in ops()["allgather_gemm"].expand("llama-70b:tp4", world), "gate and up"
    case = ops()["gemm_reduce_scatter"].case("256x8192x28672", world, "bfloat16")
    assert case.label in ops()["gemm_reduce_scatter"].expand("llama-70b:tp4", world), "down"
    assert case.solo is not None
    assert case.solo.k == 7168


@pytest.mark.parametrize("wrong", ["llama-70b:tp3", "llama-70b:4", "random:0:1", "random:5", "random:5:x", "llama-80b:tp4"])
def test_names_that_mean_nothing(wrong: str) -> None:
    for op in ("allgather_gemm", "gemm_reduce_scatter"):
        with pytest.raises(ArgumentError, match="--shapes"):
            for size in ops()[op].expand(wrong, Topology(4, 4)):
                ops()[op].case(size, Topology(4, 4), "bfloat16")


def test_drawn_shapes_are_measured_shortly_and_again() -> None:
    def completed(*words: str) -> Any:
        options = command._parser().parse_args(words)
        command._complete(options)
        return options

    drawn, named = completed("allgather_gemm", "--shapes", "random:9:1"), completed("allgather_gemm", "--shapes", "8192")
    assert (drawn.samples, drawn.cooldown, drawn.seconds, drawn.again) == (7, 3.0, 0.8, 0.95)
    assert (named.samples, named.cooldown, named.seconds, named.again) == (20, 30.0, None, None)
    asked = completed("gemm_allreduce", "--shapes", "random:9:1", "--samples", "5", "--cooldown", "0", "--seconds", "2", "--again", "1")
    assert (asked.samples, asked.cooldown, asked.seconds, asked.again) == (5, 0.0, 2.0, 1.0)
    assert drawn.without
    assert not named.without
    with pytest.raises(ArgumentError, match="--again"):
        command.Asked.of(completed("gemm", "--again", "0", "--world", "1x1"))


# ---- runs
def test_what_was_predicted_stands_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stand_in(monkeypatch)
    world = World()
    monkeypatch.setattr(World, "backend", type("Backend", (), {"sm_count": 4}), raising=False)
    assert measure(world, settings()).rows[0].predicted == {}, "speeds of target cpu mean nothing"
    save(H200, tmp_path / "machine.json", {})
    with env.override(MKERNEL_MACHINE=tmp_path / "machine.json"):
        report = measure(world, settings())
    for row in report.rows:
        case = ops()["gemm"].case(row.label, Topology(1, 1), "bfloat16")
        of_four = case.predicted(dataclasses.replace(H200, sms=4), ALONE._replace(rested=False))
        assert of_four is not None
        assert row.predicted["isolated"] == pytest.approx(of_four.seconds * 1e3)
        assert row.predicted["machine"] == H200.name
    assert Report.from_json(report.to_json()) == report
    assert "predicted" in render(report)


def test_a_slow_row_is_measured_again_with_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr("mkernel.bench.worker.slower_than", lambda row, limit: row.label == "40x8x8" and limit == 0.95)
    fast, slow = measure(World(), settings(again=0.95, again_samples=5)).rows
    assert len(fast.times[FUSED]["isolated"].samples[0]) == 3
    assert len(slow.times[FUSED]["isolated"].samples[0]) == 5
    assert all(len(row.times[FUSED]["isolated"].samples[0]) == 3 for row in measure(World(), settings(again_samples=5)).rows)


def test_samples_fit_into_the_seconds_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    assert len(measure(World(), settings(samples=40, seconds=1e-9)).rows[0].times[FUSED]["isolated"].samples[0]) == 3
    assert len(measure(World(), settings(samples=6, seconds=9.0)).rows[0].times[FUSED]["isolated"].samples[0]) == 6


def test_graphs_are_a_mode_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    report = measure(World(), settings(graph=True))
    assert all(GRAPH in row.times[FUSED] for row in report.rows)
    assert "graph fused" in render(report)
    assert Report.from_json(report.to_json()) == report
    assert "graph fused" not in render(measure(World(), settings()))


def test_what_a_world_of_one_is_compared_with_has_all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul(_: NoBaselines, sets: Sequence[tuple[Any, Any, Any]]) -> list[Callable[[], Any]]:
        return [functools.partial(np.matmul, a.astype(np.float32), b.astype(np.float32)) for a, b, _ in sets]

    stand_in(monkeypatch)
    monkeypatch.setattr(NoBaselines, "matmul", matmul)
    report = measure(World(), settings(graph=True))
    assert all(set(row.times[COMPUTE]) == {*MODES, GRAPH} for row in report.rows)
    assert {f"{mode}{COMPUTE}" for mode in ("", "b2b ", "graph ")} <= set(re.split(r" {2,}", render(report).splitlines()[3]))
    assert [line.split(",")[0] for line in summarize(report) if COMPUTE in line] == [*MODES, GRAPH]


# ---- what many rows come to
def _report(rng: np.random.Generator, count: int = 12) -> tuple[Report, list[float]]:
    rows, ratios = [], []
    for i in range(count):
        ours, theirs, best = rng.uniform(0.01, 1, 3)
        row = Row(f"shape {i}", {"M": int(2 ** rng.uniform(0, 14))}, 1.0, 0, 0, 0.0, 0.0, 0.5)
        row.times = {
            name: {mode: slowest([[ms]], "ms", "made up") for mode in ("isolated", "back-to-back")}
            for name, ms in ((FUSED, ours), ("NCCL+cuBLAS", theirs), ("torch async-TP", best), ("cuBLAS alone", 1e-3))
        }
        row.predicted = {"isolated": ours * 1.1, "back-to-back": ours * 0.8, "binds": "tensor", "machine": "made up"}
        rows.append(row)
        ratios.append(ours / theirs)
    world = {"ranks": 4, "nodes": 1, "ranks_per_node": 4}
    return Report("gemm_allreduce", "", world, "cuda", "bfloat16", "", "", {}, {}, {}, rows), ratios


def test_the_summary_is_the_arithmetic_of_the_rows(rng: np.random.Generator) -> None:
    report, ratios = _report(rng)
    isolated, best, behind, _, error, _ = summarize(report)
    figures = re.fullmatch(
        r"isolated, fused / NCCL\+cuBLAS: geometric mean ([\d.]+), worst ([\d.]+) \((.*)\), (\d+) of 12 above 1", isolated
    )
    assert figures
    assert float(figures[1]) == pytest.approx(math.prod(ratios) ** (1 / 12), abs=6e-4)
    assert figures[3] == report.rows[ratios.index(max(ratios))].label
    assert int(figures[4]) == sum(one > 1 for one in ratios)
    assert "the best baseline" in best
    assert behind.startswith("back-to-back")
    assert "median error 10.0 %" in error
    of_best = [ratio(row, "isolated", ["NCCL+cuBLAS", "torch async-TP"]) for row in report.rows]
    assert all(one is not None and one >= other for one, other in zip(of_best, ratios, strict=True))
    assert [slower_than(row, 1.0) for row in report.rows] == [one > 1 for one in ratios]


def test_the_picture_has_every_row(rng: np.random.Generator) -> None:
    report, _ = _report(rng)
    drawn = plot(report)
    assert drawn.count("<circle") == 2 * len(report.rows)
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    assert all(0 <= x <= 910 and 0 <= y <= 600 for x, y in places)
    report.rows.clear()
    assert "<circle" not in plot(report)
