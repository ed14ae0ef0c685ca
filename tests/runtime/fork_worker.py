"""A rank that forks: ``python tests/runtime/fork_worker.py <what>``. Every public way to use a parent's world, in its child."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mkernel as mk
from mkernel.errors import Error
from tests.runtime.worker import tell

ROWS, K, N = 8, 64, 8


def forked(action: Callable[[], Any]) -> Callable[[], str]:
    """Fork now. What is returned waits for what the child reports: the error that ``action`` raises there, or "ended well"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            action()
            text = "ended well"
        except Error as error:
            text = f"{type(error).__name__}: {error}"
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)

    def wait() -> str:
        with open(reader) as file:
            text = file.read()
        os.waitpid(child, 0)
        return text

    return wait


def in_child(action: Callable[[], Any]) -> str:
    return forked(action)()


def uses(world: Any, a: Any, b: Any, plan: Any) -> dict[str, Callable[[], Any]]:
    """Every public method of a world and every op, those with a world given and those without."""
    found: dict[str, Callable[[], Any]] = {
        "empty": lambda: world.empty(4, "float32"),
        "zeros": lambda: world.zeros(4, "float32"),
        "barrier": world.barrier,
        "check": world.check,
        "abort": lambda: world.abort("by the child"),
        "synchronize": world.synchronize,
        "exchange": lambda: world.exchange("a test", 1),
        "trace": lambda: mk.trace(world).__enter__(),
        "plan": lambda: mk.plan("allgather_gemm", a, b, world=world),
        "plan without a world": lambda: mk.plan("allgather_gemm", a, b),
        "run": lambda: plan.run(a, b),
        "tune": lambda: mk.tune("allgather_gemm", a, b, world=world),
        "end of a trace": world.recorder.end,
    }
    for op in ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"):
        found[op] = lambda op=op: getattr(mk, op)(a, b, world=world)
        found[f"{op} without a world"] = lambda op=op: getattr(mk, op)(a, b)
    return found


@contextlib.contextmanager
def _locked_by_another_thread(world: Any) -> Iterator[None]:
    """As when a thread of the program is inside a call at the moment of the fork."""
    busy, release = threading.Event(), threading.Event()

    def hold() -> None:
        with world.lock, world.failures._lock, world.heap._lock:
            busy.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    busy.wait()
    yield
    release.set()
    thread.join()


def refused() -> None:
    """Rank 1's child tries everything, while rank 0 makes calls that would take the child's data for rank 1's."""
    with mk.init(target=os.environ.get("TEST_TARGET", "cpu"), timeout=20.0, heap_bytes=1 << 26) as world:
        xp = world.xp
        a, b = xp.full((ROWS, K), world.rank + 1, np.float16), xp.ones((K, N), np.float16)
        wrong = xp.full((ROWS, K), 100, np.float16)
        plan = mk.plan("allgather_gemm", a, b)
        c = mk.allgather_gemm(a, b)
        said: dict[str, str] = {}
        if world.rank == 1:
            for name, action in uses(world, wrong, b, plan).items():
                with _locked_by_another_thread(world):
                    report = forked(action)
                said[name] = report()
            said["close"] = in_child(world.close)
            said["leaving the block"] = in_child(lambda: world.__exit__(None, None, None))
            said["dying in the block"] = in_child(lambda: world.__exit__(ValueError, ValueError("x"), None))
            said["state"] = in_child(lambda: (_ for _ in ()).throw(Error(f"{world.closed} {plan.can_run()} {world!r}")))
        for _ in range(3):
            d = mk.allgather_gemm(a, b, out=xp.zeros_like(c))
        expected = xp.asarray(np.repeat([K * (rank + 1) for rank in range(world.size)], ROWS))
        right = bool((c == expected[:, None]).all() and (d == expected[:, None]).all())
        world.barrier()
    tell(rank=world.rank, said=said, right=right)


def leaves() -> None:
    """Children that end by every way, inside the world's block and with arrays of its heap; the parents go on."""
    with mk.init(target="cpu", timeout=20.0, heap_bytes=1 << 24) as world:
        a, b = np.full((ROWS, K), world.rank + 1, np.float16), np.ones((K, N), np.float16)
        mk.allgather_gemm(a, b)
        held = world.zeros(1000, "float32")
        for way in ("return", "exit", "error", "drop"):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                if way == "return":
                    break
                if way == "exit":
                    sys.exit(7)
                if way == "drop":
                    del held
                    sys.exit(8)
                raise ValueError("planned")
            os.waitpid(child, 0)
        else:
            held += 1
            c = mk.allgather_gemm(a, b)
            right = bool((c[ROWS:] == 2 * K).all())
            again = world.zeros(1000, "float32")
            world.barrier()
            tell(rank=world.rank, right=right, zero=not again.any(), one=bool((held == 1).all()))
            del held, again


def own_world() -> None:
    """A child may have a world of its own, and is told of its parent's only when there is none."""
    with mk.init(target="cpu", timeout=20.0, heap_bytes=1 << 24) as world:
        a, b = np.ones((ROWS, K), np.float16), np.ones((K, N), np.float16)
        mk.allgather_gemm(a, b)

        def child() -> None:
            for name in ("MKERNEL_RENDEZVOUS", "MKERNEL_RANK", "MKERNEL_SIZE"):
                os.environ.pop(name)
            with mk.init(target="cpu", heap_bytes=1 << 24):
                c = mk.allgather_gemm(a, b)
            raise Error(f"{c.shape} {bool((c == K).all())}")

        said = in_child(child)
        mk.allgather_gemm(a, b)
        world.barrier()
    tell(rank=world.rank, said=said)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
