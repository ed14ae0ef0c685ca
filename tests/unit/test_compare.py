"""tests/gpu/compare.py without a GPU: its arithmetic, and a job on target cpu in which this checkout is both trees."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mkernel.bench.cases import ops

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "compare.py"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bound_covers_the_true_ratio(compare: ModuleType) -> None:
    """Over many experiments whose true ratio is 1.03, about 95 in 100 bounds lie above it."""
    rng, above = random.Random(5), 0
    for experiment in range(100):
        pairs = []
        for _ in range(40):
            weather = rng.lognormvariate(0, 0.05)  # that both of a pair meet
            pairs.append((weather * rng.lognormvariate(0, 0.01), 1.03 * weather * rng.lognormvariate(0, 0.01)))
        above += compare.bootstrap_upper(pairs, seed=experiment, resamples=300) >= 1.03
    assert 85 <= above <= 100


def test_the_bound_is_no_less_than_the_ratio_of_equal_samples(compare: ModuleType) -> None:
    assert compare.bootstrap_upper([(2.0, 2.0)] * 10) == 1.0
    pairs = [(1.0 + i % 5 / 100, 1.1 + i % 7 / 100) for i in range(40)]
    ratio = statistics.median(new for _, new in pairs) / statistics.median(old for old, _ in pairs)
    assert compare.bootstrap_upper(pairs) >= ratio


def test_shapes(compare: ModuleType) -> None:
    table = compare.chosen_shapes([])
    assert len(table) == 3 * 4 + 9
    assert ("gemm_allreduce", "256x8192x8192") in table
    assert compare.chosen_shapes(["allgather_gemm", "8192", "gemm_allreduce:1024"]) == [
        ("allgather_gemm", "2048"),
        ("allgather_gemm", "4096"),
        ("allgather_gemm", "8192"),
        ("allgather_gemm", "16384"),
        ("gemm_reduce_scatter", "8192"),
        ("gemm_allreduce", "8192"),
        ("gemm_allreduce", "1024"),
    ]
    with pytest.raises(SystemExit, match="no such op or size"):
        compare.chosen_shapes(["gemm"])


def _run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--old", str(ROOT), "--new", str(ROOT), "--target", "cpu", "--heap", "32", *options]
    return subprocess.run(
        command, env=os.environ | {"OUT": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )


def test_two_trees_in_one_job(tmp_path: Path) -> None:
    """Every op between ranks that ``mkernel bench`` measures."""
    out = tmp_path / "found.json"
    shapes = [f"{name}:{op.demo_sizes('cpu', 2)[0]}" for name, op in ops().items() if op.demo_sizes("cpu", 2)]
    done = _run(tmp_path, "--samples", "3", "--shapes", *shapes, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["ranks"], found["target"]) == (2, "cpu")
    assert [f"{row['op']}:{row['size']}" for row in found["rows"]] == shapes
    for row in found["rows"]:
        assert row["same_bits"]
        assert len(row["samples"]["old"]) == len(row["samples"]["new"]) == 3
    assert f"{len(shapes)} shapes in" in done.stdout


def test_a_shape_that_cannot_be_measured_is_said_and_the_others_are(tmp_path: Path) -> None:
    done = _run(tmp_path, "--samples", "1", "--shapes", "gemm_allreduce:8x60x64", "gemm_allreduce:8x64x64")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "N must be a multiple of 8" in done.stdout
    assert "1 shapes in" in done.stdout


def test_a_folder_without_a_tree_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--old", str(tmp_path), "--new", str(ROOT)]
    done = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no mkernel in it" in done.stderr
