"""Counts what a call must not do: functions of the driver that wait, allocate or load, and those parts of mkernel that lead there."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

__all__ = ["FORBIDDEN", "Counters", "Pieces"]

# Of the driver. Events are made now and then by the launch queue, without a wait: they are not among these.
FORBIDDEN = re.compile(
    r"cu(Ctx|Stream|Event)Synchronize"
    r"|cuMem(Alloc|Free|Create|Release|Map|Unmap|AddressReserve|AddressFree|SetAccess|Host|Pool|Import|Export)\w*"
    r"|cuMem(cpy|set)(?!\w*Async)\w*"
    r"|cu(Module|Library)(Load|Unload)\w*|cuFuncLoad\w*|cuLink\w*|cuStreamCreate\w*|cuGraphInstantiate\w*"
)
_OF_DEVICES = ("compile", "load", "allocate", "allocate_host", "clear", "read", "synchronize", "segment", "import_segment")


class Counters:
    """While ``armed``, counts calls that the arming thread makes. Other functions of the driver stay as they are, and as fast."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._thread: int | None = None

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Count what this thread does inside."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, but counted."""

        @functools.wraps(function, updated=())
        def count(*arguments: Any, **keywords: Any) -> Any:
            if self._thread is not None and self._thread == threading.get_ident():
                self.counts[name] += 1
            return function(*arguments, **keywords)

        return count

    def install(self) -> None:
        """Watch the driver, for good. Before the first world: its parts keep the functions that they have asked for."""
        from mkernel.memory import driver
        from mkernel.runtime.cuda import events

        replaced: dict[int, Any] = {}
        for kind in ("native", "prompt"):
            original = getattr(driver, kind)
            replaced[id(original)] = functools.cache(functools.partial(self._function, original))
        replaced[id(events.sleep_until)] = self._sleep(events.sleep_until)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "mkernel":
                self._replace(module, replaced)
        with contextlib.suppress(ImportError, driver.DriverError):  # without a driver there is none to watch
            self.watch_module(driver.driver())

    def _sleep(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Looking whether the device is done is no wait, where it is."""
        waits = self.counted("waits for the device", original)

        def sleep_until(condition: Callable[[], bool]) -> None:
            if not condition():
                waits(condition)

        return sleep_until

    def _function(self, original: Callable[..., Any], name: str, *types: Any) -> Any:
        function = original(name, *types)
        return self.counted(name, function) if FORBIDDEN.fullmatch(name) else function

    @staticmethod
    def _replace(module: Any, replaced: dict[int, Any]) -> None:
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])

    def watch_module(self, module: Any) -> None:
        """Count the functions of this module that are forbidden."""
        for name in dir(module):
            if FORBIDDEN.fullmatch(name):
                setattr(module, name, self.counted(name, getattr(module, name)))

    def watch(self, world: Any) -> None:
        """Count what this world asks of its device and of the other ranks."""
        for name in _OF_DEVICES:
            setattr(world.backend, name, self.counted(f"device: {name}", getattr(world.backend, name)))
        control = world._control
        for name in ("collective", "exchange_fds"):
            setattr(control, name, self.counted(f"control: {name}", getattr(control, name)))


class Pieces:
    """Seconds spent in parts of what is called, each less those inside it on the same thread. Every part costs a microsecond more."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._here = threading.local()  # inside: seconds of the parts within each part that has begun in this thread

    @contextlib.contextmanager
    def of(self, parts: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """Inside, takes the time of these: what they are called -> whose attribute, and its name."""
        with contextlib.ExitStack() as stack:
            for name, (owner, attribute) in parts.items():
                stack.enter_context(mock.patch.object(owner, attribute, self._timed(name, getattr(owner, attribute))))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        found = self.seconds.setdefault(name, [])

        def timed(*arguments: Any, **keywords: Any) -> Any:
            inside = self._here.__dict__.setdefault("inside", [0.0])
            inside.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                whole = time.perf_counter() - begin
                found.append(whole - inside.pop())
                inside[-1] += whole

        return timed

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last time."""
        totals = {name: sum(found) for name, found in self.seconds.items()}
        for found in self.seconds.values():
            found.clear()
        return totals
