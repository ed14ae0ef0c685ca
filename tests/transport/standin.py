"""Network cards in this process, behind the verbs boundary, that do whatever the standards allow, as late as they allow it.

Bytes are read at the source, and land, piece by piece, when ``Fabric.step`` says so: out of order, split, any time before the operation
completes. On RC queue pairs atomics and messages wait for the operations before them; fenced writes for the atomics before them, and what
is behind a fenced write that waits, waits with it; other writes for nothing, where the network is ``adaptive``. Sends complete in order. On
SRD queue pairs nothing has an order. The cards are in standin_card.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

from mkernel.transport import Wiring
from mkernel.transport.verbs import Access, Completion
from tests.transport.harness import LocalNetwork
from tests.transport.standin_calls import Calls
from tests.transport.standin_card import CardPair, CardQueue, CardRegion, StandinNic, Work

__all__ = ["MOODS", "Fabric", "Mood", "StandinNetwork", "StandinNic"]

REM_ACCESS, REM_INV_REQ, RETRY, RNR, LOC_PROT, LOC_LEN = 10, 9, 12, 13, 4, 1  # ibv_wc_status


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
    max_pairs
        Queue pairs of a card.
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
    max_pairs: int = 1 << 16
    forgetful: bool = False


MOODS = {
    "prompt": Mood(pieces=1, lazy=0.0, adaptive=False, late_completions=0),
    "late": Mood(),
    "split": Mood(pieces=20, lazy=0.1),
    "slow": Mood(lazy=0.9, late_completions=40),
    "short_messages": Mood(max_message=512, max_send=64, max_receive=64),
    "short_queues": Mood(max_send=24, max_receive=48, max_completions=200, lazy=0.6),
}


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
        self.pairs: dict[int, CardPair] = {}
        self.queues: list[CardQueue] = []
        self.local: dict[int, CardRegion] = {}
        self.remote: dict[int, CardRegion] = {}
        self.dmabufs: dict[int, int] = {}
        self.numbers = itertools.count(0x100)
        self.keys = itertools.count(0x1000)
        self.serials = itertools.count()
        self.calls: Calls | None = None  # how compiled engines reach the cards, if they may
        self.posted: list[str] = []  # kinds of all requests, in order

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
    def _advance(self, pair: CardPair) -> None:
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

    def _choose(self, pair: CardPair) -> Work | None:
        """Any operation that may move now."""
        if pair.kind == "SRD":
            return self.random.choice(list(itertools.islice(pair.work, 16)))
        if pair.asleep:
            return None
        free: list[Work] = []
        before = atomics = 0
        for work in itertools.islice(pair.work, 8):
            if work.ended:
                continue
            if work.fenced and atomics:  # it has not begun, and a queue pair begins its requests in order
                pair.asleep = pair.asleep or self.mood.forgetful
                break
            plain = (work.kind == "write" and work.imm is None) or work.kind == "inline"
            if (not before) or (self.mood.adaptive and plain):
                free.append(work)
            before += 1
            atomics += work.kind == "add"
        return self.random.choice(free) if free else None

    def _peer(self, pair: CardPair, work: Work) -> CardPair | None:
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

    def _refusal(self, pair: CardPair, work: Work, peer: CardPair) -> int:
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

    def _split(self, work: Work) -> list[tuple[int, int]]:
        if not work.size:
            return []
        cuts = {0, work.size} | {self.random.randrange(work.size) for _ in range(self.random.randrange(self.mood.pieces))}
        return list(itertools.pairwise(sorted(cuts)))

    def _land(self, work: Work, piece: tuple[int, int]) -> None:
        source, target = self.local[work.lkey].at(work.local, work.size), self.remote[work.rkey].at(work.remote, work.size)
        assert source is not None
        assert target is not None
        ctypes.memmove(target + piece[0], source + piece[0], piece[1] - piece[0])
        self.watcher()

    def _finish(self, pair: CardPair, work: Work, peer: CardPair) -> None:
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

    def _word(self, work: Work) -> ctypes.c_uint64:
        target = self.remote[work.rkey].at(work.remote, 8)
        assert target is not None
        return ctypes.c_uint64.from_address(target)

    def _deliver(self, pair: CardPair, work: Work, peer: CardPair) -> bool:
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
        addresses = [transport.address for transport in self.transports]
        for rank, transport in enumerate(self.transports):
            transport.connect(addresses)
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
