"""How calls and worker processes of ``mk.launch`` end: killed, idle, shut down. Their caller's end: test_workers_caller.py."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import AbortedError, ArgumentError, Error, PeerLostError
from mkernel.runtime.options import Options
from mkernel.runtime.workers import calls, serve
from mkernel.runtime.workers.calls import run_in_workers, shutdown
from mkernel.runtime.world import World
from tests.runtime.in_workers import SECONDS, alive, pids, run, wait_gone


@pytest.fixture(scope="module", autouse=True)
def end_processes() -> Iterator[None]:
    yield
    shutdown()


def marker(world: World) -> Any:
    """What this world was marked with; it is marked for the next time."""
    before = getattr(world, "marker", None)
    world.marker = "seen"  # type: ignore[attr-defined]
    return before


# ---- processes that die
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9 (SIGKILL)"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by signal 15 (SIGTERM)"),
        (lambda: os._exit(3), "ended with code 3"),
        (os.abort, "was killed by signal 6 (SIGABRT)"),
    ],
)
def test_a_process_that_dies_in_a_call(end: Callable[[], None], how: str, capfd: pytest.CaptureFixture[str]) -> None:
    def use(world: World) -> None:
        print(f"rank {world.rank} begins")
        world.barrier()
        if world.rank == 1:
            print("the last words", end="")
            sys.stdout.flush()
            end()
        world.barrier()

    before = pids(ranks=3)
    with pytest.raises(PeerLostError) as caught:
        run(use, ranks=3)
    assert f"the process of rank 1 (process {before[1]}) {how}" in str(caught.value)
    assert caught.value.rank == 1
    assert sorted(note.partition(":")[0] for note in caught.value.__notes__[1:]) == ["rank 0", "rank 2"]
    assert "the last words" in capfd.readouterr().out
    after = pids(ranks=3)
    assert [after[0], after[2]] == [before[0], before[2]]
    assert after[1] != before[1]


def test_a_process_that_dies_in_python_while_the_others_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkernel.runtime.workers.pool._LEAVE_SECONDS", 0.1)

    def use(world: World) -> None:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10 * SECONDS)

    with pytest.raises(PeerLostError, match="rank 0"):
        run(use)


def test_a_process_that_dies_between_calls(caplog: pytest.LogCaptureFixture) -> None:
    before = pids()
    os.kill(before[1], signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while "the process of rank 1" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "was killed by signal 9 (SIGKILL) between two calls" in caplog.text
    after = pids()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert run(marker) == [None, None], "a new world"


def test_a_child_does_not_hide_its_parents_death(tmp_path: Path) -> None:
    """A rank that dies has forked, and the child lives on until the caller has heard: it holds what it has inherited."""
    heard, in_vain = tmp_path / "heard", tmp_path / "in vain"

    def use(world: World) -> None:
        if os.fork() == 0:
            os.setsid()
            end = time.monotonic() + 200
            while not heard.exists() and time.monotonic() < end:
                time.sleep(0.02)
            if not heard.exists():
                in_vain.touch()
            os._exit(0)
        world.barrier()
        if world.rank == 1:
            os._exit(4)
        world.barrier()

    with pytest.raises(PeerLostError, match=r"rank 1 .* ended with code 4"):
        run(use)
    heard.touch()
    assert not in_vain.exists()


def test_a_kill_takes_what_a_rank_has_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mkernel.runtime.workers.pool._LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("mkernel.runtime.workers.pool._KILL_SECONDS", 0.1)

    def use(world: World) -> None:
        if world.rank:
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            raise ValueError("planned")
        process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({10 * SECONDS})"])
        (tmp_path / "new").write_text(str(process.pid))
        (tmp_path / "new").rename(tmp_path / "pid")
        while True:
            with contextlib.suppress(BaseException):
                process.wait()

    with pytest.raises(ValueError, match="planned"):
        run(use)
    wait_gone(int((tmp_path / "pid").read_text()))


# ---- worlds that fail
def test_a_new_world_in_the_same_processes_after_a_failure() -> None:
    def fail(world: World) -> None:
        if world.rank == 1:
            world.abort("planned")
        world.barrier()

    before = pids()
    for _ in range(3):
        run(marker)
        assert run(marker) == ["seen"] * 2
        with pytest.raises(AbortedError, match="planned"):
            run(fail)
        assert run(marker) == [None] * 2, "the failed world is gone"
    assert pids() == before


def test_a_world_that_fails_after_the_function() -> None:
    """Its failure belongs to the call, although the function returned."""
    with pytest.raises(AbortedError, match="at the end"):
        run(lambda world: world.abort("at the end"))
    assert run(marker) == [None] * 2


def test_processes_in_which_no_world_can_be_opened_are_replaced() -> None:
    """A GPU's context that an earlier call has broken: the next call gets new processes."""

    def break_it(world: World) -> None:
        def open_world(*arguments: Any) -> None:
            raise Error("the GPU is broken")

        serve.open_world = open_world  # type: ignore[assignment]
        raise ValueError("planned")

    before = pids()
    with pytest.raises(ValueError, match="planned"):
        run(break_it)
    after = pids()
    assert not set(before) & set(after)


def test_a_world_that_nobody_can_open() -> None:
    shutdown()
    for _ in range(2):  # in new processes, and in those that are there
        with pytest.raises(ArgumentError, match="ranks_per_node"):
            run(marker, ranks_per_node=3)
    assert run(marker) == [None] * 2


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(OSError, match="/nowhere/python"):
            run(marker)
    assert run(marker) == [None] * 2


# ---- the end of processes
def test_shutdown() -> None:
    before = pids()
    mk.shutdown()
    assert not any(map(alive, before))
    mk.shutdown()
    assert not set(pids()) & set(before)


def test_the_idle_limit() -> None:
    """By another clock: nothing happens before the limit, and then all processes end."""
    now = [1000.0]
    options = Options.resolve(target="cpu", heap_bytes=1 << 20, timeout=20.0)
    shutdown()
    with env.override(MKERNEL_IDLE_LIMIT=60):
        before = run_in_workers(lambda world: os.getpid(), 2, options, clock=lambda: now[0])
    pool = calls._pool
    assert pool is not None
    for moved in (59.0, 0.5):
        now[0] += moved
        pool.wake()
        pool.join(0.2)
        assert pool.is_alive()
        assert all(map(alive, before))
    again = run_in_workers(lambda world: os.getpid(), 2, options, clock=lambda: now[0])  # the default limit, from now on
    assert again == before
    now[0] += 61.0
    pool.wake()
    pool.join(0.2)
    assert pool.is_alive()
    now[0] += 600.0
    pool.wake()
    pool.join(SECONDS)
    assert not pool.is_alive()
    assert not any(map(alive, before))
    assert not set(run_in_workers(lambda world: os.getpid(), 2, options)) & set(before), "the next call starts others"


def test_a_call_that_comes_when_the_idle_limit_passes() -> None:
    """Between the pool's last look for calls and its look at the clock."""
    options = Options.resolve(target="cpu", heap_bytes=1 << 20, timeout=20.0)
    armed, found = threading.Event(), []
    threads: list[threading.Thread] = []

    def call() -> None:
        found.append(run_in_workers(lambda world: os.getpid(), 1, options, clock=clock))

    def clock() -> float:
        pool = calls._pool
        if not (armed.is_set() and threading.current_thread() is pool._thread):
            return 0.0
        armed.clear()
        threads.append(threading.Thread(target=call))
        threads[0].start()
        while not pool._requests:
            time.sleep(0.001)
        return 1e6

    shutdown()
    call()
    armed.set()
    assert calls._pool is not None
    calls._pool.wake()
    deadline = time.monotonic() + SECONDS
    while not threads and time.monotonic() < deadline:
        time.sleep(0.01)
    threads[0].join(SECONDS)
    assert found[1:] == found[:1], "the processes that were about to end"


def test_no_idle_limit_and_none_at_all() -> None:
    with env.override(MKERNEL_IDLE_LIMIT="1e9"):
        before = pids()
        assert pids() == before
    with env.override(MKERNEL_IDLE_LIMIT=0):
        wait_gone(*[pid for _ in range(4) for pid in pids(ranks=1)])  # a call may find the last one's processes on their way out
    with env.override(MKERNEL_IDLE_LIMIT="soon"), pytest.raises(ArgumentError, match="MKERNEL_IDLE_LIMIT"):
        pids()


def test_a_pool_whose_thread_fails_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = pids()
    assert calls._pool is not None

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("a mistake of mkernel")

    with monkeypatch.context() as patch:
        patch.setattr(calls._pool, "_end_of_rank", broken)
        with caplog.at_level(logging.CRITICAL, "mkernel"), pytest.raises(ZeroDivisionError):
            pids()
    assert not set(pids()) & set(before)
    assert not any(map(alive, before))


def test_shutdown_waits_for_another_threads_call() -> None:
    begun = threading.Event()
    found: list[Any] = []

    def use(world: World) -> str:
        print("begun")
        time.sleep(0.3)
        return "done"

    def call() -> None:
        begun.set()
        found.extend(run(use))

    thread = threading.Thread(target=call)
    with calls._turn:
        thread.start()
        begun.wait()
    shutdown()  # before or after the call
    thread.join()
    assert found == ["done"] * 2
