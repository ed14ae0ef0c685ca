"""Calls of any size on target cpu, every element checked: right whatever was prepared, agreed on, and where the heap ends."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, Error
from tests.ops.body import Case, Rank, Result, Use, problems, topology, use_of
from tests.ops.sizes import OPS, counted, draw_rows, mismatch_of, wrongly_told

WORLDS = ("1x1", "1x2", "2x2")
MOST, CALLS = 300, 8
EVERY = [(world, op, algorithm) for world in WORLDS for op, algorithm in OPS]
IDS = ["-".join(filter(None, one)) for one in EVERY]
ONE_IN_TWO_NODES = EVERY.index(("2x2", "allgather_gemm", None))


def some(*chosen: int) -> Any:
    """One test for each op, algorithm and world; only ``chosen`` in `make test`: each compiles kernels of its own."""
    marks = [pytest.param(*one, id=IDS[i], marks=() if i in chosen else pytest.mark.slow) for i, one in enumerate(EVERY)]
    return pytest.mark.parametrize(("world", "op", "algorithm"), marks)


def case_of(rng: np.random.Generator, op: str, algorithm: str | None) -> Case:
    """A random number of columns up to a tile, so that one kernel serves them."""
    partials = str(rng.choice(("output", "float32"))) if op != "allgather_gemm" else "output"
    n, k = (8 * int(rng.integers(1, 9)) for _ in range(2))
    return Case("bfloat16", k, n, op=op, partials=partials, algorithm=algorithm)


def run(fn: Any, world: str, *args: Any, **options: Any) -> list[Any]:
    shape = topology(world)
    defaults = {"heap_bytes": 32 << 20, "timeout": 5.0, "entry_timeout": 60.0, "specialize": "none"}
    return mk.launch(fn, shape.size, shape.ranks_per_node, "cpu", args, **{**defaults, **options})


def sequence(seed: int, most: int = MOST) -> list[int]:
    rng = np.random.default_rng([seed, 1])
    return [draw_rows(rng, most) for _ in range(CALLS)]


# ---- what was prepared


def laid(number: int, world: Any, case: Case) -> Use:
    """Where the arrays of a call lie: on every rank elsewhere, with operands of the same values."""
    use, mine = use_of(number, case), use_of(3 * number + world.rank, case)
    return dataclasses.replace(use, on_heap=mine.on_heap, out=mine.out)


def _planned(world: Any, case: Case, seed: int, max_rows: int | None) -> tuple[list[Result], dict[str, int]]:
    rank, found = Rank(world, case, seed, (MOST,)), dict[str, int]()
    if max_rows is None:
        return [rank.call(i, rows, laid(i, world, case)) for i, rows in enumerate(sequence(seed))], {}
    mk.plan(case.op, rank.on_heap[: case.k * world.size].reshape(-1, case.k)[: case.rows_of_a(1, world.size)],
            np.empty((case.k, case.n), rank.on_heap.dtype), max_rows=case.rows_of_a(max_rows, world.size), **case.options)  # fmt: skip
    with counted(world) as counts:
        results = [rank.call(i, rows, laid(i, world, case)) for i, rows in enumerate(sequence(seed))]
    found.update(counts)
    return results, found


@some(*range(len(OPS) + 1, 2 * len(OPS)), ONE_IN_TWO_NODES)
def test_sizes_after_a_plan_cost_nothing_and_have_the_same_bits(
    rng: np.random.Generator, world: str, op: str, algorithm: str | None
) -> None:
    """Calls of other rows each, right on every rank; the same bits under another ``max_rows``, and without a plan."""
    case, seed = case_of(rng, op, algorithm), int(rng.integers(1 << 31))
    bits = []
    for max_rows in (MOST, int(rng.integers(MOST, 4 * MOST)), None):
        by_rank = run(_planned, world, case, seed, max_rows, seed=int(rng.integers(1 << 31)))
        assert [problems(results) for results, _ in by_rank] == [[]] * len(by_rank), (case, seed, max_rows)
        assert [found for _, found in by_rank] == [{}] * len(by_rank), (case, seed, max_rows)
        bits.append([[result.c.tobytes() for result in results] for results, _ in by_rank])
    assert bits[0] == bits[1] == bits[2], (case, seed)


def _specialized(world: Any, case: Case, seed: int) -> list[bytes]:
    rank = Rank(world, case, seed, (MOST,))
    return [rank.call(i, rows, laid(0, world, case)).c.tobytes() for i, rows in enumerate(sequence(seed)[:4])]


@some(2 * len(OPS) + 1)
def test_what_is_compiled_in_changes_no_bit(rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """Nothing, everything and each field by itself."""
    case, seed = case_of(rng, op, algorithm), int(rng.integers(1 << 31))
    first = run(_specialized, world, case, seed)
    for specialize in ("all", "n", "k", "split"):
        assert run(_specialized, world, case, seed, specialize=specialize) == first, (case, seed, specialize)


# ---- ranks that disagree


def rows_for(seed: int) -> list[int]:
    return [1 + number for number in sequence(seed, MOST - 2)]


def other_of(case: Case, kind: str) -> Case:
    return dataclasses.replace(case, k=case.k + 8 * (kind == "k"), row_major=case.row_major != (kind == "layout"))


def _planted(world: Any, case: Case, seed: int, kind: str, who: int, at: int) -> tuple[str, bool]:
    other = other_of(case, kind)
    rank, wrong = Rank(world, case, seed, (MOST,)), Rank(world, other, seed, (MOST,))
    rows = rows_for(seed)
    rank.call(0, rows[at], use_of(0, case))
    if kind != "rows":
        wrong.call(0, rows[at], use_of(0, case))
    world.barrier()
    calls = world.call_number + at + 1
    try:
        for i in range(at):
            rank.call(i, rows[i], use_of(i, case))
        if world.rank == who:
            wrong.call(at, rows[at] + (kind == "rows"), use_of(at, case))
        else:
            rank.call(at, rows[at], use_of(at, case))
        world.barrier()
    except Error as error:
        return mismatch_of(world, error, calls)
    return "no error", False


@some(1 + len(OPS), 2 * len(OPS))
def test_a_rank_with_other_rows_is_found_by_all(rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """A rank of any node may differ: all ranks say who asked for what. Also another layout and another K, of problems that all know."""
    size, case = topology(world).size, case_of(rng, op, algorithm)
    if size == 1:
        return
    for kind in ("rows", "rows", "layout", "k"):
        seed, who, at = (int(one) for one in rng.integers((1 << 31, size, CALLS)))
        found = run(_planted, world, case, seed, kind, who, at, seed=seed)
        asked = [rows_for(seed)[at] + (kind == "rows" and rank == who) for rank in range(size)]
        cases = [other_of(case, kind) if rank == who else case for rank in range(size)]
        titles = [f"{op}: a ({case.rows_of_a(rows, size)}, {one.k})" for rows, one in zip(asked, cases, strict=True)]
        assert wrongly_told(found, titles) == [], (case, seed, kind, who, at)


# ---- where the heap ends


def _grow(world: Any, case: Case, seed: int, step: int, most: int) -> tuple[list[str], int, int]:
    """Rows grow until the heap is full, between arrays of all ages; what is wrong, the rows that ran last, and the heap to ask for."""
    arrays, results = [world.empty(3000, "uint8")], list[Result]()
    rank = Rank(world, case, seed, (1,))
    rank.shape = (case.rows_of_a(most, world.size), case.k)
    rank.ordinary = np.zeros(rank.shape[0] * (case.k + 8), rank.ordinary.dtype)
    arrays.append(world.empty(2000, "uint8"))
    for number, array in enumerate(arrays):
        array[...] = number + 1
    ran, needed = 0, 0
    use = use_of(4 * 0, case)
    for rows in range(step, most + 1, step):
        try:
            results.append(rank.call(len(results), rows, use))
        except ArgumentError as error:
            found = re.search(r"mk\.init\(heap_bytes=(\d+)\)", str(error))
            assert found, str(error)
            needed = int(found[1])
            break
        ran = rows
        if rows == 2 * step:
            arrays.append(world.empty(100, "uint8"))
            arrays[-1][...] = len(arrays)
    for rows in (step, 0, ran):  # the world goes on
        results.append(rank.call(len(results), rows, use))
    if not needed:
        arrays.append(world.empty(100, "uint8"))
        arrays[-1][...] = len(arrays)
    wrong = problems(results)
    wrong += [f"array {number} has changed" for number, array in enumerate(arrays) if not (array == number + 1).all()]
    world.barrier()
    return wrong, ran, needed


@some(2 * len(OPS))
def test_rows_grow_to_the_end_of_the_heap(rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """Every call is right, the first that does not fit is refused on all ranks alike, and runs in a heap as large as it says."""
    case, seed = case_of(rng, op, algorithm), int(rng.integers(1 << 31))
    case = Case("bfloat16", 256, 64, op=op, partials="float32" if op != "allgather_gemm" else "output", algorithm=algorithm)
    size, step, most = topology(world).size, 64 if op == "allgather_gemm" else 256, 4096
    found = run(_grow, world, case, seed, step, most, heap_bytes=512 << 10)
    assert found == [found[0]] * size
    wrong, ran, needed = found[0]
    assert wrong == [], (case, seed)
    if size == 1:
        return  # no workspace
    assert needed, ran
    again = run(_grow, world, case, seed, step, ran + step, heap_bytes=needed)
    assert [wrong for wrong, *_ in again] == [[]] * size
    assert again[0][1] == ran + step, (case, seed, ran, needed)
