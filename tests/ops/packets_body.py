"""Gathers of few rows, which travel in packets, beside what is rare: NaNs with all bits set, calls that are skipped after a refused one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.ops.schedule import Choice
from mkernel.planner.tiling import Tiling
from tests.ops.body import aligned, topology
from tests.ops.refused_body import running_ahead
from tests.ops.sequence_body import FOREVER, MODEL, MOST, H, experts, integers
from tests.shared.findings import errors_are_findings, wrong_of

__all__ = ["IN_CLUSTERS", "WORKLOADS", "found_wrong", "of_late", "of_nans", "of_skipped"]

_DTYPES = (ml_dtypes.bfloat16, np.float16)
_K, _N = 72, 24
_ALL_BITS = 0xFFFFFFFF  # of a pair of values: NaNs of either type
_CALLS = 4


def with_nans(rng: np.random.Generator, rows: int, dtype: Any) -> Any:
    """Integers; in some rows NaNs: pairs of all bits and of any others, and values whose pair is none."""
    a = aligned((rows, _K), np.dtype(dtype).name)
    a[...] = rng.integers(-4, 5, a.shape)
    words, halves = a.view(np.uint32), a.view(np.uint16)
    for row in np.flatnonzero(rng.random(rows) < 0.4):
        words[row, rng.integers(_K // 2, size=3)] = rng.choice((_ALL_BITS, 0x7FFFFFFF, 0xFFFF7FFF, 0x80008000))
        words[row, rng.integers(_K // 2)] = _ALL_BITS
        halves[row, rng.integers(_K, size=2)] = rng.choice((0xFFFF, 0x7FFF))
    return a


def of_nans(world: Any, seed: int, split: Any) -> list[str]:
    """What is wrong with calls on operands in which some rows have NaNs: these are NaN in the result, and no others."""
    wrong = []
    for call in range(_CALLS):
        dtype, rows = _DTYPES[call % 2], 1 + (seed + 29 * call) % 60
        shards = [with_nans(np.random.default_rng([seed, call, rank]), rows, dtype) for rank in range(world.size)]
        b = np.random.default_rng([seed, call, world.size]).integers(1, 5, (_K, _N)).astype(dtype)
        gathered = np.empty((rows * world.size, _K), dtype) if call >= 2 else None
        c = mk.allgather_gemm(shards[world.rank], b, gathered=gathered, split=split, world=world)
        a = np.concatenate(shards).astype(np.float32)
        expected = (a @ b.astype(np.float32)).astype(dtype).astype(np.float32)
        if not np.array_equal(c.astype(np.float32), expected, equal_nan=True):
            wrong.append(f"call {call} of {rows} rows: {np.dtype(dtype).name}, NaNs where there are none, or others")
        if gathered is not None and not np.array_equal(gathered.astype(np.float32), a, equal_nan=True):
            wrong.append(f"call {call} of {rows} rows: what is gathered")
    return wrong


def of_skipped(world: Any, seed: int, split: Any) -> list[str]:
    """What is wrong with calls that follow a refused one, after which each rank has launched some that are skipped."""
    wrong = []
    rng = np.random.default_rng(seed)
    ids = np.arange(6, dtype=np.int32).reshape(3, 2) % (MODEL.experts * world.size)
    x, w = np.ones((3, H), np.float16), experts(world, np.arange(1, 1 + MODEL.experts * world.size))

    def gather(rows: int, number: int) -> bool:
        a = [integers(seed + 100 * number + rank, rows, _K) for rank in range(world.size)]
        b = integers(seed + 100 * number + 99, _K, _N)
        c = mk.allgather_gemm(a[world.rank], b, split=split, world=world)
        return np.array_equal(c, np.concatenate(a).astype(np.float32) @ b.astype(np.float32))

    for number in range(_CALLS):
        mk.moe_dispatch_gemm(x, ids, w, max_tokens=MOST)
        sizes, ahead = [int(rows) for rows in rng.integers(1, 200, 2)], rng.integers(1, 4, world.size)
        wrong += [f"round {number}, {rows} rows" for rows in sizes if not gather(rows, 2 * number)]
        try:
            with running_ahead(world):
                mk.moe_dispatch_gemm(x, np.full_like(ids, 999) if world.rank == number % world.size else ids, w, max_tokens=MOST)
                for _ in range(int(ahead[world.rank])):
                    gather(sizes[0], 2 * number)
                world.check()
            wrong.append(f"round {number}: nothing was refused")
        except mk.RoutingError:
            pass
        wrong += [f"round {number}, {rows} rows after the refused call" for rows in sizes * 2 if not gather(rows, 2 * number + 1)]
    return wrong


def of_late(world: Any, seed: int, split: Any) -> list[str]:
    """What is wrong with calls in which one CTA of a rank rests as soon as it has begun to load B: others may be a call ahead of it."""
    wrong, rng = [], np.random.default_rng(seed)
    b = integers(seed + 99, _K, 264)
    for call in range(12):
        rows, who, cta = (int(rng.integers(most)) for most in (90, world.size, 4))
        if who == world.rank:
            world.backend.thread_ranks.hold(who, FOREVER, 1, cta)
        a = [integers(seed + 100 * call + rank, rows, _K) for rank in range(world.size)]
        c = mk.allgather_gemm(a[world.rank], b, split=split, world=world)
        if not np.array_equal(c, np.concatenate(a).astype(np.float32) @ b.astype(np.float32)):
            wrong.append(f"call {call} of {rows} rows")
    return wrong


_SKIPPED = "packets after a refused call"
_WHAT: dict[str, Callable[[Any, int, Any], list[str]]] = {
    "nans in packets": of_nans,
    _SKIPPED: of_skipped,
    "packets of late CTAs": of_late,
}
_KINDS = {  # as a PreparedPlan passes them on
    "": Tiling(64, packets=1),
    ", tagged": Tiling(64, packets=2),
    ", fours": Tiling(64, None, 1, 2, 1, 2),
}
WORKLOADS = [name + kind for name in _WHAT for kind in _KINDS]
# In a world of one: clusters of CTAs that share K, each of which has more tiles than one, where there are two CTAs.
IN_CLUSTERS = "a refused call before clusters that share K"


@errors_are_findings
def found_wrong(world: str, workload: str, seed: int) -> str | None:
    name, comma, kind = workload.partition(",")
    name, tiling = (_SKIPPED, Tiling(64, cluster_k=2)) if workload == IN_CLUSTERS else (name, _KINDS[comma + kind])
    shape = topology(world)
    options: dict[str, Any] = {"heap_bytes": 16 << 20, "timeout": 5.0, "entry_timeout": 60.0, "seed": seed}
    args = seed, Choice(None, None, tiling)
    return wrong_of(mk.launch(_WHAT[name], shape.size, shape.ranks_per_node, "cpu", args, **options))
