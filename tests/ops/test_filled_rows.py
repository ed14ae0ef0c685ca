"""No load of A fills rows that are not there with zeros, which takes TMA longer than to load rows (docs/speed_log.md). On target cpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.runtime.cpu.scheduler import scheduler_library
from tests.ops.body import topology
from tests.ops.planted_bug import Bug

_OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
_WORLDS = ("1x1", "1x2", "1x3", "2x2")
_PLANTED = (
    Bug("the last row of tiles is loaded whole", "tile/op.cuh", "return c.m == p.last_row;", "return c.m > p.last_row + 9999;"),
    Bug(
        "rows are loaded for a tile that there is not",
        "tile/op.cuh",
        "if (Shape::kClusterM > 1 && c.m > p.last_row) return 0;",
        "if (Shape::kClusterM > 1 && c.m > p.last_row) return 128;",
    ),
)


def _calls(world: Any, op: str, seed: int, tiling: dict[str, int] | None, fewest: int) -> None:
    """Sizes of whole warps' rows, of whole k steps, and of the widest tile: all that a box may have beside the end of A's rows."""
    draw = np.random.default_rng(seed)
    for _ in range(3):
        rows, n, k = 16 * int(draw.integers(fewest, 30)), 256 * int(draw.integers(1, 3)), 64 * int(draw.integers(4, 9))
        of_a = rows * world.size if op == "gemm_reduce_scatter" else rows
        a, b = np.ones((of_a, k), ml_dtypes.bfloat16), np.ones((k, n), ml_dtypes.bfloat16)
        c: Any = mk.plan(op, a, b, world=world, tiling=tiling).run(a, b)
        factor = 1 if op == "allgather_gemm" else world.size
        assert (np.asarray(c, np.float32) == np.float32(ml_dtypes.bfloat16(k * factor))).all()


def _filled(op: str, world: str, seed: int, tiling: dict[str, int] | None, fewest: int = 1) -> int:
    shape, library = topology(world), scheduler_library()
    before = library.filled_rows()
    mk.launch(_calls, shape.size, shape.ranks_per_node, "cpu", (op, seed, tiling, fewest), seed=seed, heap_bytes=64 << 20)
    return int(library.filled_rows() - before)


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SMS", "8")


@pytest.mark.cases(
    world=_WORLDS,
    op=_OPS,
    tiling=(None, {"cluster": 2}, {"block_n": 128, "shares": 2}),
    valid=lambda world, tiling, **_: "shares" not in (tiling or {}) or world in ("1x2", "1x3"),
)
@pytest.mark.drawn(6)
def test_no_rows_are_filled(request: pytest.FixtureRequest, world: str, op: str, tiling: dict[str, int] | None) -> None:
    assert _filled(op, world, request.config.getoption("--seed"), tiling) == 0


@pytest.mark.parametrize("planted", _PLANTED, ids=lambda bug: bug.name)
def test_what_fills_rows_is_found(request: pytest.FixtureRequest, tmp_path: Path, planted: Bug) -> None:
    seed = request.config.getoption("--seed")
    with planted.in_force(tmp_path / "kernels_src"):
        assert any(_filled("allgather_gemm", "1x1", seed + i, {"cluster": 2}, 9) for i in range(8))
