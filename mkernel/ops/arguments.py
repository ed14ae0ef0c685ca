"""Argument checks that several ops share. Every failure is an ArgumentError, before anything is launched."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.errors import ArgumentError
from mkernel.planner.split import Split
from mkernel.runtime.arrays.dlpack import numpy_dtype

if TYPE_CHECKING:
    from mkernel.runtime.backend import TensorView

__all__ = [
    "check_aligned",
    "check_extents",
    "check_matrix",
    "check_operands",
    "check_places",
    "check_split",
    "check_writable",
    "layout_of",
    "row_stride",
]

DTYPES = ("bfloat16", "float16")
ITEM = 2  # bytes of both
_MOST_WORK = 1_000_000  # of NumPy's search for a common byte
MOST_EXTENT = 1 << 31  # that no array reaches


def check_matrix(name: str, view: TensorView, dtype: str | None = None) -> tuple[int, int]:
    """A 2-D bfloat16 or float16 array (of ``dtype`` if given); returns its shape."""
    if len(view.shape) != 2:
        raise ArgumentError(f"{name}.ndim", len(view.shape), "must be 2")
    if view.dtype not in DTYPES:
        raise ArgumentError(f"{name}.dtype", view.dtype, "must be bfloat16 (ml_dtypes) or float16")
    if dtype is not None and view.dtype != dtype:
        raise ArgumentError(f"{name}.dtype", view.dtype, f"must be {dtype}, like the other operands")
    return view.shape[0], view.shape[1]


def check_aligned(name: str, view: TensorView) -> None:
    if view.address % 16:
        raise ArgumentError(name, f"array at {view.address:#x}", "must start at a multiple of 16 bytes", "copy it into an array of its own")


def check_multiple(name: str, value: int, rule: str = "must be a positive multiple of 8") -> None:
    if value <= 0 or value % 8:
        raise ArgumentError(name, value, rule, "pad it with zeros")


def check_writable(name: str, view: TensorView) -> None:
    if not view.writable:
        raise ArgumentError(name, f"array at {view.address:#x}", "is read-only")


class _Items(dict[str, int]):
    """Bytes of an element by dtype: ops from outside mkernel may take other dtypes than its own do."""

    def __missing__(self, dtype: str) -> int:
        self[dtype] = found = numpy_dtype(dtype).itemsize
        return found


_ITEMS = _Items()


def check_places(names: Sequence[str], views: Sequence[TensorView | None], written: Container[str]) -> None:
    """Arrays begin with whole elements, and no byte of one that a call writes belongs to another, which may be in use meanwhile.

    ``written``: names of those that the call writes. One function looks at all of them, because each new size of a call comes here.
    """
    spans: list[tuple[int, int, str, TensorView]] = []
    for name, view in zip(names, views, strict=True):
        if view is None or 0 in view[1]:
            continue
        address, shape, strides, dtype, _ = view
        item = _ITEMS[dtype]
        if address % item:
            rule = f"must start at a multiple of {item} bytes, the size of an element"
            raise ArgumentError(name, f"array at {address:#x}", rule, "copy it into an array of its own")
        begin, end = address, address + item
        for number, stride in zip(shape, strides):  # noqa: B905 - as long as each other
            if stride < 0:
                begin += (number - 1) * stride
            else:
                end += (number - 1) * stride
        spans += ((begin, end, name, view),)
    spans.sort()
    reached = 0
    for begin, end, _, _ in spans:
        if begin < reached:
            _check_apart(spans, written)
            return
        if end > reached:
            reached = end


def _check_apart(spans: Sequence[tuple[int, int, str, TensorView]], written: Container[str]) -> None:
    """Look at the bytes of arrays whose extents, from the first byte to behind the last, have some in common."""
    for (begin, end, name, view), (first, last, other_name, other) in itertools.permutations(spans, 2):
        if name in written and begin < last and first < end and _may_share(view, other):
            rule = f"overlaps {other_name}, at {other.address:#x}, which is in use while it is written"
            raise ArgumentError(name, f"array at {view.address:#x}", rule, "give it memory of its own")


def _may_share(one: TensorView, other: TensorView) -> bool:
    """Whether any byte is in both; True where strides are such that this takes long to find out (the problem is NP-complete)."""
    try:
        return np.shares_memory(np.asarray(_Place(one)), np.asarray(_Place(other)), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # numpy.exceptions.TooHardError, wherever this NumPy has it
        return True


class _Place:
    """What NumPy takes for an array of the same extent. Nobody reads it: the memory may be a GPU's."""

    def __init__(self, view: TensorView) -> None:
        self.__array_interface__ = {
            "data": (view.address, True),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{_ITEMS[view.dtype]}",
            "version": 3,
        }


_MOST_STRIDE = 1 << 32  # bytes: kernels hold them in 32 bits


def row_stride(name: str, view: TensorView) -> int:
    """Bytes between rows of a matrix whose rows are contiguous and 16-byte aligned."""
    rows, columns = view.shape
    if rows == 0:
        return columns * ITEM
    stride, item = view.strides
    if columns > 1 and item != ITEM:
        raise ArgumentError(f"{name}.strides", view.strides, "rows must be contiguous", f"use xp.ascontiguousarray({name})")
    if rows <= 1:
        return columns * ITEM
    if stride < columns * ITEM or stride % 16 or stride >= _MOST_STRIDE:
        rule = "the row stride must be a multiple of 16 bytes below 4 GiB, and rows must not overlap"
        raise ArgumentError(f"{name}.strides", view.strides, rule)
    return stride


def layout_of(name: str, view: TensorView) -> tuple[bool, int]:
    """(row-major?, bytes between its rows or columns) of a matrix that is row-major or the transpose view of a row-major one."""
    rows, columns = view.shape
    first, second = view.strides
    if (second == ITEM or columns == 1) and columns * ITEM <= first < _MOST_STRIDE and first % 16 == 0:
        return True, first
    if (first == ITEM or rows == 1) and rows * ITEM <= second < _MOST_STRIDE and second % 16 == 0:
        return False, second
    rule = "must be row-major or the transpose view of a row-major array, with strides below 4 GiB"
    raise ArgumentError(f"{name}.strides", view.strides, rule, f"copy it: xp.ascontiguousarray({name})")


def check_operands(a: TensorView, b: TensorView, k: str, held: str) -> tuple[int, int, int, bool]:
    """(rows of ``a``, N, K, whether ``b`` is row-major) of operands of one rank that fit each other.

    ``k``: the name of K; ``held``: what ``b`` holds of the whole B.
    """
    m, inner = check_matrix("a", a)
    rows, n = check_matrix("b", b, a.dtype)
    if rows != inner:
        raise ArgumentError("b.shape", b.shape, f"must be ({k}, N) with {k} = a.shape[1] = {inner}", f"b holds {held}: ({k}, N)")
    check_multiple(k, inner)
    check_multiple("N", n)
    row_stride("a", a)
    if m:
        check_aligned("a", a)
    check_aligned("b", b)
    return m, n, inner, layout_of("b", b)[0]


def check_extents(*extents: int) -> None:
    if max(extents) >= MOST_EXTENT:
        raise ArgumentError("shape", extents, "every extent must be below 2^31")


def check_split(split: Any) -> Split | None:
    if split is None:
        return None
    if not isinstance(split, Split):
        raise ArgumentError("split", split, "must be an mk.Split or None")
    for role, number in ((field.name, getattr(split, field.name)) for field in dataclasses.fields(split)):
        if number is not None and not isinstance(number, int):
            raise ArgumentError("split", split, f"{role} must be a number of SMs", "None lets mkernel choose")
    return split
