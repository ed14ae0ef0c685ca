"""A rank of the process tests: ``python tests/ops/worker.py <scenario>``. Prints one line of JSON per rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mkernel as mk
from mkernel.cli.check import worst_over_bound
from tests.ops.body import Case, back_to_back, problems
from tests.runtime.worker import outcome, tell

_ROWS = (0, 1, 129)
CASES = (Case("bfloat16", 136, 264), Case("float16", 72, 520, False, "narrow"), Case("float16", 4096, 8, True, "wide"))


def calls() -> None:
    """The body of the thread tests, for several kernels; ranks come to each call at random times."""
    seed = int(os.environ["TEST_SEED"])
    found: list[str] = []
    count = 0
    with mk.init(target="cpu", heap_bytes=64 << 20, timeout=60.0) as world:
        for i, case in enumerate(CASES):
            results = back_to_back(world, case, seed + i, 0.02, _ROWS)
            found += problems(results)
            count += len(results)
        tell(rank=world.rank, shape=f"{world.num_nodes}x{world.ranks_per_node}", calls=count, problems=found)


# ---- faults: rank 1 is the one that fails

_SMALL, _LARGE = 40, 12000  # rows of a; the large call takes seconds
_INSIDE = 0.3  # seconds from the beginning of a call to the middle of its kernel


def _operands(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    return tuple(rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((rows, 512), (512, 256)))


def _call(a: Any, b: Any) -> None:
    c = mk.allgather_gemm(a, b)
    assert worst_over_bound(c[-len(a) :], a, b, "float16") <= 1.0


def _small_call() -> None:
    _call(*_operands(_SMALL))


def _large_operands(world: Any) -> tuple[Any, Any]:
    """Of a call that is planned, so that it begins with its kernel."""
    operands = _operands(_LARGE)
    mk.plan("allgather_gemm", *operands)
    world.barrier()
    return operands


def _resources() -> dict[str, int]:
    """What a world takes and must give back."""
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return {
        "sockets": sum(link.startswith("socket:") for link in links),
        "memfds": sum("memfd:mkernel" in link for link in links),
        "maps": Path("/proc/self/maps").read_text().count("memfd:mkernel"),
        "threads": sum(thread.name.startswith("mkernel") for thread in threading.enumerate()),
    }


def _die_soon() -> None:
    """By SIGKILL, while this rank's kernel is running."""
    begin = time.monotonic()

    def die() -> None:
        time.sleep(_INSIDE)
        with open(os.environ["TEST_DEATH"], "w") as file:
            file.write(f"{time.time()} {time.monotonic() - begin}")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die).start()


def killed() -> None:
    """In the middle of a kernel; then the survivors go on in a world of their own."""
    before = _resources()
    world = mk.init(target="cpu", timeout=5.0, heap_bytes=96 << 20)
    _small_call()
    large = _large_operands(world)
    if world.rank == 1:
        _die_soon()
    first = outcome(lambda: _call(*large))
    again = outcome(_small_call)
    closing = outcome(world.close)
    after = _resources()
    os.environ["MKERNEL_SIZE"] = str(world.size - 1)
    os.environ["MKERNEL_RANK"] = str(world.rank - (world.rank > 1))
    os.environ["MKERNEL_RENDEZVOUS"] = os.environ["SECOND_RENDEZVOUS"]
    del os.environ["MKERNEL_RANKS_PER_NODE"]
    with mk.init(target="cpu", timeout=5.0, heap_bytes=96 << 20) as second:
        _small_call()
        size = second.size
    tell(rank=world.rank, first=first, again=again, closing=closing, left={k: after[k] - before[k] for k in before}, second=size)


def killed_uncaught() -> None:
    """The same in a script that knows nothing of errors."""
    world = mk.init(target="cpu", timeout=5.0, heap_bytes=96 << 20)
    _small_call()
    large = _large_operands(world)
    if world.rank == 1:
        _die_soon()
    _call(*large)
    tell(rank=world.rank, ended="well")


def stays_away() -> None:
    """Rank 1 lives on, and never calls."""
    world = mk.init(target="cpu", timeout=5.0, entry_timeout=1.5, heap_bytes=96 << 20)
    _small_call()
    world.barrier()
    if world.rank == 1:
        time.sleep(3.0)
        first = outcome(world.check)
    else:
        first = outcome(_small_call)
    tell(rank=world.rank, first=first, closing=outcome(world.close))


def slow_inside() -> None:
    """Rank 1 has entered the call and is then stopped for longer than the others' patience."""
    world = mk.init(target="cpu", timeout=1.5, heap_bytes=96 << 20)
    _small_call()
    large = _large_operands(world)
    if world.rank == 1:
        stopper = f"import os, signal, sys, time; time.sleep({_INSIDE}); os.kill(int(sys.argv[1]), signal.SIGSTOP); time.sleep(4); "
        stopper += "os.kill(int(sys.argv[1]), signal.SIGCONT)"
        child = subprocess.Popen([sys.executable, "-c", stopper, str(os.getpid())])
    first = outcome(lambda: _call(*large))
    if world.rank == 1:
        child.wait()
    tell(rank=world.rank, first=first, closing=outcome(world.close))


def raises() -> None:
    """Rank 1 raises where the others call."""
    with mk.init(target="cpu", timeout=5.0, heap_bytes=96 << 20) as world:
        _small_call()
        if world.rank == 1:
            raise ValueError("the input file is gone")
        first = outcome(_small_call)
        tell(rank=world.rank, first=first)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
