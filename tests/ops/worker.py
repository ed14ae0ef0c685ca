"""A rank of the process tests: ``python tests/ops/worker.py <scenario>``. Prints one line of JSON per rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mkernel as mk
from mkernel import abi
from mkernel.ops.schedule import Choice
from mkernel.planner import ring_attention
from mkernel.planner.tiling import Tiling
from tests.ops.body import Case, back_to_back, bits, problems
from tests.runtime.notes import await_notes, note, of_others
from tests.runtime.worker import outcome, tell

# An op, an algorithm of gemm_allreduce, or "packets": two-shot, with few values; _GATHERS: an allgather_gemm of few rows.
HOW = os.environ.get("TEST_HOW", "allgather_gemm")
_SCATTER, _ALL = "gemm_reduce_scatter", "gemm_allreduce"
_ROWS = (0, 1, 129)
CASES = {
    "allgather_gemm": (Case("bfloat16", 136, 264), Case("float16", 72, 520, False, "narrow"), Case("float16", 4096, 8, True, "wide")),
    "gemm_reduce_scatter": (
        Case("bfloat16", 136, 264, op=_SCATTER),
        Case("float16", 72, 520, False, "narrow", _SCATTER, "float32"),
        Case("float16", 8, 1032, True, "wide", _SCATTER),
    ),
    "gemm_allreduce": (
        Case("bfloat16", 136, 264, op=_ALL, algorithm="one_shot"),
        Case("float16", 72, 520, False, "narrow", _ALL, "output", "two_shot"),
        Case("float16", 8, 1032, True, "wide", _ALL, "float32", "two_shot"),
        Case("bfloat16", 72, 136, True, "wide", _ALL, "float32", "one_shot"),
    ),
}


def calls() -> None:
    """The body of the thread tests, for several kernels; ranks come to each call at random times."""
    seed = int(os.environ["TEST_SEED"])
    found: list[str] = []
    count = same = 0
    with mk.init(target="cpu", heap_bytes=64 << 20, timeout=60.0) as world:
        for i, case in enumerate(CASES[HOW]):
            results = back_to_back(world, case, seed + i, 0.02, _ROWS)
            found += problems(results)
            count += len(results)
            if case.op == _ALL:  # what must be the same on all ranks
                same = zlib.crc32(b"".join(bits(results)), same)
        tell(rank=world.rank, shape=f"{world.num_nodes}x{world.ranks_per_node}", calls=count, problems=found, same=same)


# ---- faults: rank 1 is the one that fails

_LARGES = {"packets": 16000, "moe_dispatch_gemm": 2500, "ring_attention": 1500}
# Rows of a; the large call takes a second or more, on a fast machine too.
_GATHERS = {"gather packets": 1, "tagged packets": 2}  # Tiling.packets: as far as there is room, so not of the large call
_SMALL, _LARGE = (40 if HOW not in _GATHERS else 8), _LARGES.get(HOW, 12000)
_K = 1024 if HOW == "packets" else 512
_MOE = HOW == "moe_dispatch_gemm"
_MOST_TOKENS, _EXPERTS = 2500, 3  # of a rank
_RING = HOW == "ring_attention"
if _RING:
    ring_attention.SCALE = ring_attention.Scale(chunk_bytes=1, window_bytes=1, fewest=2)  # chunks are always under way
_TILES = 6  # so many have been taken in the middle of a kernel: more than there are CTAs, fewer than there are tiles
_NEVER = 600.0  # seconds; a deadline that no test lives to see


def _operands(world: Any, rows: int) -> tuple[Any, ...]:
    """The same on every rank, and so small that all sums are exact."""
    rng = np.random.default_rng(rows)
    if _RING:  # all keys weigh the same
        q = np.zeros((1, 2, rows, 64), np.float16)
        return q, q, np.full_like(q, 2 * world.rank)
    if HOW in ("gemm_reduce_scatter", "two_shot"):  # one_shot: everyone adds up everything
        rows *= world.size
    a, b = (rng.integers(-1, 2, shape).astype(np.float16) for shape in ((rows, _K), (_K, 256)))
    if _MOE:  # two experts of each token, often on other ranks; all experts have the same weights
        ids = (np.arange(rows)[:, None] + np.array([0, _EXPERTS])) % (_EXPERTS * world.size)
        return a, ids.astype(np.int32), np.stack([b] * _EXPERTS)
    return a, b


def _options() -> dict[str, Any]:
    if _MOE:
        return {"max_tokens": _MOST_TOKENS}
    return {"algorithm": HOW} if HOW in ("one_shot", "two_shot") else {"algorithm": "two_shot"} if HOW == "packets" else {}


def _op() -> str:
    return _ALL if _options() and not _MOE else "allgather_gemm" if HOW in _GATHERS else HOW


def _call(world: Any, a: Any, *others: Any) -> None:
    if _RING:
        assert (mk.ring_attention(a, *others, world=world).o == world.size - 1).all()
        return
    if _MOE:
        ids, w = others
        d = mk.moe_dispatch_gemm(a, ids, w, world=world, **_options())
        rows = d.rows()
        assert (d.y[:rows] == (a.astype(np.float32) @ w[0].astype(np.float32))[d.source[:rows, 1]]).all()
        return
    (b,) = others
    asked = {"split": Choice(None, None, Tiling(64, packets=_GATHERS[HOW]))} if HOW in _GATHERS else {}  # as a PreparedPlan passes it on
    c = getattr(mk, _op())(a, b, world=world, **_options(), **asked)
    product = a.astype(np.float32) @ b.astype(np.float32)
    if _op() == "allgather_gemm":
        assert (c[-len(a) :] == product).all()
    else:
        rows = len(a) // world.size
        mine = slice(world.rank * rows, (world.rank + 1) * rows) if HOW == _SCATTER else slice(None)
        assert (c == world.size * product[mine]).all()


def _small_call(world: Any) -> None:
    _call(world, *_operands(world, _SMALL))


def _large_operands(world: Any) -> tuple[Any, ...]:
    """Arguments of a call that is planned, so that it begins with its kernel."""
    operands = _operands(world, _LARGE)
    plan = mk.plan(_op(), *operands, *([None] if _MOE else []), world=world, **_options())
    assert HOW != "packets" or plan.workspace_bytes == 0
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


def _inside(world: Any, action: Callable[[], None]) -> None:
    """Do something in the middle of this rank's next kernel: it has taken some tiles, and has more to take; of MoE before rows travel."""
    control = abi.ControlBlock.from_address(world.header.control)
    progress = np.empty(0, np.uint64)
    if _RING:  # what its CTAs have read: it has begun to read keys of others
        plan = mk.plan("ring_attention", *_operands(world, _LARGE), world=world).plan()
        progress = world.backend.wrap(world.heap_address + plan.progress_offset, (plan.progress_bytes // 8,), "uint64", None)
        progress[:] = 0

    def wait() -> None:
        while control.tile_counter < _TILES and not (_MOE and control.met) and not (progress > 2).any():
            time.sleep(0 if _MOE else 0.001)
        action()

    threading.Thread(target=wait, daemon=True).start()


def _die() -> None:
    note("death", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def killed() -> None:
    """In the middle of a kernel; then the survivors go on in a world of their own."""
    before = _resources()
    world = mk.init(target="cpu", timeout=_NEVER, heap_bytes=96 << 20)
    _small_call(world)
    large = _large_operands(world)
    if world.rank == 1:
        _inside(world, _die)
    first = outcome(lambda: _call(world, *large))
    again = outcome(lambda: _small_call(world))
    closing = outcome(world.close)
    after = _resources()
    os.environ["MKERNEL_SIZE"] = str(world.size - 1)
    os.environ["MKERNEL_RANK"] = str(world.rank - (world.rank > 1))
    os.environ["MKERNEL_RENDEZVOUS"] = os.environ["SECOND_RENDEZVOUS"]
    del os.environ["MKERNEL_RANKS_PER_NODE"]
    with mk.init(target="cpu", timeout=_NEVER, heap_bytes=96 << 20) as second:
        _small_call(second)
        size = second.size
    tell(rank=world.rank, first=first, again=again, closing=closing, left={k: after[k] - before[k] for k in before}, second=size)


def killed_outside() -> None:
    """Where the others wait for its entry, and for its packets."""
    world = mk.init(target="cpu", timeout=_NEVER, heap_bytes=96 << 20)
    _small_call(world)
    world.barrier()  # all have what they need of the first call
    note(f"left-{world.rank}")
    if world.rank == 1:
        await_notes(*of_others(world, "left"))
        time.sleep(0.2)  # most likely they are inside the kernel
        _die()
    first = outcome(lambda: _small_call(world))
    tell(rank=world.rank, first=first, closing=outcome(world.close))


def killed_uncaught() -> None:
    """The same in a script that knows nothing of errors."""
    world = mk.init(target="cpu", timeout=_NEVER, heap_bytes=96 << 20)
    _small_call(world)
    large = _large_operands(world)
    if world.rank == 1:
        _inside(world, _die)
    _call(world, *large)
    tell(rank=world.rank, ended="well")


def stays_away() -> None:
    """Rank 1 lives on, and never calls."""
    world = mk.init(target="cpu", timeout=_NEVER, entry_timeout=3.0, heap_bytes=96 << 20)
    _small_call(world)
    world.barrier()
    if world.rank == 1:

        def work() -> None:
            while True:
                world.check()
                time.sleep(0.05)

        first = outcome(work)
    else:
        first = outcome(lambda: _small_call(world))
    tell(rank=world.rank, first=first, closing=outcome(world.close))


def slow_inside() -> None:
    """Rank 1 has entered the call and is then stopped until the others' patience is over."""
    world = mk.init(target="cpu", timeout=3.0, entry_timeout=_NEVER, heap_bytes=96 << 20)
    _small_call(world)
    large = _large_operands(world)
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            await_notes(*of_others(world, "heard"))
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        _inside(world, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    first = outcome(lambda: _call(world, *large))
    note(f"heard-{world.rank}")
    if world.rank == 1:
        os.waitpid(child, 0)
    tell(rank=world.rank, first=first, closing=outcome(world.close))


def raises() -> None:
    """Rank 1 raises where the others call."""
    with mk.init(target="cpu", timeout=_NEVER, heap_bytes=96 << 20) as world:
        _small_call(world)
        world.barrier()  # all have what they need of the first call
        note(f"left-{world.rank}")
        if world.rank == 1:
            await_notes(*of_others(world, "left"))
            raise ValueError("the input file is gone")
        first = outcome(lambda: _small_call(world))
        tell(rank=world.rank, first=first)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
