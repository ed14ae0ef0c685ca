"""The order of launches on a real GPU: streams, graphs and their replays, what a host wait waits for; and the libraries (streams.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel.runtime.cuda.backend import CudaBackend
from mkernel.runtime.cuda.gpus import available
from tests.gpu.calls import SECONDS, Calls
from tests.runtime.processes import start_mpi

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_of_this_folder")]


class Pair:
    """Launches that wait for a flag, and launches that do not."""

    def __init__(self, device: CudaBackend) -> None:
        self.device, self.xp = device, device.xp
        self.waiting, self.quick = Calls(device, wait=1), Calls(device, wait=0)
        self.copier = device.copier()
        self.quick.write(self.copier)
        self.flags = 0
        self.streams: list[Any] = []

    def stream(self) -> Any:
        self.streams.append(self.xp.cuda.Stream(non_blocking=True))
        return self.streams[-1]

    def graph(self, calls: Calls, stream: Any, value: int = 1) -> Any:
        with stream:
            stream.begin_capture()
            calls.launch(stream.ptr, value)
            return stream.end_capture()

    def let_go(self, value: int) -> None:
        self.copier.signal(self.waiting.flag, value)

    def close(self) -> None:
        self.let_go(1 << 40)
        self.device.synchronize()
        self.copier.close()
        self.waiting.close()
        self.quick.close()


@pytest.fixture
def pair(device: CudaBackend) -> Iterator[Pair]:
    with contextlib.closing(Pair(device)) as pair:
        yield pair


def stays_behind(pair: Pair, stream: Any, value: int) -> None:
    """What is on ``stream`` does not end before the waiting kernel is let go, and then it does."""
    time.sleep(0.1)
    assert not stream.done, "it has overtaken a launch before it"
    pair.let_go(value)
    deadline = time.monotonic() + SECONDS
    while not stream.done:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_change_of_stream(pair: Pair) -> None:
    first, second = pair.stream(), pair.stream()
    pair.waiting.launch(first.ptr)
    pair.quick.launch(second.ptr)
    stays_behind(pair, second, 1)


def test_the_per_thread_default_stream(pair: Pair) -> None:
    pair.waiting.launch(2)
    done: list[bool] = []

    def other() -> None:
        with pair.xp.cuda.Device(pair.device.ordinal):
            pair.quick.launch(2)
            time.sleep(0.1)
            done.append(bool(pair.xp.cuda.Stream.ptds.done))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done == [False], "the other thread's stream did not wait"
    pair.let_go(1)


def test_eager_captured_eager(pair: Pair) -> None:
    s, t, u = pair.stream(), pair.stream(), pair.stream()
    pair.waiting.launch(s.ptr)
    pair.graph(pair.quick, t)
    pair.quick.launch(u.ptr)
    stays_behind(pair, u, 1)


def test_an_eager_launch_after_a_replay(pair: Pair) -> None:
    """Several times: the event is recorded by every replay anew."""
    s, t = pair.stream(), pair.stream()
    graphs = {value: pair.graph(pair.waiting, s, value) for value in (1, 2, 3)}
    for value, graph in graphs.items():
        graph.launch(s)
        pair.quick.launch(t.ptr)
        stays_behind(pair, t, value)


def test_a_replay_after_an_eager_launch(pair: Pair) -> None:
    s, t = pair.stream(), pair.stream()
    graph = pair.graph(pair.quick, t)
    for value in (1, 2, 3):
        pair.waiting.launch(s.ptr, value)
        graph.launch(t)
        stays_behind(pair, t, value)


def test_a_replay_after_a_replay(pair: Pair) -> None:
    s, t = pair.stream(), pair.stream()
    graphs = {value: pair.graph(pair.waiting, s, value) for value in (1, 2, 3)}
    quick = pair.graph(pair.quick, t)
    for value, graph in graphs.items():
        graph.launch(s)
        quick.launch(t)
        stays_behind(pair, t, value)


def test_two_streams_of_one_capture(pair: Pair) -> None:
    s, t, u = pair.stream(), pair.stream(), pair.stream()
    event = pair.xp.cuda.Event(disable_timing=True)
    with s:
        s.begin_capture()
        event.record(s)
        t.wait_event(event)
        pair.waiting.launch(s.ptr)
        pair.quick.launch(t.ptr)
        pair.waiting.launch(s.ptr, 2)
        event.record(t)
        s.wait_event(event)
        graph = s.end_capture()
    graph.launch(s)
    pair.quick.launch(u.ptr)
    pair.let_go(1)
    stays_behind(pair, u, 2)
    pair.quick.check()


def test_synchronize_waits_for_replays(pair: Pair) -> None:
    s = pair.stream()
    graph = pair.graph(pair.waiting, s)
    graph.launch(s)
    timer = threading.Timer(0.2, pair.let_go, [1])
    timer.start()
    pair.device.synchronize()
    assert s.done
    timer.join()


def test_synchronize_waits_for_nobody_else(pair: Pair) -> None:
    """Also after a capture. The other launches stand for another world's, with a device object of their own."""
    s = pair.stream()
    graph = pair.graph(pair.quick, s)
    other = CudaBackend(pair.device.ordinal)
    waiting = Calls(other, wait=1)
    stream = pair.stream()
    waiting.launch(stream.ptr)
    graph.launch(s)
    pair.device.synchronize()
    assert not stream.done, "it has waited until the other launch gave up"
    with contextlib.closing(other.copier()) as copier:
        copier.signal(waiting.flag, 1)
        other.synchronize()
    waiting.close()
    other.close()


def test_the_legacy_stream_beside_a_capture(pair: Pair) -> None:
    """It would wait for a blocking stream that is captured: refused, and the capture goes on."""
    from mkernel.errors import ArgumentError

    blocking = pair.xp.cuda.Stream()
    with blocking:
        blocking.begin_capture()
        with pytest.raises(ArgumentError, match="legacy default stream"):
            pair.quick.launch(1)
        pair.quick.launch(blocking.ptr)
        graph = blocking.end_capture()
    graph.launch(blocking)
    pair.quick.check()


def test_the_libraries() -> None:
    """All checks of the script, in as many processes as there are GPUs, at most four."""
    ranks = min(4, len(available()))
    if ranks < 2:
        pytest.skip("needs 2 GPUs")
    script = Path(__file__).parent / "streams.py"
    done = subprocess.run([sys.executable, str(script), "--ranks", str(ranks)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("processes", [2, 4])
def test_worlds_on_streams_of_their_own(rng: np.random.Generator, processes: int) -> None:
    """worlds_apart.py, of as many processes, which share GPUs if they must."""
    script, shares = Path(__file__).parent / "worlds_apart.py", str(int(len(available()) < processes))
    result = start_mpi("program", processes, worker=script, TEST_SEED=str(rng.integers(1 << 30)), MKERNEL_SHARE_GPUS=shares)
    assert result.code == 0, result
    assert result.lines == [{"rank": rank, "problems": []} for rank in range(processes)], result.errors
