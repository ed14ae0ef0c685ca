"""The consumer's side of the command ring."""

from __future__ import annotations

import ctypes
import random

import pytest

from mkernel.abi import RING_SLOTS, Ring
from mkernel.proxy.ring import RING_BYTES, LaunchCount, RingReader, destination
from mkernel.transport.base import Put
from tests.transport.harness import Producer


def issue(producer: Producer, count: int = 1) -> None:
    for _ in range(count):
        n = producer.head
        assert producer.issue(n % 7, n % 5, n + 1, n + 2, n + 3, n + 4, n + 5) == n


def expected(n: int) -> Put:
    return Put(n, n % 7, n % 5, n + 1, n + 2, n + 3, n + 4, n + 5)


def test_take_returns_commands_in_order_and_once() -> None:
    producer = Producer()
    reader = RingReader(producer.buffer)
    assert not reader.waiting()
    assert reader.take() == []
    issue(producer, 5)
    assert reader.waiting()
    assert reader.take(2) == [expected(0), expected(1)]
    assert reader.take() == [expected(2), expected(3), expected(4)]
    assert reader.take() == []
    assert not reader.waiting()
    assert (reader.taken, reader.completed, reader.in_flight) == (5, 0, 5)


def test_where_a_command_goes() -> None:
    producer = Producer()
    ring = ctypes.addressof(producer.ring)
    assert destination(ring, 0) is None
    issue(producer, 4)
    assert [destination(ring, ticket) for ticket in range(5)] == [0, 1, 2, 3, None]
    producer.ring.completed = RING_SLOTS
    issue(producer, RING_SLOTS)
    assert destination(ring, 2) is None, "its slot holds a later command"


def test_launches_are_followed() -> None:
    producer = Producer()
    reader, host = RingReader(producer.buffer), LaunchCount(ctypes.addressof(producer.ring))
    assert not reader.launching
    assert not reader.captured
    first, second = host.launch(), host.launch()
    assert reader.launching
    producer.ring.ended = first
    assert reader.launching, "the second has not ended"
    producer.ring.ended = second
    assert not reader.launching
    host.capture()
    assert reader.captured
    host._number = 2**32 - 1
    assert host.launch() == 1, "0 counts nothing, and a kernel's number has 32 bits"


def test_every_field_survives_its_whole_range() -> None:
    producer = Producer()
    top32, top64 = 2**32 - 1, 2**64 - 1
    producer.issue(top32, top32, top64, top64 - 1, top64 - 2, top64 - 3, top64 - 4)
    assert RingReader(producer.buffer).take() == [Put(0, top32, top32, top64, top64 - 1, top64 - 2, top64 - 3, top64 - 4)]


def test_a_gap_stops_take() -> None:
    """Producers publish out of order: a later ticket may be there before an earlier one."""
    producer = Producer()
    reader = RingReader(producer.buffer)
    issue(producer, 3)
    producer.ring.slots[1].ticket = 0
    assert reader.take() == [expected(0)]
    assert not reader.waiting()
    producer.ring.slots[1].ticket = 2
    assert reader.take() == [expected(1), expected(2)]


def test_an_old_lap_is_not_taken_again() -> None:
    producer = Producer()
    reader = RingReader(producer.buffer)
    issue(producer, RING_SLOTS)
    assert len(reader.take(2 * RING_SLOTS)) == RING_SLOTS
    assert reader.take() == []
    reader.complete_all(range(RING_SLOTS))
    assert reader.take() == []
    issue(producer)
    assert reader.take() == [expected(RING_SLOTS)]


def test_completed_is_the_prefix() -> None:
    producer = Producer()
    reader = RingReader(producer.buffer)
    issue(producer, 6)
    reader.take()
    published = []
    for ticket in (3, 1, 0, 5, 2, 4):
        reader.complete(ticket)
        published.append(producer.completed)
    assert published == [0, 0, 2, 2, 4, 6]
    assert reader.in_flight == 0


def test_any_order_of_completion_over_many_laps() -> None:
    rng = random.Random(1)
    producer = Producer()
    reader = RingReader(producer.buffer)
    open_tickets: list[int] = []
    done: set[int] = set()
    while producer.head < 20 * RING_SLOTS:
        free = RING_SLOTS - (producer.head - producer.completed)
        issue(producer, rng.randint(0, free))
        while taken := reader.take(rng.randint(1, 300)):
            assert all(put == expected(put.ticket) for put in taken)
            open_tickets += [put.ticket for put in taken]
        rng.shuffle(open_tickets)
        some = rng.randint(0, len(open_tickets))
        reader.complete_all(open_tickets[:some])
        done.update(open_tickets[:some])
        open_tickets = open_tickets[some:]
        prefix = next((n for n in range(producer.completed, producer.head) if n not in done), producer.head)
        assert producer.completed == prefix
        assert reader.in_flight == len(open_tickets)


@pytest.mark.parametrize("ticket", [-1, 0, 1, 3, 5, 10**6])
def test_wrong_tickets_are_refused(ticket: int) -> None:
    producer = Producer()
    reader = RingReader(producer.buffer)
    issue(producer, 4)
    reader.take(3)
    reader.complete_all((0, 1))
    with pytest.raises(ValueError, match="in flight"):
        reader.complete(ticket)
    assert producer.completed == 2


def test_a_ticket_out_of_order_is_refused_twice() -> None:
    producer = Producer()
    reader = RingReader(producer.buffer)
    issue(producer, 4)
    reader.take()
    reader.complete(2)
    with pytest.raises(ValueError, match="ticket 2"):
        reader.complete(2)


def test_a_ring_by_address() -> None:
    producer = Producer()
    reader = RingReader(ctypes.addressof(producer.ring))
    issue(producer)
    assert reader.take() == [expected(0)]
    reader.complete(0)
    assert producer.completed == 1


def test_given_load_and_store_do_every_shared_access() -> None:
    producer = Producer()
    base = ctypes.addressof(producer.ring)
    loads, stores = [], []

    def load(address: int) -> int:
        loads.append(address - base)
        return ctypes.c_uint64.from_address(address).value

    def store(address: int, value: int) -> None:
        stores.append((address - base, value))
        ctypes.c_uint64.from_address(address).value = value

    reader = RingReader(producer.buffer, load=load, store=store)
    issue(producer, 2)
    reader.take()
    reader.complete_all((1, 0))
    assert loads == [Ring.slots.offset, Ring.slots.offset + 64, Ring.slots.offset + 128]
    assert stores == [(0, 2)], "one store for a batch"


def test_bad_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        RingReader(bytearray(RING_BYTES - 1))
    with pytest.raises(ValueError, match="aligned"):
        RingReader(memoryview(bytearray(RING_BYTES + 8))[1 : RING_BYTES + 1])


def test_close_lets_go_of_the_memory() -> None:
    buffer = bytearray(RING_BYTES)
    reader = RingReader(buffer)
    with pytest.raises(BufferError):
        buffer.clear()
    reader.close()
    buffer.clear()
