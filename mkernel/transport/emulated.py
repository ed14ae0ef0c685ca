"""The network between emulated nodes of one host: copies, then signals, paced like one NIC per rank. It can misbehave on purpose."""

from __future__ import annotations

import ctypes
import dataclasses
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mkernel import env
from mkernel.errors import ArgumentError, TransportError
from mkernel.transport import Copier, Wiring
from mkernel.transport.base import Put, Transport
from mkernel.transport.striped import Link, StripedTransport

__all__ = ["EmulatedTransport", "Faults", "check_put", "create", "require_one_plain_link"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How the network misbehaves. Delays, reordering and refusals are legal: the contract holds. All other faults end the world.

    Attributes
    ----------
    delay_us
        Every put arrives up to this much later, at random.
    reorder_us
        Data arrives in any order within this window, as over SRD. The bytes of a later put may land before those of an earlier one, also
        on the same channel. Signals keep the order of their channel. Bytes land at the latest legal moment.
    ack_us
        Every put completes up to this much after its signal, at random. Its source must still hold then what was sent, because a network
        that retransmits reads it again. Target cpu only.
    queue_depth
        The most puts in flight: ``post`` refuses any more, like a full send queue.
    fail_completion
        The put with this number (counted from 0 in order of posting) completes with an error.
    cut_ns
        By rank, the time of the engine's clock from which puts to it neither arrive nor complete.
    down_ns
        The time from which this link is down: nothing arrives any more, and the next poll with a put under way raises "link down".
    drop
        Numbers of puts (as above) that vanish without data, signal or completion. Nothing that follows on their channels becomes visible.
    seed
        Seed of the random numbers. The same seed gives the same run under a virtual clock.
    """

    delay_us: float = 0.0
    reorder_us: float = 0.0
    ack_us: float = 0.0
    queue_depth: int | None = None
    fail_completion: int | None = None
    cut_ns: Mapping[int, int] = dataclasses.field(default_factory=dict)
    down_ns: int | None = None
    drop: frozenset[int] = frozenset()
    seed: int = 0


class _Flight:
    """One put under way."""

    __slots__ = ("arrived", "number", "put", "sent", "token", "watched")

    def __init__(self, put: Put, number: int) -> None:
        self.put = put
        self.number = number
        self.token: object = None
        self.sent = b""  # the bytes, kept if the source is compared at completion
        self.watched: Any = None  # the record of target cpu's checks
        self.arrived = False  # its time has come; the copy may still be running


class EmulatedTransport(Transport):
    """Puts between segments that are mapped in this process.

    A put of n bytes leaves the NIC at ``max(now, link free) + n / bandwidth`` and arrives ``latency_us`` later. Its copy starts at once;
    its signal is written, and the put completes, when it has arrived, the copy has ended and all earlier puts on its channel have.

    Parameters
    ----------
    rank, heap_address
        This rank, and the address of its data heap.
    peers
        By rank, the addresses of its (data heap, signal segment).
    copier
        Moves the bytes, and writes the signals if there is no ``store``. Closed with the transport.
    clock_ns
        The engine's clock, real or virtual.
    gigabytes_per_second
        Bandwidth of this rank's NIC in 10^9 bytes per second; 0: unlimited.
    latency_us
        From the last byte's departure to its arrival.
    faults
        How the network misbehaves; None: not at all.
    heap_bytes, signal_bytes
        Sizes of every rank's segments. If given, a put outside them is an error instead of corrupting memory.
    store
        Writes the signals, with release; None: the copier does.

    Raises
    ------
    ValueError
        Bandwidth or latency is negative.
    """

    def __init__(
        self,
        rank: int,
        heap_address: int,
        peers: Mapping[int, tuple[int, int]],
        copier: Copier,
        clock_ns: Callable[[], int],
        gigabytes_per_second: float = 50.0,
        latency_us: float = 5.0,
        faults: Faults | None = None,
        *,
        heap_bytes: int | None = None,
        signal_bytes: int | None = None,
        store: Callable[[int, int], object] | None = None,
    ) -> None:
        if gigabytes_per_second < 0 or latency_us < 0:
            raise ValueError(f"{gigabytes_per_second} GB/s, {latency_us} us: must not be negative")
        self._rank = rank
        self._heap_address = heap_address
        self._peers = dict(peers)
        self._copier = copier
        self._watch = getattr(copier, "watch", None)
        self._raise = store or copier.signal
        self._clock_ns = clock_ns
        self._ns_per_byte = 1.0 / gigabytes_per_second if gigabytes_per_second else 0.0
        self._latency_ns = latency_us * 1e3
        self._faults = faults or Faults()
        self._heap_bytes = heap_bytes
        self._signal_bytes = signal_bytes
        self._random = random.Random((self._faults.seed << 8) + rank)
        self._link_free_ns = 0.0
        self._posted = 0
        self._in_flight = 0
        self._arrivals: list[tuple[float, int, _Flight]] = []  # heap by time
        self._channels: dict[tuple[int, int], deque[_Flight]] = {}  # (destination, channel) -> flights in order
        self._ready: dict[tuple[int, int], None] = {}  # channels with an arrived flight, in a reproducible order
        self._acks: list[tuple[float, int, _Flight]] = []  # heap by time: signaled, not complete

    def post(self, put: Put) -> bool:
        faults = self._faults
        if faults.queue_depth is not None and self._in_flight >= faults.queue_depth:
            return False
        check_put(put, self._rank, self._peers, self._heap_bytes, self._signal_bytes)
        number = self._posted
        self._posted = number + 1
        now = self._clock_ns()
        departure = max(now, self._link_free_ns) + put.bytes * self._ns_per_byte
        self._link_free_ns = departure
        arrival = departure + self._latency_ns
        if faults.delay_us:
            arrival += self._random.random() * faults.delay_us * 1e3
        if faults.reorder_us:
            arrival += self._random.random() * faults.reorder_us * 1e3
        lost = number in faults.drop or (put.dst_rank in faults.cut_ns and arrival >= faults.cut_ns[put.dst_rank])
        flight = _Flight(put, number)
        if put.bytes and self._watch is not None:
            name = f"the engine of rank {self._rank} (put {number} to rank {put.dst_rank}: {put.bytes} bytes, channel {put.channel})"
            flight.watched = self._watch(*self._addresses(put), put.bytes, name)
        key = (put.dst_rank, put.channel)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = deque()
        channel.append(flight)  # also a lost put: nothing that follows it on its channel may become visible
        self._in_flight += 1
        if not lost:
            heapq.heappush(self._arrivals, (arrival, number, flight))
            if not faults.reorder_us:
                self._start(flight)
        return True

    def flush(self) -> None:
        """Copies start when they are posted."""

    def poll(self) -> list[int]:
        arrivals, ready, done = self._arrivals, self._ready, []
        if self._in_flight and self._faults.down_ns is not None and self._clock_ns() >= self._faults.down_ns:
            self._abandon()
            raise TransportError(f"a link of rank {self._rank} is down (injected fault)", op="put_signal", status="link down")
        if arrivals:
            now = self._clock_ns()
            while arrivals and arrivals[0][0] <= now:
                flight = heapq.heappop(arrivals)[2]
                if self._faults.reorder_us:
                    self._start(flight)
                flight.arrived = True
                ready[flight.put.dst_rank, flight.put.channel] = None
        for key in list(ready):
            channel = self._channels[key]
            while channel and channel[0].arrived and self._finish(channel[0]):
                flight = channel.popleft()
                if flight.watched is not None:
                    flight.watched.landed()
                if self._faults.ack_us:
                    ack = self._clock_ns() + self._random.random() * self._faults.ack_us * 1e3
                    heapq.heappush(self._acks, (ack, flight.number, flight))
                else:
                    done.append(self._complete(flight))
            if not channel or not channel[0].arrived:
                del ready[key]
        while self._acks and self._acks[0][0] <= self._clock_ns():
            flight = heapq.heappop(self._acks)[2]
            self._check_source(flight)
            done.append(self._complete(flight))
        self._in_flight -= len(done)
        return done

    def next_event_ns(self) -> int | None:
        if self._ready:
            return 0  # a copy runs, and nobody announces its end
        return min((math.ceil(events[0][0]) for events in (self._arrivals, self._acks) if events), default=None)

    def close(self) -> None:
        self._abandon()
        self._copier.close()

    def _abandon(self) -> None:
        """Forget what is under way: nothing of it lands any more."""
        flights = [flight for channel in self._channels.values() for flight in channel]
        for flight in [*flights, *(flight for _, _, flight in self._acks)]:
            self._complete(flight)
        self._arrivals.clear()
        self._channels.clear()
        self._ready.clear()
        self._acks.clear()
        self._in_flight = 0

    def _addresses(self, put: Put) -> tuple[int, int]:
        """The addresses to which and from which the bytes of a put go."""
        return self._peers[put.dst_rank][0] + put.dst_offset, self._heap_address + put.src_offset

    def _complete(self, flight: _Flight) -> int:
        """End the record of a put; returns its ticket."""
        if flight.watched is not None:
            flight.watched.ended()
        return flight.put.ticket

    def _start(self, flight: _Flight) -> None:
        put = flight.put
        if put.bytes:
            target, source = self._addresses(put)
            flight.token = self._copier.start(target, source, put.bytes)
            if self._faults.ack_us:
                flight.sent = ctypes.string_at(source, put.bytes)

    def _check_source(self, flight: _Flight) -> None:
        put = flight.put
        if flight.sent != ctypes.string_at(self._heap_address + put.src_offset, put.bytes):
            raise TransportError(
                f"put {flight.number} of rank {self._rank} to rank {put.dst_rank}: its source has changed before it was complete",
                peer=put.dst_rank,
                op="put_signal",
                status="source changed",
            )

    def _finish(self, flight: _Flight) -> bool:
        """Write the signal if the data has landed; returns whether it has."""
        put = flight.put
        if put.bytes and not self._copier.done(flight.token):
            return False
        if flight.number == self._faults.fail_completion:
            raise TransportError(
                f"put {flight.number} of rank {self._rank} to rank {put.dst_rank} failed (injected fault)",
                peer=put.dst_rank,
                op="put_signal",
                status="injected failure",
            )
        self._raise(self._peers[put.dst_rank][1] + put.signal_offset, put.signal_value)
        return True


def check_put(put: Put, rank: int, peers: Collection[int], heap_bytes: int | None, signal_bytes: int | None) -> None:
    """Raise a TransportError if rank ``rank`` cannot carry out the put; see ``EmulatedTransport``."""
    if put.dst_rank not in peers:
        raise TransportError(
            f"rank {rank} has no network path to rank {put.dst_rank}: ranks put to their rail only, here {sorted(peers)}",
            peer=put.dst_rank,
            op="put_signal",
            status="unreachable",
        )
    if heap_bytes is not None and max(put.src_offset, put.dst_offset) + put.bytes > heap_bytes:
        raise _outside(put, rank, f"bytes {put.src_offset} -> {put.dst_offset} + {put.bytes}", "data heap", heap_bytes)
    if signal_bytes is not None and (put.signal_offset + 8 > signal_bytes or put.signal_offset % 8):
        raise _outside(put, rank, f"flag at {put.signal_offset}", "signal segment", signal_bytes)


def _outside(put: Put, rank: int, what: str, segment: str, size: int) -> TransportError:
    return TransportError(
        f"rank {rank} put to rank {put.dst_rank}: {what} outside the {segment} of {size} bytes (or not aligned)",
        peer=put.dst_rank,
        op="put_signal",
        status="bad address",
    )


def require_one_plain_link() -> None:
    """Raise ArgumentError where the environment asks for what only the engine on the host can do, not SMs (``mkernel.runtime.fabric``)."""
    for variable in (env.EMULATED_LINKS, env.EMULATED_HOST_SIGNALS):
        if variable.get():
            rule = f"does not go with {variable.name}, which only the engine on the host can do"
            raise ArgumentError(env.EMULATED_ENGINE.name, "sms", rule, f"set it to host, or unset {variable.name}")


def create(wiring: Wiring) -> Transport:
    """The transport, with bandwidth and latency from the environment; several links where that asks for them."""
    rates = env.EMULATED_LINKS.get() or [env.EMULATED_GBPS.get()]
    links = [Link(_open(wiring, rate), f"emulated link {number} ({rate:g} GB/s)", rate) for number, rate in enumerate(rates)]
    return links[0].transport if len(links) == 1 else StripedTransport(wiring.rank, links)


def _open(wiring: Wiring, gigabytes_per_second: float) -> EmulatedTransport:
    return EmulatedTransport(
        wiring.rank,
        wiring.heap_address,
        wiring.peers,
        wiring.copier(),
        wiring.clock_ns,
        gigabytes_per_second,
        env.EMULATED_LATENCY_US.get(),
        dataclasses.replace(Faults(), reorder_us=env.EMULATED_REORDER_US.get()) if env.EMULATED_REORDER_US.get() else None,
        heap_bytes=wiring.heap_bytes,
        signal_bytes=wiring.signal_bytes,
        store=wiring.store if env.EMULATED_HOST_SIGNALS.get() else None,
    )
