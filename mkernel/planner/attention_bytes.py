"""How many bytes of keys and values a call of ring attention brings to a rank."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, Protocol

from mkernel.planner.ring_problem import RingAttentionProblem

__all__ = ["most_received", "received_bytes"]


class Streams(Protocol):
    """What is asked of a ``RingAttentionPlan``."""

    @property
    def problem(self) -> RingAttentionProblem: ...
    @property
    def plane_bytes(self) -> int: ...
    def segments(self) -> Iterator[Any]: ...
    def tile_of(self, item: int) -> int: ...
    def source_of(self, rank: int, ring: int) -> int: ...
    def feeder_of(self, rank: int, ring: int) -> int: ...
    def sent(self, segment: Any, source: int, node: int) -> int: ...
    def streamed(self, segment: Any, source: int, reader: int) -> int: ...


def received_bytes(plan: Streams, rank: int) -> tuple[int, int]:
    """From the rank's node, and over the network."""
    topology, near, far = plan.problem.topology, 0, 0
    for segment, number in _kinds(plan):
        for ring in range(plan.problem.rings):
            source = plan.source_of(rank, ring)
            if plan.feeder_of(rank, ring) == source and topology.node(source) != topology.node(rank):
                far += number * plan.sent(segment, source, topology.node(rank))
            else:
                near += number * plan.streamed(segment, source, rank)
    return near * 2 * plan.plane_bytes, far * 2 * plan.plane_bytes


def most_received(plan: Streams) -> tuple[int, int]:
    """The most that comes to any rank, each of both: to the last one where ranks hold positions in order, in zigzag to the first."""
    near, far = zip(*(received_bytes(plan, rank) for rank in {0, plan.problem.topology.size - 1}), strict=True)
    return max(near), max(far)


def _kinds(plan: Streams) -> list[tuple[Any, int]]:
    """One of the segments that bring the same, and how many there are: of equal sequences all that begin with the same tile of a head."""
    if plan.problem.packed:
        return [(segment, 1) for segment in plan.segments()]
    first = {plan.tile_of(segment.first): segment for segment in plan.segments()}
    count = collections.Counter(plan.tile_of(segment.first) for segment in plan.segments())
    return [(segment, count[tile]) for tile, segment in first.items()]
