"""Closing a world: each part is closed, whatever becomes of the others, and nothing is waited for without end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

__all__ = ["CLOSE_SECONDS", "bounded", "close_all"]

_log = logging.getLogger("mkernel")

CLOSE_SECONDS = 10.0  # bound on everything a failed world still waits for


def close_all(rank: int, steps: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Take the named steps in order. Never raises: what cannot be closed is logged and left to the end of the process."""
    for what, step in steps:
        try:
            step()
        except Exception:
            _log.exception("rank %d: closing %s failed", rank, what)


def bounded(action: Callable[[], None], seconds: float = CLOSE_SECONDS) -> bool:
    """Run ``action`` on another thread; whether it ended, well or not, in time."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, name="mkernel-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
