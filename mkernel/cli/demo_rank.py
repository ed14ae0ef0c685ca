"""One rank of ``mkernel demo``: runs the cases through the public API, checks its own results, and reports to a folder."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel.bench.check import node_sums, worst_sum
from mkernel.cli.check import worst_over_bound
from mkernel.plan.reduce import ALLREDUCE, REDUCE_SCATTER, ReduceProblem, choose_algorithm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mkernel.runtime.world import World

__all__ = ["PICTURE", "Case", "Outcome", "cases", "read_report", "run"]

PICTURE = "picture.svg"  # in the folder of the reports: the first case, on rank 0
_DTYPES = ("bfloat16", "float16")
_CPU_SIZES = {
    "allgather_gemm": [(512, 512, 512), (200, 288, 136)],
    REDUCE_SCATTER: [(512, 512, 512), (200, 288, 136)],
    ALLREDUCE: [(256, 1408, 512), (7, 288, 136)],
}
_GPU_SIZES = {
    "allgather_gemm": [(4096, 4096, 4096), (1000, 1048, 1032)],
    REDUCE_SCATTER: [(4096, 4096, 4096), (1000, 1048, 1032)],
    ALLREDUCE: [(4096, 4096, 4096), (7, 1048, 1032)],
}


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
    # The second of each is one that no tile divides; of the all-reduce it has few rows, which go in one step.
    sizes = _CPU_SIZES if target == "cpu" else _GPU_SIZES
    return [Case(op, dtype, *_divided(op, ranks, *size)) for op in sizes for size in sizes[op] for dtype in _DTYPES]


def _divided(op: str, ranks: int, m: int, n: int, k: int) -> tuple[int, int, int]:
    """What is split over the ranks, rounded up: M, and N or K in multiples of 8 per rank."""
    eights = 8 * ranks
    if op == "allgather_gemm":
        return math.ceil(m / ranks) * ranks, math.ceil(n / eights) * eights, k
    return math.ceil(m / ranks) * ranks if op == REDUCE_SCATTER else m, n, math.ceil(k / eights) * eights


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
    b = _random(seed, "b", world.rank, (case.k, columns), case.dtype)

    def worst(result: NDArray[Any]) -> float:
        return worst_over_bound(result, np.concatenate(a_parts), b, case.dtype)

    return _checked(world, case, mk.allgather_gemm, (a_parts[world.rank], b), (case.m, columns), worst, picture)


def _reduction(world: World, case: Case, seed: int, picture: Path | None) -> Outcome:
    import numpy as np

    import mkernel as mk

    k = case.k // world.size
    if case.op == REDUCE_SCATTER:
        problem = ReduceProblem(case.op, world.topology, case.m // world.size, case.n, k, case.dtype, True)
    else:
        algorithm = choose_algorithm(world.topology, case.m, case.n)
        problem = ReduceProblem(case.op, world.topology, case.m, case.n, k, case.dtype, True, algorithm=algorithm)

    def operands(rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return _random(seed, "a", rank, (case.m, k), case.dtype), _random(seed, "b", rank, (k, case.n), case.dtype)

    def worst(result: NDArray[Any]) -> float:
        return worst_sum(np, result, node_sums(problem, world.rank, operands))

    return _checked(world, case, getattr(mk, case.op), operands(world.rank), problem.result_shape, worst, picture)


def _checked(
    world: World,
    case: Case,
    op: Callable[..., Any],
    operands: tuple[NDArray[Any], NDArray[Any]],
    shape: tuple[int, int],
    worst: Callable[[NDArray[Any]], float],
    picture: Path | None,
) -> Outcome:
    """Call ``op`` on the operands of this rank; ``worst`` says how far its result is from right."""
    import numpy as np

    import mkernel as mk

    poison = np.full(shape, np.nan, operands[0].dtype)  # what the kernel misses stays NaN
    a, b, out = (world.xp.asarray(array) for array in (*operands, poison))

    def call() -> None:
        op(a, b, world=world, out=out)

    call()  # compiles
    out[...] = world.xp.asarray(poison)
    milliseconds = _milliseconds(world, call)
    result = out if world.target == "cpu" else out.get()
    error = worst(result)
    if picture is not None:
        with mk.trace(world) as trace:
            call()
        if world.rank == 0:
            trace.plot(picture, title=f"{case}, rank 0 of {world.size}, target {world.target}")
    return Outcome(case, error, milliseconds)


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


_RUN: dict[str, Callable[[World, Case, int, Path | None], Outcome]] = {
    "allgather_gemm": _allgather_gemm,
    REDUCE_SCATTER: _reduction,
    ALLREDUCE: _reduction,
}
