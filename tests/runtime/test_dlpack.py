"""runtime/arrays/dlpack.py: what DLPack capsules hold, where it begins, and whether it may be written to."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from mkernel.errors import ArgumentError
from mkernel.runtime.arrays.dlpack import _DLTensor, capsule_view, host_view
from mkernel.runtime.arrays.views import TensorView


class Capsules:
    """Makes unversioned capsules over a NumPy array, with fields of one's own."""

    def __init__(self, array: Any, **fields: Any) -> None:
        self.array = array
        shape, strides = array.shape, [step // array.itemsize for step in array.strides]
        self.shape, self.strides = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
        self.tensor = _DLTensor(array.ctypes.data, 1, 0, len(shape), 2, 8 * array.itemsize, 1, self.shape, self.strides, 0)
        for name, value in fields.items():
            setattr(self.tensor, name, value)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> object:
        if "max_version" in options:
            raise TypeError("of before DLPack 1.0")
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        capsule: object = make(ctypes.addressof(self.tensor), b"dltensor", None)
        return capsule


class Wrapped:
    """An array of another library, that gives NumPy's capsules away."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_an_array_begins_at_its_byte_offset() -> None:
    array = np.zeros((4, 8), np.float16)
    assert host_view(Capsules(array)).address == array.ctypes.data
    moved = host_view(Capsules(array, byte_offset=32))
    assert moved == TensorView(array.ctypes.data + 32, (4, 8), (16, 2), "float16", True)


def test_a_capsule_without_strides_is_contiguous() -> None:
    array = np.zeros((4, 3, 8), np.float32)
    view = host_view(Capsules(array, strides=ctypes.POINTER(ctypes.c_int64)()))
    assert view.strides == array.strides


@pytest.mark.parametrize("writable", [True, False])
def test_the_read_only_flag(writable: bool) -> None:
    array = np.zeros((4, 8), np.float16)
    array.flags.writeable = writable
    view = host_view(Wrapped(array))
    assert (view.address, view.shape, view.writable) == (array.ctypes.data, (4, 8), writable)
    assert capsule_view(array.__dlpack__(max_version=(1, 0))).writable == writable


@pytest.mark.parametrize("module", ["jaxlib._jax", "jax", "tensorflow.python.framework.ops"])
def test_libraries_whose_arrays_never_change(module: str) -> None:
    """Their capsules carry no flag."""
    array = np.zeros((4, 8), np.float16)
    kind = type("ArrayImpl", (Capsules,), {"__module__": module})
    assert not host_view(kind(array)).writable
    assert host_view(type("ArrayImpl", (Capsules,), {"__module__": "jaxish"})(array)).writable


def test_an_interface_that_says_read_only() -> None:
    array = np.zeros((4, 8), np.float16)
    array.flags.writeable = False
    capsules = Capsules(array)
    capsules.__array_interface__ = array.__array_interface__  # type: ignore[attr-defined]
    assert not host_view(capsules).writable


@pytest.mark.parametrize("error", [BufferError, RuntimeError])
def test_an_array_that_gives_nothing_away(error: type[Exception]) -> None:
    class Graded(Capsules):
        def __dlpack__(self, **options: Any) -> object:
            raise error("requires a gradient")

    with pytest.raises(ArgumentError, match="does not give its memory away: requires a gradient"):
        host_view(Graded(np.zeros(3, np.float16)))
