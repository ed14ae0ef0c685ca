"""Transport rc below the compiled engine: its tables, and its failures in words."""

from __future__ import annotations

import ctypes
import time
from typing import NoReturn

from mkernel.transport.base import Put, Transport
from mkernel.transport.compiled import Kind, Report, Setup, Side, Signal, Target, Trouble
from mkernel.transport.rc import RcTransport
from mkernel.transport.rdma_compiled import RdmaSide
from mkernel.transport.striped import StripedTransport
from mkernel.transport.striped_compiled import StripedSide

__all__ = ["RcSide", "side"]

_NO_IMM = 1 << 32


class RcSide(RdmaSide):
    """As in ``RdmaSide``."""

    kind = Kind.rc

    def __init__(self, transport: Transport) -> None:
        assert isinstance(transport, RcTransport)
        self._transport = transport
        super().__init__(transport, [connection.pair for connection in transport._connections])
        targets = [(peer, transport._targets[peer]) for peer in transport._by_peer]
        self._targets = (Target * len(targets))(
            *(Target(rank, to.heap, to.heap_key, to.signals, to.signal_key, to.barrier, to.barrier_key) for rank, to in targets)
        )

    def fill(self, setup: Setup) -> None:
        transport = self._transport
        super().fill(setup)
        setup.signal = Signal[transport.signal]
        setup.signals = transport._signal_address
        setup.scratch, setup.scratch_registered = ctypes.addressof(transport._scratch), transport._scratch_region.address
        setup.scratch_key = transport._scratch_region.lkey
        setup.depth, setup.receives, setup.completions = transport._depth, transport._receives, transport._sends.capacity

    def check(self, put: Put) -> None:
        self._transport._check_addresses(put)

    def explain(self, report: Report, put: Put) -> NoReturn:
        transport, trouble = self._transport, Trouble(report.trouble)
        if trouble == Trouble.too_long:
            raise transport._too_long(put)
        if trouble == Trouble.two_channels:
            raise transport._two_channels(put)
        if trouble == Trouble.bad_message:
            imm = None if report.imm == _NO_IMM else report.imm
            raise transport._bad_message(transport._connections[report.pair], report.bytes, imm)
        super().explain(report, put)

    def look(self, report: Report, under_way: list[int]) -> tuple[()]:
        """Look for asynchronous events, and ring doorbells again where nothing completes (``RcTransport._nudge``)."""
        super().look(report, under_way)
        transport = self._transport
        if under_way and transport.signal == "atomic":
            transport._moved_ns = max(transport._moved_ns, report.moved_ns)
            transport._nudge([transport._connections[position] for position in under_way], time.monotonic_ns())
        return ()


def side(transport: Transport) -> Side:
    """The side of a rank's card, or of its cards. Raises UnfitError as ``RdmaSide`` and ``StripedSide`` do."""
    if not isinstance(transport, StripedTransport):
        return RcSide(transport)
    return StripedSide(transport, [RcSide(way.link.transport) for way in transport.ways])
