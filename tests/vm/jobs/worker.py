"""A rank of a world that spans machines: ``python worker.py <scenario>``. Prints one line of JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import mkernel as mk
from tests.ops.body import CALLS, Case, back_to_back, problems
from tests.runtime.worker import tell

ROWS = (0, 1, 7, 64)
SHAPES = (("bfloat16", 136, 264), ("float16", 72, 520, False))
HEAP = 16 << 20
TIMEOUT = 10.0  # of the worlds that fail
JOB = Path("/mnt/job")


def cases() -> list[Case]:
    """Of every fused operation that there is."""
    found = [Case(*shape) for shape in SHAPES]
    reductions = (("gemm_reduce_scatter", None), ("gemm_allreduce", "one_shot"), ("gemm_allreduce", "two_shot"))
    for op, algorithm in reductions:
        if hasattr(mk, op):
            found += [Case(*shape, op=op, algorithm=algorithm) for shape in SHAPES[: 1 if algorithm else 2]]
    return [*found, found[0]]


def calls() -> None:
    """Every fused operation, 8 calls of each case, without a barrier, all results checked afterwards."""
    seed = int(os.environ["TEST_SEED"])
    found: list[str] = []
    count = 0
    with mk.init(target="cpu", heap_bytes=HEAP, timeout=120.0) as world:
        for i, case in enumerate(cases()):
            results = back_to_back(world, case, seed + i, 0.01, ROWS)
            assert len(results) == CALLS
            count += CALLS
            found += problems(results)
        tell(rank=world.rank, shape=f"{world.num_nodes}x{world.ranks_per_node}", packets=_packets(), calls=count, problems=found)


def _packets() -> int:
    """That the card has sent."""
    return int(Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts").read_text())


def _call(rank: int) -> None:
    """A small call; its result is right, or it raises."""
    a, b = (np.random.default_rng(rank).standard_normal(shape, np.float32).astype(np.float16) for shape in ((40, 72), (72, 520)))
    c = mk.allgather_gemm(a, b)
    rows = slice(rank * 40, rank * 40 + 40)
    assert np.abs(c[rows].astype(np.float64) - a.astype(np.float64) @ b.astype(np.float64)).max() < 0.1


def _until_it_fails(world: Any) -> dict[str, Any]:
    """Call after call. What came of it, and the seconds between the last good call and the error."""
    well, good, end = time.monotonic(), 0, time.monotonic() + 90
    while time.monotonic() < end:
        try:
            _call(world.rank)
        except mk.Error as error:
            return {
                "error": type(error).__name__,
                "message": str(error),
                "status": getattr(error, "status", None),
                "peer": getattr(error, "peer", getattr(error, "rank", None)),
                "seconds": round(time.monotonic() - well, 1),
                "good": good,
            }
        well, good = time.monotonic(), good + 1
        if good == 3:
            (JOB / f"going{world.rank}").touch()
    return {"error": None, "good": good}


def fails() -> None:
    """Calls until something breaks: a machine is killed, or the engine of one rank has a planted fault."""
    world = mk.init(target="cpu", heap_bytes=HEAP, timeout=TIMEOUT)
    rank = world.rank
    told = _until_it_fails(world)
    begin = time.monotonic()
    world.close()
    tell(rank=rank, **told, closing=round(time.monotonic() - begin, 1))


def link_down() -> None:
    """The RDMA link of machine 1 goes down between calls; both ranks learn of it; when it is up again a new world works."""
    world = mk.init(target="cpu", heap_bytes=HEAP, timeout=TIMEOUT)
    rank = world.rank
    if rank == 1:
        threading.Thread(target=_cut_soon, daemon=True).start()
    told = _until_it_fails(world)
    world.close()
    if rank == 1:
        _link("up")
    time.sleep(2.0)  # until the address and the GID are there again
    host, _, port = os.environ["MKERNEL_RENDEZVOUS"].rpartition(":")
    os.environ["MKERNEL_RENDEZVOUS"] = f"{host}:{int(port) + 1}"
    with mk.init(target="cpu", heap_bytes=HEAP, timeout=TIMEOUT) as second:
        for _ in range(3):
            _call(second.rank)
        tell(rank=rank, **told, second=second.size)


def _cut_soon() -> None:
    while not (JOB / "going1").exists():
        time.sleep(0.05)
    _link("down")


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth1", state], check=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
