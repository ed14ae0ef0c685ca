"""How calls and worker processes of ``mk.launch`` end: killed, interrupted, idle, shut down, left behind by the caller."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import AbortedError, ArgumentError, Error, PeerLostError
from mkernel.runtime.workers import calls, serve
from mkernel.runtime.workers.calls import run_in_workers, shutdown
from mkernel.runtime.world import Options, World
from tests.runtime.in_workers import SECONDS, alive, pids, run, wait_gone

ROOT = Path(__file__).parents[2]


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
        def assemble(*arguments: Any) -> None:
            raise Error("the GPU is broken")

        serve.assemble = assemble  # type: ignore[assignment]
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
        if not (armed.is_set() and threading.current_thread() is pool):
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


# ---- the caller's process, from outside
PROGRAM = """
    import json, os, signal, sys, threading, time
    from mkernel.runtime.workers.calls import run_in_workers, shutdown
    from mkernel.runtime.world import Options
    options = Options.resolve(target="cpu", heap_bytes=1 << 20, timeout=20.0)

    def call(fn, *args):
        return run_in_workers(fn, 2, options, args)

    def tell(**fields):
        print(json.dumps(fields), flush=True)

    def pids():
        return call(lambda world: os.getpid())

    def stay(world):
        print('{"begun": true}', flush=True)
        time.sleep(600)

    def interrupt_when_told(times=1):
        def wait():
            for _ in range(times):
                os.read(0, 1)
                os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=wait, daemon=True).start()
"""


class Caller:
    """A Python program that calls ``mk.launch``; it tells in lines of JSON, and is told by bytes on its standard input."""

    def __init__(self, body: str) -> None:
        program = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("{"), f"{line!r}, and then {self.process.communicate(timeout=SECONDS)}"
        fields: dict[str, Any] = json.loads(line)
        return fields

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("x")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *arguments: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(600)",
        "world.barrier() if world.rank else time.sleep(600)",
        "while True: sum(range(1000))",
        "world.barrier(); loop(world)",
    ],
    ids=["sleep", "barrier", "loop", "calls"],
)
def test_ctrl_c(body: str) -> None:
    """The call ends on all ranks, with their processes as they were, and the next one works."""
    program = f"""
        import numpy as np, mkernel as mk

        def loop(world):
            while True:
                world.barrier()

        def use(world):
            print('{{"begun": true}}', flush=True)
            {body}

        before = pids()
        interrupt_when_told()
        try:
            call(use)
        except KeyboardInterrupt as error:
            tell(caught=True)
        tell(before=before, after=pids())
    """
    with Caller(program) as caller:
        for _ in range(2):
            assert caller.hear() == {"begun": True}
        caller.tell()
        assert caller.hear() == {"caught": True}
        fields = caller.hear()
        assert fields["before"] == fields["after"]
        assert caller.process.wait(SECONDS) == 0


def test_a_second_ctrl_c_waits_for_nobody() -> None:
    program = """
        def use(world):
            print('{"begun": true}', flush=True)
            while world.rank:
                try:
                    time.sleep(600)
                except KeyboardInterrupt:
                    print('{"ignored": true}', flush=True)

        before = pids()
        interrupt_when_told(2)
        try:
            call(use)
        except KeyboardInterrupt as error:
            tell(caught=True)
        tell(before=before, after=pids())
    """
    with Caller(program) as caller:
        for _ in range(2):
            assert caller.hear() == {"begun": True}
        caller.tell()
        assert caller.hear() == {"ignored": True}, "what ranks say on their way out is shown"
        caller.tell()
        assert caller.hear() == {"caught": True}
        fields = caller.hear()
        assert fields["before"][1] != fields["after"][1]


@pytest.mark.parametrize("busy", [False, True])
def test_no_process_outlives_a_caller_that_is_killed(busy: bool) -> None:
    program = f"""
        tell(pids=pids())
        if {busy}:
            threading.Thread(target=call, args=(stay,)).start()
        if os.fork() == 0:  # a child that lives on holds what it has inherited
            os.close(1)
            time.sleep(60)
            os._exit(0)
        tell(forked=True)
        time.sleep(600)
    """
    with Caller(program) as caller:
        processes = caller.hear()["pids"]
        if busy:
            assert sorted(map(str, (caller.hear(), caller.hear(), caller.hear()))) == ["{'begun': True}"] * 2 + ["{'forked': True}"]
        else:
            assert caller.hear() == {"forked": True}
        os.kill(caller.process.pid, signal.SIGKILL)
        wait_gone(*processes)


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError('planned')", "daemon()"])
def test_no_process_outlives_a_caller_that_ends(ending: str) -> None:
    program = f"""
        def daemon():
            threading.Thread(target=call, args=(stay,), daemon=True).start()
            os.read(0, 1)

        sys.stderr = open(os.devnull, "w")
        tell(pids=pids())
        {ending}
    """
    with Caller(program) as caller:
        processes = caller.hear()["pids"]
        if "daemon" in ending:
            assert caller.hear() == caller.hear() == {"begun": True}
            caller.tell()
        assert caller.process.wait(SECONDS) == {"": 0, "sys.exit(3)": 3, "daemon()": 0}.get(ending, 1)
        wait_gone(*processes)


def test_a_forked_child_has_neither_the_processes_nor_their_end() -> None:
    """It may launch ranks of its own, and its end does not touch the parent's."""
    program = """
        before = pids()
        if (child := os.fork()) == 0:
            own = pids()
            shutdown()
            os._exit(0 if not set(own) & set(before) else 1)
        tell(child=os.waitpid(child, 0)[1], before=before, after=pids())
    """
    with Caller(program) as caller:
        fields = caller.hear()
        assert fields["child"] == 0
        assert fields["before"] == fields["after"]


def test_functions_and_classes_of_the_main_program() -> None:
    """What a notebook defines in its cells is nowhere to be imported from."""
    program = """
        import dataclasses, enum

        class OwnError(Exception): pass

        @dataclasses.dataclass
        class Point:
            x: int

        def helper(world, point):
            return Point(point.x + world.rank)

        def use(world, point):
            if point.x < 0:
                raise OwnError("negative")
            return helper(world, point)

        results = call(use, Point(3))
        try:
            call(use, Point(-1))
        except OwnError as error:
            tell(results=[r.x for r in results], same=all(type(r) is Point for r in results), error=str(error))
    """
    with Caller(program) as caller:
        assert caller.hear() == {"results": [3, 4], "same": True, "error": "negative"}
