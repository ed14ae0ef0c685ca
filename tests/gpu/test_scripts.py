"""The scripts for the GPU machine, here on target cpu: time there is too short to find their own mistakes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.jit.headers import kernels_src
from mkernel.planner.choice import ranked
from mkernel.planner.gather_plan import AllGatherGemmProblem
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.prediction import ALONE, BATCH
from mkernel.planner.ring_attention import make_plan
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes
from mkernel.planner.topology import Topology
from tests.gpu import kinds, late, sanitize, tilings
from tests.gpu.exact import EVERY_OP
from tests.ops.test_moe_dispatch_gemm import plan_of

HERE = Path(__file__).parent


def _results(*command: str) -> tuple[int, dict[str, str], str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    lines = [line.removeprefix("RESULT ").split("\t") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return done.returncode, {name: outcome for name, outcome, _ in lines}, done.stdout + done.stderr


_WORLDS = [("2x2", EVERY_OP[0])]
_MORE = [(world, op) for world in ("1x4", "2x2") for op in EVERY_OP if (world, op) not in _WORLDS]


@pytest.mark.parametrize(
    ("world", "op"),
    [
        *_WORLDS,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in _MORE),
        pytest.param("mpirun", EVERY_OP[0], marks=pytest.mark.mpi),
        pytest.param("mpirun", "two_shot", marks=pytest.mark.mpi),
    ],
)
@pytest.mark.drawn(1)
def test_faults(world: str, op: str) -> None:
    status, outcomes, text = _results(str(HERE / "faults.py"), world, "--op", op, "--target", "cpu", "--limit", "200")
    assert status == 0, text
    assert set(outcomes.values()) == {"ok"}, text
    assert len(outcomes) == (2 if world == "mpirun" else 9), text


@pytest.mark.parametrize(
    ("errors", "status", "op"),
    [("2", 1, EVERY_OP[0]), ("0", 0, EVERY_OP[0]), *(pytest.param("0", 0, op, marks=pytest.mark.slow) for op in EVERY_OP[1:])],
)
def test_sanitizer(errors: str, status: int, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that reports what it is told to."""
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(f'#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift 2; done\n"$@"\necho "========= ERROR SUMMARY: {errors} errors"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found, outcomes, text = _results(str(HERE / "sanitize.py"), "1x2", "--op", op, "--target", "cpu", "--limit", "200")
    assert found == status, text
    assert outcomes == {"memcheck 1x2": "FAILED" if status else "ok"}, text


def test_late_kernels_sleep_where_they_hand_over(tmp_path: Path) -> None:
    """Of each function one definition at least; nothing else of the device code is touched."""
    folder, plain = late.kernels(tmp_path / "copy"), kernels_src()
    changed = [
        path.relative_to(plain)
        for path in plain.rglob("*")
        if path.is_file() and path.read_text() != (folder / path.relative_to(plain)).read_text()
    ]
    assert changed == [Path("ptx.cuh")]
    before, after = ((root / "ptx.cuh").read_text().splitlines() for root in (plain, folder))
    assert sum("be_late();" in line for line in after) >= len(late.BEFORE) + len(late.AFTER)
    left = [line.replace(" be_late();", "") for line in after if line != "  be_late();"]
    assert set(before) <= set(left)


@pytest.mark.slow
def test_late_kernels_compile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    problem = RingAttentionProblem(Topology(4, 2), 8, 2, 128, "bfloat16", True, "zigzag", 1.0)
    with env.override(MKERNEL_KERNELS_SRC=late.kernels(tmp_path / "copy")):
        for plan in (make_plan(problem, Sizes(1, 1000).code, 132), plan_of("2x2")):
            assert cuda.resources(cuda.compile(plan.spec)).local_bytes == 0
    assert caplog.text == ""


def test_attention() -> None:
    command = [sys.executable, str(HERE / "attention.py"), "--target", "cpu", "--shapes", "2x4x2x200x64c", "1x2x2x300x64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" error 0.") == 2, done.stdout


@pytest.mark.parametrize("arguments", [["--ranks", "2"], pytest.param(["--ranks", "4", "--ranks-per-node", "2"], marks=pytest.mark.slow)])
def test_notebook(arguments: list[str]) -> None:
    status, outcomes, text = _results(str(HERE / "notebook.py"), "--target", "cpu", *arguments)
    assert status == 0, text
    assert set(outcomes.values()) == {"ok"}, text
    assert len(outcomes) == 11, text


@pytest.mark.parametrize(
    ("none", "one"),
    [
        ("ERROR SUMMARY: 0 errors", "ERROR SUMMARY: 1 error"),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"),
    ],
)
def test_what_the_sanitizers_say(none: str, one: str) -> None:
    clean = f"CALLS RIGHT\n========= {none}\n"
    assert sanitize.verdict(clean * 2, 2) == ""
    assert "1 summaries of 2" in sanitize.verdict(clean, 2)
    assert "[0, 1]" in sanitize.verdict(clean + clean.replace(none, one), 2)
    assert "[0, 12]" in sanitize.verdict(clean + clean.replace(": 0 ", ": 12 "), 2)
    assert "wrong" in sanitize.verdict(clean.replace("CALLS RIGHT", ""), 1)


def test_the_script_of_streams_knows_its_checks() -> None:
    done = subprocess.run([sys.executable, str(HERE / "streams.py"), "nothing"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "torch, cupy, named, mixed, graphs, threads, host, nccl" in done.stderr


def test_the_driver_knows_its_stages() -> None:
    done = subprocess.run([sys.executable, str(HERE / "run_gpu.py"), "nothing"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "gemm, world, signals, faults, sanitizer, notebook, host, bench" in done.stderr


@pytest.mark.parametrize("ranks_per_node", ["2", pytest.param("1", marks=pytest.mark.slow)])
def test_programs(ranks_per_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One random program; its streams and graphs are plain calls here."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("MKERNEL_CPU_SMS", "8")
    script = [str(HERE / "programs.py"), "--target", "cpu", "--ranks", "2", "--ranks-per-node", ranks_per_node, "--steps", "8"]
    done = subprocess.run([sys.executable, *script, "--seconds", "60"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_specialize(ranks: int | str, tmp_path: Path) -> None:
    """Every op and variant once; the times mean nothing."""
    shapes = ["allgather_gemm:130x144x128", "gemm_reduce_scatter:7x72x64", "gemm_allreduce:5x72x64"]
    start = ["--launcher", "mpi" if ranks == "mpirun" else "processes", "--ranks", "2" if ranks == "mpirun" else str(ranks)]
    out = tmp_path / "found.json"
    script = [sys.executable, str(HERE / "specialize.py"), *start, "--target", "cpu", "--heap", "64", "--samples", "2"]
    done = subprocess.run([*script, "--out", str(out), "--shapes", *shapes], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["found"]
    assert [f"{f['op']}:{f['size']}" for f in found] == [shape for shape in shapes for _ in range(5)]
    assert {f["variant"] for f in found} == {"all", "none", "no n", "no k", "no split"}
    assert all(f["same_bits"] and len(f["samples"]) == 2 for f in found)
    assert done.stdout.count(" same") == 15, done.stdout


def _measured(size: str, **ms: float) -> list[tilings.Found]:
    """A row of variants, all but the vendor's predicted to take 1 ms, with three samples of which the median is given."""
    predicted = {"cuBLAS": math.nan}
    return [
        tilings.Found("op", size, name, "", 0.5, [9.0, one, 0.1], [9.0, one, 0.1], predicted.get(name, 1.0)) for name, one in ms.items()
    ]


def test_tilings_say_how_far_the_choice_is_from_the_best() -> None:
    found = [_measured("1x1x1", old=2.0, new=1.0, one=0.8, cuBLAS=0.2), _measured("2x2x2", old=1.0, new=1.02, one=1.0, aligned=0.2)]
    before, lost = "geometric mean 0.714, 1 of 2 slower", "geometric mean 1.129, within 5% in 1 of 2, worst 1.25"
    modes = [
        line for mode in ("isolated", "back to back") for line in (f"{mode}: new / old, {before}", f"{mode}: new / the best of all, {lost}")
    ]
    *said, predictions = tilings.summary(found)
    assert said == modes
    assert predictions == "predictions, isolated: off by 2.0% (median), 50.0% (90th percentile)"
    del found[0][0], found[1][0]
    assert tilings.summary(found)[:-1] == modes[1::2], "shapes with tilings of their own have no old one"
    assert tilings.summary([]) == []


def test_what_is_ranked_is_of_the_rows_of_the_call() -> None:
    """Not of its class, whose plans have other numbers of tiles: 4783 rows are in that of 4864."""
    problem = AllGatherGemmProblem(Topology(1, 1), 512, 4864, "bfloat16", True)
    alone: Any = types.SimpleNamespace(world=types.SimpleNamespace(backend=types.SimpleNamespace(sm_count=132), machine=H200))
    assert len(tilings.Rank._ranked(alone, "allgather_gemm", types.SimpleNamespace(problem=problem, rows=4783), 3)) == 3


@pytest.mark.slow
def test_tilings_goes_through_the_motions() -> None:
    options = {"ranks": 2, "target": "cpu", "ranked": 2, "samples": 2, "heap": 64}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    shapes = "allgather_gemm:16x64x128", "allgather_gemm:16x136x128/block_n=64,shares=1/packets=0"
    code, _, text = _results(str(HERE / "tilings.py"), *words, "--shapes", *shapes)
    assert code == 0 and "new / the best of all" in text and "\n0 wrong" in text, text
    assert text.count(" old ") == 1 and all(tiling in text for tiling in shapes[1].split("/")[1:]), text


# ---- kinds
def test_kinds_that_compete_are_plans_of_the_call(rng: np.random.Generator) -> None:
    for _ in range(6):
        rows, n, k = (int(2 ** rng.uniform(*range_of)) for range_of in ((4, 13), (6, 10), (6, 9)))
        shape = kinds.Shape.parse(f"{rows}x{8 * n}x{8 * k}{rng.choice(['r', 't'])}")
        fastest = ranked(shape.problem, rows, 132, H200, "n,k")[0].plan.of_rows(rows)
        found = kinds.kinds_of(shape, H200, 4)
        assert len(set(found)) == len(found) <= 4
        plans = [shape.plan(tiling, 132) for tiling in found]
        assert plans[0].describe().splitlines()[1] == fastest.describe().splitlines()[1]


def test_errors_of_kinds(tmp_path: Path) -> None:
    """By times that are 1.1 and 1.3 of what is predicted. The slower one, predicted to be faster, loses what it is slower by."""
    shape, path = kinds.Shape("512x1024x1024", True), tmp_path / "kinds.json"
    tilings_of = kinds.kinds_of(shape, H200, 2)
    times: dict[str, list[float]] = {kinds.VENDOR: [1e-9, 1e-9, 1e-9]}
    for tiling, factor in zip(tilings_of, (1.3, 1.1), strict=True):
        predicted = [predict(shape.plan(tiling, 132), H200, conditions) for conditions in (ALONE, BATCH)]
        times[tiling] = [factor * one.seconds * 1e3 for one in predicted if one is not None] + [0.0]
    path.write_text(json.dumps({"shapes": {str(shape): times}}))
    first, second = (times[tiling] for tiling in tilings_of)
    for mode, error in enumerate(kinds.errors(kinds.read([path]), H200)):
        assert error.all_of_it == pytest.approx(math.sqrt((math.log(1.1) ** 2 + math.log(1.3) ** 2) / 2))
        assert error.within_shapes == pytest.approx(math.log(1.3 / 1.1) / 2)
        assert error.lost == pytest.approx(max(0.0, math.log(first[mode] / second[mode])))


@pytest.mark.slow
def test_kinds_goes_through_the_motions(tmp_path: Path) -> None:
    shapes = ["16x64x128t/block_n=64,shares=1/block_n=128", "24x136x72r/block_n=64"]
    out = tmp_path / "out.json"
    code, _, text = _results(str(HERE / "kinds.py"), "--target", "cpu", "--processes", "2", "--out", str(out), "--shapes", *shapes)
    assert code == 0 and text.endswith("\n0 wrong\n"), text
    assert [[str(one.shape), one.tiling] for of_shape in kinds.read([out]) for one in of_shape] == [
        [shape.split("/")[0], tiling] for shape in shapes for tiling in shape.split("/")[1:]
    ]
