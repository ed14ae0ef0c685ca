"""``MKERNEL_LOG``: shows what the logger ``mkernel`` says, in programs that do not configure logging themselves."""

from __future__ import annotations

import logging
import sys

from mkernel import env

__all__ = ["set_up"]

_logger = logging.getLogger("mkernel")


class _Handler(logging.Handler):
    """Writes to stderr, as long as nobody else takes care of these records."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _others() and sys.stderr is not None:
            try:
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
            except Exception:
                self.handleError(record)


def _others() -> bool:
    """Whether the program has handlers of its own for these records; it may have added them after this one."""
    logger: logging.Logger | None = _logger
    while logger is not None:
        if any(not isinstance(handler, _Handler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def set_up() -> None:
    """Apply ``MKERNEL_LOG``, if it is set. Safe to call again. Raises ArgumentError for a level that is none."""
    if not env.LOG.is_set():
        return
    _logger.setLevel(env.LOG.get().upper())
    if not any(isinstance(handler, _Handler) for handler in _logger.handlers):
        handler = _Handler()
        handler.setFormatter(logging.Formatter("mkernel %(levelname)s: %(message)s"))
        _logger.addHandler(handler)
