"""Tensor maps of GPU memory, encoded by the driver: what the copy engine's loads and stores are told of a matrix."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

from mkernel.errors import ArgumentError
from mkernel.memory.driver import driver, prompt
from mkernel.runtime.backend import Extents, Strides

__all__ = ["TensorMaps"]

_BYTES = 128  # of a map
_ALIGNMENT = 64  # of a map's memory
_BOX_BYTES = 128  # the swizzle's row
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE

# Of the driver's enumerations.
_DTYPES = {"bfloat16": 9, "float16": 6}  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
_NO_INTERLEAVE = 0  # CU_TENSOR_MAP_INTERLEAVE_NONE
_SWIZZLES = (0, 3)  # CU_TENSOR_MAP_SWIZZLE_NONE, _128B
_PROMOTION = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_ZEROS = 0  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: what lies outside reads as zero

_pointer, _u32, _enum = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int

# What the encoder reads of so many dimensions: extents, strides of all but the first, the box, and the steps inside it.
_INPUT = {rank: struct.Struct(f"={rank}Q{rank - 1}Q{rank}I{rank}I") for rank in (3, 4)}
_PACK, _PACK_4 = _INPUT[3].pack_into, _INPUT[4].pack_into
_OUTPUT = 128  # offset of the map


class TensorMaps:
    """Makes tensor maps. Any thread. Whoever needs one again keeps it: arrays that come again come in calls that are known as a whole.

    A map costs 2 us of host time: the encoder is a function of the host that reads memory prepared once.
    """

    def __init__(self, some_address: Callable[[], int] | None = None) -> None:
        """``some_address``: makes an address for maps of empty arrays, whose own address may be 0."""
        self._some_address = some_address
        self._lock = threading.Lock()  # of the memory
        self._owner = ctypes.create_string_buffer(_OUTPUT + _BYTES + _ALIGNMENT)
        start = -ctypes.addressof(self._owner) % _ALIGNMENT
        self._memory = memoryview(self._owner).cast("B")[start : start + _OUTPUT + _BYTES]
        self._output = self._memory[_OUTPUT:]
        at = ctypes.addressof(self._owner) + start
        # All arguments of the encoder, as ctypes has them: of one map and the next only the address differs, and what memory holds.
        to, self._address = _pointer(at + _OUTPUT), _pointer()
        self._arguments = {
            (dtype, rank, swizzled): (to, _enum(kind), _u32(rank), self._address, *_input_at(at, rank), *_modes(_SWIZZLES[swizzled]))
            for dtype, kind in _DTYPES.items()
            for rank in _INPUT
            for swizzled in (False, True)
        }

    def get(self, address: int, dtype: str, shape: Extents, strides: Strides, box: Extents, swizzled: bool = True) -> bytes:
        """The map of a tensor, as ``Backend.tensor_map`` describes it. One function: a call of a new size needs up to four maps.

        Raises
        ------
        ArgumentError
            The driver's rules forbid such a map: the message names the driver's status.
        """
        arguments = self._arguments.get((dtype, len(shape), swizzled))
        if arguments is None or box[0] * 2 != _BOX_BYTES:
            raise _unknown(dtype, box)
        if not address and self._some_address is not None:
            address = self._some_address()
        # Nothing is read through the map of an empty array, but the encoder refuses extents of 0; and strides that no element uses may be
        # odd.
        x, y, z = shape[:3]
        row, plane = strides[:2]
        x = x or 1
        if y <= 1:
            y, row = 1, -(-2 * x // 16) * 16
        if z <= 1:
            z, plane = 1, -(-row * y // 16) * 16
        with self._lock:
            try:
                if len(shape) == 3:
                    _PACK(self._memory, 0, x, y, z, row, plane, *box, 1, 1, 1)
                else:
                    batches, batch_bytes = (shape[-1], strides[-1]) if shape[-1] > 1 else (1, -(-plane * z // 16) * 16)
                    _PACK_4(self._memory, 0, x, y, z, batches, row, plane, batch_bytes, *box, 1, 1, 1, 1)
            except struct.error:  # a number that the driver's types do not hold
                status = _INVALID_VALUE
            else:
                self._address.value = address
                status = self._encode(*arguments)
                if not status:
                    return self._output.tobytes()
        value = f"{dtype} {tuple(shape)}, strides {tuple(strides)}, box {tuple(box)} at {address:#x}"
        rule = f"no tensor map can describe it ({driver().CUresult(status).name})"
        raise ArgumentError("tensor", value, rule, "16-byte aligned base and strides are needed")

    @functools.cached_property
    def _encode(self) -> Any:
        # The host computes, and waits for nothing. No types: converting the arguments would take longer than encoding.
        return prompt("cuTensorMapEncodeTiled")


def _input_at(at: int, rank: int) -> Iterable[Any]:
    """Where extents, strides, box and steps lie in memory that begins at an address."""
    return map(_pointer, (at, at + 8 * rank, at + 16 * rank - 8, at + 20 * rank - 8))


def _modes(swizzle: int) -> Iterable[Any]:
    return map(_enum, (_NO_INTERLEAVE, swizzle, _PROMOTION, _ZEROS))


def _unknown(dtype: str, box: Extents) -> ArgumentError:
    if dtype not in _DTYPES:
        return ArgumentError("dtype", dtype, "tensor maps are made of bfloat16 or float16")
    return ArgumentError("box", tuple(box), f"the inner extent must be {_BOX_BYTES // 2} elements")
