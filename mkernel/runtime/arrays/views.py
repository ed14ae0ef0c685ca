"""What the ops see of an array."""

from __future__ import annotations

import dataclasses

__all__ = ["TensorView"]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorView:
    """A strided array on the device, as the ops see it after argument checks."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str  # "bfloat16", "float16", "float32", "int32", "int64"
    writable: bool = True
