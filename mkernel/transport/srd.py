"""RDMA over SRD queue pairs (AWS EFA): reliable, exactly once, in no order. The receiver counts messages and raises the signals.

A put travels as RDMA writes with an immediate (channel, sequence), which carry its bytes, and one SEND, which announces its sequence, its
number of writes and its signal. The receiver's engine counts the messages of each sequence. It stores a signal once its put is whole and
all earlier puts of its channel have been released. No message is assumed to keep its order, announcements included.

Both kinds of message consume a receive of the peer. The sender spends a credit for each. The receiver returns credits, and says how many
puts it has released, in every announcement that goes the other way; if there is nothing to announce, in an update, a message of its own.

The counting is in counting.py:

- At most ``WINDOW`` puts to one peer are not known to be released. That is below half of the sequence space, so that sequences may wrap.
- An update needs no credit; ``SPARE`` receives are kept for updates. At most one update is not known to be delivered, so that updates
  arrive in the order of sending, and only that one can be overtaken by the numbers that it carries. Each update raises the credits by a
  quarter of all credits, or the releases by a quarter of the window, and the peer uses only what it has seen: so at most 4 + 4 + 1 updates
  wait in receives.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mkernel.errors import ArgumentError, TransportError
from mkernel.transport import Wiring, rdma, verbs
from mkernel.transport.base import Put
from mkernel.transport.compiled import Rule
from mkernel.transport.counting import CHANNELS, Incoming, Outgoing, ProtocolError, imm

__all__ = ["SPARE", "UPDATE", "SrdTransport", "create", "open_transport"]

SPARE = 9  # receives for updates
UPDATE = 0xFFFFFFFF  # stands for the number of writes in an update, which announces no put
DEPTH = 256  # work requests of a queue pair
CREDITS = 512  # receives of a queue pair for writes and announcements of the peer
BACKLOG = 64  # the most puts to one peer that wait for credits: `post` refuses any more

# A SEND carries channel, sequence, writes (or UPDATE), signal offset, signal value, and two running counts for its receiver: the messages
# that it may have sent in all, and its puts that have been released. SENDs may overtake each other, so the greatest count seen holds.
_MESSAGE = struct.Struct("<HHIQQQQ")
_SLOT = 64  # bytes of memory for one SEND


class _Job:
    """A put under way: its writes are posted, then its announcement. It is complete when all of these are."""

    __slots__ = ("offset", "pending", "put", "sequence")

    def __init__(self, put: Put) -> None:
        self.put = put
        self.sequence = -1  # -1: not begun
        self.offset = 0  # bytes posted
        self.pending = 1  # messages that are not completed; the announcement counts before it is posted


class _Peer:
    """One peer, and the queue pair to it."""

    __slots__ = (
        "backlog", "credits", "destination", "free", "heap", "heap_key", "incoming", "jobs", "outgoing", "pair", "position", "rank",
        "touched", "updating",
    )  # fmt: skip

    def __init__(
        self, rank: int, position: int, pair: verbs.QueuePair, depth: int, credits: int, release: Callable[[int, int], object]
    ) -> None:
        self.rank, self.position, self.pair, self.credits = rank, position, pair, credits  # position: among the peers
        self.incoming = Incoming(release, credits)
        self.outgoing: Outgoing | None = None  # None: not connected
        self.destination: verbs.Destination | None = None
        self.heap = self.heap_key = 0
        self.backlog: deque[_Job] = deque()
        self.free = list(range(depth - 1))  # work requests of the send queue; the last one is for updates
        self.jobs: list[_Job | None] = [None] * depth  # by work request
        self.updating = False  # an update is not known to be delivered
        self.touched = False  # the next flush looks at this peer


class SrdTransport(rdma.RdmaTransport):
    """Puts by counted datagrams. Further parameters: ``RdmaTransport``.

    Parameters
    ----------
    signal_address
        Address of this rank's signal segment, in host memory.
    store
        ``store(address, value)`` writes a 64-bit word with release.
    depth, credits
        Work requests and message receives of each queue pair, if the card can do that many.

    Raises
    ------
    TransportError
        The card refused something, or its queues are too short for so many peers.
    """

    def __init__(
        self,
        nic: verbs.Nic,
        rank: int,
        peers: Iterable[int],
        heap: verbs.Region,
        signal_address: int,
        signal_bytes: int,
        store: Callable[[int, int], object],
        *,
        depth: int = DEPTH,
        credits: int = CREDITS,
    ) -> None:
        peers = sorted(peers)
        super().__init__(nic, rank, peers, heap, signal_bytes)
        self._signal_address, self._store = signal_address, store
        self._qkey = secrets.randbits(31)
        self._touched: list[_Peer] = []
        with self._opening():
            self._open(peers, depth, credits)

    def _open(self, peers: Sequence[int], depth: int, credits: int) -> None:
        limits, count = self._nic.limits, max(len(peers), 1)
        self._check_pairs(len(peers), "fewer ranks")
        self._depth = min(depth, limits.max_send, limits.max_completions // count)
        receives = min(credits + SPARE, limits.max_receive, limits.max_completions // count)
        if self._depth < 2 or receives < SPARE + 4:
            text = f"{limits.max_completions} entries of a completion queue are too few for {count} peers"
            raise self._error(None, "open", "too small", text, "fewer ranks per card")
        self._receives = receives
        self._slots = (ctypes.c_char * (_SLOT * count * (self._depth + receives)))()
        address = ctypes.addressof(self._slots)
        self._slots_region = self._nic.register(address, len(self._slots), verbs.Access.local_write)
        self._undo.callback(self._slots_region.close)
        self._sends = self._queue(count * self._depth)
        self._arrivals = self._queue(count * receives)
        self._peers: list[_Peer] = []
        for position, rank in enumerate(peers):
            pair = self._nic.srd_pair(self._sends, self._arrivals, max_send=self._depth, max_receive=receives, qkey=self._qkey)
            peer = _Peer(rank, position, pair, self._depth, receives - SPARE, self._release)
            self._own(pair, rank)
            self._peers.append(peer)
            for slot in range(receives):
                self._receive(peer, slot)
        self._by_rank = {peer.rank: peer for peer in self._peers}

    # ---- connecting
    @property
    def address(self) -> bytes:
        return json.dumps(
            {
                "gid": self._nic.port.gid,
                "qkey": self._qkey,
                "heap": [self._heap.address, self._heap.size, self._heap.rkey],
                "signal_bytes": self._signal_bytes,
                "pairs": {peer.rank: [peer.pair.number, peer.credits] for peer in self._peers},
            }
        ).encode()

    def _connect(self, peer: int, address: dict[str, Any]) -> None:
        state = self._by_rank[peer]
        number, credits = address["pairs"][str(self._rank)]
        state.destination = self._nic.destination(address["gid"], number, address["qkey"])
        self._undo.callback(state.destination.close)
        self._undo.callback(self._fail, state.pair)  # before its destination is closed, to which nothing may be on its way
        state.heap, _, state.heap_key = address["heap"]
        state.outgoing = Outgoing(credits)

    # ---- the transport
    def post(self, put: Put) -> bool:
        self._check(put)
        peer = self._by_rank[put.dst_rank]
        if len(peer.backlog) >= BACKLOG:
            return False
        peer.backlog.append(_Job(put))
        self._outstanding += 1
        self._touch(peer)
        return True

    def _check(self, put: Put) -> None:
        """Raise TransportError for a put that cannot be."""
        self._check_addresses(put)
        if not 0 <= put.channel < CHANNELS:
            raise self._error(put.dst_rank, "put_signal", "bad channel", f"channel {put.channel}: there are {CHANNELS}")

    def _touch(self, peer: _Peer) -> None:
        if not peer.touched:
            peer.touched = True
            self._touched.append(peer)

    def flush(self) -> None:
        """Post as much as credits and send queues allow, with one doorbell per peer."""
        for peer in self._touched:
            peer.touched = False
            self._pump(peer)
            if peer.incoming.due and not peer.updating:
                peer.updating = True
                self._send(peer, self._depth - 1, 0, 0, UPDATE, 0, 0)
            self._commit(peer.pair)
        self._touched.clear()

    def _pump(self, peer: _Peer) -> None:
        backlog, outgoing, free, pair = peer.backlog, peer.outgoing, peer.free, peer.pair
        assert outgoing is not None
        step, heap = self._max_message, self._heap
        while backlog:
            job = backlog[0]
            put = job.put
            if job.sequence < 0:
                if not outgoing.open:
                    return
                job.sequence = outgoing.begin(put.channel)
            while True:
                if not free or outgoing.room <= 0:
                    return
                slot = free.pop()
                peer.jobs[slot] = job
                outgoing.spend()
                if job.offset == put.bytes:
                    break
                size = min(put.bytes - job.offset, step)
                source, target = heap.address + put.src_offset + job.offset, peer.heap + put.dst_offset + job.offset
                number = imm(put.channel, job.sequence)
                wr_id = peer.position * self._depth + slot
                pair.write(wr_id, source, size, heap.lkey, target, peer.heap_key, signaled=True, imm=number, to=peer.destination)
                job.offset += size
                job.pending += 1
            self._send(peer, slot, put.channel, job.sequence, -(-put.bytes // step), put.signal_offset, put.signal_value)
            backlog.popleft()

    def _send(self, peer: _Peer, slot: int, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        wr_id = peer.position * self._depth + slot
        offset = wr_id * _SLOT
        _MESSAGE.pack_into(self._slots, offset, channel, sequence, writes, signal_offset, signal_value, *peer.incoming.tell())
        region = self._slots_region
        peer.pair.send(wr_id, region.address + offset, _MESSAGE.size, region.lkey, signaled=True, to=peer.destination)

    def poll(self) -> list[int]:
        self._polled()
        for completion in self._completions(self._arrivals):
            self._take_message(completion)
        done: list[int] = []
        depth = self._depth
        for completion in self._completions(self._sends):
            position, slot = divmod(completion.wr_id, depth)
            peer = self._peers[position]
            if peer.backlog:
                self._touch(peer)
            if slot == depth - 1:
                peer.updating = False
                self._touch(peer)
                continue
            peer.free.append(slot)
            job = peer.jobs[slot]
            assert job is not None
            peer.jobs[slot] = None
            job.pending -= 1
            if not job.pending:
                done.append(job.put.ticket)
        self._outstanding -= len(done)
        if self._touched:
            self.flush()
        return done

    # ---- the receiver's part
    def _receive(self, peer: _Peer, slot: int) -> None:
        offset = len(self._slots) - _SLOT * (1 + peer.position * self._receives + slot)
        region = self._slots_region
        peer.pair.receive(peer.position * self._receives + slot, region.address + offset, _SLOT, region.lkey)

    def _take_message(self, completion: verbs.Completion) -> None:
        self.arrived += 1
        position, slot = divmod(completion.wr_id, self._receives)
        peer = self._peers[position]
        try:
            if completion.imm is None:
                self._read(peer, len(self._slots) - _SLOT * (1 + completion.wr_id), completion.size)
            else:
                peer.incoming.write(completion.imm)
            self._receive(peer, slot)
        except ProtocolError as error:
            raise self._broken(peer, error) from error
        except verbs.VerbsError as error:
            raise self._refused("receive", error, peer.pair) from error
        if peer.backlog or peer.incoming.due:
            self._touch(peer)

    def _broken(self, peer: _Peer, error: ProtocolError) -> TransportError:
        remedy = "do all ranks run the same version of mkernel?"
        return self._error(peer.rank, "receive", "protocol", str(error), remedy, queue_pair=peer.pair.number)

    def _read(self, peer: _Peer, offset: int, size: int) -> None:
        """Take the message at ``offset`` of the slots. Raises ProtocolError."""
        if size != _MESSAGE.size:
            raise ProtocolError.of(Rule.length, number=size)
        channel, sequence, writes, signal_offset, signal_value, granted, released = _MESSAGE.unpack_from(self._slots, offset)
        if peer.outgoing is None:
            raise ProtocolError("a message before the connection")
        peer.outgoing.update(granted, released)
        if writes != UPDATE:
            peer.incoming.announce(channel, sequence, writes, signal_offset, signal_value)

    def _release(self, signal_offset: int, signal_value: int) -> None:
        """Raise the flag of a put, all bytes of which the card has written before it completed the receives."""
        if not self._is_flag(signal_offset):
            raise ProtocolError.of(Rule.flag_outside, number=signal_offset)
        self._store(self._signal_address + signal_offset, signal_value)

    def _operation(self, wr_id: int) -> str:
        return "put_signal"


def open_transport(nic: verbs.Nic, wiring: Wiring) -> SrdTransport:
    """Register this rank's memory and open the queue pairs. The transport is not connected. ``nic`` is closed if this fails.

    Raises
    ------
    TransportError
        The card has no SRD queue pairs or no RDMA writes, or it refused something.
    """
    limits = nic.limits
    problem = remedy = ""
    if not limits.srd:
        problem, remedy = f"{nic.port.device} has no SRD queue pairs", "use transport='rc'"
    elif not limits.rdma_write:
        problem, remedy = f"{nic.port.device} has no RDMA writes, or this pyverbs does not know of them", "see docs/transports.md"
    elif wiring.store is None or not wiring.signal_address:
        problem, remedy = "the engine cannot write the signal segment", "see docs/transports.md"
    if problem:
        nic.close()
        raise TransportError(f"rank {wiring.rank}: srd: {problem} ({remedy})", op="open", status="unsupported", remedy=remedy)
    (heap,) = rdma.register(nic, wiring.rank, (wiring.heap_address, wiring.heap_dmabuf, wiring.heap_bytes))
    assert wiring.store is not None
    return SrdTransport(nic, wiring.rank, wiring.peers, heap, wiring.signal_address, wiring.signal_bytes, wiring.store)


def create(wiring: Wiring) -> SrdTransport:
    """Open the card, exchange addresses with all ranks, and connect. Collective. Raises as ``rdma.join`` and ``open_transport`` do."""
    if wiring.more_cards:
        rule = "srd uses one card per rank: its receivers raise flags, and count what comes by one card"
        raise ArgumentError("MKERNEL_NIC", f"{1 + len(wiring.more_cards)} cards", rule, "name one per rank")
    (transport,) = rdma.join(wiring, open_transport)
    return transport
