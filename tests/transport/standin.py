"""Network cards in this process, behind the verbs boundary, that do whatever the standards allow, as late as they allow it.

Bytes are read at the source, and land, piece by piece, when ``Fabric.step`` says so: out of order, split, any time before the operation
completes. On RC queue pairs atomics and messages wait for the operations before them, fenced writes for the atomics before them, and other
writes for nothing, where the network is ``adaptive``; sends complete in order. On SRD queue pairs nothing has an order. Queues are exactly
as deep as was asked for, and overrunning one is an error.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mkernel.transport import Wiring, verbs
from mkernel.transport.verbs import Access, Completion, Event, Limits, Port, Remote, RetryPolicy, VerbsError
from tests.transport.harness import LocalNetwork

__all__ = ["MOODS", "Fabric", "Mood", "StandinNetwork", "StandinNic"]

REM_ACCESS, REM_INV_REQ, RETRY, RNR, FLUSHED, LOC_PROT, LOC_LEN = 10, 9, 12, 13, verbs.FLUSHED, 4, 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mood:
    """How the network behaves. All of this is legal.

    Attributes
    ----------
    pieces
        Parts in which a message lands at most.
    lazy
        Of the chances to do something, the share that is passed up.
    adaptive
        Plain writes of an RC queue pair land in any order.
    late_completions
        Completions appear up to this many steps after the operation has ended.
    max_message, max_send, max_receive, max_completions
        Limits of the cards.
    atomics
        Whether the cards have them.
    forgetful
        What has to wait for an atomic goes on only at the next doorbell, as rxe may have it.
    """

    pieces: int = 3
    lazy: float = 0.3
    adaptive: bool = True
    late_completions: int = 5
    max_message: int = 1 << 30
    max_send: int = 1 << 12
    max_receive: int = 1 << 12
    max_completions: int = 1 << 16
    atomics: bool = True
    forgetful: bool = False


MOODS = {
    "prompt": Mood(pieces=1, lazy=0.0, adaptive=False, late_completions=0),
    "late": Mood(),
    "split": Mood(pieces=20, lazy=0.1),
    "slow": Mood(lazy=0.9, late_completions=40),
    "short_messages": Mood(max_message=512, max_send=64, max_receive=64),
    "short_queues": Mood(max_send=24, max_receive=48, max_completions=200, lazy=0.6),
}


class _Region(verbs.Region):
    def __init__(self, nic: StandinNic, address: int, base: int, size: int, access: int, key: int) -> None:
        self.nic, self.base, self.access = nic, base, access  # base: where it really is
        self.address, self.size, self.lkey, self.rkey = address, size, key, key ^ 0x5A5A

    def at(self, address: int, size: int) -> int | None:
        offset = address - self.address
        return self.base + offset if offset >= 0 and offset + size <= self.size else None

    def close(self) -> None:
        fabric = self.nic.fabric
        if fabric.local.pop(self.lkey, None) is not None:
            del fabric.remote[self.rkey]
            for pair in list(self.nic.pairs.values()):
                assert pair.state in ("RESET", "ERR"), "memory is deregistered while a queue pair may still write to it"


@dataclasses.dataclass(slots=True)
class _Work:
    """A posted operation on its way."""

    kind: str  # write, inline, add, send
    wr_id: int
    local: int
    size: int
    lkey: int
    remote: int
    rkey: int
    signaled: bool
    imm: int | None = None
    value: int = 0
    fenced: bool = False
    to: _Destination | None = None
    pieces: list[tuple[int, int]] | None = None  # what has not landed yet; None: not begun
    retries: int = 0
    ended: bool = False
    serial: int = 0


class _Destination(verbs.Destination):
    def __init__(self, nic: StandinNic, gid: str, qp: int, qkey: int) -> None:
        self.nic, self.gid, self.qp, self.qkey = nic, gid, qp, qkey
        self.closed = False

    def close(self) -> None:
        self.closed = True


class _Queue(verbs.CompletionQueue):
    def __init__(self, nic: StandinNic, capacity: int) -> None:
        self.nic, self.capacity = nic, capacity
        self.entries: deque[tuple[Completion, _Pair | None, int]] = deque()
        self.late: list[tuple[int, Completion, _Pair | None, int]] = []  # steps until visible first
        self.closed = False

    def push(self, completion: Completion, *, ordered: bool, frees: tuple[_Pair | None, int] = (None, 0)) -> None:
        """``frees``: whose send queue gets how many entries back when this is polled."""
        if len(self.entries) + len(self.late) >= self.capacity:
            self.nic.pending_events.append(Event(0))
            return
        mood = self.nic.fabric.mood
        delay = self.nic.fabric.random.randrange(mood.late_completions + 1)
        if ordered:
            delay = max([delay, *(left for left, other, *_ in self.late if other.qp == completion.qp)])
        self.late.append((delay, completion, *frees))

    def tick(self) -> bool:
        still = []
        for left, *entry in self.late:
            if left <= 0:
                self.entries.append(tuple(entry))
            else:
                still.append((left - 1, *entry))
        moved, self.late = bool(self.late), still
        return moved

    def poll(self, limit: int) -> Sequence[Completion]:
        assert not self.closed
        found = []
        while self.entries and len(found) < limit:
            completion, pair, count = self.entries.popleft()
            if pair is not None:
                pair.occupied -= count
            found.append(completion)
        return found

    def close(self) -> None:
        assert not any(pair.sends is self or pair.receives is self for pair in self.nic.pairs.values()), "a queue pair still uses this"
        self.closed = True


class _Pair(verbs.QueuePair):
    def __init__(self, nic: StandinNic, kind: str, sends: _Queue, receives: _Queue, max_send: int, max_receive: int, qkey: int = 0) -> None:
        limits = nic.limits
        if max_send > limits.max_send or max_receive > limits.max_receive:
            raise VerbsError(f"creating an {kind} queue pair", errno.EINVAL)
        self.nic, self.kind, self.sends, self.receives, self.qkey = nic, kind, sends, receives, qkey
        self.max_send, self.max_receive = max_send, max_receive
        self.number = next(nic.fabric.numbers)
        self.state = "RTS" if kind == "SRD" else "RESET"
        self.remote: Remote | None = None
        self.retry = RetryPolicy()
        self.batch: list[_Work] = []
        self.work: deque[_Work] = deque()  # posted, oldest first
        self.occupied = 0  # entries of the send queue: given back when a completion (RC: of this or a later request) is polled
        self.asleep = False  # until the next doorbell
        self.unsignaled = 0  # ended since the last that has a completion
        self.waiting: deque[tuple[int, int, int, int]] = deque()  # receives
        nic.pairs[self.number] = self
        nic.fabric.pairs[self.number] = self

    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        assert self.kind == "RC"
        assert self.state == "RESET"
        assert mtu in verbs.MTU_BYTES
        self.remote, self.retry, self.state = remote, retry, "RTS"

    def _post(self, work: _Work) -> None:
        assert (work.to is None) == (self.kind == "RC"), "a destination is for datagrams"
        assert work.to is None or not work.to.closed
        self.batch.append(work)

    def write(
        self,
        wr_id: int,
        local: int,
        size: int,
        lkey: int,
        remote: int,
        rkey: int,
        *,
        signaled: bool,
        imm: int | None = None,
        to: verbs.Destination | None = None,
    ) -> None:
        assert to is None or isinstance(to, _Destination)
        self._post(_Work("write", wr_id, local, size, lkey, remote, rkey, signaled, imm, to=to))

    def write_inline(self, wr_id: int, value: int, remote: int, rkey: int, *, signaled: bool, fenced: bool = False) -> None:
        self._post(_Work("inline", wr_id, 0, 8, 0, remote, rkey, signaled, value=value, fenced=fenced))

    def fetch_add(self, wr_id: int, local: int, lkey: int, remote: int, rkey: int, value: int, *, signaled: bool) -> None:
        assert self.nic.limits.atomics
        self._post(_Work("add", wr_id, local, 8, lkey, remote, rkey, signaled, value=value))

    def send(
        self,
        wr_id: int,
        local: int,
        size: int,
        lkey: int,
        *,
        signaled: bool,
        imm: int | None = None,
        to: verbs.Destination | None = None,
    ) -> None:
        assert to is None or isinstance(to, _Destination)
        self._post(_Work("send", wr_id, local, size, lkey, 0, 0, signaled, imm, to=to))

    def nudge(self) -> None:
        assert not self.batch
        self.asleep = False

    def commit(self) -> None:
        self.asleep = False
        batch, self.batch = self.batch, []
        if self.occupied + len(batch) > self.max_send:
            raise VerbsError("posting to a queue pair", errno.ENOMEM)
        self.occupied += len(batch)
        for work in batch:
            work.serial = next(self.nic.fabric.serials)
            self.work.append(work)
        if self.state == "ERR":
            self.flush()

    def receive(self, wr_id: int, local: int, size: int, lkey: int) -> None:
        if self.state == "RESET":
            raise VerbsError("posting a receive", errno.EINVAL)
        if len(self.waiting) >= self.max_receive:
            raise VerbsError("posting a receive", errno.ENOMEM)
        self.waiting.append((wr_id, local, size, lkey))

    def flush(self) -> None:
        """Everything posted ends with the status FLUSHED, also what asked for no completion."""
        for work in self.work:
            if not work.ended:
                self.sends.push(Completion(work.wr_id, FLUSHED, self.number, False, 0, None, 0, 0), ordered=True)
        for wr_id, *_ in self.waiting:
            self.receives.push(Completion(wr_id, FLUSHED, self.number, False, 0, None, 0, 0), ordered=True)
        self.work.clear()
        self.waiting.clear()

    def break_down(self, work: _Work, status: int) -> None:
        """An operation failed; on RC that is the end of the queue pair."""
        work.ended = True
        frees = (None, 0) if self.kind == "RC" else (self, 1)
        self.sends.push(Completion(work.wr_id, status, self.number, False, 0, None, 0, 0x81), ordered=self.kind == "RC", frees=frees)
        if self.kind == "RC":
            self.fail()
        else:
            self.work.remove(work)

    def fail(self) -> None:
        self.state = "ERR"
        self.flush()

    def close(self) -> None:
        self.state = "RESET"
        self.work.clear()
        self.nic.pairs.pop(self.number, None)
        self.nic.fabric.pairs.pop(self.number, None)


class StandinNic(verbs.Nic):
    """One card. ``gid`` tells it from the others."""

    def __init__(self, fabric: Fabric, index: int, *, srd: bool = False) -> None:
        self.fabric, self.index = fabric, index
        mood = fabric.mood
        self.port = Port(f"standin{index}", 1, 0, f"fe80:0000:0000:0000:0000:0000:0000:{index:04x}", 0, False, 3 + index % 3)
        self.limits = Limits(
            max_send=mood.max_send,
            max_receive=mood.max_receive,
            max_completions=mood.max_completions,
            max_message=mood.max_message,
            inline_bytes=0 if srd else 8,
            atomics=mood.atomics and not srd,
            atomics_in_flight=0 if srd else 16,
            srd=srd,
        )
        self.pairs: dict[int, _Pair] = {}
        self.pending_events: list[Event] = []
        self.closed = False

    def register(self, address: int, size: int, access: int) -> verbs.Region:
        return self._region(address, address, size, access)

    def register_dmabuf(self, fd: int, size: int, access: int) -> verbs.Region:
        """``fd`` stands for memory: whatever the test gave ``Fabric.dmabufs`` for it."""
        return self._region(0, self.fabric.dmabufs[fd], size, access)

    def _region(self, address: int, base: int, size: int, access: int) -> _Region:
        fabric = self.fabric
        region = _Region(self, address, base, size, access, next(fabric.keys))
        fabric.local[region.lkey] = fabric.remote[region.rkey] = region
        return region

    def completion_queue(self, capacity: int) -> verbs.CompletionQueue:
        if not 0 < capacity <= self.limits.max_completions:
            raise VerbsError("creating a completion queue", errno.EINVAL)
        queue = _Queue(self, capacity)
        self.fabric.queues.append(queue)
        return queue

    def rc_pair(self, sends: verbs.CompletionQueue, receives: verbs.CompletionQueue, *, max_send: int, max_receive: int) -> verbs.QueuePair:
        assert isinstance(sends, _Queue)
        assert isinstance(receives, _Queue)
        return _Pair(self, "RC", sends, receives, max_send, max_receive)

    def srd_pair(
        self, sends: verbs.CompletionQueue, receives: verbs.CompletionQueue, *, max_send: int, max_receive: int, qkey: int
    ) -> verbs.QueuePair:
        assert isinstance(sends, _Queue)
        assert isinstance(receives, _Queue)
        return _Pair(self, "SRD", sends, receives, max_send, max_receive, qkey)

    def destination(self, gid: str, qp: int, qkey: int) -> verbs.Destination:
        return _Destination(self, gid, qp, qkey)

    def events(self) -> list[Event]:
        events, self.pending_events = self.pending_events, []
        return events

    def close(self) -> None:
        assert not self.pairs, "the device is closed before its queue pairs"
        self.closed = True


class Fabric:
    """Joins the cards; ``step`` lets a little happen.

    Attributes
    ----------
    watcher
        Called whenever memory may have changed.
    cut
        Indices of cards that no longer answer.
    no_receives
        Indices of cards that take no messages, as if nobody posted receives.
    """

    def __init__(self, mood: Mood | None = None, seed: int = 0) -> None:
        self.mood = mood or Mood()
        self.random = random.Random(seed)
        self.watcher: Callable[[], None] = lambda: None
        self.cut: set[int] = set()
        self.no_receives: set[int] = set()
        self.pairs: dict[int, _Pair] = {}
        self.queues: list[_Queue] = []
        self.local: dict[int, _Region] = {}
        self.remote: dict[int, _Region] = {}
        self.dmabufs: dict[int, int] = {}
        self.numbers = itertools.count(0x100)
        self.keys = itertools.count(0x1000)
        self.serials = itertools.count()

    def nic(self, index: int, *, srd: bool = False) -> StandinNic:
        return StandinNic(self, index, srd=srd)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return any(pair.work for pair in self.pairs.values()) or any(queue.late or queue.entries for queue in self.queues)

    def step(self) -> bool:
        """Every queue pair may do something. Returns whether anything is still under way."""
        pairs = [pair for pair in self.pairs.values() if pair.work]
        self.random.shuffle(pairs)
        for pair in pairs:
            for _ in range(4):
                if pair.work and self.random.random() >= self.mood.lazy:
                    self._advance(pair)
        for queue in self.queues:
            queue.tick()
        return self.busy

    # ---- one operation
    def _advance(self, pair: _Pair) -> None:
        work = self._choose(pair)
        if work is None:
            return
        peer = self._peer(pair, work)
        if peer is None or pair.nic.index in self.cut or peer.nic.index in self.cut:
            work.retries += 1
            if work.retries > pair.retry.retry_count:
                pair.break_down(work, RETRY)
            return
        if work.pieces is None:
            status = self._refusal(pair, work, peer)
            if status:
                pair.break_down(work, status)
                return
            if work.kind == "send" or work.imm is not None:
                if not peer.waiting or peer.nic.index in self.no_receives:
                    work.retries += 1
                    if work.retries > 50 * (pair.retry.rnr_retry + 1):
                        pair.break_down(work, RNR)
                    return
                work.retries = 0
            work.pieces = self._split(work) if work.kind == "write" else []
        if work.pieces:
            self._land(work, work.pieces.pop(self.random.randrange(len(work.pieces))))
            return
        self._finish(pair, work, peer)

    def _choose(self, pair: _Pair) -> _Work | None:
        """Any operation that may move now."""
        if pair.kind == "SRD":
            return self.random.choice(list(itertools.islice(pair.work, 16)))
        if pair.asleep:
            return None
        free: list[_Work] = []
        before = atomics = 0
        for work in itertools.islice(pair.work, 8):
            if work.ended:
                continue
            plain = (work.kind == "write" and work.imm is None) or work.kind == "inline"
            if (not before) or (self.mood.adaptive and plain and not (work.fenced and atomics)):
                free.append(work)
            pair.asleep = pair.asleep or (self.mood.forgetful and work.fenced and atomics > 0)
            before += 1
            atomics += work.kind == "add"
        return self.random.choice(free) if free else None

    def _peer(self, pair: _Pair, work: _Work) -> _Pair | None:
        if pair.kind == "RC":
            found = self.pairs.get(pair.remote.qp) if pair.remote is not None else None
            if found is not None and (found.remote is None or found.remote.qp != pair.number):
                return None
        else:
            assert work.to is not None
            found = self.pairs.get(work.to.qp)
            if found is not None and found.qkey != work.to.qkey:
                return None
        return found if found is not None and found.state == "RTS" else None

    def _refusal(self, pair: _Pair, work: _Work, peer: _Pair) -> int:
        if work.size > self.mood.max_message:
            return LOC_LEN
        if work.kind != "inline" and work.size:
            source = self.local.get(work.lkey)
            if source is None or source.nic is not pair.nic or source.at(work.local, work.size) is None:
                return LOC_PROT
        if work.kind == "send" or not work.size:
            return 0
        target = self.remote.get(work.rkey)
        if target is None or target.nic is not peer.nic or target.at(work.remote, work.size) is None:
            return REM_ACCESS
        if not target.access & (Access.remote_atomic if work.kind == "add" else Access.remote_write):
            return REM_ACCESS
        return REM_INV_REQ if work.kind == "add" and work.remote % 8 else 0

    def _split(self, work: _Work) -> list[tuple[int, int]]:
        if not work.size:
            return []
        cuts = {0, work.size} | {self.random.randrange(work.size) for _ in range(self.random.randrange(self.mood.pieces))}
        return list(itertools.pairwise(sorted(cuts)))

    def _land(self, work: _Work, piece: tuple[int, int]) -> None:
        source, target = self.local[work.lkey].at(work.local, work.size), self.remote[work.rkey].at(work.remote, work.size)
        assert source is not None
        assert target is not None
        ctypes.memmove(target + piece[0], source + piece[0], piece[1] - piece[0])
        self.watcher()

    def _finish(self, pair: _Pair, work: _Work, peer: _Pair) -> None:
        if work.kind == "add":
            word, answer = self._word(work), self.local[work.lkey].at(work.local, 8)
            assert answer is not None
            ctypes.c_uint64.from_address(answer).value = word.value
            word.value += work.value
        elif work.kind == "inline":
            self._word(work).value = work.value
        elif (work.kind == "send" or work.imm is not None) and not self._deliver(pair, work, peer):
            return
        self.watcher()
        work.ended = True
        if pair.kind == "SRD":
            pair.work.remove(work)
            assert work.signaled, "without order nothing else tells when a request has ended"
            pair.sends.push(Completion(work.wr_id, 0, pair.number, False, 0, None, 0, 0), ordered=False, frees=(pair, 1))
            return
        while pair.work and pair.work[0].ended:  # completions of RC come in order
            first = pair.work.popleft()
            pair.unsignaled += 1
            if first.signaled:
                frees, pair.unsignaled = (pair, pair.unsignaled), 0
                pair.sends.push(Completion(first.wr_id, 0, pair.number, False, 0, None, 0, 0), ordered=True, frees=frees)

    def _word(self, work: _Work) -> ctypes.c_uint64:
        target = self.remote[work.rkey].at(work.remote, 8)
        assert target is not None
        return ctypes.c_uint64.from_address(target)

    def _deliver(self, pair: _Pair, work: _Work, peer: _Pair) -> bool:
        """Consume a receive of the peer."""
        if not peer.waiting:
            work.retries += 1
            if work.retries > 50 * (pair.retry.rnr_retry + 1):
                pair.break_down(work, RNR)
            return False
        wr_id, local, size, lkey = peer.waiting.popleft()
        if work.kind == "send" and work.size:
            source, region = self.local[work.lkey].at(work.local, work.size), self.local.get(lkey)
            target = region.at(local, work.size) if region is not None and work.size <= size else None
            if target is None:
                peer.receives.push(Completion(wr_id, LOC_LEN, peer.number, False, 0, None, 0, 0), ordered=False)
                pair.break_down(work, REM_INV_REQ)
                return False
            assert source is not None
            ctypes.memmove(target, source, work.size)
        arrived = Completion(wr_id, 0, peer.number, True, work.size, work.imm, pair.number, 0)
        peer.receives.push(arrived, ordered=pair.kind == "RC")
        return True


class StandinNetwork(LocalNetwork):
    """Ranks with a card of their own each (``contract.Network``).

    Parameters
    ----------
    open
        Makes a transport of an opened card and a wiring.
    """

    def __init__(
        self,
        open: Callable[[StandinNic, Wiring], Any],
        ranks: int = 3,
        *,
        mood: Mood | None = None,
        heap_bytes: int = 1 << 20,
        seed: int = 0,
        srd: bool = False,
    ) -> None:
        super().__init__(ranks, heap_bytes, seed)
        self.fabric = Fabric(mood, seed)
        self.fabric.watcher = lambda: self.watcher()
        self.transports: list[Any] = []
        try:
            self._open(open, srd)
        except BaseException:
            self.close()
            raise

    def _open(self, open: Callable[[StandinNic, Wiring], Any], srd: bool) -> None:
        for rank in self.ranks:
            wiring = Wiring(
                rank=rank,
                heap_address=self.heaps[rank].address(),
                heap_bytes=self.heaps[rank].size,
                signal_bytes=self.signals[rank].size,
                peers={peer: (0, 0) for peer in self.ranks if peer != rank},
                copier=_no_copier,
                clock_ns=self.clock,
                signal_address=self.signals[rank].address(),
                store=self._store,
                timeout=10.0,
            )
            self.transports.append(open(self.fabric.nic(rank, srd=srd), wiring))
        cards = [transport.card for transport in self.transports]
        for rank, transport in enumerate(self.transports):
            transport.connect(cards)
            self.start(rank, transport)

    def _store(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value
        self.watcher()

    def turn(self) -> bool:
        """Step the engines, then the network."""
        self.clock.now += 1_000
        moved = self.step_engines()
        busy = self.fabric.step()
        return busy or moved or any(engine.next_event_ns() is not None for engine in self.engines)


def _no_copier() -> Any:
    raise AssertionError("these transports copy nothing themselves")
