"""The process that calls ``mk.launch``, seen from outside: it is interrupted, killed, ends or forks, and no rank outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Self

import pytest

from tests.runtime.in_workers import SECONDS, wait_gone

ROOT = Path(__file__).parents[2]
PROGRAM = """
    import json, os, signal, sys, threading, time
    from mkernel.runtime.workers.calls import run_in_workers, shutdown
    from mkernel.runtime.options import Options
    options = Options.resolve(target="cpu", heap_bytes=1 << 20, timeout=20.0)

    def call(fn, *args):
        return run_in_workers(fn, 2, options, args)

    def tell(**fields):
        # One write: what ranks say arrives on the same pipe, and print writes the end of a line by itself.
        os.write(1, (json.dumps(fields) + "\\n").encode())

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


def interrupted(times: int = 1) -> str:
    """The end of a program: ``call(use)``, interrupted so often when it has been told to."""
    return f"""
        before = pids()
        interrupt_when_told({times})
        try:
            call(use)
        except KeyboardInterrupt as error:
            tell(caught=True)
        tell(before=before, after=pids())
    """


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
    """
    with Caller(program + interrupted()) as caller:
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
    """
    with Caller(program + interrupted(2)) as caller:
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
