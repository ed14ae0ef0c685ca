"""How the clock of a device relates to that of its host, so that the traces of several ranks can be laid over each other."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mkernel.jit.spec import KernelSpec

__all__ = ["BYTES", "SPEC", "Clock", "Parameters", "Reading", "ask", "fit"]

_ROUNDS = 48
_ANSWERS = 16  # as in kernels_src/ops/read_clock.cuh
_LIMIT_SECONDS = 2.0
_LONGEST_STEP_NS = 1024  # of a device's clock of which nothing is known
BYTES = 8 * (_ANSWERS + _ROUNDS + 1)  # of host memory that the device can address, zeroed


class Parameters(ctypes.Structure):
    """Parameters of the kernel read_clock."""

    _fields_ = (("asked", ctypes.c_uint64), ("limit_ns", ctypes.c_uint64), ("reserved", ctypes.c_uint64 * 6))

    @classmethod
    def of(cls, address: int) -> Parameters:
        """For host memory that the device sees at ``address``."""
        return cls(address, int(_LIMIT_SECONDS * 1e9))


SPEC = KernelSpec("read_clock", (("kRounds", _ROUNDS),), threads=32, shared_bytes=0, parameter_bytes=ctypes.sizeof(Parameters))


class Clock(NamedTuple):
    """Host ns (``time.monotonic_ns``) = device ns + ``offset_ns``, give or take ``error_ns``."""

    offset_ns: int
    error_ns: int


class Reading(NamedTuple):
    """The device read its clock, and saw ``device``, between two looks at the host's. All ns."""

    before: int
    device: int
    after: int


def ask(words: memoryview, clock: Callable[[], int] = time.monotonic_ns) -> list[Reading]:
    """Ask a running read_clock kernel what its time is, some dozen times: about 5 us each.

    Parameters
    ----------
    words
        The kernel's host memory as 64-bit words.

    Returns
    -------
    list of Reading
        Fewer, or none, where the kernel does not answer within 2 s.
    """
    found: list[Reading] = []
    deadline = clock() + int(_LIMIT_SECONDS * 1e9)
    for turn in range(1, _ROUNDS + 1):
        before = clock()
        words[0] = turn
        while words[_ANSWERS + turn] == 0:
            if clock() > deadline:
                return found
        found.append(Reading(before, words[_ANSWERS + turn], clock()))
    return found


def fit(readings: Sequence[Reading]) -> Clock:
    """The offset between the clocks, and how far it may be off.

    Each reading bounds the offset from both sides, and the closest bounds count (Cristian's algorithm). A clock that ticks in steps shows a
    time that is up to one step old; the step is what all differences of its times are multiples of.

    Raises
    ------
    ValueError
        There is no reading.
    """
    if not readings:
        raise ValueError("the device did not tell its time")
    step = math.gcd(*(reading.device - readings[0].device for reading in readings)) or _LONGEST_STEP_NS
    least = max(reading.before - reading.device - (step - 1) for reading in readings)
    most = min(reading.after - reading.device for reading in readings)
    return Clock((least + most) // 2, max((most - least + 1) // 2, 0) + 1)
