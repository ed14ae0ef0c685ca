"""Is a result of the MoE ops right? Every element against float64, within a bound that follows from the arithmetic step by step.

``Rows`` are exact values with what roundings have done to them so far; ``product``, ``swiglu`` and ``rounded`` are the steps of a kernel,
``Combined`` the sums of a token. Works with NumPy and CuPy. ``mkernel/tools/check.py`` says where the numbers come from.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from mkernel.tools.check import UNIT_ROUNDOFF, to_float64

__all__ = ["Combined", "Rows", "exact", "product", "rounded", "swiglu", "worst_rows"]

_SINGLE = 2.0**-23  # of float32, which the matrix unit may truncate to
_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}  # half the spacing of subnormals
_BLOCK = 128  # rows and columns whose errors are looked at together
_MANY = 1024  # elements from which on their mean square says something


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Values in float64.

    Attributes
    ----------
    value
        What they would be without rounding.
    off
        How far each may be off.
    square
        The square of an error that is usual: of roundings that are independent of each other.
    """

    value: Any
    off: Any
    square: Any

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.value[rows], self.off[rows], self.square[rows])


def exact(xp: Any, array: Any) -> Rows:
    """The rows of a 16-bit array, as they are."""
    value = to_float64(xp, xp.ascontiguousarray(array))
    return Rows(value, xp.zeros_like(value), xp.zeros_like(value))


def product(xp: Any, rows: Rows, w: Any) -> Rows:
    """``rows`` (n, K) @ ``w`` (K, N), a 16-bit matrix, accumulated in float32."""
    k = int(w.shape[0])
    b = to_float64(xp, xp.ascontiguousarray(w))
    value, size = rows.value @ b, xp.abs(b)
    magnitude = (xp.abs(rows.value) + rows.off) @ size
    usual = (k / 16 * _SINGLE) ** 2 * (value**2 + magnitude**2 / k)
    return Rows(value, rows.off @ size + (k / 8 + 32) * _SINGLE * magnitude, rows.square @ b**2 + usual)


def swiglu(xp: Any, rows: Rows) -> Rows:
    """silu(gate) * up of rows (n, 2 F) = [gate | up], in float32.

    The slope of silu is between -0.1 and 1.1.
    """
    half = rows.value.shape[1] // 2
    gate, up = (Rows(rows.value[:, part], rows.off[:, part], rows.square[:, part]) for part in (slice(half), slice(half, None)))
    silu = gate.value / (1 + xp.exp(-gate.value))
    value = silu * up.value
    own = (xp.abs(gate.value) + 16) * _SINGLE * xp.abs(value)  # of the exponential, the quotient and the product
    off = 1.1 * gate.off * (xp.abs(up.value) + up.off) + xp.abs(silu) * up.off + own
    return Rows(value, off, 1.21 * gate.square * (up.value**2 + up.square) + silu**2 * up.square + own**2)


def rounded(xp: Any, rows: Rows, dtype: str) -> Rows:
    """The rows, rounded once to ``dtype``."""
    unit, smallest = UNIT_ROUNDOFF[dtype], _SMALLEST[dtype]
    off = rows.off + unit * (xp.abs(rows.value) + rows.off) + smallest
    return Rows(rows.value, off, rows.square + unit**2 * (rows.value**2 + rows.square) + smallest**2)


class Combined:
    """The weighted sums of a rank's tokens: node by node, the own one among them, in float32.

    Parameters
    ----------
    tokens, columns
        T and H.
    dtype
        To which the sums of other nodes are rounded, and the result.
    """

    def __init__(self, xp: Any, tokens: int, columns: int, dtype: str) -> None:
        self._xp, self._dtype, self._shape = xp, dtype, (tokens, columns)
        self._total = self._zeros()

    def _zeros(self) -> Rows:
        return Rows(*(self._xp.zeros(self._shape, dtype=self._xp.float64) for _ in range(3)))

    def begin_node(self) -> None:
        """What is added from now on is of the next node."""
        self._node, self._magnitude = self._zeros(), self._xp.zeros(self._shape, dtype=self._xp.float64)

    def add(self, tokens: Any, weights: Any, rows: Rows) -> None:
        """Row i of ``rows``, times ``weights[i]`` (float32), to token ``tokens[i]``; the tokens are all different."""
        weight = self._xp.asarray(weights, dtype=self._xp.float64)[:, None]
        self._node.value[tokens] += weight * rows.value
        self._node.off[tokens] += self._xp.abs(weight) * rows.off
        self._node.square[tokens] += weight**2 * rows.square
        self._magnitude[tokens] += self._xp.abs(weight) * (self._xp.abs(rows.value) + rows.off)

    def end_node(self, own: bool, additions: int) -> None:
        """The node is complete; at most so many values have been added for a token."""
        single = 2 * (additions + 1) * _SINGLE * self._magnitude
        node = Rows(self._node.value, self._node.off + single, self._node.square + single**2)
        node = node if own else rounded(self._xp, node, self._dtype)
        total = self._total
        off = total.off + node.off + _SINGLE * self._magnitude
        self._total = Rows(total.value + node.value, off, total.square + node.square + (_SINGLE * self._magnitude) ** 2)

    def result(self, add: Any = None) -> Rows:
        """The sums of all nodes, and ``add`` (T, H), rounded once."""
        total = self._total
        if add is not None:
            more = to_float64(self._xp, self._xp.ascontiguousarray(add))
            total = dataclasses.replace(total, value=total.value + more, off=total.off + _SINGLE * self._xp.abs(more))
        return rounded(self._xp, total, self._dtype)


def worst_rows(xp: Any, out: Any, rows: Rows) -> float:
    """The largest error of ``out``, a 16-bit array, over what is allowed: right if at most 1; inf if an element is not finite.

    By element, and by blocks of 128 x 128, or what there is: the mean square of the errors against what is usual. That finds a lost part
    of a sum where the bound by element has grown with the number of terms. Blocks of few elements are looked at by element only.

    Raises
    ------
    ValueError
        ``out`` has another shape.
    """
    if tuple(out.shape) != tuple(rows.value.shape):
        raise ValueError(f"the result has shape {tuple(out.shape)}, expected {tuple(rows.value.shape)}")
    if not out.size:
        return 0.0
    error = xp.abs(to_float64(xp, xp.ascontiguousarray(out)) - rows.value)
    if not bool(xp.isfinite(error).all()):
        return float("inf")
    worst = float((error / rows.off).max())
    (error_sums, sizes), (usual_sums, _) = (_of_blocks(xp, squares) for squares in (error**2, rows.square))
    looked_at = (sizes >= _MANY) & (error_sums > 0)
    ratios = xp.where(looked_at, error_sums / xp.where(looked_at, usual_sums, 1.0), 0.0)
    return max(worst, math.sqrt(float(ratios.max())))


def _of_blocks(xp: Any, array: Any) -> tuple[Any, Any]:
    """Sums over blocks of 128 x 128, or what there is, and how many elements each has."""
    extents = [xp.asarray(np.diff([*range(0, extent, _BLOCK), extent])) for extent in array.shape]
    padded = [-(-extent // _BLOCK) * _BLOCK for extent in array.shape]
    whole = xp.zeros(padded)
    whole[: array.shape[0], : array.shape[1]] = array
    sums = whole.reshape(padded[0], -1, _BLOCK).sum(axis=2).reshape(-1, _BLOCK, padded[1] // _BLOCK).sum(axis=1)
    return sums, extents[0][:, None] * extents[1][None]
