"""How every rank comes to know that all ranks have entered a call: who writes which entry word, and what that waits for.

The other proofs use one statement: a step that waits for the entries of all ranks comes after the entry of every rank. It is proven here.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.topology import Topology

__all__ = ["Entries", "Word", "entries"]

Word = tuple[int, int, int]  # the rank in whose signal segment it lies, the parity of the call, the rank that enters


@dataclasses.dataclass(frozen=True)
class Entries:
    """Who waits for whom, and who writes and reads each word, call by call."""

    graph: WaitGraph
    written: dict[Word, list[tuple[int, Step]]]  # (call, step)
    read: dict[Word, list[tuple[int, Step]]]


def entries(topology: Topology, calls: int, *, slots: int = 2) -> Entries:
    """The entries of calls 0 .. calls - 1 that follow each other without anything between them. ``slots``: words per rank that enters.

    Steps: ``("announce", rank, call)`` to the node's ranks by stores, ``("put", rank, call, peer)`` to a rank on the same rail,
    ``("hand_on", rank, call, source, mate)`` a rail peer's entry to a rank of the node, ``("leave", rank, call)`` by the rank's kernel,
    which has then seen all entries.
    """
    graph = WaitGraph()
    written: dict[Word, list[tuple[int, Step]]] = defaultdict(list)
    read: dict[Word, list[tuple[int, Step]]] = defaultdict(list)
    for call in range(calls):
        slot = call % slots
        came: dict[int, list[Step]] = defaultdict(list)  # by rank: the steps that write what it waits for
        ends: dict[int, list[Step]] = defaultdict(list)  # by rank: other steps of its kernel
        for rank in range(topology.size):
            announced = graph.add(("announce", rank, call), [("leave", rank, call - 1)] if call else [])
            ends[rank].append(announced)
            for mate in _mates(topology, rank):
                written[mate, slot, rank].append((call, announced))
                came[mate].append(announced)
            for peer in topology.rail_peers(rank):
                put = graph.add(("put", rank, call, peer), [announced])
                written[peer, slot, rank].append((call, put))
                came[peer].append(put)
                for mate in _mates(topology, peer):
                    step = graph.add(("hand_on", peer, call, rank, mate), [("announce", peer, call), put])
                    read[peer, slot, rank].append((call, step))
                    written[mate, slot, rank].append((call, step))
                    came[mate].append(step)
                    ends[peer].append(step)
        for rank in range(topology.size):
            left = graph.add(("leave", rank, call), [*ends[rank], *came[rank]])
            for other in range(topology.size):
                if other != rank:
                    read[rank, slot, other].append((call, left))
    return Entries(graph, dict(written), dict(read))


def _mates(topology: Topology, rank: int) -> list[int]:
    """The other ranks of the node."""
    return [other for other in topology.node_ranks(topology.node(rank)) if other != rank]
