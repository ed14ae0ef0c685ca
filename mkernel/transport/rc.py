"""RDMA over reliable connections (InfiniBand, RoCE): writes carry the bytes of puts, then an atomic, then fenced writes raise the flags.

This keeps the contract: the responder executes an atomic only after the writes that were posted before it on its queue pair, and a fenced
write begins only when that atomic has been answered. So no flag overtakes bytes, whatever the network does to packets. A put stays on the
queue pair of its channel. The atomic adds 0 to a word that serves nothing else. Flags are written, not added to: plans share the flags, and
another rank may raise a flag between two calls of this one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mkernel import env
from mkernel.errors import ArgumentError, TransportError
from mkernel.transport import Wiring, rdma, verbs
from mkernel.transport.base import Put, Transport
from mkernel.transport.striped import Link, StripedTransport

__all__ = ["MOST_QUEUE_PAIRS", "RcTransport", "create", "open_transport", "retry_policy", "stripe"]

SEND_DEPTH = 256  # work requests of a queue pair
MOST_QUEUE_PAIRS = 256  # to a peer: what the number of a work request has room for
RECEIVE_DEPTH = 512  # mode imm: receives of a queue pair
_NUDGE_NS = 10_000_000  # time without a completion after which doorbells are rung again
_NUMBERS = (1 << 38) - 1  # mask of a put's number inside a work request's
_WORD = 8
_SCRATCH = 2  # words: one for the peers' atomics, one for the answers to this rank's
_DATA, _SIGNAL, _BARRIER = range(3)  # kinds of work requests: the low bits of their numbers
_RNR_SECONDS = {22: 0.02048, 24: 0.04096, 26: 0.08192, 28: 0.16384}  # ibv code -> pause between tries


@dataclasses.dataclass(slots=True)
class _Pending:
    """A put that was accepted, with its number on its queue pair and the most work requests that it takes."""

    put: Put
    number: int
    requests: int
    ordered: bool  # its flag must wait for what is before it


class _Connection:
    """One queue pair to one peer."""

    __slots__ = ("accepted", "data", "index", "pair", "peer", "position", "posted", "psn", "retired", "room", "waiting")

    def __init__(self, pair: verbs.QueuePair, peer: int, index: int, position: int, room: int) -> None:
        self.pair, self.peer, self.index, self.room = pair, peer, index, room  # index: among the peer's; room: free work requests
        self.position = position  # among all connections
        self.psn = secrets.randbits(24)
        self.waiting: list[_Pending] = []  # accepted since the last flush
        self.posted: deque[tuple[int, int, int]] = deque()  # (number, ticket, work requests), oldest first
        self.accepted = self.retired = 0  # numbers of puts
        self.data: dict[int, int] = {}  # channel -> number of its last put with bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """A peer's memory: addresses and keys of its segments, and of its word for atomics."""

    heap: int
    heap_key: int
    signals: int
    signal_key: int
    barrier: int
    barrier_key: int


class RcTransport(rdma.RdmaTransport):
    """Puts by RDMA writes. Further parameters: ``RdmaTransport``.

    Parameters
    ----------
    signals
        This rank's signal segment, registered with ``nic``. Closed with the transport.
    signal
        How flags are raised. ``"atomic"``: by an atomic, then a fenced write. ``"write"``: by a plain write, which may overtake its bytes
        where routing is adaptive. ``"imm"``: by the receiver of a message; needs ``signal_address`` and ``store``.
    queue_pairs
        Queue pairs per peer. Channel c uses number c modulo this.
    retry
        How long the card tries again.
    signal_address, store
        Address of the signal segment in this process, and ``store(address, value)``, which writes a 64-bit word with release.
    send_depth
        Work requests of a queue pair, if the card can do that many.

    Raises
    ------
    ArgumentError
        ``signal`` is ``"imm"`` without ``signal_address`` or ``store``, or there are more than ``MOST_QUEUE_PAIRS``.
    TransportError
        The card refused something, or has not so many queue pairs.
    """

    def __init__(
        self,
        nic: verbs.Nic,
        rank: int,
        peers: Iterable[int],
        heap: verbs.Region,
        signals: verbs.Region,
        *,
        signal: str = "atomic",
        queue_pairs: int = 4,
        retry: verbs.RetryPolicy | None = None,
        signal_address: int = 0,
        store: Callable[[int, int], object] | None = None,
        send_depth: int = SEND_DEPTH,
    ) -> None:
        peers = sorted(peers)
        super().__init__(nic, rank, peers, heap, signals.size)
        self._undo.callback(signals.close)
        self._signals = signals
        self.signal = signal
        self._count = queue_pairs
        self._retry = retry or verbs.RetryPolicy()
        self._port_seconds = min(rdma.PORT_SECONDS, self._retry.seconds / 2)
        self._signal_address, self._store = signal_address, store
        self._extra = 2 if signal == "atomic" else 1  # work requests of a put in addition to its writes
        self._targets: dict[int, _Target] = {}
        self._flags: dict[tuple[int, int], tuple[_Connection, int]] = {}  # (peer, offset) -> queue pair and number of its last put
        self._dirty: list[_Connection] = []
        limits, total = nic.limits, len(peers) * queue_pairs
        self._depth = min(send_depth, limits.max_send)
        # All receives fit the completion queue, however late it is polled.
        self._receives = min(RECEIVE_DEPTH, limits.max_receive, limits.max_completions // max(total, 1)) if signal == "imm" else 0
        with self._opening():
            if signal == "imm" and (store is None or not signal_address):
                raise ArgumentError("MKERNEL_RC_SIGNAL", signal, "the engine cannot write flags in GPU memory", "use atomic")
            if not 0 < queue_pairs <= MOST_QUEUE_PAIRS:
                raise ArgumentError("MKERNEL_RC_QUEUE_PAIRS", queue_pairs, f"must be from 1 to {MOST_QUEUE_PAIRS}")
            self._check_pairs(total, "fewer MKERNEL_RC_QUEUE_PAIRS, or fewer ranks")
            words = _SCRATCH + total * self._receives + total * self._depth
            self._scratch = (ctypes.c_uint64 * words)()  # the word for atomics, their answers, received values, values to send
            access = verbs.Access.local_write | (verbs.Access.remote_atomic if limits.atomics else 0)
            self._scratch_region = nic.register(ctypes.addressof(self._scratch), ctypes.sizeof(self._scratch), access)
            self._undo.callback(self._scratch_region.close)
            # Every work request has room in the completion queue, which never overruns. On cards with shorter queues `post` refuses more.
            self._sends = self._queue(total * self._depth)
            self._arrivals = self._queue(total * self._receives) if self._receives else self._sends
            self._completions_left = self._sends.capacity
            self._moved_ns = 0  # when something was posted, completed or nudged last
            ends = itertools.product(peers, range(queue_pairs))
            self._connections = [self._open(peer, index, position) for position, (peer, index) in enumerate(ends)]
        self._by_peer = {peer: self._connections[i * queue_pairs : (i + 1) * queue_pairs] for i, peer in enumerate(peers)}

    def _open(self, peer: int, index: int, position: int) -> _Connection:
        pair = self._nic.rc_pair(self._sends, self._arrivals, max_send=self._depth, max_receive=max(self._receives, 1))
        self._own(pair, peer)
        return _Connection(pair, peer, index, position, self._depth)

    # ---- connecting
    @property
    def address(self) -> bytes:
        port = self._nic.port
        return json.dumps(
            {
                "signal": self.signal,
                "device": port.device,
                "gid": port.gid,
                "lid": port.lid,
                "infiniband": port.infiniband,
                "mtu": port.mtu,
                "heap": [self._heap.address, self._heap.size, self._heap.rkey],
                "signals": [self._signals.address, self._signals.rkey],
                "signal_bytes": self._signal_bytes,
                "barrier": [self._scratch_region.address, self._scratch_region.rkey],
                "pairs": {c: [[o.pair.number, o.psn] for o in self._by_peer[c]] for c in self._by_peer},
            }
        ).encode()

    def _connect(self, peer: int, address: dict[str, Any]) -> None:
        port, theirs = self._nic.port, address["pairs"].get(str(self._rank), ())
        self._agree(peer, "MKERNEL_RC_SIGNAL", self.signal, address["signal"], "set it alike on all ranks")
        self._agree(peer, "the link layer", port.infiniband, address["infiniband"], "choose cards of one network with MKERNEL_NIC")
        self._agree(peer, "MKERNEL_RC_QUEUE_PAIRS", self._count, len(theirs), "set it alike on all ranks")
        heap, _, heap_key = address["heap"]
        self._targets[peer] = _Target(heap, heap_key, *address["signals"], *address["barrier"])
        for connection, (number, psn) in zip(self._by_peer[peer], theirs, strict=True):
            remote = verbs.Remote(address["gid"], address["lid"], number, psn)
            connection.pair.connect(remote, min(port.mtu, address["mtu"]), connection.psn, self._retry)
            for slot in range(self._receives):  # a queue pair in RESET takes none; nobody sends before all ranks are connected
                self._receive(connection, slot)

    # ---- the transport
    def post(self, put: Put) -> bool:
        connection, data = self._check(put)
        key, number = (put.dst_rank, put.signal_offset), connection.accepted
        owner, last = self._flags.get(key, (connection, -1))
        ordered = self._needs_order(connection, put, last if owner is connection else -1)
        requests = data + (self._extra if ordered else 1)
        if requests > self._depth:
            raise self._too_long(put)
        if connection.room < requests or self._completions_left < requests:
            return False
        if owner is not connection and last >= owner.retired:
            raise self._two_channels(put)
        self._flags[key] = (connection, number)
        if put.bytes:
            connection.data[put.channel] = number
        connection.accepted = number + 1
        connection.room -= requests
        self._completions_left -= requests
        self._outstanding += 1
        if not connection.waiting:
            self._dirty.append(connection)
        connection.waiting.append(_Pending(put, number, requests, ordered))
        return True

    def _needs_order(self, connection: _Connection, put: Put, last: int) -> bool:
        """Whether bytes, or another value of the flag, are under way that must be in memory before the flag is written.

        ``last``: number of the last put with this flag on this queue pair, or -1.
        """
        retired = connection.retired
        return put.bytes > 0 or last >= retired or connection.data.get(put.channel, -1) >= retired

    def _check(self, put: Put) -> tuple[_Connection, int]:
        """The queue pair of a put, and the number of writes that carry its bytes."""
        self._check_addresses(put)
        return self._by_peer[put.dst_rank][put.channel % self._count], -(-put.bytes // self._max_message)

    def _too_long(self, put: Put) -> TransportError:
        room = (self._depth - self._extra) * self._max_message
        return self._error(put.dst_rank, "put_signal", "too long", f"{put.bytes} bytes, the card takes {room} in one put")

    def _two_channels(self, put: Put) -> TransportError:
        text = f"flag at {put.signal_offset} is under way on channel {put.channel} and another, which have no common order"
        return self._error(put.dst_rank, "put_signal", "two channels", text)

    def flush(self) -> None:
        """Build and post the work requests of all accepted puts. The last put of each queue pair asks for a completion."""
        self._moved_ns = time.monotonic_ns()
        for connection in self._dirty:
            waiting, connection.waiting = connection.waiting, []
            self._build(connection, waiting)
            self._commit(connection.pair)
        self._dirty.clear()

    def _build(self, connection: _Connection, waiting: Sequence[_Pending]) -> None:
        last = waiting[-1]
        if self.signal == "atomic":
            only_flags = not any(pending.ordered for pending in waiting)
            for pending in waiting:  # first: behind a fenced request they would wait
                if not pending.ordered:
                    self._raise(connection, pending, signaled=only_flags and pending is last, fenced=False)
        for pending in waiting:
            self._write(connection, pending)
            connection.posted.append((pending.number, pending.put.ticket, pending.requests))
            if self.signal == "write":
                self._raise(connection, pending, signaled=pending is last, fenced=False)
            elif self.signal == "imm":
                self._tell(connection, pending, signaled=pending is last)
        if self.signal == "atomic":
            ordered = [pending for pending in waiting if pending.ordered]
            if not ordered:
                return
            self._order(connection, last)
            # Only the last value of each flag is written: fenced writes have no order among themselves.
            newest = {pending.put.signal_offset: pending for pending in ordered}
            for pending in sorted(newest.values(), key=_number):
                final = pending is ordered[-1]
                # The last request of the batch has its completion, and so the number of its last put.
                self._raise(connection, dataclasses.replace(pending, number=last.number) if final else pending, signaled=final, fenced=True)

    def _name(self, connection: _Connection, pending: _Pending, kind: int) -> int:
        """The number of a work request. It tells queue pair, put and kind."""
        return connection.peer << 48 | connection.index << 40 | (pending.number & _NUMBERS) << 2 | kind

    def _write(self, connection: _Connection, pending: _Pending) -> None:
        put, target, pair = pending.put, self._targets[connection.peer], connection.pair
        name = self._name(connection, pending, _DATA)
        source, destination = self._heap.address + put.src_offset, target.heap + put.dst_offset
        left, step = put.bytes, self._max_message
        while left:
            size = min(left, step)
            pair.write(name, source, size, self._heap.lkey, destination, target.heap_key, signaled=False)
            source, destination, left = source + size, destination + size, left - size

    def _order(self, connection: _Connection, pending: _Pending) -> None:
        """Post the atomic: what is before it is in memory before a fenced write after it begins."""
        target, scratch = self._targets[connection.peer], self._scratch_region
        name = self._name(connection, pending, _BARRIER)
        answer = scratch.address + _WORD
        connection.pair.fetch_add(name, answer, scratch.lkey, target.barrier, target.barrier_key, 0, signaled=False)

    def _raise(self, connection: _Connection, pending: _Pending, *, signaled: bool, fenced: bool) -> None:
        target, put = self._targets[connection.peer], pending.put
        name = self._name(connection, pending, _SIGNAL)
        remote = target.signals + put.signal_offset
        connection.pair.write_inline(name, put.signal_value, remote, target.signal_key, signaled=signaled, fenced=fenced)

    def _tell(self, connection: _Connection, pending: _Pending, *, signaled: bool) -> None:
        slot = _SCRATCH + len(self._connections) * self._receives + connection.position * self._depth + pending.number % self._depth
        self._scratch[slot] = pending.put.signal_value  # the slot is free: at most `depth` puts are under way
        scratch, flag = self._scratch_region, pending.put.signal_offset // _WORD
        name = self._name(connection, pending, _SIGNAL)
        connection.pair.send(name, scratch.address + _WORD * slot, _WORD, scratch.lkey, signaled=signaled, imm=flag)

    def poll(self) -> list[int]:
        if self._polled() and self._outstanding and self.signal == "atomic":
            self._nudge([connection for connection in self._connections if connection.posted], time.monotonic_ns())
        tickets: list[int] = []
        for completion in self._completions(self._sends):
            self._retire(completion.wr_id, tickets)
        if self._receives:
            for completion in self._completions(self._arrivals):
                self._raise_flag(completion)
        if tickets:
            self._moved_ns = time.monotonic_ns()
        return tickets

    def _nudge(self, connections: Iterable[_Connection], now: int) -> None:
        """Ring doorbells of queue pairs with work again if nothing completes. Only rxe needs it; real cards then do nothing.

        rxe first decides that a fenced request must wait, and then notes that it waits. If the requests before it complete in between, the
        request is forgotten until the next doorbell (Linux 6.1, drivers/infiniband/sw/rxe: rxe_req.c, rxe_comp.c).
        """
        if now - self._moved_ns < _NUDGE_NS:
            return
        self._moved_ns = now
        for connection in connections:
            try:
                connection.pair.nudge()
            except verbs.VerbsError as error:
                raise self._refused("post", error, connection.pair) from error

    def _retire(self, wr_id: int, tickets: list[int]) -> None:
        """Note that a work request, and with it all that were posted before it on its queue pair, has completed."""
        connection = self._by_peer[wr_id >> 48][wr_id >> 40 & 0xFF]
        number, posted = wr_id >> 2 & _NUMBERS, connection.posted
        while posted:
            first, ticket, requests = posted[0]
            if (number - first) & _NUMBERS > _NUMBERS >> 1:
                break
            posted.popleft()
            connection.retired = first + 1
            tickets.append(ticket)
            connection.room += requests
            self._completions_left += requests
            self._outstanding -= 1

    # ---- signal imm: the receiver's part
    def _receive(self, connection: _Connection, slot: int) -> None:
        word = _SCRATCH + connection.position * self._receives + slot
        scratch = self._scratch_region
        connection.pair.receive(connection.position << 32 | slot, scratch.address + _WORD * word, _WORD, scratch.lkey)

    def _raise_flag(self, completion: verbs.Completion) -> None:
        """Raise the flag of a message, before which its sender's writes are in memory, and post its receive again."""
        self.arrived += 1
        position, slot = completion.wr_id >> 32, completion.wr_id & 0xFFFFFFFF
        connection = self._connections[position]
        offset = _WORD * (completion.imm or 0)
        if completion.imm is None or completion.size != _WORD or not self._is_flag(offset):
            raise self._bad_message(connection, completion.size, completion.imm)
        assert self._store is not None
        self._store(self._signal_address + offset, self._scratch[_SCRATCH + position * self._receives + slot])
        try:
            self._receive(connection, slot)
        except verbs.VerbsError as error:
            raise self._refused("receive", error, connection.pair) from error

    def _bad_message(self, connection: _Connection, size: int, imm: int | None) -> TransportError:
        return self._error(connection.peer, "receive", "bad message", f"{size} bytes for flag {imm}")

    def _operation(self, wr_id: int) -> str:
        return ("write", "send" if self.signal == "imm" else "signal", "fetch_add")[wr_id & 3]


def _number(pending: _Pending) -> int:
    return pending.number


def retry_policy(timeout: float) -> verbs.RetryPolicy:
    """The longest retries that end within half of ``timeout`` seconds, so that the card gives up, and says why, before the kernels do.

    A card may wait up to four times the time that it was told. A receiver without posted receives (``signal="imm"``) has up to a second.
    """
    exponent = 1
    while exponent < 20 and 4 * 7 * 4.096e-6 * 2 ** (exponent + 1) <= timeout / 2:
        exponent += 1
    pause = max(code for code, seconds in _RNR_SECONDS.items() if code == 22 or 6 * seconds <= timeout / 2)
    return verbs.RetryPolicy(timeout=max(exponent, 8), rnr_timer=pause)


def open_transport(nic: verbs.Nic, wiring: Wiring, *, signal: str, queue_pairs: int, kind: type[RcTransport] | None = None) -> RcTransport:
    """Register this rank's memory and open the queue pairs. The transport is not connected. ``nic`` is closed if this fails.

    ``signal`` is ``"auto"`` or as in ``RcTransport``, ``kind`` a subclass of that.

    Raises
    ------
    ArgumentError
        The card cannot raise flags in that way.
    TransportError
        The card refused something.
    """
    limits = nic.limits
    if signal == "auto":
        if not limits.atomics and wiring.signal_dmabuf >= 0:
            nic.close()
            rule = f"{nic.port.device} has no atomics, and flags lie in GPU memory"
            raise ArgumentError("MKERNEL_RC_SIGNAL", signal, rule, "set it to imm on all ranks: flags then lie in host memory")
        signal = "atomic" if limits.atomics else "imm"
    if signal == "atomic" and not limits.atomics:
        nic.close()
        raise ArgumentError("MKERNEL_RC_SIGNAL", signal, f"{nic.port.device} has no atomics", "set it to imm")
    heap, signals = rdma.register(
        nic,
        wiring.rank,
        (wiring.heap_address, wiring.heap_dmabuf, wiring.heap_bytes),
        (wiring.signal_address, wiring.signal_dmabuf, wiring.signal_bytes),
    )
    return (kind or RcTransport)(
        nic,
        wiring.rank,
        wiring.peers,
        heap,
        signals,
        signal=signal,
        queue_pairs=queue_pairs,
        retry=retry_policy(wiring.timeout),
        signal_address=wiring.signal_address,
        store=wiring.store,
    )


def create(wiring: Wiring) -> Transport:
    """Open the cards, exchange addresses with all ranks, and connect. Collective. Raises as ``rdma.join`` and ``open_transport`` do."""
    options: dict[str, Any] = {"signal": env.RC_SIGNAL.get(), "queue_pairs": env.RC_QUEUE_PAIRS.get()}
    return stripe(wiring, rdma.join(wiring, functools.partial(open_transport, **options)))


def stripe(wiring: Wiring, transports: Sequence[RcTransport]) -> Transport:
    """The transports of a rank's cards as one. Raises ArgumentError where a completion does not say that bytes are in the peer's memory."""
    if len(transports) == 1:
        return transports[0]
    if any(transport.signal != "atomic" for transport in transports):
        for transport in transports:
            transport.close()
        rule = f"puts are spread over {len(transports)} cards only where flags are raised behind atomics"
        raise ArgumentError("MKERNEL_RC_SIGNAL", transports[0].signal, rule, "set it to atomic, or name one card per rank in MKERNEL_NIC")
    assert wiring.card is not None
    rates = [card.gigabits for card in (wiring.card, *wiring.more_cards)]
    known = rates if min(rates) > 0 else [1.0] * len(rates)
    return StripedTransport(wiring.rank, [Link(one, one.name, rate) for one, rate in zip(transports, known, strict=True)])
