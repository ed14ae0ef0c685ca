"""The benchmark prints no time of calls that did not write their result, whenever they stopped doing so, on whichever rank."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import mkernel
from mkernel.bench.report import FUSED, Report, render
from mkernel.bench.worker import measure
from tests.bench.stand_in import World, settings, stand_in

SPLITS = {FUSED: None, "fused compute=4": {"compute": 4}}


def _run(samples: int = 3) -> Report:
    return measure(World(), settings(sizes=("16x8x8",), splits=SPLITS, samples=samples))


def _calls_of(calls: list[dict[str, Any]], contestant: str) -> int:
    return sum(call["split"] == SPLITS[contestant] for call in calls)


@pytest.mark.parametrize("written", [0, 15], ids=["nothing", "all but a row"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("contestant", SPLITS)
def test_calls_that_stop_writing_are_found_whenever_they_stop(
    monkeypatch: pytest.MonkeyPatch, contestant: str, samples: int, written: int
) -> None:
    """From each call of a run on, in turn, warm-ups too, up to the first of the last measurement, whose calls all write one set."""
    honest = stand_in(monkeypatch)
    assert _run(samples).correct
    count = _calls_of(honest, contestant)
    assert count > 10
    for first in range(1, count - samples + 2):

        def rows(calls: list[dict[str, Any]], first: int = first) -> int | None:
            stopped = calls[-1]["split"] == SPLITS[contestant] and _calls_of(calls, contestant) >= first
            return written if stopped else None

        stand_in(monkeypatch, rows=rows)
        report = _run(samples)
        (row,) = report.rows
        assert not report.correct, first
        assert not row.times, first
        assert not row.host, first
        assert "WRONG" in render(report)


def test_the_first_check_does_not_look_at_what_another_contestant_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split whose calls never write anything is found before anything is timed."""
    calls = stand_in(monkeypatch, rows=lambda calls: 0 if calls[-1]["split"] else None)
    assert not _run().correct
    assert len(calls) == 4  # two sets, two splits


@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="target cpu needs a C++ compiler")
@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_that_is_wrong_makes_the_row_wrong_on_all(monkeypatch: pytest.MonkeyPatch, bad: int, op: str) -> None:
    honest = getattr(mkernel, op)

    def spoiled(a: Any, b: Any, *, world: Any, out: Any, split: Any) -> Any:
        honest(a, b, world=world, out=out, split=split)
        if world.rank == bad:
            out[-1, -1] = np.nan
        return out

    monkeypatch.setattr(mkernel, op, spoiled)
    asked = settings(op=op, sizes=("16x8x16",), samples=1)
    for report in mkernel.launch(lambda world: measure(world, asked), ranks=2, target="cpu", heap_bytes=1 << 26):
        assert not report.correct
        assert report.rows[0].worst == float("inf")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_poison_is_never_right(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    stand_in(monkeypatch, rows=lambda calls: 0)
    (row,) = measure(World(), settings(sizes=("16x8x8",), dtype=dtype)).rows
    assert row.worst == float("inf")
