"""The benchmark's arithmetic, its report and its checker, without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel
from mkernel.bench import command, main
from mkernel.bench import launcher as started
from mkernel.bench.cases import OPS
from mkernel.bench.check import NodeSum, Product, to_float64, worst_product, worst_sum
from mkernel.bench.lab import LONGEST_REST_MS, REST_MS, CpuLab, CudaLab
from mkernel.bench.libraries import ASYNC_TP, NCCL, CupyLibraries, TorchLibraries
from mkernel.bench.puts import PutsPlan, puts
from mkernel.bench.report import ALONE, ENGINE, FUSED, MODES, SOLO, TUNED, Report, Row, render
from mkernel.bench.stats import Measurement, milliseconds, quantile, slowest, tera
from mkernel.bench.worker import Settings, measure
from mkernel.errors import ArgumentError
from mkernel.plan.reduce import PARTIALS, make_plan
from mkernel.plan.topology import Topology

needs_a_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="target cpu needs a C++ compiler")

# ---- arithmetic


def test_quantiles_interpolate_and_ignore_order() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([float(i) for i in range(11)], 0.1) == 1.0
    assert quantile([float(i) for i in range(11)], 0.9) == pytest.approx(9.0)
    assert quantile([7.0], 0.9) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_quantiles_agree_with_numpy(rng: np.random.Generator) -> None:
    samples = rng.standard_normal(37).tolist()
    for q in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert quantile(samples, q) == pytest.approx(float(np.quantile(samples, q)))


def test_slowest_rank_is_the_largest_median_not_the_largest_sample() -> None:
    measurement = slowest([[1.0, 1.0, 100.0], [2.0, 2.0, 2.0], [1.5, 1.5, 1.5]], "ms", "made up")
    assert (measurement.rank, measurement.median, measurement.p10, measurement.p90) == (1, 2.0, 2.0, 2.0)


def test_a_rank_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        slowest([[1.0], []], "ms", "made up")


def test_units() -> None:
    assert milliseconds(325e9, 325.0) == pytest.approx(1000.0)
    assert tera(2.0 * 8192**3, 1.4) == pytest.approx(785.4, abs=0.1)


# ---- bytes and shapes of the cases


@pytest.mark.parametrize(("size", "link_ms"), [("2048", 0.019), ("4096", 0.077), ("8192", 0.310), ("16384", 1.24), ("32768", 4.96)])
def test_allgather_gemm_link_time_on_four_ranks(size: str, link_ms: float) -> None:
    case = OPS["allgather_gemm"].case(size, Topology(4, 4), "bfloat16")
    assert case.network_bytes == 0
    assert milliseconds(case.link_bytes, 325.0) == pytest.approx(link_ms, rel=0.03)
    assert case.shape == {"M": int(size), "N": int(size) // 4, "K": int(size)}
    assert case.flops == 2.0 * int(size) ** 3 / 4


@pytest.mark.parametrize(("size", "network_ms"), [("8192", 0.67), ("16384", 2.68), ("32768", 10.7)])
def test_allgather_gemm_network_time_on_two_nodes_of_two(size: str, network_ms: float) -> None:
    case = OPS["allgather_gemm"].case(size, Topology(4, 2), "bfloat16")
    assert milliseconds(case.network_bytes, 50.0) == pytest.approx(network_ms, rel=0.01)
    shard = int(size) ** 2 // 4 * 2
    assert (case.link_bytes, case.network_bytes) == (2 * shard, shard)


def test_every_shard_but_ones_own_arrives_once() -> None:
    for topology in (Topology(1, 1), Topology(2, 2), Topology(4, 2), Topology(8, 2), Topology(6, 3)):
        case = OPS["allgather_gemm"].case(str(768 * topology.size), topology, "float16")
        assert case.link_bytes + case.network_bytes == (topology.size - 1) * 768 * (768 * topology.size) * 2


@pytest.mark.parametrize(("size", "link_ms"), [("2048", 0.019), ("4096", 0.077), ("8192", 0.310), ("16384", 1.24), ("32768", 4.96)])
def test_link_time_of_the_reductions_on_four_ranks(size: str, link_ms: float) -> None:
    for op, times in (("gemm_reduce_scatter", 1), ("gemm_allreduce", 2)):
        case = OPS[op].case(size, Topology(4, 4), "bfloat16")
        assert case.network_bytes == 0
        assert milliseconds(case.link_bytes, 325.0) == pytest.approx(times * link_ms, rel=0.03)
        assert case.shape == {"M": int(size), "N": int(size), "K": int(size)}
        assert case.flops == 2.0 * int(size) ** 3 / 4


@pytest.mark.parametrize(("size", "network_ms"), [("8192", 0.67), ("16384", 2.68), ("32768", 10.7)])
def test_network_time_of_the_reductions_on_two_nodes_of_two(size: str, network_ms: float) -> None:
    shard = int(size) ** 2 // 4 * 2
    for op, times in (("gemm_reduce_scatter", 1), ("gemm_allreduce", 2)):
        case = OPS[op].case(size, Topology(4, 2), "bfloat16")
        assert milliseconds(case.network_bytes, 50.0) == pytest.approx(times * network_ms, rel=0.01)
        assert (case.link_bytes, case.network_bytes) == (times * 2 * shard, times * shard)


def test_small_shapes_are_a_table_of_their_own() -> None:
    op = OPS["gemm_allreduce"]
    assert set(op.sizes) == set(op.groups["large"]) | set(op.groups["small"])
    options = command._parser().parse_args(["gemm_allreduce", "--world", "1x4", "--shapes", "small"])
    assert command.Asked.of(options).sizes == tuple(f"{m}x8192x8192" for m in (1, 8, 32, 128, 256))
    case = op.case("32x8192x8192", Topology(4, 4), "bfloat16")
    assert case.solo is not None
    assert (case.solo.m, case.solo.n, case.solo.k) == (32, 8192, 2048)
    assert case.link_bytes == 2 * 3 * 32 * 8192 * 2 // 4


def test_options_go_to_the_op_that_has_them() -> None:
    def plan(*words: str) -> command.Asked:
        return command.Asked.of(command._parser().parse_args([*words, "--world", "1x4", "--shapes", "512"]))

    assert plan("gemm_allreduce", "--partials", "float32", "--algorithm", "one_shot").op_options == {
        "partials": "float32",
        "algorithm": "one_shot",
    }
    assert plan("gemm_reduce_scatter").op_options == {}
    for words in (["gemm_reduce_scatter", "--algorithm", "one_shot"], ["allgather_gemm", "--partials", "float32"]):
        with pytest.raises(ArgumentError, match="has no such option"):
            plan(*words)


def test_the_heap_holds_what_the_plan_needs() -> None:
    for op, size in (("gemm_reduce_scatter", "8192"), ("gemm_allreduce", "8192"), ("gemm_allreduce", "256x8192x8192")):
        for topology in (Topology(4, 4), Topology(4, 2), Topology(4, 1)):
            for partials in PARTIALS:
                case: Any = OPS[op].case(size, topology, "bfloat16", partials=partials)
                for sms in (4, 114, 132, 148):
                    assert case.heap_bytes >= make_plan(case.problem, sms).workspace_bytes


def test_bad_shapes_say_what_they_must_be() -> None:
    for size in ("x", "10", "4096x100x4096", "0", "8x8", "-8"):
        with pytest.raises(ArgumentError, match="--shapes"):
            OPS["allgather_gemm"].case(size, Topology(4, 4), "bfloat16")
    for size in ("x", "40", "4096x100x4096", "8x8x40", "0", "8x8", "-32", "0x8x32"):
        for op in ("gemm_reduce_scatter", "gemm_allreduce"):
            with pytest.raises(ArgumentError, match="--shapes"):
                OPS[op].case(size, Topology(4, 4), "bfloat16")
    with pytest.raises(ArgumentError, match="multiple of 4"):
        OPS["gemm_reduce_scatter"].case("1x8x32", Topology(4, 4), "bfloat16")
    assert OPS["gemm_allreduce"].case("1x8x32", Topology(4, 4), "bfloat16").shape == {"M": 1, "N": 8, "K": 32}
    with pytest.raises(ArgumentError, match="MxNxK"):
        OPS["gemm"].case("8192", Topology(1, 1), "bfloat16")
    with pytest.raises(ArgumentError, match="world of one"):
        OPS["gemm"].case("8192x8192x8192", Topology(4, 4), "bfloat16")


def test_default_shapes_of_every_op_are_valid() -> None:
    for op in OPS.values():
        topology = Topology(1, 1) if op.name == "gemm" else Topology(4, 4)
        for size in op.sizes:
            case = op.case(size, topology, "bfloat16")
            assert case.flops > 0
            assert case.heap_bytes > 0


# ---- the report


def _measurement(*medians: float, unit: str = "ms") -> Measurement:
    return slowest([[m * 0.9, m, m * 1.1] for m in medians], unit, "made up")


def _row(label: str = "8192", worst: float = 0.4) -> Row:
    row = Row(label, {"M": 8192, "N": 2048, "K": 8192}, 2.0 * 8192 * 2048 * 8192, 100663296, 0, 0.3097, 0.0, worst)
    row.times = {
        FUSED: {"isolated": _measurement(0.36, 0.40), "back-to-back": _measurement(0.35, 0.34)},
        "NCCL+cuBLAS": {"isolated": _measurement(0.70, 0.71), "back-to-back": _measurement(0.69, 0.68)},
        ALONE: {"isolated": _measurement(0.325, 0.32)},
        SOLO: {"isolated": _measurement(0.33)},
    }
    row.host = {FUSED: _measurement(21.0, 22.0, unit="us")}
    row.missing = {"torch async-TP": "rank 0: RuntimeError: no symmetric memory"}
    return row


def _report(*rows: Row, nodes: int = 1) -> Report:
    return Report(
        op="allgather_gemm",
        title="M = K = S, N = S/W per rank",
        world={"ranks": 4, "nodes": nodes, "ranks_per_node": 4 // nodes},
        target="cuda",
        dtype="bfloat16",
        date="2026-11-21T08:00:00+00:00",
        command="python -m mkernel bench allgather_gemm",
        versions={"mkernel": "0.1.0"},
        settings={"samples": 20},
        machine={"name": "a GPU", "before": [], "after": []},
        rows=list(rows),
    )


def test_bound_is_the_best_compute_alone_unless_bytes_take_longer() -> None:
    row = _row()
    assert row.bound_ms == pytest.approx(0.325)
    assert row.efficiency() == pytest.approx(0.325 / 0.40)
    assert row.efficiency(mode="back-to-back") == pytest.approx(0.325 / 0.35)
    row.link_ms = 0.39
    assert row.bound_ms == pytest.approx(0.39)
    row.network_ms = 0.67
    assert row.bound_ms == pytest.approx(0.67)
    del row.times[ALONE]
    assert row.bound_ms == pytest.approx(0.67)
    del row.times[SOLO]
    assert row.bound_ms is None
    assert row.efficiency() is None


def test_json_round_trip_keeps_every_sample() -> None:
    wrong = _row("16384", worst=float("inf"))
    wrong.times, wrong.host = {}, {}
    report = _report(_row(), wrong)
    text = report.to_json()
    assert Report.from_json(text) == report
    assert Report.from_json(text).to_json() == text
    summary = json.loads(text)["rows"][0]["summary"]
    assert summary["times"][FUSED]["isolated"]["median"] == pytest.approx(0.40)
    assert summary["efficiency"]["isolated"] == pytest.approx(0.325 / 0.40)
    assert summary["host"][FUSED]["median"] == pytest.approx(22.0)
    assert not report.correct


def test_json_of_another_schema_is_refused() -> None:
    data = json.loads(_report(_row()).to_json())
    data["schema"] += 1
    with pytest.raises(ValueError, match="schema"):
        Report.from_json(json.dumps(data))


def _cells(text: str, label: str) -> dict[str, str]:
    """Header -> cell of one row; columns are separated by two blanks or more."""
    lines = text.splitlines()
    rule = next(line for line in lines if line.startswith("--"))
    starts = [i for i, character in enumerate(rule) if character == "-" and (i == 0 or rule[i - 1] == " ")]
    spans = list(zip(starts, [*starts[1:], None], strict=True))
    header, row = lines[lines.index(rule) - 1], next(line for line in lines if line.strip().startswith(label + " "))
    return {header[a:b].strip(): row[a:b].strip() for a, b in spans}


def test_table_shows_the_slowest_rank() -> None:
    cells = _cells(render(_report(_row())), "8192")
    assert cells["fused"] == "0.4000 (0.3680-0.4320)"
    assert cells["NCCL+cuBLAS"] == "0.7100"
    assert cells["b2b fused"] == "0.3500"
    assert cells["b2b NCCL+cuBLAS"] == "0.6900"
    assert (cells[ALONE], cells[SOLO]) == ("0.3250", "0.3300")
    assert (cells["link"], cells["bound"]) == ("0.3097", "0.3250")
    assert (cells["eff"], cells["eff b2b"]) == ("0.81", "0.93")
    assert (cells["host us"], cells["err/bound"]) == ("22.0", "0.40")
    assert cells["TFLOP/s"] == f"{2.0 * 8192 * 2048 * 8192 / 0.40e-3 / 1e12:.0f}"
    assert "network" not in cells


def test_table_across_nodes_has_the_network() -> None:
    row = _row()
    row.network_ms = 0.671
    cells = _cells(render(_report(row, nodes=2)), "8192")
    assert (cells["network"], cells["bound"], cells["link"]) == ("0.6710", "0.6710", "0.3097")


def test_a_wrong_result_prints_no_time_and_a_missing_baseline_prints_its_reason() -> None:
    wrong = _row("16384", worst=3.0)
    wrong.times, wrong.host = {}, {}
    text = render(_report(_row(), wrong))
    cells = _cells(text, "16384")
    assert cells["fused"] == "WRONG"
    assert cells["NCCL+cuBLAS"] == cells["eff"] == cells["host us"] == "-"
    assert text.count("torch async-TP: rank 0: RuntimeError: no symmetric memory") == 1
    wrong.missing = {}
    assert "no symmetric memory (8192)" in render(_report(_row(), wrong))


# ---- the checker of results


def _product(rng: np.random.Generator, m: int, n: int, k: int, dtype: Any) -> tuple[Any, Any, Any]:
    a = rng.standard_normal((m, k), dtype=np.float32).astype(dtype)
    b = rng.standard_normal((k, n), dtype=np.float32).astype(dtype)
    return a, b, (a.astype(np.float32) @ b.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_float64_from_bits_is_exact(rng: np.random.Generator, dtype: Any) -> None:
    values = rng.standard_normal(1000, dtype=np.float32).astype(dtype)
    np.testing.assert_array_equal(to_float64(np, values), values.astype(np.float64))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (128, 128, 64), (130, 264, 520), (64, 128, 8192)])
def test_right_results_pass(rng: np.random.Generator, dtype: Any, shape: tuple[int, int, int]) -> None:
    a, b, c = _product(rng, *shape, dtype)
    assert 0 < worst_product(np, c, a, b) <= 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_planted_errors_fail(rng: np.random.Generator, dtype: Any) -> None:
    m, n, k = 256, 264, 8192
    a, b, c = _product(rng, m, n, k, dtype)

    unwritten = c.copy()
    unwritten[255, 263] = np.nan
    assert worst_product(np, unwritten, a, b) == float("inf")

    skipped = a.copy()
    skipped[:, 4096:4160] = 0  # one k-step of 64
    wrong = (skipped.astype(np.float32) @ b.astype(np.float32)).astype(dtype)
    assert worst_product(np, wrong, a, b) > 1

    stale = c.copy()
    stale[128:, :128] = c[:128, :128]  # a tile of another row block
    assert worst_product(np, stale, a, b) > 1

    swapped = c.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert worst_product(np, swapped, a, b) > 1


def test_an_empty_result_is_right() -> None:
    empty = np.empty((0, 8), dtype=np.float16)
    assert worst_product(np, empty, np.empty((0, 8), dtype=np.float16), np.ones((8, 8), dtype=np.float16)) == 0.0


def _partial(product: Product, dtype: Any) -> Any:
    """As a kernel would: accumulated in float32, rounded once if it is to be sent."""
    value = product.a.astype(np.float32) @ product.b.astype(np.float32)
    return value.astype(dtype).astype(np.float32) if product.rounded else value


def _reduced(nodes: list[NodeSum], dtype: Any, times: dict[int, float] | None = None) -> Any:
    """The sum of all products. ``times``: product -> how often it is added, for mistakes."""
    total: Any = 0.0
    position = 0
    for node in nodes:
        subtotal: Any = 0.0
        for product in node.products:
            subtotal = subtotal + (times or {}).get(position, 1.0) * _partial(product, dtype)
            position += 1
        total = total + (subtotal.astype(dtype).astype(np.float32) if node.rounded else subtotal)
    return total.astype(dtype)


def _nodes(rng: np.random.Generator, dtype: Any, m: int, n: int, k: int, rounded: bool, num_nodes: int = 2) -> list[NodeSum]:
    def product(own: bool) -> Product:
        return Product(*_product(rng, m, n, k, dtype)[:2], rounded and not own)

    return [NodeSum([product(node == rank == 0) for rank in range(2)], rounded and node > 0) for node in range(num_nodes)]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (130, 264, 136), (64, 128, 2048)])
def test_right_sums_pass_and_roundings_must_be_allowed(rng: np.random.Generator, dtype: Any, shape: tuple[int, int, int]) -> None:
    exact, rounded = (_nodes(rng, dtype, *shape, rounded) for rounded in (False, True))
    assert 0 < worst_sum(np, _reduced(exact, dtype), exact) <= 1
    assert 0 < worst_sum(np, _reduced(rounded, dtype), rounded) <= 1
    if shape[2] == 136:  # enough elements for the worst of them, and K small enough for one rounding to be seen beside float32's
        pretended = [NodeSum([Product(product.a, product.b) for product in node.products]) for node in rounded]
        assert worst_sum(np, _reduced(rounded, dtype), pretended) > 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_partial_that_is_lost_or_added_twice_fails(rng: np.random.Generator, dtype: Any, factor: float) -> None:
    nodes = _nodes(rng, dtype, 128, 136, 512, True, num_nodes=4)
    for position in (0, 1, 7):
        assert worst_sum(np, _reduced(nodes, dtype, {position: factor}), nodes) > 10


class _FourRanks:
    """Rank 2 of two nodes of two, as far as a case looks."""

    rank, size, num_nodes, ranks_per_node, target, xp = 2, 4, 2, 2, "cpu", np


@pytest.mark.parametrize("partials", PARTIALS)
@pytest.mark.parametrize(
    ("op", "algorithm"), [("gemm_reduce_scatter", None), ("gemm_allreduce", "one_shot"), ("gemm_allreduce", "two_shot")]
)
def test_the_reference_of_a_reduction(op: str, algorithm: str | None, partials: str) -> None:
    """Right results of rank 2 pass; those of another rank, or without one rank's contribution, do not."""
    options = {"partials": partials} | ({"algorithm": algorithm} if algorithm else {})
    case: Any = OPS[op].case("136x72x96", Topology(4, 2), "bfloat16", **options)
    case.setup(CpuLab(_FourRanks(), "bfloat16"), 7)
    assert case.worst(0) == float("inf")  # poisoned
    operands = [case._operands(1, rank) for rank in range(4)]
    assert all(any(a is x for x, _ in case._inputs) is False for a, _ in operands)  # written again
    np.testing.assert_array_equal(operands[2][0], case._inputs[1][0])
    values = [a.astype(np.float32) @ b.astype(np.float32) for a, b in operands]

    def result(contributions: list[Any], rank: int = 2) -> Any:
        rows = case.problem.rows
        total = sum(contributions).astype(ml_dtypes.bfloat16)
        return total[rank * rows : (rank + 1) * rows] if op == "gemm_reduce_scatter" else total

    case.outputs()[1][...] = result(values)
    assert case.worst(1) <= 1
    case.outputs()[1][...] = result(values[:3])
    assert case.worst(1) > 10
    if op == "gemm_reduce_scatter":
        case.outputs()[1][...] = result(values, rank=1)
        assert case.worst(1) > 10
    own = 2 if op == "gemm_reduce_scatter" else None  # what stays is not rounded
    sent = [value if rank == own else value.astype(ml_dtypes.bfloat16).astype(np.float32) for rank, value in enumerate(values)]
    case.outputs()[1][...] = result(sent)
    assert (case.worst(1) <= 1) == (partials == "output")


# ---- a whole run, with a stand-in for the op


class _World:
    """A world of one as far as the benchmark looks."""

    rank, size, num_nodes, ranks_per_node, target, xp = 0, 1, 1, 1, "cpu", np

    def barrier(self) -> None: ...
    def set_tuned(self, splits: dict[str, Any]) -> None: ...
    def exchange(self, what: str, value: Any, timeout: float) -> list[Any]:
        return [json.loads(json.dumps(value))]


def _settings(**changes: Any) -> Settings:
    settings = Settings("gemm", ("64x72x520", "40x8x8"), "bfloat16", 3, {FUSED: None}, (), True, 50.0, "bench gemm", {})
    return dataclasses.replace(settings, **changes)


def _stand_in(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None] | None = None) -> list[dict[str, Any]]:
    """Numpy in place of the op; returns the calls it got."""
    calls: list[dict[str, Any]] = []

    def allgather_gemm(a: Any, b: Any, *, world: Any, out: Any, split: Any) -> Any:
        calls.append({"split": split, "out": out})
        out[...] = (a.astype(np.float32) @ b.astype(np.float32)).astype(out.dtype)
        if spoil is not None:
            spoil(out)
        return out

    monkeypatch.setattr(mkernel, "allgather_gemm", allgather_gemm, raising=False)
    monkeypatch.setattr(mkernel, "Split", lambda **sms: sms, raising=False)
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_measures_every_split_in_both_modes(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    calls = _stand_in(monkeypatch)
    report = measure(_World(), _settings(dtype=dtype, splits={FUSED: None, "fused compute=4": {"compute": 4}}))
    assert report.correct
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
    ("rest_ms", "last_ms", "seconds"),
    [(30.0, 0.0, 0.03), (30.0, 5.0, 0.03), (30.0, 22.0, 0.088), (30.0, 500.0, 0.3), (0.0, 500.0, None)],
    ids=["first", "short", "long", "very long", "none"],
)
def test_gpus_rest_before_a_sample(monkeypatch: pytest.MonkeyPatch, rest_ms: float, last_ms: float, seconds: float | None) -> None:
    """Four times as long as the sample before took: what works a fifth of the time does not reach its power limit."""
    slept: list[float] = []
    monkeypatch.setattr("mkernel.bench.lab.time.sleep", slept.append)
    lab = object.__new__(CudaLab)
    lab.rest_ms, lab._last_ms, lab._exposed = rest_ms, last_ms, False
    lab._rest()
    assert slept == ([] if seconds is None else [pytest.approx(seconds)])
    assert ("rest" in lab._method("events")) == (rest_ms > 0)


@pytest.mark.parametrize("rest", ["-1", "nan", str(LONGEST_REST_MS + 1)])
def test_a_rest_that_makes_no_sense(rest: str) -> None:
    with pytest.raises(ArgumentError, match="--rest"):
        main(["gemm", "--allow-cpu", f"--rest={rest}"])


def test_only_columns_that_exist_can_be_left_out() -> None:
    with pytest.raises(ArgumentError, match=r"--without = nccl: must be one of .*torch async-TP"):
        main(["gemm", "--allow-cpu", "--without", "nccl"])


@needs_a_compiler
@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_the_command_on_two_processes(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real world and op on target cpu: local compute first, then two ranks, one report of both."""
    for name in (*started._MARKS, *started._SIZES):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "report.json"
    arguments = [op, "--allow-cpu", "--world", "1x2", "--shapes", "130x72x80", "--samples", "2", "--launcher", "processes"]
    arguments += [] if op == "allgather_gemm" else ["--partials", "float32"]
    left_out = op == "gemm_reduce_scatter"
    arguments += ["--without", SOLO] if left_out else []
    assert main([*arguments, "--out", str(out), "--timeout", "240"]) == 0
    report = Report.from_json(out.read_text())
    (row,) = report.rows
    assert report.correct
    assert report.op == op
    assert report.settings["rest_ms"] == REST_MS
    assert report.settings["options"] == ({} if op == "allgather_gemm" else {"partials": "float32"})
    assert (report.world, report.target) == ({"ranks": 2, "nodes": 1, "ranks_per_node": 2}, "cpu")
    assert report.command.endswith("--timeout 240")
    assert str(tmp_path) not in report.command
    assert set(row.times) == ({FUSED} if left_out else {FUSED, SOLO})
    assert [len(samples) for samples in row.times[FUSED]["isolated"].samples] == [2, 2]
    assert left_out or len(row.times[SOLO]["isolated"].samples) == 1
    assert row.missing.get(SOLO) == ("left out by --without" if left_out else None)


@needs_a_compiler
@pytest.mark.parametrize("fastest", [0, 2])
def test_tuned_and_untuned_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
    """``fastest``: CTAs that push, of the split that the tuner is made to prefer; none is mkernel's own choice."""
    splits = []

    def measured(world: Any, calls: list[list[Any]], samples: int, queue: Any) -> list[list[float]]:
        return [[1.0 if some[0].keywords["split"].intra_comm == fastest else 2.0] for some in calls]

    class _Lab(CpuLab):
        tunes = True

        def isolated(self, calls: Any, samples: int) -> Any:
            before = len(self.world.bound_calls)
            result = super().isolated(calls, samples)
            assert len(self.world.bound_calls) == before, "warm"
            splits.append({bound.executable.plan.split.intra_comm for bound in self.world.bound_calls.values()})
            return result

    monkeypatch.setattr("mkernel.ops.tuning._measure", measured)
    monkeypatch.setattr("mkernel.bench.worker.open_lab", _Lab)

    def go(world: Any) -> Report:
        world.tuned["somebody's problem"] = mkernel.Split(intra_comm=1)
        return measure(world, _settings(op="allgather_gemm", sizes=("260x72x80",), samples=2))

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
    settings = _settings(op=op, sizes=("260x72x80",), samples=2)
    reports = mkernel.launch(lambda world: measure(world, settings), ranks=2, ranks_per_node=1, target="cpu", heap_bytes=1 << 26)
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

    _stand_in(monkeypatch, spoil)
    report = measure(_World(), _settings())
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

    _stand_in(monkeypatch, spoil)
    report = measure(_World(), _settings(sizes=("64x72x520",)))
    assert count > 8
    assert not report.correct
    assert not report.rows[0].times


def test_a_failure_of_the_op_is_never_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(out: Any) -> None:
        raise RuntimeError("the op failed")

    _stand_in(monkeypatch, spoil)
    with pytest.raises(RuntimeError, match="the op failed"):
        measure(_World(), _settings())


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _stand_in(monkeypatch)
    four = {"compute": 4}
    report = measure(_World(), _settings(sizes=("64x72x520",), splits={FUSED: None, "fused 4": four}, samples=5))
    order = [key for key, _ in itertools.groupby(str(call["split"]) for call in calls)]
    # Checked, then timed in this order, in reverse (where two runs of one contestant meet), and at last by the host's clock.
    assert order == [str(None), order[1]] * 3
    assert [len(m.samples[0]) for modes in report.rows[0].times.values() for m in modes.values()] == [5] * 4


def test_what_is_measured_is_told_row_by_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_later(out: Any) -> None:
        if out.shape[1] != 520:
            raise RuntimeError("the second shape failed")

    _stand_in(monkeypatch, fail_later)
    told: list[Report] = []
    with pytest.raises(RuntimeError, match="the second shape failed"):
        measure(_World(), _settings(sizes=("64x520x64", "64x72x64")), lambda report: told.append(Report.from_json(report.to_json())))
    assert [[row.shape["N"] for row in report.rows] for report in told] == [[520]]
    times = told[0].rows[0].times[FUSED]
    assert times
    first, second = (f"{times[mode].median:.4f}" for mode in MODES)
    assert f"64x520x64: fused {first} (b2b {second})" in capsys.readouterr().err


def test_target_cpu_is_refused_unless_asked_for() -> None:
    with pytest.raises(ArgumentError, match="mean nothing"):
        measure(_World(), _settings(allow_cpu=False))


# ---- the baselines, with stand-ins for their libraries: four ranks that all hold the same


class _FourAlike:
    rank, size = 1, 4

    def __init__(self) -> None:
        self.xp = types.SimpleNamespace(matmul=np.matmul, empty=np.empty)

    def exchange(self, what: str, value: Any, timeout: float) -> list[Any]:
        return [json.loads(json.dumps(value))] * self.size


def _own_rows(array: Any) -> Any:
    rows = len(array) // _FourAlike.size
    return array[_FourAlike.rank * rows : (_FourAlike.rank + 1) * rows]


class _Tensor(np.ndarray[Any, Any]):
    def float(self) -> Any:
        return np.asarray(self).astype(np.float32)


class _Torch(types.SimpleNamespace):
    matmul = staticmethod(np.matmul)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        return np.full(shape, np.nan, dtype)


def _torch_libraries(monkeypatch: pytest.MonkeyPatch, spoil: float = 0.0) -> TorchLibraries:
    """``spoil``: what the symmetric-memory op adds to its result."""

    def reduce_scatter_tensor(c: Any, product: Any) -> None:
        c[...] = 4 * _own_rows(product)

    def all_reduce(c: Any) -> None:
        c *= 4

    def fused_matmul_reduce_scatter(a: Any, b: Any, reduce_op: str, scatter_dim: int, group: str) -> Any:
        assert (reduce_op, scatter_dim, group) == ("sum", 0, "the group")
        return (4 * _own_rows(a @ b) + np.float16(spoil)).view(_Tensor)

    libraries = TorchLibraries.__new__(TorchLibraries)
    libraries._world, libraries.missing = _FourAlike(), {}
    libraries._torch = _Torch(
        ops=types.SimpleNamespace(symm_mem=types.SimpleNamespace(fused_matmul_reduce_scatter=fused_matmul_reduce_scatter)),
        cuda=types.SimpleNamespace(synchronize=lambda: None),
        linalg=types.SimpleNamespace(vector_norm=np.linalg.norm),
    )
    group = types.SimpleNamespace(WORLD=types.SimpleNamespace(group_name="the group"))
    libraries._dist = types.SimpleNamespace(reduce_scatter_tensor=reduce_scatter_tensor, all_reduce=all_reduce, group=group)
    monkeypatch.setattr(libraries, "tensor", lambda array: array.view(_Tensor), raising=False)
    memory = types.ModuleType("torch.distributed._symmetric_memory")
    memory.enable_symm_mem_for_group = lambda name: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", memory)
    return libraries


def _cupy_libraries(kinds: list[int]) -> CupyLibraries:
    """``kinds`` receives the data types that NCCL is told."""
    memory: dict[int, Any] = {}

    class _Array(np.ndarray[Any, Any]):
        @property
        def data(self) -> Any:  # type: ignore[override]
            memory[id(self)] = self
            return types.SimpleNamespace(ptr=id(self))

    def reduce_scatter(source: int, destination: int, count: int, kind: int, op: int, stream: int) -> None:
        assert (count, op, stream) == (memory[destination].size, 0, 77)
        kinds.append(kind)
        memory[destination][...] = 4 * _own_rows(memory[source])

    def all_reduce(source: int, destination: int, count: int, kind: int, op: int, stream: int) -> None:
        assert (source, count, op, stream) == (destination, memory[destination].size, 0, 77)
        kinds.append(kind)
        memory[destination] *= 4

    libraries = CupyLibraries.__new__(CupyLibraries)
    libraries._world, libraries._stream, libraries.missing = _FourAlike(), types.SimpleNamespace(ptr=77), {}
    libraries._xp = types.SimpleNamespace(matmul=np.matmul, empty=lambda shape, dtype: np.empty(shape, dtype).view(_Array))
    libraries._nccl = types.SimpleNamespace(NCCL_SUM=0, NCCL_FLOAT16=6)
    libraries._communicator = types.SimpleNamespace(reduceScatter=reduce_scatter, allReduce=all_reduce)
    return libraries


def _baseline_sets(rng: np.random.Generator, op: str, dtype: Any, view: type[Any] = np.ndarray) -> tuple[list[Any], list[Any], list[Any]]:
    a = [rng.integers(-4, 5, (16, 8)).astype(dtype).view(view) for _ in range(2)]
    b = [rng.integers(-4, 5, (8, 24)).astype(dtype).view(view) for _ in range(2)]
    rows = 4 if op == "gemm_reduce_scatter" else 16
    return a, b, [np.full((rows, 24), np.nan, dtype).view(view) for _ in range(2)]


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_allreduce"])
def test_baselines_of_the_reductions_write_the_sum(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, library: str, op: str
) -> None:
    kinds: list[int] = []
    libraries: Any = _torch_libraries(monkeypatch) if library == "torch" else _cupy_libraries(kinds)
    view = type(libraries._xp.empty((0,), np.float16)) if library == "cupy" else np.ndarray
    a, b, c = _baseline_sets(rng, op, np.float16, view)
    calls = getattr(libraries, op)(a, b, c)
    assert set(calls) == {NCCL} | ({ASYNC_TP} if library == "torch" and op == "gemm_reduce_scatter" else set())
    for i, call in enumerate(calls[NCCL]):
        call()
        whole = 4 * (np.asarray(a[i]) @ np.asarray(b[i]))
        np.testing.assert_array_equal(np.asarray(c[i]), _own_rows(whole) if op == "gemm_reduce_scatter" else whole)
    assert set(kinds) == (set() if library == "torch" else {6})
    assert libraries.missing == {}


def test_nccl_is_told_of_bfloat16() -> None:
    assert _cupy_libraries([])._type(np.empty(0, ml_dtypes.bfloat16)) == 9


def test_an_async_tp_that_is_wrong_is_left_out(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = _torch_libraries(monkeypatch, spoil=3.0)
    assert set(libraries.gemm_reduce_scatter(*_baseline_sets(rng, "gemm_reduce_scatter", np.float16))) == {NCCL}
    assert "is off by" in libraries.missing[ASYNC_TP]


# ---- the command line


def test_world_and_split_are_parsed() -> None:
    assert command.parse_world("2x2") == Topology(4, 2)
    assert command.parse_world("4") == Topology(4, 4)
    assert command.parse_split("compute=120, intra_comm=12") == {"compute": 120, "intra_comm": 12}
    for text in ("", "two", "2x2x2", "0x4"):
        with pytest.raises(ArgumentError, match="NODESxRANKS"):
            command.parse_world(text)
    for text in ("", "compute", "compute=x", "comput=3", "compute=-1"):
        with pytest.raises(ArgumentError, match="split"):
            command.parse_split(text)


def test_without_a_gpu_bench_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*started._MARKS, *started._SIZES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "_gpus", lambda: 0)
    with pytest.raises(ArgumentError, match="speeds of target cpu mean nothing"):
        main(["allgather_gemm"])


# ---- starting ranks


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*started._MARKS, *started._SIZES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_under_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not started.under_launcher()
    assert started.launched_size() == 0
    monkeypatch.setenv("PMI_SIZE", "4")
    assert started.under_launcher()
    assert started.launched_size() == 4


def test_the_recorded_command_names_no_path() -> None:
    words = ["gemm", "--out", "/somewhere/x.json", "--samples", "5", "--out=/else.json", "--save"]
    assert command._without_paths(words) == ["gemm", "--samples", "5", "--save"]


def test_importing_the_command_imports_nothing_heavy() -> None:
    code = "import sys, mkernel.bench.command, mkernel.bench.worker; "
    code += "print([m for m in ('cupy', 'torch', 'cuda', 'mpi4py') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_benchmarks_kernels_compile_for_sm_90() -> None:
    core = pytest.importorskip("cuda.core", reason="NVRTC is not installed")
    source = Path(command.__file__).with_name("kernels.cu").read_text()
    cubin = core.Program(source, "c++", core.ProgramOptions(std="c++17", arch="sm_90")).compile("cubin").code
    for name in (b"hold", b"meet", b"fill"):
        assert name in cubin
