"""What the caller of ``mk.launch`` and its worker processes tell each other, and the frames in which it travels."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import struct
from collections.abc import Iterator
from typing import Any

from mkernel.runtime.options import Options

__all__ = ["Inbox", "Kind", "Order", "Report", "Stop", "frame"]

_HEAD = struct.Struct("!BQ")  # kind, bytes that follow


class Kind(enum.IntEnum):
    """The kinds of frames, each with the plain data that its body pickles. Reading a frame runs no code of a user."""

    # to a worker
    order = 1  # Order
    gathered = 2  # (call, every rank's bytes)
    stop_call = 3  # Stop: leave the call
    end = 4  # None: end the process
    # from a worker
    gather = 10  # (call, this rank's bytes): a collective of its bootstrap
    report = 11  # Report
    log = 12  # the fields of a logging.LogRecord
    warning = 13  # (message and category pickled, text, file name, line)


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """A call, as one rank gets it."""

    call: int
    rank: int
    size: int
    options: Options
    fresh_world: bool  # else the one of the call before
    payload: bytes  # of the function and its arguments
    environment: dict[str, str]
    folder: str
    path: list[str]  # sys.path
    warning_filters: bytes
    log_level: int  # of the logger ``mkernel``


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """How a call ended on one rank."""

    call: int
    usable: bool  # the world is still open and well
    result: bytes | None = None  # the result, if the call succeeded on this rank
    error: bytes = b""  # the exception
    summary: str = ""  # its type and text
    traceback: str = ""
    opened: bool = True  # False: it failed before the function began, because the world could not be opened


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Tells a worker to leave a call: its world is given up at once. With ``raises`` the function is interrupted too."""

    call: int
    reason: str
    origin: int  # the rank that failed; -1: the caller gave up
    raises: str = ""  # "KeyboardInterrupt" or "AbortedError"


def frame(kind: Kind, body: Any) -> bytes:
    """The bytes of one message."""
    data = pickle.dumps(body, protocol=5)
    return _HEAD.pack(kind, len(data)) + data


class Inbox:
    """Turns the bytes that arrive into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, part: bytes) -> Iterator[tuple[Kind, Any]]:
        """The messages that are complete with ``part``."""
        self._data += part
        while len(self._data) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._data)
            end = _HEAD.size + length
            if len(self._data) < end:
                return
            with memoryview(self._data) as view, view[_HEAD.size : end] as body:
                message = pickle.loads(body)
            del self._data[:end]
            yield Kind(kind), message
