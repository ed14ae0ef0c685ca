"""The checks of run_gpu.py in a world. Each takes a Bench, raises on every rank, and returns what it has seen as a line of text."""

from __future__ import annotations

import time
from typing import Any

import mkernel as mk
from mkernel.bench.peers import gather
from tests.gpu import drawn
from tests.gpu.exact import EVERY_OP, OPS
from tests.gpu.under_test import SETS, Bench

__all__ = ["back_to_back", "beside", "covering", "graph", "late", "refused", "reproducible", "shapes", "tuned"]

NUMBERS = 6  # calls of a drawn family: each kind of routing once


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


def _covering(bench: Bench) -> list[Any]:
    """Rows per rank around the tile and chunk sizes; calls of drawn families."""
    families = bench.options.families
    if bench.op == "mixed":
        return [problem for op in drawn.FAMILIES for problem in bench.drawn(op, 2)]
    if bench.op not in OPS:
        return [problem for _ in range(families) for problem in bench.drawn(bench.op, NUMBERS)]
    size = bench.world.size
    rows, columns, depth = (0, 1, 96, 128, 200, 513, 1024), (8, 136, 512, 1032), (8, 72, 512, 2048, 4104)
    problems = []
    for family in range(families):  # one kernel takes any number of rows; compiling is what takes the time here
        n, k = bench.random.choice(columns), bench.random.choice(depth)
        problems += [bench.problem(row * size, n, k, ("bfloat16", "float16")[family % 2], bool(family // 2 % 2)) for row in rows]
    return problems


def covering(bench: Bench) -> str:
    """Calls of several shapes, back to back in one stream and checked afterwards."""
    problems = _covering(bench)
    bench.random.shuffle(problems)
    for problem in problems:  # plans are made here: a collective, so not back to back
        problem.call()
    for problem in problems:
        bench.poison(problem.c)
    bench.synchronize()
    for problem in problems:
        problem.call()
    worst = max((bench.right(problem.check(), problem) for problem in problems), default=0.0)
    bench.everywhere(problems, "covering")
    return f"{len(problems)} calls, worst error {worst:.2f} of its bound"


def _families(bench: Bench, count: int = SETS) -> tuple[list[list[Any]], dict[Any, list[Any]]]:
    """Input sets of one shape, of each op half as many where the op is ``mixed``; for each what its results are, checked against float64.

    All checks of an op have the same ones, so that kernels are compiled once.
    """
    ops, expected = EVERY_OP if bench.op == "mixed" else (bench.op,), {}
    for op in ops:
        if op not in bench.known:
            problems = bench.family(op)
            for problem in problems:
                problem.call()
            for problem in problems:
                bench.right(problem.check(), problem)
            bench.everywhere(problems, "a family of inputs")
            bench.known[op] = problems, {problem: bench.copies(problem.defined(problem.c)) for problem in problems}
        expected.update(bench.known[op][1])
    return [bench.known[op][0][: count if len(ops) == 1 else max(1, count // 2)] for op in ops], expected


def _stress(bench: Bench, what: str, *, calls: int = 0, runs: int = 0, count: int = SETS, between: Any = None) -> int:
    """Calls in drawn order without a barrier, or so many ``runs`` of each, every output kept and compared. Returns how many they were.

    ``between``: done before each.
    """
    families, expected = _families(bench, count)
    problems = [problem for family in families for problem in family]
    order = [bench.random.choice(problems) for _ in range(calls)] or problems * runs
    bench.random.shuffle(order)
    outputs = [problem.output() for problem in order]
    bench.synchronize()
    for problem, output in zip(order, outputs, strict=True):
        if between is not None:
            between()
        problem.call(output)
    found = [problem.defined(output) for problem, output in zip(order, outputs, strict=True)]
    bench.same(found, [expected[problem] for problem in order], what)
    return len(order)


def back_to_back(bench: Bench) -> str:
    """Alternating inputs."""
    return f"{_stress(bench, 'back to back', calls=bench.options.calls)} calls"


def late(bench: Bench) -> str:
    """Ranks that come up to 2 ms late, on the device and on the host."""

    def between() -> None:
        if bench.own_random.random() < 0.5:
            bench.delay(bench.own_random.randrange(2_000_000))
        if bench.own_random.random() < 0.2:
            time.sleep(bench.own_random.random() * 0.002)

    return f"{_stress(bench, 'late ranks', calls=bench.options.runs, between=between)} calls"


def reproducible(bench: Bench) -> str:
    """The same inputs again and again, every rank delayed at random on the host and on the device: the same bits."""

    def between() -> None:
        if bench.own_random.random() < 0.5:
            time.sleep(bench.own_random.random() * 0.003)
        if bench.own_random.random() < 0.3:
            bench.delay(bench.own_random.randrange(1_000_000))

    calls = _stress(bench, "reproducible", runs=bench.options.runs, count=2, between=between)
    return f"{bench.options.runs} runs of {calls // bench.options.runs} inputs"


def graph(bench: Bench) -> str:
    """Captured calls, replayed with inputs that change under them: values, routings, lengths of sequences."""
    families, expected = _families(bench)
    each = 1 if len(families) > 1 else 3
    captured = [(family, n) for family in families for n in range(each)]

    def body() -> None:
        for family, n in captured:
            family[n].call()

    saved = {problem: bench.copies(problem.arrays) for family in families for problem in family}
    launch, replays = bench.capture(body), bench.options.replays
    step = max(1, replays // 10)

    def compare(turn: int, calls: list[Any], what: str) -> None:
        now = [family[(turn + n) % len(family)] for family, n in calls]
        found = [other.defined(family[n].c) for other, (family, n) in zip(now, calls, strict=True)]
        bench.same(found, [expected[other] for other in now], what)

    for i in range(replays):
        if i % step == 0:
            for family, n in captured:
                bench.restore(family[n].arrays, saved[family[(i // step + n) % len(family)]])
                bench.poison(family[n].c)
        launch()
        if i % step == step - 1:
            compare(i // step, captured, f"replay {i}")
    family, n = captured[0]
    family[n].call()  # a plain call after replays goes on from their epoch
    compare((replays - 1) // step, captured[:1], "call after replays")
    for problem, arrays in saved.items():
        bench.restore(problem.arrays, arrays)
    return f"{replays} replays of {len(captured)} calls"


def refused(bench: Bench) -> str:
    """Bad routing on one rank, between right calls and with nothing between them: every rank is told, and the next call is right."""
    if bench.op not in ("moe_dispatch_gemm", "moe_layer"):
        return "takes no routing"
    world, count = bench.world, 0
    (problems,), expected = _families(bench, 2)
    family, (good, other) = problems[0].family, problems
    assert isinstance(family, drawn.Routed)
    for fault in family.faults():
        spoilt = family.spoilt(good.number, fault, bench.random.randrange(2**31))
        arrays = [drawn.to_device(bench.xp, array) for array in spoilt.arrays]
        outputs = [good.output(), other.output()]
        bench.synchronize()
        good.call(outputs[0])
        told = None
        try:
            family.call(arrays)
            bench.synchronize()
            world.barrier()
        except mk.RoutingError as error:
            told = [error.rank, error.value, error.token]
        other.call(outputs[1])
        found = [problem.defined(output) for problem, output in zip(problems, outputs, strict=True)]
        bench.same(found, [expected[problem] for problem in problems], f"calls before and after {fault}")
        wrong = [each for each in gather(world, told) if each is None or each[:2] != spoilt.told or each[2] not in (None, spoilt.token)]
        if wrong:
            raise AssertionError(f"{fault}, {family}: {wrong} was told, not {spoilt.told}, token {spoilt.token}")
        count += 1
    return f"{count} faults"


def tuned(bench: Bench) -> str:
    """Tuning finds a split that all ranks use, and changes no bit."""
    if bench.op not in OPS or not bench.on_gpu:
        return "not done"
    (problems,), expected = _families(bench, 2)
    first = problems[0]
    result = mk.tune(first.name, first.a, first.b, world=bench.world, out=first.c, samples=3, save=False, **first.options)
    outputs = [problems[i % 2].output() for i in range(20)]
    for i, output in enumerate(outputs):
        problems[i % 2].call(output)
    bench.same([[output] for output in outputs], [expected[problems[i % 2]] for i in range(20)], "tuned")
    found = gather(bench.world, str(mk.plan(first.name, first.a, first.b, world=bench.world, **first.options).split()))
    if found != [str(result.best)] * bench.world.size:
        raise AssertionError(f"tuned to {result.best}, used by rank: {found}")
    return f"{len(result.table)} measurements, {result.default} -> {result.best}"


def beside(bench: Bench) -> str:
    """Module loads, allocations and full launch queues while kernels of the other ranks spin for the rank that sleeps."""
    if not bench.on_gpu:
        return "not done"
    families, expected = _families(bench)
    problem = families[0][0]
    xp, world = bench.xp, bench.world
    runtime = xp.cuda.runtime
    for sleeper in range(world.size):
        output = problem.output()
        name = f"fresh_{sleeper}_{bench.options.seed}_{bench.random.randrange(2**31)}"
        kernel = xp.RawKernel(f'extern "C" __global__ void {name}(int* x) {{ atomicAdd(x, 1); }}', name)
        bench.synchronize()
        world.barrier()
        if world.rank == sleeper:
            time.sleep(0.5)
        problem.call(output)
        if world.rank != sleeper:
            with xp.cuda.Stream(non_blocking=True) as other:
                address = runtime.malloc(64 << 20)
                runtime.memsetAsync(address, 0, 4, other.ptr)
                for _ in range(2000):
                    kernel((1,), (1,), (xp.uint64(address),))
                other.synchronize()
                runtime.free(address)
        bench.same([problem.defined(output)], [expected[problem]], f"rank {sleeper} asleep")
        bench.timing.stream.use()  # leaving the block above made the null stream current
    return f"{world.size} ranks asleep in turn"
