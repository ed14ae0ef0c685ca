"""A program of a user who checks types: ``make lint`` runs mypy over it, and ``tests/unit/test_typing.py`` runs it.

Each ``type: ignore`` marks a mistake that the type checker must see: mypy reports those that it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import mkernel as mk
from mkernel.typing import Array, DType

__all__ = ["use"]


class Tensor:
    """What torch's stubs say of its tensors."""

    dtype: Any
    ndim: int

    def __init__(self, array: NDArray[Any]) -> None:
        self._array, self.dtype, self.ndim = array, array.dtype, array.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array__(self, dtype: Any = None) -> Any:
        return self._array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, indices: int | slice | None) -> Tensor:
        return Tensor(self._array[indices])

    def __setitem__(self, indices: int | slice | None, value: Tensor | float) -> None:
        self._array[indices] = value

    def __add__(self, other: Any) -> Tensor:
        return self

    __sub__ = __mul__ = __truediv__ = __matmul__ = __add__


def ndim(array: Array) -> int:
    return array.ndim


def name(dtype: DType) -> str:
    return np.dtype(dtype).name


def use(world: mk.World) -> list[str]:
    """Make arrays in every way; the dtypes of what comes back."""
    half: NDArray[np.float16] = np.ones((2, 2), np.float16)
    brain = np.ones((2, 2), ml_dtypes.bfloat16)
    assert ndim(half) == ndim(brain) == ndim(Tensor(half)) == 2
    names = [name("float32"), name(np.float16), name(np.dtype("int32")), name(ml_dtypes.bfloat16)]

    c = world.zeros((2, 2), "float32")
    c[0] = 1
    total = np.asarray(c + c).sum()
    assert (len(c), c.shape[1], total) == (2, 2, 4)
    assert isinstance(c, np.ndarray)
    c.fill(0)
    return [*names, str(world.empty(4, ml_dtypes.bfloat16).dtype)]


if TYPE_CHECKING:

    def mistakes(world: mk.World) -> None:
        ndim([1.0, 2.0])  # type: ignore[arg-type]
        world.empty(4, 4)  # type: ignore[arg-type]
        world.empty("4", "float32")  # type: ignore[arg-type]
        world.empty(4.5, "float32")  # type: ignore[arg-type]
        c: NDArray[Any] = world.empty(4, "float32")  # type: ignore[assignment]
        mk.allgather_gemm(c, [1.0], world=world)  # type: ignore[arg-type]
        mk.gemm_allreduce(c, Tensor(c), out=3, world=world)  # type: ignore[arg-type]
