"""One drawn call of the grouped GEMM, every element of it checked. What tests and planted bugs share."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.tools.check import UNIT_ROUNDOFF, to_float64, worst_product
from tests.ops.grouped_op import GroupedRows, grouped_gemm
from tests.shared.findings import errors_are_findings

__all__ = ["Case", "check", "draw_counts", "run"]

_EDGES = (0, 0, 1, 7, 63, 64, 65, 127, 128, 129, 192, 200)
_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}
Array = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. ``counts``: rows of each expert; ``pitch``: elements between the ends of rows in memory."""

    n: int
    k: int
    counts: tuple[int, ...]
    dtype: str = "bfloat16"
    row_major: bool = True
    gated: bool = False
    aligned: bool = False
    clamp: float = 0.0
    block_n: int = 256
    enters: bool = True
    group_m: int = 2
    pitch: int = 8


def draw_counts(rng: np.random.Generator, experts: int) -> tuple[int, ...]:
    """Edges of tiles and masks, in any order, and now and then a hot expert."""
    counts = rng.choice(_EDGES, experts)
    if experts and rng.random() < 0.3:
        counts[rng.integers(experts)] = rng.integers(200, 500)
    return tuple(int(count) for count in counts)


def _reference_error(case: Case, c: Array, a: Array, w: Array) -> float:
    """The largest error of one expert's rows over what rounding allows."""
    if not case.gated:
        return worst_product(np, c, a, w)
    a64, w64 = to_float64(np, a), to_float64(np, w)
    n, unit = case.n, UNIT_ROUNDOFF[case.dtype]
    both, error = a64 @ w64, (case.k / 8 + 32) * 2.0**-23 * (np.abs(a64) @ np.abs(w64))
    gate, up, gate_error, up_error = both[:, :n], both[:, n:], error[:, :n], error[:, n:]
    if case.clamp > 0:  # cutting off moves no two values further apart
        gate, up = np.minimum(gate, case.clamp), np.clip(up, -case.clamp, case.clamp)
    silu = gate / (1 + np.exp(-gate))
    reference = silu * up
    silu_error = 1.1 * gate_error + np.abs(silu) * (np.abs(gate) + 8) * 2.0**-23 + 2.0**-119  # 1.1: the largest slope of silu
    bound = silu_error * (np.abs(up) + up_error) + np.abs(silu) * up_error + np.abs(reference) * 2.0**-23
    bound = bound * (1 + unit) + unit * np.abs(reference) + _SMALLEST[case.dtype]
    ratio = np.abs(to_float64(np, c) - reference) / bound
    return float("inf") if np.isnan(ratio).any() else float(ratio.max())


def _padded(rows: int, columns: int, pitch: int, dtype: Any, fill: float) -> tuple[Array, Array]:
    """Memory, and the matrix in it: ``pitch`` more elements stand after each row, and some rows after the last one."""
    memory = np.full((rows + 3, columns + pitch), fill, dtype)
    return memory, memory[:rows, :columns]


def _call(world: Any, case: Case, seed: int) -> str | None:
    """What is wrong with one rank's call."""
    rng = np.random.default_rng([seed, world.rank])
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    counts = np.array(case.counts, np.int32)
    experts, total = len(counts), int(counts.sum())
    columns = 2 * case.n if case.gated else case.n
    taken = -(-counts // 64) * 64 if case.aligned else counts  # rows of a
    begins = np.cumsum(taken) - taken
    _, a = _padded(int(taken.sum()) if case.aligned else total, case.k, case.pitch, dtype, np.nan)  # rows of nobody are NaN
    for begin, count in zip(begins, counts, strict=True):
        a[begin : begin + count] = rng.standard_normal((count, case.k))
    weights = rng.standard_normal((experts, case.k, columns)) / np.sqrt(case.k)
    if case.row_major:
        w = np.zeros((experts, case.k, columns + case.pitch), dtype)[:, :, :columns]
    else:
        w = np.zeros((experts, columns, case.k + case.pitch), dtype)[:, :, : case.k].transpose(0, 2, 1)
    w[...] = weights
    memory, c = _padded(total, case.n, case.pitch, dtype, np.nan)  # the call is given the rows after the last one, too
    copy = np.full((total + 3, case.n), np.nan, dtype)
    options = {name: getattr(case, name) for name in ("gated", "aligned", "clamp", "block_n", "enters", "group_m")}
    grouped_gemm(a, w, counts, out=GroupedRows(memory[:, : case.n], copy), **options)
    outside = np.ones(memory.shape, bool)
    outside[:total, : case.n] = False
    if not np.isnan(memory[outside]).all() or not np.isnan(copy[total:]).all():
        return "wrong: rows or columns outside of the result were written"
    if (c.view(np.uint16) != copy[:total].view(np.uint16)).any():
        return f"wrong: tiles were announced before they were there, in rows {np.flatnonzero((c != copy[:total]).any(1))[:8]}"
    ends = np.cumsum(counts)
    for e, (begin, end, count) in enumerate(zip(begins, ends, counts, strict=True)):
        if count:
            worst = _reference_error(case, c[end - count : end], a[begin : begin + count], w[e])
            if not worst <= 1:
                return f"wrong: expert {e} of counts {case.counts}, {worst} times the bound"
    return None


def _calls(world: Any, cases: tuple[Case, ...], seed: int) -> list[str | None]:
    return [_call(world, case, seed + 1000 * i) for i, case in enumerate(cases)]


def run(cases: tuple[Case, ...], seed: int, ranks: int = 1) -> str | None:
    """What is wrong with these calls, one after the other."""
    found = mk.launch(_calls, ranks, ranks, "cpu", (cases, seed), seed=seed, heap_bytes=4 << 20, timeout=5.0, entry_timeout=20.0)
    return next((wrong for of_rank in found for wrong in of_rank if wrong), None)


check = errors_are_findings(run)  # the same, where errors are findings, too
