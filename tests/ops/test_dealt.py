"""CTAs that share K have their parts of it, and of the sums, dealt: each as many, whoever is late. On target cpu."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.abi import TraceKind
from tests.ops.planted_bug import Bug

_SHARES = {"block_n": 64, "shares": 3}
_COUNTED = Bug(
    "numbers are taken from the counter",
    "tile/schedule.cuh",
    "op.shares().shares > 1 && num_comm_ctas(op.p) == 0",
    "op.shares().shares > 99",
)


def _records(world: Any, op: str, tiling: dict[str, int], rows: int) -> list[collections.Counter[int]]:
    """How many shares, and sums, each CTA of a call has had."""
    a, b = np.ones((rows, 392), ml_dtypes.bfloat16), np.ones((392, 200), ml_dtypes.bfloat16)
    plan = mk.plan(op, a, b, world=world, tiling=tiling)
    plan.run(a, b)
    with mk.trace(world) as trace:
        plan.run(a, b)
    kinds = (TraceKind.tile, TraceKind.reduce)
    return [collections.Counter(int(event["cta"]) for event in trace.events if event["kind"] == kind) for kind in kinds]


def _uneven(op: str, tiling: dict[str, int], seed: int) -> int:
    """Ranks of which some CTA has had more, or less, than one share and one sum."""
    found = mk.launch(_records, 2, None, "cpu", (op, tiling, 8), seed=seed, heap_bytes=64 << 20)
    return sum(records != [dict.fromkeys(range(12), 1)] * 2 for records in found)


@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_each_has_a_share_and_a_sum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SMS", "16")
    tilings = [_SHARES | {"packets": packets} for packets in (1, 2)] if op == "allgather_gemm" else [_SHARES]
    seed = request.config.getoption("--seed")
    assert [_uneven(op, tiling, seed + i) for tiling in tilings for i in range(3)] == [0] * (3 * len(tilings))


def test_a_counter_deals_unevenly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the test above would find: who is sooner takes two sums, one after the other."""
    monkeypatch.setenv("MKERNEL_CPU_SMS", "16")
    seed = request.config.getoption("--seed")
    with _COUNTED.in_force(tmp_path / "kernels_src"):
        assert any(_uneven("allgather_gemm", _SHARES | {"packets": 1}, seed + i) for i in range(8))
