"""Small calls of every op. Those of the GEMMs have exact results, so that a rank can know them without the others' inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mkernel as mk
from tests.gpu import drawn

OPS = ("allgather_gemm", "gemm_reduce_scatter", "one_shot", "two_shot")  # ops, and algorithms of gemm_allreduce
EVERY_OP = (*OPS, *drawn.FAMILIES)


def started(world: Any, op: str, rows: int, n: int, k: int, transposed: bool = False) -> Callable[[], bool]:
    """A call that has been made. What is returned says whether its result is right, once the device is idle; it keeps the operands.

    Of attention and MoE ops ``k`` is the seed of the call.
    """
    if op in OPS:
        c, expected, operands = fused(world, op, rows, n, k, transposed)
        return lambda: bool((c == expected).all()) and bool(operands)
    family = drawn.draw(world, op, k, "sanitizer")
    arrays = family.arrays(0)
    results = family.call(arrays)

    def right() -> bool:
        print(*(found := family.found(0, results)), sep="\n", end="\n" if found else "", flush=True)
        return not found and bool(arrays)

    return right


def fused(world: Any, op: str, rows: int, n: int, k: int, transposed: bool = False) -> tuple[Any, Any, tuple[Any, Any]]:
    """The result, what it must be, and the operands (which must live until the kernel has ended).

    A holds its rank + 1, where a rank has rows of its own, and else half of that in its second half; B holds ones.
    """
    xp, size = world.xp, world.size
    rows_a = rows * size if op == "gemm_reduce_scatter" else rows
    a = xp.full((rows_a, k), world.rank + 1, dtype="float16")
    b = xp.ones((n, k), dtype="float16").T if transposed else xp.ones((k, n), dtype="float16")
    if op == "allgather_gemm":
        c = mk.allgather_gemm(a, b, world=world)
        expected = (xp.repeat(xp.arange(1, size + 1), rows)[:, None] * k).astype("float16")
        return c, expected, (a, b)
    scale = (xp.arange(rows_a) % 2 + 1).astype("float16")  # rows that differ
    a *= scale[:, None]
    total = (scale * (k * size * (size + 1) // 2))[:, None]
    if op == "gemm_reduce_scatter":
        return mk.gemm_reduce_scatter(a, b, world=world), total[world.rank * rows :][:rows], (a, b)
    return mk.gemm_allreduce(a, b, world=world, algorithm=op), total, (a, b)
