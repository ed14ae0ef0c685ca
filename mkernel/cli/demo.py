"""``mkernel demo``: the fused kernels on this machine, every element checked, one table, one picture.

Without GPUs: target cpu, 4 ranks as 2 nodes x 2. With four GPUs: the same on them, and one node over all GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel.cli import launcher
from mkernel.cli.check import worst_over_bound
from mkernel.cli.table import format_table
from mkernel.errors import Error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["main"]

RANKS, RANKS_PER_NODE = 4, 2
_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Group:
    """One set of ranks, started together."""

    target: str
    ranks: int
    ranks_per_node: int

    @property
    def name(self) -> str:
        return f"{self.ranks // self.ranks_per_node}x{self.ranks_per_node}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call that is checked. Sizes are those of the whole problem, over all ranks."""

    op: str
    dtype: str
    m: int
    n: int
    k: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw of one case."""

    case: Case
    worst: float  # of |out - float64 reference| / bound
    milliseconds: float


def main(argv: Sequence[str]) -> int:
    """Exit status 0 only if every element of every result on every rank is right."""
    options = _parser().parse_args(argv)
    if options.worker is not None:
        return _worker(Path(options.worker), options)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"mkernel demo: {RANKS} ranks as {RANKS // RANKS_PER_NODE} nodes x {RANKS_PER_NODE}; inputs from --seed {seed}", flush=True)
    began = time.monotonic()
    rows: list[list[str]] = []
    wrong = 0
    groups = _groups(options.target)
    for group in groups:
        print(f"world {group.name}, target {group.target}: starting", flush=True)
        outcomes, problem = _run_group(group, seed, options)
        if problem:
            print(f"mkernel demo: world {group.name}, target {group.target}: {problem}", file=sys.stderr)
            wrong += 1
        for by_rank in outcomes:
            worst = max(outcome.worst for outcome in by_rank)
            wrong += not worst <= 1
            rows.append(_table_row(group, by_rank[0].case, worst, max(outcome.milliseconds for outcome in by_rank)))
    print()
    print(format_table(["op", "dtype", "M x N x K", "world", "target", "error/bound", "ms", "result"], rows))
    if any(group.target == "cpu" for group in groups):
        print("\nTarget cpu emulates the GPU thread by thread: it shows that results are right, not how fast a GPU is.")
    if Path(options.picture).exists():
        print(f"What each CTA of rank 0 did over time: {options.picture}")
    print(f"{time.monotonic() - began:.0f} s; " + ("WRONG: see above" if wrong else "all results are right"))
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mkernel demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument("--picture", default="mkernel-demo.svg", help="SVG to write (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: fresh, printed)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds before a world that hangs is ended (%(default)s)")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto", help="how ranks are started (%(default)s)")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--ranks-per-node", type=int, default=RANKS_PER_NODE, help=argparse.SUPPRESS)
    return parser


def _table_row(group: Group, case: Case, worst: float, milliseconds: float) -> list[str]:
    result = "right" if worst <= 1 else "WRONG"
    return [case.op, case.dtype, f"{case.m} x {case.n} x {case.k}", group.name, group.target, f"{worst:.3f}", f"{milliseconds:.3f}", result]


# ---- the parent: which worlds, and what their ranks reported
def _groups(target: str) -> list[Group]:
    gpus = 0 if target == "cpu" else _usable_gpus()
    if target == "cuda" and gpus == 0:
        raise Error("no usable GPU here: see `mkernel doctor`")
    groups = []
    if gpus >= RANKS:
        groups.append(Group("cuda", RANKS, RANKS_PER_NODE))
    elif target != "cuda":
        groups.append(Group("cpu", RANKS, RANKS_PER_NODE))
    if gpus:
        groups.append(Group("cuda", gpus, gpus))
    return groups


def _usable_gpus() -> int:
    from mkernel.runtime.assemble import gpus_here

    gpus, problem, _ = gpus_here()
    if problem:
        print(f"GPUs are left out: {problem}", flush=True)
    return 0 if problem else sum(gpu.capability == (9, 0) for gpu in gpus)


def _run_group(group: Group, seed: int, options: argparse.Namespace) -> tuple[list[list[Outcome]], str]:
    """Outcomes by case, then rank; and what went wrong, if anything."""
    with tempfile.TemporaryDirectory(prefix="mkernel-demo-") as folder:
        arguments = ["-m", "mkernel", "demo", "--worker", folder, "--target", group.target, "--ranks-per-node", str(group.ranks_per_node)]
        arguments += ["--seed", str(seed), "--picture", options.picture]
        threads = str(max(1, (os.cpu_count() or 1) // group.ranks))
        environment = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)  # for the reference
        problem = ""
        try:
            status = launcher.run(group.ranks, arguments, timeout=options.timeout, kind=options.launcher, environment=environment)
            problem = f"a rank ended with status {status}" if status else ""
        except launcher.LauncherError as error:
            problem = str(error)
        reports = [_read_report(Path(folder) / f"{rank}.json") for rank in range(group.ranks)]
    cases = min(map(len, reports))
    outcomes = [[report[i] for report in reports] for i in range(cases)]
    expected = len(_cases(group.target, group.ranks))
    if not problem and cases != expected:
        problem = f"{cases} of {expected} cases reported"
    return outcomes, problem


def _read_report(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    entries = map(json.loads, path.read_text().splitlines())
    return [Outcome(Case(**entry["case"]), entry["worst"], entry["milliseconds"]) for entry in entries]


# ---- the worker: one rank
def _cases(target: str, ranks: int) -> list[Case]:
    # The second of each is one that no tile divides.
    sizes = [(512, 512, 512), (200, 264, 136)] if target == "cpu" else [(4096, 4096, 4096), (1000, 1048, 1032)]
    # M and N are split over the ranks, N in multiples of 8.
    return [
        Case("allgather_gemm", dtype, math.ceil(m / ranks) * ranks, math.ceil(n / (8 * ranks)) * 8 * ranks, k)
        for m, n, k in sizes
        for dtype in _DTYPES
    ]


def _worker(folder: Path, options: argparse.Namespace) -> int:
    import mkernel as mk

    with mk.init(target=options.target, ranks_per_node=options.ranks_per_node) as world:
        cases = _cases(world.target, world.size)
        with (folder / f"{world.rank}.json").open("w") as report:
            for index, case in enumerate(cases):
                outcome = _RUN[case.op](world, case, options.seed + index, options.picture if index == 0 else None)
                report.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
                report.flush()
                if world.rank == 0:
                    print(f"  {index + 1}/{len(cases)} {case.op} {case.dtype} {case.m} x {case.n} x {case.k}: checked", flush=True)
    return 0


def _random(seed: int, name: str, rank: int, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """The same on every rank that asks: each can form everyone's part of the inputs for its own reference."""
    import ml_dtypes
    import numpy as np

    generator = np.random.default_rng([seed, rank, *name.encode()])
    return generator.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _to_device(world: Any, array: NDArray[Any]) -> Any:
    return world.xp.asarray(array)


def _to_host(world: Any, array: Any) -> NDArray[Any]:
    import numpy as np

    return np.asarray(array if world.target == "cpu" else array.get())


def _wait(world: Any) -> None:
    if world.target == "cuda":
        world.xp.cuda.get_current_stream().synchronize()


def _allgather_gemm(world: Any, case: Case, seed: int, picture: str | None) -> Outcome:
    import numpy as np

    import mkernel as mk

    rows, columns = case.m // world.size, case.n // world.size
    a_parts = [_random(seed, "a", rank, (rows, case.k), case.dtype) for rank in range(world.size)]
    b_host = _random(seed, "b", world.rank, (case.k, columns), case.dtype)
    a, b = _to_device(world, a_parts[world.rank]), _to_device(world, b_host)
    out = _to_device(world, np.full((case.m, columns), np.nan, b_host.dtype))  # whatever the kernel misses stays NaN
    mk.allgather_gemm(a, b, world=world, out=out)  # compiles
    out[...] = _to_device(world, np.full((case.m, columns), np.nan, b_host.dtype))
    _wait(world)
    milliseconds = _milliseconds(world, lambda: mk.allgather_gemm(a, b, world=world, out=out))
    worst = worst_over_bound(_to_host(world, out), np.concatenate(a_parts), b_host, case.dtype)
    if picture is not None:
        with mk.trace(world) as trace:
            mk.allgather_gemm(a, b, world=world, out=out)
        if world.rank == 0:
            problem = f"{case.op} {case.m} x {case.n} x {case.k} {case.dtype}"
            trace.plot(picture, title=f"{problem}, rank 0 of {world.size}, target {world.target}")
    return Outcome(case, worst, milliseconds)


def _milliseconds(world: Any, call: Callable[[], object]) -> float:
    """Of one call, launch included: enough for a demo; ``mkernel bench`` measures."""
    calls = 1 if world.target == "cpu" else 20
    world.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(world)
    return (time.perf_counter() - begin) / calls * 1e3


_RUN: dict[str, Callable[[Any, Case, int, str | None], Outcome]] = {"allgather_gemm": _allgather_gemm}
