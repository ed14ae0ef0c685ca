"""One body over every kind of control channel: threads, one host's sockets, and sockets of several hosts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mkernel import errors
from mkernel.runtime.failure import Failure, Kind
from mkernel.runtime.ranks import socket_control as wire
from mkernel.runtime.ranks.bootstrap import ThreadGroup
from mkernel.runtime.ranks.control import Collector, Control, Failed, LocalControl, LocalHub, Request
from mkernel.runtime.ranks.socket_control import SocketControl


class Ears:
    """A listener that remembers; ``answer`` decides about pending collectives."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.pending: list[Request] = []
        self.heard = threading.Event()
        self.answer: Callable[[Sequence[Request]], Failure | None] = lambda requests: None

    def on_failure(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.heard.set()

    def on_pending(self, requests: Sequence[Request]) -> Failure | None:
        self.pending = list(requests)
        return self.answer(requests)


class Party:
    """The ranks of one channel, each with its own thread."""

    def __init__(self, kind: str, size: int) -> None:
        self.size = size
        self.pool = ThreadPoolExecutor(size)
        hosts = {"one host": ["a"] * size, "hosts": [f"h{r * 3 // size}" for r in range(size)]}.get(kind)
        group, hub = ThreadGroup(size), LocalHub(size)
        self.ears = [Ears() for _ in range(size)]

        def connect(rank: int) -> Control:
            if hosts is None:
                return LocalControl(hub, rank)
            return SocketControl(group.bootstrap(rank), hosts, 20.0)

        self.controls: list[Control] = list(self.pool.map(connect, range(size)))
        self.hosts = hosts or ["a"] * size

    def start(self) -> Party:
        for control, ears in zip(self.controls, self.ears, strict=True):
            control.start(ears)
        return self

    def all(self, action: Callable[[int, Control], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        chosen = range(self.size) if ranks is None else ranks
        return list(self.pool.map(lambda rank: action(rank, self.controls[rank]), chosen))

    def close(self) -> None:
        self.all(lambda rank, control: control.close())
        self.pool.shutdown()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


KINDS = ["threads", "one host", "hosts"]


@pytest.fixture(params=KINDS)
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    threads, descriptors = threading.active_count(), open_descriptors()
    made = Party(request.param, 5)
    try:
        yield made
    finally:
        made.close()
    assert threading.active_count() <= threads, [t.name for t in threading.enumerate()]
    assert open_descriptors() <= descriptors, "descriptors left"


def outcome(action: Callable[[], Any]) -> Failure | Any:
    try:
        return action()
    except Failed as failed:
        return failed.failure


def test_allgather(party: Party) -> None:
    party.start()
    results = party.all(lambda r, c: [c.collective("k", "k", call=0, timeout=20.0, data=bytes([r]) * (i * 30_000)) for i in range(4)])
    assert results == [[[bytes([r]) * (i * 30_000) for r in range(5)] for i in range(4)]] * 5


def test_nobody_passes_a_barrier_early(party: Party) -> None:
    party.start()
    arrived = [0] * 5

    def go(rank: int, control: Control) -> list[int]:
        behind = []
        for turn in range(1, 40):
            arrived[rank] = turn
            control.collective("barrier", "a barrier", call=0, timeout=20.0)
            behind.append(min(arrived) - turn)
        return behind

    for behind in party.all(go):
        assert min(behind) >= 0


def test_disagreement_reaches_everyone(party: Party) -> None:
    party.start()
    keys = ["plan a", "plan a", "plan b", "plan a", "plan a"]
    failures = party.all(lambda r, c: outcome(lambda: c.collective(keys[r], keys[r], call=7, timeout=20.0)))
    assert {f.kind for f in failures} == {Kind.mismatch}
    assert len({f.message for f in failures}) == 1
    assert "rank 2 asked for plan b after 7 calls" in failures[0].message
    assert "asked for plan a" in failures[0].message


def test_timeout_names_the_missing(party: Party) -> None:
    party.start()
    failures = party.all(lambda r, c: outcome(lambda: c.collective("b", "a barrier", call=0, timeout=0.6)), [0, 1, 4])
    assert {f.kind for f in failures} == {Kind.timeout}
    assert any("for rank 2, 3" in f.message for f in failures)
    assert party.ears[2].heard.wait(100.0), "ranks outside the collective hear of it too"


def test_abort_ends_waits_everywhere(party: Party) -> None:
    party.start()
    reason = Failure(Kind.aborted, "rank 3 aborted: enough", 3)
    timer = threading.Timer(0.1, party.controls[3].abort, [reason])
    timer.start()
    failures = party.all(lambda r, c: outcome(lambda: c.collective("b", "a barrier", call=0, timeout=20.0)), [0, 1, 2, 4])
    timer.join()
    assert failures == [reason] * 4
    assert [ears.failures for ears in party.ears] == [[reason], [reason], [reason], [], [reason]], "once each, not to itself"
    assert outcome(lambda: party.controls[0].collective("b", "b", call=0, timeout=20.0)) == reason


def test_a_wait_ends_after_the_failure_was_passed_on(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank could leave, and its goodbye reach the others before the reason."""
    hear = Ears.on_failure

    def on_failure(ears: Ears, failure: Failure) -> None:
        time.sleep(0.2)
        hear(ears, failure)

    monkeypatch.setattr(Ears, "on_failure", on_failure)
    party.start()
    reason = Failure(Kind.aborted, "rank 3 aborted: enough", 3)
    timer = threading.Timer(0.1, party.controls[3].abort, [reason])
    timer.start()

    def go(rank: int, control: Control) -> tuple[Failure | Any, list[Failure]]:
        while rank == 1 and control.failure is None:  # comes to the collective when the world has just failed
            time.sleep(0.001)
        return outcome(lambda: control.collective("b", "a barrier", call=0, timeout=20.0)), list(party.ears[rank].failures)

    assert party.all(go, [0, 1, 2, 4]) == [(reason, [reason])] * 4
    timer.join()


def test_goodbye_is_not_said_before_the_reason(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that aborts and closes while it passes another one's failure on: the others hear of that failure."""
    send = wire._Link.send

    def slowly(link: Any, kind: int, body: bytes) -> None:
        time.sleep(0.1 if kind == wire._FAILURE else 0.0)
        send(link, kind, body)

    monkeypatch.setattr(wire._Link, "send", slowly)
    party.start()
    reason = Failure(Kind.aborted, "rank 3 aborted: enough", 3)
    timer = threading.Timer(0.1, party.controls[3].abort, [reason])
    timer.start()

    def go(rank: int, control: Control) -> Failure | Any:
        if rank != 0:
            return outcome(lambda: control.collective("b", "a barrier", call=0, timeout=20.0))
        while control.failure is None:
            time.sleep(0.001)
        control.abort(Failure(Kind.aborted, "rank 0 aborted: its own reason", 0))
        return control.close()

    assert party.all(go, [0, 1, 2, 4]) == [None, reason, reason, reason]
    timer.join()


def test_who_waits_is_told_to_those_who_are_not_there(party: Party) -> None:
    party.start()
    veto = Failure(Kind.mismatch, "rank 4 has gone past", 4)
    party.ears[4].answer = lambda requests: veto if requests[0].call == 3 else None
    failures = party.all(lambda r, c: outcome(lambda: c.collective("plan x", "gemm(8, 8)", call=3, timeout=20.0)), range(4))
    assert failures == [veto] * 4
    assert party.ears[4].pending[0].what == "gemm(8, 8)"
    assert party.ears[4].pending[0].sequence == 1 > party.controls[4].started


def test_leaving_is_no_loss(party: Party) -> None:
    party.start()
    party.all(lambda r, c: c.collective("b", "b", call=0, timeout=20.0))
    party.all(lambda r, c: c.close())
    assert all(ears.failures == [] for ears in party.ears)


@pytest.mark.parametrize("leaver", [0, 2, 4])
def test_leaving_while_others_wait(party: Party, leaver: int) -> None:
    party.start()
    timer = threading.Timer(0.1, party.controls[leaver].close)
    timer.start()
    stay = [rank for rank in range(5) if rank != leaver]
    failures = party.all(lambda r, c: outcome(lambda: c.collective("b", "a barrier", call=0, timeout=20.0)), stay)
    timer.join()
    for failure in failures:
        assert failure.kind == Kind.aborted
        assert failure.rank == leaver
        assert "has closed its world" in failure.message


def end_without_a_word(control: Any) -> None:
    """As the end of its process would: its links end, and it hears nothing any more."""
    control._closing = True
    control._poke()
    control._reader.join()
    control._drop()


@pytest.mark.parametrize("victim", range(5))
@pytest.mark.parametrize("kind", KINDS[1:])
def test_death_is_noticed_at_once(kind: str, victim: int) -> None:
    party = Party(kind, 5).start()
    try:
        timer = threading.Timer(0.1, end_without_a_word, [party.controls[victim]])
        timer.start()
        others = [rank for rank in range(5) if rank != victim]
        failures = party.all(lambda r, c: outcome(lambda: c.collective("b", "a barrier", call=0, timeout=600.0)), others)
        timer.join()
        assert {(f.kind, f.rank) for f in failures} == {(Kind.lost, victim)}
    finally:
        party.close()


def test_descriptors_travel(party: Party) -> None:
    def go(rank: int, control: Control) -> dict[int, str]:
        with (
            contextlib.closing(os.fdopen(os.memfd_create("test"), "w+")) as first,
            contextlib.closing(os.fdopen(os.memfd_create("test"), "w+")) as second,
        ):
            for file, text in ((first, f"first of {rank}"), (second, f"second of {rank}")):
                file.write(text)
                file.flush()
            with control.exchange_fds([first.fileno(), second.fileno()], 20.0) as fds:
                seen = {peer: " / ".join(os.pread(fd, 100, 0).decode() for fd in pair) for peer, pair in fds.items()}
            control.start(party.ears[rank])
            control.collective("b", "b", call=0, timeout=20.0)
            return seen

    for rank, seen in enumerate(party.all(go)):
        same_host = [peer for peer in range(5) if party.hosts[peer] == party.hosts[rank]]
        assert seen == {peer: f"first of {peer} / second of {peer}" for peer in same_host}


def test_strangers_cannot_join() -> None:
    """A process that guesses the socket's name but not the token is turned away, and the ranks still meet."""
    import socket

    real_listen = socket.socket.listen
    strangers: list[socket.socket] = []

    def listen(self: socket.socket, *args: int) -> None:
        real_listen(self, *args)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(self.getsockname())
        stranger.sendall(bytes(32) + (1).to_bytes(4, "big"))
        strangers.append(stranger)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", listen)
        party = Party("one host", 3)
    try:
        assert strangers
        party.start()
        assert party.all(lambda r, c: c.collective("k", "k", call=0, timeout=20.0, data=bytes([r]))) == [[b"\0", b"\1", b"\2"]] * 3
    finally:
        party.close()
        for stranger in strangers:
            stranger.close()


# ---- the parts without sockets


def request(rank: int, key: str = "k", sequence: int = 1) -> Request:
    return Request(rank, sequence, 0, key, key, bytes([rank]))


def test_collector_in_any_order() -> None:
    collector = Collector(3)
    assert collector.arrive(request(2)) is None
    assert collector.arrive(request(0)) is None
    assert collector.arrive(request(1)) == [b"\0", b"\1", b"\2"]
    assert collector.arrive(request(0, sequence=2)) is None, "ready for the next"


def test_a_broken_collector_stays_broken() -> None:
    collector = Collector(3)
    collector.arrive(request(0, "a"))
    failure = collector.arrive(request(1, "b"))
    assert isinstance(failure, Failure)
    assert collector.arrive(request(2, "a")) is failure


def test_collector_sees_a_skipped_collective() -> None:
    collector = Collector(2)
    collector.arrive(request(0, sequence=2))
    failure = collector.arrive(request(1, sequence=1))
    assert isinstance(failure, Failure)
    assert failure.kind == Kind.mismatch


@pytest.mark.parametrize(
    ("first", "then", "replaced"),
    [
        (Kind.timeout, Kind.lost, True),
        (Kind.timeout, Kind.mismatch, True),
        (Kind.timeout, Kind.aborted, False),
        (Kind.transport, Kind.lost, True),
        (Kind.lost, Kind.timeout, False),
        (Kind.mismatch, Kind.lost, False),
        (Kind.aborted, Kind.lost, False),
        (Kind.aborted, Kind.aborted, False),
    ],
)
def test_the_deeper_cause_wins(first: str, then: str, replaced: bool) -> None:
    before, after = Failure(first, "first", 0), Failure(then, "then", 1)
    assert after.replaces(before) is replaced
    assert after.replaces(None)
    echo = Failure(Kind.aborted, "echo", 1, derived=True)
    assert after.replaces(echo)
    assert not echo.replaces(before)


def test_failures_travel_whole() -> None:
    record = errors.FailureRecord(1, 1, "compute", 3, "chunk flag 12", 2, 17, 17, 16)
    failure = Failure.decode(Failure(Kind.timeout, "text", 1, record).encode())
    assert failure == Failure(Kind.timeout, "text", 1, record)
    error = failure.error()
    assert isinstance(error, errors.TimeoutError)
    assert error.record == record


def test_a_kernel_that_leaves_an_earlier_call_has_asked_for_nothing_yet() -> None:
    """What a rank tells the others of a mismatch is of that call, or says which other call it is of."""

    def report(rank: int, call: int, *, derived: bool) -> Failure:
        record = errors.FailureRecord(2, rank, "compute", 0, "entry flag 0", 0, call, 1, 1)
        kind = Kind.aborted if derived else Kind.mismatch
        return Failure(kind, f"rank {rank} speaks", rank, record, derived, asked=((rank, f"asked for plan {call}"),))

    mismatch = report(2, 5, derived=False)
    known: Failure | None = mismatch
    for rank, call in ((0, 5), (1, 4)):
        told = mismatch.answered(report(rank, call, derived=True))
        assert told.replaces(known)
        known = told.joined(known)
    assert known is not None
    assert str(known.error()) == (
        "rank 2 speaks: rank 0 asked for plan 5; rank 1 was still in call 4, which asked for plan 4; rank 2 asked for plan 5"
    )
