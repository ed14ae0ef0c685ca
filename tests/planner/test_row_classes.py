"""Classes of rows: a partition that does not depend on who asks, whose calls share a kernel and whatever was set aside for them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mkernel.planner import allgather_gemm, reduce, row_classes
from mkernel.planner.row_classes import EXAMINED_ROWS, MOST_ROWS, class_of, classes, examined, span
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

MOST = 65536
TOPOLOGIES = [Topology(*shape) for shape in ((1, 1), (2, 2), (4, 4), (8, 8), (2, 1), (4, 2), (4, 1), (6, 2), (16, 8))]
OPS = (allgather_gemm.OP, reduce.REDUCE_SCATTER, reduce.ALLREDUCE)


# ---- the classes


def test_every_number_of_rows_is_in_one_class() -> None:
    """The classes cover the numbers from 1 on without gap or overlap; each is named by its last number, and knows its span."""
    ends = list(classes(MOST))
    assert ends == sorted(set(ends))
    assert [class_of(end) for end in ends] == ends
    covered = [rows for end in ends for rows in span(end)]
    assert covered == list(range(1, ends[-1] + 1))
    for rows in range(1, MOST + 1):
        assert class_of(rows) == ends[bisect.bisect_left(ends, rows)]


def test_large_numbers(rng: np.random.Generator) -> None:
    """Up to all that a matrix can have."""
    for rows in map(int, 2 ** rng.uniform(0, 31, 2000)):
        end, numbers = class_of(rows), span(rows)
        assert rows in numbers
        assert numbers[-1] == end
        assert class_of(numbers[0]) == end
        assert numbers[0] == 1 or class_of(numbers[0] - 1) == numbers[0] - 1, "the class before ends there"
        assert class_of(end + 1) > end
        assert len(numbers) <= max(16, rows / 4), "a class is a small share of what it stands for"


def test_few_large_classes_are_examined(rng: np.random.Generator) -> None:
    for most in [1, EXAMINED_ROWS, EXAMINED_ROWS + 1, MOST_ROWS, *map(int, 2 ** rng.uniform(0, 31, 20))]:
        some, every = list(examined(most)), list(classes(most))
        assert some == sorted(set(some))
        assert set(some) <= set(every)
        assert some[-1] == every[-1]
        assert [rows for rows in every if rows <= EXAMINED_ROWS] == [rows for rows in some if rows <= EXAMINED_ROWS]
        assert all(after <= 2 * before for before, after in itertools.pairwise(rows for rows in some if rows > EXAMINED_ROWS))


def test_no_rows_are_in_the_class_of_one() -> None:
    assert class_of(0) == class_of(1)
    assert span(0) == span(1)


def test_classes_do_not_depend_on_how_many_are_asked_for(rng: np.random.Generator) -> None:
    """Those of a small ``max_rows`` are the first of those of a larger one, and the last holds it."""
    every = list(classes(MOST))
    for most in rng.integers(1, MOST + 1, 500):
        some = list(classes(int(most)))
        assert some == every[: len(some)]
        assert some[-1] == class_of(int(most)) >= most
        assert len(some) == 1 or some[-2] < most


def test_there_are_few() -> None:
    """About 64 per doubling."""
    assert list(classes(32)) == [1, 2, 4, 8, 12, 16, 32]
    assert len(list(classes(256))) == 21
    assert len(list(classes(MOST))) < 330
    assert len(list(classes((1 << 31) - 1))) < 2000


# ---- what plans make of them


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem of any op, and a device."""

    op: str
    topology: Topology
    n: int
    k: int
    options: tuple[str, str | None]  # partials, algorithm
    sms: int

    def plan(self, rows: int, split: Split | None = None, specialize: str = "none") -> Any:
        if self.op == allgather_gemm.OP:
            gather = allgather_gemm.AllGatherGemmProblem(self.topology, self.n, self.k, "bfloat16", True)
            return allgather_gemm.make_plan(gather, rows, self.sms, split, specialize=specialize)
        problem = reduce.ReduceProblem(self.op, self.topology, self.n, self.k, "bfloat16", True, *self.options)
        return reduce.make_plan(problem, rows, self.sms, split, specialize=specialize)


def draw(rng: np.random.Generator, op: str, sms: tuple[int, ...] = (132,)) -> Drawn:
    n, k = (int(one) * 8 for one in 2 ** rng.uniform(0, 11.5, 2))
    topology = TOPOLOGIES[rng.integers(len(TOPOLOGIES))]
    partials = ("output", "output", "float32")[rng.integers(3)]
    algorithm = (None, None, *reduce.ALGORITHMS)[rng.integers(4)] if op == reduce.ALLREDUCE else None
    return Drawn(op, topology, n, k, (partials, algorithm), int(rng.choice(sms)))


def _some(rng: np.random.Generator, op: str, count: int) -> Iterator[Drawn]:
    """Each eight times: looking at all classes of a new problem takes longer than planning a call."""
    for _ in range(count // 8):
        yield from itertools.repeat(draw(rng, op, (4, 8, 114, 132)), 8)


@pytest.mark.parametrize("op", OPS)
def test_at_most_8_kernels_of_one_n_and_k(rng: np.random.Generator, op: str) -> None:
    """Whatever is compiled in, over all classes up to 65536 rows."""
    for specialize in ("none", "n,k", "all"):
        for _ in range(12):
            drawn = draw(rng, op)
            kernels = {drawn.plan(rows, specialize=specialize).spec for rows in classes(MOST)}
            assert len(kernels) <= 8, (specialize, drawn, len(kernels))


@pytest.mark.parametrize("op", OPS)
def test_the_most_rows_of_a_class_need_the_most_memory(rng: np.random.Generator, op: str) -> None:
    """What is set aside for a class at its first call is enough for every later one."""
    needs = "workspace_bytes", "staging_bytes", "flag_words", "packet_bytes"
    for drawn in _some(rng, op, 120):
        rows = int(2 ** rng.uniform(0, 17))
        largest, numbers = drawn.plan(class_of(rows)), span(rows)
        most = [getattr(largest, name) for name in needs]
        for number in {0 if numbers[0] == 1 else numbers[0], *map(int, rng.choice(numbers, 8))}:
            plan = largest.of_rows(number)
            assert all(getattr(plan, name) <= bound for name, bound in zip(needs, most, strict=True)), (drawn, number, numbers)


@pytest.mark.parametrize("op", OPS)
def test_examined_classes_have_all_kernels(rng: np.random.Generator, op: str) -> None:
    """Preparation compiles the kernels of the classes that it looks at: no other class needs another one."""
    for _ in range(6):
        drawn = draw(rng, op)
        most = MOST_ROWS // drawn.topology.size
        kernels = {rows: drawn.plan(rows).spec for rows in classes(most)}
        assert {kernels[rows] for rows in examined(most)} == set(kernels.values()), drawn


def test_kernels_that_few_classes_choose_are_given_up(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all choices together would be more than 8 kernels: between two ranks, for some widths, because their warps may push, too."""
    chosen, topology = 0, Topology(2, 2)
    for n in 8 * rng.permutation(np.arange(385, 505))[:20]:
        problem = allgather_gemm.AllGatherGemmProblem(topology, int(n), int(8 * 2 ** rng.uniform(1, 9)), "bfloat16", True)
        for specialize in ("all", "none"):
            few = {rows: allgather_gemm.make_plan(problem, rows, 132, specialize=specialize) for rows in classes(MOST)}
            with monkeypatch.context() as patch:
                patch.setattr(row_classes, "MOST_KERNELS", 1000)
                allgather_gemm._kept_kernels.cache_clear()
                free = {rows: allgather_gemm.make_plan(problem, rows, 132, specialize=specialize) for rows in classes(MOST)}
            allgather_gemm._kept_kernels.cache_clear()
            chosen = max(chosen, len({plan.spec for plan in free.values()}))
            assert len({plan.spec for plan in few.values()}) <= 8, (problem, specialize)
            others = [rows for rows in few if few[rows].spec != free[rows].spec]
            assert len(others) <= len(few) // 8, "few classes have another kernel than they would choose"
    assert chosen > 8, "nothing had to be given up: nothing was shown"


@pytest.mark.parametrize("op", OPS)
def test_at_most_16_kernels_of_all_n_and_k(rng: np.random.Generator, op: str) -> None:
    """With N, K and the split at run time: of one world, layout and partials, over all classes up to 65536 rows and many dims."""
    for topology in TOPOLOGIES:
        kernels: set[Any] = set()
        for _ in range(8):
            drawn = dataclasses.replace(draw(rng, op), topology=topology, options=("output", None))
            kernels |= {drawn.plan(rows).spec for rows in classes(MOST)}
        assert len(kernels) <= 16, (topology, len(kernels))


@pytest.mark.parametrize("op", OPS)
def test_calls_of_a_class_have_its_kernel(rng: np.random.Generator, op: str) -> None:
    """What is compiled for a class is what each of its calls launches, with the fewest and the most rows and any between."""
    for drawn in _some(rng, op, 400):
        numbers = span(int(2 ** rng.uniform(0, 16)))
        of_class = drawn.plan(numbers[-1])
        for rows in {0 if numbers[0] == 1 else numbers[0], numbers[0], int(rng.choice(numbers))}:
            plan = drawn.plan(rows)
            assert plan.spec == of_class.spec, (drawn, rows, numbers)
            assert plan.grid <= of_class.grid


@pytest.mark.parametrize("op", OPS)
def test_kernels_change_between_classes_only(rng: np.random.Generator, op: str) -> None:
    """Where one class has another kernel than the class before: nowhere inside either of the two."""
    changes = 0
    for _ in range(30):
        drawn = draw(rng, op)
        ends = list(classes(MOST))
        kernels = [drawn.plan(end).spec for end in ends]
        for i in (i for i in range(1, len(ends)) if kernels[i] != kernels[i - 1]):
            changes += 1
            for end, kernel in zip(ends[i - 1 : i + 1], kernels[i - 1 : i + 1], strict=True):
                numbers = span(end)
                rows = [numbers[len(numbers) * part // 16] for part in range(16)]
                assert [drawn.plan(one).spec == kernel for one in rows] == [True] * len(rows), (drawn, rows)
    assert changes, "no kernel ever changed: nothing was shown"


@pytest.mark.parametrize("op", OPS)
def test_what_is_set_aside_for_a_class_is_enough_for_its_calls(rng: np.random.Generator, op: str) -> None:
    """Workspace, staging and packets of the most rows of a class: no call of the class needs more."""
    for drawn in _some(rng, op, 400):
        numbers = span(int(2 ** rng.uniform(0, 16)))
        split = Split(compute=int(rng.integers(1, 3))) if rng.random() < 0.3 and drawn.topology.size == 1 else None
        most = drawn.plan(numbers[-1], split)
        for rows in {numbers[0], *(int(one) for one in rng.choice(numbers, 3))}:
            plan = drawn.plan(rows, split)
            for name in ("workspace_bytes", "staging_bytes", "packet_bytes"):
                assert getattr(plan, name) <= getattr(most, name), (name, drawn, rows, numbers)
