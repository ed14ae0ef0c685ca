"""Transport rc over cards of this process that do everything late, split and out of order; planted bugs must fail the contract."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mkernel.abi import RING_SLOTS
from mkernel.errors import ArgumentError, TransportError
from mkernel.proxy.engine import Engine
from mkernel.proxy.ring import RingReader
from mkernel.transport import Card, Wiring, rc, verbs
from mkernel.transport.base import Put
from mkernel.transport.rc import RcTransport, _Connection, _Pending, loopback, open_transport, retry_policy
from tests.transport.contract import CHECKS, check_signal_never_before_data
from tests.transport.harness import Producer
from tests.transport.standin import MOODS, Fabric, Mood, StandinNetwork, StandinNic


def opener(
    signal: str = "atomic", queue_pairs: int = 2, kind: type[RcTransport] = RcTransport
) -> Callable[[StandinNic, Wiring], RcTransport]:
    return lambda nic, wiring: open_transport(nic, wiring, signal=signal, queue_pairs=queue_pairs, kind=kind)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("signal", ["atomic", "imm"])
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


# ---- planted bugs
class SignalBeforeData(RcTransport):
    def _build(self, connection: _Connection, waiting: Sequence[_Pending]) -> None:
        for pending in waiting:
            if self.signal == "imm":
                self._tell(connection, pending, signaled=False)
            else:
                self._raise(connection, pending, signaled=False, fenced=False)
        super()._build(connection, waiting)


class SignalOnAnotherQueuePair(RcTransport):
    """Data stays on its queue pair, the signal goes by the next one."""

    def _raise(self, connection: _Connection, pending: _Pending, *, signaled: bool, fenced: bool) -> None:
        pairs = self._by_peer[connection.peer]
        other = pairs[(connection.index + 1) % len(pairs)]
        super()._raise(other, pending, signaled=False, fenced=fenced)
        other.pair.commit()
        if signaled:
            target, scratch = self._targets[connection.peer], self._scratch_region
            name = self._name(connection, pending, 1)
            connection.pair.fetch_add(name, scratch.address + 8, scratch.lkey, target.barrier, target.barrier_key, 0, signaled=True)


class NoFence(RcTransport):
    def _raise(self, connection: _Connection, pending: _Pending, *, signaled: bool, fenced: bool) -> None:
        super()._raise(connection, pending, signaled=signaled, fenced=False)


class NoAtomic(RcTransport):
    """A fence has nothing to wait for."""

    def _order(self, connection: _Connection, pending: _Pending) -> None:
        pass


class EpochEarly(RcTransport):
    """The flag gets the value after the put's own."""

    def _build(self, connection: _Connection, waiting: Sequence[_Pending]) -> None:
        for pending in waiting:
            pending.put = pending.put._replace(signal_value=pending.put.signal_value + 1)
        super()._build(connection, waiting)


class ReceiversOwnEpoch(RcTransport):
    """The receiver raises the flag to a count of its own, not to the value that came."""

    counts: dict[int, int]

    def _raise_flag(self, completion: verbs.Completion) -> None:
        self.counts = getattr(self, "counts", {})
        assert completion.imm is not None
        self.counts[completion.imm] = self.counts.get(completion.imm, 0) + 1
        store, self._store = self._store, lambda address, value: None
        super()._raise_flag(completion)
        self._store = store
        assert store is not None
        store(self._signal_address + 8 * completion.imm, self.counts[completion.imm])


class CompletedAtPost(RcTransport):
    early: list[int]

    def post(self, put: Put) -> bool:
        accepted = super().post(put)
        if accepted:
            self.early = [*getattr(self, "early", []), put.ticket]
        return accepted

    def poll(self) -> list[int]:
        super().poll()
        done, self.early = getattr(self, "early", []), []
        return done


class LostByte(RcTransport):
    def _write(self, connection: _Connection, pending: _Pending) -> None:
        put = pending.put
        pending.put = put._replace(bytes=max(put.bytes - 1, 0))
        super()._write(connection, pending)
        pending.put = put


class NoChannels(RcTransport):
    """Puts take the queue pairs in turn."""

    turn = 0

    def _check(self, put: Put) -> tuple[_Connection, int]:
        _, data = super()._check(put)
        self.turn += 1
        connection = self._by_peer[put.dst_rank][self.turn % self._count]
        self._flags.clear()
        return connection, data


_EARLY = "visible before the bytes|never sent|went back"
BUGS: list[tuple[type[RcTransport], str, str]] = [
    (SignalBeforeData, "atomic", _EARLY),
    (SignalBeforeData, "imm", _EARLY),
    (SignalOnAnotherQueuePair, "atomic", _EARLY),
    (NoFence, "atomic", _EARLY),
    (NoAtomic, "atomic", _EARLY),
    (EpochEarly, "atomic", _EARLY),
    (EpochEarly, "imm", _EARLY),
    (ReceiversOwnEpoch, "imm", "never sent|visible before the bytes|signals arrived"),
    (CompletedAtPost, "atomic", "visible before the bytes"),
    (LostByte, "atomic", "visible before the bytes"),
    (NoChannels, "atomic", _EARLY),
]


@pytest.mark.parametrize(("bug", "signal", "message"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bug_fails_the_contract(bug: type[RcTransport], signal: str, message: str) -> None:
    with StandinNetwork(opener(signal, kind=bug)) as network, pytest.raises(AssertionError, match=message):
        check_signal_never_before_data(network)


# ---- failures
def run_until_error(network: StandinNetwork, rank: int = 0) -> TransportError:
    with pytest.raises(TransportError) as caught:
        for _ in range(20_000):
            network.turn()
    assert network.engines[rank].error is caught.value
    return caught.value


def issue(network: StandinNetwork, count: int = 5, *, to: int = 1, size: int = 100) -> None:
    for number in range(count):
        network.producers[0].issue(1, to, 0, 0, size, network.flag_offset(0), number + 1)


def test_a_lost_peer_is_named() -> None:
    with StandinNetwork(opener()) as network:
        network.fabric.cut.add(1)
        issue(network)
        error = run_until_error(network)
        pair = network.transports[0]._by_peer[1][1].pair.number
        assert (error.peer, error.op, error.status, error.queue_pair) == (1, "write", "IBV_WC_RETRY_EXC_ERR", pair)
        assert "is the peer alive" in error.remedy
        assert error.remedy in str(error)
        assert network.producers[0].completed == 0
        with pytest.raises(TransportError):
            network.engines[0].step()


def test_a_signal_that_fails_is_named() -> None:
    with StandinNetwork(opener()) as network:
        network.fabric.cut.add(1)
        issue(network, 1, size=0)
        assert run_until_error(network).op == "fetch_add"


def test_the_others_go_on_without_a_lost_peer() -> None:
    with StandinNetwork(opener()) as network:
        network.fabric.cut.add(2)
        issue(network, to=1)
        while network.turn():
            pass
        assert network.flag(1, 0) == 5


def test_a_wrong_key_is_named() -> None:
    with StandinNetwork(opener()) as network:
        transport = network.transports[0]
        transport._targets[1] = dataclasses.replace(transport._targets[1], heap_key=1)
        issue(network)
        error = run_until_error(network)
        assert (error.peer, error.status) == (1, "IBV_WC_REM_ACCESS_ERR")


def test_no_receives_is_named() -> None:
    with StandinNetwork(opener("imm")) as network:
        network.fabric.no_receives.add(1)
        issue(network, 1, size=0)
        error = run_until_error(network)
        assert (error.peer, error.op, error.status) == (1, "send", "IBV_WC_RNR_RETRY_EXC_ERR")


def test_a_queue_pair_in_error_is_named() -> None:
    with StandinNetwork(opener(), mood=Mood(lazy=0.95)) as network:
        issue(network, 20)
        network.turn()
        network.transports[0]._by_peer[1][1].pair.fail()
        error = run_until_error(network)
        assert (error.peer, error.status) == (1, "IBV_WC_WR_FLUSH_ERR")


@pytest.mark.parametrize("nudges", [True, False])
def test_a_card_that_forgets_what_waits_is_nudged(monkeypatch: pytest.MonkeyPatch, nudges: bool) -> None:
    if not nudges:
        monkeypatch.setattr(rc, "_NUDGE_NS", 1 << 62)
    with StandinNetwork(opener(), mood=Mood(forgetful=True)) as network:
        issue(network, 5)
        end = time.monotonic() + (30.0 if nudges else 0.5)
        while network.turn() and time.monotonic() < end:
            pass
        assert (network.flag(1, 0) == 5) == nudges


@pytest.mark.parametrize("kind", verbs.EVENTS)
def test_events(kind: int) -> None:
    name, fatal, _, remedy = verbs.EVENTS[kind]
    with StandinNetwork(opener()) as network:
        network.transports[0]._nic.pending_events.append(verbs.Event(kind))
        if fatal:
            error = run_until_error(network)
            assert (error.status, error.op, error.remedy) == (name, "asynchronous event", remedy)
        else:
            issue(network)
            while network.turn():
                pass
            assert network.flag(1, 0) == 5


def test_an_event_explains_flushed_requests() -> None:
    with StandinNetwork(opener(), mood=Mood(lazy=0.95)) as network:
        issue(network, 20)
        network.turn()
        network.transports[0]._nic.pending_events.append(verbs.Event(8))
        network.transports[0]._by_peer[1][1].pair.fail()
        assert run_until_error(network).status == "IBV_EVENT_DEVICE_FATAL"


@pytest.mark.parametrize("status", [status for status in verbs.STATUSES if status])
def test_every_status_is_an_error_with_a_remedy(status: int) -> None:
    with StandinNetwork(opener()) as network:
        transport = network.transports[0]
        pair = transport._by_peer[2][0].pair
        transport._sends.push(verbs.Completion(0, status, pair.number, False, 0, None, 0, 7), ordered=True)
        error = run_until_error(network)
        assert (error.peer, error.status, error.queue_pair) == (2, verbs.STATUSES[status][0], pair.number)
        assert error.remedy
        assert "vendor error 0x7" in str(error)


def test_an_unknown_status_is_an_error_too() -> None:
    with StandinNetwork(opener()) as network:
        transport = network.transports[0]
        transport._sends.push(verbs.Completion(0, 99, 0, False, 0, None, 0, 0), ordered=True)
        assert run_until_error(network).status == "status 99"


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
            while network.turn():
                pass
            assert network.flag(1, 0) == value
            network._store(network.signals[1].address() + network.flag_offset(0), value + 1)


def test_a_flag_may_change_its_channel_once_it_is_quiet() -> None:
    """Another plan, another channel: an error only while the flag is under way."""
    with StandinNetwork(opener()) as network:
        for channel in (0, 1, 0):
            network.producers[0].issue(channel, 1, 0, 0, 100, network.flag_offset(0), network.producers[0].head + 1)
            while network.turn():
                pass
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


# ---- setting up
@pytest.mark.parametrize("where", ["register", "completion_queue", "rc_pair"])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EOPNOTSUPP, errno.EPERM, 0])
def test_setup_errors_are_transport_errors(where: str, code: int) -> None:
    fabric = Fabric()
    nic = fabric.nic(0)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise verbs.VerbsError(f"doing {where}", code)

    setattr(nic, where, refuse)
    with pytest.raises(TransportError) as caught:
        open_transport(nic, wiring(), signal="atomic", queue_pairs=2)
    assert caught.value.op == f"doing {where}"
    assert caught.value.status == {errno.ENOMEM: "ENOMEM", errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EPERM: "EPERM", 0: "no errno"}[code]
    assert caught.value.remedy
    assert nic.closed
    assert not nic.pairs


def wiring() -> Wiring:
    return Wiring(
        rank=0,
        heap_address=0x1000,
        heap_bytes=4096,
        signal_bytes=512,
        peers={1: (0, 0)},
        copier=lambda: pytest.fail("rc copies nothing"),
        clock_ns=lambda: 0,
        signal_address=0x4000,
        store=lambda address, value: None,
    )


def test_connecting_fails_with_the_errno() -> None:
    fabric = Fabric()
    ends = [open_transport(fabric.nic(rank), wiring(), signal="atomic", queue_pairs=1) for rank in range(2)]

    def refuse(*args: Any) -> None:
        raise verbs.VerbsError("moving a queue pair to RTR", errno.ETIMEDOUT)

    ends[0]._connections[0].pair.connect = refuse  # type: ignore[method-assign]
    card = ends[1].card.replace(b'"pairs": {"1"', b'"pairs": {"0"')
    with pytest.raises(TransportError, match=r"RTR.*ETIMEDOUT.*routes") as caught:
        ends[0].connect([b"", card])
    assert caught.value.status == "ETIMEDOUT"
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (b'"signal": "atomic"', b'"signal": "imm"', "MKERNEL_RC_SIGNAL"),
        (b'"infiniband": false', b'"infiniband": true', "link layer"),
        (b'"heap": [4096, 4096', b'"heap": [4096, 8192', "heap_bytes"),
        (b'"1": [[', b'"7": [[', "MKERNEL_RC_QUEUE_PAIRS"),
    ],
)
def test_ranks_that_differ_are_told(before: bytes, after: bytes, what: str) -> None:
    transport = open_transport(Fabric().nic(0), wiring(), signal="atomic", queue_pairs=1)
    card = transport.card
    assert before in card
    with pytest.raises(TransportError, match=what):
        transport.connect([b"", card.replace(before, after).replace(b'"1": [[', b'"0": [[')])
    transport.close()


def test_without_atomics_the_receiver_raises_flags() -> None:
    fabric = Fabric(Mood(atomics=False))
    transport = open_transport(fabric.nic(0), wiring(), signal="auto", queue_pairs=1)
    assert transport.signal == "imm"
    transport.close()
    with pytest.raises(ArgumentError, match=r"MKERNEL_RC_SIGNAL.*no atomics.*imm"):
        open_transport(fabric.nic(1), wiring(), signal="atomic", queue_pairs=1)


def test_flags_in_gpu_memory_need_atomics_or_writes() -> None:
    with pytest.raises(ArgumentError, match="MKERNEL_RC_SIGNAL"):
        open_transport(Fabric().nic(0), Wiring(**{**vars_of(wiring()), "signal_address": 0}), signal="imm", queue_pairs=1)


def test_flags_in_host_memory_are_asked_for() -> None:
    """Without atomics, and with the flags in GPU memory: which of them goes was decided before the card was opened."""
    nic = Fabric(Mood(atomics=False)).nic(0)
    given = Wiring(**{**vars_of(wiring()), "signal_address": 0, "signal_dmabuf": 8})
    with pytest.raises(ArgumentError, match=r"MKERNEL_RC_SIGNAL.*no atomics.*imm on all ranks"):
        open_transport(nic, given, signal="auto", queue_pairs=1)
    assert nic.closed


def vars_of(wiring: Wiring) -> dict[str, Any]:
    return {name: getattr(wiring, name) for name in wiring.__dataclass_fields__}


def test_gpu_memory_is_addressed_by_offset() -> None:
    fabric = Fabric()
    with StandinNetwork(opener(), ranks=2) as real:
        fabric = real.fabric
        fabric.dmabufs.update({7: real.heaps[0].address(), 8: real.signals[0].address()})
        given = Wiring(**{**vars_of(wiring()), "heap_dmabuf": 7, "signal_dmabuf": 8, "heap_bytes": real.heaps[0].size})
        transport = open_transport(fabric.nic(5), given, signal="atomic", queue_pairs=1)
        assert (transport._heap.address, transport._signals.address) == (0, 0)
        transport.close()


def test_close_twice_and_with_puts_under_way() -> None:
    """The stand-in checks the order: queue pairs to ERR, then memory."""
    with StandinNetwork(opener("imm")) as network:
        issue(network, 50)
        network.turn()
        network.transports[0].close()
        network.transports[0].close()
        assert network.transports[0]._nic.closed


@pytest.mark.parametrize("timeout", [0.5, 1.0, 5.0, 30.0, 600.0])
def test_retries_end_before_the_kernels_give_up(timeout: float) -> None:
    policy = retry_policy(timeout)
    assert policy.retry_count <= 6
    assert policy.rnr_retry <= 6
    assert 0.12 <= 6 * {22: 0.02048, 24: 0.04096, 26: 0.08192, 28: 0.16384}[policy.rnr_timer] <= max(timeout / 2, 0.13)
    longest = 4 * 7 * 4.096e-6 * 2**policy.timeout
    assert longest <= max(timeout / 2, 0.05)
    assert longest >= min(timeout / 4, 10)


def test_what_arrives_always_has_room() -> None:
    """Receives of all queue pairs together fit the completion queue, however few entries the card gives it."""
    with StandinNetwork(opener("imm", queue_pairs=4), mood=Mood(max_completions=100)) as network:
        assert [transport._receives for transport in network.transports] == [100 // 8] * 3
        check_signal_never_before_data(network)


@pytest.mark.parametrize("field", ["retry_count", "rnr_retry"])
def test_forever_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="unbounded"):
        verbs.RetryPolicy(**{field: 7})


def test_loopback() -> None:
    fabric = Fabric()

    def open_card(card: Card, rank: int) -> verbs.Nic:
        return fabric.nic(rank)

    polls = RcTransport.poll

    def poll(self: RcTransport) -> list[int]:
        fabric.step()
        return polls(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RcTransport, "poll", poll)
        assert loopback(Card("standin0", 1, 0), open_card=open_card) == "atomic"
        fabric.cut.add(1)
        with pytest.raises(TransportError, match="RETRY_EXC"):
            loopback(Card("standin0", 1, 0), open_card=open_card)


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
    transport = open_transport(nic, Wiring(**{**vars_of(wiring()), "heap_bytes": 1 << 30}), signal="atomic", queue_pairs=4)
    transport.connect([b"", transport.card.replace(b'"1": [[', b'"0": [[')])
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
