"""Several links as one below the compiled engine: the links' own sides, and which of their failures the engine goes on after."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mkernel.errors import TransportError
from mkernel.transport import striped
from mkernel.transport.base import Put
from mkernel.transport.compiled import Kind, Report, Setup, Side, Trouble, UnfitError
from mkernel.transport.rdma_compiled import RdmaSide
from mkernel.transport.striped import StripedTransport

__all__ = ["MOST_LINKS", "StripedSide"]

MOST_LINKS = 16
SMALLEST = 256 << 10  # bytes of a part: what two links of 400 Gb/s save with a put of twice as much is the round trip that its flag waits
_RATE_UNIT = 2.0**-20  # a power of two, so that both engines spread alike


class StripedSide(Side):
    """``transport`` has posted nothing. From now on it only knows which of its links work.

    Parameters
    ----------
    sides
        Those of its links, in the same order.

    Raises
    ------
    UnfitError
        There are more than ``MOST_LINKS``.
    """

    def __init__(self, transport: StripedTransport, sides: Sequence[RdmaSide]) -> None:
        if len(sides) > MOST_LINKS:
            raise UnfitError(f"it spreads puts over {MOST_LINKS} cards at most")
        self._transport, self._sides, self._ways = transport, sides, transport.ways
        self._setups, self._reports = (Setup * len(sides))(), (Report * len(sides))()

    def fill(self, setup: Setup) -> None:
        for way, side, own, report in zip(self._ways, self._sides, self._setups, self._reports, strict=True):
            side.fill(own)
            own.rate = max(1, round(way.link.rate / _RATE_UNIT))
            own.report = ctypes.addressof(report)
        setup.kind = Kind.striped
        setup.links, setup.num_links = ctypes.addressof(self._setups), len(self._setups)
        setup.smallest, setup.unit = min(SMALLEST, striped.SMALLEST), striped.UNIT
        setup.num_peers, setup.queue_pairs = self._setups[0].num_peers, len(self._setups) * self._setups[0].queue_pairs

    def explain(self, report: Report, put: Put) -> int:
        number = int(report.link)
        if report.trouble == Trouble.bad_put and self._ways[number].lost:  # a rank that is no peer: any link says so
            number = next(number for number, way in enumerate(self._ways) if not way.lost)
        own = self._reports[number]
        own.trouble, own.ticket = report.trouble, report.ticket
        try:
            self._sides[number].explain(own, put)
        except TransportError as error:
            self._transport.give_up(self._ways[number], error)
        return number

    def look(self, report: Report, under_way: list[int]) -> list[int]:
        """As the links' sides do; returns the numbers of links to go on without."""
        lost, pairs = [], self._setups[0].num_peers * self._setups[0].queue_pairs
        for number, (way, side) in enumerate(zip(self._ways, self._sides, strict=True)):
            if way.lost:
                continue
            try:
                side.look(self._reports[number], [position % pairs for position in under_way if position // pairs == number])
            except TransportError as error:
                self._transport.give_up(way, error)
                lost.append(number)
        return lost
