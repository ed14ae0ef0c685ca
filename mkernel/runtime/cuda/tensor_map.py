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
from mkernel.runtime.backend import Extents, MatrixMaps, Strides

__all__ = ["TensorMaps"]

_BYTES = 128  # of a map
_ALIGNMENT = 64  # of a map's memory
_BOX_COLUMNS = 64  # 128 bytes: the swizzle's row
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE

# Of the driver's enumerations.
_DTYPES = {"bfloat16": 9, "float16": 6}  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
_NO_INTERLEAVE = 0  # CU_TENSOR_MAP_INTERLEAVE_NONE
_SWIZZLES = (0, 3)  # CU_TENSOR_MAP_SWIZZLE_NONE, _128B
# CU_TENSOR_MAP_L2_PROMOTION_L2_128B. With 256 bytes rows that begin in the middle of a line or a sector take up to a tenth longer, and
# others are no faster (docs/speed_log.md, "What L2 fetches at once").
_PROMOTION = 2
_ZEROS = 0  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: what lies outside reads as zero

# An address as ctypes passes it. It converts a number to an int of C by itself, but an object of another type by several functions.
_place = ctypes.c_void_p.from_param

# What the encoder reads of so many dimensions: extents, strides of all but the first, the box, and the steps inside it.
_INPUT = {rank: struct.Struct(f"={rank}Q{rank - 1}Q{rank}I{rank}I") for rank in (3, 4)}
_PACK, _PACK_4 = _INPUT[3].pack_into, _INPUT[4].pack_into
_PACK_ROWS = struct.Struct("=4Q2I").pack_into  # of three dimensions: rows, planes, the bytes of both, and columns and rows of the box
_OUTPUT = 128  # offset of the map


class TensorMaps:
    """Makes tensor maps. Any thread. Whoever needs one again keeps it: arrays that come again come in calls that are known as a whole.

    A map costs 2 us of host time: the encoder is a function of the host that reads memory prepared once.
    """

    def __init__(self, some_address: Callable[[], int] | None = None) -> None:
        """``some_address``: makes an address for maps of empty arrays, whose own address may be 0."""
        self._some_address = some_address
        self._lock = threading.Lock()  # of the memory
        at, self._memory = _memory()
        self._output, self._address = self._memory[_OUTPUT:], ctypes.c_void_p()
        self._arguments = {
            (dtype, rank, swizzled): _arguments(at, dtype, rank, swizzled, self._address)
            for dtype in _DTYPES
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
        dimensions = len(shape)
        extents: Any = shape
        steps: Any = strides
        arguments = self._arguments.get((dtype, dimensions, swizzled))
        if arguments is None or box[0] != _BOX_COLUMNS:
            raise _unknown(dtype, box)
        if not address and self._some_address is not None:
            address = self._some_address()
        if dimensions == 3:
            (x, y, z), (row, plane) = extents, steps
        else:
            (x, y, z, batches), (row, plane, batch_bytes) = extents, steps
        # Nothing is read through the map of an empty array, but the encoder refuses extents of 0; and strides that no element uses may be
        # odd.
        x = x or 1
        if y <= 1:
            y, row = 1, -(-2 * x // 16) * 16
        if z <= 1:
            z, plane = 1, -(-row * y // 16) * 16
        with self._lock:
            try:
                if dimensions == 3:
                    _PACK(self._memory, 0, x, y, z, row, plane, *box, 1, 1, 1)
                else:
                    if batches <= 1:
                        batches, batch_bytes = 1, -(-plane * z // 16) * 16
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

    def matrices(self, dtype: str, columns: int, row_bytes: int, planes: int) -> MatrixMaps:
        """As ``Backend.matrix_maps``. A new size of a call needs two to four of them, of which only address and two numbers are new."""
        return _Matrices(self, dtype, columns, row_bytes, planes).get

    @functools.cached_property
    def _encode(self) -> Any:
        # The host computes, and waits for nothing. No types: converting the arguments would take longer than encoding.
        return prompt("cuTensorMapEncodeTiled")


class _Matrices:
    """Maps of matrices that differ in address, rows and box: what they have in common lies in memory that the encoder reads."""

    __slots__ = ("_address", "_arguments", "_maps", "_memory", "_output", "_planes", "_row_bytes", "_shape")

    def __init__(self, maps: TensorMaps, dtype: str, columns: int, row_bytes: int, planes: int) -> None:
        self._maps, self._shape, self._row_bytes, self._planes = maps, (dtype, columns), row_bytes, planes
        at, self._memory = _memory()
        self._output, self._address = self._memory[_OUTPUT:], ctypes.c_void_p()
        self._arguments = _arguments(at, dtype, 3, True, self._address)
        _PACK(self._memory, 0, columns, 1, 1, 0, 0, _BOX_COLUMNS, 1, 1, 1, 1, 1)

    def get(self, address: int, rows: int, *boxes: int) -> bytes:
        """The maps of a matrix, with boxes of so many rows. Raises ArgumentError as ``TensorMaps.get``."""
        row_bytes = self._row_bytes
        if rows > 1 and address:
            found, before = b"", 0
            for box_rows in boxes:
                if box_rows != before:  # else the same map again
                    try:
                        _PACK_ROWS(self._memory, 8, rows, self._planes, row_bytes, rows * row_bytes, _BOX_COLUMNS, box_rows)
                    except struct.error:
                        break
                    self._address.value = address
                    if self._maps._encode(*self._arguments):
                        break
                    before = box_rows
                found += self._output
            else:
                return found
        dtype, columns = self._shape  # of few rows; or what says why it cannot be
        shape, strides = (columns, rows, self._planes), (row_bytes, rows * row_bytes)
        return b"".join([self._maps.get(address, dtype, shape, strides, (_BOX_COLUMNS, box_rows, 1)) for box_rows in boxes])


def _memory() -> tuple[int, memoryview]:
    """Memory for what the encoder reads and writes, and where it lies."""
    owner = ctypes.create_string_buffer(_OUTPUT + _BYTES + _ALIGNMENT)
    start = -ctypes.addressof(owner) % _ALIGNMENT
    return ctypes.addressof(owner) + start, memoryview(owner).cast("B")[start : start + _OUTPUT + _BYTES]


def _arguments(at: int, dtype: str, rank: int, swizzled: bool, address: ctypes.c_void_p) -> tuple[Any, ...]:
    """All arguments of the encoder, as ctypes has them. Of one map and the next only ``address`` differs, and what memory holds."""
    modes = _NO_INTERLEAVE, _SWIZZLES[swizzled], _PROMOTION, _ZEROS
    return _place(at + _OUTPUT), _DTYPES[dtype], rank, address, *_input_at(at, rank), *modes


def _input_at(at: int, rank: int) -> Iterable[Any]:
    """Where extents, strides, box and steps lie in memory that begins at an address."""
    return map(_place, (at, at + 8 * rank, at + 16 * rank - 8, at + 20 * rank - 8))


def _unknown(dtype: str, box: Extents) -> ArgumentError:
    if dtype not in _DTYPES:
        return ArgumentError("dtype", dtype, "tensor maps are made of bfloat16 or float16")
    return ArgumentError("box", tuple(box), f"the inner extent must be {_BOX_COLUMNS} elements")
