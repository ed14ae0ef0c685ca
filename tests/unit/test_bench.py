"""The benchmark's arithmetic, its report and its checker, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
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
from mkernel.bench.check import to_float64, worst_product
from mkernel.bench.report import ALONE, FUSED, SOLO, Report, Row, render
from mkernel.bench.stats import Measurement, milliseconds, quantile, slowest, tera
from mkernel.bench.worker import Settings, measure
from mkernel.errors import ArgumentError
from mkernel.plan.topology import Topology

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


def test_bad_shapes_say_what_they_must_be() -> None:
    for size in ("x", "10", "4096x100x4096", "0", "8x8", "-8"):
        with pytest.raises(ArgumentError, match="--shapes"):
            OPS["allgather_gemm"].case(size, Topology(4, 4), "bfloat16")
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


# ---- a whole run, with a stand-in for the op


class _World:
    """A world of one as far as the benchmark looks."""

    rank, size, num_nodes, ranks_per_node, target, xp = 0, 1, 1, 1, "cpu", np

    def barrier(self) -> None: ...


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


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="target cpu needs a C++ compiler")
def test_the_command_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real world and op on target cpu: local compute first, then two ranks, one report of both."""
    for name in (*started._MARKS, *started._SIZES):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "report.json"
    arguments = ["allgather_gemm", "--allow-cpu", "--world", "1x2", "--shapes", "130x72x72", "--samples", "2", "--launcher", "processes"]
    assert main([*arguments, "--out", str(out), "--timeout", "240"]) == 0
    report = Report.from_json(out.read_text())
    (row,) = report.rows
    assert report.correct
    assert (report.world, report.target) == ({"ranks": 2, "nodes": 1, "ranks_per_node": 2}, "cpu")
    assert report.command.endswith("--timeout 240")
    assert str(tmp_path) not in report.command
    assert set(row.times) == {FUSED, SOLO}
    assert [len(samples) for samples in row.times[FUSED]["isolated"].samples] == [2, 2]
    assert len(row.times[SOLO]["isolated"].samples) == 1


@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_a_run_with_wrong_results_has_no_times(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def spoil(out: Any) -> None:
        out[-1, -1] = value

    _stand_in(monkeypatch, spoil)
    report = measure(_World(), _settings())
    assert not report.correct
    assert not any(row.times or row.host for row in report.rows)
    assert render(report).count("WRONG") == 2


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


def test_target_cpu_is_refused_unless_asked_for() -> None:
    with pytest.raises(ArgumentError, match="mean nothing"):
        measure(_World(), _settings(allow_cpu=False))


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
