"""Arrays of the host as kernels see them, from anything that speaks DLPack or an array interface, without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mkernel.errors import ArgumentError
from mkernel.runtime.arrays.views import TensorView

__all__ = ["capsule_view", "export", "host_view", "immutable", "numpy_dtype"]

_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_IMMUTABLE = ("jax", "jaxlib", "tensorflow")  # libraries whose arrays never change, and whose capsules do not say so
_DTYPES = {  # (DLPack type code, bits)
    (0, 32): "int32",
    (0, 64): "int64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # elements; null: contiguous
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name; ``bfloat16`` is ml_dtypes'."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def host_view(array: Any) -> TensorView:
    """Address, shape, strides and dtype of an array in host memory.

    Raises
    ------
    ArgumentError
        It is no array, is not in host memory, or has elements of an unsupported type.
    """
    if not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__"):
        return _from_dlpack(array)
    if not isinstance(array, np.ndarray) and not hasattr(array, "__array_interface__"):
        raise ArgumentError("array", type(array).__name__, "is no array: neither DLPack nor an array interface", "numpy.asarray makes one")
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            "array", type(array).__name__, "has elements that do not count, which no op leaves out", "use its .filled(0), or .data"
        )
    host = np.asarray(array)
    if not host.dtype.isnative or host.dtype.hasobject:
        raise ArgumentError("array", host.dtype, "must have a native numeric element type")
    return TensorView(host.ctypes.data, host.shape, host.strides, host.dtype.name, host.flags.writeable)


def _from_dlpack(array: Any) -> TensorView:
    if array.__dlpack_device__()[0] not in _HOST_DEVICES:
        raise ArgumentError("array", type(array).__name__, "is not in host memory, where target cpu works", "copy it to the host")
    try:
        view = capsule_view(export(array))
    except (BufferError, RuntimeError) as error:
        raise ArgumentError("array", type(array).__name__, f"does not give its memory away: {error}") from error
    return view._replace(writable=False) if immutable(array) else view


def export(array: Any, **options: Any) -> object:
    """A DLPack capsule of an array; of version 1.0, which tells whether the array is read-only, if its library supports that."""
    try:
        return array.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # of before DLPack 1.0
        return array.__dlpack__(**options)


def immutable(array: Any) -> bool:
    """Whether an array must not be written to although its DLPack capsule may not say so."""
    if type(array).__module__.partition(".")[0] in _IMMUTABLE:
        return True
    interface = getattr(array, "__cuda_array_interface__", None) or getattr(array, "__array_interface__", None)
    return bool(interface is not None and interface.get("data") is not None and interface["data"][1])


def capsule_view(capsule: object) -> TensorView:
    """What an unconsumed DLPack capsule holds, wherever the memory is."""
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    kind = name(capsule)
    writable = True
    if kind == b"dltensor_versioned":
        managed = _Versioned.from_address(pointer(capsule, kind))
        tensor, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))  # the capsule stays unconsumed and frees what it holds
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise ArgumentError("array", f"DLPack type {tensor.code}, {tensor.bits} bits", f"must be one of {', '.join(_DTYPES.values())}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    size = tensor.bits // 8
    if tensor.strides:
        strides = tuple(tensor.strides[i] * size for i in range(tensor.ndim))
    else:
        strides, step = (), size
        for extent in reversed(shape):
            strides, step = (step, *strides), step * extent
    return TensorView((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, writable)
