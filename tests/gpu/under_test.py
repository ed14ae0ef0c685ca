"""What the checks of run_gpu.py work on: a world on GPUs, and calls whose arrays every rank can write again."""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Sequence
from typing import Any

from mkernel.bench.peers import gather
from mkernel.bench.timing import CudaTiming
from mkernel.planner.reduce import ReduceProblem, make_plan
from mkernel.tools.check import node_sums, worst_product, worst_sum

__all__ = ["Bench", "Problem"]


class Problem:
    """One call's arrays: seeded, so that every rank can write every rank's inputs again. ``m``: of the whole problem, ``k``: of a rank."""

    def __init__(self, bench: Bench, m: int, n: int, k: int, dtype: str, transposed: bool, seed: int) -> None:
        self.bench, self.timing, self.m, self.n, self.k, self.seed, self.transposed = bench, bench.timings[dtype], m, n, k, seed, transposed
        self.op, world = bench.op, bench.world
        self.rows = m // world.size
        self.a = self._shard(world.rank)
        self.b = self._columns(world.rank)
        self.c = self.output()

    def _shard(self, rank: int) -> Any:
        return self.timing.random((self.rows if self.op == "allgather_gemm" else self.m, self.k), self.seed + rank)

    def _columns(self, rank: int) -> Any:
        seed = self.seed + 1000 + rank
        return self.timing.random((self.n, self.k), seed).T if self.transposed else self.timing.random((self.k, self.n), seed)

    def output(self) -> Any:
        c = self.timing.empty((self.rows if self.op == "gemm_reduce_scatter" else self.m, self.n))
        if c.size:
            self.timing.poison(c)
        return c

    def call(self, c: Any = None) -> Any:
        return self.bench.call(self.a, self.b, out=self.c if c is None else c)

    def check(self) -> float:
        """The worst error over its bound of the output on this rank; the stream is idle afterwards."""
        self.timing.synchronize()
        return self._product() if self.op == "allgather_gemm" else self._sum()

    def _product(self) -> float:
        xp = self.timing.xp
        bits = xp.concatenate([self._shard(rank).view(xp.uint16) for rank in range(self.bench.world.size)])
        return worst_product(xp, self.c, bits.view(self.c.dtype), self._contiguous(self.b))

    def _sum(self) -> float:
        bench, world = self.bench, self.bench.world
        rows, dtype = self.c.shape[0], self.timing.dtype
        if not rows:
            return 0.0
        partials = bench.options.partials
        problem = ReduceProblem(bench.name, world.topology, self.n, self.k, dtype, not self.transposed, partials, bench.algorithm)
        plan = make_plan(problem, rows, world.backend.sm_count)
        nodes = node_sums(plan, world.rank, lambda rank: (self._shard(rank), self._contiguous(self._columns(rank))))
        return worst_sum(self.timing.xp, self.c, nodes)

    def _contiguous(self, b: Any) -> Any:
        xp = self.timing.xp
        return xp.ascontiguousarray(b.T.view(xp.uint16).T if self.transposed else b.view(xp.uint16)).view(self.c.dtype)

    def __str__(self) -> str:
        b = "(N, K).T" if self.transposed else "(K, N)"
        return f"{self.op} M={self.m} N={self.n} K={self.k} {self.timing.dtype} b {b} seed {self.seed}"


class Bench:
    """The world under test with the helpers of the benchmark."""

    def __init__(self, world: Any, options: argparse.Namespace) -> None:
        self.world, self.options, self.op = world, options, options.op
        self.algorithm = self.op if self.op in ("one_shot", "two_shot") else None
        self.name = "gemm_allreduce" if self.algorithm else self.op
        self.random = random.Random(options.seed)  # the same on all ranks: they must draw the same shapes
        self.own_random = random.Random(options.seed * 1000 + world.rank)
        self.timings = {dtype: CudaTiming(world, dtype) for dtype in ("bfloat16", "float16")}
        self.timing = self.timings["float16"]  # made last: its stream is the current one
        self.timings["bfloat16"].stream = self.timing.stream

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
            self.timing.synchronize()
            sums = [zlib.crc32(output.view(self.timing.xp.uint16).get().tobytes()) for output in outputs]
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
        xp = self.timing.xp
        self.timing.synchronize()
        wrong = [i for i, (o, e) in enumerate(zip(outputs, expected, strict=True)) if bool((o.view(xp.uint16) != e.view(xp.uint16)).any())]
        found = gather(self.world, wrong[:20])
        if any(found):
            raise AssertionError(f"{what}: outputs that differ, by rank: {found}")

    def close(self) -> None:
        for timing in self.timings.values():
            timing.close()
