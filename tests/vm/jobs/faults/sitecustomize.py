"""Python imports this at its start where this folder is on the path: breaks the transport inside a rank's engine process, after a while.

``TEST_FAULT`` is ``kind:rank``. ``rkey``: writes have a wrong key; ``qp``: a queue pair is forced to error; ``deaf``: no receives are
posted any more; ``empty``: of each put only the signal travels (in the engine in Python, from the beginning).
``TEST_SMALLEST``: the fewest bytes of a part, where a rank has several cards.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_LATER = 40  # puts that go well
_RECEIVES = 12  # of a queue pair of the deaf


def _plant(kind: str, rank: int) -> None:
    import dataclasses

    from mkernel.transport.base import Put
    from mkernel.transport.rc import RcTransport

    class Broken(RcTransport):
        posted = 0
        connected = False

        def post(self, put: Put) -> bool:
            self.posted += 1
            if kind == "empty" and self._rank == rank:
                return super().post(put._replace(bytes=0))
            if kind != "deaf" and self._rank == rank and self.posted > _LATER:
                if kind == "rkey":
                    target = self._targets[put.dst_rank]
                    self._targets[put.dst_rank] = dataclasses.replace(target, heap_key=0x7FFFFF, signal_key=0x7FFFFF)
                else:
                    self._by_peer[put.dst_rank][0].pair.fail()
            return super().post(put)

        def connect(self, cards: Any) -> None:
            super().connect(cards)
            self.connected = True

        def _receive(self, connection: Any, slot: int) -> None:
            if kind != "deaf" or self._rank != rank or (slot < _RECEIVES and not self.connected):
                super()._receive(connection, slot)

    import mkernel.transport.rc

    mkernel.transport.rc.RcTransport = Broken  # type: ignore[misc]
    _plant_compiled(kind, rank)


def _plant_compiled(kind: str, rank: int) -> None:
    """The same below the compiled engine, which posts by itself."""
    import ctypes

    from mkernel.transport import rc_compiled
    from mkernel.transport.compiled import Report, Setup

    no_receive = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 0)

    class Broken(rc_compiled.RcSide):
        broken = False

        def fill(self, setup: Setup) -> None:
            super().fill(setup)
            if kind == "deaf" and self._transport._rank == rank:
                setup.post_receive = ctypes.cast(no_receive, ctypes.c_void_p).value or 0

        def look(self, report: Report, under_way: list[int]) -> tuple[()]:
            if not self.broken and kind in ("rkey", "qp") and self._transport._rank == rank and report.taken > _LATER:
                self.broken = True
                if kind == "rkey":
                    for target in self._targets:
                        target.heap_key = target.signal_key = 0x7FFFFF
                else:
                    self._transport._connections[0].pair.fail()
            return super().look(report, under_way)

    rc_compiled.RcSide = Broken  # type: ignore[misc]


if "TEST_FAULT" in os.environ and "mkernel.proxy" in sys.orig_argv:
    _kind, _, _rank = os.environ["TEST_FAULT"].partition(":")
    _plant(_kind, int(_rank))

if "TEST_SMALLEST" in os.environ and "mkernel.proxy" in sys.orig_argv:
    from mkernel.transport import striped

    striped.SMALLEST = int(os.environ["TEST_SMALLEST"])
