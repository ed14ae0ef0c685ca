"""How this process ends, and what becomes of open worlds then.

A rank that dies must say so: the others wait for it, and under MPI the job waits in MPI_Finalize. Nothing here relies on
``sys.excepthook``, which any library may replace.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol

from mkernel.errors import Error

__all__ = ["Mortal", "born", "clean", "install", "note_failure", "seen"]

_log = logging.getLogger("mkernel")

_GRACE_SECONDS = 0.5  # before MPI_Abort kills the other ranks, so that they can report what they saw


class Mortal(Protocol):
    """A world, as the end of its process sees it."""

    @property
    def rank(self) -> int: ...
    @property
    def over_mpi(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def disown(self) -> None: ...


_worlds: weakref.WeakSet[Mortal] = weakref.WeakSet()  # all worlds of this process, also those of mk.launch
_open_worlds: Callable[[], Sequence[Mortal]] = tuple  # returns the worlds to close at exit
_installed = False
_bottom: FrameType | None = None  # the main program's frame, which an exception leaves last
_exit: SystemExit | None = None  # an exit with a non-zero status that is ending the program
_mpi_failed = False  # a world whose ranks are MPI's has failed
_mpi_peer_lost = False  # it failed because a rank has gone, for which MPI_Finalize would wait
_mpi_seconds = 0.0  # longest time that close() of such a world waits


def install(open_worlds: Callable[[], Sequence[Mortal]]) -> None:
    """Prepare for the end of the process, because a world is being opened. ``open_worlds`` returns those to be closed then."""
    global _installed, _bottom, _open_worlds
    _bottom = _main_frame()
    if _installed:
        return
    _installed, _open_worlds = True, open_worlds
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Peers are told here and not at exit only: exit comes after the last thread that is no daemon.
        if not _interactive() and _reached(error, _bottom):
            _abort_all(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    plain_exit = sys.exit

    @functools.wraps(plain_exit)
    def exit(status: Any = None, /) -> NoReturn:
        try:
            plain_exit(status)
        except SystemExit as error:
            raise seen(error) from None

    sys.exit = exit
    atexit.register(_at_exit)


class _Exit(SystemExit):
    """What ``sys.exit`` raises. No hook sees it end the program, but the interpreter then reads its ``code``."""

    @property
    def code(self) -> Any:
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            _end_by(self)  # only the interpreter itself calls without a frame
        return self.args[0] if len(self.args) == 1 else self.args or None

    @code.setter
    def code(self, value: Any) -> None:
        self.args = (value,)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def seen(error: SystemExit) -> SystemExit:
    """The same exception, as a type that is noticed when it ends the program."""
    return _Exit(*error.args).with_traceback(error.__traceback__) if type(error) is SystemExit else error


def _end_by(error: _Exit) -> None:
    global _exit
    if not clean(SystemExit(*error.args)):
        _exit = error


def born(world: Mortal) -> None:
    """Register a new world: forked children disown it."""
    _worlds.add(world)


def clean(error: BaseException) -> bool:
    """Whether this is how a program ends well: ``sys.exit()`` or ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))


def note_failure(*, peer_lost: bool, seconds: float) -> None:
    """Note that a world whose ranks are MPI's has failed, perhaps in ``init``. ``seconds``: how long its ``close`` would wait."""
    global _mpi_failed, _mpi_peer_lost, _mpi_seconds
    _mpi_failed, _mpi_seconds = True, max(_mpi_seconds, seconds)
    _mpi_peer_lost = _mpi_peer_lost or peer_lost


def _main_frame() -> FrameType | None:
    """The outermost frame of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _interactive() -> bool:
    """Whether the program goes on after an exception, as at a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _reached(error: BaseException, bottom: FrameType | None) -> bool:
    """Whether an exception has left every function of the main program, so that nobody has caught it."""
    trace = error.__traceback__
    return trace is not None and trace.tb_frame is bottom


def _death() -> BaseException | None:
    """The exception that ends this process, or None. A ``raise SystemExit`` outside of every world's block cannot be seen."""
    if _exit is not None:
        return _exit
    # The interpreter keeps what it is about to report here, whatever the hook then does.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return last if isinstance(last, BaseException) and not _interactive() and _reached(last, _bottom) else None


def _abort_all(error: BaseException) -> bool:
    """Abort every open world. Returns whether the ranks of one of them are MPI's."""
    worlds = [world for world in _open_worlds() if not world.closed]
    for world in worlds:
        world.abort(f"its process died of {type(error).__name__}: {error}")
    return any(world.over_mpi for world in worlds)


def _at_exit() -> None:
    """Close open worlds; if an exception is ending the process, abort them, so that peers see why and MPI waits for nobody."""
    death = _death()
    over_mpi = _mpi_failed
    if death is not None:
        over_mpi = _abort_all(death) or over_mpi
    unclosed = False
    for world in list(_open_worlds()):
        over_mpi = over_mpi or world.over_mpi
        try:
            world.close()
        except Error:
            unclosed = True  # logged where it happened
        except Exception:
            _log.exception("rank %d: closing the world at exit failed", world.rank)
            unclosed = True
    status = _status(death)
    if _mpi_peer_lost or (over_mpi and (unclosed or death is not None)):
        _flush()
        time.sleep(_GRACE_SECONDS)
        _mpi(lambda mpi: mpi.abort_process(status))
    if unclosed and death is None:
        _flush()
        os._exit(status)  # the program fails also by a failure that it has not seen
    if _mpi_failed:
        _mpi(lambda mpi: mpi.limit_finalize(math.ceil(_mpi_seconds)))


def _mpi(action: Callable[[Any], None]) -> None:
    """Do something with the MPI of this process, if there is one."""
    try:
        from mkernel.runtime.ranks import mpi
    except ImportError:
        return
    action(mpi)


def _status(death: BaseException | None) -> int:
    """The exit status of a process that ends badly."""
    code = death.code if isinstance(death, SystemExit) else 1
    return code & 0xFF or 1 if isinstance(code, int) else 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _after_fork() -> None:
    """Disown all worlds in a forked child: they are its parent's."""
    global _exit, _mpi_failed, _mpi_peer_lost
    _exit, _mpi_failed, _mpi_peer_lost = None, False, False
    for world in list(_worlds):
        world.disown()


os.register_at_fork(after_in_child=_after_fork)
