"""The checks of run_gpu.py in a world on GPUs. Each takes a Bench, raises on every rank, and returns what it has seen as a line of text."""

from __future__ import annotations

import time
from typing import Any

from mkernel.bench.peers import gather
from tests.gpu.under_test import Bench, Problem

__all__ = ["back_to_back", "beside", "covering", "graph", "late", "reproducible", "shapes", "tuned"]

FAMILIES = 5  # kernels of check covering


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
            problem.timing.poison(problem.c)
    bench.timing.synchronize()
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
    bench.timing.synchronize()
    for i, output in enumerate(outputs):
        problems[i % len(problems)].call(output)
    bench.same(outputs, [expected[i % len(problems)] for i in range(calls)], "back to back")
    return f"{calls} calls"


def graph(bench: Bench, replays: int = 1000) -> str:
    """Three captured calls, replayed with inputs that change under them."""
    problems, expected = _family(bench)
    captured_calls = problems[:3]
    stream = bench.timing.stream
    stream.begin_capture()
    for problem in captured_calls:
        problem.call()
    captured = stream.end_capture()
    saved = [(problem.a.copy(), problem.b.copy()) for problem in problems]
    bits = bench.timing.xp.uint16

    def now(i: int) -> list[Any]:  # what the captured calls give while inputs are shifted by i
        return [expected[(i + n) % len(saved)] for n in range(len(captured_calls))]

    for i in range(replays):
        if i % 100 == 0:
            for n, problem in enumerate(captured_calls):
                a, b = saved[(i // 100 + n) % len(saved)]
                problem.a.view(bits)[...] = a.view(bits)
                problem.b.view(bits)[...] = b.view(bits)
                problem.timing.poison(problem.c)
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
    bench.timing.synchronize()
    for i, output in enumerate(outputs):
        if bench.own_random.random() < 0.5:
            bench.timing.delay(bench.own_random.randrange(2_000_000))
        if bench.own_random.random() < 0.2:
            time.sleep(bench.own_random.random() * 0.002)
        problems[i % len(problems)].call(output)
    bench.same(outputs, [expected[i % len(problems)] for i in range(calls)], "late ranks")
    return f"{calls} calls"


def reproducible(bench: Bench, runs: int = 50) -> str:
    """The same inputs again and again, every rank delayed at random on the host and on the device: the same bits."""
    problems, expected = _family(bench, 2)
    outputs = [problems[i % 2].output() for i in range(2 * runs)]
    bench.timing.synchronize()
    for i, output in enumerate(outputs):
        if bench.own_random.random() < 0.5:
            time.sleep(bench.own_random.random() * 0.003)
        if bench.own_random.random() < 0.3:
            bench.timing.delay(bench.own_random.randrange(1_000_000))
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
    found = gather(bench.world, str(mk.plan(bench.name, first.a, first.b, world=bench.world, **bench.op_options).split()))
    if found != [str(result.best)] * bench.world.size:
        raise AssertionError(f"tuned to {result.best}, used by rank: {found}")
    return f"{len(result.table)} measurements, {result.default} -> {result.best}"


def beside(bench: Bench) -> str:
    """Module loads, allocations and full launch queues while kernels of the other ranks spin for the rank that sleeps."""
    problems, expected = _family(bench)
    xp, world = bench.timing.xp, bench.world
    runtime = xp.cuda.runtime
    for sleeper in range(world.size):
        output = problems[0].output()
        name = f"fresh_{sleeper}_{bench.options.seed}"
        kernel = xp.RawKernel(f'extern "C" __global__ void {name}(int* x) {{ atomicAdd(x, 1); }}', name)
        bench.timing.synchronize()
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
        bench.timing.stream.use()  # leaving the block above made the null stream current
    return f"{world.size} ranks asleep in turn"
