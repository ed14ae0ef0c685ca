"""The GPU machine's driver: ``python tests/gpu/run_gpu.py gemm world bench``. Every job under a deadline, a short table last.

gemm       one GPU: a world of one against float64 over many shapes, dtypes and layouts; then its speed beside cuBLAS
world      worlds 1x1 1x2 1x4 2x2: covering shapes, 200 calls back to back, 1000 graph replays, late ranks, host calls beside kernels
signals    world 2x2 again, with the flags in pinned host memory, raised by the engine: as over srd and rc (imm), without a network card
faults     1x4, 2x2 and under mpirun: ranks that disagree, stay away, raise or are killed (faults.py)
sanitizer  one rank, and two: small calls under compute-sanitizer (sanitize.py)
notebook   1x2 1x4 2x2: the cells of a notebook one after the other, in processes of mk.launch that stay (notebook.py)
host       one GPU: what a call of a cached plan costs the host, with CuPy's and torch's arrays; how long ``import mkernel`` takes
bench      ``python -m mkernel bench allgather_gemm`` (options after --)

Stages world, signals, faults and sanitizer go through all ops: allgather_gemm, gemm_reduce_scatter, gemm_allreduce as one_shot and
two_shot, the MoE ops and attention; world and signals also ``mixed``, calls of all ops in drawn order (``--ops`` chooses). ``--together``:
one start of the ranks for all ops of a world. ``--late``: kernels in which every CTA sleeps now and then (late.py); ``--plant``: that have
a bug, so that a job must fail.

On fewer GPUs than ranks, MKERNEL_SHARE_GPUS=1 lets the ranks of a world take turns (a put within one GPU waits for time slices). Right
results count there; times do not. ``--target cpu`` goes through the motions of stages world, faults and sanitizer.

Logs and JSON go to $OUT, else ./out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# The checkout is on the path only from here on.
from mkernel.planner.topology import Topology  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from mkernel.tools.table import format_table  # noqa: E402
from tests.gpu import checks, drawn, host_checks, late  # noqa: E402
from tests.gpu.exact import EVERY_OP  # noqa: E402
from tests.gpu.under_test import Bench  # noqa: E402
from tests.ops.planted_moe import MOE  # noqa: E402
from tests.ops.planted_ring import RING  # noqa: E402

STAGES = ("gemm", "world", "signals", "faults", "sanitizer", "notebook", "host", "bench")
FAULTS = ("1x4", "2x2", "mpirun")
SANITIZED = ("1x1", "1x2")
NOTEBOOKS = ("1x2", "1x4", "2x2")
WORLDS = ("1x1", "1x2", "1x4", "2x2")
SIGNALS = ("2x2",)
PLANTED = (*RING, *MOE)
CHECKS: dict[str, dict[str, Callable[[Bench], str]]] = {
    "gemm": {"shapes": checks.shapes},
    "world": {
        "covering": checks.covering,
        "back-to-back": checks.back_to_back,
        "graph": checks.graph,
        "late": checks.late,
        "reproducible": checks.reproducible,
        "refused": checks.refused,
        "tuned": checks.tuned,
        "beside": checks.beside,
    },
    "host": {"CuPy": host_checks.host_cupy, "torch": host_checks.host_torch, "import": host_checks.host_import},
}
Result = tuple[str, str, str]  # job, outcome, detail


# ---- the parent: one job after the other


def main() -> int:
    options, rest = _options()
    if options.rank:
        return _rank(options)
    out = Path(os.environ.get("OUT") or "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    folder = tempfile.TemporaryDirectory(prefix="late-kernels-")
    if options.late or options.plant:
        os.environ["MKERNEL_KERNELS_SRC"] = str(late.kernels(Path(folder.name), sleeps=options.late))
    for bug in (bug for bug in PLANTED if bug.name == options.plant):
        bug.plant(Path(folder.name))
    for name, ranks, arguments, limit in _jobs(options, rest, out):
        log = out / f"{name.replace(' ', '-')}.log"
        begin = time.monotonic()
        with log.open("wb") as output:
            try:
                status = launcher.run(ranks, arguments, timeout=limit, kind=options.launcher, output=output)
                outcome = "ok" if status == 0 else f"FAILED ({status})"
            except launcher.LauncherError as error:
                outcome = f"FAILED: {error}"
        text = log.read_text(errors="replace")
        found = [line.removeprefix("RESULT ").split("\t") for line in text.splitlines() if line.startswith("RESULT ")]
        results += [(f"{name}: {part[0]}", part[1], part[2]) for part in found if len(part) == 3]
        results.append((name, outcome, f"{time.monotonic() - begin:.0f} s"))
        if name.startswith("bench"):
            print(text, flush=True)
        elif outcome != "ok":
            print(f"--- end of {log.name}", *text.splitlines()[-options.tail :], sep="\n", flush=True)
    folder.cleanup()
    print(format_table(("job", "outcome", "detail"), results), flush=True)
    return 0 if all(outcome == "ok" for _, outcome, _ in results) else 1


def _options() -> tuple[argparse.Namespace, list[str]]:
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="some of " + ", ".join(STAGES) + " (default: all)")
    parser.add_argument(
        "--worlds",
        nargs="+",
        help=f"of stage world (default {' '.join(WORLDS)}), signals ({' '.join(SIGNALS)}), faults ({' '.join(FAULTS)}), "
        "sanitizer and notebook",
    )
    parser.add_argument("--only", nargs="+", default=[], help="checks of stages world and signals to run, e.g. covering graph")
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=(*EVERY_OP, "mixed"),
        default=[*EVERY_OP, "mixed"],
        help="of stages world, signals, faults and sanitizer",
    )
    parser.add_argument("--together", action="store_true", help="stages world and signals: one start of the ranks for all ops of a world")
    parser.add_argument("--late", action="store_true", help="kernels in which every CTA sleeps now and then")
    parser.add_argument("--plant", choices=[bug.name for bug in PLANTED], metavar="NAME", help="a bug of tests/ops/planted_*.py")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--partials", choices=("output", "float32"), default="output", help="of the reductions in stages world and signals")
    parser.add_argument("--cases", type=int, default=60, help="random shapes of stage gemm")
    parser.add_argument("--families", type=int, default=5, help="kernels of check covering")
    parser.add_argument("--calls", type=int, default=200, help="of check back-to-back")
    parser.add_argument("--runs", type=int, default=50, help="of checks late and reproducible")
    parser.add_argument("--replays", type=int, default=1000, help="of check graph")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds per job")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--tail", type=int, default=40, help="lines shown of the log of a job that failed")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    parser.add_argument("--rank", choices=("gemm", "world", "host"), help=argparse.SUPPRESS)
    parser.add_argument("--world", default="1x1", help=argparse.SUPPRESS)
    parser.add_argument("--host-signals", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(own)
    options.stages = options.stages or list(STAGES)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}: choose from {', '.join(STAGES)}")
    return options, rest


def _jobs(options: argparse.Namespace, rest: list[str], out: Path) -> list[tuple[str, int, list[str], float]]:
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    common = ["--seed", str(seed), "--target", options.target]
    for name in ("cases", "families", "calls", "runs", "replays"):
        common += [f"--{name}", str(getattr(options, name))]
    jobs: list[tuple[str, int, list[str], float]] = []
    if "gemm" in options.stages:
        jobs.append(("gemm", 1, [__file__, "--rank", "gemm", *common], options.limit))
        speed = ["-m", "mkernel", "bench", "gemm", "--worker", "--out", str(out / "gemm.json")]
        jobs.append(("bench gemm", 1, speed, options.limit))
    jobs += _jobs_of_worlds(options, common)
    # These start their own ranks: from here they are one plain process each.
    here = Path(__file__).parent
    for stage, script, worlds in (("faults", "faults.py", FAULTS), ("sanitizer", "sanitize.py", SANITIZED)):
        if stage in options.stages:
            for world, op in itertools.product(options.worlds or worlds, [op for op in options.ops if op != "mixed"]):
                arguments = [str(here / script), world, "--op", op, "--limit", str(options.limit - 10), "--target", options.target]
                jobs.append((f"{stage} {world} {op}", 1, arguments, options.limit))
    if "notebook" in options.stages:
        for world in options.worlds or NOTEBOOKS:
            shape = _topology(world)
            arguments = [str(here / "notebook.py"), "--ranks", str(shape.size), "--ranks-per-node", str(shape.ranks_per_node)]
            jobs.append((f"notebook {world}", 1, arguments, options.limit))
    if "host" in options.stages:
        jobs.append(("host", 1, [__file__, "--rank", "host", *common], options.limit))
    if "bench" in options.stages:
        arguments = ["-m", "mkernel", "bench", *(rest or ["allgather_gemm"]), "--out", str(out / "bench.json")]
        arguments += ["--timeout", str(options.limit - 10), "--launcher", options.launcher]
        jobs.append(("bench", 1, arguments, options.limit))
    return jobs


def _jobs_of_worlds(options: argparse.Namespace, common: list[str]) -> list[tuple[str, int, list[str], float]]:
    jobs: list[tuple[str, int, list[str], float]] = []
    only = ["--only", *options.only] if options.only else []
    for stage, worlds, more in (("world", WORLDS, []), ("signals", SIGNALS, ["--host-signals"])):
        if stage in options.stages:
            jobs_of_ops = [options.ops] if options.together else [[op] for op in options.ops]
            for world, ops in itertools.product(options.worlds or worlds, jobs_of_ops):
                what = ["--world", world, "--ops", *ops, "--partials", options.partials, *more]
                arguments = [__file__, "--rank", "world", *what, *common, *only]
                jobs.append((f"{stage} {world}" + (f" {ops[0]}" if len(ops) == 1 else ""), _topology(world).size, arguments, options.limit))
    return jobs


def _topology(text: str) -> Topology:
    nodes, ranks = (int(part) for part in text.split("x"))
    return Topology(nodes * ranks, ranks)


# ---- one rank


def _rank(options: argparse.Namespace) -> int:
    import mkernel as mk

    topology = _topology(options.world)
    os.environ["MKERNEL_EMULATED_HOST_SIGNALS"] = str(int(options.host_signals))
    heap = 512 << 20 if options.target == "cuda" else 64 << 20
    with (
        mk.init(target=options.target, ranks_per_node=topology.ranks_per_node, heap_bytes=heap) as world,
        drawn.in_pieces(options.target),
    ):
        if (world.size, world.target) != (topology.size, options.target):
            raise SystemExit(f"expected {topology.size} ranks on {options.target}, got {world.size} on {world.target}")
        if options.target == "cuda" and world._signals.mappable != options.host_signals:
            raise SystemExit(f"flags lie in {'host' if world._signals.mappable else 'GPU'} memory")
        bench = Bench(world, options)
        for bench.op in options.ops if options.rank == "world" else EVERY_OP[:1]:
            for name, check in CHECKS[options.rank].items():
                if options.only and name not in options.only:
                    continue
                begin = time.monotonic()
                detail = check(bench)
                world.barrier()
                if world.rank == 0:
                    of = f"{bench.op} " if len(options.ops) > 1 and options.rank == "world" else ""
                    print(f"RESULT {of}{name}\tok\t{detail}, {time.monotonic() - begin:.1f} s", flush=True)
        bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
