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
from typing import TYPE_CHECKING, Any, NoReturn

from mkernel.errors import Error

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["born", "clean", "install", "note_failure", "seen"]

_log = logging.getLogger("mkernel")

_GRACE_SECONDS = 0.5  # MPI_Abort kills everybody else: let them say first what they saw

_worlds: weakref.WeakSet[World] = weakref.WeakSet()  # of this process, those of mk.launch too
_open_worlds: Callable[[], Sequence[World]] = tuple  # what to close at exit
_installed = False
_bottom: FrameType | None = None  # the main program's frame, which an exception leaves last
_exit: SystemExit | None = None  # a non-zero one that ends the program
_mpi_failed = False  # some world whose ranks are MPI's failed
_mpi_peer_lost = False  # ... because a rank has gone: MPI_Finalize would wait for it
_mpi_seconds = 0.0  # as long as close() of such a world waits


def install(open_worlds: Callable[[], Sequence[World]]) -> None:
    """A world of this process is being opened: see to the end of the process. ``open_worlds``: those to be closed then."""
    global _installed, _bottom, _open_worlds
    _bottom = _main_frame()
    if _installed:
        return
    _installed, _open_worlds = True, open_worlds
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Not only at exit, which comes after the last thread that is no daemon.
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
    """What ``sys.exit`` raises. It passes no hook when it ends the program, but the interpreter then asks it for its code."""

    @property
    def code(self) -> Any:
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            _end_by(self)  # nobody but the interpreter itself calls without a frame
        return self.args[0] if len(self.args) == 1 else self.args or None

    @code.setter
    def code(self, value: Any) -> None:
        self.args = (value,)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def seen(error: SystemExit) -> SystemExit:
    """The same, so that its way out of the program is noticed."""
    return _Exit(*error.args).with_traceback(error.__traceback__) if type(error) is SystemExit else error


def _end_by(error: _Exit) -> None:
    global _exit
    if not clean(SystemExit(*error.args)):
        _exit = error


def born(world: World) -> None:
    """A world was made: a forked child must not use it."""
    _worlds.add(world)


def clean(error: BaseException) -> bool:
    """Whether this is how a program ends well: ``sys.exit()`` or ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))


def note_failure(*, peer_lost: bool, seconds: float) -> None:
    """A world whose ranks are MPI's has failed, perhaps in ``init``; its ``close`` would have waited so many seconds."""
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
    """At a prompt exceptions are shown, and the program goes on."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _reached(error: BaseException, bottom: FrameType | None) -> bool:
    """Whether an exception has left every function of the main program. One that was caught further up has not."""
    trace = error.__traceback__
    return trace is not None and trace.tb_frame is bottom


def _death() -> BaseException | None:
    """What this process dies of; None when it ends well, or by ``raise SystemExit`` outside of every world's block: nobody sees that."""
    if _exit is not None:
        return _exit
    # The interpreter keeps what it is about to report here, whatever the hook then does.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return last if isinstance(last, BaseException) and not _interactive() and _reached(last, _bottom) else None


def _abort_all(error: BaseException) -> bool:
    """Tell the others of every open world; whether one of them is MPI's."""
    worlds = [world for world in _open_worlds() if not world.closed]
    for world in worlds:
        world.abort(f"its process died of {type(error).__name__}: {error}")
    return any(world.over_mpi for world in worlds)


def _at_exit() -> None:
    """Close what is open: in peace, or, when the process dies of an exception, so that the others hear why and MPI waits for nobody."""
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
        os._exit(status)  # a failure that the program has not seen is one nevertheless
    if _mpi_failed:
        _mpi(lambda mpi: mpi.limit_finalize(math.ceil(_mpi_seconds)))


def _mpi(action: Callable[[Any], None]) -> None:
    """With the MPI of this process; without one, nobody waits there."""
    try:
        from mkernel.runtime import mpi
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
    """In a forked child: the worlds, and what became of them, are its parent's."""
    global _exit, _mpi_failed, _mpi_peer_lost
    _exit, _mpi_failed, _mpi_peer_lost = None, False, False
    for world in list(_worlds):
        world.disown()


os.register_at_fork(after_in_child=_after_fork)
