"""Shape and dtype of an array on the symmetric heap, checked before any rank is asked for anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mkernel.errors import ArgumentError
from mkernel.runtime.integers import integer_of

__all__ = ["dtype_of", "extents_of"]

_DIMENSIONS = 25  # as many as CuPy's arrays may have
_BYTES = 2**63
_NO_SHAPES = (str, bytes, bytearray, memoryview)  # sequences, but not of integers
# The dtypes of NumPy and CuPy, and those of ml_dtypes whose elements are whole bytes.
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_NAMES = frozenset(["bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128", "bfloat16"])


def extents_of(shape: Any, item: int) -> tuple[int, ...]:
    """The extents of an array of ``item`` bytes per element: ``shape`` is one, or a sequence of them. Nothing is rounded or parsed.

    Raises
    ------
    ArgumentError
        An extent is no integer or negative, there are too many, or no address space holds them.
    """
    given: Any = shape if integer_of(shape) is None else [shape]
    if hasattr(given, "__array_interface__") and len(given.shape) == 1:
        given = list(given)  # an array of integers
    is_sequence = isinstance(given, Sequence) and not isinstance(given, _NO_SHAPES)
    extents = tuple(extent for extent in map(integer_of, given) if extent is not None) if is_sequence else ()
    if not is_sequence or len(extents) < len(given):
        raise ArgumentError("shape", repr(shape), "must be an integer or a sequence of integers")
    if any(extent < 0 for extent in extents):
        raise ArgumentError("shape", repr(shape), "must not be negative")
    if len(extents) > _DIMENSIONS:
        raise ArgumentError("shape", f"{len(extents)} dimensions", f"must be at most {_DIMENSIONS}")
    if math.prod(filter(None, extents)) * item >= _BYTES:
        raise ArgumentError("shape", repr(shape), "is larger than any memory")
    return extents


def dtype_of(dtype: Any) -> tuple[str, int]:
    """Name and bytes of a dtype given by name, as a NumPy dtype, or as a scalar type (ml_dtypes.bfloat16).

    Raises
    ------
    ArgumentError
        It is no dtype, or not one of native numbers: nothing is converted.
    """
    import numpy as np

    if isinstance(dtype, str) and dtype == "bfloat16":
        return "bfloat16", 2
    if dtype is None:
        raise ArgumentError("dtype", None, "must be a dtype of NumPy or ml_dtypes, or its name")
    try:
        found = np.dtype(dtype)
    except Exception as error:  # NumPy raises many kinds
        raise ArgumentError("dtype", repr(dtype), "must be a dtype of NumPy or ml_dtypes, or its name", str(error)) from None
    if not found.isnative:
        raise ArgumentError("dtype", repr(dtype), "must have this machine's byte order")
    if found.names is not None or found.subdtype is not None or found.name not in _NAMES:
        raise ArgumentError("dtype", repr(dtype), "must be a plain type of numbers", f"one of {', '.join(sorted(_NAMES))}")
    return found.name, found.itemsize
