"""An op from a folder outside the package is known to ``mk.plan`` and to all commands. Its results: ``test_allgather_rows.py``."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.bench.cases import ops
from mkernel.cli import demo_rank
from mkernel.ops.op import BUILT_IN, find, names
from mkernel.proxy.spawn import without_launcher
from tests.shared.worlds import found_wrong
from tests.small_op.op import OP, GatheredRows, allgather_rows

NAME, MODULE = "allgather_rows", "tests.small_op.op"
WORLDS = ("1x1", "1x2", "1x3", "2x2", "3x1", "3x2")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_OPS", MODULE)


def command(*arguments: str) -> str:
    """What a command of mkernel prints that knows of the op by the environment only."""
    environment = without_launcher(os.environ) | {"MKERNEL_OPS": MODULE, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-m", "mkernel", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# ---- one line registers it


def test_it_is_an_op_like_any_other() -> None:
    assert names() == (*BUILT_IN, NAME)
    assert find(NAME) is OP
    assert OP.row().startswith("| `mk.allgather_rows(x)` | ")
    assert NAME in ops()


def test_a_plan_is_good_for_any_number_of_rows_and_each_rank_has_its_own() -> None:
    def rank(world: Any) -> list[bool]:
        x = np.full((100, 64), world.rank, np.float16)
        plan = mk.plan(NAME, x, max_rows=200)
        assert plan.max_rows == 200
        assert plan.split().intra_comm == plan.plan().split.intra_comm
        assert plan.describe().startswith("allgather_rows: up to 200 rows of 64 float16")
        before, right = world.problems.collectives, []
        for number in (0, 5, 80):
            counts = [number if r == 0 else 100 for r in range(world.size)]
            rows, offsets = plan.run(x[: counts[world.rank]])
            right.append(offsets.tolist() == [0, *itertools.accumulate(counts)])
            right.append(all((rows[offsets[r] : offsets[r + 1]] == r).all() for r in range(world.size)))
        assert world.problems.collectives == before
        return right

    assert mk.launch(rank, 2, target="cpu") == [[True] * 6] * 2


def test_results_may_be_given_and_come_as_a_named_tuple() -> None:
    def rank(world: Any) -> None:
        x = np.full((3, 8), 1 + world.rank, np.float16)
        out = np.zeros((7, 8), np.float16), np.zeros(3, np.int32)
        result = allgather_rows(x, max_rows=7, out=out)
        assert isinstance(result, GatheredRows)
        assert result.rows is out[0]
        assert result.offsets is out[1]
        assert out[1].tolist() == [0, 3, 6]
        with pytest.raises(mk.ArgumentError, match="must be a tuple of 2 arrays: rows, offsets"):
            allgather_rows(x, max_rows=7, out=out[0])

    mk.launch(rank, 2, target="cpu")


def test_a_module_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_OPS", f"{MODULE},tests.no_such_op")
    with pytest.raises(mk.ArgumentError, match=r"MKERNEL_OPS = .*tests\.no_such_op.*: cannot be imported: "):
        names()


# ---- commands


def test_the_demo_shows_it() -> None:
    shown = [case for case in demo_rank.cases("cpu", 4) if case.op == NAME]
    assert {case.dtype for case in shown} == {"bfloat16", "float16"}
    assert len(shown) == 4


def test_bench_measures_it(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    arguments = ["--allow-cpu", "--world", "1x2", "--shapes", "300x64", "--samples", "2", "--launcher", "processes", "--out", str(out)]
    printed = command("bench", NAME, *arguments)
    assert "300x64" in printed
    assert "fused" in json.dumps(json.loads(out.read_text()))


def test_model_and_tune_know_it() -> None:
    assert "allgather_rows: up to 1027 rows of 4096 bfloat16" in command("model", NAME, "--world", "2x2", "--shapes", "1024x4096")
    assert "rows of a" in command("model", NAME, "--world", "1x4", "--shapes", "1024x4096", "--max-rows", "64")
    assert NAME in command("tune", "--help")


# ---- the checks of any op


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(2)
def test_every_element_is_right_under_any_schedule(rng: np.random.Generator, world: str) -> None:
    sizes = tuple(f"{rng.integers(1, 900)}x{8 * rng.integers(1, 40)}" for _ in range(3))
    seed = int(rng.integers(1 << 30))
    assert found_wrong(NAME, world, str(rng.choice(("bfloat16", "float16"))), sizes, seed) is None, (sizes, seed)
