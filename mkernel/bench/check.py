"""Is a result right? Every element against float64, computed on the device in blocks of rows."""

from __future__ import annotations

from typing import Any

from mkernel.cli.check import UNIT_ROUNDOFF

__all__ = ["to_float64", "worst_product"]

_BLOCK_ROWS = 2048  # a block of float64 rows at K = 32768 is 512 MiB
_TILE = 128


def to_float64(xp: Any, array: Any) -> Any:
    """A 16-bit array as float64. Works on the bits, so that no library needs to know bfloat16."""
    if str(array.dtype) == "float16":
        return array.astype(xp.float64)
    return (array.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32).astype(xp.float64)


def worst_product(xp: Any, out: Any, a: Any, b: Any) -> float:
    """How far ``out`` (M, N) is from ``a`` (M, K) @ ``b`` (K, N), over what rounding allows: right if <= 1; inf if not finite.

    The larger of two ratios. Element by element: one rounding to the output's dtype, plus K/8 + 32 float32 roundings of the sum of
    magnitudes (the matrix unit adds 16 products at a time and may truncate). Tile by tile: the root mean square of the errors over that of
    the values, which sees a skipped slice of K that the worst-case bound, linear in K, would let pass.
    """
    if not out.size:
        return 0.0
    k = int(a.shape[1])
    roundoff, accumulated = UNIT_ROUNDOFF[str(out.dtype)], (k / 8 + 32) * 2.0**-23
    b64 = to_float64(xp, b)
    magnitude_b = xp.abs(b64)
    worst = 0.0
    for start in range(0, int(a.shape[0]), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        a64 = to_float64(xp, a[rows])
        reference, magnitude = a64 @ b64, xp.abs(a64) @ magnitude_b
        error = xp.abs(to_float64(xp, xp.ascontiguousarray(out[rows])) - reference)
        if not bool(xp.isfinite(error).all()):
            return float("inf")
        bound = roundoff * xp.abs(reference) + accumulated * magnitude + 1e-30
        worst = max(worst, float((error / bound).max()))
        # The expected size of a sum of K independent terms keeps a tile whose values cancel from counting as wrong.
        scale = _tile_mean(xp, reference**2) + _tile_mean(xp, magnitude) ** 2 / max(k, 1) + 1e-30
        worst = max(worst, float(xp.sqrt(_tile_mean(xp, error**2) / scale).max()) / (roundoff + k / 16 * 2.0**-23))
    return worst


def _tile_mean(xp: Any, values: Any) -> Any:
    """Means of tiles of 128 x 128; tiles at the edge average what they have."""
    rows, columns = (-(-extent // _TILE) for extent in values.shape)
    padded = xp.zeros((rows * _TILE, columns * _TILE), dtype=values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    sums = padded.reshape(rows, _TILE, columns, _TILE).sum(axis=(1, 3))
    heights = xp.minimum(values.shape[0] - xp.arange(rows) * _TILE, _TILE)
    widths = xp.minimum(values.shape[1] - xp.arange(columns) * _TILE, _TILE)
    return sums / (heights[:, None] * widths[None, :])
