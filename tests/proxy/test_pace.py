"""When an engine spins, and how long it naps."""

from __future__ import annotations

import types

import pytest

from mkernel.proxy import pace as module
from mkernel.proxy.pace import GRAPH_SPIN_NS, LONG_NAP_NS, NAP_NS, SPIN_NS, Pace


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**12
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic_ns=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def naps(pace: Pace, clock: Clock, nanoseconds: int) -> list[int]:
    """The naps of an engine for which nothing moves for that long. Each takes its time, and each look 2 us."""
    end, found = clock.now + nanoseconds, []
    while clock.now < end:
        found.append(pace.nap(False))
        clock.now += found[-1] + 2_000
    return found


def test_it_spins_then_naps(clock: Clock) -> None:
    pace = Pace()
    assert pace.nap(True) == 0
    assert set(naps(pace, clock, SPIN_NS)) == {0}
    later = naps(pace, clock, 50_000_000)
    assert later == sorted(later)
    assert 0 < later[0] < NAP_NS / 10
    assert later[-1] == NAP_NS
    assert pace.nap(True) == 0
    assert set(naps(pace, clock, SPIN_NS)) == {0}, "movement wakes it"


def test_it_is_awake_while_a_call_is_under_way(clock: Clock) -> None:
    launching = [True]
    pace = Pace(lambda: launching[0])
    pace.nap(True)
    assert set(naps(pace, clock, 300_000_000)) == {0}, "however long the call waits for others"
    launching[0] = False
    later = naps(pace, clock, 10**9)
    assert later[-1] == LONG_NAP_NS, "no command comes before the next launch, which wakes it"


def test_replays_of_graphs_find_it_awake(clock: Clock) -> None:
    pace = Pace(lambda: False, lambda: True)
    pace.nap(True)
    assert set(naps(pace, clock, GRAPH_SPIN_NS)) == {0}
    assert set(naps(pace, clock, 10**9)) == {NAP_NS}, "after a pause a replay waits for no longer"


def test_for_how_long_is_the_users_choice(clock: Clock) -> None:
    for seconds in (0, 3600):
        pace = Pace(lambda: False, lambda: True, graph_spin_ns=seconds * 10**9)
        pace.nap(True)
        clock.now += 2 * GRAPH_SPIN_NS
        assert pace.nap(False) == (0 if seconds else NAP_NS)
