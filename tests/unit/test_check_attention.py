"""The reference of attention is right, and its bound is neither missed by honest arithmetic nor met by a wrong result."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mkernel.tools.attention import positions, reference, worst

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BLOCK = 128


def kernel(q: Any, k: Any, v: Any, scale: float, dtype: str, visible: Any) -> tuple[Any, Any]:
    """What a kernel does, in float32: blocks of keys, a running maximum, weights rounded to 16 bits."""
    queries, keys, values = (array.astype(np.float32) for array in (q, k, v))
    top, total = np.full(len(q), -np.inf, np.float32), np.zeros(len(q), np.float32)
    sums = np.zeros((len(q), v.shape[1]), np.float32)
    for first in range(0, len(k), BLOCK):
        block = slice(first, first + BLOCK)
        scores = np.where(visible[:, block], np.float32(scale * 1.44269504) * (queries @ keys[block].T), -np.inf)
        grown = np.maximum(top, scores.max(1))
        base = np.where(np.isfinite(grown), grown, 0).astype(np.float32)
        weights, factor = np.exp2(scores - base[:, None]), np.exp2(top - base)
        total = total * factor + weights.sum(1)
        sums = sums * factor[:, None] + weights.astype(DTYPES[dtype]).astype(np.float32) @ values[block]
        top = grown
    o = sums / np.where(total > 0, total, 1)[:, None]
    with np.errstate(divide="ignore"):
        return o.astype(DTYPES[dtype]), (top / np.float32(1.44269504) + np.log(total)).astype(np.float32)


def draw(rng: np.random.Generator, n: int, m: int, d: int, dtype: str, size: float) -> tuple[Any, Any, Any, Any]:
    q, k, v = (rng.standard_normal((rows, d)).astype(DTYPES[dtype]) for rows in (n, m, m))
    visible = np.arange(m)[None] <= np.arange(n)[:, None] + (m - n)
    return (q.astype(np.float32) * size).astype(DTYPES[dtype]), k, v, visible


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.1, 1.0, 8.0])
def test_honest_arithmetic_is_right_and_a_lost_key_is_wrong(rng: np.random.Generator, dtype: str, size: float) -> None:
    n, m, d = int(rng.integers(100, 200)), int(rng.integers(400, 1200)), int(rng.choice([64, 128]))
    q, k, v, visible = draw(rng, n, m, d, dtype, size)
    scale = 1 / np.sqrt(d)
    expected = reference(np, q, k, v, scale, dtype, visible)
    o, lse = kernel(q, k, v, scale, dtype, visible)
    assert worst(np, o, lse, expected) <= 1
    lost = np.argsort(-(q[0].astype(np.float64) @ k.astype(np.float64).T) * visible[0])[0]  # a key that counts somewhere
    hidden = visible.copy()
    hidden[:, lost] = False
    assert worst(np, *kernel(q, k, v, scale, dtype, hidden), expected) > 1
    o[3, 5] = 2 * np.abs(o.astype(np.float32)).max()
    assert worst(np, o, lse, expected) > 1


def test_against_plain_softmax(rng: np.random.Generator) -> None:
    q, k, v, visible = draw(rng, 7, 9, 64, "float16", 1.0)
    found = reference(np, q, k, v, 0.3, "float16", visible)
    for row in range(7):
        scores = 0.3 * k[visible[row]].astype(np.float64) @ q[row].astype(np.float64)
        weights = np.exp(scores)
        assert np.allclose(found.o[row], weights @ v[visible[row]].astype(np.float64) / weights.sum(), rtol=1e-12)
        assert np.isclose(found.lse[row], np.log(weights.sum()), rtol=1e-12)


def test_rows_without_keys(rng: np.random.Generator) -> None:
    q, k, v, visible = draw(rng, 5, 6, 64, "bfloat16", 1.0)
    visible[2] = False
    expected = reference(np, q, k, v, 0.1, "bfloat16", visible)
    o, lse = expected.o.astype(DTYPES["bfloat16"]), expected.lse.astype(np.float32)
    assert not expected.o[2].any()
    assert expected.lse[2] == -np.inf
    assert worst(np, o, lse, expected) <= 1
    assert worst(np, o, np.where(np.isinf(lse), 0, lse), expected) == np.inf
    assert worst(np, o[:0], lse[:0], expected) == 0
    nothing = reference(np, q, k[:0], v[:0], 0.1, "bfloat16")
    assert not nothing.o.any()
    assert (nothing.lse == -np.inf).all()


def test_positions_of_both_layouts() -> None:
    assert positions(4, 1, 3, "contiguous").tolist() == [4, 5, 6, 7]
    assert positions(4, 1, 3, "zigzag").tolist() == [2, 3, 8, 9]
