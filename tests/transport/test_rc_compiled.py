"""Transport rc below the compiled engine: the same contract as in Python, the same errors, and planted bugs in its source."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mkernel.errors import TransportError
from mkernel.transport import rc, verbs
from mkernel.transport.base import Put
from tests.transport.compiled_bugs import BUGS, PLANTED_MOODS, Bug, build, planted
from tests.transport.compiled_standin import CompiledNetwork
from tests.transport.contract import CHECKS, check_signal_never_before_data
from tests.transport.rc_standin import issue, opener, run_until_error
from tests.transport.standin import MOODS, Mood, StandinNetwork
from tests.transport.test_rc import flag_values, requests

NETWORKS = (StandinNetwork, CompiledNetwork)  # engines in Python, compiled engines


def check_values_of_a_flag(network: StandinNetwork) -> None:
    seen = flag_values(network)
    assert seen == sorted(seen), "the flag went back"
    assert seen[-1] == 399


ALL_CHECKS = {**CHECKS, "values_of_a_flag": check_values_of_a_flag}


@pytest.mark.parametrize("check", ALL_CHECKS)
@pytest.mark.parametrize("mood", PLANTED_MOODS)
@pytest.mark.parametrize("signal", ["atomic", "imm"])
@pytest.mark.drawn(4)
def test_contract(signal: str, mood: str, check: str, pytestconfig: pytest.Config) -> None:
    if (signal, check) == ("imm", "values_of_a_flag"):
        signal = "atomic"  # this check is of one rank's queue pairs
    with CompiledNetwork(opener(signal), mood=PLANTED_MOODS[mood], seed=pytestconfig.getoption("--seed")) as network:
        ALL_CHECKS[check](network)


@pytest.mark.parametrize("queue_pairs", [1, 3])
def test_any_number_of_queue_pairs(queue_pairs: int, pytestconfig: pytest.Config) -> None:
    with CompiledNetwork(opener(queue_pairs=queue_pairs), mood=PLANTED_MOODS["narrow"], seed=pytestconfig.getoption("--seed")) as network:
        check_signal_never_before_data(network)


def test_plain_writes() -> None:
    """They are enough where nothing overtakes, and not where routing is adaptive."""
    with CompiledNetwork(opener("write"), mood=MOODS["prompt"]) as network:
        check_signal_never_before_data(network)
    with CompiledNetwork(opener("write")) as network, pytest.raises(AssertionError, match=r"visible before|went back"):
        check_signal_never_before_data(network)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
@pytest.mark.drawn(1)
def test_planted_bug_fails_the_contract(bug: Bug, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Some bugs show at some orders of events only: the worst in six of ten, most in all."""
    loop = build(bug, tmp_path)
    with pytest.raises((AssertionError, TransportError, verbs.VerbsError), match=bug.message):
        for seed in range(pytestconfig.getoption("--seed"), pytestconfig.getoption("--seed") + 30):
            with CompiledNetwork(opener(bug.signal), mood=PLANTED_MOODS[bug.mood], seed=seed, loop=loop) as network:
                ALL_CHECKS[bug.check](network)


def test_every_bug_can_be_planted() -> None:
    for bug in BUGS:
        planted(bug)


@pytest.mark.slow
def test_the_source_without_a_bug_keeps_the_contract_as_the_bugs_are_built(tmp_path: Path) -> None:
    with CompiledNetwork(opener(), loop=build(None, tmp_path)) as network:
        check_signal_never_before_data(network)


@pytest.mark.parametrize("signal", ["atomic", "imm", "write"])
def test_both_engines_post_the_same_requests(signal: str, rng: np.random.Generator) -> None:
    """Random puts, and all of them done before the next ones: kind by kind, in the same order."""
    rounds = [rng.integers((4, 2, 2, 3000), size=(rng.integers(1, 9), 4)).tolist() for _ in range(40)]
    posted = []
    for kind in NETWORKS:
        with kind(opener(signal), mood=MOODS["short_messages"]) as network:
            found = []
            for puts in rounds:
                for channel, peer, full, size in puts:
                    producer = network.producers[0]
                    producer.issue(channel, 1 + peer, 0, 0, full * size, network.flag_offset(channel), producer.head + 1)
                network.settle()
                found.append(requests(network))
            posted.append(found)
    assert posted[0] == posted[1]


# ---- failures: both engines say the same
def lost_peer(network: StandinNetwork) -> None:
    network.fabric.cut.add(1)
    issue(network)


def lost_flag(network: StandinNetwork) -> None:
    network.fabric.cut.add(1)
    issue(network, 1, size=0)


def no_receives(network: StandinNetwork) -> None:
    network.fabric.no_receives.add(1)
    issue(network, 1, size=0)


def broken_pair(network: StandinNetwork) -> None:
    issue(network, 20)
    network.turn()
    network.transports[0]._by_peer[1][1].pair.fail()


def card_gone(network: StandinNetwork) -> None:
    issue(network, 20)
    network.turn()
    network.transports[0]._nic.pending_events.append(verbs.Event(8))
    network.transports[0]._by_peer[1][1].pair.fail()


def event(network: StandinNetwork) -> None:
    network.transports[0]._nic.pending_events.append(verbs.Event(11))


def port_down(network: StandinNetwork) -> None:
    network.fabric.cut.add(1)
    nic = network.transports[0]._nic
    nic.up = False
    nic.pending_events.append(verbs.Event(verbs.PORT_ERROR))
    for _ in range(64):
        network.engines[0].step()
    issue(network)


def unreachable(network: StandinNetwork) -> None:
    issue(network, 1, to=7)


def outside(network: StandinNetwork) -> None:
    network.producers[0].issue(0, 1, 0, (1 << 20) - 4, 8, network.flag_offset(0), 1)


def wrapped(network: StandinNetwork) -> None:
    network.producers[0].issue(0, 1, (1 << 64) - 8, 0, 16, network.flag_offset(0), 1)


def crooked_flag(network: StandinNetwork) -> None:
    network.producers[0].issue(0, 1, 0, 0, 8, 12, 1)


def no_flag(network: StandinNetwork) -> None:
    network.producers[0].issue(0, 1, 0, 0, 8, 1 << 16, 1)


def two_channels(network: StandinNetwork) -> None:
    for channel in (0, 1):
        network.producers[0].issue(channel, 1, 0, 0, 8, network.flag_offset(0), channel + 1)


def too_long(network: StandinNetwork) -> None:
    network.producers[0].issue(0, 1, 0, 0, 1 << 19, network.flag_offset(0), 1)


def strange_message(network: StandinNetwork) -> None:
    """A message of a size that no flag has."""
    transport = network.transports[1]
    connection = transport._by_peer[0][0]
    connection.pair.send(0, transport._scratch_region.address, 0, transport._scratch_region.lkey, signaled=False, imm=3)
    connection.pair.commit()


def polling_fails(network: StandinNetwork) -> None:
    def poll(limit: int) -> list[verbs.Completion]:
        raise verbs.VerbsError("polling a completion queue", 5)

    network.transports[0]._sends.poll = poll


def posting_fails(network: StandinNetwork) -> None:
    def commit() -> None:
        raise verbs.VerbsError("posting to a queue pair", 12)

    network.transports[0]._by_peer[1][1].pair.commit = commit
    issue(network, 1)


FAILURES = {
    lost_peer: "IBV_WC_RETRY_EXC_ERR",
    lost_flag: "IBV_WC_RETRY_EXC_ERR",
    no_receives: "IBV_WC_RNR_RETRY_EXC_ERR",
    broken_pair: "IBV_WC_WR_FLUSH_ERR",
    card_gone: "IBV_EVENT_DEVICE_FATAL",
    event: "IBV_EVENT_LID_CHANGE",
    port_down: "IBV_EVENT_PORT_ERR",
    unreachable: "unreachable",
    outside: "bad address",
    wrapped: "bad address",
    crooked_flag: "bad address",
    no_flag: "bad address",
    two_channels: "two channels",
    too_long: "too long",
    strange_message: "bad message",
    polling_fails: "EIO",
    posting_fails: "ENOMEM",
}


@pytest.mark.parametrize("scenario", FAILURES, ids=lambda scenario: scenario.__name__)
def test_failures_are_the_same(scenario: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkernel.transport.rdma.EXPLAIN_SECONDS", 0.05)
    signal = "imm" if scenario in (no_receives, strange_message) else "atomic"
    mood = Mood(lazy=0.95) if scenario in (broken_pair, card_gone) else Mood(max_message=1024, max_receive=64)
    errors = []
    for kind in NETWORKS:
        with kind(opener(signal), mood=mood) as network:
            assert callable(scenario)
            scenario(network)
            error = run_until_error(network)
            assert network.producers[0].completed <= network.producers[0].head
            assert network.engines[0].next_event_ns() is None
            with pytest.raises(TransportError) as again:
                network.engines[0].step()
            assert again.value is error
            errors.append((error.peer, error.op, error.status, error.queue_pair, error.remedy, str(error)))
    assert errors[0] == errors[1]
    assert errors[1][2] == FAILURES[scenario]  # type: ignore[index]


@pytest.mark.parametrize("nudges", [True, False])
def test_a_card_that_forgets_what_waits_is_nudged(monkeypatch: pytest.MonkeyPatch, nudges: bool) -> None:
    if not nudges:
        monkeypatch.setattr(rc, "_NUDGE_NS", 1 << 62)
    with CompiledNetwork(opener(), mood=Mood(forgetful=True)) as network:
        issue(network, 5)
        end = time.monotonic() + (30.0 if nudges else 0.5)
        while network.turn() and time.monotonic() < end:
            pass
        assert (network.flag(1, 0) == 5) == nudges


def test_the_engine_names_a_bad_put() -> None:
    with CompiledNetwork(opener()) as network:
        network.producers[0].issue(3, 1, 5, 6, 7, 8, 9)
        network.producers[0].issue(0, 9, 0, 0, 8, 0, 1)
        with pytest.raises(TransportError, match="rank 9"):
            network.engines[0].step()
        assert network.engines[0]._put(0) == Put(0, 3, 1, 5, 6, 7, 8, 9)
