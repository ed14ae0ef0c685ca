"""``mkernel calibrate``: what it measures is legal, what it fits is what reports were made with, and without a GPU it says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from mkernel.bench import calibrate, command, model
from mkernel.bench.cases import ops
from mkernel.bench.cases.base import tilings_of
from mkernel.bench.report import FUSED, MODES, Report, Row
from mkernel.bench.stats import slowest
from mkernel.errors import ArgumentError
from mkernel.planner.machine import H100, H200, Machine, load, machine_of
from mkernel.planner.prediction import ALONE, BATCH
from mkernel.planner.topology import Topology


def _report(op: str, sizes: Sequence[str], world: Topology, machine: Machine) -> Report:
    """What a bench would have reported on a machine that is exactly as it is described."""
    rows = []
    for size in sizes:
        case = ops()[op].case(size, world, "bfloat16")
        case.machine = machine_of(machine.name)  # for which a world on such GPUs chooses plans
        row = Row(case.label, case.shape, case.flops, 0, 0, 0.0, 0.0, 0.5)
        row.times[FUSED] = {}
        for mode, conditions in zip(MODES, (ALONE, BATCH), strict=True):
            prediction = case.predicted(machine, conditions)
            assert prediction is not None
            row.times[FUSED][mode] = slowest([[prediction.seconds * 1e3]] * world.size, "ms", "made up")
        rows.append(row)
    of_world = {"ranks": world.size, "nodes": world.num_nodes, "ranks_per_node": world.ranks_per_node}
    settings = {"options": {}, "tilings": sorted(tilings_of(op)), "cooldown_ms": 10.0}
    return Report(op, "", of_world, "cuda", "bfloat16", "", "", {}, settings, {"name": machine.name}, rows)


def test_without_a_gpu_it_says_what_it_cannot_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpus", lambda: 0)
    assert calibrate.main(["--out", str(tmp_path / "machine.json")]) == 1, "nothing was saved"
    told = capsys.readouterr().out
    assert all(field in told for field in (*calibrate._OF_ONE, *calibrate._OF_SEVERAL, "link", "network"))
    assert not (tmp_path / "machine.json").exists()
    with pytest.raises(ArgumentError, match="--from"):
        calibrate.main(["--from", str(tmp_path), "--out", str(tmp_path / "machine.json")])


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_calibration_finds_the_machine(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = dataclasses.replace(
        H100, start=H100.start * 1.4, start_lone=H100.start_lone * 1.4, tile=H100.tile * 1.5, entry=H100.entry * 1.5
    )
    ran = []

    def bench(words: list[str]) -> int:
        options = command._parser().parse_args(words)
        command._complete(options)
        asked = command.Asked.of(options)  # raises where a shape or a column is none
        ran.append(asked.op.name)
        options.out.write_text(_report(asked.op.name, asked.sizes, asked.topology, there).to_json())
        return 0

    monkeypatch.setattr(command, "gpus", lambda: gpus)
    monkeypatch.setattr(command, "main", bench)
    out = tmp_path / "kept" / "machine.json"
    assert calibrate.main(["--out", str(out)]) == 0
    assert ran == ["gemm", *(calibrate._CALLS if gpus > 1 else ())]
    found = load(out)
    assert found.name == H100.name
    assert found.start_lone == pytest.approx(there.start_lone, rel=0.1)
    assert found.start == (H100.start if gpus == 1 else pytest.approx(there.start, rel=0.1))
    assert found.tile == pytest.approx(there.tile, rel=0.25)
    assert (found.entry == H100.entry) == (gpus == 1), "one GPU tells nothing of the others"
    for size in ("100x4096x4096", "3000x1024x4096"):  # which were not measured
        case = ops()["gemm" if gpus == 1 else "allgather_gemm"].case(size, Topology(gpus, gpus), "bfloat16")
        case.machine = machine_of(there.name)
        right, wrong, fitted = (case.predicted(machine) for machine in (there, H100, found))
        assert right is not None
        assert wrong is not None
        assert fitted is not None
        assert abs(fitted.seconds / right.seconds - 1) < min(0.06, abs(wrong.seconds / right.seconds - 1))
    assert str(out) in capsys.readouterr().out
    assert model.main(["gemm", "--world", "1x1", "--shapes", "2048x2048x512", "--machine", str(out)]) == 0
    assert H100.name in capsys.readouterr().out


def test_a_bench_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpus", lambda: 2)
    monkeypatch.setattr(command, "main", lambda words: 3)
    assert calibrate.main(["--out", str(tmp_path / "machine.json")]) == 3
    assert not (tmp_path / "machine.json").exists()


def test_what_ships_is_not_changed_by_a_fit_to_itself(tmp_path: Path) -> None:
    (tmp_path / "gemm.json").write_text(_report("gemm", calibrate._PRODUCTS.split(","), Topology(1, 1), H200).to_json())
    assert calibrate.main(["--from", str(tmp_path), "--out", str(tmp_path / "machine.json")]) == 0
    assert load(tmp_path / "machine.json") == H200
