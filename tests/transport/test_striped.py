"""Several links as one: the contract over unlike links and in all moods, links that fail while puts are under way, planted bugs."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from mkernel.abi import RING_SLOTS, SIGNAL_FLAGS
from mkernel.errors import TransportError
from mkernel.proxy.engine import Engine
from mkernel.proxy.ring import RingReader
from mkernel.transport import striped
from mkernel.transport.base import Put
from mkernel.transport.emulated import Faults
from mkernel.transport.null import NullTransport
from mkernel.transport.striped import Link, StripedTransport, shares
from tests.transport.contract import CHECKS, check_signal_never_before_data
from tests.transport.harness import Producer
from tests.transport.standin import MOODS, Mood
from tests.transport.striped_networks import BUGS, FAILING_BUGS, LOST_CARD_BUGS, RATES, Cards, EmulatedLinks, ItCarriesOn

ENGINES = ("python", "compiled")
_FAULTS = {
    "plain": (Faults(), Faults()),
    "unlike": (Faults(delay_us=100, reorder_us=20), Faults(queue_depth=3)),
    "disordered": (Faults(reorder_us=40, ack_us=60), Faults(reorder_us=100, ack_us=30, queue_depth=5)),
}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's puts have at most 1500 bytes: they are spread, too."""
    monkeypatch.setattr(striped, "SMALLEST", 48)
    monkeypatch.setattr(striped, "UNIT", 16)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("faults", _FAULTS)
@pytest.mark.drawn(2)
def test_contract_over_emulated_links(faults: str, check: str, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed")
    with EmulatedLinks(faults=_FAULTS[faults], seed=seed) as network:
        CHECKS[check](network)
        assert len(network.transports[0].links) == 2


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.drawn(3)
def test_contract_over_cards(engine: str, mood: str, check: str, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed")
    with Cards(moods=(MOODS[mood], Mood()), compiled=engine == "compiled", seed=seed) as network:
        CHECKS[check](network)
        assert all(len(transport.links) == 2 for transport in network.transports), "none has failed"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_fails_the_contract(bug: type[StripedTransport]) -> None:
    """Over links of very unlike rates one of the seeds shows each."""
    for seed in range(4):
        faults = (Faults(delay_us=200, reorder_us=40), Faults(reorder_us=100))
        with EmulatedLinks(kind=bug, faults=faults, seed=seed) as network:
            try:
                check_signal_never_before_data(network, seed)
            except AssertionError as error:
                assert re.search(BUGS[bug], str(error)), error
                return
    raise AssertionError(f"{bug.__name__} was not noticed")


# ---- links that fail
def lose(network: Cards) -> None:
    """The second network is gone, for all."""
    network.fabrics[1].cut |= set(network.ranks)


@pytest.mark.parametrize("turns", [1, 15, 30, 60])
@pytest.mark.parametrize("mood", ["late", "slow", "short_queues"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.drawn(2)
def test_a_lost_network_costs_bandwidth_only(
    engine: str, turns: int, mood: str, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    seed, compiled = pytestconfig.getoption("--seed"), engine == "compiled"
    with (
        Cards(moods=(Mood(), MOODS[mood]), then=(turns, lose), compiled=compiled, seed=seed) as network,
        caplog.at_level(logging.WARNING),
    ):
        check_signal_never_before_data(network, seed)
        for rank, transport in enumerate(network.transports):
            assert transport.links == [f"net0card{rank}:1"]
            assert f"net1card{rank}:1 has failed, and its puts go by net0card{rank}:1 from now on" in caplog.text
            assert "IBV_WC_RETRY_EXC_ERR" in caplog.text


def lose_card(network: Cards) -> None:
    """The last network is gone for rank 1 only: what others have under way on it to each other could still arrive."""
    network.fabrics[-1].cut.add(1)


def lose_last(network: Cards) -> None:
    network.fabrics[-1].cut |= set(network.ranks)


@pytest.mark.parametrize("turns", [15, 40])
@pytest.mark.parametrize("loss", [lose_card, lose_last])
@pytest.mark.parametrize("links", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.drawn(3)
def test_a_lost_card(engine: str, turns: int, loss: Callable[[Cards], None], links: int, pytestconfig: pytest.Config) -> None:
    """The link that fails is slow, so that much of what it has to carry is under way, also to peers that it still reaches."""
    seed, moods = pytestconfig.getoption("--seed"), (*(Mood(),) * (links - 1), MOODS["slow"])
    with Cards(moods=moods, then=(turns, loss), compiled=engine == "compiled", seed=seed) as network:
        check_signal_never_before_data(network, seed)
        assert all(len(transport.links) == links - 1 for transport in network.transports)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_cards_but_one_are_lost(engine: str, pytestconfig: pytest.Config) -> None:
    """One after the other, the first of them the home of most flags: what the second had taken over is moved once more."""
    seed = pytestconfig.getoption("--seed")

    def lose_second(network: Cards) -> None:
        network.fabrics[1].cut.add(0)

    def lose_first(network: Cards) -> None:
        network.fabrics[2].cut.add(0)
        network.then = (network.turns + 1 + seed % 40, lose_second)

    with Cards(
        moods=(Mood(), MOODS["slow"], Mood()), then=(10 + seed % 30, lose_first), compiled=engine == "compiled", seed=seed
    ) as network:
        check_signal_never_before_data(network, seed)
        assert network.transports[0].links == ["net0card0:1"]


@pytest.mark.parametrize(("engine", "bug"), [*(("python", bug) for bug in LOST_CARD_BUGS), ("compiled", ItCarriesOn)])
def test_planted_bug_shows_where_a_card_is_lost(engine: str, bug: type[StripedTransport]) -> None:
    compiled = engine == "compiled"
    loss, links, message = (lose_card, 2, "went back|visible before") if bug is ItCarriesOn else (lose_last, 3, "only .* are in flight")
    with pytest.raises((AssertionError, TransportError), match=message):
        for seed in range(12):
            moods = (*(Mood(),) * (links - 1), MOODS["slow"])
            with Cards(kind=bug, moods=moods, then=(15, loss), compiled=compiled, seed=seed) as network:
                check_signal_never_before_data(network, seed)


@pytest.mark.parametrize("number", [0, 1])
def test_a_link_that_fails_in_mid_call(number: int, pytestconfig: pytest.Config) -> None:
    """At many times, either link, whichever has the flags."""
    seed, failed = pytestconfig.getoption("--seed"), 0
    for at in np.random.default_rng(seed).integers(2_000, 100_000, 2):
        with EmulatedLinks(faults=_FAULTS["disordered"], down=(0, number, int(at)), seed=seed) as network:
            check_signal_never_before_data(network, seed)
            failed += len(network.transports[0].links) == 1
    assert failed, "the times are those of puts"


@pytest.mark.parametrize("bug", FAILING_BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_shows_where_a_link_fails(bug: type[StripedTransport]) -> None:
    for seed in range(14, 60):  # the first finds both bugs: when it was written here
        with EmulatedLinks(kind=bug, faults=_FAULTS["disordered"], down=(0, seed % 2, 5_000 + 2_000 * seed), seed=seed) as network:
            try:
                check_signal_never_before_data(network, seed)
            except AssertionError as error:
                assert re.search(FAILING_BUGS[bug], str(error)), error
                return
    raise AssertionError(f"{bug.__name__} was not noticed")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_last_link_ends_the_world_and_names_the_peer(engine: str) -> None:
    with Cards(compiled=engine == "compiled") as network:
        for fabric in network.fabrics:
            fabric.cut.add(1)
        network.producers[0].issue(1, 1, 0, 0, 1000, network.flag_offset(0), 1)
        with pytest.raises(TransportError) as caught:
            for _ in range(20_000):
                network.turn()
        assert (caught.value.peer, caught.value.status) == (1, "IBV_WC_RETRY_EXC_ERR")
        assert network.producers[0].completed == 0


def test_other_errors_end_the_world_at_once() -> None:
    """A put outside of the heap is wrong on every link."""
    with Cards() as network, pytest.raises(TransportError) as caught:
        network.transports[0].post(Put(0, 1, 1, 0, 1 << 30, 1000, network.flag_offset(0), 1))
    assert caught.value.status == "bad address"


# ---- how much goes where
def test_shares_end_at_the_same_time(rng: np.random.Generator) -> None:
    for _ in range(300):
        rates, backlogs = rng.uniform(1, 20, rng.integers(1, 5)), rng.integers(0, 5000, 5)
        backlogs = backlogs[: len(rates)]
        size = int(rng.integers(1, 20_000))
        parts = shares(size, list(rates), list(backlogs))
        assert sum(parts) == size and all(part == 0 or part >= min(size, 48) - 16 * len(parts) for part in parts)
        ends = [(backlog + part) / rate for part, rate, backlog in zip(parts, rates, backlogs, strict=True)]
        used = [end for end, part in zip(ends, parts, strict=True) if part]
        unused = [end for end, part in zip(ends, parts, strict=True) if not part]
        # A link is left out that would carry less than 48 bytes. The others carry these, so that all end later, by each left out after it.
        left_out = 1 + sum(1 / links for links in range(1, len(parts)))
        slack = (48 * left_out + 16 * len(parts)) / min(rates)
        assert max(used) - min(used) <= slack and all(end >= max(used) - slack for end in unused)


def test_unlike_links_carry_the_sum_of_their_rates() -> None:
    """50 and 12.5 GB/s: 24 puts of 1 MiB take as long as over one link of 62.5, but for the latencies of a put."""
    with EmulatedLinks(ranks=2, heap_bytes=32 << 20) as network:
        begin = network.clock.now
        for number in range(24):
            network.producers[0].issue(1 + number % 4, 1, number << 20, number << 20, 1 << 20, network.flag_offset(number % 4), number + 1)
        network.settle()
        virtual = (network.clock.now - begin) * 1e-9
        assert network.producers[0].completed == 24
    ideal = (24 << 20) / (sum(RATES) * 1e9)
    assert ideal < virtual < 1.05 * ideal + 15e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_small_puts_are_not_spread(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped, "SMALLEST", 32 << 10)
    with Cards(ranks=2, compiled=engine == "compiled") as network:
        network.producers[0].issue(1, 1, 0, 0, (64 << 10) - 1, network.flag_offset(0), 1)
        network.settle()
        assert sorted(len(fabric.posted) for fabric in network.fabrics) == [0, 3], "a write, an atomic, a flag"
        network.producers[0].issue(1, 1, 0, 0, 128 << 10, network.flag_offset(0), 2)
        network.settle()
        assert math.prod(fabric.posted.count("write") for fabric in network.fabrics) >= 2, "both links"


@pytest.mark.parametrize("links", [1, 2, 4])
def test_cost_per_put(monkeypatch: pytest.MonkeyPatch, links: int) -> None:
    """Prints what ring, engine and striping cost in Python (``-s``); links add theirs. Asserts only that it works."""
    monkeypatch.setattr(striped, "SMALLEST", 64 << 10)
    transport = StripedTransport(0, [Link(NullTransport(), f"link {number}", 1.0) for number in range(links)])
    producer = Producer()
    engine = Engine(RingReader(producer.buffer), transport)
    spent = 0
    while producer.head < 4 * RING_SLOTS:
        for _ in range(RING_SLOTS):
            channel = producer.head % 4
            producer.issue(channel, 1, 0, 0, 1 << 20, SIGNAL_FLAGS + 8 * channel, producer.head + 1)
        begin = time.process_time_ns()
        while producer.completed < producer.head:
            engine.step()
        spent += time.process_time_ns() - begin
    print(f"{links} links that carry nothing: {spent / 1e3 / producer.completed:.1f} us per put")
    assert producer.completed == 4 * RING_SLOTS


def test_links_must_be_there() -> None:
    with pytest.raises(ValueError, match="there must be links"):
        StripedTransport(0, [])
