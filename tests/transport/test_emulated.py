"""The emulated transport: pacing in virtual time, the faults that end a world, the registry."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest

from mkernel import env
from mkernel import transport as registry
from mkernel.errors import ArgumentError, TransportError
from mkernel.transport.base import Put
from mkernel.transport.emulated import EmulatedTransport, Faults
from mkernel.transport.null import NullTransport
from tests.transport.harness import EmulatedNetwork, VirtualClock


class InstantCopier:
    """Copies nothing; remembers what was asked."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.closed = False

    def start(self, dst: int, src: int, size: int) -> int:
        self.log.append(("copy", dst, size))
        return len(self.log)

    def done(self, token: object) -> bool:
        return True

    def signal(self, address: int, value: int) -> None:
        self.log.append(("signal", address, value))

    def close(self) -> None:
        self.closed = True


def put(ticket: int, *, to: int = 1, channel: int = 0, size: int = 1 << 20) -> Put:
    return Put(ticket, channel, to, 0, 0, size, 8 * channel, ticket + 1)


def paced(
    gigabytes_per_second: float = 50.0, latency_us: float = 5.0, faults: Faults | None = None, heap: int = 0x1000
) -> tuple[EmulatedTransport, VirtualClock]:
    clock = VirtualClock()
    peers = {1: (0x10000, 0x20000), 2: (0x30000, 0x40000)}
    return EmulatedTransport(0, heap, peers, InstantCopier(), clock, gigabytes_per_second, latency_us, faults), clock


def run_until_quiet(transport: EmulatedTransport, clock: VirtualClock) -> dict[int, int]:
    """Completion time of each ticket."""
    ended: dict[int, int] = {}
    while True:
        ended |= dict.fromkeys(transport.poll(), clock.now)
        event = transport.next_event_ns()
        if event is None:
            return ended
        assert event > clock.now, "an event in the past that poll did not handle"
        clock.now = event


@pytest.mark.parametrize(("gigabytes_per_second", "latency_us"), [(50.0, 5.0), (12.5, 0.0), (3.0, 1.7)])
@pytest.mark.parametrize("size", [0, 8, 1_000, 1 << 20])
def test_puts_end_when_bandwidth_and_latency_say(gigabytes_per_second: float, latency_us: float, size: int) -> None:
    transport, clock = paced(gigabytes_per_second, latency_us)
    start = clock.now
    for ticket in range(20):
        assert transport.post(put(ticket, size=size))
    ended = run_until_quiet(transport, clock)
    for ticket in range(20):
        expected = start + (ticket + 1) * size / gigabytes_per_second + latency_us * 1e3
        assert expected - 0.01 <= ended[ticket] <= expected + 1.01


def test_an_idle_link_does_not_save_up_bandwidth() -> None:
    transport, clock = paced()
    transport.post(put(0))
    run_until_quiet(transport, clock)
    clock.now += 1_000_000
    start = clock.now
    transport.post(put(1))
    ended = run_until_quiet(transport, clock)
    assert ended[1] == pytest.approx(start + (1 << 20) / 50 + 5_000, abs=1.01)


def test_all_peers_and_channels_share_one_nic() -> None:
    transport, clock = paced()
    start = clock.now
    for ticket in range(12):
        transport.post(put(ticket, to=1 + ticket % 2, channel=ticket % 3))
    ended = run_until_quiet(transport, clock)
    assert max(ended.values()) == pytest.approx(start + 12 * (1 << 20) / 50 + 5_000, abs=1.01)


def test_unpaced_puts_end_at_once() -> None:
    transport, _ = paced(0, 0)
    for ticket in range(5):
        transport.post(put(ticket))
    assert transport.poll() == [0, 1, 2, 3, 4]
    assert transport.next_event_ns() is None


def test_nothing_is_visible_a_nanosecond_early() -> None:
    transport, clock = paced(1.0, 1.0)
    end = clock.now + 4_096 + 1_000
    transport.post(put(0, size=4_096))
    assert transport.next_event_ns() == end
    clock.now = end - 1
    assert transport.poll() == []
    clock.now = end
    assert transport.poll() == [0]


def test_the_copy_starts_when_posted() -> None:
    transport, clock = paced()
    transport.post(put(0))
    copier = transport._copier
    assert isinstance(copier, InstantCopier)
    assert copier.log == [("copy", 0x10000, 1 << 20)]
    run_until_quiet(transport, clock)
    assert copier.log[1:] == [("signal", 0x20000, 1)]


def test_a_slow_copy_holds_signal_and_credit() -> None:
    transport, clock = paced()
    finished = False
    transport._copier.done = lambda token: finished  # type: ignore[method-assign]
    transport.post(put(0))
    clock.now += 10**9
    assert transport.poll() == []
    assert transport.next_event_ns() == 0, "the end of a copy is not a time: poll again"
    finished = True
    assert transport.poll() == [0]


def test_delay_is_extra_and_reproducible() -> None:
    def times(seed: int) -> dict[int, int]:
        transport, clock = paced(faults=Faults(delay_us=100, seed=seed))
        for ticket in range(10):
            transport.post(put(ticket, channel=ticket))
        return run_until_quiet(transport, clock)

    base_transport, clock = paced()
    for ticket in range(10):
        base_transport.post(put(ticket, channel=ticket))
    base = run_until_quiet(base_transport, clock)
    first = times(1)
    assert first == times(1)
    assert first != times(2)
    assert all(base[ticket] <= first[ticket] <= base[ticket] + 100_001 for ticket in base)


def test_reorder_completes_out_of_order_between_channels_only() -> None:
    transport, clock = paced(faults=Faults(reorder_us=200, seed=3))
    for ticket in range(60):
        transport.post(put(ticket, channel=ticket % 4))
    order = list(run_until_quiet(transport, clock))
    assert sorted(order) == list(range(60))
    assert order != sorted(order), "nothing was reordered"
    for channel in range(4):
        own = [ticket for ticket in order if ticket % 4 == channel]
        assert own == sorted(own)


def test_reorder_lands_data_out_of_order_inside_a_channel() -> None:
    transport, clock = paced(faults=Faults(reorder_us=200, seed=3))
    for ticket in range(30):
        transport.post(Put(ticket, 0, 1, 0, ticket << 20, 1 << 20, 0, ticket + 1))
    run_until_quiet(transport, clock)
    copier = transport._copier
    assert isinstance(copier, InstantCopier)
    landed = [dst for what, dst, _ in copier.log if what == "copy"]
    assert len(landed) == 30
    assert landed != sorted(landed)


def test_completions_that_come_late_check_the_source() -> None:
    heap = ctypes.create_string_buffer(1024)
    for changed in (False, True):
        transport, clock = paced(faults=Faults(ack_us=300, seed=5), heap=ctypes.addressof(heap))
        for ticket in range(20):
            transport.post(put(ticket, size=1024))
        copier = transport._copier
        assert isinstance(copier, InstantCopier)
        while sum(what == "signal" for what, _, _ in copier.log) < 20:
            assert len(transport.poll()) < 20
            clock.now = transport.next_event_ns() or 0
        if changed:
            heap[1000] = b"x"
            with pytest.raises(TransportError, match="its source has changed") as caught:
                run_until_quiet(transport, clock)
            assert (caught.value.peer, caught.value.status) == (1, "source changed")
        else:
            assert run_until_quiet(transport, clock), "none comes later than its signal"
            assert transport.next_event_ns() is None


def test_queue_depth_refuses_until_a_completion() -> None:
    transport, clock = paced(faults=Faults(queue_depth=2))
    assert [transport.post(put(ticket)) for ticket in range(3)] == [True, True, False]
    clock.now = transport.next_event_ns() or 0
    assert transport.poll() == [0]
    assert transport.post(put(2))
    assert not transport.post(put(3))


def test_failed_completion_names_the_peer() -> None:
    transport, clock = paced(faults=Faults(fail_completion=3))
    for ticket in range(6):
        transport.post(put(ticket, to=1 + ticket % 2))
    with pytest.raises(TransportError, match="injected") as caught:
        run_until_quiet(transport, clock)
    assert (caught.value.peer, caught.value.op, caught.value.status) == (2, "put_signal", "injected failure")


def test_a_cut_link_swallows_what_would_arrive_later() -> None:
    clock_start = VirtualClock().now
    cut = clock_start + round(3.5 * (1 << 20) / 50 + 5_000)
    transport, clock = paced(faults=Faults(cut_ns={1: cut}))
    for ticket in range(6):
        transport.post(put(ticket, to=1))
    transport.post(put(6, to=2))
    assert list(run_until_quiet(transport, clock)) == [0, 1, 2, 6]
    transport.post(put(7, to=1))
    assert run_until_quiet(transport, clock) == {}


@pytest.mark.parametrize("faults", [Faults(drop=frozenset({2})), Faults(drop=frozenset({2}), reorder_us=50)], ids=["drop", "drop_reorder"])
def test_a_dropped_put_stops_its_channel_and_no_other(faults: Faults) -> None:
    transport, clock = paced(faults=faults)
    for ticket in range(9):
        transport.post(put(ticket, channel=ticket % 3))
    assert sorted(run_until_quiet(transport, clock)) == [0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (Put(0, 0, 9, 0, 0, 8, 0, 1), "unreachable"),
        (Put(0, 0, 0, 0, 0, 8, 0, 1), "unreachable"),
        (Put(0, 0, 1, 4000, 0, 100, 0, 1), "bad address"),
        (Put(0, 0, 1, 0, 4000, 100, 0, 1), "bad address"),
        (Put(0, 0, 1, 0, 0, 8, 504 + 8, 1), "bad address"),
        (Put(0, 0, 1, 0, 0, 8, 12, 1), "bad address"),
    ],
)
def test_bad_commands_are_errors_not_wild_writes(bad: Put, status: str) -> None:
    copier = InstantCopier()
    transport = EmulatedTransport(0, 0x1000, {1: (0x10000, 0x20000)}, copier, VirtualClock(), heap_bytes=4096, signal_bytes=512)
    with pytest.raises(TransportError) as caught:
        transport.post(bad)
    assert (caught.value.peer, caught.value.status) == (bad.dst_rank, status)
    assert copier.log == []
    assert transport.post(Put(0, 0, 1, 3996, 3996, 100, 504, 1))


def test_close_closes_the_copier() -> None:
    transport, _ = paced()
    transport.post(put(0))
    transport.close()
    assert transport._copier.closed  # type: ignore[attr-defined]
    assert transport.next_event_ns() is None


def wiring(copier: Callable[[], registry.Copier] = InstantCopier) -> registry.Wiring:
    return registry.Wiring(
        rank=0,
        heap_address=0x1000,
        heap_bytes=4096,
        signal_bytes=512,
        peers={1: (0x10000, 0x20000)},
        copier=copier,
        clock_ns=VirtualClock(),
    )


def test_registry_opens_by_name() -> None:
    def never() -> registry.Copier:
        raise AssertionError("the null transport copies nothing")

    assert registry.names() == ["emulated", "null", "rc", "srd"]
    assert isinstance(registry.create("null", wiring(never)), NullTransport)
    with env.override(MKERNEL_EMULATED_GBPS=1, MKERNEL_EMULATED_LATENCY_US=2):
        transport = registry.create("emulated", wiring())
    transport.post(Put(0, 0, 1, 0, 0, 1000, 0, 1))
    assert transport.next_event_ns() == VirtualClock().now + 1000 + 2000


@pytest.mark.parametrize("name", ["tcp", ""])
def test_registry_says_what_exists(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"transport = .*no such transport.*emulated, null, rc, srd"):
        registry.create(name, wiring())


def test_registry_is_lazy() -> None:
    code = (
        "import sys, mkernel.transport; sys.exit(any(m in sys.modules for m in ('mkernel.transport.emulated', 'mkernel.transport.null')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_null_completes_everything_and_moves_nothing() -> None:
    transport = NullTransport()
    assert transport.next_event_ns() is None
    assert transport.poll() == []
    assert all(transport.post(put(ticket)) for ticket in range(3))
    transport.flush()
    assert transport.next_event_ns() == 0
    assert transport.poll() == [0, 1, 2]
    assert transport.poll() == []


def test_cut_link_in_a_network_leaves_the_others_running() -> None:
    with EmulatedNetwork(3, faults=Faults(cut_ns={2: 0})) as network:
        for number in range(5):
            network.producers[0].issue(0, 1, 0, 8 * number, 8, network.flag_offset(0), number + 1)
            network.producers[0].issue(0, 2, 0, 8 * number, 8, network.flag_offset(0), number + 1)
        network.settle()
        assert network.flag(1, 0) == 5
        assert network.flag(2, 0) == 0
        assert network.producers[0].completed == 1, "credits are a prefix: the first put to the cut link holds them"
