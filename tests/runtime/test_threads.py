"""Threads of the runtime that fail, and links that are given up: the world fails by name, nobody waits for a thread that has ended."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mkernel.errors import AbortedError, Error, TransportError
from mkernel.proxy.engine import EngineThread
from mkernel.proxy.pace import Pace
from mkernel.proxy.process import EngineProcess
from mkernel.runtime.cpu.backend import ThreadRanks
from mkernel.runtime.failure import Failure, Kind
from mkernel.runtime.failure_watch import FailureWatch
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.ranks import socket_control as wire
from mkernel.runtime.ranks.bootstrap import ThreadGroup
from mkernel.runtime.ranks.control import Failed
from mkernel.runtime.ranks.socket_control import SocketControl
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan, Parameters

LONG = 100.0  # seconds that nobody is expected to need
ERRORS: list[BaseException] = [ZeroDivisionError("x"), MemoryError(), RecursionError("x"), OSError(9, "x")]
EXCEPTIONS = [*ERRORS, SystemExit(3), KeyboardInterrupt()]


class Ears:
    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.heard = threading.Event()

    def on_failure(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.heard.set()

    def on_pending(self, requests: Any) -> None:
        return None


@contextlib.contextmanager
def controls(kind: str, size: int = 4) -> Iterator[list[tuple[SocketControl, Ears]]]:
    hosts = ["a"] * size if kind == "one host" else [f"h{rank // 2}" for rank in range(size)]
    group = ThreadGroup(size)
    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(lambda rank: SocketControl(group.bootstrap(rank), hosts, LONG), range(size)))
        ears = [Ears() for _ in made]
        for control, ear in zip(made, ears, strict=True):
            control.start(ear)
        try:
            yield list(zip(made, ears, strict=True))
        finally:
            list(pool.map(lambda control: control.close(), made))


def outcome(control: SocketControl) -> Failure | None:
    try:
        control.collective("b", "a barrier", call=0, timeout=LONG)
    except Failed as failed:
        return failed.failure
    return None


@pytest.mark.parametrize("kind", ["one host", "hosts"])
@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_reader_that_fails(kind: str, victim: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its exception is: all ranks hear whose reader failed, and of what; without it they would wait for the whole timeout."""
    handle = SocketControl._handle

    def broken(self: SocketControl, *args: Any) -> None:
        if self.rank == victim:
            raise error
        handle(self, *args)

    with controls(kind) as ranks:
        monkeypatch.setattr(SocketControl, "_handle", broken)
        with ThreadPoolExecutor(len(ranks)) as pool:
            failures = list(pool.map(lambda pair: outcome(pair[0]), ranks))
        expected = (Kind.aborted, f"the control channel of rank {victim} failed: {type(error).__name__}: {error}")
        assert failures[victim] is not None
        for failure, (_, ears) in zip(failures, ranks, strict=True):
            assert ears.heard.wait(LONG)
            assert failure is None or (failure.kind, failure.message) == expected, "others may have passed before"
            assert [(f.kind, f.message) for f in ears.failures] == [expected]


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!BI", 77, 0),
        struct.pack("!BI", wire._REQUEST, 4) + b"\xff" * 4,
        struct.pack("!BI", wire._RESULT, 3) + b"abc",
        struct.pack("!BI", wire._PENDING, 2) + b"[1",
        struct.pack("!BI", wire._FAILURE, 2) + b"{}",
        struct.pack("!BI", wire._BYE, 1) + b"x",
    ],
)
def test_a_message_that_cannot_be_understood(frame: bytes) -> None:
    with controls("one host") as ranks:
        ranks[1][0]._links[0].socket.sendall(frame)
        for control, ears in ranks:
            assert ears.heard.wait(LONG), control.rank
            assert ears.failures[0].message.startswith("the control channel of rank 0 failed: ")


# ---- links


def test_a_frame_that_was_sent_in_part_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes nothing for a while, and then reads on, must not read the next frame from the middle of this one."""
    monkeypatch.setattr(wire, "_SEND_SECONDS", 0.2)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        link, far = wire._Link(1, mine), wire._Link(0, theirs)
        link.send(wire._RESULT, b"first")
        link.send(wire._RESULT, bytes(8 << 20))  # more than fits
        link.send(wire._FAILURE, b"must not come")
        while part := theirs.recv(1 << 20):  # ends: the link is closed
            far.inbox += part
        assert list(far.frames()) == [(wire._RESULT, b"first")]
        assert len(far.inbox) > wire._FRAME.size
        assert link.broken
        assert "took no messages for 0.2 s" in link.ending()
        assert mine.recv(1) == b"", "our own reader sees the end too"


def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SEND_SECONDS", 0.2)
    with controls("one host") as ranks:
        stopped = ranks[3][0]
        reading = threading.Event()
        monkeypatch.setattr(type(stopped._links[0]), "frames", lambda link: iter([reading.wait(LONG)][:0]))
        stopped._poke()
        ranks[0][0]._links[3].send(wire._RESULT, struct.pack("!Q", 99))  # its reader is busy with this from now on
        ranks[0][0]._links[3].send(wire._RESULT, bytes(8 << 20))
        monkeypatch.undo()
        reading.set()
        for rank in (0, 1, 2):
            assert ranks[rank][1].heard.wait(LONG)
            (failure, *_) = ranks[rank][1].failures
            assert (failure.kind, failure.rank) == (Kind.lost, 3)
            assert "rank 3 has gone: it took no messages" in failure.message


@pytest.mark.parametrize("kind", ["one host", "hosts"])
def test_a_host_that_falls_silent_is_noticed(kind: str) -> None:
    """Links between hosts are asked for signs of life by the kernel: 9 s without one end them. Those inside a host need none."""
    with controls(kind) as ranks:
        links = [(control.rank, link) for control, _ in ranks for link in control._links.values()]
        remote = [link.socket for _, link in links if link.socket.family != socket.AF_UNIX]
        assert len(remote) == (0 if kind == "one host" else 2)
        for one in remote:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            seconds = [one.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
            assert seconds[0] + seconds[1] * seconds[2] == 9
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 9000
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---- engines and watchdogs


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["step", "next_event_ns"])
def test_an_engine_thread_that_fails(error: BaseException, where: str) -> None:
    class Broken:
        def step(self) -> bool:
            if where == "step":
                raise error
            return False

        def next_event_ns(self) -> None:
            raise error

        def clock_ns(self) -> int:
            return time.monotonic_ns()

        def close(self) -> None:
            pass

    told: list[TransportError] = []
    heard = threading.Event()
    thread = EngineThread(Broken(), lambda e: (told.append(e), heard.set()), name="mkernel-engine-7", pace=Pace(spin_ns=0))  # type: ignore[arg-type]
    with thread:
        assert heard.wait(LONG)
    (only,) = told
    assert isinstance(only, TransportError)
    assert f"{type(error).__name__}: {error}" in str(only)


@pytest.mark.parametrize("message", [b"\x00\x00\x00\x02[1", b"\x02\x00\x00\x00[1", b"\x02\x00\x00\x00[]", b'\x0c\x00\x00\x00{"error": 1}'])
def test_an_engine_process_that_cannot_be_understood(message: bytes) -> None:
    from mkernel.proxy.process import _Channel

    mine, theirs = socket.socketpair()
    engine = object.__new__(EngineProcess)
    engine.rank, engine._channel, engine._closing = 5, _Channel(mine), False
    engine._process = type("Process", (), {"wait": lambda self, timeout: 1})()  # type: ignore[assignment]
    told: list[TransportError] = []
    with mine, theirs:
        theirs.sendall(message)
        theirs.shutdown(socket.SHUT_WR)
        engine.watch(told.append)
        assert engine._watcher is not None
        engine._watcher.join(LONG)
    assert len(told) == 1
    assert "rank 5" in str(told[0])


def ranks(use: Any, count: int = 3, **options: Any) -> list[Any]:
    defaults = {"target": "cuda", "timeout": LONG, "entry_timeout": LONG, "heap_bytes": 1 << 20}
    return run(use, count, Options(**{**defaults, **options}), make_backend=FakeBackend)


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_a_watchdog_that_fails(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    look = FailureWatch.look

    def broken(self: FailureWatch) -> None:
        if self._world.rank == 1 and threading.current_thread().name == "mkernel-watchdog":
            raise error
        look(self)

    monkeypatch.setattr(FailureWatch, "look", broken)

    def use(w: World) -> str:
        with pytest.raises(AbortedError) as caught:
            while True:
                w.check()
                time.sleep(0.005)
        return str(caught.value)

    assert ranks(use) == [f"rank 1 aborted: its watchdog failed: {type(error).__name__}: {error}"] * 3


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_a_scheduler_that_fails(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target cpu under mk.launch: all ranks' kernels and engines run on one thread."""

    def broken(self: ThreadRanks) -> None:
        raise error

    with ThreadRanks(1, 1) as thread_ranks:
        monkeypatch.setattr(thread_ranks, "_submit", lambda: broken(thread_ranks))
        for _ in range(2):
            with pytest.raises(Error, match=f"target cpu's scheduler failed: {type(error).__name__}"):
                thread_ranks.launch(0, None, 1, b"")  # type: ignore[arg-type]


def test_a_world_goes_on_with_its_threads() -> None:
    """The counterpart: nothing above fails where nothing is planted."""

    def use(w: World) -> int:
        executable = w.executable("null", FakePlan)
        for _ in range(3):
            w.launch(executable, Parameters())
        w.barrier()
        return w.call_number

    assert ranks(use) == [3] * 3
