"""What transports over RDMA share: opening a card, registering memory, connecting, errors that name their cause, closing."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mkernel.errors import TransportError
from mkernel.transport import Card, Wiring, verbs
from mkernel.transport.base import Put, Transport
from mkernel.transport.verbs import pyverbs

__all__ = ["EXPLAIN_SECONDS", "RdmaTransport", "join", "open_card", "register"]

_log = logging.getLogger("mkernel")

EVENT_POLLS = 64  # polls from one look for asynchronous events to the next
PORT_SECONDS = 1.0  # how long a port may be down; less than a card tries again, if the transport says how long that is
EXPLAIN_SECONDS = 1.0  # how long to look for the cause of a queue pair's error
_EXPLAIN_PAUSE = 0.002  # seconds between two looks
_PACKET_SECONDS = 0.05  # longer than a packet lives
_POLL = 64  # completions a poll takes at most
_WORD = 8


class RdmaTransport(Transport):
    """One rank's queue pairs on one port. Open it, exchange ``address`` with all ranks, then ``connect``.

    A subclass opens everything inside ``with self._opening()``. It hands queue pairs to ``_own``, and all else that must be closed to
    ``_undo``.

    Parameters
    ----------
    nic
        The opened port. Closed with the transport.
    rank, peers
        This rank, and the ranks to connect to: those on its rail.
    heap
        This rank's data heap, registered with ``nic``. Closed with the transport.
    signal_bytes
        Size of the signal segment of every rank.
    """

    _sends: verbs.CompletionQueue
    _arrivals: verbs.CompletionQueue  # for receives; may be the same queue

    def __init__(self, nic: verbs.Nic, rank: int, peers: Sequence[int], heap: verbs.Region, signal_bytes: int) -> None:
        self._nic, self._rank, self._heap, self._signal_bytes = nic, rank, heap, signal_bytes
        self._ranks = peers
        self._reachable: set[int] = set()
        self._peer_of: dict[int, int] = {}  # number of a queue pair -> rank at its other end
        self._all_pairs: list[verbs.QueuePair] = []
        self._max_message = nic.limits.max_message
        self._outstanding = 0  # puts accepted and not completed
        self._polls = 0
        self._port_seconds = PORT_SECONDS
        self._down_since: float | None = None  # when the port was found down
        self._closed = False
        self._undo = contextlib.ExitStack()
        self._undo.callback(nic.close)
        self._undo.callback(heap.close)

    @property
    def name(self) -> str:
        """Device and port, e.g. ``mlx5_0:1``."""
        return f"{self._nic.port.device}:{self._nic.port.number}"

    # ---- opening and closing
    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Turn errors inside into TransportError, and close what has been opened so far."""
        try:
            with _naming(_where(self._rank, self._nic.port)):
                yield
        except BaseException:
            self.close()
            raise

    def _check_pairs(self, count: int, remedy: str) -> None:
        """Raise TransportError if the card has not so many queue pairs."""
        most = self._nic.limits.max_pairs
        if count > most:
            raise self._error(None, "open", "too many", f"{count} queue pairs are needed, and the card has {most}", remedy)

    def _queue(self, entries: int) -> verbs.CompletionQueue:
        queue = self._nic.completion_queue(max(1, min(entries, self._nic.limits.max_completions)))
        self._undo.callback(queue.close)
        return queue

    def _own(self, pair: verbs.QueuePair, peer: int) -> None:
        """Close a queue pair with the transport."""
        self._peer_of[pair.number] = peer
        self._all_pairs.append(pair)
        self._undo.callback(pair.close)
        self._undo.callback(self._fail, pair)

    @staticmethod
    def _fail(pair: verbs.QueuePair) -> None:
        """Move a queue pair to the error state, so that the card leaves memory alone before any is freed."""
        with contextlib.suppress(verbs.VerbsError):  # e.g. the device is gone
            pair.fail()

    def abandon(self) -> None:
        """Move all queue pairs to the error state, and wait until no packet of theirs can be in the network."""
        for pair in self._all_pairs:
            self._fail(pair)
        time.sleep(_PACKET_SECONDS)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._undo.close()

    # ---- connecting
    @property
    @abc.abstractmethod
    def address(self) -> bytes:
        """What other ranks must know to connect to this one: JSON.

        At least ``heap``, which is (address, bytes, key), and ``signal_bytes``.
        """

    @abc.abstractmethod
    def _connect(self, peer: int, address: dict[str, Any]) -> None:
        """Connect to one rank, whose heap is as large as this one's. May raise VerbsError."""

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Connect to all peers. ``addresses`` has the ``address`` of every rank, by rank. Raises TransportError."""
        with _naming(_where(self._rank, self._nic.port)):
            for peer in self._ranks:
                address = json.loads(addresses[peer])
                for what, mine, theirs in (
                    ("heap_bytes", self._heap.size, address["heap"][1]),
                    ("bytes of signals", self._signal_bytes, address["signal_bytes"]),
                ):
                    self._agree(peer, what, mine, theirs, "pass the same heap_bytes everywhere")
                self._connect(peer, address)
                self._reachable.add(peer)

    def _agree(self, peer: int, what: str, mine: object, theirs: object, remedy: str) -> None:
        if mine != theirs:
            raise self._error(peer, "connect", "mismatch", f"{what} is {theirs} on rank {peer} and {mine} here", remedy)

    # ---- the transport
    def _check_addresses(self, put: Put) -> None:
        """Raise TransportError unless the peer is connected and all bytes lie inside the segments."""
        rank = put.dst_rank
        if rank not in self._reachable:
            text = f"no connection: ranks put to their rail only, here {sorted(self._reachable)}"
            raise self._error(rank, "put_signal", "unreachable", text)
        if max(put.src_offset, put.dst_offset) + put.bytes > self._heap.size:
            text = f"bytes {put.src_offset} -> {put.dst_offset} + {put.bytes} outside the data heap of {self._heap.size} bytes"
            raise self._error(rank, "put_signal", "bad address", text)
        if not self._is_flag(put.signal_offset):
            raise self._error(rank, "put_signal", "bad address", self._no_flag(put.signal_offset))

    def _is_flag(self, offset: int) -> bool:
        return offset + _WORD <= self._signal_bytes and not offset % _WORD

    def _no_flag(self, offset: int) -> str:
        return f"flag at {offset} outside the signal segment of {self._signal_bytes} bytes (or not aligned)"

    def _commit(self, pair: verbs.QueuePair) -> None:
        try:
            pair.commit()
        except verbs.VerbsError as error:
            raise self._refused("post", error, pair) from error

    def _polled(self) -> bool:
        """Count a poll. Every ``EVENT_POLLS`` polls, look for asynchronous events and return True."""
        self._polls += 1
        if self._polls % EVENT_POLLS:
            return False
        self._look_at_events()
        return True

    def _completions(self, queue: verbs.CompletionQueue) -> Sequence[verbs.Completion]:
        """The next completions of a queue, at most ``_POLL``. Raises TransportError if one of them is an error."""
        found = self._take(queue)
        for completion in found:
            if completion.status:
                raise self._failure(queue, [c for c in found if c.status])
        return found

    def _take(self, queue: verbs.CompletionQueue) -> Sequence[verbs.Completion]:
        try:
            return queue.poll(_POLL)
        except verbs.VerbsError as error:
            raise self._refused("poll", error) from error

    def next_event_ns(self) -> int | None:
        return 0 if self._outstanding else None

    # ---- failures
    def _look_at_events(self, *, patient: bool = True) -> None:
        """Raise TransportError for an event that ends things. ``patient``: a port that is down may come up again."""
        try:
            events = self._nic.events()
            if self._down_since is not None or any(event.kind == verbs.PORT_ERROR for event in events):
                self._look_at_port(patient)
        except verbs.VerbsError as error:
            raise self._refused("events", error) from error
        for event in events:
            name, fatal, meaning, remedy = verbs.EVENTS.get(event.kind, (f"event {event.kind}", False, "unknown", ""))
            if fatal and event.kind != verbs.PORT_ERROR:
                raise self._error(None, "asynchronous event", name, meaning, remedy)

    def _look_at_port(self, patient: bool) -> None:
        """The event says only that a port of the device went down. Raise TransportError if it is this one, and for long."""
        if self._nic.active():
            if self._down_since is not None:
                _log.warning("%s: the port was down, and is up again", _where(self._rank, self._nic.port))
            self._down_since = None
            return
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
        if not patient or now - self._down_since >= self._port_seconds:
            name, _, meaning, remedy = verbs.EVENTS[verbs.PORT_ERROR]
            raise self._error(None, "asynchronous event", name, meaning, remedy)

    @abc.abstractmethod
    def _operation(self, wr_id: int) -> str:
        """The name of the operation that a work request of a send queue was."""

    def _failure(self, queue: verbs.CompletionQueue, failed: Sequence[verbs.Completion]) -> TransportError:
        """The error that names the first cause. If an asynchronous event is the cause, its error is raised instead."""
        if self._down_since is not None:
            self._look_at_events(patient=False)
        first = next((completion for completion in failed if completion.status != verbs.FLUSHED), None)
        if first is None:
            queue, first = self._explain(queue, failed[0])
        name, meaning, remedy = verbs.STATUSES.get(first.status, (f"status {first.status}", "unknown to this version", ""))
        if first.vendor_error:
            meaning += f", vendor error {first.vendor_error:#x}"
        op = self._operation(first.wr_id) if queue is self._sends else "receive"
        return self._error(self._peer_of.get(first.qp), op, name, meaning, remedy, queue_pair=first.qp)

    def _explain(self, queue: verbs.CompletionQueue, flushed: verbs.Completion) -> tuple[verbs.CompletionQueue, verbs.Completion]:
        """The completion that says why a queue pair failed, with its queue; ``flushed`` itself if none does.

        A flushed request says nothing of the cause, and the completion that does may come a moment later. This waits for it, at most
        ``EXPLAIN_SECONDS``, and drops all others: the transport has failed.
        """
        end = time.monotonic() + EXPLAIN_SECONDS
        while True:
            self._look_at_events(patient=False)
            for other in dict.fromkeys((self._sends, self._arrivals)):
                for completion in self._take(other):
                    if completion.status not in (verbs.SUCCESS, verbs.FLUSHED):
                        return other, completion
            if time.monotonic() >= end:
                return queue, flushed
            time.sleep(_EXPLAIN_PAUSE)

    def _refused(self, op: str, error: verbs.VerbsError, pair: verbs.QueuePair | None = None) -> TransportError:
        """The error for a call that failed."""
        number = None if pair is None else pair.number
        return self._error(None if number is None else self._peer_of[number], op, error.status, str(error), queue_pair=number)

    def _error(
        self, peer: int | None, op: str, status: str, text: str, remedy: str = "", *, queue_pair: int | None = None
    ) -> TransportError:
        where = _where(self._rank, self._nic.port, queue_pair)
        to = "" if peer is None else f" to rank {peer}"
        message = f"{where}: {op}{to}: {status}: {text}" + (f" ({remedy})" if remedy else "")
        return TransportError(message, peer=peer, op=op, status=status, queue_pair=queue_pair, remedy=remedy)


def _where(rank: int, port: verbs.Port, queue_pair: int | None = None) -> str:
    return f"rank {rank} ({port.device}:{port.number}" + ("" if queue_pair is None else f", queue pair {queue_pair}") + ")"


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn VerbsError into TransportError, with the remedy for its errno."""
    try:
        yield
    except verbs.VerbsError as error:
        remedy = verbs.ERRNO_REMEDIES.get(error.code, "see `python -m mkernel doctor`")
        raise TransportError(f"{where}: {error} ({remedy})", op=error.op, status=error.status, remedy=remedy) from error


def open_card(card: Card, rank: int) -> verbs.Nic:
    """Open the port of a card. Raises TransportError if pyverbs is missing, or the port cannot be opened."""
    try:
        with _naming(f"rank {rank}"):
            return pyverbs.open_nic(card.device, card.port, card.gid_index, card.pkey_index)
    except ImportError as error:
        remedy = "install pyverbs: docs/transports.md"
        raise TransportError(f"rank {rank}: {error} ({remedy})", op="import pyverbs", status="ImportError", remedy=remedy) from error


def register(nic: verbs.Nic, rank: int, *segments: tuple[int, int, int]) -> list[verbs.Region]:
    """Register segments so that peers may write to them; returns their regions in the same order.

    A segment is (address, descriptor of its dma-buf or -1, bytes). ``nic`` is closed if this fails. Raises TransportError.
    """
    access = verbs.Access.local_write | verbs.Access.remote_write
    regions: list[verbs.Region] = []
    with contextlib.ExitStack() as undo, _naming(_where(rank, nic.port)):
        undo.callback(nic.close)
        for address, dmabuf, size in segments:
            region = nic.register_dmabuf(dmabuf, size, access) if dmabuf >= 0 else nic.register(address, size, access)
            undo.callback(region.close)
            regions.append(region)
        undo.pop_all()
    return regions


_T = TypeVar("_T", bound=RdmaTransport)


def join(wiring: Wiring, open: Callable[[verbs.Nic, Wiring], _T]) -> list[_T]:
    """Open the cards, and a transport on each by ``open``; exchange addresses with all ranks; connect. Collective.

    The first card of a rank connects to the first ones of its peers, and so on.

    Raises
    ------
    ValueError
        ``wiring`` has no card or no exchange.
    TransportError
        A card, or the connection to a rank, could not be opened; or a peer has more cards, or fewer.
    """
    if wiring.card is None or wiring.exchange is None:
        raise ValueError("RDMA needs a card and an exchange")
    cards, transports = (wiring.card, *wiring.more_cards), list[_T]()
    with contextlib.ExitStack() as undo:
        for card in cards:  # one after the other may fail before a wait inside a call ends
            own = dataclasses.replace(wiring, card=card, more_cards=(), timeout=wiring.timeout / len(cards))
            transports.append(open(open_card(card, wiring.rank), own))
            undo.callback(transports[-1].close)
        told = wiring.exchange(json.dumps([transport.address.decode() for transport in transports]).encode())
        addresses = {peer: json.loads(told[peer]) for peer in wiring.peers}
        for peer, theirs in addresses.items():
            if len(theirs) != len(cards):
                text = f"rank {wiring.rank}: rank {peer} has {len(theirs)} cards, and this one {len(cards)} (name as many for every rank)"
                raise TransportError(text, peer=peer, op="connect", status="mismatch", remedy="set MKERNEL_NIC")
        for number, transport in enumerate(transports):
            of_card = {peer: theirs[number].encode() for peer, theirs in addresses.items()}
            transport.connect([of_card.get(peer, b"") for peer in range(len(told))])
        wiring.exchange(b"")  # a barrier: nobody sends to a rank that is not connected yet
        undo.pop_all()
    return transports
