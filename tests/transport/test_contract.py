"""The contract over the emulated transport in every legal mood, and over transports with a planted bug, which must fail it."""

from __future__ import annotations

import pytest

from mkernel.errors import TransportError
from mkernel.transport.base import Put
from mkernel.transport.emulated import EmulatedTransport, Faults, _Flight
from tests.transport.contract import CHECKS, check_signal_never_before_data, check_wrap
from tests.transport.harness import EmulatedNetwork

MOODS = {
    "plain": Faults(),
    "delay": Faults(delay_us=40),
    "reorder": Faults(reorder_us=40),
    "delay_reorder": Faults(delay_us=100, reorder_us=20),
    "short_queue": Faults(queue_depth=3),
    "short_queue_reorder": Faults(queue_depth=5, reorder_us=40),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", MOODS)
def test_emulated(mood: str, check: str, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed")
    with EmulatedNetwork(faults=MOODS[mood], seed=seed) as network:
        CHECKS[check](network)


@pytest.mark.parametrize("seed", range(10))
def test_many_seeds(seed: int) -> None:
    with EmulatedNetwork(faults=Faults(reorder_us=40, seed=seed), seed=seed) as network:
        check_signal_never_before_data(network, seed)


def test_not_paced() -> None:
    with EmulatedNetwork(gigabytes_per_second=0, latency_us=0) as network:
        check_signal_never_before_data(network)


@pytest.mark.parametrize("mood", ["plain", pytest.param("reorder", marks=pytest.mark.slow)])
def test_ring_wraps_a_hundred_times(mood: str) -> None:
    with EmulatedNetwork(2, faults=MOODS[mood]) as network:
        check_wrap(network, 100 * 1024 + 7)


class SignalBeforeData(EmulatedTransport):
    def _finish(self, flight: _Flight) -> bool:
        put = flight.put
        self._copier.signal(self._peers[put.dst_rank][1] + put.signal_offset, put.signal_value)
        return super()._finish(flight)


class SignalAtPost(EmulatedTransport):
    def post(self, put: Put) -> bool:
        self._copier.signal(self._peers[put.dst_rank][1] + put.signal_offset, put.signal_value)
        return super().post(put)


class EpochEarly(EmulatedTransport):
    """Writes the newest value posted to the flag, not the put's own."""

    def _finish(self, flight: _Flight) -> bool:
        put = flight.put
        newest = max(f.put.signal_value for f in self._channels[put.dst_rank, put.channel] if f.put.signal_offset == put.signal_offset)
        flight.put = Put(put.ticket, put.channel, put.dst_rank, put.src_offset, put.dst_offset, put.bytes, put.signal_offset, newest)
        return super()._finish(flight)


class WrongChannel(EmulatedTransport):
    """Signals the flag of the channel that posted last."""

    last: int | None = None

    def post(self, put: Put) -> bool:
        self.last = put.signal_offset
        return super().post(put)

    def _finish(self, flight: _Flight) -> bool:
        put = flight.put
        assert self.last is not None
        flight.put = Put(put.ticket, put.channel, put.dst_rank, put.src_offset, put.dst_offset, put.bytes, self.last, put.signal_value)
        return super()._finish(flight)


class NoChannelOrder(EmulatedTransport):
    """Every put is a channel of its own, so signals come in order of arrival."""

    number = 0

    def post(self, put: Put) -> bool:
        self.number += 1
        own = Put(put.ticket, self.number, put.dst_rank, put.src_offset, put.dst_offset, put.bytes, put.signal_offset, put.signal_value)
        return super().post(own)


class CompletedAtPost(EmulatedTransport):
    early: list[int]

    def post(self, put: Put) -> bool:
        self.early = [*getattr(self, "early", []), put.ticket]
        return super().post(put)

    def poll(self) -> list[int]:
        super().poll()
        done, self.early = getattr(self, "early", []), []
        return done


class LostCompletion(EmulatedTransport):
    def poll(self) -> list[int]:
        return [ticket for ticket in super().poll() if ticket != 20]


class LostBytes(EmulatedTransport):
    """The last byte of a put stays behind."""

    def _start(self, flight: _Flight) -> None:
        put = flight.put
        if put.bytes > 1:
            flight.token = self._copier.start(
                self._peers[put.dst_rank][0] + put.dst_offset, self._heap_address + put.src_offset, put.bytes - 1
            )
        else:
            super()._start(flight)


BUGS: dict[type[EmulatedTransport], tuple[Faults, str]] = {
    SignalBeforeData: (Faults(), "visible before the bytes"),
    SignalAtPost: (Faults(), "visible before the bytes"),
    EpochEarly: (Faults(), "visible before the bytes"),
    WrongChannel: (Faults(), "never sent|visible before|went back"),
    NoChannelOrder: (Faults(reorder_us=40), "visible before the bytes|went back"),
    CompletedAtPost: (Faults(), "visible before the bytes"),
    LostCompletion: (Faults(), "nothing will ever complete them"),
    LostBytes: (Faults(), "visible before the bytes"),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_fails_the_body(bug: type[EmulatedTransport]) -> None:
    faults, message = BUGS[bug]
    with EmulatedNetwork(transport=bug, faults=faults) as network, pytest.raises(AssertionError, match=message):
        check_signal_never_before_data(network)


class CompletedTwice(EmulatedTransport):
    def poll(self) -> list[int]:
        done = super().poll()
        return done + done[:1]


def test_completing_twice_is_refused_by_the_ring() -> None:
    with EmulatedNetwork(transport=CompletedTwice) as network, pytest.raises(TransportError, match="are in flight"):
        check_signal_never_before_data(network)


@pytest.mark.parametrize("bug", [SignalBeforeData, CompletedAtPost], ids=lambda bug: bug.__name__)
def test_planted_bug_fails_the_wrap(bug: type[EmulatedTransport]) -> None:
    with (
        EmulatedNetwork(2, transport=bug) as network,
        pytest.raises(AssertionError, match=r"is visible, but its slot holds|were overwritten"),
    ):
        check_wrap(network)


def test_watching_sees_a_flag_between_two_engine_steps() -> None:
    """A signal that is wrong for one moment only is caught too: the watcher runs at every store."""

    class Glitch(EmulatedTransport):
        def _finish(self, flight: _Flight) -> bool:
            put = flight.put
            address = self._peers[put.dst_rank][1] + put.signal_offset
            before = put.signal_value - 1
            self._copier.signal(address, put.signal_value + 1_000_000)
            self._copier.signal(address, before)
            return super()._finish(flight)

    with EmulatedNetwork(transport=Glitch) as network, pytest.raises(AssertionError, match="never sent"):
        check_signal_never_before_data(network)
