"""Which world a call without ``world=`` means, and what happens to open worlds when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from mkernel.errors import ArgumentError, Error

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["current", "forget", "note_failure", "remember", "thread_world"]

_lock = threading.Lock()
_open: list[World] = []  # of this process, not of mk.launch, in order of creation
_thread = threading.local()
_uncaught: BaseException | None = None
_mpi_failed = False  # some world whose ranks are MPI's failed
_mpi_peer_lost = False  # ... because a rank has gone: MPI_Finalize would wait for it
_installed = False
_process = 0  # in which the hooks were installed
_GRACE_SECONDS = 0.5


def current(world: World | None = None) -> World:
    """``world`` itself, else the world of this ``mk.launch`` thread, else the oldest open world of the process.

    Raises
    ------
    ArgumentError
        There is none, or ``world`` is something else.
    """
    if world is not None:
        if not hasattr(world, "topology"):  # what every call asks it for first
            raise ArgumentError("world", world, "must be a World", "pass what mk.init() or mk.launch gave")
        return world
    own: World | None = getattr(_thread, "world", None)
    if own is not None:
        return own
    with _lock:
        for w in _open:
            if w.failure is None:
                return w
        if _open:
            return _open[0]  # only failed ones left: the call reports the failure
    raise ArgumentError("world", None, "there is no world in this process", "call mk.init() first, or run inside mk.launch")


@contextlib.contextmanager
def thread_world(world: World) -> Iterator[None]:
    """Inside the block ``world`` is what this thread's calls mean (``mk.launch``)."""
    before: World | None = getattr(_thread, "world", None)
    _thread.world = world
    try:
        yield
    finally:
        _thread.world = before


def remember(world: World) -> None:
    """A world of this process was opened."""
    global _installed
    with _lock:
        _open.append(world)
        if not _installed:
            _installed = True
            _install()


def forget(world: World) -> None:
    """It was closed."""
    with _lock:
        if world in _open:
            _open.remove(world)


def note_failure(*, peer_lost: bool) -> None:
    """A world whose ranks are MPI's has failed."""
    global _mpi_failed, _mpi_peer_lost
    _mpi_failed = True
    _mpi_peer_lost = _mpi_peer_lost or peer_lost


def _install() -> None:
    global _process
    _process = os.getpid()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _uncaught
        _uncaught = error
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Close what is open: in peace, or, when the process dies of an exception, so that the others hear why and MPI does not wait for us."""
    if os.getpid() != _process:
        return  # a forked child: the worlds are its parent's
    in_danger = _mpi_failed
    for world in list(_open):
        if _uncaught is not None:
            in_danger = in_danger or world.over_mpi
            world.abort(f"its process died of {type(_uncaught).__name__}: {_uncaught}")
        with contextlib.suppress(Error):  # logged where it happened
            world.close_at_exit()
    if _mpi_peer_lost or (in_danger and _uncaught is not None):
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_GRACE_SECONDS)  # the launcher kills everybody else: let them say what they saw
        from mkernel.runtime import mpi

        mpi.abort_process(1)
