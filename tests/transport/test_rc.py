"""Transport rc over cards of this process that do everything late, split and out of order; planted bugs must fail the contract."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mkernel.abi import RING_SLOTS
from mkernel.errors import TransportError
from mkernel.proxy.engine import Engine
from mkernel.proxy.ring import RingReader
from mkernel.transport import verbs
from mkernel.transport.base import Put
from mkernel.transport.rc import RcTransport, _Pending, open_transport
from tests.transport.contract import CHECKS, check_signal_never_before_data
from tests.transport.harness import Producer
from tests.transport.rc_bugs import BUGS, FlagsDoNotWaitForThemselves
from tests.transport.rc_standin import opener, wiring
from tests.transport.standin import MOODS, Fabric, Mood, StandinNetwork


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("signal", ["atomic", "imm"])
@pytest.mark.drawn(8)
def test_contract(signal: str, mood: str, check: str, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed")
    with StandinNetwork(opener(signal), mood=MOODS[mood], seed=seed) as network:
        CHECKS[check](network)


@pytest.mark.parametrize("check", CHECKS)
def test_contract_with_plain_writes_where_nothing_overtakes(check: str) -> None:
    with StandinNetwork(opener("write"), mood=MOODS["prompt"]) as network:
        CHECKS[check](network)


def test_plain_writes_break_the_contract_where_routing_is_adaptive() -> None:
    """Why atomics are the default."""
    with StandinNetwork(opener("write")) as network, pytest.raises(AssertionError, match=r"visible before|went back"):
        check_signal_never_before_data(network)


@pytest.mark.parametrize("queue_pairs", [1, 3, 5])
def test_any_number_of_queue_pairs(queue_pairs: int) -> None:
    with StandinNetwork(opener(queue_pairs=queue_pairs)) as network:
        check_signal_never_before_data(network)


@pytest.mark.parametrize(("bug", "signal", "message"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bug_fails_the_contract(bug: type[RcTransport], signal: str, message: str) -> None:
    with StandinNetwork(opener(signal, kind=bug)) as network, pytest.raises(AssertionError, match=message):
        check_signal_never_before_data(network)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (Put(0, 0, 9, 0, 0, 8, 0, 1), "unreachable"),
        (Put(0, 0, 0, 0, 0, 8, 0, 1), "unreachable"),
        (Put(0, 0, 1, 1 << 30, 0, 100, 0, 1), "bad address"),
        (Put(0, 0, 1, 0, 1 << 30, 100, 0, 1), "bad address"),
        (Put(0, 0, 1, 0, 0, 8, 1 << 20, 1), "bad address"),
        (Put(0, 0, 1, 0, 0, 8, 12, 1), "bad address"),
        (Put(0, 1, 1, 0, 0, 8, 0, 1), "two channels"),
        (Put(0, 0, 1, 0, 0, 1 << 19, 0, 1), "too long"),
    ],
)
def test_bad_commands_are_errors(bad: Put, status: str) -> None:
    with StandinNetwork(opener(), mood=Mood(max_message=1024)) as network:
        transport = network.transports[0]
        assert transport.post(Put(0, 0, 1, 0, 0, 8, 0, 1))
        with pytest.raises(TransportError) as caught:
            transport.post(bad)
        assert (caught.value.peer, caught.value.status) == (bad.dst_rank, status)


def test_full_queues_refuse_and_recover() -> None:
    with StandinNetwork(opener(), mood=Mood(max_send=8)) as network:
        transport = network.transports[0]
        accepted = [transport.post(Put(i, 0, 1, 0, 0, 8, 0, i + 1)) for i in range(4)]
        assert accepted == [True] * 2 + [False] * 2, "each takes three of eight"
        assert transport.post(Put(2, 1, 1, 0, 0, 8, 8, 1)), "another queue pair has room"
        transport.flush()
        done: list[int] = []
        while len(done) < 3:
            network.fabric.step()
            done += transport.poll()
        assert sorted(done) == [0, 1, 2]
        assert transport.post(Put(3, 0, 1, 0, 0, 8, 0, 4))


@pytest.mark.parametrize("signal", ["atomic", "imm", "write"])
def test_flags_get_values_not_differences(signal: str) -> None:
    """Between two calls another rank, of the destination's node, may raise the same word: plans share the flags."""
    with StandinNetwork(opener(signal)) as network:
        for value in (5, 12, 13):
            network.producers[0].issue(1, 1, 0, 0, 100, network.flag_offset(0), value)
            network.settle()
            assert network.flag(1, 0) == value
            network._store(network.signals[1].address() + network.flag_offset(0), value + 1)


def test_a_flag_may_change_its_channel_once_it_is_quiet() -> None:
    """Another plan, another channel: an error only while the flag is under way."""
    with StandinNetwork(opener()) as network:
        for channel in (0, 1, 0):
            network.producers[0].issue(channel, 1, 0, 0, 100, network.flag_offset(0), network.producers[0].head + 1)
            network.settle()
        assert network.flag(1, 0) == 3


def test_selective_signaling() -> None:
    """One completion per queue pair and flush, not one per put."""
    with StandinNetwork(opener()) as network:
        transport = network.transports[0]
        for ticket in range(40):
            assert transport.post(Put(ticket, ticket % 2, 1, 0, 0, 8, 8 * (ticket % 2), ticket + 1))
        transport.flush()
        done: list[int] = []
        polled = 0
        while len(done) < 40:
            network.fabric.step()
            polled += len(transport._sends.entries)
            done += transport.poll()
        assert polled == 2


def requests(network: StandinNetwork) -> list[str]:
    """The kinds of all requests that cards have been given since the last time."""
    found, network.fabric.posted = network.fabric.posted, []
    return found


def test_an_entry_is_one_request_and_no_round_trip() -> None:
    """An empty put waits for nothing where no bytes of its channel, and no other value of its flag, are under way."""
    with StandinNetwork(opener()) as network:
        producer = network.producers[0]
        for epoch in range(1, 6):
            for peer in (1, 2):
                producer.issue(0, peer, 0, 0, 0, network.flag_offset(epoch & 1), epoch)
            network.settle()
            assert requests(network) == ["inline", "inline"]
        producer.issue(2, 1, 0, 0, 64, network.flag_offset(2), 1)  # the same queue pair
        producer.issue(0, 1, 0, 0, 0, network.flag_offset(0), 6)
        network.settle()
        assert requests(network) == ["inline", "write", "add", "inline"], "the entry does not wait for another channel"
        producer.issue(2, 1, 0, 0, 64, network.flag_offset(2), 2)
        producer.issue(2, 1, 0, 0, 0, network.flag_offset(3), 1)
        network.settle()
        assert requests(network) == ["write", "add", "inline", "inline"], "it waits for its own"


def flag_values(network: StandinNetwork) -> list[int]:
    """What a flag was while many values of it were under way, by empty puts."""
    seen = [0]

    def watch() -> None:
        if network.flag(1, 0) != seen[-1]:
            seen.append(network.flag(1, 0))

    network.watcher = watch
    for value in range(1, 400):
        network.producers[0].issue(0, 1, 0, 0, 0, network.flag_offset(0), value)
        network.turn()
    network.settle()
    return seen


def test_values_of_a_flag_keep_their_order_without_bytes() -> None:
    with StandinNetwork(opener()) as network:
        seen = flag_values(network)
        assert seen == sorted(seen) and seen[-1] == 399
    with StandinNetwork(opener(kind=FlagsDoNotWaitForThemselves)) as network:
        seen = flag_values(network)
        assert seen != sorted(seen), "the test can fail"


def test_the_standin_holds_back_what_is_behind_a_fenced_request() -> None:
    """As queue pairs do: they begin their requests in order, and a fenced one begins when the atomics before it have been answered."""
    with StandinNetwork(opener(), ranks=2, mood=Mood(pieces=1)) as network:
        transport, fabric = network.transports[0], network.fabric
        connection, target, heap = transport._by_peer[1][0], transport._targets[1], transport._heap
        network.write(0, 0, b"x" * 8)
        fabric.mood = Mood(pieces=1, lazy=1.0)
        transport._order(connection, _Pending(Put(0, 0, 1, 0, 0, 0, 0, 0), 0, 1, True))
        pair = connection.pair
        pair.write_inline(1, 7, target.signals, target.signal_key, signaled=False, fenced=True)
        pair.write(2, heap.address, 8, heap.lkey, target.heap, target.heap_key, signaled=False)
        pair.commit()
        for _ in range(50):
            assert fabric._choose(pair).kind == "add"
        fabric._advance(pair)
        assert {fabric._choose(pair).kind for _ in range(50)} == {"inline", "write"}, "both may begin now, in any order"


def test_what_arrives_always_has_room() -> None:
    """Receives of all queue pairs together fit the completion queue, however few entries the card gives it."""
    with StandinNetwork(opener("imm", queue_pairs=4), mood=Mood(max_completions=100)) as network:
        assert [transport._receives for transport in network.transports] == [100 // 8] * 3
        check_signal_never_before_data(network)


class IdlePair(verbs.QueuePair):
    """Posts nothing; what asks for a completion has one at once."""

    number = 7

    def __init__(self, completed: list[verbs.Completion]) -> None:
        self.completed = completed

    def connect(self, remote: verbs.Remote, mtu: int, psn: int, retry: verbs.RetryPolicy) -> None: ...

    def write(self, wr_id: int, *args: Any, signaled: bool, **more: Any) -> None: ...

    def fetch_add(self, wr_id: int, *args: Any, signaled: bool) -> None: ...

    def write_inline(self, wr_id: int, *args: Any, signaled: bool, fenced: bool = False) -> None:
        if signaled:
            self.completed.append(verbs.Completion(wr_id, 0, self.number, False, 0, None, 0, 0))

    def send(self, wr_id: int, *args: Any, signaled: bool, **more: Any) -> None: ...

    def commit(self) -> None: ...

    def nudge(self) -> None: ...

    def receive(self, wr_id: int, local: int, size: int, lkey: int) -> None: ...

    def fail(self) -> None: ...

    def close(self) -> None: ...


class IdleQueue(verbs.CompletionQueue):
    def __init__(self, capacity: int, completed: list[verbs.Completion]) -> None:
        self.capacity, self.completed = capacity, completed

    def poll(self, limit: int) -> list[verbs.Completion]:
        found = self.completed[:limit]
        del self.completed[:limit]
        return found

    def close(self) -> None: ...


@pytest.mark.parametrize("burst", [1, RING_SLOTS], ids=["alone", "batched"])
def test_cost_per_put(burst: int) -> None:
    """Prints what ring, engine and transport cost in Python (``-s``); the card and pyverbs add theirs. Asserts only that it works."""
    nic = Fabric().nic(0)
    completed: list[verbs.Completion] = []
    nic.rc_pair = lambda *args, **more: IdlePair(completed)  # type: ignore[method-assign]
    nic.completion_queue = lambda capacity: IdleQueue(capacity, completed)  # type: ignore[method-assign]
    transport = open_transport(nic, wiring(heap_bytes=1 << 30), signal="atomic", queue_pairs=4)
    transport.connect([b"", transport.address.replace(b'"1": [[', b'"0": [[')])
    producer = Producer()
    engine = Engine(RingReader(producer.buffer), transport)
    spent, puts = 0, 20 * RING_SLOTS
    while producer.head < puts:
        for _ in range(burst):
            channel = producer.head % 4
            assert producer.issue(channel, 1, 0, 0, 1 << 18, 8 * channel, producer.head + 1) is not None
        begin = time.process_time_ns()
        while producer.completed < producer.head:
            engine.step()
        spent += time.process_time_ns() - begin
    assert producer.completed == puts
    print(f"rc over idle queue pairs, 256 KiB puts: {spent / 1e3 / puts:.2f} us per put")
    engine.close()
