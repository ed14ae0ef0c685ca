"""RDMA over reliable connections (InfiniBand, RoCE): writes carry the bytes of puts, then an atomic, then fenced writes raise the flags.

Why this keeps the contract: the responder executes an atomic only after the writes that were posted before it on its queue pair, and a
fenced write begins only when that atomic has been answered. So no flag overtakes bytes, whatever the network does to packets. A put stays
on the queue pair of its channel. The atomic adds nothing, to a word that is there for this; flags get their values, not differences:
between two calls of a program a flag may be raised by others too, because plans share the flags.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import mmap
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mkernel import env
from mkernel.errors import ArgumentError, TransportError
from mkernel.transport import Card, Wiring, verbs
from mkernel.transport.base import Put, Transport

__all__ = ["RcTransport", "create", "loopback"]

SEND_DEPTH = 256  # work requests of a queue pair
RECEIVE_DEPTH = 512  # mode imm: receives of a queue pair
EVENT_POLLS = 64  # polls between two looks for asynchronous events
_NUMBERS = (1 << 38) - 1  # of puts, in the number of a work request
_POLL = 64  # completions a poll takes at most
_WORD = 8
_SCRATCH = 2  # words: the peers' atomics, answers of this rank's
_DATA, _SIGNAL, _BARRIER = range(3)  # low bits of a work request's number
_RNR_SECONDS = {22: 0.02048, 24: 0.04096, 26: 0.08192, 28: 0.16384}  # ibv codes of a pause between tries


@dataclasses.dataclass(slots=True)
class _Pending:
    """A put that was accepted: its number on its queue pair, and the most work requests it takes."""

    put: Put
    number: int
    requests: int


class _Connection:
    """One queue pair to one peer."""

    __slots__ = ("accepted", "index", "pair", "peer", "place", "posted", "psn", "retired", "room", "waiting")

    def __init__(self, pair: verbs.QueuePair, peer: int, index: int, place: int, room: int) -> None:
        self.pair, self.peer, self.index, self.room = pair, peer, index, room
        self.place = place  # among all connections
        self.psn = secrets.randbits(24)
        self.waiting: list[_Pending] = []  # accepted since the last flush
        self.posted: deque[tuple[int, int, int]] = deque()  # (number, ticket, work requests), oldest first
        self.accepted = self.retired = 0  # puts so far


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """A peer's memory."""

    heap: int
    heap_key: int
    signals: int
    signal_key: int
    barrier: int  # a word for atomics
    barrier_key: int


class RcTransport(Transport):
    """Puts by RDMA writes. Open it, exchange ``card`` with all ranks, ``connect``.

    Parameters
    ----------
    nic
        The opened port. Closed with the transport.
    rank, peers
        This rank, and all ranks of other nodes.
    heap, signals
        This rank's segments, registered with ``nic``. Closed with the transport.
    signal
        ``"atomic"``: an atomic, then a fenced write. ``"write"``: a plain write, which may overtake its bytes where routing is adaptive.
        ``"imm"``: a message whose receiver raises the flag; needs ``signal_address`` and ``store``.
    queue_pairs
        Per peer; channel c uses number c modulo this.
    retry
        How long the card tries.
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
        self._nic, self._rank, self._heap, self._signals = nic, rank, heap, signals
        self.signal = signal
        self._count = queue_pairs
        self._retry = retry or verbs.RetryPolicy()
        self._signal_address, self._store = signal_address, store
        self._extra = 2 if signal == "atomic" else 1  # work requests of a put besides its writes
        if signal == "imm" and (store is None or not signal_address):
            raise ArgumentError("MKERNEL_RC_SIGNAL", signal, "the engine cannot write flags in GPU memory", "use atomic")
        peers = sorted(peers)
        limits = nic.limits
        self._depth = min(send_depth, limits.max_send)
        total = len(peers) * queue_pairs
        # What arrives must find room in the completion queue, however late it is polled.
        self._receives = min(RECEIVE_DEPTH, limits.max_receive, limits.max_completions // max(total, 1)) if signal == "imm" else 0
        self._max_message = limits.max_message
        self._targets: dict[int, _Target] = {}
        self._flags: dict[tuple[int, int], tuple[_Connection, int]] = {}  # (peer, offset) -> queue pair and number of its last put
        self._dirty: list[_Connection] = []
        self._outstanding = 0
        self._polls = 0
        self._closed = False
        self._undo = contextlib.ExitStack()
        self._undo.callback(nic.close)
        self._undo.callback(heap.close)
        self._undo.callback(signals.close)
        try:
            words = _SCRATCH + total * self._receives + total * self._depth
            self._scratch = (ctypes.c_uint64 * words)()  # the word for atomics, their answers, received values, values to send
            access = verbs.Access.local_write | (verbs.Access.remote_atomic if limits.atomics else 0)
            self._scratch_region = nic.register(ctypes.addressof(self._scratch), ctypes.sizeof(self._scratch), access)
            self._undo.callback(self._scratch_region.close)
            # Room for everything that can be under way, so that it can overrun in no case; a card with shorter queues gets what it can do.
            self._sends = self._queue(total * self._depth)
            self._arrivals = self._queue(total * self._receives) if self._receives else self._sends
            self._completions_left = self._sends.capacity
            self._connections: list[_Connection] = []
            for peer in peers:
                for index in range(queue_pairs):
                    self._connections.append(self._open(peer, index))
            self._by_peer = {peer: self._connections[i * queue_pairs : (i + 1) * queue_pairs] for i, peer in enumerate(peers)}
        except verbs.VerbsError as error:
            self._undo.close()
            raise self._setup_failure(error) from error
        except BaseException:
            self._undo.close()
            raise

    def _queue(self, entries: int) -> verbs.CompletionQueue:
        queue = self._nic.completion_queue(max(1, min(entries, self._nic.limits.max_completions)))
        self._undo.callback(queue.close)
        return queue

    def _open(self, peer: int, index: int) -> _Connection:
        pair = self._nic.rc_pair(self._sends, self._arrivals, max_send=self._depth, max_receive=max(self._receives, 1))
        connection = _Connection(pair, peer, index, len(self._connections), self._depth)
        self._undo.callback(pair.close)
        self._undo.callback(self._fail, connection)
        return connection

    @staticmethod
    def _fail(connection: _Connection) -> None:
        """To the error state before anything is freed: from then on the card leaves memory alone."""
        with contextlib.suppress(verbs.VerbsError):  # e.g. the device is gone
            connection.pair.fail()

    # ---- connecting
    @property
    def card(self) -> bytes:
        """What the other ranks must know to connect to this one."""
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
                "signals": [self._signals.address, self._signals.size, self._signals.rkey],
                "barrier": [self._scratch_region.address, self._scratch_region.rkey],
                "pairs": {c: [[o.pair.number, o.psn] for o in self._by_peer[c]] for c in self._by_peer},
            }
        ).encode()

    def connect(self, cards: Sequence[bytes]) -> None:
        """Connect to all peers; ``cards`` of every rank, by rank."""
        port = self._nic.port
        try:
            for peer, connections in self._by_peer.items():
                card = json.loads(cards[peer])
                self._check_peer(peer, card)
                heap, _, heap_key = card["heap"]
                signals, _, signal_key = card["signals"]
                self._targets[peer] = _Target(heap, heap_key, signals, signal_key, *card["barrier"])
                theirs = card["pairs"][str(self._rank)]
                for connection, (number, psn) in zip(connections, theirs, strict=True):
                    remote = verbs.Remote(card["gid"], card["lid"], number, psn)
                    connection.pair.connect(remote, min(port.mtu, card["mtu"]), connection.psn, self._retry)
                    for slot in range(self._receives):  # not in RESET; and nobody sends before all ranks are connected
                        self._receive(connection, slot)
        except verbs.VerbsError as error:
            raise self._setup_failure(error) from error

    def _check_peer(self, peer: int, card: dict[str, Any]) -> None:
        port = self._nic.port
        for what, mine, theirs, remedy in (
            ("MKERNEL_RC_SIGNAL", self.signal, card["signal"], "set it alike on all ranks"),
            ("the link layer", port.infiniband, card["infiniband"], "choose cards of one network with MKERNEL_NIC"),
            ("heap_bytes", self._heap.size, card["heap"][1], "pass the same heap_bytes everywhere"),
            ("MKERNEL_RC_QUEUE_PAIRS", self._count, len(card["pairs"].get(str(self._rank), ())), "set it alike on all ranks"),
        ):
            if mine != theirs:
                raise self._error(peer, "connect", "mismatch", f"{what} is {theirs} on rank {peer} and {mine} here", remedy)

    # ---- the transport
    def post(self, put: Put) -> bool:
        connection, data = self._check(put)
        requests = data + self._extra
        if requests > self._depth:
            room = (self._depth - self._extra) * self._max_message
            raise self._error(put.dst_rank, "put_signal", "too long", f"{put.bytes} bytes, the card takes {room} in one put")
        if connection.room < requests or self._completions_left < requests:
            return False
        key, number = (put.dst_rank, put.signal_offset), connection.accepted
        owner, last = self._flags.get(key, (connection, 0))
        if owner is not connection and last >= owner.retired:
            text = f"flag at {put.signal_offset} is under way on channel {put.channel} and another, which have no common order"
            raise self._error(put.dst_rank, "put_signal", "two channels", text)
        self._flags[key] = (connection, number)
        connection.accepted = number + 1
        connection.room -= requests
        self._completions_left -= requests
        self._outstanding += 1
        if not connection.waiting:
            self._dirty.append(connection)
        connection.waiting.append(_Pending(put, number, requests))
        return True

    def _check(self, put: Put) -> tuple[_Connection, int]:
        """The queue pair of a put, and how many writes carry its bytes."""
        connections = self._by_peer.get(put.dst_rank)
        if connections is None or put.dst_rank not in self._targets:
            raise self._error(put.dst_rank, "put_signal", "unreachable", f"no connection: only to {sorted(self._targets)}")
        if max(put.src_offset, put.dst_offset) + put.bytes > self._heap.size:
            text = f"bytes {put.src_offset} -> {put.dst_offset} + {put.bytes} outside the data heap of {self._heap.size} bytes"
            raise self._error(put.dst_rank, "put_signal", "bad address", text)
        if put.signal_offset + _WORD > self._signals.size or put.signal_offset % _WORD:
            text = f"flag at {put.signal_offset} outside the signal segment of {self._signals.size} bytes (or not aligned)"
            raise self._error(put.dst_rank, "put_signal", "bad address", text)
        return connections[put.channel % self._count], -(-put.bytes // self._max_message)

    def flush(self) -> None:
        """Build the work requests of everything accepted: only now is it known which is the last, and asks for a completion."""
        for connection in self._dirty:
            waiting, connection.waiting = connection.waiting, []
            self._build(connection, waiting)
            try:
                connection.pair.commit()
            except verbs.VerbsError as error:
                raise self._error(connection.peer, "post", error.status, str(error), connection=connection) from error
        self._dirty.clear()

    def _build(self, connection: _Connection, waiting: Sequence[_Pending]) -> None:
        last = waiting[-1]
        for pending in waiting:
            self._write(connection, pending)
            connection.posted.append((pending.number, pending.put.ticket, pending.requests))
            if self.signal == "write":
                self._raise(connection, pending, signaled=pending is last, fenced=False)
            elif self.signal == "imm":
                self._tell(connection, pending, signaled=pending is last)
        if self.signal == "atomic":
            self._order(connection, last)
            # Of several values of one flag only the last: these writes have no order among themselves.
            newest = {pending.put.signal_offset: pending for pending in waiting}
            for pending in sorted(newest.values(), key=_number):
                self._raise(connection, pending, signaled=pending is last, fenced=True)

    def _name(self, connection: _Connection, pending: _Pending, kind: int) -> int:
        """The number of a work request, from which its put can be told."""
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
        """Everything before this is in memory before anything fenced behind it begins."""
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
        slot = _SCRATCH + len(self._connections) * self._receives + connection.place * self._depth + pending.number % self._depth
        self._scratch[slot] = pending.put.signal_value  # free again: at most `depth` puts are under way
        scratch, flag = self._scratch_region, pending.put.signal_offset // _WORD
        name = self._name(connection, pending, _SIGNAL)
        connection.pair.send(name, scratch.address + _WORD * slot, _WORD, scratch.lkey, signaled=signaled, imm=flag)

    def poll(self) -> list[int]:
        self._polls += 1
        if self._polls % EVENT_POLLS == 0:
            self._look_at_events()
        tickets: list[int] = []
        for completion in self._completions(self._sends):
            self._retire(completion.wr_id, tickets)
        if self._receives:
            for completion in self._completions(self._arrivals):
                self._raise_flag(completion)
        return tickets

    def _completions(self, queue: verbs.CompletionQueue) -> Sequence[verbs.Completion]:
        try:
            found = queue.poll(_POLL)
        except verbs.VerbsError as error:
            raise self._error(None, "poll", error.status, str(error)) from error
        for completion in found:
            if completion.status:
                raise self._failure([c for c in found if c.status], receives=queue is not self._sends)
        return found

    def _retire(self, wr_id: int, tickets: list[int]) -> None:
        """A completion of a queue pair is one of everything posted to it before."""
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

    # ---- mode imm: the receiver's part
    def _receive(self, connection: _Connection, slot: int) -> None:
        word = _SCRATCH + connection.place * self._receives + slot
        scratch = self._scratch_region
        connection.pair.receive(connection.place << 32 | slot, scratch.address + _WORD * word, _WORD, scratch.lkey)

    def _raise_flag(self, completion: verbs.Completion) -> None:
        """What the sender wrote before its message is in memory: raise its flag, and make room for the next message."""
        place, slot = completion.wr_id >> 32, completion.wr_id & 0xFFFFFFFF
        connection = self._connections[place]
        offset = _WORD * (completion.imm or 0)
        if completion.imm is None or completion.size != _WORD or offset + _WORD > self._signals.size:
            raise self._error(connection.peer, "receive", "bad message", f"{completion.size} bytes for flag {completion.imm}")
        assert self._store is not None
        self._store(self._signal_address + offset, self._scratch[_SCRATCH + place * self._receives + slot])
        try:
            self._receive(connection, slot)
        except verbs.VerbsError as error:
            raise self._error(connection.peer, "receive", error.status, str(error), connection=connection) from error

    # ---- failures
    def _look_at_events(self) -> None:
        try:
            events = self._nic.events()
        except verbs.VerbsError as error:
            raise self._error(None, "events", error.status, str(error)) from error
        for event in events:
            name, fatal, meaning, remedy = verbs.EVENTS.get(event.kind, (f"event {event.kind}", False, "unknown", ""))
            if fatal:
                port = self._nic.port
                raise self._error(None, "asynchronous event", name, f"{port.device} port {port.number}: {meaning}", remedy)

    def _failure(self, failed: list[verbs.Completion], *, receives: bool) -> TransportError:
        """The first cause: requests that were flushed because their queue pair had failed say nothing themselves."""
        first = next((completion for completion in failed if completion.status != verbs.FLUSHED), failed[0])
        if first.status == verbs.FLUSHED:
            self._look_at_events()
        connection = next((c for c in self._connections if c.pair.number == first.qp), None)
        name, meaning, remedy = verbs.STATUSES.get(first.status, (f"status {first.status}", "unknown to this version", ""))
        if first.vendor_error:
            meaning += f", vendor error {first.vendor_error:#x}"
        op = "receive" if receives else ("write", "send" if self.signal == "imm" else "signal", "fetch_add")[first.wr_id & 3]
        return self._error(connection.peer if connection else None, op, name, meaning, remedy, connection=connection)

    def _setup_failure(self, error: verbs.VerbsError) -> TransportError:
        remedy = verbs.ERRNO_REMEDIES.get(error.code, "see `python -m mkernel doctor`")
        return self._error(None, error.op, error.status, str(error), remedy)

    def _error(
        self, peer: int | None, op: str, status: str, text: str, remedy: str = "", *, connection: _Connection | None = None
    ) -> TransportError:
        port = self._nic.port
        where = f"rank {self._rank} ({port.device}:{port.number}" + (f", queue pair {connection.pair.number}" if connection else "") + ")"
        to = "" if peer is None else f" to rank {peer}"
        return TransportError(
            f"{where}: {op}{to}: {status}: {text}" + (f" ({remedy})" if remedy else ""),
            peer=peer,
            op=op,
            status=status,
            queue_pair=connection.pair.number if connection else None,
            remedy=remedy,
        )

    # ---- the rest
    def next_event_ns(self) -> int | None:
        return 0 if self._outstanding else None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._undo.close()


def _number(pending: _Pending) -> int:
    return pending.number


def retry_policy(timeout: float) -> verbs.RetryPolicy:
    """The longest retries that end in half of ``timeout`` seconds: the card gives up before the kernels do, and says why.

    A card may wait up to four times the time it was told. A receiver without receives (mode imm) has up to a second.
    """
    exponent = 1
    while exponent < 20 and 4 * 7 * 4.096e-6 * 2 ** (exponent + 1) <= timeout / 2:
        exponent += 1
    pause = max(code for code, seconds in _RNR_SECONDS.items() if code == 22 or 6 * seconds <= timeout / 2)
    return verbs.RetryPolicy(timeout=max(exponent, 8), rnr_timer=pause)


def open_transport(nic: verbs.Nic, wiring: Wiring, *, signal: str, queue_pairs: int, kind: type[RcTransport] | None = None) -> RcTransport:
    """Register this rank's memory and open the queue pairs; not connected."""
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
    access = verbs.Access.local_write | verbs.Access.remote_write

    def register(address: int, dmabuf: int, size: int) -> verbs.Region:
        return nic.register_dmabuf(dmabuf, size, access) if dmabuf >= 0 else nic.register(address, size, access)

    try:
        heap = register(wiring.heap_address, wiring.heap_dmabuf, wiring.heap_bytes)
        signals = register(wiring.signal_address, wiring.signal_dmabuf, wiring.signal_bytes)
    except verbs.VerbsError as error:
        nic.close()
        remedy = verbs.ERRNO_REMEDIES.get(error.code, "see `python -m mkernel doctor`")
        text = f"rank {wiring.rank} ({nic.port.device}:{nic.port.number}): {error} ({remedy})"
        raise TransportError(text, op=error.op, status=error.status, remedy=remedy) from error
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


def open_card(card: Card, rank: int) -> verbs.Nic:
    """Open a port; what fails becomes a TransportError."""
    try:
        return verbs.open_nic(card.device, card.port, card.gid_index)
    except ImportError as error:
        remedy = "install pyverbs: docs/transports.md"
        raise TransportError(f"rank {rank}: {error} ({remedy})", op="import pyverbs", status="ImportError", remedy=remedy) from error
    except verbs.VerbsError as error:
        remedy = verbs.ERRNO_REMEDIES.get(error.code, "see `python -m mkernel doctor`")
        raise TransportError(f"rank {rank}: {error} ({remedy})", op=error.op, status=error.status, remedy=remedy) from error


def create(wiring: Wiring) -> RcTransport:
    """For the registry: opens the card, exchanges addresses with all ranks, connects. Collective."""
    card, exchange = wiring.card, wiring.exchange
    if card is None or exchange is None:
        raise ValueError("rc needs a card and an exchange")
    nic = open_card(card, wiring.rank)
    transport = open_transport(nic, wiring, signal=env.RC_SIGNAL.get(), queue_pairs=env.RC_QUEUE_PAIRS.get())
    try:
        transport.connect(exchange(transport.card))
        exchange(b"")  # nobody sends to a queue pair that is not ready yet
    except BaseException:
        transport.close()
        raise
    return transport


def loopback(card: Card, timeout: float = 5.0, open_card: Callable[[Card, int], verbs.Nic] = open_card) -> str:
    """One put from a port to itself; returns how its flag was raised. Raises TransportError."""
    size = mmap.PAGESIZE
    memories = [mmap.mmap(-1, 2 * size) for _ in range(2)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    with contextlib.ExitStack() as undo:
        ends = []
        for rank in range(2):
            wiring = Wiring(
                rank=rank,
                heap_address=addresses[rank],
                heap_bytes=size,
                signal_bytes=size,
                peers={1 - rank: (0, 0)},
                copier=_no_copier,
                clock_ns=time.monotonic_ns,
                signal_address=addresses[rank] + size,
                store=lambda address, value: setattr(ctypes.c_uint64.from_address(address), "value", value),
                timeout=timeout,
            )
            end = open_transport(open_card(card, rank), wiring, signal=env.RC_SIGNAL.get(), queue_pairs=1)
            undo.callback(end.close)
            ends.append(end)
        cards = [end.card for end in ends]
        for end in ends:
            end.connect(cards)
        memories[0][:size] = secrets.token_bytes(size)
        ends[0].post(Put(0, 0, 1, 0, 0, size, 0, 1))
        ends[0].flush()
        deadline = time.monotonic() + timeout
        while ctypes.c_uint64.from_address(addresses[1] + size).value != 1:
            for end in ends:
                end.poll()
            if time.monotonic() > deadline:
                raise TransportError(f"a put from {card.device}:{card.port} to itself did not arrive in {timeout:g} s", status="timeout")
        if memories[0][:size] != memories[1][:size]:
            raise TransportError(f"a put from {card.device}:{card.port} to itself arrived damaged", status="data")
        return ends[0].signal


def _no_copier() -> Any:
    raise AssertionError("rc copies nothing in this process")
