"""A rank of a world that spans machines: ``python worker.py <scenario>``. Prints one line of JSON."""

from __future__ import annotations

import json
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
from mkernel.transport.devices import choose_gid, find
from tests.ops.body import Case, Rank, Result, problems, use_of

ROWS = (0, 1, 7, 64)
SHAPES = (("bfloat16", 136, 72), ("float16", 72, 136, False))  # few multiplications: processors emulate floating point slowly
SMALL = Case("float16", 72, 136)  # of the worlds that fail
HEAP = 16 << 20
TIMEOUT = 10.0  # of the worlds that fail
GOOD = 3  # calls that go well before
DEADLINE = 90.0  # seconds until something must have broken
LONGEST_DELAY = 0.01  # seconds before a call
JOB = Path(os.environ.get("TEST_JOB", ""))  # what the host sees


def cases() -> dict[str, list[Case]]:
    """Calls of every GEMM op."""
    found = {"allgather_gemm": [Case(*shape) for shape in SHAPES]}
    if hasattr(mk, "gemm_reduce_scatter"):
        found["gemm_reduce_scatter"] = [Case(*shape, op="gemm_reduce_scatter") for shape in SHAPES]
    if hasattr(mk, "gemm_allreduce"):
        algorithms = ("one_shot", "two_shot")
        found["gemm_allreduce"] = [Case(*SHAPES[0], op="gemm_allreduce", algorithm=algorithm) for algorithm in algorithms]
    return found


def calls() -> None:
    """Every GEMM op, back to back and with plans that alternate, then all of them in turn; the results are checked afterwards."""
    seed, times = int(os.environ["TEST_SEED"]), int(os.environ["TEST_CALLS"])
    count: dict[str, int] = {}
    results: list[Result] = []
    before = _packets()  # machines stay on from test to test
    with mk.init(target="cpu", heap_bytes=HEAP, timeout=120.0) as world:
        ranks = {op: [Rank(world, case, seed + i, ROWS) for i, case in enumerate(some)] for op, some in cases().items()}
        for op, some in ranks.items():
            found = _calls(some, range(times), seed)
            count[op] = len(found)
            results += found
        everybody = [rank for some in ranks.values() for rank in some]
        results += _calls(everybody, range(times, times + len(everybody)), seed)
        shape = f"{world.num_nodes}x{world.ranks_per_node}"
        tell(rank=world.rank, shape=shape, packets=_packets() - before, calls=count, problems=problems(results))


def _calls(ranks: list[Rank], numbers: range, seed: int) -> list[Result]:
    """Call after call without a barrier, some ranks late, each on other inputs, rows and ways to lay arrays out."""
    order = np.random.default_rng([seed, 7])  # the same on every rank
    rows = [ROWS[i % len(ROWS)] for i in order.permutation(len(numbers))]
    uses = order.permutation(len(numbers))
    delays = np.random.default_rng([seed, 8, ranks[0].world.rank]).random(len(numbers)) * LONGEST_DELAY
    found = []
    for i, number in enumerate(numbers):
        rank = ranks[number % len(ranks)]
        found.append(rank.call(number, rows[i], use_of(int(uses[i]), rank.case), delays[i]))
    return found


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _packets() -> int:
    """That the card has sent."""
    return int(Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts").read_text())


def _call(rank: int) -> None:
    """A small call; its result is right, or it raises."""
    rng = np.random.default_rng(rank)
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((40, SMALL.k), (SMALL.k, SMALL.n)))
    c = mk.allgather_gemm(a, b)
    rows = slice(rank * 40, rank * 40 + 40)
    assert np.abs(c[rows].astype(np.float64) - a.astype(np.float64) @ b.astype(np.float64)).max() < 0.1


def _until_it_fails(world: Any) -> dict[str, Any]:
    """Call after call. What came of it, and the seconds between the last good call and the error."""
    well, good, end = time.monotonic(), 0, time.monotonic() + DEADLINE
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
        if good == GOOD:
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
        threading.Thread(target=_cut_when_told, daemon=True).start()
    told = _until_it_fails(world)
    world.close()
    if rank == 1:
        _link("up")
    end = time.monotonic() + DEADLINE
    while not _has_address() and time.monotonic() < end:
        time.sleep(0.1)
    host, _, port = os.environ["MKERNEL_RENDEZVOUS"].rpartition(":")
    os.environ["MKERNEL_RENDEZVOUS"] = f"{host}:{int(port) + 1}"
    with mk.init(target="cpu", heap_bytes=HEAP, timeout=TIMEOUT) as second:
        for _ in range(3):
            _call(second.rank)
        tell(rank=rank, **told, second=second.size)


def _cut_when_told() -> None:
    while not (JOB / "cut").exists():
        time.sleep(0.05)
    _link("down")


def _has_address() -> bool:
    gids = [choose_gid(port) for port in find() if port.active]
    return any(gid is not None and gid.address.ipv4_mapped for gid in gids)


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth1", state], check=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
