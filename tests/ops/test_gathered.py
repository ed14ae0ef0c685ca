"""``mk.allgather_gemm(gathered=)``: the rows of all ranks, whichever way they have travelled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.ops.schedule import choice_of
from mkernel.planner.k_parts import choose_parts

N = 8


def _gather(world: Any, seed: int, k: int, packets: int, wanted: Any) -> list[int]:
    """Elements that differ, of each of three calls; every rank makes one call that keeps nothing."""
    b, wrong = np.zeros((k, N), np.float16), []
    # As a PreparedPlan passes it on: else K is shared by CTAs, and does not travel in parts.
    tiling = {"shares": 1} | ({"packets": packets} if world.num_nodes == 1 < world.size else {})
    whole = choice_of(None, None, tiling)
    for call, rows in enumerate((40, 0, 130)):
        shards = [np.random.default_rng([seed, call, rank]).standard_normal((rows, k)).astype(np.float16) for rank in range(world.size)]
        gathered = None if call % 3 == world.rank else np.full((rows * world.size, k), np.nan, np.float16)
        mk.allgather_gemm(shards[world.rank], b, gathered=gathered, split=whole)  # type: ignore[arg-type]
        if gathered is not None:
            wrong.append(int((gathered != np.concatenate(shards)).sum()))
    plan: Any = mk.plan("allgather_gemm", shards[0], b, gathered=gathered, tiling=tiling).plan(40)
    assert plan.parts == (wanted if world.size > 1 else 1)
    assert (plan.packets, plan.tagged) == (packets > 0, packets == 2)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "per_node", "k", "packets"),
    [
        (1, None, 64, 0),
        (4, 2, 64, 0),
        (3, None, 4096, 0),
        (3, None, 64, 0),
        (3, None, 4096, 1),
        (2, None, 64, 1),
        (3, None, 4096, 2),
        (2, None, 72, 2),
    ],
)
def test_gathered(ranks: int, per_node: int | None, k: int, packets: int, rng: np.random.Generator) -> None:
    wanted = choose_parts(k) if per_node is None and not packets else 1
    args = (int(rng.integers(1 << 30)), k, packets, wanted)
    found = mk.launch(_gather, ranks, per_node, target="cpu", args=args, heap_bytes=1 << 24)
    assert [sum(wrong) for wrong in found] == [0] * ranks
    assert sum(map(len, found)) == 3 * ranks - min(ranks, 3)
    assert k == 64 or wanted > 1 or packets


def test_a_gathered_that_does_not_fit() -> None:
    def rank(world: Any) -> None:
        a, b, c = np.zeros((16, 64), np.float16), np.zeros((64, N), np.float16), np.zeros((64, 64), np.float16)
        for gathered, rule in (
            (np.zeros((15, 64), np.float16), r"gathered.shape = .*\(M, K\) = \(16, 64\)"),
            (np.zeros((16, 64), np.float32), "gathered.dtype"),
            (np.zeros((64, 16), np.float16).T, "gathered.strides"),
            (c[::4], "gathered.strides.*contiguous"),
            (a, "gathered = .*overlaps a"),
        ):
            with pytest.raises(ArgumentError, match=rule):
                mk.allgather_gemm(a, b, gathered=gathered)
        assert world.call_number == 0

    mk.launch(rank, 1, target="cpu", heap_bytes=1 << 22)
