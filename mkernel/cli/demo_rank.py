"""One rank of ``mkernel demo``: runs the cases through the public API, checks its own results, and reports to a folder."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel.cli.check import worst_over_bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mkernel.runtime.world import World

__all__ = ["PICTURE", "Case", "Outcome", "cases", "read_report", "run"]

PICTURE = "picture.svg"  # in the folder of the reports: the first case, on rank 0
_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call that is checked. Sizes are those of the whole problem, over all ranks."""

    op: str
    dtype: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.m} x {self.n} x {self.k}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw of one case."""

    case: Case
    worst: float  # of |out - float64 reference| / bound
    milliseconds: float

    @property
    def right(self) -> bool:
        return self.worst <= 1  # not for nan


def cases(target: str, ranks: int) -> list[Case]:
    # The second of each is one that no tile divides.
    sizes = [(512, 512, 512), (200, 288, 136)] if target == "cpu" else [(4096, 4096, 4096), (1000, 1048, 1032)]
    # M and N are split over the ranks, N in multiples of 8.
    return [
        Case("allgather_gemm", dtype, math.ceil(m / ranks) * ranks, math.ceil(n / (8 * ranks)) * 8 * ranks, k)
        for m, n, k in sizes
        for dtype in _DTYPES
    ]


def run(folder: Path, target: str, ranks_per_node: int | None, seed: int) -> int:
    """Run all cases; the process that calls this is one rank. What goes wrong with the world itself is raised."""
    import mkernel as mk

    with mk.init(target=target, ranks_per_node=ranks_per_node) as world, _report(folder, world.rank).open("w") as report:
        todo = cases(world.target, world.size)
        for index, case in enumerate(todo):
            picture = folder / PICTURE if index == 0 else None
            outcome = _RUN[case.op](world, case, seed + index, picture)
            report.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            report.flush()
            if world.rank == 0:
                print(f"  {index + 1}/{len(todo)} {case}: checked", flush=True)
    return 0


def read_report(folder: Path, rank: int) -> list[Outcome]:
    """What a rank has reported so far."""
    path = _report(folder, rank)
    entries = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [Outcome(Case(**entry["case"]), entry["worst"], entry["milliseconds"]) for entry in entries]


def _report(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _allgather_gemm(world: World, case: Case, seed: int, picture: Path | None) -> Outcome:
    import numpy as np

    import mkernel as mk

    rows, columns = case.m // world.size, case.n // world.size
    a_parts = [_random(seed, "a", rank, (rows, case.k), case.dtype) for rank in range(world.size)]
    b_host = _random(seed, "b", world.rank, (case.k, columns), case.dtype)
    poison = np.full((case.m, columns), np.nan, b_host.dtype)  # what the kernel misses stays NaN
    a, b, out = (world.xp.asarray(array) for array in (a_parts[world.rank], b_host, poison))

    def call() -> None:
        mk.allgather_gemm(a, b, world=world, out=out)

    call()  # compiles
    out[...] = world.xp.asarray(poison)
    milliseconds = _milliseconds(world, call)
    result = out if world.target == "cpu" else out.get()
    worst = worst_over_bound(result, np.concatenate(a_parts), b_host, case.dtype)
    if picture is not None:
        with mk.trace(world) as trace:
            call()
        if world.rank == 0:
            trace.plot(picture, title=f"{case}, rank 0 of {world.size}, target {world.target}")
    return Outcome(case, worst, milliseconds)


def _random(seed: int, name: str, rank: int, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """The same on every rank that asks: each forms everyone's part of the inputs for its own reference."""
    import ml_dtypes
    import numpy as np

    generator = np.random.default_rng([seed, rank, *name.encode()])
    return generator.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _milliseconds(world: World, call: Callable[[], None]) -> float:
    """Of one call, launch included: enough for a demo; ``mkernel bench`` measures."""
    calls = 1 if world.target == "cpu" else 20
    world.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if world.target == "cuda":
        world.xp.cuda.get_current_stream().synchronize()
    return (time.perf_counter() - begin) / calls * 1e3


_RUN: dict[str, Callable[[World, Case, int, Path | None], Outcome]] = {"allgather_gemm": _allgather_gemm}
