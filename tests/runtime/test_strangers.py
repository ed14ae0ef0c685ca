"""Strangers at the sockets of a world that is being made: they neither get in, nor end, nor delay it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mkernel import errors
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.init import open_world
from mkernel.runtime.options import Options
from mkernel.runtime.ranks import addresses, handshake
from mkernel.runtime.ranks.bootstrap import SingleBootstrap, ThreadGroup
from mkernel.runtime.ranks.handshake import Caller, Door, knock
from mkernel.runtime.ranks.rendezvous import Meeting, SocketBootstrap
from mkernel.runtime.ranks.socket_control import SocketControl
from tests.runtime.fake import FakeBackend
from tests.runtime.processes import free_port
from tests.runtime.siege import Recorder, Siege

SECRET = "of tests alone, 32 characters long"
KINDS = ["one host", "hosts"]
SIZE = 4
FOREVER = 100.0  # seconds that nobody is expected to need


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    threads = threading.active_count()
    yield
    deadline = time.monotonic() + 10.0
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads, [thread.name for thread in threading.enumerate()]


def meet(kind: str, port: int, rank: int, size: int = SIZE, timeout: float = FOREVER) -> SocketBootstrap:
    return SocketBootstrap(Meeting("127.0.0.1", port, rank, size, kind == "one host"), timeout, "" if kind == "one host" else SECRET)


def everyone(action: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(action, range(size)))


def make_world(port: int) -> list[list[int]]:
    """Every stage of ``init``: the meeting, the control channel, memory. What the ranks then tell each other."""

    def one(rank: int) -> list[int]:
        options = Options(target="cuda", heap_bytes=1 << 16, timeout=FOREVER, entry_timeout=FOREVER)
        with contextlib.closing(meet("one host", port, rank)) as bootstrap:
            world = open_world(bootstrap, options, make_backend=FakeBackend)
        with world:
            return list(world.exchange("rank", world.rank))

    return everyone(one)


def connect_control(kind: str, port: int) -> list[list[bytes]]:
    hosts = ["a"] * SIZE if kind == "one host" else ["a", "a", "b", "c"]

    def one(rank: int) -> list[bytes]:
        with contextlib.closing(meet(kind, port, rank)) as bootstrap:
            control = SocketControl(bootstrap, hosts, FOREVER)
        try:
            control.start(Nobody())
            return control.collective("k", "k", call=0, timeout=FOREVER, data=bytes([rank]))
        finally:
            control.close()

    return everyone(one)


class Nobody:
    def on_failure(self, failure: Any) -> None:
        pass

    def on_pending(self, requests: Any) -> None:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_besieged_world_is_made(kind: str, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Rendezvous and control channel, with strangers at each socket from the moment it listens, among them replays of an earlier run."""
    with Recorder().listening() as recorder:
        connect_control(kind, free_port())
    assert len(recorder.sent) == 2 * (SIZE - 1)
    caplog.clear()
    for _ in range(3):
        with Siege(int(rng.integers(1 << 30)), SIZE, recorder.sent) as siege:
            assert connect_control(kind, free_port()) == [[bytes([rank]) for rank in range(SIZE)]] * SIZE
            assert siege.came >= 8
        assert siege.admitted == []
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(warned) <= 3 * 3, "once per door"


def test_a_besieged_world_works(rng: np.random.Generator) -> None:
    with Siege(int(rng.integers(1 << 30)), SIZE, []) as siege:
        assert make_world(free_port()) == [list(range(SIZE))] * SIZE
        assert siege.came
    assert siege.admitted == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saying", [b"", b"mkernel2", b"mkernel1\0\0\0\1\0\0\0\4", b"GET / HTTP/1.1\r\n\r\n"])
def test_silent_strangers_delay_nobody(kind: str, saying: bytes) -> None:
    """More of them than would fit into the time, were each one waited for."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        zero = pool.submit(meet, kind, port, 0, 2)
        for _ in range(100):
            stranger = stack.enter_context(reach(kind, port, zero))
            stranger.sendall(saying)
        one = pool.submit(meet, kind, port, 1, 2)
        assert zero.result().size == one.result().size == 2
        zero.result().close()
        one.result().close()


def reach(kind: str, port: int, zero: Any) -> socket.socket:
    """A connection to rank 0, once it listens."""
    address: Any = f"\0mkernel-{os.geteuid()}-{port}".encode() if kind == "one host" else ("127.0.0.1", port)
    while True:
        link = socket.socket(socket.AF_UNIX if kind == "one host" else socket.AF_INET)
        try:
            link.connect(address)
            return link
        except OSError:
            link.close()
            assert not zero.done(), zero.result()
            time.sleep(0.005)


# ---- misfits that know the secret: one is told, the others go on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rank", "size", "reason"),
    [
        (1, 3, "a world of 3 ranks, here are 2"),
        (2, 3, "a world of 3 ranks"),
        (7, 8, "a world of 8 ranks"),
        (1, 2, "rank 1 is there already"),
    ],
)
def test_misfits(kind: str, rank: int, size: int, reason: str) -> None:
    """Wrong sizes, and a second process of one rank: refused with the reason, while the ranks meet."""
    port = free_port()
    if (rank, size) == (1, 2):
        size, others = 3, [0, 1, 2]  # the twin comes between ranks 1 and 2
        reason = "rank 1 is there already"
    else:
        others = [0, 1]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(meet, kind, port, other, len(others)) for other in others[:-1]]
        if len(others) == 3:
            with pytest.raises(Error, match=r"was not let in: .*MKERNEL_SIZE") as caught:
                until_refused(lambda: meet(kind, port, rank, size), pool, jobs)
        else:
            with pytest.raises(Error, match=r"was not let in: .*MKERNEL_SIZE") as caught:
                meet(kind, port, rank, size)
        assert reason in str(caught.value)
        jobs.append(pool.submit(meet, kind, port, others[-1], len(others)))
        for job in jobs:
            job.result().close()


def until_refused(twin: Callable[[], Any], pool: ThreadPoolExecutor, jobs: list[Any]) -> None:
    """Whichever of the two comes second is refused."""
    second = pool.submit(twin)
    deadline = time.monotonic() + 60
    while not (refused := [job for job in (jobs[1], second) if job.done() and job.exception() is not None]):
        assert time.monotonic() < deadline, "both were let in"
        time.sleep(0.005)
    if refused[0] is jobs[1]:
        jobs[1] = second
    refused[0].result()


def test_a_wrong_secret_is_named_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    def one(rank: int) -> str:
        with pytest.raises(errors.TimeoutError) as caught:
            SocketBootstrap(Meeting("127.0.0.1", port, rank, 2), 2.0, SECRET + str(rank))
        return str(caught.value)

    zero, other = everyone(one, 2)
    assert "for ranks [1]" in zero
    assert "rank 1 of 2" in zero or "left after 0" in zero
    assert "did not prove that it knows MKERNEL_SECRET; is it the same on all ranks?" in other
    assert SECRET not in caplog.text + zero + other


# ---- who needs a secret


@pytest.mark.parametrize("rank", [0, 1])
def test_several_hosts_need_a_secret(rank: int) -> None:
    with pytest.raises(ArgumentError, match="MKERNEL_SECRET") as caught:
        SocketBootstrap(Meeting("node0", 29500, rank, 2))
    assert "export MKERNEL_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))')" in caught.value.remedy
    assert "MKERNEL_RENDEZVOUS=127.0.0.1:29500" in caught.value.remedy


def test_another_users_process_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends: it cannot come in as a rank, and cannot receive ranks in place of rank 0."""
    port = free_port()
    real = handshake.peer_user
    foreign: set[int] = set()  # threads whose peer seems to be another user's
    monkeypatch.setattr(handshake, "peer_user", lambda link: real(link) + (threading.get_ident() in foreign))

    def one(rank: int) -> str:
        foreign.add(threading.get_ident())
        with pytest.raises(errors.TimeoutError) as caught:
            meet("one host", port, rank, 2, timeout=1.0)
        return str(caught.value)

    for text in everyone(one, 2):
        assert f"it belongs to user {os.geteuid() + 1}, not to user {os.geteuid()}" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_real_other_user() -> None:
    """The kernel tells who it is: another user's process that speaks the protocol is turned away at once."""
    name = b"\0mkernel-test-" + os.urandom(8)
    with addresses.listen_local(name) as listener:
        child = os.fork()
        if child == 0:  # no threads here: only system calls
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as link:
                    link.connect(name)
                    link.settimeout(60.0)
                    os._exit(0 if link.recv(1) == b"" else 1)
            finally:
                os._exit(2)
        door = Door({listener: [1]}, Caller("t", 0, 2, b""), "here")
        pool = ThreadPoolExecutor(2)
        admitted = pool.submit(door.admit, time.monotonic() + FOREVER)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        link = knock([name], Caller("t", 1, 2, b""), time.monotonic() + FOREVER, "here")
        admitted.result()[1].close()
        link.close()
        pool.shutdown()


def test_a_network_is_not_enough_without_a_secret() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(errors.TimeoutError, match="over a network, and there is no secret"),
    ):
        everyone(
            lambda rank: (
                Door({listener: [1]}, Caller("t", 0, 2, b""), "here").admit(time.monotonic() + 2.0)
                if rank == 0
                else knock([listener.getsockname()], Caller("t", 1, 2, b""), time.monotonic() + 2.0, "here")
            ),
            2,
        )


# ---- the door and the caller, one by one


def at_door(**changes: Any) -> tuple[socket.socket, Caller]:
    return socket.create_server(("127.0.0.1", 0), backlog=1024), Caller("t", 1, 2, SECRET.encode())


def test_the_handshake_is_what_the_documentation_says() -> None:
    """Byte by byte, with another implementation of the caller."""
    listener, own = at_door()
    with listener, ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here").admit, time.monotonic() + FOREVER)
        with socket.create_connection(listener.getsockname()) as link:
            greeting = b"mkernel2" + b"t".ljust(16, b"\0") + bytes([0, 0, 0, 1, 0, 0, 0, 2]) + os.urandom(32)
            link.sendall(greeting)
            answer = read(link, 72)
            nonce = answer[8:40]

            def proof(label: bytes) -> bytes:
                parts = b"".join(len(part).to_bytes(4, "big") + part for part in (label, greeting, nonce))
                return hmac.new(own.secret, parts, hashlib.sha256).digest()

            assert answer == b"mkernel2" + nonce + proof(b"listener")
            link.sendall(proof(b"caller"))
            assert read(link, 3) == b"\1\0\0"
            admitted.result()[1].close()


def read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        assert part
        data += part
    return data


def test_a_door_that_closes_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither strangers' connections nor those of ranks that came, when some did not; and what it gives is without a timeout."""
    accept, accepted = socket.socket.accept, []

    def note(self: socket.socket) -> Any:
        pair = accept(self)
        accepted.append(pair[0])
        return pair

    monkeypatch.setattr(socket.socket, "accept", note)
    listener, own = at_door()
    with listener, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        late = pool.submit(Door({listener: [1, 2]}, Caller("t", 0, 2, own.secret), "here").admit, time.monotonic() + 1.0)
        stack.enter_context(socket.create_connection(listener.getsockname()))
        link = stack.enter_context(knock([listener.getsockname()], own, time.monotonic() + FOREVER, "here"))
        assert link.gettimeout() is None
        with pytest.raises(errors.TimeoutError, match=r"for ranks \[2\]"):
            late.result()
        assert [one.fileno() for one in accepted] == [-1, -1]
        accepted.clear()
        admitted = pool.submit(Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here").admit, time.monotonic() + FOREVER)
        stack.enter_context(knock([listener.getsockname()], own, time.monotonic() + FOREVER, "here"))
        assert admitted.result()[1].gettimeout() is None
        admitted.result()[1].close()


@pytest.mark.parametrize("rank", [0, 2, 5])
def test_a_rank_that_nobody_expects(rank: int) -> None:
    """A rank of the right size and with the right secret is not let in, nor one that is expected at another socket."""
    listener, own = at_door()
    other, _ = at_door()
    with listener, other, ThreadPoolExecutor(1) as pool:
        door = Door({listener: [1], other: [2]}, Caller("t", 0, 3, own.secret), "here")
        admitted = pool.submit(door.admit, time.monotonic() + FOREVER)
        with pytest.raises(Error, match=rf"rank {rank} of 3 is not expected here: ranks \[1\] are"):
            knock([listener.getsockname()], Caller("t", rank, 3, own.secret), time.monotonic() + FOREVER, "here")
        for right, where in ((1, listener), (2, other)):
            knock([where.getsockname()], Caller("t", right, 3, own.secret), time.monotonic() + FOREVER, "here").close()
        assert sorted(admitted.result()) == [1, 2]
        for link in admitted.result().values():
            link.close()


def test_a_rank_that_came_for_something_else() -> None:
    """One secret may serve several purposes: the control channel is not open to who comes for the meeting."""
    listener, own = at_door()
    with listener, ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here").admit, time.monotonic() + FOREVER)
        with pytest.raises(errors.TimeoutError):
            knock([listener.getsockname()], Caller("other", 1, 2, own.secret), time.monotonic() + 0.3, "here")
        assert not admitted.done()
        knock([listener.getsockname()], own, time.monotonic() + FOREVER, "here").close()
        admitted.result()[1].close()


def test_nonces_are_fresh() -> None:
    own = Caller("t", 1, 2, b"s")
    assert own.greeting() != own.greeting()
    assert "secret" not in repr(own)


def test_the_slow_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that send a byte from time to time: the clock runs from the beginning."""
    monkeypatch.setattr(handshake, "_GUEST_SECONDS", 0.3)
    listener, own = at_door()
    with listener, ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here").admit, time.monotonic() + FOREVER)
        with socket.create_connection(listener.getsockname()) as link:
            for byte in own.greeting()[:-1]:
                try:
                    link.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.02)
            with contextlib.suppress(ConnectionError):
                assert link.recv(1) == b""
        monkeypatch.setattr(handshake, "_GUEST_SECONDS", FOREVER)
        knock([listener.getsockname()], own, time.monotonic() + FOREVER, "here").close()
        admitted.result()[1].close()


def test_more_strangers_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_GUESTS", 8)
    monkeypatch.setattr(handshake, "_GUEST_SECONDS", FOREVER)
    listener, own = at_door()
    with listener, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        door = Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here")
        admitted = pool.submit(door.admit, time.monotonic() + FOREVER)
        silent = [stack.enter_context(socket.create_connection(listener.getsockname(), FOREVER / 2)) for _ in range(50)]
        assert [link.recv(1) for link in silent[:42]] == [b""] * 42, "the oldest had to go, before any rank came"
        knock([listener.getsockname()], own, time.monotonic() + FOREVER, "here").close()
        admitted.result()[1].close()


def test_descriptors_that_run_out_are_taken_from_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, own = at_door()
    accept, left = socket.socket.accept, [3]

    def scarce(self: socket.socket) -> Any:
        if self is listener and left[0] <= 0:
            left[0] += 2
            raise OSError(24, "Too many open files")
        left[0] -= 1
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with listener, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        admitted = pool.submit(Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here").admit, time.monotonic() + FOREVER)
        for _ in range(10):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        knock([listener.getsockname()], own, time.monotonic() + FOREVER, "here").close()
        admitted.result()[1].close()


@pytest.mark.parametrize("length", [0, 1, 8, 40, 71, 72, 73, 200])
@pytest.mark.parametrize("closes", [True, False])
def test_a_caller_gets_past_strangers_that_listen(
    monkeypatch: pytest.MonkeyPatch, length: int, closes: bool, rng: np.random.Generator
) -> None:
    """In front of rank 0's address stands one of a stranger that says anything, and closes or not."""
    monkeypatch.setattr(handshake, "_GUEST_SECONDS", 0.5)
    listener, own = at_door()
    stop = threading.Event()

    def hostile(trap: socket.socket, held: list[socket.socket]) -> None:
        trap.settimeout(0.05)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                link, _ = trap.accept()
                link.sendall((b"mkernel2" + rng.bytes(200))[:length])
                if closes:
                    link.close()
                else:
                    held.append(link)

    held: list[socket.socket] = []
    with listener, socket.create_server(("127.0.0.1", 0)) as trap, ThreadPoolExecutor(2) as pool:
        pool.submit(hostile, trap, held)
        try:
            door = Door({listener: [1]}, Caller("t", 0, 2, own.secret), "here")
            admitted = pool.submit(door.admit, time.monotonic() + FOREVER)
            knock([trap.getsockname(), listener.getsockname()], own, time.monotonic() + FOREVER, "here").close()
            admitted.result()[1].close()
        finally:
            stop.set()
    for link in held:
        link.close()


# ---- what the control channel is protected with


def test_worlds_have_secrets_of_their_own() -> None:
    def secrets_of(action: Callable[[int], Any]) -> bytes:
        results = everyone(action, 3)
        assert len(set(results)) == 1, "the same on every rank"
        assert len(results[0]) == 32
        return bytes(results[0])

    def sockets(kind: str) -> bytes:
        port = free_port()

        def one(rank: int) -> bytes:
            with contextlib.closing(meet(kind, port, rank, 3)) as bootstrap:
                told: list[bytes] = []
                allgather = bootstrap.allgather
                bootstrap.allgather = lambda data: told.extend(parts := allgather(data)) or parts  # type: ignore[method-assign,func-returns-value]
                secret = bootstrap.shared_secret()
                assert kind == "one host" or secret not in told, "it does not travel over the network"
                return secret

        return secrets_of(one)

    def threads() -> bytes:
        group = ThreadGroup(3)
        return secrets_of(lambda rank: group.bootstrap(rank).shared_secret())

    made = [sockets("one host"), sockets("one host"), sockets("hosts"), sockets("hosts"), threads(), threads()]
    assert len(set(made)) == 6
    assert len(SingleBootstrap().shared_secret()) == 32
