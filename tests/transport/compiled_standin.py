"""Transports rc and srd below compiled engines, over the cards of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from mkernel.proxy.compiled import CompiledEngine
from mkernel.proxy.ring import RingReader
from mkernel.transport import Wiring, compiled_side
from mkernel.transport.base import Transport
from tests.transport.standin import StandinNetwork, StandinNic
from tests.transport.standin_calls import Calls

__all__ = ["CompiledNetwork"]


class CompiledNetwork(StandinNetwork):
    """A ``StandinNetwork`` whose engines are compiled. ``loop``: their library; None: the one that users get."""

    def __init__(self, open: Callable[[StandinNic, Wiring], Any], ranks: int = 3, *, loop: ctypes.CDLL | None = None, **more: Any) -> None:
        self._loop = loop
        super().__init__(open, ranks, **more)

    def _open(self, open: Callable[[StandinNic, Wiring], Any], srd: bool) -> None:
        self.fabric.calls = Calls(self.fabric)
        self._name = "srd" if srd else "rc"
        super()._open(open, srd)

    def start(self, rank: int, transport: Transport) -> None:
        ring = RingReader(self.producers[rank].buffer)
        self.engines.append(CompiledEngine(ring, transport, compiled_side(self._name, transport), self.clock, loop=self._loop))

    def step_engines(self) -> bool:
        moved = super().step_engines()
        assert self.fabric.calls is not None
        if self.fabric.calls.failure is not None:
            raise self.fabric.calls.failure
        return moved
