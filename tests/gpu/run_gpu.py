"""The GPU machine's driver: ``python tests/gpu/run_gpu.py gemm world bench``. Every job under a deadline, a short table last.

gemm       one GPU: a world of one against float64 over many shapes, dtypes and layouts; then its speed beside cuBLAS
world      worlds 1x1 1x2 1x4 2x2: covering shapes, 200 calls back to back, 1000 graph replays, late ranks, host calls beside kernels
signals    world 2x2 again, with the flags in pinned host memory, raised by the engine: as over srd and rc (imm), without a network card
faults     1x4, 2x2 and under mpirun: ranks that disagree, stay away, raise or are killed (faults.py)
sanitizer  one rank, and two: small calls under compute-sanitizer (sanitize.py)
notebook   1x2 1x4 2x2: the cells of a notebook one after the other, in processes of mk.launch that stay (notebook.py)
host       one GPU: what a call of a cached plan costs the host, with CuPy's and torch's arrays; how long ``import mkernel`` takes
bench      ``python -m mkernel bench allgather_gemm`` (options after --)

Stages world, signals, faults and sanitizer go through all ops: allgather_gemm, gemm_reduce_scatter, and gemm_allreduce as one_shot and
two_shot (``--ops`` chooses among them).

On fewer GPUs than ranks, MKERNEL_SHARE_GPUS=1 lets the ranks of a world take turns (two GPUs at least for 2x2: a put within one GPU waits
for time slices). Right results count there; times do not.

Logs and JSON go to $OUT, else ./out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# The checkout is on the path only from here on.
from mkernel.bench.check import to_float64, worst_product  # noqa: E402
from mkernel.bench.lab import CudaLab  # noqa: E402
from mkernel.bench.peers import gather  # noqa: E402
from mkernel.cli import launcher  # noqa: E402
from mkernel.cli.table import format_table  # noqa: E402
from mkernel.plan.topology import Topology  # noqa: E402
from tests.reference import roundings, worst_sum_over_bound  # noqa: E402

OPS = ("allgather_gemm", "gemm_reduce_scatter", "one_shot", "two_shot")  # ops, and algorithms of gemm_allreduce
STAGES = ("gemm", "world", "signals", "faults", "sanitizer", "notebook", "host", "bench")
FAULTS = ("1x4", "2x2", "mpirun")
SANITIZED = ("1x1", "1x2")
NOTEBOOKS = ("1x2", "1x4", "2x2")
WORLDS = ("1x1", "1x2", "1x4", "2x2")
SIGNALS = ("2x2",)
FAMILIES = 5  # kernels of check covering
Result = tuple[str, str, str]  # job, outcome, detail


# ---- the parent: one job after the other


def main() -> int:
    options, rest = _options()
    if options.rank:
        return _rank(options)
    out = Path(os.environ.get("OUT") or "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
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
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="of stages world, signals, faults and sanitizer")
    parser.add_argument("--partials", choices=("output", "float32"), default="output", help="of the reductions in stages world and signals")
    parser.add_argument("--cases", type=int, default=60, help="random shapes of stage gemm")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds per job")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--tail", type=int, default=40, help="lines shown of the log of a job that failed")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    parser.add_argument("--rank", choices=("gemm", "world", "host"), help=argparse.SUPPRESS)
    parser.add_argument("--world", default="1x1", help=argparse.SUPPRESS)
    parser.add_argument("--host-signals", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--op", choices=OPS, default="allgather_gemm", help=argparse.SUPPRESS)
    options = parser.parse_args(own)
    options.stages = options.stages or list(STAGES)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}: choose from {', '.join(STAGES)}")
    return options, rest


def _jobs(options: argparse.Namespace, rest: list[str], out: Path) -> list[tuple[str, int, list[str], float]]:
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    common = ["--seed", str(seed), "--cases", str(options.cases)]
    jobs: list[tuple[str, int, list[str], float]] = []
    if "gemm" in options.stages:
        jobs.append(("gemm", 1, [__file__, "--rank", "gemm", *common], options.limit))
        speed = ["-m", "mkernel", "bench", "gemm", "--worker", "--out", str(out / "gemm.json")]
        jobs.append(("bench gemm", 1, speed, options.limit))
    only = ["--only", *options.only] if options.only else []
    for stage, worlds, more in (("world", WORLDS, []), ("signals", SIGNALS, ["--host-signals"])):
        if stage in options.stages:
            for world, op in itertools.product(options.worlds or worlds, options.ops):
                what = ["--world", world, "--op", op, "--partials", options.partials, *more]
                arguments = [__file__, "--rank", "world", *what, *common, *only]
                jobs.append((f"{stage} {world} {op}", _topology(world).size, arguments, options.limit))
    # These start their own ranks: from here they are one plain process each.
    here = Path(__file__).parent
    for stage, script, worlds in (("faults", "faults.py", FAULTS), ("sanitizer", "sanitize.py", SANITIZED)):
        if stage in options.stages:
            for world, op in itertools.product(options.worlds or worlds, options.ops):
                arguments = [str(here / script), world, "--op", op, "--limit", str(options.limit - 10)]
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


def _topology(text: str) -> Topology:
    nodes, ranks = (int(part) for part in text.split("x"))
    return Topology(nodes * ranks, ranks)


# ---- one rank


def _rank(options: argparse.Namespace) -> int:
    import mkernel as mk

    topology = _topology(options.world)
    checks = CHECKS[options.rank]
    os.environ["MKERNEL_EMULATED_HOST_SIGNALS"] = str(int(options.host_signals))
    with mk.init(ranks_per_node=topology.ranks_per_node, heap_bytes=512 << 20) as world:
        if (world.size, world.target) != (topology.size, "cuda"):
            raise SystemExit(f"expected {topology.size} ranks on cuda, got {world.size} on {world.target}")
        if world._signals.mappable != options.host_signals:
            raise SystemExit(f"flags lie in {'host' if world._signals.mappable else 'GPU'} memory")
        bench = Bench(world, options)
        for name, check in checks.items():
            if options.only and name not in options.only:
                continue
            begin = time.monotonic()
            detail = check(bench)
            world.barrier()
            if world.rank == 0:
                print(f"RESULT {name}\tok\t{detail}, {time.monotonic() - begin:.1f} s", flush=True)
        bench.close()
    return 0


class Problem:
    """One call's arrays: seeded, so that every rank can write every rank's inputs again. ``m``: of the whole problem, ``k``: of a rank."""

    def __init__(self, bench: Bench, m: int, n: int, k: int, dtype: str, transposed: bool, seed: int) -> None:
        self.bench, self.lab, self.m, self.n, self.k, self.seed, self.transposed = bench, bench.labs[dtype], m, n, k, seed, transposed
        self.op, world = bench.op, bench.world
        self.rows = m // world.size
        self.a = self._shard(world.rank)
        self.b = self._columns(world.rank)
        self.c = self.output()

    def _shard(self, rank: int) -> Any:
        return self.lab.random((self.rows if self.op == "allgather_gemm" else self.m, self.k), self.seed + rank)

    def _columns(self, rank: int) -> Any:
        seed = self.seed + 1000 + rank
        return self.lab.random((self.n, self.k), seed).T if self.transposed else self.lab.random((self.k, self.n), seed)

    def output(self) -> Any:
        c = self.lab.empty((self.rows if self.op == "gemm_reduce_scatter" else self.m, self.n))
        if c.size:
            self.lab.poison(c)
        return c

    def call(self, c: Any = None) -> Any:
        return self.bench.call(self.a, self.b, out=self.c if c is None else c)

    def check(self) -> float:
        """The worst error over its bound of the output on this rank; the stream is idle afterwards."""
        self.lab.synchronize()
        return self._product() if self.op == "allgather_gemm" else self._sum()

    def _product(self) -> float:
        xp = self.lab.xp
        bits = xp.concatenate([self._shard(rank).view(xp.uint16) for rank in range(self.bench.world.size)])
        return worst_product(xp, self.c, bits.view(self.c.dtype), self._contiguous(self.b))

    def _sum(self) -> float:
        xp, world = self.lab.xp, self.bench.world
        mine = slice(world.rank * self.rows, (world.rank + 1) * self.rows) if self.op == "gemm_reduce_scatter" else slice(None)
        products, magnitude = [], 0.0
        for rank in range(world.size):
            a, b = (to_float64(xp, array) for array in (self._shard(rank)[mine], self._contiguous(self._columns(rank))))
            products.append(a @ b)
            magnitude = magnitude + xp.abs(a) @ xp.abs(b)
        # The matrix unit adds 16 products at a time and may truncate; and each rank's product is added once more.
        accumulated = (world.size * (self.k / 8 + 32) + 2 * world.size) * 2.0**-23 * magnitude
        allowed = roundings(self.bench.name, world.topology, world.rank, self.bench.options.partials, self.bench.algorithm)
        return worst_sum_over_bound(xp, to_float64(xp, xp.ascontiguousarray(self.c)), products, accumulated, self.lab.dtype, **allowed)

    def _contiguous(self, b: Any) -> Any:
        xp = self.lab.xp
        return xp.ascontiguousarray(b.T.view(xp.uint16).T if self.transposed else b.view(xp.uint16)).view(self.c.dtype)

    def __str__(self) -> str:
        b = "(N, K).T" if self.transposed else "(K, N)"
        return f"{self.op} M={self.m} N={self.n} K={self.k} {self.lab.dtype} b {b} seed {self.seed}"


class Bench:
    """The world under test with the helpers of the benchmark."""

    def __init__(self, world: Any, options: argparse.Namespace) -> None:
        self.world, self.options, self.op = world, options, options.op
        self.algorithm = self.op if self.op in ("one_shot", "two_shot") else None
        self.name = "gemm_allreduce" if self.algorithm else self.op
        self.random = random.Random(options.seed)  # the same on all ranks: they must draw the same shapes
        self.own_random = random.Random(options.seed * 1000 + world.rank)
        self.labs = {dtype: CudaLab(world, dtype) for dtype in ("bfloat16", "float16")}
        self.lab = self.labs["float16"]  # made last: its stream is the current one
        self.labs["bfloat16"].stream = self.lab.stream

    def problem(self, m: int, n: int, k: int, dtype: str = "bfloat16", transposed: bool = False) -> Problem:
        return Problem(self, m, n, k, dtype, transposed, self.random.randrange(2**31))

    def call(self, a: Any, b: Any, **options: Any) -> Any:
        """The op under test."""
        import mkernel as mk

        return getattr(mk, self.name)(a, b, world=self.world, **self.op_options, **options)

    @property
    def op_options(self) -> dict[str, str]:
        partials = {"partials": self.options.partials} if self.op != "allgather_gemm" else {}
        return partials | ({"algorithm": self.algorithm} if self.algorithm else {})

    def everywhere(self, outputs: Sequence[Any], what: str) -> None:
        """An all-reduce gives all ranks the same bits, or raise on every rank."""
        if self.name == "gemm_allreduce":
            self.lab.synchronize()
            sums = [zlib.crc32(output.view(self.lab.xp.uint16).get().tobytes()) for output in outputs]
            by_rank = gather(self.world, sums)
            if any(other != by_rank[0] for other in by_rank):
                raise AssertionError(f"{what}: the ranks have different bits: {by_rank}")

    def right(self, worst: float, what: object) -> float:
        """Raise on every rank if any rank is wrong."""
        by_rank = [float(text) for text in gather(self.world, str(worst))]
        if not max(by_rank) <= 1.0:
            raise AssertionError(f"{what}: error over bound by rank {by_rank}")
        return max(by_rank)

    def same(self, outputs: Sequence[Any], expected: Sequence[Any], what: str) -> None:
        """Bit for bit equal, or raise on every rank."""
        xp = self.lab.xp
        self.lab.synchronize()
        wrong = [i for i, (o, e) in enumerate(zip(outputs, expected, strict=True)) if bool((o.view(xp.uint16) != e.view(xp.uint16)).any())]
        found = gather(self.world, wrong[:20])
        if any(found):
            raise AssertionError(f"{what}: outputs that differ, by rank: {found}")

    def close(self) -> None:
        for lab in self.labs.values():
            lab.close()


def shapes(bench: Bench) -> str:
    """Random and edge shapes in a world of one."""
    axes = ((0, 1, 17, 128, 129, 255, 256, 1000, 4096), (8, 64, 136, 256, 1032, 2048, 4096), (8, 64, 72, 520, 4096, 8192))
    worst = 0.0
    for i in range(bench.options.cases):
        m, n, k = (bench.random.choice(axis) for axis in axes)
        problem = bench.problem(m, n, k, ("bfloat16", "float16")[i % 2], bool(i // 2 % 2))
        problem.call()
        worst = max(worst, bench.right(problem.check(), problem))
    return f"{bench.options.cases} cases, worst error {worst:.2f} of its bound"


def covering(bench: Bench) -> str:
    """Rows per rank around the tile and chunk sizes, back to back in one stream and checked afterwards."""
    size = bench.world.size
    rows, columns, depth = (0, 1, 96, 128, 200, 513, 1024), (8, 136, 512, 1032), (8, 72, 512, 2048, 4104)
    problems = []
    for family in range(FAMILIES):  # one kernel takes any number of rows; compiling is what takes the time here
        n, k = bench.random.choice(columns), bench.random.choice(depth)
        problems += [bench.problem(row * size, n, k, ("bfloat16", "float16")[family % 2], bool(family // 2 % 2)) for row in rows]
    bench.random.shuffle(problems)
    for problem in problems:  # plans are made here: a collective, so not back to back
        problem.call()
    for problem in problems:
        if problem.c.size:
            problem.lab.poison(problem.c)
    bench.lab.synchronize()
    for problem in problems:
        problem.call()
    worst = max(bench.right(problem.check(), problem) for problem in problems)
    bench.everywhere([problem.c for problem in problems], "covering")
    return f"{len(problems)} shapes, worst error {worst:.2f} of its bound"


def _family(bench: Bench, count: int = 4) -> tuple[list[Problem], list[Any]]:
    """Input sets of one shape with results that were checked against float64."""
    problems = [bench.problem(256 * bench.world.size, 512, 1024) for _ in range(count)]
    for problem in problems:
        problem.call()
    for problem in problems:
        bench.right(problem.check(), problem)
    bench.everywhere([problem.c for problem in problems], "a family of inputs")
    return problems, [problem.c.copy() for problem in problems]


def back_to_back(bench: Bench, calls: int = 200) -> str:
    """Alternating inputs without a barrier, every output kept and compared."""
    problems, expected = _family(bench)
    outputs = [problems[i % len(problems)].output() for i in range(calls)]
    bench.lab.synchronize()
    for i, output in enumerate(outputs):
        problems[i % len(problems)].call(output)
    bench.same(outputs, [expected[i % len(problems)] for i in range(calls)], "back to back")
    return f"{calls} calls"


def graph(bench: Bench, replays: int = 1000) -> str:
    """Three captured calls, replayed with inputs that change under them."""
    problems, expected = _family(bench)
    captured_calls = problems[:3]
    stream = bench.lab.stream
    stream.begin_capture()
    for problem in captured_calls:
        problem.call()
    captured = stream.end_capture()
    saved = [(problem.a.copy(), problem.b.copy()) for problem in problems]
    bits = bench.lab.xp.uint16

    def now(i: int) -> list[Any]:  # what the captured calls give while inputs are shifted by i
        return [expected[(i + n) % len(saved)] for n in range(len(captured_calls))]

    for i in range(replays):
        if i % 100 == 0:
            for n, problem in enumerate(captured_calls):
                a, b = saved[(i // 100 + n) % len(saved)]
                problem.a.view(bits)[...] = a.view(bits)
                problem.b.view(bits)[...] = b.view(bits)
                problem.lab.poison(problem.c)
        captured.launch(stream)
        if i % 100 == 99:
            bench.same([problem.c for problem in captured_calls], now(i // 100), f"replay {i}")
    captured_calls[0].call()  # a plain call after replays goes on from their epoch
    bench.same([captured_calls[0].c], now((replays - 1) // 100)[:1], "call after replays")
    return f"{replays} replays of {len(captured_calls)} calls"


def late(bench: Bench, calls: int = 50) -> str:
    """Ranks that come up to 2 ms late, on the device and on the host."""
    problems, expected = _family(bench)
    outputs = [problems[i % len(problems)].output() for i in range(calls)]
    bench.lab.synchronize()
    for i, output in enumerate(outputs):
        if bench.own_random.random() < 0.5:
            bench.lab.delay(bench.own_random.randrange(2_000_000))
        if bench.own_random.random() < 0.2:
            time.sleep(bench.own_random.random() * 0.002)
        problems[i % len(problems)].call(output)
    bench.same(outputs, [expected[i % len(problems)] for i in range(calls)], "late ranks")
    return f"{calls} calls"


def reproducible(bench: Bench, runs: int = 50) -> str:
    """The same inputs again and again, every rank delayed at random on the host and on the device: the same bits."""
    problems, expected = _family(bench, 2)
    outputs = [problems[i % 2].output() for i in range(2 * runs)]
    bench.lab.synchronize()
    for i, output in enumerate(outputs):
        if bench.own_random.random() < 0.5:
            time.sleep(bench.own_random.random() * 0.003)
        if bench.own_random.random() < 0.3:
            bench.lab.delay(bench.own_random.randrange(1_000_000))
        problems[i % 2].call(output)
    bench.same(outputs, [expected[i % 2] for i in range(2 * runs)], "reproducible")
    return f"{runs} runs of 2 inputs"


def tuned(bench: Bench) -> str:
    """Tuning finds a split that all ranks use, and changes no bit."""
    import mkernel as mk

    problems, expected = _family(bench, 2)
    first = problems[0]
    result = mk.tune(bench.name, first.a, first.b, world=bench.world, out=first.c, samples=3, save=False, **bench.op_options)
    outputs = [problems[i % 2].output() for i in range(20)]
    for i, output in enumerate(outputs):
        problems[i % 2].call(output)
    bench.same(outputs, [expected[i % 2] for i in range(20)], "tuned")
    found = gather(bench.world, str(mk.plan(bench.name, first.a, first.b, world=bench.world, **bench.op_options).split))
    if found != [str(result.best)] * bench.world.size:
        raise AssertionError(f"tuned to {result.best}, used by rank: {found}")
    return f"{len(result.table)} measurements, {result.usual} -> {result.best}"


def beside(bench: Bench) -> str:
    """Module loads, allocations and full launch queues while kernels of the other ranks spin for the rank that sleeps."""
    problems, expected = _family(bench)
    xp, world = bench.lab.xp, bench.world
    runtime = xp.cuda.runtime
    for sleeper in range(world.size):
        output = problems[0].output()
        name = f"fresh_{sleeper}_{bench.options.seed}"
        kernel = xp.RawKernel(f'extern "C" __global__ void {name}(int* x) {{ atomicAdd(x, 1); }}', name)
        bench.lab.synchronize()
        world.barrier()
        if world.rank == sleeper:
            time.sleep(0.5)
        problems[0].call(output)
        if world.rank != sleeper:
            with xp.cuda.Stream(non_blocking=True) as other:
                address = runtime.malloc(64 << 20)
                runtime.memsetAsync(address, 0, 4, other.ptr)
                for _ in range(2000):
                    kernel((1,), (1,), (xp.uint64(address),))
                other.synchronize()
                runtime.free(address)
        bench.same([output], [expected[0]], f"rank {sleeper} asleep")
        bench.lab.stream.use()  # leaving the block above made the null stream current
    return f"{world.size} ranks asleep in turn"


def host_cupy(bench: Bench) -> str:
    """Into an array that is given, into a new one, and what the runtime's part of it is."""
    import mkernel as mk

    problem = bench.problem(256, 256, 256)
    world = bench.world
    prepared = mk.plan("allgather_gemm", problem.a, problem.b, world=world)
    view, key = world.backend.view, world.backend.key
    found = {
        "out given": _host_us(bench, problem.call),
        "out new": _host_us(bench, lambda: mk.allgather_gemm(problem.a, problem.b, world=world)),
        "plan.run": _host_us(bench, lambda: prepared.run(problem.a, problem.b, out=problem.c)),
        "a view": _host_us(bench, lambda: view(problem.a)),
        "a key": _host_us(bench, lambda: key(problem.a)),
    }
    bound = next(bound for bound in world.bound_calls.values() if hasattr(bound, "executable"))
    found["the launch in it"] = _host_us(bench, lambda: world.launch(bound.executable, bound.parameters))
    return _medians(found)


def host_torch(bench: Bench) -> str:
    """The same with torch's tensors, on torch's stream."""
    import importlib

    import mkernel as mk

    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"torch is not installed: {error}"
    a, b, c = (torch.ones((256, 256), dtype=torch.bfloat16, device=f"cuda:{bench.world.device}") for _ in range(3))
    stream = torch.cuda.ExternalStream(bench.lab.stream.ptr, device=bench.world.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # where the queue's length is watched
        mk.allgather_gemm(a, b, out=c, world=bench.world)
        bench.lab.synchronize()
        if not bool((c.float() == 256).all()):
            raise AssertionError("a wrong result from torch's tensors")
        library = bench.world.backend.libraries[type(a)]
        found = {
            "out given": _host_us(bench, lambda: mk.allgather_gemm(a, b, out=c, world=bench.world)),
            "stream given": _host_us(bench, lambda: mk.allgather_gemm(a, b, out=c, world=bench.world, stream=stream)),
            "out new": _host_us(bench, lambda: mk.allgather_gemm(a, b, world=bench.world)),
            "torch.matmul": _host_us(bench, lambda: torch.matmul(a, b, out=c)),
            "a view": _host_us(bench, lambda: library.view(a)),
            "a key": _host_us(bench, lambda: library.key(a)),
        }
    return _medians(found)


def host_import(bench: Bench) -> str:
    """In processes of their own."""
    program = "import sys, time; t = time.perf_counter(); import mkernel; print(time.perf_counter() - t, len(sys.modules))"
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    best = min(float(seconds) for seconds, _ in runs)
    if best > 0.3:
        raise AssertionError(f"import mkernel takes {best:.2f} s")
    return f"import mkernel takes {best:.3f} s, {runs[0][1]} modules in all"


def _host_us(bench: Bench, call: Callable[[], Any], samples: int = 200) -> float:
    """Median microseconds; the queue never holds more than ten calls."""
    times = []
    for i in range(samples + 20):
        if i % 10 == 0:
            bench.lab.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    bench.lab.synchronize()
    return statistics.median(times[20:])


def _medians(found: dict[str, float]) -> str:
    return "us per call, median of 200: " + "; ".join(f"{name} {us:.1f}" for name, us in found.items())


CHECKS: dict[str, dict[str, Callable[[Bench], str]]] = {
    "gemm": {"shapes": shapes},
    "world": {
        "covering": covering,
        "back-to-back": back_to_back,
        "graph": graph,
        "late": late,
        "reproducible": reproducible,
        "tuned": tuned,
        "beside": beside,
    },
    "host": {"CuPy": host_cupy, "torch": host_torch, "import": host_import},
}


if __name__ == "__main__":
    sys.exit(main())
