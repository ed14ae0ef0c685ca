"""Progress of what takes long: a bar on the terminal, by rich where it is installed. Everywhere else nothing is shown."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

__all__ = ["DELAY_SECONDS", "relayed", "steps"]

DELAY_SECONDS = 2.0  # what is done sooner shows nothing
_shown = threading.Lock()  # held by the one bar that there may be


def _can_show() -> bool:
    """Whether somebody would see a bar, and a bar would disturb nothing: the outputs are a terminal, and rich is installed."""
    terminals = all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
    return terminals and importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def steps(title: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show how many of ``total`` steps are done (None: how long it has taken) after ``DELAY_SECONDS``.

    Yields what is called after each step, from any thread. Inside another bar nothing is shown.
    """
    if not _can_show() or not _shown.acquire(blocking=False):
        yield lambda: None
        return
    try:
        with _bar(title, total) as bar:
            (task,) = bar.task_ids
            yield lambda: bar.advance(task)
    finally:
        _shown.release()


@contextlib.contextmanager
def relayed(title: str) -> Iterator[IO[bytes] | None]:
    """Yields a file for the output of processes, which appears above a bar that shows how long they take.

    None where nothing is shown: then processes write to this one's own output.
    """
    if not _can_show() or not _shown.acquire(blocking=False):
        yield None
        return
    reading, writing = os.pipe()
    try:
        with os.fdopen(reading, errors="replace") as lines, os.fdopen(writing, "wb") as output, _bar(title, None) as bar:

            def relay() -> None:
                for line in lines:
                    bar.console.out(line, end="", highlight=False)

            thread = threading.Thread(target=relay, name="mkernel-relay", daemon=True)
            thread.start()
            try:
                yield output
            finally:
                output.close()
                thread.join()  # the processes have ended, so that the pipe has
    finally:
        _shown.release()


@contextlib.contextmanager
def _bar(title: str, total: int | None) -> Iterator[Any]:
    """A rich.progress.Progress with one task. It appears after the delay, and is gone in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    counted = () if total is None else (BarColumn(), MofNCompleteColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *counted, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(), transient=True)
    bar.add_task(title, total=total)
    appears = threading.Timer(DELAY_SECONDS, bar.start)
    appears.daemon = True
    appears.start()
    try:
        yield bar
    finally:
        appears.cancel()
        appears.join()  # it may be starting the bar just now
        bar.stop()
