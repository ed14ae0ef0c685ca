"""``mkernel demo``: the fused kernels on this machine, every element checked, one table, one picture.

Without GPUs: target cpu, 4 ranks as 2 nodes x 2. With four GPUs: the same on them, and one node over all GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mkernel.cli import demo_rank
from mkernel.cli.demo_rank import Outcome
from mkernel.errors import Error
from mkernel.runtime import progress
from mkernel.tools import launcher
from mkernel.tools.output import require_writable
from mkernel.tools.table import format_table

__all__ = ["main"]

RANKS, RANKS_PER_NODE = 4, 2


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
class Result:
    """Reports of the ranks of one group."""

    outcomes: list[list[Outcome]]  # by case, then rank
    picture: str  # SVG, empty if there is none
    problem: str  # what went wrong, apart from wrong results
    is_late: bool = False  # the problem: the ranks did not end within --timeout


def main(argv: Sequence[str]) -> int:
    """Exit status 0 only if every element of every result on every rank is right."""
    options = _parser().parse_args(argv)
    if options.worker is not None:
        return demo_rank.run(Path(options.worker), options.target, options.ranks_per_node, options.seed)
    require_writable("--picture", options.picture)
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(
        f"mkernel demo: {RANKS} ranks as {RANKS // RANKS_PER_NODE} nodes x {RANKS_PER_NODE}; inputs from --seed {options.seed}", flush=True
    )
    began = time.monotonic()
    rows: list[list[str]] = []
    picture, wrong, late = "", False, False
    groups = _groups(options.target)
    for group in groups:
        print(f"world {group.name}, target {group.target}: starting", flush=True)
        result = _run(group, options)
        if result.problem:
            print(f"mkernel demo: world {group.name}, target {group.target}: {result.problem}", file=sys.stderr)
        late = late or result.is_late
        wrong = wrong or bool(result.problem and not result.is_late) or not all(one.right for by_rank in result.outcomes for one in by_rank)
        rows += [_row(group, by_rank) for by_rank in result.outcomes]
        picture = picture or result.picture
    print("\n" + format_table(["op", "dtype", "size", "world", "target", "error/bound", "ms", "result"], rows))
    if any(group.target == "cpu" for group in groups):
        print("\nTarget cpu emulates the GPU thread by thread: it shows that results are right, not how fast a GPU is.")
    if picture:
        _save(picture, options.picture)
    print(f"{time.monotonic() - began:.0f} s; {_verdict(wrong, options.timeout if late else None)}")
    return 1 if wrong or late else 0


def _verdict(wrong: bool, limit: float | None) -> str:
    """The last line; ``limit``: the seconds that a world reached, if any did."""
    found = ["WRONG: see above"] if wrong else []
    if limit is not None:
        found.append(f"NOT FINISHED within the time limit of {limit:g} s: --timeout SECONDS raises it")
    return "; ".join(found) or "all results are right"


def _save(picture: str, path: str) -> None:
    """Write the picture, or say why that failed. The results stay what they are."""
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        print(f"mkernel demo: the picture is lost: {error}", file=sys.stderr)
    else:
        print(f"What each CTA of rank 0 did over time: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mkernel demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument("--picture", default="mkernel-demo.svg", help="SVG to write (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: fresh, printed)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a world is ended, finished or not (%(default)s)")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto", help="how ranks are started (%(default)s)")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)  # this process is a rank
    parser.add_argument("--ranks-per-node", type=int, help=argparse.SUPPRESS)
    return parser


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
    from mkernel.runtime.opening.target import gpus_here

    gpus, problem, _ = gpus_here()
    if problem:
        print(f"GPUs are left out: {problem}", flush=True)
    return 0 if problem else sum(gpu.capability == (9, 0) for gpu in gpus)


def _run(group: Group, options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(prefix="mkernel-demo-") as name:
        folder = Path(name)
        arguments = ["-m", "mkernel", "demo", "--worker", name, "--target", group.target]
        arguments += ["--ranks-per-node", str(group.ranks_per_node), "--seed", str(options.seed)]
        threads = str(max(1, (os.cpu_count() or 1) // group.ranks))
        environment = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)  # for the reference
        problem, is_late = "", False
        try:
            with progress.relayed(f"world {group.name}, target {group.target}") as output:
                status = launcher.run(
                    group.ranks, arguments, timeout=options.timeout, kind=options.launcher, environment=environment, output=output
                )
            problem = f"a rank ended with status {status}" if status else ""
        except launcher.LauncherError as error:
            problem, is_late = str(error), isinstance(error, launcher.TimeLimitError)
        reports = [demo_rank.read_report(folder, rank) for rank in range(group.ranks)]
        picture = folder / demo_rank.PICTURE
        drawn = picture.read_text(encoding="utf-8") if picture.exists() else ""
    reported, expected = min(map(len, reports)), len(demo_rank.cases(group.target, group.ranks))
    if not problem and reported != expected:
        problem = f"{reported} of {expected} cases reported"
    return Result([[report[i] for report in reports] for i in range(reported)], drawn, problem, is_late)


def _row(group: Group, outcomes: Sequence[Outcome]) -> list[str]:
    """One line of the table: the error of a wrong or the worst rank, and the time of the slowest."""
    case = outcomes[0].case
    worst = max(outcomes, key=lambda outcome: (not outcome.right, outcome.worst))
    slowest = max(outcome.milliseconds for outcome in outcomes)
    where = [case.op, case.dtype, case.size.replace("x", " x "), group.name, group.target]
    return [*where, f"{worst.worst:.3f}", f"{slowest:.3f}", "right" if worst.right else "WRONG"]
