"""What the ops see of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["TensorView", "view_of"]


class TensorView(NamedTuple):
    """A strided array on the device, as the ops see it after argument checks. A tuple, because calls make several each."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str  # "bfloat16", "float16", "float32", "int32", "int64"
    writable: bool = True


# The view of a tuple of all its fields, without a function of Python in between.
view_of: Callable[[tuple[Any, ...]], TensorView] = functools.partial(tuple.__new__, TensorView)
