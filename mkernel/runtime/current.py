"""Which world a call without ``world=`` means."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mkernel.errors import ArgumentError, Error
from mkernel.runtime.world import named as world_named

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["current", "named", "of_group", "opened", "remember", "thread_world"]

_lock = threading.Lock()
_open: list[World] = []  # worlds of this process but for those of mk.launch, in order of creation
_alone: list[World] = []  # the world of mk.launch in a process that has one of its ranks only, while its function runs
_thread = threading.local()


def current(world: World | None = None) -> World:
    """``world`` itself, else the world of this ``mk.launch`` thread, else the oldest open world of the process.

    In other threads, as torch has for backward passes, it is that of ``mk.launch`` where the process has one of its ranks only.

    Raises
    ------
    ArgumentError
        There is none, or ``world`` is something else.
    Error
        It is the world of the process that this one was forked from.
    """
    if world is not None:
        try:
            foreign = world.foreign
        except AttributeError:
            raise ArgumentError("world", world, "must be a World", "pass what mk.init() or mk.launch gave") from None
        if foreign:  # before anything of its device is touched
            raise Error(foreign)
        return world
    own: World | None = getattr(_thread, "world", None)
    if own is not None:
        if own.foreign:
            raise Error(own.foreign)
        return own
    with _lock:
        for w in _open:
            if w.failure is None:
                return w
        for w in _open:
            if not w.foreign:
                return w  # only failed worlds are left: the call reports the failure
        if _open:
            raise Error(_open[0].foreign)
        if _alone:
            return _alone[-1]
    raise ArgumentError("world", None, "there is no world in this process", "call mk.init() first, or run inside mk.launch")


def named(name: str) -> World:
    """The world of a ``World.name``. In a thread of ``mk.launch`` the names of all ranks mean its own: compiled graphs are shared.

    Raises Error when this process has no such world.
    """
    found = world_named(name)
    ranks: Mapping[int, World] = getattr(_thread, "ranks", {})
    if ranks.get(found.rank) is not found:
        return found
    own: World = _thread.world
    return own


@contextlib.contextmanager
def thread_world(world: World, alone: bool, ranks: Mapping[int, World] | None = None) -> Iterator[None]:
    """Inside the block ``world`` is what this thread's calls mean (``mk.launch``); ``alone``: those of other threads, too.

    ``ranks``: the worlds of all ranks, where these are threads of this process.
    """
    before = getattr(_thread, "world", None), getattr(_thread, "ranks", {})
    _thread.world, _thread.ranks = world, ranks or {}
    if alone:
        _alone.append(world)
    try:
        yield
    finally:
        _thread.world, _thread.ranks = before
        if alone:
            _alone.remove(world)


def remember(world: World) -> None:
    """Count a world of this process among the open ones, until it is closed."""
    world.when_closed.append(_forget)
    with _lock:
        _open.append(world)


def of_group(group: str) -> World | None:
    """The newest open world that was made of a process group of that name."""
    with _lock:
        return next((world for world in reversed(_open) if not world.foreign and world.process_group == group), None)


def opened() -> tuple[World, ...]:
    """The worlds that were remembered and are not closed."""
    return tuple(_open)


def _forget(world: World) -> None:
    with _lock:
        if world in _open:
            _open.remove(world)


def _unlock() -> None:
    """Replace the lock in a forked child: a thread of the parent, which is not here, may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
