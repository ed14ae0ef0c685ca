"""What worker processes print, log and warn of: collected there, shown where ``mk.launch`` was called."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from mkernel.runtime.workers.messages import Kind
from mkernel.runtime.workers.pickling import dump_warning, load_warning

__all__ = ["Lines", "WarningLog", "capture", "dump_filters", "flush", "load_filters", "show_log", "write"]

_LOGGER = "mkernel"
_LONGEST_LINE = 1 << 16  # characters; a longer line is printed in pieces
_PIECES = 64  # reads of 64 KiB, more than a pipe holds: a process that goes on printing must not delay the end of a call


# ---- in a worker
def capture(send: Callable[[Kind, Any], None]) -> None:
    """Begin to send log records of ``mkernel`` and warnings to the caller; what is printed goes into the pipes line by line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    logger = logging.getLogger(_LOGGER)
    logger.addHandler(_LogRelay(send))
    logger.propagate = False  # the caller's handlers show them
    plain = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        if file is not None:
            plain(message, category, filename, lineno, file, line)
            return
        kind = type(message) if isinstance(message, Warning) else category
        plain_kind = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        send(Kind.warning, (dump_warning(message, category), plain_kind.__name__, str(message), filename, lineno))

    warnings.showwarning = show


class _LogRelay(logging.Handler):
    def __init__(self, send: Callable[[Kind, Any], None]) -> None:
        super().__init__()
        self.__send = send  # no name of Handler's own

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)  # with its traceback: objects in arguments and frames stay here
            plain = {name: value for name, value in vars(record).items() if isinstance(value, (str, int, float))}
            self.__send(Kind.log, {**plain, "msg": text, "message": text, "args": None, "exc_text": None, "stack_info": None})
        except Exception:
            self.handleError(record)


def flush() -> None:
    """Flush everything printed so far into the pipes, also what C code printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def dump_filters() -> bytes:
    """The caller's warning filters; empty where they cannot be pickled."""
    try:
        return pickle.dumps(list(warnings.filters))
    except Exception:
        return b""


def load_filters(data: bytes) -> None:
    """Warn of what the caller would be warned of."""
    if not data:
        warnings.simplefilter("default")
        return
    filters = pickle.loads(data)
    if list(warnings.filters) != filters:
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]


# ---- in the caller
def show_log(fields: dict[str, Any]) -> None:
    """Pass a worker's record to the caller's handlers."""
    record = logging.makeLogRecord(fields)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class WarningLog:
    """Give the workers' warnings in the caller; a warning that all ranks give is shown once."""

    def __init__(self) -> None:
        self._registry: dict[Any, int] = {}

    def show(self, data: bytes, plain_kind: str, text: str, filename: str, lineno: int) -> None:
        message, category = load_warning(data, text, plain_kind)
        warnings.warn_explicit(message, category, filename, lineno, registry=self._registry)


def write(name: str, text: str) -> None:
    """Print on the caller's present ``sys.stdout`` or ``sys.stderr``, such as a notebook cell's."""
    stream = getattr(sys, name)
    if stream is not None:
        stream.write(text)
        stream.flush()


class Lines:
    """One stream of a worker: whole lines, so that those of several ranks do not run into each other.

    Parameters
    ----------
    fd
        The end of the pipe to read from; closed by ``close``.
    name
        ``stdout`` or ``stderr``.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self.ended = False
        os.set_blocking(fd, False)

    def read(self) -> str:
        """Text that has come, up to the last end of a line or carriage return (of a progress bar). Does not block."""
        self._take()
        return self._whole_lines()

    def drain(self) -> str:
        """All that is in the pipe, up to the last end of a line."""
        for _ in range(_PIECES):
            if not self._take():
                break
        return self._whole_lines()

    def rest(self) -> str:
        """The beginning of a line that has come."""
        text, self._begun = self._begun, ""
        return text

    def _whole_lines(self) -> str:
        end = max(self._begun.rfind("\n"), self._begun.rfind("\r")) + 1
        if end == 0 and len(self._begun) > _LONGEST_LINE:
            end = len(self._begun)
        text, self._begun = self._begun[:end], self._begun[end:]
        return text

    def _take(self) -> bool:
        try:
            part = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self.ended = self.ended or not part
        self._begun += self._decoder.decode(part, final=not part)
        return bool(part)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
