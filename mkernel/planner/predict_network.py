"""What the network between nodes costs a call: entering it, and bytes along the rails. One rank is followed, since all do the same.

A rank sends to its rail only, the ranks with its local rank on the other nodes, through one engine and the cards that serve its GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mkernel.planner.machine import Machine
from mkernel.planner.prediction import Conditions
from mkernel.planner.topology import Topology

__all__ = ["Sent", "entered", "sent"]

_WARP = 32  # words that a warp looks at together


class Sent(NamedTuple):
    """What it takes to send to all nodes: seconds of cards and switches, of the engine, and until the last byte has come and is flagged."""

    paced: float
    engine: float
    arrived: float


def entered(machine: Machine, conditions: Conditions, topology: Topology, *, by_one_thread: bool = False) -> float:
    """Seconds until a rank knows that all ranks have entered a call.

    Across nodes one thread commands an empty put to each rail peer; what comes from there, a warp hands on to the node mates, word by
    word; and everyone looks at a word of every rank: a warp, or ``by_one_thread`` (comm/ring.cuh, comm/sync.cuh).
    """
    words, others, mates = topology.size - 1, topology.num_nodes - 1, topology.ranks_per_node - 1
    looks = max(0, (words if by_one_thread else math.ceil(words / _WARP)) - 1) * machine.poll  # but the last
    if not others:
        return machine.entry + looks
    network = machine.network
    reaction = network.reaction_hot if conditions.hot else network.reaction
    known = reaction + others * max(network.issue, network.put) + network.delay(topology.num_nodes)
    if mates:
        known += math.ceil(others * mates / _WARP) * machine.poll + machine.flag
    return max(machine.entry, known) + looks


def sent(machine: Machine, topology: Topology, to_each: float, put_bytes: float) -> Sent:
    """So many bytes of a rank to each other node, in puts of at most ``put_bytes``, by an engine that has seen the call's entries."""
    network, others = machine.network, topology.num_nodes - 1
    if not others or to_each <= 0:
        return Sent(0.0, 0.0, 0.0)
    paced = network.seconds(to_each, topology.num_nodes)
    engine = others * math.ceil(to_each / max(1.0, put_bytes)) * network.put
    return Sent(paced, engine, max(paced, engine) + network.delay(topology.num_nodes))
