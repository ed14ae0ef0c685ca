"""What transport rc costs below the compiled engine, over a compiled card that does nothing: printed by ``-s``, because machines differ."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkernel.abi import RING_SLOTS
from mkernel.jit.cpu import find_compiler
from mkernel.proxy.compiled import CompiledEngine
from mkernel.proxy.pace import Pace
from mkernel.proxy.ring import RingReader
from mkernel.transport import compiled_side, verbs
from mkernel.transport.rc import open_transport
from mkernel.transport.striped import Link, StripedTransport
from tests.transport.compiled_bugs import KERNELS
from tests.transport.harness import Producer
from tests.transport.rc_standin import wiring
from tests.transport.standin import Fabric

_CARD = """
#include <sched.h>
#include <time.h>

#include <atomic>

#include "abi.h"
#include "verbs.hpp"
// What asks for a completion has one at the next poll. Queue pairs and queues are told by the number of their card.
struct Queue {
  uint64_t ended[1 << 16];
  unsigned head, tail;
};
static Queue queues[9];
static std::atomic<uint64_t> posted_ns;

static uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}

extern "C" int post_send(void* card, mkproxy::SendRequest* first, mkproxy::SendRequest**) {
  posted_ns.store(now_ns());
  Queue& queue = queues[reinterpret_cast<uint64_t>(card)];
  for (; first; first = first->next) {
    if (first->flags & mkproxy::kSignaled) queue.ended[queue.head++ & 0xFFFF] = first->id;
  }
  return 0;
}

extern "C" int post_receive(void*, mkproxy::ReceiveRequest*, mkproxy::ReceiveRequest**) { return 0; }

extern "C" int poll(void* card, int limit, mkproxy::Completion* found) {
  Queue& queue = queues[reinterpret_cast<uint64_t>(card)];
  int count = 0;
  for (; queue.tail != queue.head && count < limit; ++count) found[count] = {.id = queue.ended[queue.tail++ & 0xFFFF]};
  return count;
}

// In the place of the device: `count` puts, each `pause_ns` after the one before. How long each took to be posted, in ns.
extern "C" void issue(abi::Ring* ring, uint64_t count, uint64_t pause_ns, uint64_t* took) {
  for (uint64_t ticket = 0; ticket < count; ++ticket) {
    const uint64_t ready = now_ns() + pause_ns;
    while (now_ns() < ready) sched_yield();
    abi::Command& command = ring->slots[ticket % abi::kRingSlots];
    command.channel = 0, command.dst_rank = 1, command.bytes = 1 << 18, command.signal_value = ticket + 1;
    const uint64_t begin = now_ns();
    __atomic_store_n(&command.ticket, ticket + 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&ring->completed, __ATOMIC_ACQUIRE) <= ticket) {
    }
    took[ticket] = posted_ns.load() - begin;
  }
}
"""


@contextlib.contextmanager
def idle(folder: Path, cards: int = 0) -> Iterator[tuple[CompiledEngine, Producer, ctypes.CDLL]]:
    """An engine over that card, its ring, and the card. ``cards``: so many of them, over which puts are spread; 0: no spreading."""
    (folder / "card.cpp").write_text(_CARD)
    command = [*find_compiler(), "-std=c++20", "-O2", "-fPIC", "-shared", f"-I{KERNELS / 'proxy'}", f"-I{KERNELS}"]
    subprocess.run([*command, str(folder / "card.cpp"), "-o", str(folder / "card.so")], check=True)
    card = ctypes.CDLL(str(folder / "card.so"))
    functions = [ctypes.cast(getattr(card, name), ctypes.c_void_p).value or 0 for name in ("post_send", "post_receive", "poll")]
    opened = []
    for number in range(1, max(cards, 1) + 1):
        transport = open_transport(Fabric().nic(0), wiring(heap_bytes=1 << 30, signal_bytes=1 << 16), signal="atomic", queue_pairs=4)
        transport.connect([b"", transport.address.replace(b'"1": [[', b'"0": [[')])
        for connection in transport._connections:
            connection.pair.handles = lambda number=number: verbs.Handles(number, number, number, *functions)  # type: ignore[misc]
        opened.append(transport)
    whole = StripedTransport(0, [Link(link, link.name, 1.0) for link in opened]) if cards else opened[0]
    producer = Producer()
    with CompiledEngine(RingReader(producer.buffer), whole, compiled_side("rc", whole)) as engine:
        yield engine, producer, card


@pytest.mark.parametrize(
    ("cards", "kilobytes"), [(0, 256), (2, 512), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 256), (4, 1024)))]
)
def test_cost_per_put(cards: int, kilobytes: int, tmp_path: Path) -> None:
    """Puts of 512 KiB and more are spread."""
    spent, puts, size = 0, 20 * RING_SLOTS, kilobytes << 10
    with idle(tmp_path, cards) as (engine, producer, _):
        pace = Pace(spin_ns=0)
        while producer.head < puts:
            for _ in range(RING_SLOTS):
                channel = producer.head % 4
                assert producer.issue(channel, 1, 0, 0, size, 8 * channel, producer.head + 1) is not None
            begin = time.process_time_ns()
            while producer.completed < producer.head:
                engine.spin(pace, False, 4_000_000)
            spent += time.process_time_ns() - begin
        assert producer.completed == puts
    what = f"{cards} idle cards, {'spread' if kilobytes >= 512 else 'whole'}" if cards else "an idle card"
    print(f"rc compiled, over {what}, {kilobytes} KiB puts in batches: {spent / 1e3 / puts:.3f} us of CPU time per put")


@pytest.mark.slow
@pytest.mark.parametrize("pause_us", [20, 500])
def test_command_to_posted(pause_us: int, tmp_path: Path) -> None:
    """While a call is under way, as its engine's process would run: an engine that spins, and what is rare every 4 ms."""
    puts = 400
    took = (ctypes.c_uint64 * puts)()
    with idle(tmp_path) as (engine, producer, card):
        card.issue.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)
        address = ctypes.addressof(producer.ring)
        device = threading.Thread(target=card.issue, args=(address, puts, pause_us * 1000, ctypes.addressof(took)))
        device.start()
        pace = Pace(spin_ns=1 << 60)
        end = time.monotonic() + 60
        while producer.completed < puts and time.monotonic() < end:
            engine.spin(pace, False, 4_000_000)
        device.join(1)
        assert producer.completed == puts
    times = sorted(took)
    assert times[0] > 0
    text = f"median {times[puts // 2] / 1e3:.2f} us, 99 % {times[puts * 99 // 100] / 1e3:.2f}"
    print(f"rc compiled, over an idle card, a put each {pause_us} us, command to posted: {text}")
