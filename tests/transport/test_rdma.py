"""What rc and srd share: which of several things that went wrong is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mkernel.errors import TransportError
from mkernel.transport import rc, rdma, srd, verbs
from tests.transport.standin import Mood, StandinNetwork

QP_ACCESS_ERR = 3
REM_ACCESS_ERR = 10


class Clock:
    """Time that only sleeping spends, and what happens meanwhile."""

    def __init__(self) -> None:
        self.now = 100.0
        self.plans: list[tuple[float, Callable[[], None]]] = []

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        self.plans.append((self.now + seconds, happens))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [happens for time, happens in self.plans if time <= self.now]
        self.plans = [plan for plan in self.plans if plan[0] > self.now]
        for happens in due:
            happens()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rdma, "time", clock)
    return clock


@pytest.fixture(params=["atomic", "imm", "srd"])
def network(request: pytest.FixtureRequest) -> StandinNetwork:
    """Puts are under way from rank 0 to rank 1."""
    signal, unordered = request.param, request.param == "srd"
    opener = srd.open_transport if unordered else lambda nic, wiring: rc.open_transport(nic, wiring, signal=signal, queue_pairs=1)
    network = StandinNetwork(opener, 2, mood=Mood(lazy=0.95), srd=unordered)
    request.addfinalizer(network.close)
    for value in range(1, 21):
        network.producers[0].issue(0, 1, 0, 0, 100, network.flag_offset(0), value)
    network.turn()
    return network


def pair_of(network: StandinNetwork) -> verbs.QueuePair:
    transport = network.transports[0]
    (number,) = transport._peer_of
    return network.fabric.pairs[number]


def error_of(network: StandinNetwork) -> TransportError:
    with pytest.raises(TransportError) as caught:
        for _ in range(5000):
            network.turn()
    return caught.value


@pytest.mark.parametrize("late", [0.0, 0.1, rdma.EXPLAIN_SECONDS - 0.01])
def test_an_event_that_comes_late_explains_what_was_flushed(network: StandinNetwork, clock: Clock, late: float) -> None:
    nic, begin = network.transports[0]._nic, clock.now
    clock.after(late, lambda: nic.pending_events.append(verbs.Event(QP_ACCESS_ERR)))
    pair_of(network).fail()
    error = error_of(network)
    assert (error.status, error.op) == ("IBV_EVENT_QP_ACCESS_ERR", "asynchronous event"), str(error)
    assert clock.now - begin <= late + 0.01, "it was known, and not told at once"


def test_without_a_cause_the_flush_is_told_in_time(network: StandinNetwork, clock: Clock) -> None:
    nic, begin = network.transports[0]._nic, clock.now
    clock.after(rdma.EXPLAIN_SECONDS + 0.1, lambda: nic.pending_events.append(verbs.Event(QP_ACCESS_ERR)))
    pair_of(network).fail()
    error = error_of(network)
    assert (error.status, error.peer) == ("IBV_WC_WR_FLUSH_ERR", 1), str(error)
    assert error.remedy
    assert rdma.EXPLAIN_SECONDS <= clock.now - begin <= rdma.EXPLAIN_SECONDS + 0.01


def test_a_completion_of_the_other_queue_explains_what_was_flushed(network: StandinNetwork, clock: Clock) -> None:
    """The queue pair failed between the two polls: its receives are found flushed, the request that failed lies in the other queue."""
    transport, pair = network.transports[0], pair_of(network)

    def found(queue: verbs.CompletionQueue, status: int) -> None:
        queue.entries.append((verbs.Completion(0, status, pair.number, False, 0, None, 0, 0), None, 0))

    found(transport._arrivals, verbs.FLUSHED)
    clock.after(0.01, lambda: found(transport._sends, REM_ACCESS_ERR))
    error = error_of(network)
    assert (error.status, error.peer, error.queue_pair) == ("IBV_WC_REM_ACCESS_ERR", 1, pair.number), str(error)
    assert error.op != "receive", "it was of the send queue"


def test_what_comes_meanwhile_and_explains_nothing_is_passed_over(network: StandinNetwork, clock: Clock) -> None:
    transport, pair = network.transports[0], pair_of(network)
    good = verbs.Completion(0, verbs.SUCCESS, pair.number, False, 0, None, 0, 0)
    clock.after(0.01, lambda: transport._sends.entries.append((good, None, 0)))
    clock.after(0.02, lambda: transport._nic.pending_events.append(verbs.Event(4)))  # COMM_EST
    pair.fail()
    assert error_of(network).status == "IBV_WC_WR_FLUSH_ERR"


def test_an_engine_counts_what_arrives(network: StandinNetwork) -> None:
    """Where receivers take part, so that theirs stay awake."""
    receiver = network.transports[1]
    network.settle()
    assert (receiver.arrived > 0) == (getattr(receiver, "signal", "imm") == "imm")
