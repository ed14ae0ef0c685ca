"""What the checks of run_gpu.py work on: a world, and calls whose arrays every rank can write again."""

from __future__ import annotations

import argparse
import random
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from mkernel.bench.peers import gather
from mkernel.bench.timing import CudaTiming, open_timing
from mkernel.planner.reduce import ReduceProblem, make_plan
from mkernel.tools.check import node_sums, worst_product, worst_sum
from tests.gpu import drawn
from tests.gpu.exact import OPS

__all__ = ["ALGORITHMS", "SETS", "Bench", "Drawn", "Problem"]

SETS = 4  # of inputs, in a family
ALGORITHMS = ("one_shot", "two_shot")  # of gemm_allreduce


class Problem:
    """One call of a GEMM: seeded, so that every rank can write every rank's inputs again. ``m``: of the whole problem, ``k``: of a rank."""

    def __init__(self, bench: Bench, op: str, m: int, n: int, k: int, dtype: str, transposed: bool, seed: int) -> None:
        self.bench, self.timing, self.m, self.n, self.k, self.seed, self.transposed = bench, bench.timings[dtype], m, n, k, seed, transposed
        self.op, world = op, bench.world
        self.algorithm = op if op in ALGORITHMS else None
        self.name = "gemm_allreduce" if self.algorithm else op
        self.rows = m // world.size
        self.a = self._shard(world.rank)
        self.b = self._columns(world.rank)
        self.c = self.output()

    def _shard(self, rank: int) -> Any:
        return self.timing.random((self.rows if self.op == "allgather_gemm" else self.m, self.k), self.seed + rank)

    def _columns(self, rank: int) -> Any:
        seed = self.seed + 1000 + rank
        return self.timing.random((self.n, self.k), seed).T if self.transposed else self.timing.random((self.k, self.n), seed)

    @property
    def arrays(self) -> list[Any]:
        """What the call reads."""
        return [self.a, self.b]

    @property
    def options(self) -> dict[str, str]:
        partials = {"partials": self.bench.options.partials} if self.op != "allgather_gemm" else {}
        return partials | ({"algorithm": self.algorithm} if self.algorithm else {})

    def output(self) -> Any:
        c = self.timing.empty((self.rows if self.op == "gemm_reduce_scatter" else self.m, self.n))
        self.bench.poison(c)
        return c

    def call(self, c: Any = None) -> Any:
        import mkernel as mk

        return getattr(mk, self.name)(self.a, self.b, world=self.bench.world, out=self.c if c is None else c, **self.options)

    def defined(self, c: Any) -> list[Any]:
        """What of an output must be the same in every run."""
        return [c]

    def check(self) -> float:
        """The worst error over its bound of the output on this rank; the stream is idle afterwards."""
        self.timing.synchronize()
        return self._product() if self.op == "allgather_gemm" else self._sum()

    def _product(self) -> float:
        xp = self.timing.xp
        bits = xp.concatenate([self._shard(rank).view(xp.uint16) for rank in range(self.bench.world.size)])
        return worst_product(xp, self.c, bits.view(self.c.dtype), self._contiguous(self.b))

    def _sum(self) -> float:
        world = self.bench.world
        rows, dtype = self.c.shape[0], self.timing.dtype
        if not rows:
            return 0.0
        partials = self.bench.options.partials
        problem = ReduceProblem(self.name, world.topology, self.n, self.k, dtype, not self.transposed, partials, self.algorithm)
        plan = make_plan(problem, rows, world.backend.sm_count)
        nodes = node_sums(plan, world.rank, lambda rank: (self._shard(rank), self._contiguous(self._columns(rank))))
        return worst_sum(self.timing.xp, self.c, nodes)

    def _contiguous(self, b: Any) -> Any:
        xp = self.timing.xp
        return xp.ascontiguousarray(b.T.view(xp.uint16).T if self.transposed else b.view(xp.uint16)).view(self.c.dtype)

    def __str__(self) -> str:
        b = "(N, K).T" if self.transposed else "(K, N)"
        return f"{self.op} M={self.m} N={self.n} K={self.k} {self.timing.dtype} b {b} seed {self.seed}"


class Drawn:
    """One call of attention or of a MoE op. ``c``: its results, once it has been called."""

    def __init__(self, bench: Bench, family: drawn.Family, number: int) -> None:
        self.bench, self.family, self.number = bench, family, number
        self.arrays, self.c = family.arrays(number), None

    def output(self) -> Any:
        made = drawn.like(self.c, self.bench.xp.empty_like)
        self.bench.poison(made)
        return made

    def call(self, c: Any = None) -> Any:
        if c is None and self.c is None:
            self.c = self.family.call(self.arrays)
            return self.c
        return self.family.call(self.arrays, self.c if c is None else c)

    def check(self) -> float:
        """0, or infinite where an element is wrong; the stream is idle afterwards."""
        self.bench.synchronize()
        found = self.family.found(self.number, self.c)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
        return float("inf") if found else 0.0

    def defined(self, c: Any) -> list[Any]:
        """What of results must be the same in every run."""
        return self.family.defined(self.number, c)

    def __str__(self) -> str:
        return f"{self.family}, call {self.number}"


class Bench:
    """The world under test with the helpers of the benchmark. ``op``: also ``mixed``, all of them."""

    def __init__(self, world: Any, options: argparse.Namespace) -> None:
        self.world, self.xp, self.options, self.op = world, world.xp, options, ""
        self.random = random.Random(options.seed)  # the same on all ranks: they must draw the same shapes
        self.own_random = random.Random(options.seed * 1000 + world.rank)
        self.known: dict[str, tuple[list[Any], dict[Any, list[Any]]]] = {}  # families by op, and the words of their right results
        self.timings: dict[str, Any] = {dtype: open_timing(world, dtype) for dtype in ("bfloat16", "float16")}
        self.timing = self.timings["float16"]  # made last: its stream is the current one
        if self.on_gpu:
            self.timings["bfloat16"].stream = self.timing.stream

    @property
    def on_gpu(self) -> bool:
        return bool(self.world.target == "cuda")

    # ---- calls
    def problem(self, m: int, n: int, k: int, dtype: str = "bfloat16", transposed: bool = False, op: str = "") -> Problem:
        return Problem(self, op or self.op, m, n, k, dtype, transposed, self.random.randrange(2**31))

    def drawn(self, op: str, count: int, tries: int = 1) -> list[Drawn]:
        family = drawn.draw(self.world, op, self.random.randrange(2**31), tries=tries)
        return [Drawn(self, family, number) for number in range(count)]

    def family(self, op: str) -> list[Any]:
        """Calls that differ in what is in their arrays only."""
        if op not in OPS:
            return self.drawn(op, SETS, tries=5)  # waits are for calls of many pieces
        rows, n, k = (256, 512, 1024) if self.on_gpu else (32, 64, 72)
        return [self.problem(rows * self.world.size, n, k, op=op) for _ in range(SETS)]

    # ---- the device
    def synchronize(self) -> None:
        self.timing.synchronize()

    def delay(self, ns: int) -> None:
        """Keep the stream busy, or the host where there is none."""
        if isinstance(self.timing, CudaTiming):
            self.timing.delay(ns)
        else:
            time.sleep(ns * 1e-9)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """What launches a graph of the calls; on target cpu it makes them."""
        if not self.on_gpu:
            return body
        stream = self.timing.stream
        # Relaxed: the engine of an emulated network copies meanwhile, in another thread of this process.
        stream.begin_capture(self.xp.cuda.runtime.streamCaptureModeRelaxed)
        body()
        graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def poison(self, results: Any) -> None:
        """NaN, or numbers that nothing has, in every array."""
        for array in drawn.flat(results):
            if array.size:
                drawn.words(array)[...] = 0x7FFF if array.dtype.itemsize == 2 else 0x7FFF7FFF

    def copies(self, arrays: Sequence[Any]) -> list[Any]:
        """The words of arrays."""
        return [drawn.words(array).copy() if array.size else array for array in arrays]

    def restore(self, arrays: Sequence[Any], copies: Sequence[Any]) -> None:
        for array, copy in zip(arrays, copies, strict=True):
            if array.size:
                drawn.words(array)[...] = copy

    # ---- verdicts of all ranks
    def everywhere(self, problems: Sequence[Any], what: str) -> None:
        """An all-reduce gives all ranks the same bits, or raise on every rank."""
        self.synchronize()
        outputs = [problem.c for problem in problems if getattr(problem, "name", "") == "gemm_allreduce"]
        sums = [zlib.crc32(drawn.to_host(output).tobytes()) for output in outputs]
        by_rank = gather(self.world, sums)
        if any(other != by_rank[0] for other in by_rank):
            raise AssertionError(f"{what}: the ranks have different bits: {by_rank}")

    def right(self, worst: float, what: object) -> float:
        """Raise on every rank if any rank is wrong."""
        by_rank = [float(text) for text in gather(self.world, str(worst))]
        if not max(by_rank) <= 1.0:
            raise AssertionError(f"{what}: error over bound by rank {by_rank}")
        return max(by_rank)

    def same(self, outputs: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], what: str) -> None:
        """Bit for bit equal, or raise on every rank. ``expected``: words."""
        xp = self.xp
        self.synchronize()
        differ, of = [], []
        for i, (output, words) in enumerate(zip(outputs, expected, strict=True)):
            for array, known in zip(output, words, strict=True):
                if array.shape[0] and array.size:
                    differ.append((drawn.words(array) != known).any())
                    of.append(i)
        bad = drawn.to_host(xp.stack(differ)) if differ else []
        found = gather(self.world, sorted({i for i, wrong in zip(of, bad, strict=True) if wrong})[:20])
        if any(found):
            raise AssertionError(f"{what}: outputs that differ, by rank: {found}")

    def close(self) -> None:
        for timing in self.timings.values():
            timing.close()
        if self.on_gpu:
            self.xp.cuda.Stream.null.use()  # the timing's stream, the current one since, ends with it
