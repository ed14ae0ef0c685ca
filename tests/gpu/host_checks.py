"""What a call of a cached plan costs the host, in a world of one GPU: checks of run_gpu.py that measure."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.gpu.under_test import Bench

__all__ = ["host_cupy", "host_import", "host_torch"]


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
    stream = torch.cuda.ExternalStream(bench.timing.stream.ptr, device=bench.world.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # where the queue's length is watched
        mk.allgather_gemm(a, b, out=c, world=bench.world)
        bench.timing.synchronize()
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
            bench.timing.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    bench.timing.synchronize()
    return statistics.median(times[20:])


def _medians(found: dict[str, float]) -> str:
    return "us per call, median of 200: " + "; ".join(f"{name} {us:.1f}" for name, us in found.items())
