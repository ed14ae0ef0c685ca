"""Ranks with several links each, for the contract's body: emulated ones of unlike rates, or cards of this process on several networks."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence

from mkernel.errors import TransportError
from mkernel.proxy.compiled import CompiledEngine
from mkernel.proxy.ring import RingReader
from mkernel.transport import Wiring, compiled_side
from mkernel.transport.base import Put, Transport
from mkernel.transport.emulated import EmulatedTransport, Faults
from mkernel.transport.rc import RcTransport, open_transport
from mkernel.transport.striped import Link, StripedTransport, Way, _Flow, _Job, _Part
from tests.transport.harness import LateCopier, LocalNetwork
from tests.transport.standin import Fabric, Mood
from tests.transport.standin_calls import Calls

__all__ = ["BUGS", "FAILING_BUGS", "LOST_CARD_BUGS", "RATES", "Cards", "EmulatedLinks", "ItCarriesOn"]

RATES = (50.0, 12.5)  # GB/s


class EmulatedLinks(LocalNetwork):
    """In virtual time. ``faults``: of each link; ``down``: (rank, link, time) of links that fail."""

    def __init__(
        self,
        *,
        ranks: int = 3,
        rates: Sequence[float] = RATES,
        faults: Sequence[Faults] | None = None,
        down: tuple[int, int, int] | None = None,
        kind: type[StripedTransport] = StripedTransport,
        heap_bytes: int = 1 << 20,
        seed: int = 0,
    ) -> None:
        super().__init__(ranks, heap_bytes, seed)
        self.transports: list[StripedTransport] = []
        for rank in self.ranks:
            links = []
            for number, rate in enumerate(rates):
                fault = faults[number] if faults else Faults()
                if down is not None and down[:2] == (rank, number):
                    fault = dataclasses.replace(fault, down_ns=down[2])
                links.append(Link(self._link(rank, rate, fault, seed + number), f"link {number} of rank {rank}", rate))
            self.transports.append(kind(rank, links))
            self.start(rank, self.transports[-1])

    def _link(self, rank: int, rate: float, faults: Faults, seed: int) -> Transport:
        peers = {peer: (self.heaps[peer].address(), self.signals[peer].address()) for peer in self.ranks if peer != rank}
        sizes = {"heap_bytes": self.heaps[rank].size, "signal_bytes": self.signals[rank].size}
        copier = LateCopier(seed + rank, lambda: self.watcher())
        faults = dataclasses.replace(faults, seed=seed)
        return EmulatedTransport(rank, self.heaps[rank].address(), peers, copier, self.clock, rate, 5.0, faults, **sizes)

    def turn(self) -> bool:
        if self.step_engines():
            return True
        events = [event for event in (engine.next_event_ns() for engine in self.engines) if event is not None]
        if not events:
            return False
        self.clock.now = max(self.clock.now, min(events))
        return True


class Cards(LocalNetwork):
    """Each rank has a card on every network.

    ``then``: what happens after so many turns, e.g. a card is lost; ``compiled``: the engines are, from ``loop`` or as users get them.
    """

    def __init__(
        self,
        *,
        ranks: int = 3,
        moods: Sequence[Mood] = (Mood(), Mood()),
        kind: type[StripedTransport] = StripedTransport,
        then: tuple[int, Callable[[Cards], object]] | None = None,
        compiled: bool = False,
        loop: ctypes.CDLL | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(ranks, 1 << 20, seed)
        self._compiled, self._loop = compiled, loop
        self.fabrics = [Fabric(mood, seed + number) for number, mood in enumerate(moods)]
        self.turns, self.then = 0, then
        self.links: list[list[RcTransport]] = []  # by network, then by rank
        for number, fabric in enumerate(self.fabrics):
            fabric.watcher = lambda: self.watcher()
            fabric.calls = Calls(fabric) if compiled else None
            opened = [
                open_transport(self._nic(fabric, number, rank), self._wiring(rank), signal="atomic", queue_pairs=2) for rank in self.ranks
            ]
            addresses = [transport.address for transport in opened]
            for transport in opened:
                transport.connect(addresses)
            self.links.append(opened)
        self.transports: list[StripedTransport] = []
        for rank in self.ranks:
            links = [Link(opened[rank], opened[rank].name, 1.0 + number) for number, opened in enumerate(self.links)]
            self.transports.append(kind(rank, links))
            self.start(rank, self.transports[-1])

    def start(self, rank: int, transport: Transport) -> None:
        if not self._compiled:
            super().start(rank, transport)
            return
        ring = RingReader(self.producers[rank].buffer)
        self.engines.append(CompiledEngine(ring, transport, compiled_side("rc", transport), self.clock, loop=self._loop))

    def step_engines(self) -> bool:
        moved = super().step_engines()
        for fabric in self.fabrics:
            if fabric.calls is not None and fabric.calls.failure is not None:
                raise fabric.calls.failure
        return moved

    @staticmethod
    def _nic(fabric: Fabric, number: int, rank: int) -> object:
        nic = fabric.nic(rank)
        nic.port = dataclasses.replace(nic.port, device=f"net{number}card{rank}")
        return nic

    def _wiring(self, rank: int) -> Wiring:
        return Wiring(
            rank=rank,
            heap_address=self.heaps[rank].address(),
            heap_bytes=self.heaps[rank].size,
            signal_bytes=self.signals[rank].size,
            peers={peer: (0, 0) for peer in self.ranks if peer != rank},
            copier=lambda: None,  # type: ignore[arg-type, return-value]  # nobody copies
            clock_ns=self.clock,
            signal_address=self.signals[rank].address(),
        )

    def turn(self) -> bool:
        self.clock.now += 1_000
        self.turns += 1
        if self.then is not None and self.turns == self.then[0]:
            self.then[1](self)
        moved = self.step_engines()
        busy = [fabric.step() for fabric in self.fabrics]
        return moved or any(busy) or any(engine.next_event_ns() is not None for engine in self.engines)


# ---- planted bugs: each breaks the contract in its own way
class FlagsDoNotWait(StripedTransport):
    """For what went by other links."""

    def _release(self, flow: _Flow) -> None:
        while flow.waiting:
            job = flow.waiting.popleft()
            flow.sent[job] = None
            self._send(_Part(flow, job, flow.home, job.put.bytes - job.bytes_left, job.bytes_left, flag=True))


class FlagsWaitForTheirOwnBytesOnly(StripedTransport):
    """Not for those of earlier puts of the channel."""

    def _release(self, flow: _Flow) -> None:
        for job in [job for job in flow.waiting if all(part.way is flow.home for part in job.parts)]:
            flow.waiting.remove(job)
            flow.sent[job] = None
            self._send(_Part(flow, job, flow.home, job.put.bytes - job.bytes_left, job.bytes_left, flag=True))


class FlagsTakeLinksInTurn(StripedTransport):
    turn = 0

    def _release(self, flow: _Flow) -> None:
        while flow.waiting:
            job = flow.waiting[0]
            self.turn += 1
            home = self._ways[self.turn % len(self._ways)]
            if any(part.way is not home for part in job.parts):
                return
            flow.waiting.popleft()
            flow.sent[job] = None
            self._send(_Part(flow, job, home, job.put.bytes - job.bytes_left, job.bytes_left, flag=True))


class CreditWithTheFlag(StripedTransport):
    """As soon as the flag is posted."""

    def _send(self, part: _Part) -> None:
        super()._send(part)
        if part.flag:
            self._done.append(part.job.put.ticket)

    def _finish(self, job: _Job) -> None:
        pass


class LostByte(StripedTransport):
    """Between two parts."""

    def _put(self, way: Way, part: _Part) -> Put:
        put = super()._put(way, part)
        return put if part.flag or part.offset else put._replace(bytes=put.bytes - 1)


class NothingIsSentAgain(StripedTransport):
    """What a failed link had to carry counts as done."""

    def _resend(self, flow: _Flow, job: _Job, offset: int, size: int) -> None:
        pass


class OldFlagsAreSentAgain(StripedTransport):
    """All values, the oldest first."""

    def _move(self, flow: _Flow) -> None:
        flow.home = self._choose_home()
        flow.waiting.extendleft(reversed(list(flow.sent)))
        flow.sent.clear()


class ItCarriesOn(StripedTransport):
    """A link that has failed is not told to stop."""

    def give_up(self, way: Way, error: TransportError) -> None:
        way.link.transport.abandon = lambda: None  # type: ignore[method-assign]
        super().give_up(way, error)


class CompletedTwice(StripedTransport):
    def _finish(self, job: _Job) -> None:
        job.ended = False
        super()._finish(job)


BUGS: dict[type[StripedTransport], str] = {
    FlagsDoNotWait: "visible before the bytes",
    FlagsWaitForTheirOwnBytesOnly: "visible before the bytes|went back",
    FlagsTakeLinksInTurn: "visible before the bytes|went back",
    CreditWithTheFlag: "visible before the bytes",
    LostByte: "visible before the bytes",
}
FAILING_BUGS: dict[type[StripedTransport], str] = {
    NothingIsSentAgain: "visible before the bytes",
    OldFlagsAreSentAgain: "went back",
}
LOST_CARD_BUGS = (ItCarriesOn, CompletedTwice)
