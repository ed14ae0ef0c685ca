"""A rank of the tests of how processes end: ``python tests/runtime/ending_worker.py end``; see ``test_endings.py``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkernel.errors import Error
from mkernel.runtime.world import World
from tests.runtime.worker import calls, open_world


class _Reason:
    """What a program may hand to sys.exit."""

    def __str__(self) -> str:
        return "a custom reason"


def _exit_with(code: Any) -> Callable[[World], None]:
    return lambda world: sys.exit(code)


def _raise(error: BaseException) -> Callable[[World], None]:
    def act(world: World) -> None:
        raise error

    return act


def _nested(world: World) -> None:
    """Another exception on the way out."""
    try:
        raise ValueError("planned")
    finally:
        {}["missing"]  # type: ignore[index]


def _in_another_thread(world: World) -> None:
    """A thread dies in the middle of its calls; the main thread sees nothing and ends."""

    def run() -> None:
        calls(world, 1)
        raise ValueError("planned")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _swallowed(world: World) -> None:
    """The world fails, the program catches that and goes on to its end."""
    world.abort("given up")
    try:
        world.check()
    except Error:
        return
    raise AssertionError("check must raise")


def _caught_exit(world: World) -> None:
    """Somebody calls sys.exit, somebody else catches it: nobody dies."""
    with contextlib.suppress(SystemExit):
        sys.exit(3)


def _terminated(world: World) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


WAYS: dict[str, Callable[[World], None]] = {
    "returns": lambda world: None,
    "exit_none": _exit_with(None),
    "exit_0": _exit_with(0),
    "exit_1": _exit_with(1),
    "exit_3": _exit_with(3),
    "exit_text": _exit_with("bad config"),
    "exit_object": _exit_with(_Reason()),
    "raises_exit": _raise(SystemExit(3)),
    "raises": _raise(ValueError("planned")),
    "raises_nested": _nested,
    "interrupted": _raise(KeyboardInterrupt()),
    "caught_exit": _caught_exit,
    "os_exit": lambda world: os._exit(5),
    "terminated": _terminated,
    "thread": _in_another_thread,
    "swallowed": _swallowed,
}


def _silent(*details: object) -> None:
    """The excepthook of another library, which calls nobody else's."""


def main() -> None:
    way, block, who, hook = (os.environ[name] for name in ("WAY", "BLOCK", "WHO", "HOOK"))
    if hook == "before":
        sys.excepthook = _silent
    world = open_world(timeout=2.0, entry_timeout=float(os.environ["LIMIT"]))
    if hook == "after":
        sys.excepthook = _silent
    calls(world, 1)
    acts = who == "all" or world.rank == 1
    if block == "with":
        with world:
            (WAYS[way] if acts else peer)(world)
    elif block == "closed":
        world.close()
        (WAYS[way] if acts else lambda world: None)(world)
    else:
        (WAYS[way] if acts else peer)(world)


def peer(world: World) -> None:
    """A rank that goes on, for as long as there is somebody to go on with, or comes to its own end."""
    if os.environ["PEER"] == "in MPI":
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
    while os.environ["PEER"] == "calls":
        calls(world, 1)
    if os.environ["PEER"] == "late":
        time.sleep(3.0)  # longer than `timeout`


def bad_init() -> None:
    """Rank 1 cannot even begin; the other is inside init."""
    import mkernel as mk

    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("MKERNEL_RANK"))) == "1":
        os.environ["MKERNEL_TIMEOUT"] = "-1"
    mk.init(target="cpu")


def outlived() -> None:
    """Rank 1's main program dies while a thread of it, which is no daemon, goes on until rank 0 has heard of it."""
    heard = Path(os.environ["HEARD"])
    world = open_world(timeout=2.0, entry_timeout=600.0)
    calls(world, 1)

    def wait() -> None:
        while not heard.exists():
            time.sleep(0.05)

    if world.rank == 1:
        threading.Thread(target=wait).start()
        raise ValueError("planned")
    try:
        while True:
            calls(world, 1)
    finally:
        heard.touch()


if __name__ == "__main__":
    {"end": main, "bad_init": bad_init, "outlived": outlived}[sys.argv[1]]()
