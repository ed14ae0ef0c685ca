"""The command line of ``python -m mkernel bench``: the parent starts ranks, the ranks measure."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel import env
from mkernel.bench.baselines import ASYNC_TP, NCCL, ONE_SHOT, TWO_SHOT
from mkernel.bench.cases import Case, Op, ops
from mkernel.bench.cases.base import LAYOUTS
from mkernel.bench.peers import gather
from mkernel.bench.report import ALONE, ENGINE, FUSED, SOLO, TUNED, Report, render
from mkernel.bench.routings import KINDS
from mkernel.bench.routings import MODELS as MOE_MODELS
from mkernel.bench.shapes import MODELS
from mkernel.bench.stats import NETWORK_GB_PER_S
from mkernel.bench.summary import plot, summarize
from mkernel.bench.timing import COOLDOWN_MS, LONGEST_COOLDOWN_MS
from mkernel.errors import ArgumentError
from mkernel.planner.machine import Machine, machine_named
from mkernel.planner.reduce import ALGORITHMS, PARTIALS
from mkernel.planner.split import COMMUNICATION_ROLES
from mkernel.planner.topology import Topology
from mkernel.runtime import progress
from mkernel.tools import launcher
from mkernel.tools.output import require_writable

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = [
    "WORLD",
    "Asked",
    "gpus",
    "machine_option",
    "main",
    "open_world",
    "parse_split",
    "parse_world",
    "problem_arguments",
    "rank_arguments",
    "require_gpus",
]

WORLD = "NODESxRANKS, or a number: one node of so many ranks"

_ROLES = ("compute", *COMMUNICATION_ROLES)
_RESULTS = Path("docs") / "benchmarks"
_DTYPES = ("bfloat16", "float16")
_OP_OPTIONS = ("partials", "algorithm", "b")
_OPTIONAL = (TUNED, NCCL, ASYNC_TP, ONE_SHOT, TWO_SHOT, ALONE, SOLO, ENGINE)  # columns
_SAMPLES, _DRAWN_SAMPLES, _AGAIN_SAMPLES = 20, 7, 30  # of each contestant and mode; of drawn shapes, and of rows that are measured again
_DRAWN_COOLDOWN_MS, _DRAWN_SECONDS, _DRAWN_AGAIN = 3.0, 0.8, 0.95


def parse_split(text: str) -> dict[str, int]:
    """``compute=120,intra_comm=12`` -> SMs by role."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        split = {role.strip(): int(sms) for role, sms in pairs}
    except ValueError:
        split = {}
    if not split or not set(split) <= set(_ROLES) or any(sms < 0 for sms in split.values()):
        raise ArgumentError(
            "split", repr(text), "must be ROLE=SMS,... with roles " + ", ".join(_ROLES), "for example compute=120,intra_comm=12"
        )
    return split


def parse_world(text: str) -> Topology:
    """``2x2``: 2 nodes of 2 ranks; ``4``: one node of 4."""
    try:
        numbers = [int(part) for part in text.lower().split("x")]
        nodes, ranks = numbers if len(numbers) == 2 else (1, *numbers)
        return Topology(nodes * ranks, ranks)
    except ValueError:
        raise ArgumentError("--world", repr(text), f"must be {WORLD}", "for example 1x4, 2x2 or 4") from None


def machine_option(text: str | None, sms: int | None = None) -> Machine:
    """The description that ``--machine`` names, else ``MKERNEL_MACHINE``. Raises ArgumentError, which names whichever was wrong."""
    try:
        return machine_named(text or env.MACHINE.get(), sms)
    except ArgumentError as error:
        name = "--machine" if text else error.argument
        raise ArgumentError(name, error.value, error.rule, "`mkernel calibrate` writes such a file") from None


def problem_arguments(parser: argparse.ArgumentParser, ops: Collection[str]) -> None:
    """Add the options that say what runs on which world; ``Asked`` reads them."""
    parser.add_argument("op", nargs="?", choices=ops, metavar="OP", default="allgather_gemm", help="one of " + ", ".join(ops))
    shapes = "comma-separated: S, MxNxK (allgather_gemm: N of one rank; the reductions: K of all ranks), random:N:SEED, MODEL:tpR with "
    shapes += f"MODEL {_one_of(MODELS)} and R ranks, for gemm_allreduce also large, small; "
    shapes += f"of MoE T, T:MODEL:ROUTING with MODEL {_one_of(MOE_MODELS)} and ROUTING {_one_of(KINDS)}, "
    shapes += "TxHxFxExK:ROUTING, random:N:SEED, decode, models, routings; "
    shapes += "of ring_attention BxHqxHkvxSxD (c after it: causal), causal, gqa, long, random:N:SEED "
    shapes += "(default: all of the op's)"
    parser.add_argument("--shapes", help=shapes)
    parser.add_argument("--world", help=f"{WORLD} (default: one node with all GPUs; 2x2: emulated network)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--partials", choices=PARTIALS, help="what partial tiles travel as (default: the output's dtype)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="of gemm_allreduce (default: by world and size)")
    layouts = "of the GEMM ops: row-major (K, N), or the transpose view of an (N, K) array, as weights of torch's linear layers are passed"
    parser.add_argument("--b", choices=LAYOUTS, help=f"{layouts} (default: {LAYOUTS[0]})")


def _one_of(names: Collection[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how ranks are started, and for how long."""
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds until the ranks are killed (default 1200)")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto", help="how ranks are started")
    parser.add_argument("--allow-cpu", action="store_true", help=argparse.SUPPRESS)  # tests of the bench; the times mean nothing
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkernel bench",
        description="Measure an op beside its baselines, in one run on the same inputs (docs/benchmarks.md says how). One rank per GPU.",
    )
    problem_arguments(parser, ops())
    rank_arguments(parser)
    parser.add_argument("--world-of-one", action="store_true", help="the GEMM inner loop against cuBLAS: the same as op `gemm`")
    parser.add_argument("--split", help="SMs per role, e.g. compute=120,intra_comm=12 (default: mkernel's choice)")
    parser.add_argument("--sweep", nargs="+", default=[], metavar="SPLIT", help="further splits, one column each")
    parser.add_argument("--samples", type=int, help=f"per contestant and mode (default {_SAMPLES}; of random shapes {_DRAWN_SAMPLES})")
    cooldown = (
        f"idle milliseconds before every sample (default {COOLDOWN_MS:g}, more after long samples); 0: as in a loop that never pauses"
    )
    parser.add_argument("--cooldown", type=float, metavar="MS", help=f"{cooldown}; default of random shapes {_DRAWN_COOLDOWN_MS:g}")
    parser.add_argument(
        "--seconds", type=float, help=f"that samples of a shape take, about (default: no limit; random: {_DRAWN_SECONDS:g})"
    )
    again = f"measure rows again, with {_AGAIN_SAMPLES} samples, that take more than so much of NCCL+cuBLAS (default of random shapes "
    parser.add_argument("--again", type=float, metavar="RATIO", help=f"{again}{_DRAWN_AGAIN:g})")
    parser.add_argument("--graph", action="store_true", help="also 20 calls replayed from a CUDA graph")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratio to NCCL+cuBLAS against M (SVG)")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="columns to leave out: " + ", ".join(_OPTIONAL))
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has, and measure the others")
    parser.add_argument("--save", action="store_true", help=f"write the JSON to {_RESULTS}/OP-DATE.json")
    parser.add_argument("--solo", type=Path, help=argparse.SUPPRESS)  # report of the world of one
    parser.add_argument("--command", help=argparse.SUPPRESS)  # what the user typed
    return parser


@dataclasses.dataclass(frozen=True)
class Asked:
    """The parsed command line, checked."""

    options: argparse.Namespace
    op: Op
    topology: Topology
    sizes: tuple[str, ...]
    cases: tuple[Case, ...]
    op_options: dict[str, str]  # keyword arguments of the op

    @classmethod
    def of(cls, options: argparse.Namespace) -> Asked:
        op = ops()["gemm" if getattr(options, "world_of_one", False) else options.op]
        samples, cooldown = getattr(options, "samples", None), getattr(options, "cooldown", None)
        if samples is not None and samples < 1:
            raise ArgumentError("--samples", samples, "must be at least 1")
        for name in getattr(options, "without", ()):
            if name not in _OPTIONAL:
                raise ArgumentError("--without", name, "must be one of " + ", ".join(_OPTIONAL))
        for name in ("seconds", "again"):
            value = getattr(options, name, None)
            if value is not None and not 0 < value < float("inf"):
                raise ArgumentError(f"--{name}", value, "must be a number above 0")
        if getattr(options, "resume", False) and not options.out:
            raise ArgumentError("--resume", "", "needs the file of the run that was cut short", "--out FILE")
        if cooldown is not None and not 0 <= cooldown <= LONGEST_COOLDOWN_MS:
            raise ArgumentError("--cooldown", cooldown, f"must be from 0 to {LONGEST_COOLDOWN_MS:g} milliseconds")
        if op.name == "gemm":
            topology = parse_world(options.world or "1x1")
        elif options.world:
            topology = parse_world(options.world)
        else:
            ranks = launcher.launched_size() or gpus() or 4
            per_node = env.RANKS_PER_NODE.get() or ranks
            topology = Topology(ranks, per_node)
        asked = options.shapes.split(",") if options.shapes else op.sizes
        sizes = tuple(size for name in asked for size in op.expand(name, topology))
        given = {name: getattr(options, name) for name in _OP_OPTIONS if getattr(options, name)}
        for name in given:
            if name not in op.options:
                raise ArgumentError(f"--{name}", given[name], f"{op.name} has no such option")
        return cls(options, op, topology, sizes, tuple(op.case(size, topology, options.dtype, **given) for size in sizes), given)


def gpus() -> int:
    """How many GPUs this machine has."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 only if every result was right."""
    words = list(argv) if argv is not None else []
    options = _parser().parse_args(words)
    options.split = parse_split(options.split) if options.split else None
    options.sweep = [parse_split(text) for text in options.sweep]
    _complete(options)
    options.command = options.command or shlex.join(["python", "-m", "mkernel", "bench", *_without_paths(words)])
    plan = Asked.of(options)
    if options.worker or launcher.is_rank():
        return _worker(plan)
    require_gpus(options)
    _require_writable(options)
    return _parent(plan)


def _complete(options: argparse.Namespace) -> None:
    """Fill in what the command line leaves open: of drawn shapes there are many, so that each gets less time."""
    drawn = any(word.strip().lower().startswith("random:") for word in (options.shapes or "").split(","))
    if options.samples is None:
        options.samples = _DRAWN_SAMPLES if drawn else _SAMPLES
    if options.cooldown is None:
        options.cooldown = _DRAWN_COOLDOWN_MS if drawn else COOLDOWN_MS
    if drawn:
        options.seconds = _DRAWN_SECONDS if options.seconds is None else options.seconds
        options.again = _DRAWN_AGAIN if options.again is None else options.again
        options.without = options.without or [TUNED, SOLO]


def require_gpus(options: argparse.Namespace) -> None:
    if not options.allow_cpu and not gpus():
        raise ArgumentError("target", "cpu", "no GPU found: speeds of target cpu mean nothing", "run on sm_90 GPUs, one per rank")


def _without_paths(words: list[str]) -> list[str]:
    """The words that are recorded: those without the path of the result."""
    kept = [word for i, word in enumerate(words) if word != "--out" and (i == 0 or words[i - 1] != "--out")]
    return [word for word in kept if not word.startswith("--out=")]


def _parent(plan: Asked) -> int:
    """Run the local compute in a world of one, then the op. Returns the exit status."""
    options = plan.options
    deadline = time.monotonic() + options.timeout
    local = [case.solo for case in plan.cases if case.solo is not None and SOLO not in options.without]
    with tempfile.TemporaryDirectory(prefix="mkernel-bench-") as folder:
        solo = Path(folder) / "solo.json"
        if plan.op.name != "gemm" and local:
            shapes = ",".join(dict.fromkeys(f"{gemm.m}x{gemm.n}x{gemm.k}" for gemm in local))
            layout = ["--b", plan.op_options["b"]] if "b" in plan.op_options else []
            status = _ranks(options, deadline, 1, ["gemm", "--shapes", shapes, "--out", str(solo), "--world", "1x1", *layout])
            if status:
                return status
        world = f"{plan.topology.num_nodes}x{plan.topology.ranks_per_node}"
        arguments = [plan.op.name, "--shapes", ",".join(plan.sizes), "--world", world]
        if solo.exists():
            arguments += ["--solo", str(solo)]
        arguments += [word for name, value in plan.op_options.items() for word in (f"--{name}", value)]
        arguments += ["--split", _split_text(options.split)] if options.split else []
        arguments += ["--sweep", *map(_split_text, options.sweep)] if options.sweep else []
        if options.out:
            arguments += ["--out", str(options.out)]
        arguments += ["--resume"] if options.resume else []
        if options.save:
            arguments += ["--save"]
        arguments += ["--plot", str(options.plot)] if options.plot else []
        arguments += ["--again", str(options.again)] if options.again is not None else []
        return _ranks(options, deadline, plan.topology.size, arguments)


def _split_text(split: dict[str, int]) -> str:
    return ",".join(f"{role}={sms}" for role, sms in split.items())


def _ranks(options: argparse.Namespace, deadline: float, ranks: int, arguments: list[str]) -> int:
    command = ["-m", "mkernel", "bench", *arguments, "--worker", "--dtype", options.dtype, "--samples", str(options.samples)]
    command += ["--command", options.command, "--cooldown", str(options.cooldown)]
    command += ["--allow-cpu"] if options.allow_cpu else []
    command += ["--seconds", str(options.seconds)] if options.seconds is not None else []
    command += ["--graph"] if options.graph else []
    command += ["--without", *options.without] if options.without else []
    with progress.relayed(f"bench {arguments[0]}") as output:
        return launcher.run(ranks, command, timeout=deadline - time.monotonic(), kind=options.launcher, output=output)


@contextlib.contextmanager
def open_world(asked: Asked, heap_bytes: int) -> Iterator[World]:
    """The world that was asked for; the caller is a rank of it."""
    import mkernel as mk

    with mk.init(ranks_per_node=asked.topology.ranks_per_node, heap_bytes=heap_bytes) as world:
        if world.size != asked.topology.size:
            raise ArgumentError("--world", f"{asked.topology.size} ranks", f"must be the {world.size} that were started")
        yield world


def _worker(plan: Asked) -> int:
    from mkernel.bench.worker import Settings, measure

    options = plan.options
    settings = Settings(
        op=plan.op.name,
        sizes=plan.sizes,
        dtype=options.dtype,
        samples=options.samples,
        splits={FUSED: options.split, **{f"{FUSED} {_split_text(split)}": split for split in options.sweep}},
        without=tuple(options.without),
        allow_cpu=options.allow_cpu,
        network_gb_per_s=env.EMULATED_GBPS.get() or NETWORK_GB_PER_S,
        command=options.command,
        solo=_solo(options.solo),
        options=plan.op_options,
        cooldown_ms=options.cooldown,
        seconds=options.seconds,
        again=options.again,
        graph=options.graph,
        again_samples=_AGAIN_SAMPLES,
    )
    # Calls share one workspace. The staging area at least doubles where it grows, and old ones stay.
    heap = max(case.heap_bytes for case in plan.cases) + 4 * max(case.network_bytes for case in plan.cases)
    with open_world(plan, heap) as world:
        if world.rank == 0:
            _require_writable(options)
        report = measure(world, settings, lambda report: _write(report, options), _earlier(options) if world.rank == 0 else None)
        if world.rank == 0:
            _write(report, options)
            print(render(report), *summarize(report), sep="\n", flush=True)
            if options.plot:
                options.plot.write_text(plot(report), encoding="utf-8")
        correct = gather(world, report.correct)[0]
    return 0 if correct else 1


def _earlier(options: argparse.Namespace) -> Report | None:
    """The report of the run that is resumed, if it left one."""
    if not options.resume or not options.out.exists():
        return None
    try:
        return Report.from_json(options.out.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError("--resume", str(options.out), f"no report of this bench: {error}", "give another --out") from None


def _solo(path: Path | None) -> dict[str, dict[str, Any]]:
    """Fused times in the world of one, by local shape."""
    if path is None:
        return {}
    return {row["label"]: row["times"][FUSED] for row in json.loads(path.read_text())["rows"] if FUSED in row["times"]}


def _require_writable(options: argparse.Namespace) -> None:
    for option, path in (("--out", options.out), ("--plot", options.plot), ("--save", _RESULTS / "report.json" if options.save else None)):
        if path is not None:
            require_writable(option, path, parents=True)


def _write(report: Report, options: argparse.Namespace) -> None:
    paths = [options.out] if options.out else []
    if options.save:
        nodes = f"-{report.world['nodes']}x{report.world['ranks_per_node']}" if report.world["nodes"] > 1 else ""
        paths.append(_RESULTS / f"{report.op}{nodes}-{datetime.date.fromisoformat(report.date[:10]):%Y-%m-%d}.json")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(report.to_json(), encoding="utf-8")
        scratch.replace(path)
