"""Which heights of tiles of swapped operands kernels are compiled for (planner/heights.py)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel.planner import candidates, choice, heights
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan
from mkernel.planner.heights import bits_of, every_height, heights_of, most_wanted, usual_heights, with_heights
from mkernel.planner.machine import H200
from mkernel.planner.predict import predict
from mkernel.planner.reduce import ALLREDUCE, ReduceProblem
from mkernel.planner.row_classes import EXAMINED_ROWS, class_of, classes
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

_SOME = (16, 48, 64, 72, 88, 120, 136, 144, 152, 192, 200, 248, 256)


def drawn_heights(rng: np.random.Generator) -> dict[int, float]:
    return {int(height): float(rng.uniform(0.01, 1)) for height in rng.choice(_SOME, rng.integers(1, len(_SOME) + 1), replace=False)}


def problem_of(rng: np.random.Generator, ranks: int = 1) -> AllGatherGemmProblem:
    n, k = (8 * int(2 ** rng.uniform(7, 11)) for _ in range(2))
    return AllGatherGemmProblem(Topology(ranks, ranks), n, k, "bfloat16", False)


def test_bits_say_which_heights_there_are(rng: np.random.Generator) -> None:
    for _ in range(50):
        drawn = tuple(sorted(drawn_heights(rng)))
        assert heights_of(bits_of(drawn)) == drawn
    assert bits_of((8, 24, 256)) == 1 << 31 | 0b101


def test_few_heights_are_kept_and_each_kernel_has_few(rng: np.random.Generator) -> None:
    """The highest of each kind is among them, and none is left out without need."""
    for _ in range(100):
        wanted = {kind: drawn_heights(rng) for kind in "abcdefgh"[: rng.integers(1, 9)]}
        sizes = {kind: int(rng.integers(1, 3)) for kind in wanted}
        found = most_wanted(wanted, sizes)
        left = {kind: [height for kernel in kernels for height in kernel] for kind, kernels in found.items()}
        assert left.keys() == wanted.keys()
        rows = 0
        for kind, of_kind in left.items():
            assert of_kind == sorted(set(of_kind) & set(wanted[kind])), "in order, each once"
            assert of_kind[-1] == max(wanted[kind])
            size = sizes[kind]
            assert all(len(kernel) == 1 or size * sum(kernel) <= 1200 + size * kernel[-1] for kernel in found[kind])
            assert len(found[kind]) <= math.ceil(size * sum(of_kind) / 1200)
            rows += size * sum(of_kind)
        dropped = [wanted[kind].keys() - set(of_kind) for kind, of_kind in left.items()]
        assert rows <= 4800 or all(len(of_kind) == 1 for of_kind in left.values())
        assert not any(dropped) or rows > 4800 - 2 * 256, "none is left out for nothing"


def test_what_no_class_wants_goes_first() -> None:
    wanted = dict.fromkeys(every_height(), 1.0) | {144: 1e-9, 200: 1e-9}
    for kernels in most_wanted({"first": wanted, "second": wanted}, {"first": 1, "second": 1}).values():
        assert not {144, 200} & {height for kernel in kernels for height in kernel}
        assert len(kernels) == 2


def test_a_plan_with_few_heights_has_as_many_rows_of_tiles_as_it_needs(rng: np.random.Generator) -> None:
    for _ in range(200):
        rows, tile_rows = map(int, rng.integers(1, (3000, 12)))
        plan = make_plan(problem_of(rng), rows, 132, tiling=Tiling(tile_rows=tile_rows))
        kernels = most_wanted({0: drawn_heights(rng)}, {0: 2})[0]
        few = with_heights(plan, kernels)
        assert few.heights in kernels and few.block_rows in few.heights
        assert few.swapped == few.tile_rows and (few.tile_rows - 1) * few.block_rows < rows <= few.tile_rows * few.block_rows
        all_of_them = [height for kernel in kernels for height in kernel]
        possible = [height for height in all_of_them if height * plan.swapped >= rows]
        assert few.block_rows == min(possible, default=few.block_rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_class_has_a_kernel_with_its_height(ranks: int, rng: np.random.Generator) -> None:
    """Also of classes that were not looked at, and calls of fewer rows than the most of their class."""
    chosen = swapped = 0
    while chosen < 4 or not swapped:
        chosen += 1
        problem = problem_of(rng, ranks)
        for rows in map(int, 2 ** rng.uniform(0, 21, 80)):
            plan = choice.plan_allgather_gemm(problem, rows, 132, machine=H200)
            if plan.swapped:
                swapped += 1
                assert plan.block_rows in plan.heights
                assert len(plan.heights) == 1 or sum(plan.heights) <= 1200 + plan.heights[-1]
                assert (plan.tile_rows - 1) * plan.block_rows < plan.plane_rows <= plan.tile_rows * plan.block_rows
                assert dict(plan.spec.constants)["kHeights"] == bits_of(plan.heights)


def test_calls_take_less_than_by_the_usual_heights(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]
) -> None:
    """In the mean over many rows, by prediction, by as many kinds of kernels."""
    problems = [problem_of(rng) for _ in range(4)]
    few = [rows for rows in classes(EXAMINED_ROWS) if 64 <= rows <= 8192][::3]

    def logarithms() -> list[float]:
        forget_choices()
        return [math.log(of_class(problem, rows)) for problem in problems for rows in few]

    def of_class(problem: Any, rows: int) -> float:
        return seconds_of(choice.choose(problem, rows, 132, H200, "n,k"))

    fine = logarithms()
    monkeypatch.setattr(candidates, "every_height", usual_heights)
    monkeypatch.setattr(heights, "_MOST", 1 << 20)
    monkeypatch.setattr(heights, "_MOST_OF_KERNEL", 1 << 20)
    assert np.mean(fine) < np.mean(logarithms())


def test_a_kernel_that_serves_all_n_and_k_has_the_usual_heights() -> None:
    problem = AllGatherGemmProblem(Topology(1, 1), 2560, 8200, "bfloat16", False)
    for specialize, heights_of_kind in (("none", usual_heights), ("n,k", every_height)):
        plans = [plan for plan in candidates.candidates(problem, 448, 132, specialize) if plan.swapped and plan.columns == 128]
        assert {plan.cluster_n for plan in plans} == {1, 2, 4}
        for plan in plans:
            assert plan.tiles_at_once > 1 or plan.heights == heights_of_kind(unit=8 * plan.cluster_n)
    sums = ReduceProblem(ALLREDUCE, Topology(2, 2), 2560, 1032, "bfloat16", False)
    plans = [plan for plan in candidates.candidates(sums, 192, 132, "n,k") if plan.swapped]
    assert {(plan.cluster_n, plan.heights) for plan in plans} == {(cluster_n, tuple(range(16, 193, 16))) for cluster_n in (1, 2)}


def test_a_height_is_asked_for(rng: np.random.Generator) -> None:
    problem = problem_of(rng)
    for (columns, at_once), cluster_n in itertools.product(((64, 1), (128, 1), (192, 1), (256, 1), (128, 2)), (1, 2, 4)):
        for block_m in range(16, 257, 8):
            tiling = Tiling(columns, cluster_n=cluster_n, tiles_at_once=at_once, block_m=block_m)
            if block_m in every_height(columns, at_once, unit=8 * cluster_n):
                plans = [make_plan(problem, rows, 132, tiling=tiling) for rows in (1, 1000, class_of(1000))]
                assert {(plan.block_rows, plan.heights) for plan in plans} == {(block_m, (block_m,))}
                assert len({plan.spec for plan in plans}) == 1
            else:
                with pytest.raises(TilingError, match=f"with {columns} columns.*, block_m must be one of"):
                    make_plan(problem, 1000, 132, tiling=tiling)
    for wanted in ({"block_m": 20}, {"block_m": 8}, {"block_m": 64, "tile_rows": 1}):
        with pytest.raises(ValueError, match="block_m"):
            Tiling.parse(wanted)
    numbers = {dataclasses.replace(Tiling(), **{name: 64}).number for name in ("block_m", "tile_rows", "block_n", "span")}
    assert len(numbers) == 4


def seconds_of(plan: Any) -> float:
    prediction = predict(plan, H200)
    assert prediction is not None
    return prediction.seconds


def test_calls_take_hardly_longer_than_by_kernels_of_all_heights(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]
) -> None:
    """In the mean over many rows, by prediction: what matters is which heights classes want, so that many are asked."""
    problems = [problem_of(rng) for _ in range(6)]

    def longer() -> float:
        forget_choices()
        found = [
            math.log(seconds_of(choice.choose(problem, rows, 132, H200, "n,k")) / seconds_of(of_any_height(problem, rows)))
            for problem in problems
            for rows in [rows for rows in classes(16384) if rows >= 256][::3]
        ]
        assert min(found) > -1e-9
        return float(np.mean(found))

    of_many = longer()
    monkeypatch.setattr(choice, "_HEIGHTS_PER_DOUBLING", 4)
    assert of_many < 0.9 * longer()


def of_any_height(problem: Any, rows: int) -> Any:
    return choice._of_any_height(problem, rows, 132, H200, "n,k")


def test_where_a_kernel_lacks_the_height_another_kernel_may_be_faster(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]
) -> None:
    forget_choices()
    monkeypatch.setattr(heights, "_MOST", 600)
    faster = 0
    for problem in (problem_of(rng) for _ in range(8)):
        had = choice._heights(problem, 132, H200, "n,k")
        for rows in [rows for rows in classes(4096) if rows >= 256][::5]:
            wanted = of_any_height(problem, rows)
            if wanted.swapped and wanted.spec in had:
                same = seconds_of(with_heights(wanted, had[wanted.spec]))
                found = seconds_of(choice.choose(problem, rows, 132, H200, "n,k"))
                assert found <= same / choice._WORTH * (1 + 1e-9)
                faster += found < same
    assert faster
