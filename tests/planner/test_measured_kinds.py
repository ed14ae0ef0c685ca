"""The kinds of tiles that compete in a world of one, timed on fresh shapes (tests/gpu/kinds.py): how well the model ranks them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkernel.planner import predict_gemm, tile_cost
from mkernel.planner.machine import H200, Machine, changed
from tests.gpu.kinds import errors, read

FOLDER = Path(__file__).parents[2] / "docs" / "kinds"
_DRAWN = read([FOLDER / name for name in ("drawn-2026-12-01.json", "divided-2026-12-01.json", "widths-2026-12-01.json")])
_WITHIN, _LOST = 0.047, 0.012  # as docs/model.md says, and a little more


def is_as_near(machine: Machine) -> bool:
    return all(error.within_shapes <= _WITHIN and error.lost <= _LOST for error in errors(_DRAWN, machine))


def test_what_is_ranked_first_is_hardly_slower_than_the_fastest() -> None:
    assert is_as_near(H200)


@pytest.mark.parametrize(
    "worse",
    [
        lambda patch: changed(H200, sm_load=H200.sm_load * 0.6),
        lambda patch: changed(H200, l2_rows_split=H200.l2_rows_split / 2),
        lambda patch: patch.setattr(tile_cost, "_RECEIVED", 1.5) or H200,
        lambda patch: patch.setattr(predict_gemm, "_PAIR_START", 0.0) or H200,
        lambda patch: patch.setattr(tile_cost, "_STEP", 0.03e-6) or H200,
        lambda patch: (
            patch.setattr(tile_cost, "_SWAPPED", {columns: dict.fromkeys((1, 2, 4), 1.2) for columns in (64, 128, 192, 256)}) or H200
        ),
    ],
    ids=["loads", "L2", "received rows", "clusters", "steps", "swapped operands"],
)
def test_a_wrong_constant_is_found(worse: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_as_near(worse(monkeypatch))
