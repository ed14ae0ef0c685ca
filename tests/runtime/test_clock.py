"""How clocks of devices and hosts are compared: the true difference lies within the error that is told."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mkernel.runtime import clock as clocks
from mkernel.runtime.clock import Clock, Parameters, Reading, ask, fit
from mkernel.runtime.cpu.backend import CpuBackend
from mkernel.runtime.cuda.clock import ClockReader
from mkernel.runtime.recorder import Recorder
from mkernel.runtime.traces import host_offset


def readings(rng: np.random.Generator, offset: int, step: int) -> list[Reading]:
    """Readings of a device whose time is the host's less ``offset``, in steps; the ways there and back take long, and differ."""
    found, now = [], int(rng.integers(1 << 50))
    for _ in range(int(rng.integers(1, 50))):
        there, back = (int(x) for x in rng.exponential(3000, 2) + 400)
        device = now + there - offset
        found.append(Reading(now, device - device % step, now + there + back))
        now += there + back + int(rng.integers(1, 5000))
    return found


@pytest.mark.parametrize("turn", range(40))
def test_the_true_offset_is_within_the_error(rng: np.random.Generator, turn: int) -> None:
    offset, step = int(rng.integers(-(1 << 60), 1 << 60)), int(rng.choice([1, 32, 1000, 1024]))
    given = readings(rng, offset, step)
    found = fit(given)
    assert abs(found.offset_ns - offset) <= found.error_ns
    if step == 1 and len(given) > 20:
        assert found.error_ns <= min(reading.after - reading.before for reading in given) // 2 + 2, "no better reading was used"


def test_more_readings_are_better(rng: np.random.Generator) -> None:
    given = readings(rng, 12345, 1)
    errors = [fit(given[:count]).error_ns for count in range(2, len(given))]
    assert errors == sorted(errors, reverse=True)
    with pytest.raises(ValueError, match="did not tell"):
        fit([])


def test_the_kernel_tells_its_time() -> None:
    """The kernel itself, on target cpu, whose clock is the host's: the difference is 0."""
    device = CpuBackend()
    try:
        memory = device.allocate_host(clocks.BYTES)
        kernel = device.load(clocks.SPEC)
        thread = threading.Thread(target=device.launch, args=(kernel, None, 1, bytes(Parameters.of(memory.address))))
        thread.start()
        given = ask(memory.view[: clocks.BYTES].cast("Q"))
        thread.join()
    finally:
        device.close()
    assert len(given) == dict(clocks.SPEC.constants)["kRounds"]
    assert all(reading.before <= reading.device <= reading.after for reading in given)
    found = fit(given)
    assert abs(found.offset_ns) <= found.error_ns


def test_a_device_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(clocks, "_LIMIT_SECONDS", 0.01)

    class Deaf(CpuBackend):
        def launch(self, *arguments: Any) -> None:
            pass

    device = Deaf()
    try:
        assert ClockReader(device).read().error_ns >= 1_000_000_000
    finally:
        device.close()
    assert "cannot be compared" in caplog.text


def test_drift_counts_as_error() -> None:
    recorder = Recorder(None)  # type: ignore[arg-type]
    recorder._clocks = Clock(1000, 20), Clock(1300, 30)
    offset, error = recorder.clock()
    for during in (1000, 1150, 1300):
        assert abs(during - offset) <= error - 30
    recorder._clocks = Clock(0, 0), Clock(0, 0)
    assert recorder.clock() == (0, 0)


@pytest.mark.parametrize("turn", range(20))
def test_hosts_are_compared_by_their_exchanges(rng: np.random.Generator, turn: int) -> None:
    """Nobody leaves an exchange before everybody has entered it."""
    offset, now = int(rng.integers(-(1 << 50), 1 << 50)), 1 << 52
    times: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for _ in range(8):
        entered = [now + int(x) for x in rng.integers(0, 300_000, 2)]
        left = [max(entered) + int(x) for x in rng.integers(1000, 200_000, 2)]
        for host in (0, 1):
            times[host].append((entered[host] - host * offset, left[host] - host * offset))
        now = max(left) + 1000
    one, other = ({"host": str(host), "times": times[host]} for host in (0, 1))
    found, error = host_offset(one, other)
    assert abs(found - offset) <= error
    assert error <= 500_000
    assert host_offset(one, {**other, "host": "0"}) == (0, 0), "processes of one host share their clock"
