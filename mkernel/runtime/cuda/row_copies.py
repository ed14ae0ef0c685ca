"""Copies of rows within a GPU's memory, made ready once and enqueued again and again."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from mkernel.memory.driver import check, native
from mkernel.runtime.backend import Rows

__all__ = ["RowCopies"]

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Side(ctypes.Structure):
    """One side of a ``CUDA_MEMCPY2D``."""

    _fields_ = [
        ("x", _size),
        ("y", _size),
        ("kind", ctypes.c_uint),
        ("host", _pointer),
        ("address", ctypes.c_uint64),
        ("array", _pointer),
        ("pitch", _size),
    ]


class _Copy(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the driver."""

    _fields_ = [("source", _Side), ("target", _Side), ("bytes", _size), ("rows", _size)]


class RowCopies:
    """Enqueues these copies on a stream. Rows that lie without gaps are one piece of memory, which is copied about as fast as can be."""

    def __init__(self, moves: Sequence[Rows]) -> None:
        # Enqueueing may wait while too much is pending: these release the GIL.
        whole, by_rows = native("cuMemcpyDtoDAsync_v2", ctypes.c_uint64, ctypes.c_uint64, _size, _pointer), native("cuMemcpy2DAsync_v2")
        self._steps: list[tuple[Any, tuple[Any, ...]]] = []
        for move in moves:
            if move.is_whole:
                self._steps.append((whole, (move.target, move.source, move.bytes * move.rows)))
                continue
            source = _Side(kind=_DEVICE, address=move.source, pitch=move.source_pitch)
            target = _Side(kind=_DEVICE, address=move.target, pitch=move.target_pitch)
            self._steps.append((by_rows, (ctypes.byref(_Copy(source, target, move.bytes, move.rows)),)))

    def __call__(self, stream: int) -> None:
        handle = _pointer(stream)
        for enqueue, arguments in self._steps:
            check(enqueue(*arguments, handle), "copying rows")
