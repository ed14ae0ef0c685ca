"""Transport srd below the compiled engine: its tables, and its failures in words."""

from __future__ import annotations

import ctypes
from typing import NoReturn

from mkernel.transport.base import Put, Transport
from mkernel.transport.compiled import Kind, Report, Rule, Setup, Target, Trouble, UnfitError
from mkernel.transport.counting import WINDOW, ProtocolError
from mkernel.transport.rdma_compiled import RdmaSide
from mkernel.transport.srd import BACKLOG, SPARE, SrdTransport, _Peer

__all__ = ["SrdSide"]


class SrdSide(RdmaSide):
    """As in ``RdmaSide``.

    Raises
    ------
    UnfitError
        The card's queue pairs, or address handles, do not tell what they are to libibverbs.
    """

    kind = Kind.srd

    def __init__(self, transport: Transport) -> None:
        assert isinstance(transport, SrdTransport)
        self._transport = transport
        super().__init__(transport, [peer.pair for peer in transport._peers])
        self._targets = (Target * len(transport._peers))(*(self._target(peer) for peer in transport._peers))

    def _target(self, peer: _Peer) -> Target:
        assert peer.destination is not None
        assert peer.outgoing is not None
        to = peer.destination
        route = to.route(self._handles[peer.position])
        if route is None:
            raise UnfitError("pyverbs does not show what its address handles are to libibverbs")
        # Nothing has been sent: there is room for all messages that the peer has receives for.
        return Target(
            peer.rank, peer.heap, peer.heap_key, route=route, number=to.qp, queue_key=to.qkey, credits=peer.outgoing.room
        )  # fmt: skip

    def fill(self, setup: Setup) -> None:
        transport = self._transport
        super().fill(setup)
        setup.signals = transport._signal_address
        setup.scratch, setup.scratch_registered = ctypes.addressof(transport._slots), transport._slots_region.address
        setup.scratch_key = transport._slots_region.lkey
        setup.depth, setup.receives, setup.completions = transport._depth, transport._receives, transport._sends.capacity
        setup.credits, setup.backlog, setup.window = transport._receives - SPARE, BACKLOG, WINDOW

    def check(self, put: Put) -> None:
        self._transport._check(put)

    def explain(self, report: Report, put: Put) -> NoReturn:
        if report.trouble == Trouble.protocol:
            numbers = {name: getattr(report, name) for name in ("channel", "sequence", "number", "limit")}
            error = ProtocolError.of(Rule(report.rule), **numbers)
            raise self._transport._broken(self._transport._peers[report.pair], error) from error
        super().explain(report, put)
