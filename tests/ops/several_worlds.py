"""A rank of ``test_several_worlds``: a random program of several worlds, whose members are any of its processes. One line of JSON per rank.

Everything is drawn from TEST_SEED, alike in all processes. Operands are small integers, so that all sums are exact. With TEST_TARGET=cuda
it runs on GPUs: ``TEST_TARGET=cuda TEST_SEED=1 mpirun -n 4 python tests/ops/several_worlds.py``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpi4py import MPI

import mkernel as mk
from tests.runtime.worker import tell

CALLS = 14
_OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
_TARGET = os.environ.get("TEST_TARGET", "cpu")
_OPEN = 4  # at most so many partitions of the processes at a time
_ROWS, _K, _N = 139, 88, 64  # at most
_PROCESSES = 8
_PLANE = _PROCESSES * _ROWS * max(_K, _N)


@dataclasses.dataclass
class Partition:
    """Worlds of which every process is in one at most, by its color, at a place that its key decides."""

    colors: list[int]  # by process; -1: in none
    keys: list[int]
    per_node: int | None
    world: Any = None
    planes: tuple[Any, ...] = ()  # on its world's heap: for an operand, and for a result

    def members(self, color: int) -> list[int]:
        return sorted((process for process, other in enumerate(self.colors) if other == color), key=lambda process: self.keys[process])


def draw(rng: np.random.Generator, size: int) -> Partition:
    """Any members in any order; nodes of one rank only where all worlds may have them."""
    colors = rng.integers(-1 if rng.random() < 0.5 else 0, rng.integers(1, 4), size)
    return Partition(colors.tolist(), rng.permutation(size).tolist(), 1 if rng.random() < 0.25 else None)


def opened(partition: Partition, comm: Any) -> Partition:
    color, key = partition.colors[comm.rank], partition.keys[comm.rank]
    part = comm.Split(color if color >= 0 else MPI.UNDEFINED, key)
    if color >= 0:
        partition.world = mk.init(part, target=_TARGET, heap_bytes=1 << 22, timeout=60.0, max_sms=4, ranks_per_node=partition.per_node)
        partition.planes = tuple(partition.world.empty((_PLANE,), "float16") for _ in range(2))
    return partition


def operands(seed: int, number: int, process: int, rows: int, k: int, n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng([seed, number, process])
    return rng.integers(-2, 3, (rows, k)).astype(np.float16), rng.integers(-2, 3, (k, n)).astype(np.float16)


def expected(op: str, all_operands: list[tuple[NDArray[Any], NDArray[Any]]], rank: int) -> NDArray[Any]:
    exact = [(a.astype(np.float32), b.astype(np.float32)) for a, b in all_operands]
    if op == "allgather_gemm":
        return np.concatenate([a for a, _ in exact]) @ exact[rank][1]
    total: NDArray[Any] = sum((a @ b for a, b in exact), start=np.float32(0))
    return total if op == "gemm_allreduce" else np.split(total, len(exact))[rank]


def on_heap(partition: Partition, which: int, shape: tuple[int, ...]) -> Any:
    """An array on the heap of a partition's world; None where this process is in none of its worlds."""
    if partition.world is None:
        return None
    return partition.planes[which][: shape[0] * shape[1]].reshape(shape)


def problem(seed: int, number: int, partition: Partition, heaps: list[Partition], process: int, op: str, sizes: list[int]) -> str | None:
    """Make a call in this process's world, if it has one; what is wrong with the result. ``heaps``: where operand and result lie."""
    world, (rows, k, n) = partition.world, sizes
    if world is None:
        return None
    members = partition.members(partition.colors[process])
    rows *= world.size if op == "gemm_reduce_scatter" else 1
    right = expected(op, [operands(seed, number, member, rows, k, n) for member in members], world.rank)
    a, b = (world.xp.asarray(x) for x in operands(seed, number, process, rows, k, n))
    there = on_heap(heaps[0], 0, a.shape)
    if there is not None:
        there[...] = a
        a = there
    c = getattr(mk, op)(a, b, world=world, out=on_heap(heaps[1], 1, right.shape))
    found = c if _TARGET == "cpu" else c.get()
    return None if found.shape == right.shape and (found.astype(np.float32) == right).all() else f"call {number}: {op} {sizes} of {members}"


def program(seed: int, comm: Any) -> list[str]:
    rng, found = np.random.default_rng([seed, 1]), list[str]()
    partitions = [opened(draw(rng, comm.size), comm) for _ in range(2)]
    for number in range(CALLS):
        if rng.random() < 0.2 and len(partitions) < _OPEN:
            partitions.append(opened(draw(rng, comm.size), comm))
        if rng.random() < 0.1 and len(partitions) > 1:
            gone = partitions.pop(rng.integers(len(partitions)))
            if gone.world is not None:
                gone.world.close()
        partition = partitions[rng.integers(len(partitions))]
        op, sizes = _OPS[rng.integers(3)], [int(rng.integers(_ROWS + 1)), *(8 * int(rng.integers(1, most // 8 + 1)) for most in (_K, _N))]
        heaps = [partitions[rng.integers(len(partitions))] for _ in range(2)]  # of any worlds, also of others than the call's
        wrong = problem(seed, number, partition, heaps, comm.rank, op, sizes)
        found += [wrong] if wrong else []
    for partition in rng.permutation(np.array(partitions, object)):
        if partition.world is not None:
            partition.world.close()
    return found


if __name__ == "__main__":
    tell(rank=MPI.COMM_WORLD.rank, problems=program(int(os.environ["TEST_SEED"]), MPI.COMM_WORLD))
