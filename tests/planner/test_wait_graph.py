"""The wait graph itself: it finds the cycles there are, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from mkernel.planner.proofs.wait_graph import Step, WaitGraph


def graph_of(edges: list[tuple[int, int]]) -> WaitGraph:
    graph = WaitGraph()
    for step, before in edges:
        graph.add((before,))
        graph.add((step,), [(before,)])
    return graph


@pytest.mark.parametrize(
    "edges",
    [[], [(1, 0)], [(1, 0), (2, 0), (3, 1), (3, 2)], [(i, j) for i in range(8) for j in range(i)], [(i + 1, i) for i in range(20000)]],
    ids=["empty", "pair", "diamond", "complete", "long"],
)
def test_no_cycle(edges: list[tuple[int, int]]) -> None:
    assert graph_of(edges).find_cycle() is None


@pytest.mark.parametrize(
    ("edges", "length"),
    [
        ([(0, 0)], 1),
        ([(1, 0), (0, 1)], 2),
        ([(9, 8), (8, 7), (0, 1), (1, 2), (2, 0), (3, 0)], 3),
        ([(i, (i + 1) % 5000) for i in range(5000)], 5000),
    ],
    ids=["itself", "pair", "beside others", "long"],
)
def test_a_cycle(edges: list[tuple[int, int]], length: int) -> None:
    graph = graph_of(edges)
    cycle = graph.find_cycle()
    assert cycle is not None
    assert len(cycle) == length
    check_cycle(graph, cycle)


def check_cycle(graph: WaitGraph, cycle: list[Step]) -> None:
    for step, waited_for in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert waited_for in graph.before(step), cycle


def test_against_a_topological_sort(rng: np.random.Generator) -> None:
    """Random graphs around the number of edges where cycles begin."""
    found = 0
    for _ in range(300):
        edges = [(int(a), int(b)) for a, b in rng.integers(0, 12, (rng.integers(6, 16), 2)) if a != b]
        left = set(edges)
        while sources := {a for a, _ in left} - {b for _, b in left}:
            left = {(a, b) for a, b in left if a not in sources}
        graph = graph_of(edges)
        cycle = graph.find_cycle()
        assert (cycle is not None) == bool(left), edges
        if cycle is not None:
            check_cycle(graph, cycle)
            found += 1
    assert 20 < found < 280, "both kinds must come up"


def test_missing_steps() -> None:
    graph = WaitGraph()
    graph.chain([("a",), ("b",), ("c",)])
    graph.add(("b",), [("d",), ("a",)])
    assert graph.missing() == {("d",)}
    assert graph.before(("b",)) == [("a",), ("d",), ("a",)]
    assert list(graph) == [("a",), ("b",), ("c",)]
    assert len(graph) == 3
