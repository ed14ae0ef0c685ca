"""One rank of ``mkernel demo``: it runs the cases through the public API, checks its results, and reports to a folder."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases import ops
from mkernel.bench.timing import CpuTiming

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["PICTURE", "Arrays", "Case", "Outcome", "cases", "read_report", "run", "show"]

PICTURE = "picture.svg"  # in the folder of the reports: the first case, on rank 0
_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call that is checked. ``size``: as the bench case of the op takes it."""

    op: str
    dtype: str
    size: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.size}"


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
    """Cases of all ops that the demo shows, in every dtype."""
    return [Case(op.name, dtype, size) for op in ops().values() for size in op.demo_sizes(target, ranks) for dtype in _DTYPES]


def run(folder: Path, target: str, ranks_per_node: int | None, seed: int) -> int:
    """Run all cases as one rank. Errors of the world are raised. Returns the exit status."""
    import mkernel as mk

    with mk.init(target=target, ranks_per_node=ranks_per_node) as world, _report(folder, world.rank).open("w") as report:
        todo = cases(world.target, world.size)
        for index, case in enumerate(todo):
            picture = folder / PICTURE if index == 0 else None
            outcome = show(world, case, seed + index, picture)
            report.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            report.flush()
            if world.rank == 0:
                print(f"  {index + 1}/{len(todo)} {case}: checked", flush=True)
    return 0


def read_report(folder: Path, rank: int) -> list[Outcome]:
    """Outcomes that a rank has reported so far."""
    path = _report(folder, rank)
    entries = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [Outcome(Case(**entry["case"]), entry["worst"], entry["milliseconds"]) for entry in entries]


def _report(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


class Arrays(CpuTiming):
    """Inputs and outputs of one call: the same numbers on target cpu and on GPUs, made on the host."""

    def random(self, shape: tuple[int, ...], seed: int) -> Any:
        import numpy as np

        return self.xp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(self.numpy_dtype))

    def sets(self, set_bytes: int) -> int:
        return 1

    def synchronize(self) -> None:
        if self.world.target == "cuda":
            self.xp.cuda.get_current_stream().synchronize()


def show(world: World, case: Case, seed: int, picture: Path | None = None) -> Outcome:
    """Call an op on random operands, twice, and check every element of the second result. Collective."""
    import mkernel as mk

    arrays = Arrays(world, case.dtype)
    shown = ops()[case.op].case(case.size, world.topology, case.dtype)
    shown.setup(arrays, seed)  # what the kernel misses stays NaN
    (call,) = shown.fused()
    call()  # compiles
    for output in shown.outputs():
        arrays.poison(output)
    milliseconds = _milliseconds(arrays, call)
    error = shown.worst(0)
    if picture is not None:
        with mk.trace(world) as trace:
            call()
        if world.rank == 0:
            trace.plot(picture, title=f"{case}, rank 0 of {world.size}, target {world.target}")
    return Outcome(case, error, milliseconds)


def _milliseconds(arrays: Arrays, call: Callable[[], object]) -> float:
    """Milliseconds of one call, launch included. This is enough for a demo; ``mkernel bench`` measures."""
    calls = 1 if arrays.world.target == "cpu" else 20
    arrays.world.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    arrays.synchronize()
    return (time.perf_counter() - begin) / calls * 1e3
