"""What the ops see of an array."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TensorView"]


class TensorView(NamedTuple):
    """A strided array on the device, as the ops see it after argument checks. A tuple, because calls make several each."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str  # "bfloat16", "float16", "float32", "int32", "int64"
    writable: bool = True
