"""What a benchmark reports: the bound, the JSON, the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mkernel.bench.report import ALONE, FUSED, SOLO, Report, Row, render
from mkernel.bench.stats import Measurement, slowest

DOCS = Path(__file__).parents[2] / "docs"
SAVED = sorted(path.name for path in (DOCS / "benchmarks").iterdir())


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


def test_samples_of_a_rank_are_one_line() -> None:
    text = _report(_row()).to_json()
    samples = _measurement(0.36).samples[0]
    assert f"{list(samples)}," in [line.strip() for line in text.splitlines()]
    flat = re.sub(r"\s+", "", text)
    assert flat == re.sub(r"\s+", "", json.dumps(json.loads(text), indent=1)), "nothing but blanks differs"


@pytest.mark.parametrize("name", SAVED)
def test_saved_results_can_be_read_and_are_as_the_writer_leaves_them(name: str) -> None:
    text = (DOCS / "benchmarks" / name).read_text()
    assert Report.from_json(text).correct
    long = [line for line in text.splitlines() if re.fullmatch(r"\s*[-\d.e]+,?", line)]
    assert not long, "a number on a line of its own"


def test_every_saved_result_is_cited() -> None:
    assert SAVED
    assert set(re.findall(r"`([\w-]+\d\.json)`", (DOCS / "benchmarks.md").read_text())) == set(SAVED)


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
