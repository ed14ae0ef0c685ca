"""Host time of calls with sizes never seen before, without a GPU: ``python -m tests.runtime.new_sizes [OP ...]``; about 1 s per op.

As ``host_path``: the whole path of a call runs as on a GPU, down to a driver library whose functions return at once. Per op: microseconds
that the thread ran in a call of a new number of rows with new arrays, their median and 99th percentile; the same after caches of the CPU
were filled with other things, as they are between the steps of a program; Python and C functions called, as ``sys.setprofile`` counts
them, by four calls of five at most; and tensor maps that the driver encoded. ``--tree`` measures another checkout, ``--ranks 2`` a world
of two, of which rank 0 calls.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import itertools
import json
import math
import os
import pstats
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "--tree" in sys.argv:  # before anything is imported from here
    sys.path.insert(0, sys.argv[sys.argv.index("--tree") + 1])

import ml_dtypes
import numpy as np

from tests.runtime.host_path import Memory, install_driver, install_libraries, make_backend

N = K = 4096
MOST = 16384
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
EXPERTS, TOPK, HIDDEN, INNER = 8, 4, 1024, 512
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), **{name: np.dtype(name) for name in ("float16", "float32", "int32", "int64")}}
_EVICTED_BYTES = 8 << 20  # as much as no L2 of a core holds


class Array:
    """``cupy.ndarray`` of any shape, contiguous."""

    __slots__ = ("data", "dtype", "shape", "strides")
    _addresses = itertools.count(0x100000000000, 1 << 30)

    def __init__(self, shape: tuple[int, ...], dtype: Any = "bfloat16") -> None:
        self.shape, self.dtype = shape, _DTYPES[dtype] if isinstance(dtype, str) else dtype
        strides, step = [], self.dtype.itemsize
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        self.strides, self.data = tuple(reversed(strides)), Memory(next(Array._addresses))

    def __getitem__(self, rows: slice) -> Array:
        """The first rows."""
        part = Array((rows.stop, *self.shape[1:]), self.dtype)
        part.data = self.data
        return part


class Arrays:
    """What ``install_libraries`` wants."""

    cupy = torch = staticmethod(lambda: Array((256, 256)))

    @staticmethod
    def pooled(make: Callable[[], Any]) -> Callable[..., Any]:
        return lambda shape=(1,), dtype="bfloat16", **_: Array(tuple(shape), dtype)


Make = Callable[[int], Callable[[], object]]
Program = tuple[str, Callable[[], object], Make, int]  # an op: its name, what prepares it, what makes a call of so many rows, most of them


def gemms(mk: Any, world: Any) -> Iterator[Program]:
    ranks, b = world.size, Array((K, N))

    def gemm(op: str, of_a: int, of_c: int, weights: Callable[[], Array]) -> Make:
        def make(rows: int) -> Callable[[], object]:
            function, a, c, w = getattr(mk, op), Array((of_a * rows, K)), Array((of_c * rows, N)), weights()
            return lambda: function(a, w, out=c, world=world)

        return make

    for op, of_a, of_c in (("allgather_gemm", 1, ranks), ("gemm_reduce_scatter", ranks, 1), ("gemm_allreduce", 1, 1)):
        prepare = functools.partial(mk.plan, op, Array((of_a, K)), b, world=world, max_rows=MOST)
        yield op, prepare, gemm(op, of_a, of_c, lambda: b), MOST // ranks
        yield f"{op}, new b", prepare, gemm(op, of_a, of_c, lambda: Array((K, N))), MOST // ranks


def attention(mk: Any, world: Any) -> Iterator[Program]:
    def program(op: str, shape: Callable[[int, int], tuple[int, ...]], *more: Any) -> Program:
        def make(rows: int) -> Callable[[], object]:
            q, k, v, o = (Array(shape(rows, heads)) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
            out = o, Array((1, HEADS, rows) if len(o.shape) == 4 else (HEADS, rows), "float32")
            return lambda: getattr(mk, op)(q, k, v, *more, out=out, causal=True, world=world)

        return op, make(MOST), make, MOST

    yield program("ring_attention", lambda rows, heads: (1, heads, rows, HEAD_DIM))
    yield program("ring_attention_varlen", lambda rows, heads: (rows, heads, HEAD_DIM), Array((5,), "int32"))


def experts(mk: Any, world: Any) -> Iterator[Program]:
    most, held, nodes = 4096, EXPERTS // world.size, world.num_nodes
    up, gated, down = Array((held, HIDDEN, INNER)), Array((held, HIDDEN, 2 * INNER)), Array((held, INNER, HIDDEN))
    bounds = {"max_tokens": most, "max_rows": 2 * most}
    offsets, source, of_rows = Array((held + 1,), "int32"), Array((2 * most, 3), "int32"), Array((2 * most,), "float32")
    y, summed = Array((2 * most, INNER)), Array((2 * most, HIDDEN))
    tables = [Array((nodes, *shape), "int32") for shape in ((most, TOPK), (most, TOPK), (most,), (most,), (2,))]

    def tokens(rows: int) -> tuple[Array, Array, Array]:
        return Array((rows, HIDDEN)), Array((rows, TOPK), "int64"), Array((rows, TOPK), "float32")

    def sent(rows: int) -> Any:
        return mk.Dispatched(y, offsets, source, of_rows, mk.Routing(Array((rows, TOPK), "int32"), *tables, offsets))

    def dispatch(rows: int) -> Callable[[], object]:
        (x, ids, weights), out = tokens(rows), sent(rows)
        return lambda: mk.moe_dispatch_gemm(x, ids, up, topk_weights=weights, **bounds, out=out, world=world)

    def combine(rows: int) -> Callable[[], object]:
        (_, _, weights), out, routing = tokens(rows), Array((rows, HIDDEN)), sent(rows).routing
        return lambda: mk.moe_combine(summed, routing, topk_weights=weights, out=out, world=world)

    def gemm_combine(rows: int) -> Callable[[], object]:
        (_, _, weights), out, routing = tokens(rows), Array((rows, HIDDEN)), sent(rows).routing
        return lambda: mk.moe_gemm_combine(y, down, routing, topk_weights=weights, out=out, world=world)

    def layer(rows: int) -> Callable[[], object]:
        (x, ids, weights), out = tokens(rows), Array((rows, HIDDEN))
        return lambda: mk.moe_layer(x, ids, weights, gated, down, **bounds, out=out, world=world)

    for name, make in (("moe_dispatch_gemm", dispatch), ("moe_combine", combine), ("moe_gemm_combine", gemm_combine), ("moe_layer", layer)):
        yield name, make(most), make, most


class Done(threading.Event):
    """Set when rank 0 has measured an op."""

    calls = 0  # that it has made since the world began


class Encodings:
    """Counts the tensor maps that the driver encodes."""

    def __init__(self, world: Any) -> None:
        self.count, maps = 0, world.backend._maps
        known = maps._encode
        self._encode = known._encode if isinstance(known, Encodings) else known  # of an op that was measured before
        maps._encode = self

    def __call__(self, *arguments: Any) -> int:
        self.count += 1
        return int(self._encode(*arguments))


def sizes(rng: random.Random, most: int, count: int) -> list[int]:
    """Different numbers of rows, log-uniform, in random order."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[min(most, round(math.exp(rng.uniform(0, math.log(most)))))] = None
    return list(found)


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """Python functions, and C functions, that a call calls."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"] - 1  # without that of setprofile itself


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(world: Any, make: Make, most: int, options: argparse.Namespace) -> dict[str, Any]:
    """Times of calls of one op, warm and cold."""
    encodings = Encodings(world)
    world.executables.clear()  # the sizes are those of the program before
    rng = random.Random(options.seed)
    count = min(options.calls, most // 4)
    evicted = np.zeros(_EVICTED_BYTES // 8)
    drawn = sizes(rng, most, 2 * count + 40)
    calls = [make(rows) for rows in drawn]
    for call in calls[:20]:
        call()
    times: dict[str, list[float]] = {"warm": [], "cold": []}
    clock = time.thread_time_ns  # not what other processes take of the core
    rest = iter(calls[40:])
    encodings.count = 0
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(lambda: [call() for call in rest])
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
        return {}
    for name in ("warm", "cold"):
        gc.collect()
        for call in itertools.islice(rest, count):
            if name == "cold":
                evicted += 1
            begin = clock()
            call()
            times[name].append((clock() - begin) / 1e3)
    maps = encodings.count / (2 * count)
    functions = [counted(call) for call in calls[20:40]]
    again = []
    for _ in range(200):
        begin = clock()
        calls[-1]()
        again.append((clock() - begin) / 1e3)
    return {
        **{name: [statistics.median(found), percentile(found, 0.99), percentile(found, 0.1)] for name, found in times.items()},
        "again": statistics.median(again),
        "functions": [percentile(list(of_calls), 0.8) for of_calls in zip(*functions, strict=True)],  # others begin a class of rows
        "maps": maps,
    }


def main() -> int:
    """Print one line per op."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="default: all")
    parser.add_argument("--calls", type=int, default=400, help="of each op, warm and cold")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=None)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="where the time goes")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    parser.add_argument("--tree", type=Path, help="another checkout")
    parser.add_argument("--json", action="store_true", help="a line of JSON per op")
    options = parser.parse_args()
    install_libraries(Arrays())  # type: ignore[arg-type]
    sys.modules["cupy"].ndarray = Array  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        install_driver(folder)
        import mkernel as mk
        from mkernel.runtime.launch import run
        from mkernel.runtime.options import Options

        done = Done()

        def use(world: Any) -> None:
            for name, prepare, make, most in itertools.chain(gemms(mk, world), attention(mk, world), experts(mk, world)):
                if options.ops and name not in options.ops:
                    continue
                prepare()
                if world.rank:
                    done.wait()
                    world._calls = done.calls  # as if it had made them, too
                    done.clear()
                    continue
                try:
                    found = measure(world, make, most, options)
                finally:
                    done.calls = world._calls
                    done.set()
                if not found:
                    continue
                if options.json:
                    print(json.dumps({"op": name, **found}), flush=True)
                    continue
                times = "  ".join(f"{what} {found[what][0]:6.1f} / {found[what][1]:6.1f}" for what in ("warm", "cold"))
                python, c = found["functions"]
                print(
                    f"{name:22} {times} us (median / p99)  again {found['again']:5.1f} us  "
                    f"functions {python:.0f} + {c:.0f} of C  maps {found['maps']:.2f}",
                    flush=True,
                )
            world.barrier()

        made = Options(target="cuda", heap_bytes=1 << 34, ranks_per_node=options.ranks_per_node)
        run(use, options.ranks, made, make_backend=make_backend)
    return 0


if __name__ == "__main__":
    sys.exit(main())
