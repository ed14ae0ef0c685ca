"""Transport srd over cards of this process that keep no order at all; planted bugs must fail the contract."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import Any

import pytest

from mkernel.errors import TransportError
from mkernel.proxy.compiled import CompiledEngine
from mkernel.transport import Wiring, verbs
from mkernel.transport.base import Put
from mkernel.transport.counting import imm
from mkernel.transport.srd import _MESSAGE, _SLOT, SPARE, UPDATE, SrdTransport, _Peer, open_transport
from tests.transport.contract import CHECKS, check_signal_never_before_data, check_wrap
from tests.transport.standin import MOODS, Fabric, Mood, StandinNetwork, StandinNic

SRD_MOODS = {name: mood for name, mood in MOODS.items() if mood.atomics}


def opener(kind: type[SrdTransport] = SrdTransport) -> Callable[[StandinNic, Wiring], SrdTransport]:
    def open(nic: StandinNic, wiring: Wiring) -> SrdTransport:
        transport = open_transport(nic, wiring)
        transport.__class__ = kind
        for peer in transport._peers:
            peer.incoming._release = transport._release
        return transport

    return open


def network(mood: Mood | None = None, *, kind: type[SrdTransport] = SrdTransport, ranks: int = 3, seed: int = 0) -> StandinNetwork:
    return StandinNetwork(opener(kind), ranks, mood=mood, seed=seed, srd=True)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", SRD_MOODS)
@pytest.mark.drawn(5)
def test_contract(mood: str, check: str, pytestconfig: pytest.Config) -> None:
    with network(SRD_MOODS[mood], seed=pytestconfig.getoption("--seed")) as ranks:
        CHECKS[check](ranks)


class _SignalBeforeData(SrdTransport):
    """The announcement claims one write less than there is."""

    def _send(self, peer: _Peer, slot: int, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        super()._send(peer, slot, channel, sequence, 0 if writes == 1 else writes, signal_offset, signal_value)


class _Early(SrdTransport):
    """The flag of the next epoch."""

    def _release(self, signal_offset: int, signal_value: int) -> None:
        super()._release(signal_offset, signal_value + 1)


class _OwnEpoch(SrdTransport):
    """The flag's own count at the receiver, in place of the sender's value."""

    def _release(self, signal_offset: int, signal_value: int) -> None:
        super()._release(signal_offset, ctypes.c_uint64.from_address(self._signal_address + signal_offset).value + 1)


class _NoOrder(SrdTransport):
    """Each put has a channel of its own."""

    _serial = 0

    def _send(self, peer: _Peer, slot: int, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        _NoOrder._serial += 1
        channel = 1000 + _NoOrder._serial if writes == 0 else channel
        sequence = 0 if writes == 0 else sequence
        super()._send(peer, slot, channel, sequence, writes, signal_offset, signal_value)


class _CreditAtPost(SrdTransport):
    """The source is given back before the card has read it."""

    def post(self, put: Put) -> bool:
        accepted = super().post(put)
        if accepted:
            self.__dict__.setdefault("early", []).append(put.ticket)
        return accepted

    def poll(self) -> list[int]:
        super().poll()
        early, self.__dict__["early"] = self.__dict__.get("early", []), []
        return list(early)


PLANTED = {
    _SignalBeforeData: "before the bytes|outside the window|more than 0 writes|1 writes came",
    _Early: "which was never sent|before the bytes",
    _OwnEpoch: "which was never sent|before the bytes",
    _NoOrder: "before the bytes|nothing will ever|went back|never sent",
    _CreditAtPost: "before the bytes|changed later",
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_planted_bugs_fail_the_contract(kind: type[SrdTransport]) -> None:
    with network(Mood(pieces=5), kind=kind) as ranks, pytest.raises((AssertionError, TransportError), match=PLANTED[kind]):
        check_signal_never_before_data(ranks)


def test_many_puts() -> None:
    """The sequences wrap. A million in `make test`: test_srd_protocol."""
    with network(Mood(pieces=1, lazy=0.0, late_completions=3), ranks=2) as ranks:
        check_wrap(ranks, 70_000)


@pytest.mark.slow
def test_a_million_puts() -> None:
    with network(Mood(pieces=1, lazy=0.0, late_completions=3), ranks=2) as ranks:
        check_wrap(ranks, 1_000_000)


def test_the_receives_suffice_for_updates() -> None:
    """One way only, so that every credit comes back by an update, and receivers with the fewest receives."""
    mood = Mood(max_receive=SPARE + 4, max_send=4, late_completions=30)
    with network(mood, ranks=2) as ranks:
        check_wrap(ranks, 3000)


def target(ranks: StandinNetwork, rank: int = 0) -> Any:
    """What a rank's engine, of either kind, uses of its first peer; both have ``heap`` and ``heap_key``."""
    engine = ranks.engines[rank]
    return engine._side._targets[0] if isinstance(engine, CompiledEngine) else ranks.transports[rank]._peers[0]  # type: ignore[attr-defined]


def run_until_error(ranks: StandinNetwork) -> TransportError:
    for _ in range(5000):
        try:
            ranks.turn()
        except TransportError as error:
            return error
    raise AssertionError("no error")


def issue(ranks: StandinNetwork, rank: int = 0, to: int = 1, size: int = 64, **changes: int) -> None:
    put = {"channel": 0, "dst_rank": to, "src_offset": 0, "dst_offset": 0, "size": size, "signal_offset": ranks.flag_offset(0), "value": 1}
    put.update(changes)
    ranks.producers[rank].issue(*put.values())


def cut(ranks: StandinNetwork) -> None:
    ranks.fabric.cut.add(1)
    issue(ranks)


def no_receives(ranks: StandinNetwork) -> None:
    ranks.fabric.no_receives.add(1)
    issue(ranks)


def wrong_key(ranks: StandinNetwork) -> None:
    target(ranks).heap_key ^= 1
    issue(ranks)


def wrong_range(ranks: StandinNetwork) -> None:
    target(ranks).heap += 1 << 30
    issue(ranks)


def freed_source(ranks: StandinNetwork) -> None:
    ranks.fabric.local.pop(ranks.transports[0]._heap.lkey)
    issue(ranks)


def pair_in_error(ranks: StandinNetwork) -> None:
    ranks.transports[0]._by_rank[1].pair.fail()


def send_write(ranks: StandinNetwork, channel: int, sequence: int) -> None:
    """A write of rank 0 to rank 1 that its engine knows nothing of."""
    transport = ranks.transports[0]
    peer, update = transport._peers[0], transport._depth - 1  # an update's completion changes nothing
    heap = transport._heap
    where = peer.heap, peer.heap_key
    peer.pair.write(update, heap.address, 8, heap.lkey, *where, signaled=True, imm=imm(channel, sequence), to=peer.destination)
    peer.pair.commit()
    ranks.settle()


def send_message(ranks: StandinNetwork, *words: int, size: int = _MESSAGE.size) -> None:
    """The same for a message. ``words``: those of an announcement."""
    transport = ranks.transports[0]
    peer, update = transport._peers[0], transport._depth - 1
    _MESSAGE.pack_into(transport._slots, update * _SLOT, *words)
    region = transport._slots_region
    peer.pair.send(update, region.address + update * _SLOT, size, region.lkey, signaled=True, to=peer.destination)
    peer.pair.commit()
    ranks.settle()


def strange_sequence(ranks: StandinNetwork) -> None:
    send_write(ranks, 0, 40_000)


def a_write_too_many(ranks: StandinNetwork) -> None:
    send_message(ranks, 3, 1, 1, ranks.flag_offset(0), 1, 0, 0)  # it waits for the put before it
    send_write(ranks, 3, 1)
    send_write(ranks, 3, 1)


def a_write_too_few_announced(ranks: StandinNetwork) -> None:
    send_write(ranks, 3, 1)
    send_write(ranks, 3, 1)
    send_message(ranks, 3, 1, 1, ranks.flag_offset(0), 1, 0, 0)


def announced_twice(ranks: StandinNetwork) -> None:
    for _ in range(2):
        send_message(ranks, 3, 1, 1, ranks.flag_offset(0), 1, 0, 0)


def released_too_much(ranks: StandinNetwork) -> None:
    send_message(ranks, 0, 0, UPDATE, 0, 0, 0, 1)


def no_flag(ranks: StandinNetwork) -> None:
    send_message(ranks, 0, 0, 0, 12, 1, 0, 0)


def far_flag(ranks: StandinNetwork) -> None:
    send_message(ranks, 0, 0, 0, 1 << 63, 1, 0, 0)


def short_message(ranks: StandinNetwork) -> None:
    send_message(ranks, 0, 0, 0, ranks.flag_offset(0), 1, 0, 0, size=_MESSAGE.size - 8)


FAULTS: dict[Callable[[StandinNetwork], None], tuple[str, str, int | None]] = {
    cut: ("IBV_WC_RETRY_EXC_ERR", "put_signal", 1),
    no_receives: ("IBV_WC_RNR_RETRY_EXC_ERR", "put_signal", 1),
    wrong_key: ("IBV_WC_REM_ACCESS_ERR", "put_signal", 1),
    wrong_range: ("IBV_WC_REM_ACCESS_ERR", "put_signal", 1),
    freed_source: ("IBV_WC_LOC_PROT_ERR", "put_signal", 1),
    pair_in_error: ("IBV_WC_WR_FLUSH_ERR", "receive", 1),
    **dict.fromkeys(
        (
            *(strange_sequence, a_write_too_many, a_write_too_few_announced, announced_twice, released_too_much),
            *(no_flag, far_flag, short_message),
        ),
        ("protocol", "receive", 0),
    ),
}


def provoked(ranks: StandinNetwork, fault: Callable[[StandinNetwork], None]) -> TransportError:
    """The first error after a fault."""
    try:
        fault(ranks)
    except TransportError as error:
        return error
    return run_until_error(ranks)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_failures_are_named(fault: Callable[[StandinNetwork], None]) -> None:
    status, op, peer = FAULTS[fault]
    with network(Mood(lazy=0.0), ranks=2) as ranks:
        error = provoked(ranks, fault)
        assert (error.status, error.op, error.peer) == (status, op, peer), str(error)
        assert error.remedy and error.queue_pair is not None and error.remedy in str(error), str(error)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"to": 7}, "unreachable"),
        ({"to": 0}, "unreachable"),
        ({"channel": 1 << 16}, "bad channel"),
        ({"src_offset": 1 << 20}, "bad address"),
        ({"dst_offset": (1 << 20) - 63}, "bad address"),
        ({"signal_offset": 1 << 16}, "bad address"),
        ({"signal_offset": 12}, "bad address"),
    ],
)
def test_bad_puts_are_refused(change: dict[str, int], status: str) -> None:
    with network(ranks=2) as ranks:
        issue(ranks, **change)
        error = run_until_error(ranks)
        assert error.status == status, str(error)


@pytest.mark.parametrize("kind", range(20))
def test_asynchronous_events(kind: int) -> None:
    name, fatal, *_ = verbs.EVENTS[kind]
    with network(ranks=2) as ranks:
        ranks.transports[0]._nic.up = kind != verbs.PORT_ERROR
        ranks.transports[0]._port_seconds = 0.0
        ranks.transports[0]._nic.pending_events.append(verbs.Event(kind))
        if fatal:
            assert run_until_error(ranks).status == name
        else:
            for _ in range(500):
                ranks.turn()


def test_setup_errors_name_the_call_and_a_remedy() -> None:
    class Refuses(StandinNic):
        def srd_pair(self, *args: Any, **options: Any) -> verbs.QueuePair:
            raise verbs.VerbsError("creating an SRD queue pair", errno.EOPNOTSUPP)

    def refuse(nic: StandinNic, wiring: Wiring) -> SrdTransport:
        nic.__class__ = Refuses
        return open_transport(nic, wiring)

    with pytest.raises(TransportError, match="creating an SRD queue pair") as caught:
        StandinNetwork(refuse, 2, srd=True)
    assert (caught.value.op, caught.value.status) == ("creating an SRD queue pair", "EOPNOTSUPP")
    assert caught.value.remedy


def test_a_card_without_srd_is_refused() -> None:
    with pytest.raises(TransportError, match="has no SRD queue pairs"):
        StandinNetwork(opener(), 2, srd=False)


def test_the_immediate_holds_channel_and_sequence() -> None:
    assert imm(65535, 65535) == 0xFFFFFFFF
    assert imm(1, 2) == 0x10002
    assert isinstance(Fabric().nic(0), StandinNic)
