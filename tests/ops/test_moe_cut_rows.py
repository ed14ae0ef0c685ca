"""Who combines may have another number of rows than the dispatch made room for: those that came are enough, and fewer are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.ops.body import topology
from tests.ops.planted_bug import Bug

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 26, "specialize": "none", "timeout": 5.0, "entry_timeout": 20.0}
WORLDS = ["1x1", "1x2", "1x3", "2x2"]
H = 64


def _cut(world: Any, seed: int, by: int, product: bool) -> list[str]:
    """Rows that a dispatch brought are combined out of an array with ``by`` rows more than any rank got; sums of integers."""
    size, each = world.size, 2
    rng = np.random.default_rng(seed)
    tokens, topk = int(rng.integers(8, 60)), int(rng.integers(1, each * size + 1))
    ids = np.array([[rng.permutation(each * size)[:topk] for _ in range(tokens)] for _ in range(size)], np.int32)
    x = rng.integers(-4, 5, (size, tokens, H)).astype(np.float16)
    most = int(np.bincount((ids // each).reshape(-1), minlength=size).max())
    identity = np.broadcast_to(np.eye(H, dtype=np.float16), (each, H, H)).copy()
    d = mk.moe_dispatch_gemm(x[world.rank].copy(), ids[world.rank].copy(), identity, max_tokens=64)
    world.synchronize()
    rows = np.full((most + by, H), np.nan, np.float16)
    rows[: min(most + by, len(d.y))] = np.array(d.y)[: most + by]
    y = mk.moe_gemm_combine(rows, identity, d.routing) if product else mk.moe_combine(rows, d.routing)
    world.synchronize()
    return [] if np.array_equal(y, topk * x[world.rank]) else [f"{tokens} tokens, top-{topk}, {most} + {by} rows"]


def launch(world: str, *args: Any) -> list[Any]:
    shape = topology(world)
    return mk.launch(_cut, shape.size, shape.ranks_per_node, args=args, **WORLD)


@pytest.mark.parametrize("product", [False, True], ids=["moe_combine", "moe_gemm_combine"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(4)
def test_rows_that_came_are_enough(rng: np.random.Generator, world: str, product: bool) -> None:
    for by in (0, int(rng.integers(1, 100)), 1000):  # the last are more than the dispatch made room for
        assert launch(world, int(rng.integers(1 << 30)), by, product) == [[]] * topology(world).size, by


@pytest.mark.parametrize("product", [False, True], ids=["moe_combine", "moe_gemm_combine"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(3)
def test_fewer_are_refused(rng: np.random.Generator, world: str, product: bool) -> None:
    """Some ranks lack a row. Nobody waits, and nothing behind the end of an array is read."""
    with pytest.raises(mk.MismatchError, match=r"\d+ rows came to its experts, call 2 \(moe_\w*combine.*\) was given \d+ of them"):
        launch(world, int(rng.integers(1 << 30)), -1, product)


_UNSEEN = Bug("too few rows are not noticed", "moe/combine.cuh", "came <= p.combining.max_rows || is_skipped(call)", "true")


def test_unnoticed_rows_are_seen(rng: np.random.Generator, tmp_path: Path) -> None:
    """The call's results are wrong, or it ends for another reason."""
    with _UNSEEN.in_force(tmp_path / "kernels_src"):
        for seed in rng.integers(1 << 30, size=6):
            try:
                if launch("1x2", int(seed), -1, True) != [[]] * 2:
                    return
            except mk.MismatchError:
                pytest.fail("they were noticed")
            except mk.Error:
                return
    pytest.fail("not seen")
