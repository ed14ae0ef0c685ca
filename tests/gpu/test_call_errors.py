"""Refused calls on real GPUs, where hosts run ahead of their kernels: eager, after other ops, and in replays of graphs."""

from __future__ import annotations

from typing import Any

import pytest

import mkernel as mk
from mkernel.runtime.cuda.gpus import available
from tests.small_op.op import GatheredRows, allgather_rows
from tests.small_op.plan import RowsError

pytestmark = pytest.mark.gpu

ROUNDS = 20
COLUMNS = 512


class Program:
    """Calls of a rank; rank r has 3 + r rows, all of r + 1."""

    def __init__(self, world: Any) -> None:
        self.world, self.xp = world, world.xp
        self.x = self.xp.full((3 + world.rank, COLUMNS), world.rank + 1, self.xp.float16)
        self.room = sum(3 + rank for rank in range(world.size))
        self.a, self.b = self.xp.ones((64, 64), self.xp.float16), self.xp.ones((64, 64), self.xp.float16)

    def right(self) -> bool:
        rows, offsets = allgather_rows(self.x, max_rows=self.room)
        counts = [3 + rank for rank in range(self.world.size)]
        expected = [rank + 1 for rank, count in enumerate(counts) for _ in range(count)]
        return rows[:, 0].get().tolist() == expected and offsets.get().tolist() == [sum(counts[:r]) for r in range(len(counts) + 1)]

    def refused(self, then: int) -> int:
        """A refused call and others after it, until the error comes. Its number."""
        try:
            allgather_rows(self.x, max_rows=self.room - 1)
            for _ in range(then):
                mk.allgather_gemm(self.a, self.b)
                allgather_rows(self.x, max_rows=self.room)
            self.world.synchronize()
        except RowsError as error:
            return error.call
        raise AssertionError("the call was not refused")

    def graph(self) -> tuple[Any, Any, Any]:
        """A graph of a refused call and two right ones, its stream, and what must live as long."""
        xp, stream = self.xp, self.xp.cuda.Stream(non_blocking=True)
        outs = [
            GatheredRows(xp.empty((room, COLUMNS), xp.float16), xp.empty(self.world.size + 1, xp.int32))
            for room in (self.room - 1, self.room, self.room)
        ]
        mk.plan("allgather_rows", self.x, max_rows=self.room)
        xp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            for out in outs:
                allgather_rows(self.x, max_rows=len(out.rows), out=out)
            graph = stream.end_capture()
        return graph, stream, outs


def program(world: Any) -> list[Any]:
    calls = Program(world)
    mk.allgather_gemm(calls.a, calls.b)  # agreed on here: later calls of it are launched at once
    assert calls.right()
    told = []
    for number in range(ROUNDS):
        told.append(calls.refused(then=(number + 2 * world.rank) % 5))
        assert calls.right(), number
    graph, stream, keep = calls.graph()
    for number in range(ROUNDS):
        for _ in range(1 + (number + world.rank) % 3):  # more replays on one rank than on another
            graph.launch(stream)
        with pytest.raises(RowsError) as caught:
            world.synchronize()
        told.append(caught.value.call)
        assert caught.value.skipped == 3 * (1 + (number + world.rank) % 3) - 1
        assert calls.right(), number
    del keep
    world.barrier()
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_world_goes_on(ranks: int) -> None:
    if len(available()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    try:
        told = mk.launch(program, ranks, target="cuda", heap_bytes=1 << 26, timeout=5.0, entry_timeout=20.0)
    finally:
        mk.shutdown()
    assert told == [told[0]] * ranks, "every rank is told of the same calls"
