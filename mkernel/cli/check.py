"""Is a result right? Every element against float64, within a bound that follows from the arithmetic alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["UNIT_ROUNDOFF", "worst_over_bound"]

# Largest relative error of rounding to nearest: 2^-p for p significant bits.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# Half the spacing of subnormals, where relative error says nothing.
_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}


def worst_over_bound(out: Any, a: NDArray[Any], b: NDArray[Any], dtype: str) -> float:
    """The largest |out - a @ b| / bound over all elements; at most 1 where the result is right, inf where an element is not finite.

    The bound of an element with K terms: K float32 additions, each off by at most 2^-24 of what they add up to, then one rounding to
    ``dtype``. ``a`` (M, K) and ``b`` (K, N) are exactly what the kernel read; products of 16-bit numbers are exact in float32.
    """
    import numpy as np

    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    reference = a64 @ b64
    accumulated = a.shape[1] * 2.0**-24 * (np.abs(a64) @ np.abs(b64))
    bound = accumulated + UNIT_ROUNDOFF[dtype] * (np.abs(reference) + accumulated) + _SMALLEST[dtype]
    values = np.asarray(out).astype(np.float64)
    if values.shape != reference.shape:
        raise ValueError(f"the result has shape {values.shape}, expected {reference.shape}")
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():
        return float("inf")
    return float((np.abs(values - reference) / bound).max())
