"""The engine whose loop is compiled (``kernels_src/proxy``) by the host's C++ compiler, at first use and from then on from the cache.

Ring, order per destination, posting, polling, credits and pace are compiled. What is rare stays here: opening, asynchronous events, and
what failures are called, so that both engines raise the same errors.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import time
from collections.abc import Callable

from mkernel import env
from mkernel.errors import ArgumentError, Error
from mkernel.jit import cpu
from mkernel.proxy.engine import BATCH, Engine
from mkernel.proxy.pace import LONG_NAP_NS, Pace
from mkernel.proxy.ring import RingReader
from mkernel.transport import compiled_side
from mkernel.transport.base import Put, Transport
from mkernel.transport.compiled import Report, Setup, Side, Trouble, UnfitError

__all__ = ["CompiledEngine", "CompiledPace", "library", "open_engine"]

_log = logging.getLogger("mkernel")

_LOOK_STEPS = 64  # steps from one look for what is rare to the next
_TROUBLE = 2
_PUT_FIELDS = 7


class CompiledPace(ctypes.Structure):
    """``mkproxy::Pace``."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("follows", "spin_ns", "graph_spin_ns", "nap_ns", "long_nap_ns", "moved_ns")]

    @classmethod
    def of(cls, pace: Pace) -> CompiledPace:
        """The same pace."""
        return cls(pace.launching is not None, pace.spin_ns, pace.graph_spin_ns, pace.nap_ns, LONG_NAP_NS, 0)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled loop, loaded. Raises CompileError where there is no compiler, or compiling is switched off and the cache has none."""
    opened = load(cpu.open_library(cpu.engine_library)[1])
    return opened


def load(opened: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of a compiled loop (``kernels_src/proxy/interface.hpp``)."""
    pointer, word, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    for name, result, arguments in (
        ("mkp_create", pointer, (pointer, pointer)),
        ("mkp_destroy", None, (pointer,)),
        ("mkp_step", number, (pointer,)),
        ("mkp_spin", number, (pointer, pointer, number, word)),
        ("mkp_lose", number, (pointer, word)),
        ("mkp_waiting", number, (pointer,)),
        ("mkp_under_way", number, (pointer, word)),
        ("mkp_put", number, (pointer, word, pointer)),
        ("mkp_nap", word, (pointer, number, word, number, number)),
    ):
        function = getattr(opened, name)
        function.restype, function.argtypes = result, arguments
    return opened


class CompiledEngine(Engine):
    """An ``Engine`` whose steps are compiled.

    Parameters
    ----------
    side
        What the transport gives to the compiled loop, which posts and polls in its place.
    loop
        The loaded library; None: ``library()``.

    Raises
    ------
    CompileError
        There is no compiled loop.
    UnfitError
        The loop cannot post to this card.
    """

    def __init__(
        self,
        ring: RingReader,
        transport: Transport,
        side: Side,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        loop: ctypes.CDLL | None = None,
    ) -> None:
        super().__init__(ring, transport, clock_ns)
        self._side, self._loop = side, loop or library()
        self.report = Report()
        self._setup = Setup(ring=ring.address, batch=BATCH)
        side.fill(self._setup)
        self._handle: int | None = self._loop.mkp_create(ctypes.byref(self._setup), ctypes.byref(self.report))
        if self._handle is None:
            if self.report.trouble == Trouble.unfit:
                raise UnfitError("a queue pair lacks functions that its transport uses")
            raise MemoryError("the engine")
        self._pace: tuple[Pace, CompiledPace] | None = None
        self._steps = 0

    def step(self) -> bool:
        if self.error is not None:
            raise self.error
        if self._closed:
            return False
        self._steps += 1
        return self._after(self._loop.mkp_step(self._handle), look=self._steps % _LOOK_STEPS == 0)

    def spin(self, pace: Pace, moved: bool, limit_ns: int) -> int:
        if self.error is not None:
            raise self.error
        if self._closed:
            return LONG_NAP_NS
        if self._pace is None or self._pace[0] is not pace:
            self._pace = pace, CompiledPace.of(pace)
        self._after(self._loop.mkp_spin(self._handle, ctypes.byref(self._pace[1]), moved, limit_ns), look=True)
        return int(self.report.nap_ns)

    def _after(self, result: int, *, look: bool) -> bool:
        """Raise what has failed, and look for what is rare; returns whether anything has moved."""
        put = None
        try:
            if result == _TROUBLE:
                put = self._put(self.report.ticket)
                self._lose(self._side.explain(self.report, put))
            if look:
                for link in self._side.look(self.report, self._under_way() if self.report.outstanding else []):
                    self._lose(link)
        except Exception as error:
            self._fail(error, put if self.report.trouble == Trouble.bad_put else None)
        return result != 0

    def _lose(self, link: int) -> None:
        """Let the loop go on without a link."""
        if self._loop.mkp_lose(self._handle, link) == _TROUBLE:  # at a put that no link can carry out: this raises
            self._side.explain(self.report, self._put(self.report.ticket))

    def _put(self, ticket: int) -> Put:
        fields = (ctypes.c_uint64 * _PUT_FIELDS)()
        self._loop.mkp_put(self._handle, ticket, fields)
        return Put(ticket, *fields)

    def _under_way(self) -> list[int]:
        """The positions of the queue pairs with work that has not completed."""
        pairs = self._setup.num_peers * self._setup.queue_pairs
        return [position for position in range(pairs) if self._loop.mkp_under_way(self._handle, position)]

    def next_event_ns(self) -> int | None:
        if self.error is not None or self._closed:
            return None
        return 0 if self.report.outstanding or self._loop.mkp_waiting(self._handle) else None

    def close(self) -> None:
        if not self._closed and self._handle is not None:
            self._loop.mkp_destroy(self._handle)
            self._handle = None
        super().close()


def open_engine(name: str, ring: RingReader, transport: Transport, clock_ns: Callable[[], int] = time.monotonic_ns) -> Engine:
    """The engine of a rank that ``MKERNEL_ENGINE`` asks for. ``name``: that of the transport, which is closed if this fails.

    Raises
    ------
    ArgumentError
        The variable asks for the compiled engine, and there is none here, or it does not serve this transport.
    """
    wanted = env.ENGINE.get()
    if wanted == "python":
        return Engine(ring, transport, clock_ns)
    try:
        return CompiledEngine(ring, transport, compiled_side(name, transport), clock_ns)
    except (Error, UnfitError) as error:
        why = str(error).splitlines()[0]
        if wanted == "compiled":
            transport.close()
            raise ArgumentError(env.ENGINE.name, wanted, f"not here: {why}", "set it to auto or python") from error
        _log.info("the engine runs in Python (%s, %s): %s", platform.machine(), name, why)
        return Engine(ring, transport, clock_ns)
