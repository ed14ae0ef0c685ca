"""Transport srd below the compiled engine: the same contract as in Python, the same errors, and planted bugs in its source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel.errors import TransportError
from mkernel.proxy.compiled import CompiledEngine, open_engine
from mkernel.proxy.engine import Engine
from mkernel.proxy.ring import RingReader
from mkernel.transport import verbs
from mkernel.transport.base import Transport
from mkernel.transport.compiled import UnfitError
from mkernel.transport.srd import SPARE
from mkernel.transport.srd_compiled import SrdSide
from tests.transport import contract
from tests.transport.compiled_bugs import Bug, build, planted
from tests.transport.compiled_standin import CompiledNetwork
from tests.transport.contract import CHECKS, check_wrap
from tests.transport.srd_bugs import BUGS
from tests.transport.standin import Mood, StandinNetwork
from tests.transport.standin_card import CardPair
from tests.transport.test_srd import FAULTS, SRD_MOODS, issue, opener, provoked, run_until_error

FEWEST = Mood(max_receive=SPARE + 4, max_send=4, late_completions=30)  # receives and work requests
ALL_MOODS = {**SRD_MOODS, "fewest": FEWEST, "bursts": Mood(lazy=0.0, max_send=24, max_receive=48)}
QUICK = Mood(pieces=1, lazy=0.0, late_completions=3)


def check_sequences(network: StandinNetwork) -> None:
    """More puts on one channel than there are sequences."""
    check_wrap(network, 70_000)


def check_updates(network: StandinNetwork) -> None:
    """One way only, so that every credit comes back by an update."""
    check_wrap(network, 3000)


def check_receives(network: StandinNetwork) -> None:
    """When nothing moves any more, every receive is posted, and every work request is free."""
    check_wrap(network)
    network.settle()
    for transport in network.transports:
        assert {len(peer.pair.waiting) for peer in transport._peers} == {transport._receives}, "receives are missing"
        assert {peer.pair.occupied for peer in transport._peers} == {0}


ALL_CHECKS = {**CHECKS, "receives": check_receives, "sequences": check_sequences, "updates": check_updates}


def network(kind: type[StandinNetwork] = CompiledNetwork, mood: Mood | None = None, **more: Any) -> StandinNetwork:
    return kind(opener(), mood=mood, srd=True, **more)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", ALL_MOODS)
@pytest.mark.drawn(3)
def test_contract(mood: str, check: str, pytestconfig: pytest.Config) -> None:
    with network(mood=ALL_MOODS[mood], seed=pytestconfig.getoption("--seed")) as ranks:
        CHECKS[check](ranks)


@pytest.mark.slow
def test_the_sequences_wrap() -> None:
    with network(mood=QUICK, ranks=2) as ranks:
        check_sequences(ranks)


@pytest.mark.parametrize("kind", [StandinNetwork, CompiledNetwork])
def test_every_receive_is_posted_again(kind: type[StandinNetwork]) -> None:
    with network(kind, ALL_MOODS["bursts"]) as ranks:
        check_receives(ranks)


def test_the_receives_suffice_for_updates() -> None:
    with network(mood=FEWEST, ranks=2) as ranks:
        check_updates(ranks)


def as_parameter(bug: Bug) -> Any:
    """Bugs that take many puts to show are slow."""
    return pytest.param(bug, id=bug.name, marks=pytest.mark.slow if bug.check == "sequences" else ())


@pytest.mark.parametrize("bug", [as_parameter(bug) for bug in BUGS])
@pytest.mark.drawn(1)
def test_planted_bug_fails_the_contract(bug: Bug, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bugs show at some orders of events only: a dozen are tried."""
    monkeypatch.setattr(contract, "TURNS", 200_000)  # three times what any check takes: what is stuck need not be so for a minute
    loop = build(bug, tmp_path)
    mood = QUICK if bug.mood == "quick" else ALL_MOODS[bug.mood]
    with pytest.raises((AssertionError, TransportError, verbs.VerbsError), match=bug.message):
        for seed in range(pytestconfig.getoption("--seed"), pytestconfig.getoption("--seed") + 12):
            with network(mood=mood, seed=seed, loop=loop, ranks=2 if bug.check in ("sequences", "updates") else 3) as ranks:
                ALL_CHECKS[bug.check](ranks)


def test_every_bug_can_be_planted() -> None:
    for bug in BUGS:
        planted(bug)


def order(posted: StandinNetwork) -> list[str]:
    """The kinds of requests since the last call."""
    kinds, posted.fabric.posted = posted.fabric.posted, []
    return kinds


def test_both_engines_post_the_same_requests(rng: np.random.Generator) -> None:
    """Random puts, and all of them done before the next ones: kind by kind, in the same order; updates and messages with the same words."""
    rounds = [rng.integers((4, 2, 2, 3000), size=(rng.integers(1, 99), 4)).tolist() for _ in range(30)]
    posted = []
    for kind in (StandinNetwork, CompiledNetwork):
        found: list[Any] = []
        with network(kind, SRD_MOODS["short_messages"]) as ranks:
            for puts in rounds:
                for channel, peer, full, size in puts:
                    producer = ranks.producers[0]
                    producer.issue(channel, 1 + peer, 0, 0, full * size, ranks.flag_offset(channel), producer.head + 1)
                ranks.settle()
                found.append(order(ranks))
                found.append([transport._slots.raw for transport in ranks.transports])
        posted.append(found)
    for number, (python, compiled) in enumerate(zip(*posted, strict=True)):
        assert python == compiled, f"step {number}"


# ---- failures: both engines say the same
def words(error: TransportError) -> tuple[object, ...]:
    return error.peer, error.op, error.status, error.queue_pair, error.remedy, str(error)


def posting_fails(ranks: StandinNetwork) -> None:
    def commit() -> None:
        raise verbs.VerbsError("posting to a queue pair", 12)

    ranks.transports[0]._by_rank[1].pair.commit = commit
    issue(ranks)


def polling_fails(ranks: StandinNetwork) -> None:
    def poll(limit: int) -> list[verbs.Completion]:
        raise verbs.VerbsError("polling a completion queue", 5)

    ranks.transports[0]._sends.poll = poll


def no_more_receives(ranks: StandinNetwork) -> None:
    def receive(wr_id: int, local: int, size: int, lkey: int) -> None:
        raise verbs.VerbsError("posting a receive", 12)

    ranks.transports[1]._by_rank[0].pair.receive = receive
    issue(ranks)


def port_down(ranks: StandinNetwork) -> None:
    nic = ranks.transports[0]._nic
    nic.up, ranks.transports[0]._port_seconds = False, 0.0
    nic.pending_events.append(verbs.Event(verbs.PORT_ERROR))


def refused(**changes: int) -> Callable[[StandinNetwork], None]:
    def put(ranks: StandinNetwork) -> None:
        issue(ranks, **changes)

    put.__name__ = "put_" + "_".join(f"{name}_{value}" for name, value in changes.items())
    return put


FAILURES: dict[Callable[[StandinNetwork], None], str] = {
    **{fault: status for fault, (status, *_) in FAULTS.items()},
    posting_fails: "ENOMEM",
    polling_fails: "EIO",
    no_more_receives: "ENOMEM",
    port_down: "IBV_EVENT_PORT_ERR",
    refused(to=7): "unreachable",
    refused(to=0): "unreachable",
    refused(channel=1 << 16): "bad channel",
    refused(src_offset=1 << 20): "bad address",
    refused(dst_offset=(1 << 64) - 8): "bad address",
    refused(signal_offset=1 << 16): "bad address",
    refused(signal_offset=12): "bad address",
}


@pytest.mark.parametrize("scenario", FAILURES, ids=lambda scenario: scenario.__name__)
@pytest.mark.drawn(7)
def test_failures_are_the_same(scenario: Callable[[StandinNetwork], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkernel.transport.rdma.EXPLAIN_SECONDS", 0.05)
    errors = []
    for kind in (StandinNetwork, CompiledNetwork):
        with network(kind, Mood(lazy=0.0), ranks=2) as ranks:
            error = provoked(ranks, scenario)
            failed = next(engine for engine in ranks.engines if engine.error is error)
            assert failed.next_event_ns() is None
            with pytest.raises(TransportError) as again:
                failed.step()
            assert again.value is error
            errors.append(words(error))
    assert errors[0] == errors[1]
    assert errors[1][2] == FAILURES[scenario]


def test_a_failure_gives_no_credits() -> None:
    with network(mood=Mood(lazy=0.5), ranks=2) as ranks:
        for value in range(1, 40):
            issue(ranks, value=value)
        ranks.fabric.cut.add(1)
        run_until_error(ranks)
        assert ranks.producers[0].completed == ranks.flag(1, 0) == 0


# ---- when it is used
def engine_of(ranks: StandinNetwork) -> type[Engine]:
    """The engine that would run with the first rank's transport."""
    with open_engine("srd", RingReader(ranks.producers[0].buffer), ranks.transports[0]) as engine:
        return type(engine)


def test_it_runs_where_it_can() -> None:
    with network(ranks=2) as ranks:
        assert engine_of(ranks) is CompiledEngine


@pytest.mark.parametrize("missing", ["pair", "route", "function"])
def test_python_takes_over_where_it_cannot(missing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with network(ranks=2) as ranks:
        peer = ranks.transports[0]._peers[0]
        assert isinstance(peer.pair, CardPair)
        if missing == "pair":
            monkeypatch.setattr(peer.pair, "handles", lambda: None)
        elif missing == "route":
            monkeypatch.setattr(type(peer.destination), "route", lambda self, pair: None)
        else:
            assert ranks.fabric.calls is not None
            ranks.fabric.calls.datagrams.structure(peer.pair).write_imm = None
        with caplog.at_level(logging.INFO, "mkernel"):
            assert engine_of(ranks) is Engine
        assert "engine runs in Python" in caplog.text
        assert {"pair": "queue pairs", "route": "address handles", "function": "lacks functions"}[missing] in caplog.text


def test_a_world_of_one_node_is_left_to_python() -> None:
    with network(ranks=1, kind=StandinNetwork) as ranks, pytest.raises(UnfitError, match="no peers"):
        transport: Transport = ranks.transports[0]
        SrdSide(transport)
