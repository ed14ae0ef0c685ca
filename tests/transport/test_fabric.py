"""The fabric that SMs play: the contract in every mood, its pace, its end and its errors. Planted bugs must show."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkernel import abi
from mkernel.errors import ArgumentError, CompileError, Error, TransportError
from tests.gpu import fabric as script
from tests.ops.planted_bug import Bug
from tests.transport.contract import CHECKS, check_signal_never_before_data
from tests.transport.fabric_bugs import BUGS
from tests.transport.fabric_network import FabricNetwork

MOODS: dict[str, dict[str, float]] = {
    "rc": {},
    "srd": {"reorder_us": 40.0},
    "not paced": {"gigabytes_per_second": 0.0, "latency_us": 0.0},
    "slow": {"gigabytes_per_second": 1.0, "latency_us": 1.0},
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", MOODS)
def test_contract(mood: str, check: str, pytestconfig: pytest.Config) -> None:
    with FabricNetwork(3, seed=pytestconfig.getoption("--seed"), **MOODS[mood]) as network:
        CHECKS[check](network)


def reordered(seed: int) -> None:
    with FabricNetwork(3, seed=seed, **MOODS["srd"]) as network:
        check_signal_never_before_data(network, seed)


LATENCY_US = 30.0


def never_early(seed: int) -> list[float]:
    """Microseconds by which each flag is later than bandwidth and latency allow. The puts of a rank share one link; it saves nothing up."""
    rate, latency = 0.25, LATENCY_US
    rng = random.Random(seed)
    with FabricNetwork(3, gigabytes_per_second=rate, latency_us=latency, seed=seed) as network:
        due: list[float] = []
        seen: dict[int, int] = {}
        late: list[float] = []
        wrong: list[str] = []

        def watch() -> None:
            now = network.now
            for i, time in enumerate(due):
                if i not in seen and network.flag(1 + i % 2, i):
                    seen[i] = now
                    late.append((now - time) / 1e3)
                    if now < time:
                        wrong.append(f"put {i} was seen at {now}, due at {time:.0f} ns")

        network.watcher = watch
        free = 0.0
        for i in range(30):
            size = rng.choice((0, 64, 4096, rng.randrange(8192)))
            free = max(free, network.now) + size / rate
            due.append(free + latency * 1e3)
            assert network.producers[0].issue(i % 3, 1 + i % 2, 0, 0, size, network.flag_offset(i), 1) == i
            for _ in range(rng.choice((0, 0, 3, 60))):
                network.turn()
        while len(seen) < len(due):
            assert network.turn(), f"{len(seen)} of {len(due)} flags, and nothing more will happen"
        assert not wrong, wrong
        return late


def not_much_later(seed: int) -> None:
    """Threads take turns at random, so that some puts are late by many turns, in 8 of 100 runs one by a latency; never all of them."""
    late = sorted(never_early(seed))
    assert late[0] < LATENCY_US, late
    assert late[len(late) // 2] <= 2 * LATENCY_US, late
    assert late[-1] <= 4 * LATENCY_US, late


def test_nothing_is_early_nor_much_later(pytestconfig: pytest.Config) -> None:
    not_much_later(pytestconfig.getoption("--seed"))


def end(seed: int, calls: int = 40) -> None:
    """It takes and delivers all that a call has issued, then ends; the next call finds everything as it was left."""
    rng = random.Random(seed)
    with FabricNetwork(2, seed=seed) as network:
        for call in range(1, calls):
            for rank, issuer in enumerate(network.producers):
                for _ in range(rng.randrange(40 if call % 8 == 0 else 4)):
                    number = issuer.head
                    size = 0 if number % 5 == 0 else 64
                    assert issuer.issue(number % 2, 1 - rank, 0, 64 * number, size, network.flag_offset(number), 7) == number
                    network.run(rng.randrange(1000))  # commands come, and the call ends, while the fabric is looking for them
            network.end_call(call)
            network.settle()
            assert not network.launches, "a fabric goes on after its call has ended"
            for rank, issuer in enumerate(network.producers):
                assert issuer.completed == issuer.head, f"{issuer.completed} of {issuer.head} puts are complete"
                assert all(network.flag(1 - rank, number) == 7 for number in range(issuer.head))
                network.serve(rank, call + 1)


def test_it_ends_with_its_call(pytestconfig: pytest.Config) -> None:
    end(pytestconfig.getoption("--seed"))


def on_a_used_ring(seed: int) -> None:
    """A fabric begins where the one before it has ended, on the same ring, also once that has gone round; it carries nothing out again."""
    rng = random.Random(seed)
    with FabricNetwork(2, gigabytes_per_second=0.0, latency_us=0.0, seed=seed) as network:
        issuer, begin = network.producers[0], 0
        for call, end in enumerate((rng.randrange(1, 100), abi.RING_SLOTS + rng.randrange(100), abi.RING_SLOTS + 200), 1):
            full = 0
            while issuer.head < end:
                number = issuer.head
                network.write(0, 8 * number, number.to_bytes(8, "little"))
                is_full = issuer.issue(number % 3, 1, 8 * number, 8 * number, 8, network.flag_offset(number), 7) is None
                full = full + 1 if is_full else 0
                assert full < 2000, f"the ring stays full: {issuer.completed} of {issuer.head} puts are complete"
                if is_full or rng.random() < 0.1:
                    network.run(rng.randrange(300))
            network.end_call(call)
            for _ in range(20_000):
                if not network.turn():
                    break
            assert not network.launches, f"of {issuer.head} puts {issuer.completed} are complete, and the fabric goes on"
            assert all(network.flag(1, number) == 7 for number in range(end))
            words = [int.from_bytes(network.read(1, 8 * number, 8), "little") for number in range(end)]
            assert words == [number if number >= begin else 0 for number in range(end)]
            network.write(1, 0, bytes(8 * end))
            begin = end
            for rank in network.ranks:
                network.renew(rank)
                network.serve(rank, call + 1)


def test_another_fabric_goes_on_with_the_ring(pytestconfig: pytest.Config) -> None:
    on_a_used_ring(pytestconfig.getoption("--seed"))


def test_it_serves_the_next_call_too_if_that_has_been_launched() -> None:
    with FabricNetwork(2) as network:
        for ring in network.host_rings:
            ring.launched = 2
        network.end_call(1)
        network.run(3000)
        assert network.launches
        network.producers[0].issue(0, 1, 0, 0, 8, network.flag_offset(0), 1)
        while not network.flag(1, 0):
            assert network.turn()
        network.end_call(2)
        network.settle()
        assert not network.launches


def test_it_does_not_wait_long_for_a_call_that_does_not_come() -> None:
    """What was launched may be held up by a kernel that needs the fabric's SMs. The next fabric serves it."""
    with FabricNetwork(2) as network:
        for ring in network.host_rings:
            ring.launched = 2
        network.end_call(1)
        begin = network.now
        network.settle()
        assert not network.launches
        assert 0 <= network.now - begin < 200_000


@pytest.mark.parametrize("by", ["a rank of the node", "the host"])
def test_it_leaves_when_the_world_has_failed(by: str) -> None:
    with FabricNetwork(2) as network:
        network.producers[0].issue(0, 1, 0, 0, 8, network.flag_offset(0), 1)
        for rank in network.ranks:
            if by == "the host":
                abi.HostBlock.from_address(network.fabrics[rank]._parameters.world.host).abort = 1
            else:
                abi.SignalHeader.from_address(network.signals[rank].address()).abort = 2
        network.scheduler.library.poke(network.scheduler.handle)
        for _ in range(1000):
            network.turn()
        assert not network.launches
        assert network.now < 1_000_000


BAD: dict[str, tuple[tuple[int, ...], str]] = {
    "no path": ((0, 0, 0, 0, 8, abi.SIGNAL_FLAGS, 1), "no network path to rank 0"),
    "no rank": ((0, 9, 0, 0, 8, abi.SIGNAL_FLAGS, 1), "no network path to rank 9"),
    "source": ((0, 1, (1 << 20) - 4, 0, 8, abi.SIGNAL_FLAGS, 1), "outside the data heap"),
    "target": ((0, 1, 0, 1 << 21, 8, abi.SIGNAL_FLAGS, 1), "outside the data heap"),
    "size": ((0, 1, 8, 0, 2**64 - 8, abi.SIGNAL_FLAGS, 1), "outside the data heap"),
    "flag": ((0, 1, 0, 0, 8, (1 << 16) - 4, 1), "outside the signal segment"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_put_that_cannot_be_carried_out(bad: str) -> None:
    """Those before it arrive or not; it and those after it do nothing, and the rank hears of it."""
    put, text = BAD[bad]
    with FabricNetwork(2, heap_bytes=1 << 20) as network:
        network.producers[0].issue(0, 1, 0, 64, 8, network.flag_offset(2), 1)
        network.producers[0].issue(*put)
        network.producers[0].issue(0, 1, 0, 0, 8, network.flag_offset(1), 1)
        for _ in range(2000):
            network.turn()
        assert len(network.launches) == 1, "the other rank's"
        with pytest.raises(TransportError, match=text) as caught:
            network.fabrics[0].check()
        assert caught.value.op == "put_signal"
        assert network.flag(1, 1) == 0
        network.fabrics[1].check()


def test_a_call_in_a_graph_is_refused() -> None:
    with FabricNetwork(2) as network:
        network.fabrics[0].admit(False)
        with pytest.raises(ArgumentError, match="MKERNEL_EMULATED_ENGINE=host"):
            network.fabrics[0].admit(True)


def test_reports_can_say_who_was_put_to() -> None:
    with FabricNetwork(3) as network:
        for rank in (2, 1):
            network.producers[0].issue(0, rank, 0, 0, 8, network.flag_offset(0), 1)
        network.turn()
        network.settle()
        slots = network.host_rings[0].slots
        assert [(slots[i].ticket, slots[i].dst_rank) for i in range(3)] == [(1, 2), (2, 1), (0, 0)]


# ---- planted bugs
_FOUND_BY: dict[str, Callable[[int], Any]] = {
    "signal_never_before_data": lambda seed: _in_mood("not paced", seed),
    "reordered": reordered,
    "never_early": never_early,
    "not_much_later": not_much_later,
    "end": end,
    "on_a_used_ring": on_a_used_ring,
}


def _in_mood(mood: str, seed: int) -> None:
    with FabricNetwork(3, seed=seed, **MOODS[mood]) as network:
        check_signal_never_before_data(network, seed)


@pytest.mark.parametrize(("check", "bug"), [pytest.param(check, bug, id=bug.name) for check, bugs in BUGS.items() for bug in bugs])
@pytest.mark.drawn(2)
def test_a_planted_bug_shows(tmp_path: Path, check: str, bug: Bug) -> None:
    with bug.in_force(tmp_path / "kernels_src"):
        for seed in range(30):
            try:
                _FOUND_BY[check](seed)
            except CompileError:
                raise
            except (AssertionError, Error):
                return
    raise AssertionError(f"{bug.name}: not noticed")


# ---- the script for GPUs
_SCRIPT = ["--target", "cpu", "--gbps", "0.4", "--latency", "80", "--total", "200000", "--limit", "0"]


def test_the_script_measures_what_was_asked(capsys: Any) -> None:
    """In virtual time, where SMs are slow: so the network is slower still. Every byte is compared."""
    assert script.main([*_SCRIPT, "--sizes", "4096", "65536"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok\n") == 2, out
    assert out.count("\nobserved by the sender ") == 2, out


def test_the_script_notices_a_link_that_is_too_fast(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "Fabric", _Faster)
    assert script.main([*_SCRIPT, "--sizes", "65536"]) == 1
    assert " NO\n" in capsys.readouterr().out


def test_the_script_goes_on_after_kernels_that_gave_up(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Absent, "left", 5)  # the stages take four launches
    monkeypatch.setattr(script, "Fabric", _Absent)
    assert script.main([*_SCRIPT, "--sizes", "4096", "65536"]) == 1
    out = capsys.readouterr().out
    assert "\n     4096: a kernel has given up: state 1, flag kind 1 index" in out, out
    assert "; 128 puts, newest 128, 80 complete; launch 5, ended 5\n" in out, out
    assert out.count(" ok\n") == 1, out


class _Absent(script.Fabric):
    left = 0  # launches until one does not come

    def serve(self, turn: Any, launch: int) -> None:
        _Absent.left -= 1
        if _Absent.left:
            super().serve(turn, launch)


class _Faster(script.Fabric):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parameters.femtoseconds_per_byte = self._parameters.femtoseconds_per_byte * 4 // 5
