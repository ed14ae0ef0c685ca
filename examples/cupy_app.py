"""mkernel inside a CuPy program that has streams, a memory pool, events and a CUDA graph of its own.

Run it with:  mpirun -n 4 python examples/cupy_app.py  (on GPUs; elsewhere the same steps run with NumPy, one after the other, and it says
what is left out).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

import mkernel as mk
from mkernel.tools.check import worst_product

STEPS = 3
SCALE = 0.5


def given(step: int, rank: int, rows: int, k: int) -> Any:
    """What a rank gets in a step: float32 numbers that every rank can make."""
    return np.random.default_rng([step, rank]).standard_normal((rows, k), np.float32)


def weight(rank: int, k: int, n: int) -> Any:
    """A rank's columns of the weight."""
    return np.random.default_rng([STEPS, rank]).standard_normal((k, n), np.float32).astype(np.float16)


def worst(world: mk.World, step: int, w: Any, c: Any) -> float:
    """The largest error of a step's result over what rounding allows, every element compared with float64; right if at most 1."""
    rows, k = c.shape[0] // world.size, w.shape[0]
    x = np.concatenate([(given(step, rank, rows, k) * np.float32(SCALE)).astype(np.float16) for rank in range(world.size)])
    return float(worst_product(np, c, x, w))


def with_numpy(world: mk.World, rows: int, k: int, w: Any) -> list[float]:
    """The steps without a GPU: every line is done when the next one begins."""
    errors = []
    for step in range(STEPS):
        x = (given(step, world.rank, rows, k) * np.float32(SCALE)).astype(np.float16)
        errors.append(worst(world, step, w, mk.allgather_gemm(x, w)))
    return errors


def with_cupy(world: mk.World, rows: int, k: int, w: Any) -> list[float]:
    """The steps on a stream: copy in, scale, multiply, copy out. The first one launches them, the others replay a graph of them."""
    import cupy as cp
    import cupyx

    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):  # of this thread: results of mkernel come from it, too
        compute, side = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        with compute:
            raw, x, b = cp.empty((rows, k), np.float32), cp.empty((rows, k), np.float16), cp.asarray(w)
            out = cp.empty((rows * world.size, w.shape[1]), np.float16)  # CuPy's pool knows nothing of replays: a captured call needs `out`
            host = cupyx.empty_pinned((rows, k), np.float32)
            mk.plan("allgather_gemm", x, b, max_rows=rows)  # collective: a capture cannot compile

            host[:] = given(0, world.rank, rows, k)
            raw.set(host)
            cp.multiply(raw, SCALE, out=x)
            begin.record()
            c = mk.allgather_gemm(x, b)  # on `compute`, after the line above; asynchronous
            end.record()
        side.wait_event(end)
        with side:  # another stream of the program, which the program orders
            errors = [worst(world, 0, w, c.get())]

        with compute:
            compute.begin_capture()
            cp.multiply(raw, SCALE, out=x)
            mk.allgather_gemm(x, b, out=out)
            graph = compute.end_capture()
            for step in range(1, STEPS):  # every rank replays at the same places among its calls
                host[:] = given(step, world.rank, rows, k)
                raw.set(host)
                graph.launch(compute)
                errors.append(worst(world, step, w, out.get()))  # waits for the replay, so that `host` is free again
        compute.synchronize()
        if world.rank == 0:
            took = cp.cuda.get_elapsed_time(begin, end)
            print(f"the first call took {took:.3f} ms; the pool holds {pool.used_bytes()} bytes", flush=True)
        del raw, x, b, out, c, graph
    return errors


def main() -> int:
    """Exit status 0 if every element of every step is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, help="emulate several nodes on this host")
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--n", type=int, default=128, help="columns of the weight on each rank")
    parser.add_argument("--k", type=int, default=256)
    options = parser.parse_args()

    with mk.init(ranks_per_node=options.ranks_per_node) as world:
        rows, w = options.m // world.size, weight(world.rank, options.k, options.n)
        if world.target == "cpu" and world.rank == 0:
            print("no GPU: NumPy in place of CuPy, without streams, memory pool, events and graph", flush=True)
        steps = with_cupy if world.target == "cuda" else with_numpy
        errors = steps(world, rows, options.k, w)
        right = max(errors) <= 1
        told = " ".join(f"{error:.2f}" for error in errors)
        line = f"rank {world.rank} of {world.size} on {world.device}: errors of the steps over their bound: {told}: "
        print(line + ("right" if right else "WRONG") + "\n", end="", flush=True)  # in one write: the ranks share an output
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
