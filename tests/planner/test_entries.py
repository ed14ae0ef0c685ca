"""Entries: whoever has waited for the words of all ranks comes after the entry of each, and no word is written before it was read."""

from __future__ import annotations

import graphlib
from typing import Any

import pytest

from mkernel.planner.proofs.entries import Entries, entries
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.topology import Topology

CALLS = 4  # two of each parity
WORLDS = [(1, 1), (2, 1), (2, 2), (4, 4), (4, 1), (4, 2), (6, 2), (6, 3), (12, 4)]


def all_before(graph: WaitGraph) -> dict[Step, frozenset[Step]]:
    """For each step all that come before it."""
    found: dict[Step, frozenset[Step]] = {}
    for step in graphlib.TopologicalSorter({step: graph.before(step) for step in graph}).static_order():
        direct = graph.before(step)
        found[step] = frozenset(direct).union(*(found[before] for before in direct))
    return found


def problems(model: Entries, topology: Topology) -> list[str]:
    graph, found = model.graph, []
    assert graph.find_cycle() is None and not graph.missing()
    before = all_before(graph)
    for rank in range(topology.size):
        for call in range(CALLS):
            known = {step[1] for step in before["leave", rank, call] if step[0] == "announce" and step[2] == call}
            if known != set(range(topology.size)):
                found.append(f"rank {rank} leaves call {call} after the entry of {sorted(map(int, known))} only")
    for word, reads in model.read.items():
        writes = model.written[word]
        if len({step[1] for _, step in writes}) != 1:
            found.append(f"{word} has several writers")
        for call, reader in reads:
            for when, writer in writes:
                if (writer not in before[reader]) if when <= call else (reader not in before[writer]):
                    found.append(f"{word}: {reader} and {writer} have no order")
    return found


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_who_waits_for_all_entries_comes_after_all_of_them(world: tuple[int, int]) -> None:
    topology = Topology(*world)
    assert problems(entries(topology, CALLS), topology) == []


def test_commands_are_one_per_node() -> None:
    """What an engine carries for a call's entry, in the largest world: it was one per rank of another node."""
    graph = entries(Topology(64, 8), 1).graph
    puts = [step for step in graph if step[0] == "put" and step[1] == 5]
    assert len(puts) == 7


def without(model: Entries, waits: Any) -> Entries:
    """The same, but where ``waits(step, before)`` is false nothing is waited for."""
    graph = WaitGraph()
    for step in model.graph:
        graph.add(step, [before for before in model.graph.before(step) if waits(step, before)])
    return Entries(graph, model.written, model.read)


def test_the_proof_can_fail() -> None:
    assert problems(entries(Topology(4, 2), CALLS, slots=1), Topology(4, 2)), "one slot for calls of both parities"
    for step, before, *world in (
        ("leave", "hand_on", 4, 2),
        ("leave", "announce", 2, 2),  # of more nodes each mate hands something on, and so has announced itself
        ("leave", "put", 4, 1),
        ("hand_on", "put", 4, 2),
        ("announce", "leave", 4, 2),
    ):
        topology = Topology(*world)
        broken = without(entries(topology, CALLS), lambda one, other, step=step, before=before: (one[0], other[0]) != (step, before))
        assert problems(broken, topology), f"{step} does not wait for {before}"
