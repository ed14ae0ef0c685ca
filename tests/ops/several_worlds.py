"""A rank of ``test_several_worlds``: a random program of several worlds, whose members are any of its processes. One line of JSON per rank.

Everything is drawn from TEST_SEED, alike in all processes. Operands are small integers, so that all sums are exact, but of attention.
With TEST_TARGET=cuda it runs on GPUs: ``TEST_TARGET=cuda TEST_SEED=1 mpirun -n 4 python tests/ops/several_worlds.py``, where half of the
programs capture calls in CUDA graphs, of several worlds, and replay them with other operands; on target cpu a replay is the call again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpi4py import MPI

import mkernel as mk
from tests.runtime.worker import tell

CALLS = 16
_OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", "moe", "ring_attention")
_HEADS, _D = 2, 64  # of queries; one of keys and values
_TARGET = os.environ.get("TEST_TARGET", "cpu")
_SMS = 4  # of a world
_OPEN = 4  # at most so many partitions of the processes at a time
_ROWS, _K, _N = 139, 88, 64  # at most
_PROCESSES = 8
_PLANE = _PROCESSES * _ROWS * max(_K, _N)
_NEAR = 2e-3  # of attention: half a unit in the last place of weights and of results below 4


@dataclasses.dataclass
class Call:
    """``replay``, where this process takes part: works it out again, by what is in the operands then, and gives the result."""

    op: str
    sizes: list[int]
    replay: Callable[[list[NDArray[Any]]], NDArray[Any]] | None = None


@dataclasses.dataclass
class Partition:
    """Worlds of which every process is in one at most, by its color, at a place that its key decides."""

    colors: list[int]  # by process; -1: in none
    keys: list[int]
    per_node: int | None
    world: Any = None
    planes: tuple[Any, ...] = ()  # on its world's heap: for an operand, and for a result
    captured: list[Call] = dataclasses.field(default_factory=list)

    def members(self, color: int) -> list[int]:
        return sorted((process for process, other in enumerate(self.colors) if other == color), key=lambda process: self.keys[process])


def draw(rng: np.random.Generator, size: int) -> Partition:
    """Any members in any order; nodes of one rank only where all worlds may have them."""
    colors = rng.integers(-1 if rng.random() < 0.5 else 0, rng.integers(1, 4), size)
    return Partition(colors.tolist(), rng.permutation(size).tolist(), 1 if rng.random() < 0.25 else None)


def opened(partition: Partition, comm: Any, **options: Any) -> Partition:
    color, key = partition.colors[comm.rank], partition.keys[comm.rank]
    part = comm.Split(color if color >= 0 else MPI.UNDEFINED, key)
    if color >= 0:
        options = {"heap_bytes": 1 << 22, "timeout": 60.0, "max_sms": _SMS} | options
        partition.world = mk.init(part, target=_TARGET, ranks_per_node=partition.per_node, **options)
        partition.planes = tuple(partition.world.empty((_PLANE,), "float16") for _ in range(2))
    return partition


def operands(seed: int, number: int, process: int, op: str, sizes: list[int], members: int) -> list[NDArray[Any]]:
    """What a process multiplies; for "moe" its tokens, as many as it likes, the weights of its expert, and which experts each token has."""
    rng, (rows, k, n) = np.random.default_rng([seed, number, process]), sizes
    if op == "ring_attention":
        return [rng.integers(-2, 3, (1, heads, rows, _D)).astype(np.float16) for heads in (_HEADS, 1, 1)]
    rows *= members if op == "gemm_reduce_scatter" else 1
    if op == "moe" and (process + n // 8) % 2:
        rows = int(np.random.default_rng([rows, process]).integers(rows + 1))  # the same in replays
    found = [rng.integers(-2, 3, shape).astype(np.float16) for shape in ((rows, k), (k, n))]
    if op != "moe":
        return found
    ids = np.array([rng.permutation(members)[: min(2, members)] for _ in range(rows)], np.int32).reshape(rows, min(2, members))
    return [found[0], found[1][None], np.where(rng.random(ids.shape) < 0.1, np.int32(-1), ids)]


def expected(op: str, all_operands: list[list[NDArray[Any]]], rank: int, sizes: list[int]) -> NDArray[Any]:
    if op == "ring_attention":
        q, k, v = (np.concatenate([each[i] for each in all_operands], 2).astype(np.float64) for i in range(3))
        scores = q @ k.swapaxes(2, 3) / np.sqrt(_D)
        scores += np.triu(np.full(scores.shape[2:], -np.inf), 1) if is_causal(sizes) else 0
        weights = np.exp(scores - scores.max(3, keepdims=True, initial=-1e9))
        o = weights @ v / weights.sum(3, keepdims=True)
        return np.split(o.astype(np.float32), len(all_operands), 2)[rank]  # type: ignore[no-any-return]
    exact = [(a.astype(np.float32), b.astype(np.float32)) for a, b, *_ in all_operands]
    if op == "allgather_gemm":
        return np.concatenate([a for a, _ in exact]) @ exact[rank][1]
    if op == "moe":
        rows, ids = exact[rank][0], all_operands[rank][2]
        each = np.stack([rows @ b[0] for _, b in exact])  # by expert
        chosen = each[ids, np.arange(len(rows))[:, None]]
        return np.where(ids[..., None] >= 0, chosen, 0).sum(1, dtype=np.float32)
    total: NDArray[Any] = sum((a @ b for a, b in exact), start=np.float32(0))
    return total if op == "gemm_allreduce" else np.split(total, len(exact))[rank]


def is_causal(sizes: list[int]) -> bool:
    return sizes[1] // 8 % 2 == 1


def run(op: str, arrays: list[Any], sizes: list[int], **where: Any) -> Any:
    if op == "ring_attention":
        return mk.ring_attention(*arrays, causal=is_causal(sizes), **where).o
    if op != "moe":
        return getattr(mk, op)(*arrays, **where)
    x, w, ids = arrays
    d = mk.moe_dispatch_gemm(x, ids, w, max_tokens=max(1, sizes[0]), world=where["world"])
    return mk.moe_combine(d.y, d.routing, **where)


def on_heap(partition: Partition, which: int, shape: tuple[int, ...]) -> Any:
    """An array on the heap of a partition's world; None where this process is in none of its worlds."""
    if partition.world is None:
        return None
    return partition.planes[which][: math.prod(shape)].reshape(shape)


def into(world: Any, op: str, o: Any) -> Any:
    """``out`` of a call whose result is ``o``."""
    return o if op != "ring_attention" or o is None else (o, world.xp.empty(o.shape[:3], "float32"))


def possible(partition: Partition, op: str, process: int) -> bool:
    """Attention takes an SM for each other rank, and one that computes."""
    return op != "ring_attention" or len(partition.members(partition.colors[process])) <= _SMS


def problem(seed: int, number: int, partition: Partition, heaps: list[Partition], process: int, call: Call, capture: bool) -> str | None:
    """Make a call in this process's world, if it has one; what is wrong with the result. ``heaps``: where operand and result lie.

    ``capture``: the call is captured, and replayed once.
    """
    world = partition.world
    if world is None or not possible(partition, call.op, process):
        return None
    members = partition.members(partition.colors[process])
    every = [operands(seed, number, member, call.op, call.sizes, len(members)) for member in members]
    if call.replay is None:
        arrays = [world.xp.asarray(array) for array in every[world.rank]]
        there = on_heap(heaps[0], 0, arrays[0].shape)
        if there is not None:
            there[...] = arrays[0]
            arrays[0] = there
        out = on_heap(heaps[1], 1, expected(call.op, every, world.rank, call.sizes).shape)
        found = run(call.op, arrays, call.sizes, world=world, out=into(world, call.op, out))
        found = found if _TARGET == "cpu" else found.get()
        call.replay = _captured(world, call, arrays, found.shape) if capture else None
    else:
        found = call.replay(every[world.rank])
    right = expected(call.op, every, world.rank, call.sizes)
    return None if is_near(call.op, found, right) else f"call {number}: {call} of {members}"


def is_near(op: str, found: NDArray[Any], right: NDArray[Any]) -> bool:
    off = _NEAR * (1 + np.abs(right)) if op == "ring_attention" else 0
    return found.shape == right.shape and bool((np.abs(found.astype(np.float32) - right) <= off).all())


def _captured(world: Any, call: Call, arrays: list[Any], shape: tuple[int, ...]) -> Callable[[list[NDArray[Any]]], NDArray[Any]]:
    """A replay of the call by arrays of its own."""
    arrays, c = [array.copy() for array in arrays], world.xp.empty(shape, "float16")
    out = into(world, call.op, c)

    def again() -> None:
        run(call.op, arrays, call.sizes, world=world, out=out)

    launch = again
    if _TARGET == "cuda":
        stream = world.xp.cuda.get_current_stream()
        stream.begin_capture()
        again()
        graph = stream.end_capture()
        launch = lambda: graph.launch(stream)  # noqa: E731

    def replay(values: list[NDArray[Any]]) -> NDArray[Any]:
        for array, value in zip(arrays, values, strict=True):
            array[...] = world.xp.asarray(value)
        launch()
        return c if _TARGET == "cpu" else c.get()  # type: ignore[no-any-return]

    return replay


def program(seed: int, comm: Any) -> list[str]:
    """Half of the programs capture calls, of worlds of one node, in a stream of their own."""
    rng, found = np.random.default_rng([seed, 1]), list[str]()
    partitions = [opened(draw(rng, comm.size), comm) for _ in range(2)]
    captures = bool(rng.random() < 0.5)
    with _stream() if captures else contextlib.nullcontext():
        for number in range(CALLS):
            if rng.random() < 0.2 and len(partitions) < _OPEN:
                partitions.append(opened(draw(rng, comm.size), comm))
            if rng.random() < 0.1 and len(partitions) > 1:
                gone = partitions.pop(rng.integers(len(partitions)))
                gone.captured.clear()
                if gone.world is not None:
                    gone.world.close()
            partition = partitions[rng.integers(len(partitions))]
            heaps = [partitions[rng.integers(len(partitions))] for _ in range(2)]  # of any worlds, also of others than the call's
            sizes = [int(rng.integers(_ROWS + 1)), *(8 * int(rng.integers(1, most // 8 + 1)) for most in (_K, _N))]
            call, capture = Call(_OPS[rng.integers(len(_OPS))], sizes), captures and partition.per_node is None and bool(rng.random() < 0.5)
            again = [(each, other) for each in partitions for other in each.captured]
            if again and rng.random() < 0.5:
                (partition, call), capture = again[rng.integers(len(again))], False
            elif capture:
                partition.captured.append(call)
            wrong = problem(seed, number, partition, heaps, comm.rank, call, capture)
            found += [wrong] if wrong else []
    for partition in rng.permutation(np.array(partitions, object)):
        partition.captured.clear()
        if partition.world is not None:
            partition.world.close()
    return found


def _stream() -> Any:
    if _TARGET == "cpu":
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


if __name__ == "__main__":
    tell(rank=MPI.COMM_WORLD.rank, problems=program(int(os.environ["TEST_SEED"]), MPI.COMM_WORLD))
