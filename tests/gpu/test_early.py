"""Kernels of a world of one begin while those before them still run: chains of calls that read what the ones before them have written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mkernel as mk

pytestmark = pytest.mark.gpu

OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
LINKS = 60


@pytest.fixture
def world() -> Iterator[Any]:
    with mk.init(target="cuda", timeout=5.0) as world:
        yield world


class Chain:
    """Products with permutation matrices, some followed by a kernel of CuPy's, in two buffers in turn: exact, and known on the host."""

    def __init__(self, world: Any, seed: int, rows: int, size: int) -> None:
        import cupy

        self.xp, self.world = cupy, world
        order = np.random.default_rng(seed)
        first = order.integers(-64, 64, (rows, size)).astype(np.float16)
        permutations = [order.permutation(size) for _ in range(4)]
        self.matrices = [cupy.asarray(np.eye(size, dtype=np.float16)[permutation]) for permutation in permutations]
        self.buffers = cupy.zeros((2, rows, size), np.float16)
        drawn = zip(order.integers(0, len(OPS), LINKS), order.integers(0, 4, LINKS), order.integers(0, 3, LINKS), strict=True)
        self.links = [(OPS[op], int(matrix), int(added)) for op, matrix, added in drawn]
        last = first.astype(np.float32)
        for _, matrix, added in self.links:
            moved = np.empty_like(last)
            moved[:, permutations[matrix]] = last
            last = moved + np.float32(added == 2)
        self.last = last
        self.start, self.stream = cupy.asarray(first), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()

    def run(self) -> None:
        self.buffers[0] = self.start
        for number, (op, matrix, added) in enumerate(self.links):
            at, to = self.buffers[number % 2], self.buffers[(number + 1) % 2]
            getattr(mk, op)(at, self.matrices[matrix], out=to, world=self.world)
            if added == 2:
                to += np.float16(1)

    def wrong(self) -> int:
        """Elements that are not what they must be."""
        return int((self.buffers[LINKS % 2].get() != self.last).sum())


@pytest.mark.parametrize("number", range(8))
def test_a_call_reads_what_the_one_before_it_has_written(request: pytest.FixtureRequest, world: Any, number: int) -> None:
    """One row to waves of tiles, few bytes and many: whether the next call may begin depends on both (``lets_next_begin``)."""
    seed = request.config.getoption("--seed") * 8 + number
    order = random.Random(seed)
    rows, size = round(2048 ** order.random()), 8 * round(64 * 6 ** order.random())
    chain = Chain(world, seed, rows, size)
    with chain.stream:
        for _ in range(5):
            chain.run()
            chain.stream.synchronize()
            assert chain.wrong() == 0
        chain.stream.begin_capture()
        chain.run()
        graph = chain.stream.end_capture()
        for _ in range(5):
            chain.buffers[...] = 0
            graph.launch(chain.stream)
            chain.stream.synchronize()
            assert chain.wrong() == 0, "in a graph"
