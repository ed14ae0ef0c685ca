"""What transport srd costs, sending and receiving, over cards that do nothing: printed by ``-s``, because machines differ."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkernel.abi import RING_SLOTS
from mkernel.jit.cpu import find_compiler
from mkernel.proxy.compiled import CompiledEngine
from mkernel.proxy.engine import Engine
from mkernel.proxy.pace import Pace
from mkernel.proxy.ring import RingReader
from mkernel.transport import verbs
from mkernel.transport.counting import imm
from mkernel.transport.srd import _MESSAGE, _SLOT, UPDATE, SrdTransport, open_transport
from mkernel.transport.srd_compiled import SrdSide
from tests.transport.compiled_bugs import KERNELS
from tests.transport.harness import Producer
from tests.transport.rc_standin import wiring
from tests.transport.standin import Fabric

BYTES = 1 << 18  # of a put
CHANNELS = 4
FLAGS = 64  # bytes of the signal segment
PUTS = 20 * RING_SLOTS

# Every request has completed at the next poll, and the peer gives credits back by updates. `feed` makes the peer send puts.
_CARD = """
#include <arpa/inet.h>

#include <cstring>
#include <deque>

#include "srd.hpp"
using namespace mkproxy;

namespace mkproxy {
uint64_t now_ns() { return 0; }
}

static ExtendedPair self;
static std::deque<uint64_t> begun, ended;
static std::deque<std::pair<uint64_t, uint64_t>> receives;  // id, address
static uint64_t credits, sent, released, told, fed, to_feed, half;

static void start(ExtendedPair*) {}
static void write_imm(ExtendedPair* pair, uint32_t, uint64_t, uint32_t) { begun.push_back(pair->id); }
static void send(ExtendedPair* pair) { begun.push_back(pair->id); }
static void set_route(ExtendedPair*, void*, uint32_t, uint32_t) {}
static void set_entry(ExtendedPair*, uint32_t, uint64_t address, uint32_t bytes) {
  if (bytes == sizeof(Message) && reinterpret_cast<const Message*>(address)->writes == kUpdate) return;
  ++sent;
  released += bytes == sizeof(Message);
}
static int complete(ExtendedPair*) {
  ended.insert(ended.end(), begun.begin(), begun.end());
  begun.clear();
  return 0;
}

static Completion arrival(const Message* message, uint32_t imm) {
  const auto [id, address] = receives.front();
  receives.pop_front();
  if (message != nullptr) std::memcpy(reinterpret_cast<void*>(address), message, sizeof *message);
  Completion found{};
  found.id = id, found.bytes = sizeof *message, found.imm = imm, found.flags = message == nullptr ? kWithImm : 0;
  return found;
}

extern "C" void* open_card(uint64_t peers_credits) {
  begun.clear(), ended.clear(), receives.clear();
  credits = peers_credits, sent = released = told = fed = to_feed = half = 0;
  self.start = start, self.write_imm = write_imm, self.send = send;
  self.set_route = set_route, self.set_entry = set_entry, self.complete = complete;
  return &self;
}

extern "C" void feed(uint64_t puts) { to_feed += puts; }

extern "C" int post_receive(void*, ReceiveRequest* first, ReceiveRequest**) {
  for (; first != nullptr; first = first->next) receives.emplace_back(first->id, first->entries->address);
  return 0;
}

extern "C" void add_receive(uint64_t id, uint64_t address) { receives.emplace_back(id, address); }

extern "C" int poll(void* queue, int limit, Completion* found) {
  int count = 0;
  if (queue == &self) {
    for (; !ended.empty() && count < limit; ++count) {
      found[count] = {};
      found[count].id = ended.front();
      ended.pop_front();
    }
    return count;
  }
  if (sent - told >= credits / 4) {
    const Message update{0, 0, kUpdate, 0, 0, credits + sent, released};
    told = sent;
    found[count++] = arrival(&update, 0);
  }
  while (fed < to_feed && count < limit && !receives.empty()) {
    const uint32_t channel = fed % 4, sequence = fed / 4 % kSequences;
    Message put{static_cast<uint16_t>(channel), static_cast<uint16_t>(sequence), 1, 8 * channel, fed / 4 + 1, 0, 0};
    put.granted = credits + sent, put.released = released;
    found[count++] = half == 0 ? arrival(nullptr, htonl(channel << kSequenceBits | sequence)) : arrival(&put, 0);
    fed += half;
    half ^= 1;
  }
  return count;
}
"""


class Card:
    """A card of either kind: ``transport`` is connected over it, and ``engine`` runs."""

    transport: SrdTransport
    engine: Engine
    feed: Callable[[int], object]

    def __init__(self) -> None:
        self.signals = (ctypes.c_uint64 * (FLAGS // 8))()
        self.producer = Producer()
        where = {"heap_bytes": 1 << 30, "signal_bytes": FLAGS, "signal_address": ctypes.addressof(self.signals)}
        nic = Fabric().nic(0, srd=True)
        self.prepare(nic)
        self.transport = open_transport(nic, wiring(**where, store=self.store))
        self.transport.connect([b"", self.transport.address.replace(b'"1": [', b'"0": [')])

    def prepare(self, nic: Any) -> None: ...

    def store(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value


class CompiledCard(Card):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        (folder / "card.cpp").write_text(_CARD)
        command = [*find_compiler(), "-std=c++20", "-O2", "-fPIC", "-shared", f"-I{KERNELS / 'proxy'}", f"-I{KERNELS}"]
        subprocess.run([*command, str(folder / "card.cpp"), "-o", str(folder / "card.so")], check=True)
        card = ctypes.CDLL(str(folder / "card.so"))
        card.open_card.restype, card.open_card.argtypes = ctypes.c_void_p, (ctypes.c_uint64,)
        card.add_receive.argtypes, card.feed.argtypes = (ctypes.c_uint64, ctypes.c_uint64), (ctypes.c_uint64,)
        (peer,) = self.transport._peers
        pair = card.open_card(peer.credits)
        functions = [ctypes.cast(getattr(card, name), ctypes.c_void_p).value or 0 for name in ("post_receive", "poll")]
        peer.pair.handles = lambda: verbs.Handles(pair, pair, 1, 1, *functions)  # type: ignore[method-assign]
        assert peer.destination is not None
        peer.destination.route = lambda near: 1  # type: ignore[method-assign]
        first = ctypes.addressof(self.transport._slots) + len(self.transport._slots)
        for slot in range(self.transport._receives):
            card.add_receive(slot, first - _SLOT * (1 + slot))
        self.feed = card.feed
        self.engine = CompiledEngine(RingReader(self.producer.buffer), self.transport, SrdSide(self.transport))


class PythonCard(Card):
    """The same behind the verbs boundary."""

    def __init__(self, folder: Path) -> None:
        self.ended: list[verbs.Completion] = []
        self.receives: deque[int] = deque()
        self.sent = self.released = self.told = self.fed = self.to_feed = self.half = 0
        super().__init__()
        self.engine = Engine(RingReader(self.producer.buffer), self.transport)

    def prepare(self, nic: Any) -> None:
        polls = iter((self.poll_sends, self.poll_arrivals))

        def completion_queue(capacity: int) -> verbs.CompletionQueue:
            queue: verbs.CompletionQueue = plain(capacity)
            queue.poll = next(polls)  # type: ignore[method-assign]
            return queue

        def srd_pair(*args: Any, **more: Any) -> verbs.QueuePair:
            pair: verbs.QueuePair = plain_pair(*args, **more)
            for name in ("write", "send", "commit", "receive"):
                setattr(pair, name, getattr(self, name))
            return pair

        plain, plain_pair = nic.completion_queue, nic.srd_pair
        nic.completion_queue, nic.srd_pair = completion_queue, srd_pair

    def feed(self, puts: int) -> None:
        self.to_feed += puts

    def write(self, wr_id: int, *args: Any, **more: Any) -> None:
        self.sent += 1
        self.ended.append(verbs.Completion(wr_id, 0, 1, False, 0, None, 0, 0))

    def send(self, wr_id: int, *args: Any, **more: Any) -> None:
        self.ended.append(verbs.Completion(wr_id, 0, 1, False, 0, None, 0, 0))
        if wr_id != self.transport._depth - 1:
            self.sent += 1
            self.released += 1

    def commit(self) -> None: ...

    def receive(self, wr_id: int, *args: Any) -> None:
        self.receives.append(wr_id)

    def poll_sends(self, limit: int) -> list[verbs.Completion]:
        found = self.ended[:limit]
        del self.ended[:limit]
        return found

    def arrival(self, words: tuple[int, ...] | None, imm: int | None) -> verbs.Completion:
        slot, transport = self.receives.popleft(), self.transport
        if words is not None:
            _MESSAGE.pack_into(transport._slots, len(transport._slots) - _SLOT * (1 + slot), *words)
        return verbs.Completion(slot, 0, 1, True, _MESSAGE.size, imm, 1, 0)

    def poll_arrivals(self, limit: int) -> list[verbs.Completion]:
        found: list[verbs.Completion] = []
        credits = self.transport._peers[0].credits
        counts = credits + self.sent, self.released
        if self.sent - self.told >= credits // 4:
            self.told = self.sent
            found.append(self.arrival((0, 0, UPDATE, 0, 0, *counts), None))
        while self.fed < self.to_feed and len(found) < limit and self.receives:
            channel, sequence = self.fed % CHANNELS, self.fed // CHANNELS % 65536
            put = (channel, sequence, 1, 8 * channel, self.fed // CHANNELS + 1, *counts)
            found.append(self.arrival(put, None) if self.half else self.arrival(None, imm(channel, sequence)))
            self.fed += self.half
            self.half ^= 1
        return found


CARDS: dict[str, type[Card]] = {"python": PythonCard, "compiled": CompiledCard}


def spent(card: Card, done: Callable[[], bool]) -> int:
    """Nanoseconds of CPU time until then."""
    pace, begin = Pace(spin_ns=0), time.process_time_ns()
    while not done():
        card.engine.spin(pace, False, 4_000_000)
    return time.process_time_ns() - begin


BOTH = [pytest.param("python", marks=pytest.mark.slow), "compiled"]


@pytest.mark.parametrize("kind", BOTH)
def test_cost_per_put(kind: str, tmp_path: Path) -> None:
    card, total = CARDS[kind](tmp_path), 0  # type: ignore[call-arg]
    producer = card.producer
    with card.engine:
        while producer.head < PUTS:
            for _ in range(RING_SLOTS):
                channel = producer.head % CHANNELS
                assert producer.issue(channel, 1, 0, 0, BYTES, 8 * channel, producer.head + 1) is not None
            total += spent(card, lambda: producer.completed == producer.head)
        assert producer.completed == PUTS
    print(f"srd {kind}, over an idle card, 256 KiB puts in batches: {total / 1e3 / PUTS:.3f} us of CPU time per put")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CARDS)
def test_cost_per_arrival(kind: str, tmp_path: Path) -> None:
    card, total = CARDS[kind](tmp_path), 0  # type: ignore[call-arg]
    last = card.signals
    with card.engine:
        for lap in range(1, PUTS // RING_SLOTS + 1):
            card.feed(RING_SLOTS)
            total += spent(card, lambda lap=lap: last[CHANNELS - 1] == lap * RING_SLOTS // CHANNELS)  # type: ignore[misc]
        assert list(last)[:CHANNELS] == [PUTS // CHANNELS] * CHANNELS
    print(f"srd {kind}, over an idle card, puts of one write: {total / 1e3 / PUTS:.3f} us of CPU time per put that comes")
