"""Host time of cached calls on a GPU, whole and in pieces: ``python -m tests.gpu.host_time [--calls 2000]``; under 20 s.

One rank by itself, or one per GPU under ``mpirun``; rank 0 prints. Calls are small and come ten at a time, between waits outside the
clock, so that the queue is never full. Lines are microseconds: the median, the 10th, 90th and 99th percentile, the worst.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mkernel as mk

SIZE = 256
BATCH = 10  # calls between two waits
WARM = 50
Program = tuple[str, Callable[[], object]]


def measure(world: Any, call: Callable[[], object], calls: int) -> np.ndarray[Any, Any]:
    """Microseconds of each call."""
    found = np.empty(calls)
    clock = time.perf_counter_ns
    for _ in range(WARM):
        call()
    for i in range(calls):
        if i % BATCH == 0:
            world.backend.synchronize()
        begin = clock()
        call()
        found[i] = (clock() - begin) / 1e3
    world.backend.synchronize()
    return found


def whole(world: Any, name: str, arrays: tuple[Any, Any, Any], stream: Any) -> Iterator[Program]:
    """Calls as a program makes them. ``stream``: the library's current one."""
    a, b, c = arrays
    plan = mk.plan("allgather_gemm", a, b, world=world)
    yield f"{name}: out given", lambda: mk.allgather_gemm(a, b, out=c, world=world)
    yield f"{name}: out new", lambda: mk.allgather_gemm(a, b, world=world)
    yield f"{name}: plan.run, out given", lambda: plan.run(a, b, out=c)
    yield f"{name}: stream given", lambda: mk.allgather_gemm(a, b, out=c, world=world, stream=stream)


def of_library(world: Any, name: str, array: Any) -> Iterator[Program]:
    """What a call asks of the array library: three keys, one stream."""
    library = world.backend.libraries[type(array)]
    yield f"{name}: key of an array", lambda: library.key(array)
    yield f"{name}: key of an array, hashed", lambda: hash(library.key(array))
    yield f"{name}: current stream", library.stream


def of_runtime(world: Any, stream: int) -> Iterator[Program]:
    """Mkernel's own pieces, each with the driver's calls in it."""
    backend, bound = world.backend, _bound(world)
    kernel, grid, parameters = bound.executable.kernel, bound.executable.grid, bound.parameters
    yield "World.launch", lambda: world.launch(bound.executable, parameters, stream)
    yield "  the turn (LaunchQueue.order)", lambda: backend.order(stream)
    turn = backend.order(stream)
    yield "  the launch with its event (CudaBackend.launch)", lambda: backend.launch(kernel, turn, grid, parameters)
    addresses = itertools.count(backend.allocate(1 << 20), 16)
    strides, box = (SIZE * 2, SIZE * SIZE * 2), (64, 128, 1)
    yield "a new tensor map", lambda: backend.tensor_map(next(addresses), "bfloat16", (SIZE, SIZE, 1), strides, box)
    rows = world.xp.zeros((8 * (WARM + 4096) + SIZE, SIZE), dtype=world.xp.dtype("float16"))
    b = world.xp.zeros((SIZE, SIZE), dtype=rows.dtype)
    c = world.xp.zeros((SIZE * world.size, SIZE), dtype=rows.dtype)
    starts = itertools.count(0, 8)

    def new_binding() -> None:
        start = next(starts)
        mk.allgather_gemm(rows[start : start + SIZE], b, out=c, world=world)

    yield "a call on arrays never seen before", new_binding


def of_driver(world: Any, stream: int) -> Iterator[Program]:
    """The driver's functions by themselves, called as a call calls them."""
    backend, bound, queue = world.backend, _bound(world), world.backend._queue
    kernel = bound.executable.kernel
    kernel.argument_list[0] = ctypes.addressof(bound.parameters)
    kernel.config.grid[0], kernel.config.stream = bound.executable.grid, stream
    launch, arguments = backend._launch_kernel, kernel.launch_arguments[1]
    yield "cuLaunchKernelEx", lambda: launch(*arguments)
    yield "cuEventRecord", lambda: queue._record(queue._tail, stream)
    yield "cuCtxGetCurrent", lambda: queue._get_context(queue._context_at)
    yield "cuStreamGetCaptureInfo", lambda: queue._get_capture(stream, queue._status_at, queue._capture_at, None, None, None)
    yield "cuStreamGetId", lambda: queue._get_id(stream, queue._id_at)
    yield "the clock itself", lambda: None


def _bound(world: Any) -> Any:
    return next(bound for bound in reversed(world.bound_calls.values()) if hasattr(bound, "executable"))


def run(world: Any, calls: int) -> None:
    """Measure everything, on a stream of its own as programs have one, and on the default stream."""

    def show(programs: Iterator[Program], count: int = calls) -> None:
        for name, call in programs:
            found = measure(world, call, count)
            if world.rank == 0:
                points = np.percentile(found, [50, 10, 90, 99, 100])
                print(f"{name:50} {points[0]:7.2f}   {'  '.join(f'{point:.2f}' for point in points[1:])}", flush=True)

    xp, device = world.xp, world.device
    if world.rank == 0:
        print(f"us; median, then p10, p90, p99, worst of {calls} calls; {world!r}, {world.backend.name}")
    a, b = (xp.ones((SIZE, SIZE), dtype=xp.dtype("float16")) for _ in range(2))
    c = xp.empty((SIZE * world.size, SIZE), dtype=a.dtype)
    world.synchronize()
    xp.cuda.get_current_stream().synchronize()
    show(whole(world, "CuPy on the default stream", (a, b, c), xp.cuda.Stream.null))
    with xp.cuda.Stream(non_blocking=True) as stream:
        show(whole(world, "CuPy", (a, b, c), stream))
        show(of_library(world, "CuPy", a))
        show(of_runtime(world, stream.ptr))
        show(of_driver(world, stream.ptr))
        world.synchronize()
        if not bool((c == SIZE).all()):
            raise AssertionError("a wrong result")
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        print(f"torch is not measured: {error}")
        return
    where = {"dtype": torch.float16, "device": f"cuda:{device}"}
    a, b, c = torch.ones((SIZE, SIZE), **where), torch.ones((SIZE, SIZE), **where), torch.empty((SIZE * world.size, SIZE), **where)
    torch.cuda.synchronize()
    show(whole(world, "torch on the default stream", (a, b, c), torch.cuda.default_stream(device)))
    stream = torch.cuda.Stream(device=device)
    with torch.cuda.stream(stream):
        show(whole(world, "torch", (a, b, c), stream))
        show(of_library(world, "torch", a))
        show(iter([("torch: torch.matmul with out, to compare", lambda: torch.matmul(a, b, out=c[:SIZE]))]))
    world.synchronize()


def main() -> int:
    """Run it; 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args()
    with mk.init(target="cuda") as world:
        begin = time.monotonic()
        run(world, min(arguments.calls, 4000))
        if world.rank == 0:
            print(f"{time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
