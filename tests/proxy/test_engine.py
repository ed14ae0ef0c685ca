"""The engine: credits, batches, refusals, failures, virtual time; and its thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from mkernel.abi import RING_SLOTS
from mkernel.errors import TransportError
from mkernel.memory.memfd import MemfdSegment
from mkernel.proxy.engine import BATCH, Engine, EngineThread
from mkernel.proxy.ring import RingReader
from mkernel.transport.base import Put, Transport
from mkernel.transport.emulated import EmulatedTransport, Faults
from mkernel.transport.null import NullTransport
from tests.transport.harness import EmulatedNetwork, Producer, VirtualClock


class ScriptedTransport(Transport):
    """Does what the test says; logs what the engine does."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.posted: list[Put] = []
        self.room = 10**9
        self.refused: set[int] = set()  # destinations
        self.to_complete: list[int] = []
        self.closed = 0

    def post(self, put: Put) -> bool:
        self.log.append("post")
        if len(self.posted) >= self.room or put.dst_rank in self.refused:
            return False
        self.posted.append(put)
        return True

    def flush(self) -> None:
        self.log.append("flush")

    def poll(self) -> list[int]:
        self.log.append("poll")
        done, self.to_complete = self.to_complete, []
        return done

    def next_event_ns(self) -> int | None:
        return 7 if self.posted else None

    def close(self) -> None:
        self.closed += 1


def scripted() -> tuple[Engine, ScriptedTransport, Producer]:
    producer, transport = Producer(), ScriptedTransport()
    return Engine(RingReader(producer.buffer), transport, VirtualClock()), transport, producer


def issue(producer: Producer, count: int, dst_rank: int = 1) -> None:
    for _ in range(count):
        assert producer.issue(0, dst_rank, 0, 0, 8, 0, producer.head + 1) is not None


def test_credit_comes_with_completion_not_with_post() -> None:
    engine, transport, producer = scripted()
    issue(producer, 3)
    assert engine.step()
    assert [put.ticket for put in transport.posted] == [0, 1, 2]
    assert producer.completed == 0
    assert not engine.step()
    transport.to_complete = [1]
    assert engine.step()
    assert producer.completed == 0, "put 0 is still in flight"
    transport.to_complete = [0]
    assert engine.step()
    assert producer.completed == 2


def test_one_doorbell_per_batch() -> None:
    engine, transport, producer = scripted()
    issue(producer, BATCH)
    engine.step()
    assert transport.log == ["post"] * BATCH + ["flush", "poll"]
    transport.log.clear()
    engine.step()
    assert transport.log == ["poll"], "no flush without a post"


def test_a_large_backlog_takes_several_steps() -> None:
    engine, transport, producer = scripted()
    issue(producer, 2 * BATCH + 1)
    steps = 0
    while engine.step():
        steps += 1
    assert steps == 3
    assert [put.ticket for put in transport.posted] == list(range(2 * BATCH + 1))


def test_a_refused_put_is_held_and_not_reordered() -> None:
    engine, transport, producer = scripted()
    transport.room = 2
    issue(producer, 5)
    assert engine.step()
    assert not engine.step(), "refused again: nothing moved"
    assert engine.next_event_ns() == 7, "only the transport knows when it will take more"
    transport.room, transport.to_complete = 4, [0]
    assert engine.step()
    transport.room = 100
    issue(producer, 1)
    while engine.step():
        pass
    assert [put.ticket for put in transport.posted] == [0, 1, 2, 3, 4, 5]


def test_a_refused_put_holds_back_its_own_destination_only() -> None:
    engine, transport, producer = scripted()
    transport.refused = {1}
    for rank in (1, 2, 1, 3, 2):
        issue(producer, 1, rank)
    assert engine.step()
    assert [put.ticket for put in transport.posted] == [1, 3, 4]
    assert not engine.step(), "refused again: nothing moved"
    issue(producer, 1, 1)
    issue(producer, 1, 3)
    assert engine.next_event_ns() == 0, "commands wait, whatever is held"
    assert engine.step()
    assert [put.ticket for put in transport.posted] == [1, 3, 4, 6]
    transport.refused, transport.to_complete = set(), [1, 3, 4, 6]
    assert engine.step()
    assert [put.ticket for put in transport.posted if put.dst_rank == 1] == [0, 2, 5], "in order"
    assert producer.completed == 0, "credits are a prefix"


def test_what_is_held_to_many_ranks_keeps_its_order(rng: np.random.Generator) -> None:
    """Puts to five ranks, which are refused at random: those to one rank are posted in order, and in the end all of them."""
    engine, transport, producer = scripted()
    ranks = rng.integers(5, size=3 * RING_SLOTS)
    while len(transport.posted) < len(ranks):
        transport.refused = set(rng.permutation(5)[: rng.integers(5)])
        while producer.head < len(ranks) and producer.head - producer.completed < RING_SLOTS:
            issue(producer, 1, int(ranks[producer.head]))
        before = len(transport.posted)
        engine.step()
        transport.to_complete = [put.ticket for put in transport.posted[before:]]
    for rank in range(5):
        assert [put.ticket for put in transport.posted if put.dst_rank == rank] == np.flatnonzero(ranks == rank).tolist()


def test_arrivals_are_movement() -> None:
    """A receiver that takes part in puts stays awake while they come, whether or not it sends."""
    engine, transport, _ = scripted()
    assert not engine.step()
    transport.arrived += 3
    assert engine.step()
    assert not engine.step()


def test_next_event() -> None:
    engine, transport, producer = scripted()
    assert engine.next_event_ns() is None
    issue(producer, 1)
    assert engine.next_event_ns() == 0, "a command waits"
    engine.step()
    assert engine.next_event_ns() == 7
    transport.posted.clear()
    assert engine.next_event_ns() is None


def test_close_twice_closes_the_transport_once() -> None:
    engine, transport, producer = scripted()
    issue(producer, 1)
    with engine:
        engine.step()
    engine.close()
    assert transport.closed == 1
    assert engine.next_event_ns() is None
    assert not engine.step()


def _raise(error: Exception) -> Callable[..., bool]:
    def fail(*_: object) -> bool:
        raise error

    return fail


def test_any_failure_of_a_post_becomes_a_transport_error_with_peer() -> None:
    engine, transport, producer = scripted()
    issue(producer, 1, dst_rank=5)
    cause = OSError(5, "device gone")
    transport.post = _raise(cause)  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=r"put 0 to rank 5.*device gone") as caught:
        engine.step()
    assert (caught.value.peer, caught.value.op, caught.value.status) == (5, "put_signal", "OSError")
    assert caught.value.__cause__ is cause


def test_a_put_that_fails_when_it_is_offered_again_is_named() -> None:
    engine, transport, producer = scripted()
    transport.refused = {5}
    issue(producer, 1, dst_rank=5)
    engine.step()
    transport.post = _raise(OSError(5, "device gone"))  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=r"put 0 to rank 5.*device gone"):
        engine.step()


def test_any_failure_of_a_poll_becomes_a_transport_error() -> None:
    engine, transport, _ = scripted()
    transport.poll = _raise(RuntimeError("queue overrun"))  # type: ignore[assignment]
    with pytest.raises(TransportError, match="queue overrun") as caught:
        engine.step()
    assert (caught.value.peer, caught.value.op) == (None, "poll")


def test_a_failed_engine_stays_failed_and_gives_no_credit() -> None:
    engine, transport, producer = scripted()
    issue(producer, 2)
    engine.step()
    own = TransportError("link down", peer=3, op="put_signal", status="12")
    transport.poll = _raise(own)  # type: ignore[assignment]
    with pytest.raises(TransportError) as first:
        engine.step()
    assert first.value is own, "a transport's own error keeps its peer and status"
    transport.poll = lambda: [0, 1]  # type: ignore[method-assign]
    with pytest.raises(TransportError) as second:
        engine.step()
    assert second.value is own
    assert producer.completed == 0
    assert engine.next_event_ns() is None
    engine.close()
    assert transport.closed == 1


def test_injected_failure_reaches_the_caller_with_its_peer() -> None:
    with EmulatedNetwork(3, faults=Faults(fail_completion=4)) as network:
        for number in range(8):
            network.producers[0].issue(0, 2, 0, 0, 8, network.flag_offset(0), number + 1)
        with pytest.raises(TransportError) as caught:
            network.settle()
        assert caught.value.peer == 2
        assert network.flag(2, 0) == 4, "no signal of the failed put or a later one"


@pytest.mark.parametrize("size", [4096, 65536])
def test_bandwidth_through_the_whole_engine(size: int) -> None:
    count, gigabytes_per_second, latency_us = 1000, 50.0, 5.0
    with EmulatedNetwork(2, gigabytes_per_second=gigabytes_per_second, latency_us=latency_us) as network:
        start = network.clock.now
        for number in range(count):
            assert network.producers[0].issue(0, 1, 0, 0, size, network.flag_offset(0), number + 1) is not None
        network.settle()
        assert network.flag(1, 0) == count
        assert network.clock.now - start == pytest.approx(count * size / gigabytes_per_second + latency_us * 1e3, abs=2)


# ---- the thread


class MoveCopier:
    def start(self, dst: int, src: int, size: int) -> None:
        ctypes.memmove(dst, src, size)

    def done(self, token: object) -> bool:
        return True

    def signal(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def close(self) -> None:
        pass


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0002)
    return True


def no_error(error: TransportError) -> None:
    raise AssertionError("unexpected failure") from error


def test_two_ranks_exchange_through_their_threads() -> None:
    size, count, window = 64 * 1024, 1500, 32
    with contextlib.ExitStack() as stack:
        heaps = [stack.enter_context(MemfdSegment(2 * window * size, 0, 1)) for _ in range(2)]
        signals = [stack.enter_context(MemfdSegment(4096, 0, 1)) for _ in range(2)]
        producers = [Producer(), Producer()]
        threads = []
        for rank in range(2):
            peers = {1 - rank: (heaps[1 - rank].address(), signals[1 - rank].address())}
            transport = EmulatedTransport(rank, heaps[rank].address(), peers, MoveCopier(), time.monotonic_ns)
            engine = Engine(RingReader(producers[rank].buffer), transport)
            threads.append(stack.enter_context(EngineThread(engine, no_error)))
        begin = time.monotonic()
        for number in range(count):
            for rank, producer in enumerate(producers):
                assert wait_until(lambda producer=producer: producer.head - producer.completed < window)
                source = number % window * size
                ctypes.memmove(heaps[rank].address() + source, number.to_bytes(8, "little") * 4, 32)
                assert producer.issue(0, 1 - rank, source, (window + number % window) * size, size, 0, number + 1) == number
        flags = [ctypes.c_uint64.from_address(signal.address()) for signal in signals]
        assert wait_until(lambda: all(flag.value == count for flag in flags))
        assert time.monotonic() - begin >= count * size / 50e9, "faster than the link"
        for heap in heaps:
            for number in range(count - window, count):
                here = ctypes.string_at(heap.address() + (window + number % window) * size, 32)
                assert here == number.to_bytes(8, "little") * 4
        for thread in threads:
            thread.close()
            thread.close()
            assert not thread.running


def test_the_thread_reports_a_failure_once_and_stops() -> None:
    errors: list[tuple[TransportError, threading.Thread]] = []
    producer = Producer()
    clock = time.monotonic_ns
    transport = EmulatedTransport(0, 0, {1: (0, 0)}, MoveCopier(), clock, faults=Faults(fail_completion=0))
    thread = EngineThread(Engine(RingReader(producer.buffer), transport, clock), lambda e: errors.append((e, threading.current_thread())))
    with thread:
        producer.issue(0, 1, 0, 0, 0, 0, 1)
        assert wait_until(lambda: not thread.running)
    assert len(errors) == 1
    error, where = errors[0]
    assert error.peer == 1
    assert where is not threading.current_thread()
    assert producer.completed == 0


def test_the_thread_may_be_closed_from_its_own_callback() -> None:
    producer = Producer()
    transport = ScriptedTransport()
    transport.poll = _raise(RuntimeError("boom"))  # type: ignore[assignment]
    closed = threading.Event()

    def on_error(error: TransportError) -> None:
        thread.close()
        closed.set()

    thread = EngineThread(Engine(RingReader(producer.buffer), transport), on_error)
    thread.start()
    assert closed.wait(10)
    thread.close()
    assert transport.closed == 1


def test_an_idle_thread_sleeps_and_still_reacts() -> None:
    producer = Producer()
    with EngineThread(Engine(RingReader(producer.buffer), NullTransport()), no_error) as thread:
        time.sleep(0.1)  # it is idle by now
        cpu = _cpu_seconds(thread)
        time.sleep(0.5)
        assert _cpu_seconds(thread) - cpu < 0.25, "an idle engine must not burn a core"
        producer.issue(0, 1, 0, 0, 0, 0, 1)
        assert wait_until(lambda: producer.completed == 1)
        thread.wake()
        producer.issue(0, 1, 0, 0, 0, 0, 2)
        assert wait_until(lambda: producer.completed == 2)


def _cpu_seconds(thread: EngineThread) -> float:
    ident = thread._thread.ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def test_closing_a_thread_that_never_started() -> None:
    transport = ScriptedTransport()
    EngineThread(Engine(RingReader(Producer().buffer), transport), no_error).close()
    assert transport.closed == 1


@pytest.mark.parametrize("burst", [1, RING_SLOTS], ids=["alone", "batched"])
def test_cost_per_put(burst: int) -> None:
    """Prints the engine's own cost (``-s``); asserts only that the work was done, because machines differ."""
    producer = Producer()
    engine = Engine(RingReader(producer.buffer), NullTransport())
    spent, puts = 0, 20 * RING_SLOTS
    while producer.head < puts:
        for _ in range(burst):
            assert producer.issue(producer.head % 4, 1, 0, 0, 1 << 18, 1024, producer.head + 1) is not None
        begin = time.perf_counter_ns()
        while producer.completed < producer.head:
            engine.step()
        spent += time.perf_counter_ns() - begin
    assert producer.completed == puts
    per_put = spent / 1e3 / puts
    print(f"engine, null transport, 256 KiB puts: {per_put:.2f} us per put = at most {(1 << 18) / per_put / 1e3:.0f} GB/s")
