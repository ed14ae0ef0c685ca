"""What attention means, in float64, and how far a kernel's result may be off. The reference of ring attention: NumPy or CuPy, no kernel.

Positions are global: of 2W equal chunks of a sequence, rank r of a zigzag world holds chunks r and 2W - 1 - r, in that order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from mkernel.tools.check import UNIT_ROUNDOFF, to_float64

__all__ = ["Attention", "positions", "reference", "worst"]

_SINGLE = 2.0**-23  # of float32, which the matrix unit may truncate to
_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}  # half the spacing of subnormals
_MANY = 256  # elements from which on their mean square says something


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One query row per row of the arrays.

    Attributes
    ----------
    o
        (n, D): the weighted mean of v.
    lse
        (n,): natural log of the sum of exponentials; -inf where a row sees no key.
    o_off, lse_off
        How far each may be off.
    square
        (n, D): the square of an error of ``o`` that is usual: roundings are independent of each other.
    """

    o: Any
    lse: Any
    o_off: Any
    lse_off: Any
    square: Any


def positions(rows: int, rank: int, ranks: int, layout: str) -> Any:
    """Global positions of the ``rows`` rows that a rank holds of a sequence."""
    if layout == "contiguous":
        return rank * rows + np.arange(rows)
    half = rows // 2
    return np.concatenate([chunk * half + np.arange(half) for chunk in (rank, 2 * ranks - 1 - rank)])


def reference(xp: Any, q: Any, k: Any, v: Any, scale: float, dtype: str, visible: Any = None) -> Attention:
    """Attention of query rows ``q`` (n, D) of one head over keys ``k`` and ``v`` (m, D), 16-bit arrays.

    ``visible``: (n, m) booleans, which keys a row sees; None: all. ``xp``: NumPy or CuPy.

    The bound of an element follows the kernel's steps. A score is a sum of D products in float32; the exponential of a score that is off
    by e is off by a factor of 1 + e; it is rounded to 16 bits before it multiplies v, but not in the sum that divides; sums are
    accumulated in float32, block by block, and scaled whenever a row's largest score grows; the quotient is rounded once.
    """
    queries, keys, values = (to_float64(xp, xp.ascontiguousarray(array)) for array in (q, k, v))
    (n, d), m = queries.shape, keys.shape[0]
    unit, smallest = UNIT_ROUNDOFF[dtype], _SMALLEST[dtype]
    if m == 0:
        nothing = xp.zeros((n, d))
        return Attention(nothing, xp.full((n,), -xp.inf), nothing, xp.zeros((n,)), nothing)
    scores = scale * (queries @ keys.T)
    score_off = scale * (d / 8 + 34) * _SINGLE * (xp.abs(queries) @ xp.abs(keys).T) + 4 * _SINGLE * xp.abs(scores)
    if visible is not None:
        scores = xp.where(visible, scores, -xp.inf)
        score_off = xp.where(visible, score_off, 0)
    largest = xp.max(scores, axis=1, keepdims=True)
    some = xp.isfinite(largest)
    shift = xp.where(some, largest, 0.0)
    weights = xp.where(some, xp.exp(scores - shift), 0.0)
    total = xp.sum(weights, axis=1, keepdims=True)
    safe = xp.where(some, total, 1.0)
    p = weights / safe
    o = p @ values
    # Relative errors of a weight beside its 16-bit rounding: of its score and of the row's largest, of exponentials and of scaling.
    off = score_off + xp.max(score_off, axis=1, keepdims=True) + (m / 16 + 64) * _SINGLE
    size = xp.abs(values)
    tiny = smallest / safe  # a small weight is a subnormal, or 0
    weighted = p * (off + unit) + tiny
    before = (p * (2 * off + unit) + tiny) @ size + xp.sum(p * off, axis=1, keepdims=True) * (p @ size) + 2 * _SINGLE * (p @ size)
    o_off = before + unit * (xp.abs(o) + before) + smallest
    square = (weighted**2) @ size**2 + (xp.sum((p * off) ** 2, axis=1, keepdims=True)) * o**2 + unit**2 * o**2 + smallest**2
    lse = xp.where(some, xp.log(safe) + shift, -xp.inf)[:, 0]
    lse_off = xp.minimum(1e-3, xp.sum(p * off, axis=1) + 4 * _SINGLE * (1 + xp.abs(xp.where(some[:, 0], lse, 0.0))))
    return Attention(o, lse, o_off, xp.where(some[:, 0], lse_off, 0.0), square)


def worst(xp: Any, o: Any, lse: Any, expected: Attention) -> float:
    """The largest error of a head's rows, ``o`` (n, D) and ``lse`` (n,), over its bound: right if <= 1. The mean square of ``o``, too."""
    if o.shape[0] == 0:
        return 0.0
    error = xp.abs(to_float64(xp, xp.ascontiguousarray(o)) - expected.o)
    found = [_largest(xp, error, expected.o_off)]
    known = xp.isfinite(expected.lse)
    if not bool(xp.all((lse == -xp.inf) == ~known)):
        return math.inf
    lse_error = xp.abs(xp.where(known, lse, 0).astype(xp.float64) - xp.where(known, expected.lse, 0))
    found.append(_largest(xp, lse_error, expected.lse_off))
    if error.size >= _MANY:  # a row whose key is lost shows here, where each element may be off by a rounding of every weight
        usual = float(xp.mean(expected.square))
        mean = float(xp.mean(error**2))
        found.append(math.sqrt(mean / (4 * usual)) if usual > 0 else (math.inf if mean > 0 else 0.0))
    return max(found, key=lambda value: (value != value, value))


def _largest(xp: Any, error: Any, bound: Any) -> float:
    """max(error / bound); nan where an error is nan."""
    return float(xp.max(xp.where(error == 0, 0.0, error / xp.where(bound > 0, bound, 1e-300))))
