"""Several cards below the compiled engine: the same requests and the same failures as in Python, and planted bugs in its source."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mkernel.errors import TransportError
from mkernel.transport import striped, verbs
from tests.transport import contract
from tests.transport.compiled_bugs import PLANTED_MOODS, STRIPED_BUGS, Bug, build, planted
from tests.transport.contract import check_signal_never_before_data
from tests.transport.standin import MOODS, Mood
from tests.transport.standin_card import CardPair, Work
from tests.transport.striped_networks import Cards


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped, "SMALLEST", 48)
    monkeypatch.setattr(striped, "UNIT", 16)


def test_both_engines_post_the_same_requests(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Random puts over three unlike links, and all of them done before the next ones: what goes where, of which size, in which order."""
    rounds = [rng.integers((4, 2, 2, 3000), size=(rng.integers(1, 9), 4)).tolist() for _ in range(30)]
    posted: list[tuple[str, str, int, int, int]] = []
    original = CardPair._post

    def post(pair: CardPair, work: Work) -> None:
        scratch = work.value if work.kind == "inline" else 0
        posted.append((pair.nic.port.device, work.kind, work.size, work.fenced, scratch))
        original(pair, work)

    monkeypatch.setattr(CardPair, "_post", post)
    found = []
    for compiled in (False, True):
        posted.clear()
        with Cards(moods=(MOODS["prompt"],) * 3, compiled=compiled) as network:
            for puts in rounds:
                for channel, peer, full, size in puts:
                    producer = network.producers[0]
                    producer.issue(channel, 1 + peer, 0, 0, full * size, network.flag_offset(channel), producer.head + 1)
                network.settle()
        found.append(list(posted))
    assert found[0] == found[1]
    assert {device for device, kind, *_ in found[0] if kind == "write"} == {f"net{number}card0" for number in range(3)}


# ---- failures of rank 0's second card: what the engine goes on after, and what ends the world
def event(network: Cards) -> None:
    network.links[1][0]._nic.pending_events.append(verbs.Event(8))


def port_down(network: Cards) -> None:
    nic = network.links[1][0]._nic
    nic.up = False
    nic.pending_events.append(verbs.Event(verbs.PORT_ERROR))
    network.links[1][0]._port_seconds = 0.0


def broken_pairs(network: Cards) -> None:
    """All of them: else a peer may find out first, and close the way to the others."""
    for connection in network.links[1][0]._by_peer[1]:
        connection.pair.fail()


def posting_fails(network: Cards, code: int = 19) -> None:
    def commit() -> None:
        raise verbs.VerbsError("posting to a queue pair", code)

    for connections in network.links[1][0]._by_peer.values():
        for connection in connections:
            connection.pair.commit = commit


def polling_fails(network: Cards) -> None:
    def poll(limit: int) -> list[verbs.Completion]:
        raise verbs.VerbsError("polling a completion queue", 5)

    network.links[1][0]._sends.poll = poll


def card_gone(network: Cards) -> None:
    network.fabrics[1].cut.add(0)


def a_full_queue(network: Cards) -> None:
    posting_fails(network, 12)


def outside(network: Cards) -> None:
    network.producers[0].issue(0, 1, 0, (1 << 20) - 4, 8, network.flag_offset(0), 1)


def unreachable(network: Cards) -> None:
    network.producers[0].issue(0, 7, 0, 0, 8, network.flag_offset(0), 1)


LOSSES: dict[Callable[[Cards], None], str] = {
    event: "IBV_EVENT_DEVICE_FATAL",
    port_down: "IBV_EVENT_PORT_ERR",
    broken_pairs: "IBV_WC_WR_FLUSH_ERR",
    posting_fails: "ENODEV",
    polling_fails: "EIO",
    card_gone: "IBV_WC_RETRY_EXC_ERR",
}
ENDS: dict[Callable[[Cards], None], str] = {a_full_queue: "ENOMEM", outside: "bad address", unreachable: "unreachable"}


@pytest.mark.parametrize("scenario", LOSSES, ids=lambda scenario: scenario.__name__)
def test_engines_go_on_alike(
    scenario: Callable[[Cards], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr("mkernel.transport.rdma.EXPLAIN_SECONDS", 0.05)
    seed, said = pytestconfig.getoption("--seed"), []
    for compiled in (False, True):
        caplog.clear()
        with Cards(ranks=2, then=(20, scenario), compiled=compiled, seed=seed) as network, caplog.at_level(logging.WARNING):
            check_signal_never_before_data(network, seed)
            for _ in range(200):
                network.turn()
            assert network.transports[0].links == ["net0card0:1"]
        mine = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rank 0")]
        # Which queue pair was the first to say so depends on what was under way.
        said.append([re.sub(r", queue pair \d+|(fetch_add|signal|write) to", "", text) for text in mine])
    assert said[0] == said[1]
    assert re.match(r"rank 0: net1card0:1 has failed, and its puts go by net0card0:1 from now on: ", said[1][0])
    assert LOSSES[scenario] in said[1][0]


@pytest.mark.parametrize("scenario", ENDS, ids=lambda scenario: scenario.__name__)
def test_engines_end_alike(scenario: Callable[[Cards], None]) -> None:
    errors = []
    for compiled in (False, True):
        with Cards(ranks=2, compiled=compiled) as network:
            scenario(network)
            for number in range(20):
                network.producers[0].issue(number % 4, 1, 0, 0, 1000, network.flag_offset(number % 4), number + 1)
            with pytest.raises(TransportError) as caught:
                for _ in range(2_000):
                    network.turn()
            error = caught.value
            assert network.engines[0].error is error
            errors.append((error.peer, error.op, error.status, error.remedy, re.sub("net.card", "card", str(error))))
    # A rank that is no peer has no home: the compiled engine names the first link.
    assert errors[0] == errors[1]
    assert errors[1][2] == ENDS[scenario]


def test_what_fails_in_a_spin_is_gone_on_without(pytestconfig: pytest.Config) -> None:
    """As the engine's process steps it: it stays awake, for what was under way must go by the others."""
    from mkernel.proxy.pace import Pace

    with Cards(ranks=2, compiled=True, seed=pytestconfig.getoption("--seed")) as network:
        for number in range(40):
            network.producers[0].issue(number % 4, 1, 0, 0, 1000, network.flag_offset(number % 4), number + 1)
        network.turn()
        card_gone(network)
        pace, naps = Pace(spin_ns=0), []
        while network.transports[0].links != ["net0card0:1"]:
            naps.append(network.engines[0].spin(pace, False, 0))
            network.fabrics[1].step()
        assert naps[-1] == 0
        for _ in range(20_000):  # what the lost card still says is not polled, so that its network never rests
            if network.producers[0].completed < 40:
                network.turn()
        assert network.producers[0].completed == 40
        assert [network.flag(1, index) for index in range(4)] == [37, 38, 39, 40]


# ---- planted bugs
def lose(network: Cards) -> None:
    network.fabrics[-1].cut |= set(network.ranks)


@pytest.mark.parametrize("bug", STRIPED_BUGS, ids=lambda bug: bug.name)
@pytest.mark.drawn(1)
def test_planted_bug_is_seen(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Some bugs show at some orders of events only: the worst in four of ten."""
    monkeypatch.setattr(contract, "TURNS", 5_000)
    loop, first, lost = build(bug, tmp_path), pytestconfig.getoption("--seed"), bug.check == "lost"
    moods = (*(Mood(),) * (2 if lost else 1), PLANTED_MOODS[bug.mood])
    with pytest.raises((AssertionError, TransportError), match=bug.message):
        for seed in range(first, first + 100):
            then = (15 + seed % 30, lose) if lost else None
            with Cards(moods=moods, then=then, compiled=True, loop=loop, seed=seed) as network:
                check_signal_never_before_data(network, seed)


def test_every_bug_can_be_planted() -> None:
    for bug in STRIPED_BUGS:
        planted(bug)
