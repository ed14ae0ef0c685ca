"""One drawn call of local attention, every element of it checked. What tests and planted bugs share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.planner.attention_tile import AttentionTile
from mkernel.tools.attention import reference, worst
from tests.ops.attention_op import AttentionRows, local_attention
from tests.shared.findings import errors_are_findings

__all__ = ["Case", "bits", "check", "run"]

_MORE_ROWS, _HEAP = 5, 32 << 20
Array = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    ``padding``: rows of k and v after the keys, which are nobody's. ``transposed``: heads lie inside rows, (B, S, H, D) in memory.
    ``scale``: None is 1 / sqrt(D).
    """

    rows: int
    keys: int
    batches: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    scale: float | None = None
    q_position: int = 0
    tile_rows: int = 0
    chunk: int = 0
    parts: int = 1
    missing: int = -1
    reuses: bool = False
    padding: int = 0
    transposed: bool = False
    sizes: str = "plain"  # of scores; "growing": the largest comes last; "large": some outweigh all others
    tile: AttentionTile | None = None


def _array(shape: tuple[int, int, int, int], transposed: bool, dtype: Any, fill: float = 0.0) -> tuple[Array, Array]:
    """Memory, and the tensor in it: other elements stand after each row, after the last row of each head, and after the last head."""
    batches, heads, rows, columns = shape
    if transposed:
        memory = np.full((batches, rows + 2, heads + 1, columns + 8), fill, dtype)
        return memory, memory[:, :rows, :heads, :columns].transpose(0, 2, 1, 3)
    memory = np.full((batches, heads + 1, rows + 2, columns + 8), fill, dtype)
    return memory, memory[:, :heads, :rows, :columns]


def _numbers(rng: np.random.Generator, case: Case, heads: int, rows: int) -> Array:
    return rng.standard_normal((case.batches, heads, rows, case.head_dim))


def _scale(case: Case) -> float:
    return case.scale or 1 / math.sqrt(case.head_dim)


def _options(case: Case) -> dict[str, Any]:
    options = {name: getattr(case, name) for name in ("causal", "q_position", "tile_rows", "chunk", "parts", "missing", "reuses", "tile")}
    return options | {"scale": _scale(case), "keys": case.keys if case.padding else 0}


def _operands(case: Case, rng: np.random.Generator) -> list[Array]:
    """q, k and v, with the rows of nobody."""
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    scale = _scale(case)
    shapes = {"q": (case.heads, case.rows), "k": (case.kv_heads, case.keys), "v": (case.kv_heads, case.keys)}
    numbers = {name: _numbers(rng, case, *shape) for name, shape in shapes.items()}
    if case.sizes == "growing":  # q and k have a common part, which grows from key to key
        numbers["q"][..., 0] = 4
        numbers["k"][..., 0] = np.linspace(-40, 40, case.keys) / scale / 4
    elif case.sizes == "large":
        numbers["k"] *= rng.choice((1, 30), (case.keys, 1))
    arrays = {}
    for name, value in numbers.items():
        batches, heads, rows, columns = value.shape
        padding = 0 if name == "q" else case.padding
        _, arrays[name] = _array((batches, heads, rows + padding, columns), case.transposed, dtype, np.nan)  # what is nobody's is NaN
        arrays[name][:, :, :rows] = value
    return list(arrays.values())


def _call(world: Any, case: Case, seed: int) -> str | None:
    """What is wrong with one rank's call."""
    q, k, v = _operands(case, np.random.default_rng([seed, world.rank]))
    scale = _scale(case)
    # The call is given some rows after the last one, too.
    memory, o = _array((*q.shape[:2], case.rows + _MORE_ROWS, q.shape[3]), case.transposed, q.dtype, np.nan)
    lse_memory = np.full((math.prod(q.shape[:3]) + 7,), np.nan, np.float32)
    lse = lse_memory[: math.prod(q.shape[:3])].reshape(q.shape[:3])
    given = k[:, :, : case.keys].copy(), v[:, :, : case.keys].copy()
    local_attention(q, k, v, out=AttentionRows(o, lse), **_options(case))
    k, v = given
    outside = memory.copy()
    found = np.array(o)[:, :, : case.rows]
    _inside(outside, case.transposed, q.shape)[...] = np.nan
    if not np.isnan(outside.astype(np.float32)).all() or not np.isnan(lse_memory[lse.size :]).all():
        return "wrong: elements outside of the result were written"
    visible = np.arange(case.keys) <= case.q_position + np.arange(case.rows)[:, None] if case.causal else None
    for b in range(case.batches):
        for h in range(case.heads):
            group = h // (case.heads // case.kv_heads)
            expected = reference(np, q[b, h], k[b, group], v[b, group], scale, case.dtype, visible)
            error = worst(np, found[b, h], lse[b, h], expected)
            if not error <= 1:
                return f"wrong: batch {b}, head {h}: {error} times the bound"
    return None


def _inside(memory: Array, transposed: bool, shape: tuple[int, ...]) -> Array:
    batches, heads, rows, columns = shape
    return memory[:batches, :rows, :heads, :columns] if transposed else memory[:batches, :heads, :rows, :columns]


def _calls(world: Any, cases: tuple[Case, ...], seed: int) -> list[str | None]:
    return [_call(world, case, seed + 1000 * i) for i, case in enumerate(cases)]


def run(cases: tuple[Case, ...], seed: int, ranks: int = 1) -> str | None:
    """What is wrong with these calls, one after the other."""
    found = mk.launch(_calls, ranks, ranks, "cpu", (cases, seed), seed=seed, heap_bytes=_HEAP, timeout=5.0, entry_timeout=20.0)
    return next((wrong for of_rank in found for wrong in of_rank if wrong), None)


def _bits(world: Any, case: Case, seed: int) -> bytes:
    o, lse = local_attention(*_operands(case, np.random.default_rng(seed)), **_options(case))
    return bytes(o.tobytes() + lse.tobytes())


def bits(case: Case, inputs: int, seed: int) -> bytes:
    """The results of one call with these inputs, under this schedule."""
    result: bytes = mk.launch(_bits, 1, 1, "cpu", (case, inputs), seed=seed, heap_bytes=_HEAP)[0]
    return result


check = errors_are_findings(run)  # the same, where errors are findings, too
