"""Types for annotations: what mkernel takes as an array, and as a dtype.

``Array`` is a protocol, which arrays and tensors satisfy as they are; mkernel imports none of their libraries for it.

>>> import mkernel as mk
>>> from mkernel.typing import Array
>>> def project(x: Array, weight: Array) -> Array:
...     return mk.allgather_gemm(x, weight)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Array", "DType"]


class Array(Protocol):
    """An array or tensor of numbers: NumPy's, CuPy's, torch's, or that of another library that speaks DLPack.

    What an op returns belongs to the library of its first operand, what ``World.empty`` returns to ``world.xp``. Here are the members that
    these libraries share; ``isinstance(c, torch.Tensor)`` and the like make a type checker see the others.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...
    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...


# A dtype by its name, as a NumPy dtype, or as a scalar type: "bfloat16", np.dtype("float32"), np.float16, ml_dtypes.bfloat16.
DType: TypeAlias = "str | np.dtype[Any] | type[np.generic]"
