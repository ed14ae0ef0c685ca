"""The cards of the stand-in network (standin.py): regions, queues and queue pairs that check how a transport uses them.

A queue is exactly as deep as was asked for, and overrunning one is an error. Nothing moves here: the fabric carries posted work.
"""

from __future__ import annotations

import dataclasses
import errno
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mkernel.transport import verbs
from mkernel.transport.verbs import FLUSHED, Completion, Event, Limits, Port, Remote, RetryPolicy, VerbsError

if TYPE_CHECKING:
    from tests.transport.standin import Fabric

__all__ = ["CardPair", "CardQueue", "CardRegion", "StandinNic", "Work"]


class CardRegion(verbs.Region):
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
class Work:
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
    to: CardDestination | None = None
    pieces: list[tuple[int, int]] | None = None  # what has not landed yet; None: not begun
    retries: int = 0
    ended: bool = False
    serial: int = 0


class CardDestination(verbs.Destination):
    def __init__(self, nic: StandinNic, gid: str, qp: int, qkey: int) -> None:
        self.nic, self.gid, self.qp, self.qkey = nic, gid, qp, qkey
        self.closed = False

    def route(self, pair: verbs.Handles) -> int | None:
        return None if self.nic.fabric.calls is None else self.nic.fabric.calls.datagrams.route(self)

    def close(self) -> None:
        self.closed = True


class CardQueue(verbs.CompletionQueue):
    def __init__(self, nic: StandinNic, capacity: int) -> None:
        self.nic, self.capacity = nic, capacity
        self.entries: deque[tuple[Completion, CardPair | None, int]] = deque()
        self.late: list[tuple[int, Completion, CardPair | None, int]] = []  # steps until visible first
        self.closed = False

    def push(self, completion: Completion, *, ordered: bool, frees: tuple[CardPair | None, int] = (None, 0)) -> None:
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


class CardPair(verbs.QueuePair):
    def __init__(
        self, nic: StandinNic, kind: str, sends: CardQueue, receives: CardQueue, max_send: int, max_receive: int, qkey: int = 0
    ) -> None:
        limits = nic.limits
        if max_send > limits.max_send or max_receive > limits.max_receive:
            raise VerbsError(f"creating an {kind} queue pair", errno.EINVAL)
        self.nic, self.kind, self.sends, self.receives, self.qkey = nic, kind, sends, receives, qkey
        self.max_send, self.max_receive = max_send, max_receive
        self.number = next(nic.fabric.numbers)
        self.state = "RTS" if kind == "SRD" else "RESET"
        self.remote: Remote | None = None
        self.retry = RetryPolicy()
        self.batch: list[Work] = []
        self.work: deque[Work] = deque()  # posted, oldest first
        self.occupied = 0  # entries of the send queue: given back when a completion (RC: of this or a later request) is polled
        self.asleep = False  # until the next doorbell
        self.unsignaled = 0  # ended since the last that has a completion
        self.waiting: deque[tuple[int, int, int, int]] = deque()  # receives
        nic.pairs[self.number] = self
        nic.fabric.pairs[self.number] = self

    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        assert self.kind == "RC"
        assert self.state == "RESET"
        assert mtu in range(1, 6)  # ibv_mtu
        self.remote, self.retry, self.state = remote, retry, "RTS"

    def _post(self, work: Work) -> None:
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
        assert to is None or isinstance(to, CardDestination)
        self._post(Work("write", wr_id, local, size, lkey, remote, rkey, signaled, imm, to=to))

    def write_inline(self, wr_id: int, value: int, remote: int, rkey: int, *, signaled: bool, fenced: bool = False) -> None:
        self._post(Work("inline", wr_id, 0, 8, 0, remote, rkey, signaled, value=value, fenced=fenced))

    def fetch_add(self, wr_id: int, local: int, lkey: int, remote: int, rkey: int, value: int, *, signaled: bool) -> None:
        assert self.nic.limits.atomics
        self._post(Work("add", wr_id, local, 8, lkey, remote, rkey, signaled, value=value))

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
        assert to is None or isinstance(to, CardDestination)
        self._post(Work("send", wr_id, local, size, lkey, 0, 0, signaled, imm, to=to))

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
            self.nic.fabric.posted.append(work.kind)
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

    def break_down(self, work: Work, status: int) -> None:
        """An operation failed; on RC that is the end of the queue pair."""
        work.ended = True
        frees = (None, 0) if self.kind == "RC" else (self, 1)
        self.sends.push(Completion(work.wr_id, status, self.number, False, 0, None, 0, 0x81), ordered=self.kind == "RC", frees=frees)
        if self.kind == "RC":
            self.fail()
        else:
            self.work.remove(work)

    def handles(self) -> verbs.Handles | None:
        return None if self.nic.fabric.calls is None else self.nic.fabric.calls.handles(self)

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
            max_pairs=mood.max_pairs,
        )
        self.up = True  # the port
        self.pairs: dict[int, CardPair] = {}
        self.pending_events: list[Event] = []
        self.closed = False

    def register(self, address: int, size: int, access: int) -> verbs.Region:
        return self._region(address, address, size, access)

    def register_dmabuf(self, fd: int, size: int, access: int) -> verbs.Region:
        """``fd`` stands for memory: whatever the test gave ``Fabric.dmabufs`` for it."""
        return self._region(0, self.fabric.dmabufs[fd], size, access)

    def _region(self, address: int, base: int, size: int, access: int) -> CardRegion:
        fabric = self.fabric
        region = CardRegion(self, address, base, size, access, next(fabric.keys))
        fabric.local[region.lkey] = fabric.remote[region.rkey] = region
        return region

    def completion_queue(self, capacity: int) -> verbs.CompletionQueue:
        if not 0 < capacity <= self.limits.max_completions:
            raise VerbsError("creating a completion queue", errno.EINVAL)
        queue = CardQueue(self, capacity)
        self.fabric.queues.append(queue)
        return queue

    def rc_pair(self, sends: verbs.CompletionQueue, receives: verbs.CompletionQueue, *, max_send: int, max_receive: int) -> verbs.QueuePair:
        assert isinstance(sends, CardQueue)
        assert isinstance(receives, CardQueue)
        return CardPair(self, "RC", sends, receives, max_send, max_receive)

    def srd_pair(
        self, sends: verbs.CompletionQueue, receives: verbs.CompletionQueue, *, max_send: int, max_receive: int, qkey: int
    ) -> verbs.QueuePair:
        assert isinstance(sends, CardQueue)
        assert isinstance(receives, CardQueue)
        return CardPair(self, "SRD", sends, receives, max_send, max_receive, qkey)

    def destination(self, gid: str, qp: int, qkey: int) -> verbs.Destination:
        return CardDestination(self, gid, qp, qkey)

    def active(self) -> bool:
        return self.up

    def events(self) -> list[Event]:
        events, self.pending_events = self.pending_events, []
        return events

    def close(self) -> None:
        assert not self.pairs, "the device is closed before its queue pairs"
        self.closed = True
