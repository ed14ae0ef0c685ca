"""Sleeps of less than a millisecond that a descriptor ends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["Naps"]

_POLLIN = 1
_SECOND = 1_000_000_000


class _Descriptor(ctypes.Structure):
    """``struct pollfd``."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Time(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Naps:
    """Waits for input on descriptors, by ppoll(2).

    ``select`` takes no descriptors from 1024 on, and Python's ``poll`` and ``epoll`` round up to milliseconds.

    Parameters
    ----------
    files
        The descriptors that end a nap. They stay open as long as this is used.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self._files = (_Descriptor * len(files))(*(_Descriptor(fd, _POLLIN, 0) for fd in files))
        self._time = _Time()
        self._time_address = ctypes.byref(self._time)
        self._ppoll = ctypes.CDLL(None).ppoll
        self._ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)

    def sleep(self, nanoseconds: int) -> list[int]:
        """Sleep at most that long. Returns the descriptors that have input, or whose other end has gone."""
        self._time.seconds, self._time.nanoseconds = divmod(nanoseconds, _SECOND)
        if self._ppoll(self._files, len(self._files), self._time_address, None) <= 0:
            return []  # the time is over, or a signal has come
        return [file.fd for file in self._files if file.revents]
