"""Transport rc when cards fail, peers go and queue pairs break: every error names peer, operation and status, and a remedy."""

from __future__ import annotations

import dataclasses
import time
import types

import pytest

from mkernel.errors import TransportError
from mkernel.transport import rc, rdma, verbs
from tests.transport.rc_standin import issue, opener, run_until_error
from tests.transport.standin import Mood, StandinNetwork


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
        assert run_until_error(network).op == "signal"


def test_an_atomic_that_fails_is_named() -> None:
    with StandinNetwork(opener()) as network:
        issue(network, 1)
        pair = network.transports[0]._by_peer[1][1].pair
        network.engines[0].step()
        while pair.work[0].kind != "add":  # until the bytes have come
            network.fabric._advance(pair)
        network.fabric.cut.add(1)
        assert run_until_error(network).op == "fetch_add"


def test_the_others_go_on_without_a_lost_peer() -> None:
    with StandinNetwork(opener()) as network:
        network.fabric.cut.add(2)
        issue(network, to=1)
        network.settle()
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
        network.transports[0]._nic.up = kind != verbs.PORT_ERROR
        network.transports[0]._port_seconds = 0.0
        if fatal:
            error = run_until_error(network)
            assert (error.status, error.op, error.remedy) == (name, "asynchronous event", remedy)
        else:
            issue(network)
            network.settle()
            assert network.flag(1, 0) == 5


def test_another_port_of_the_device_may_go_down() -> None:
    with StandinNetwork(opener()) as network:
        transport = network.transports[0]
        transport._nic.pending_events.append(verbs.Event(verbs.PORT_ERROR))
        for _ in range(3 * rdma.EVENT_POLLS):
            transport.poll()
        assert not transport._nic.pending_events
        issue(network)
        network.settle()
        assert network.flag(1, 0) == 5


@pytest.mark.parametrize("up_again", [True, False])
def test_a_port_may_be_down_for_a_moment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, up_again: bool) -> None:
    """Cards try longer than that, so that nothing is lost."""
    now = [100.0]
    monkeypatch.setattr(rdma, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    with StandinNetwork(opener()) as network:
        transport = network.transports[0]
        nic, grace = transport._nic, transport._port_seconds
        assert 0.05 < grace <= transport._retry.seconds / 2

        def look() -> None:
            for _ in range(rdma.EVENT_POLLS):
                transport.poll()

        nic.up = False
        nic.pending_events.append(verbs.Event(verbs.PORT_ERROR))
        look()
        now[0] += grace * 0.9
        look()
        if up_again:
            nic.up = True
            look()
            assert "is up again" in caplog.text
            now[0] += grace
            look()
            issue(network)
            network.settle()
            assert network.flag(1, 0) == 5
        else:
            now[0] += grace * 0.2
            with pytest.raises(TransportError) as caught:
                look()
            assert caught.value.status == "IBV_EVENT_PORT_ERR"


def test_a_port_that_is_down_explains_a_lost_peer() -> None:
    with StandinNetwork(opener()) as network:
        network.fabric.cut.add(1)
        nic = network.transports[0]._nic
        nic.up = False
        nic.pending_events.append(verbs.Event(verbs.PORT_ERROR))
        for _ in range(rdma.EVENT_POLLS):
            network.transports[0].poll()
        issue(network)
        assert run_until_error(network).status == "IBV_EVENT_PORT_ERR"


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
