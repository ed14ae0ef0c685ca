"""Who reads and writes which bytes of the memory that all plans of a world share, and why the next call may write there.

A plan's areas and accesses are stated beside its wait graph (``areas_allgather_gemm``, ``areas_reduce``). ``unordered`` joins two calls:
rule 7 of docs/memory_model.md holds for a pair of plans when it finds nothing.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from mkernel.planner.proofs.wait_graph import Step, WaitGraph

__all__ = ["COUNTED", "FLAGS", "HEAP", "PACKETS", "STAGING", "Access", "Area", "Call", "unordered"]

# What areas lie in: the workspace and the staging area of the data heap; flags, counted flags and packets of the signal segment.
HEAP, STAGING, FLAGS, COUNTED, PACKETS = "workspace", "staging", "flags", "counted flags", "packets"


@dataclasses.dataclass(frozen=True, slots=True)
class Area:
    """Bytes that a plan uses on every rank.

    Attributes
    ----------
    name, segment
        What it holds, and which of ``HEAP``, ``STAGING``, ``FLAGS``, ``COUNTED`` and ``PACKETS`` it lies in.
    offset, bytes
        Where it begins in its segment, and its size.
    writers, readers
        Kinds of steps of the wait graph (``Step[0]``). A put's accesses are its engine's, which end before the sender's kernel does.
    """

    name: str
    segment: str
    offset: int
    bytes: int
    writers: frozenset[str]
    readers: frozenset[str]

    @property
    def next_writer_waits_for(self) -> str:
        """What the next call waits for before it writes here."""
        return "the end of this rank's own kernel" if self.segment == STAGING else "the entries of all ranks"


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """``bytes`` from ``begin`` on of an area of ``rank``, read or written by a step (whose own rank is ``step[1]``)."""

    step: Step
    rank: int
    area: Area
    begin: int
    bytes: int
    writes: bool

    @property
    def span(self) -> tuple[int, int]:
        """First byte in the segment, and the one after the last."""
        first = self.area.offset + self.begin
        return first, first + self.bytes

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.step} {verb} {self.area.name} of rank {self.rank} ({self.area.segment} {self.span[0]}..{self.span[1] - 1})"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a plan on all ranks: who waits for whom, and who accesses what."""

    graph: WaitGraph
    areas: tuple[Area, ...]
    accesses: tuple[Access, ...]


def unordered(first: Call, second: Call) -> Iterator[tuple[Access, Access]]:
    """Pairs of an access of ``first`` and a conflicting one of ``second``, the next call, which nothing orders.

    Two accesses conflict when their bytes overlap and one of them writes. A rank's kernels follow each other, and the engine has completed
    a kernel's puts when it ends; within the second call order is what its wait graph says.
    """
    ended = _ranks_that_have_ended(second.graph)
    by_place: dict[tuple[int, str], list[Access]] = defaultdict(list)
    for access in first.accesses:
        by_place[access.rank, access.area.segment].append(access)
    for later in second.accesses:
        begin, end = later.span
        for earlier in by_place[later.rank, later.area.segment]:
            if not (earlier.writes or later.writes) or earlier.step[1] in ended[later.step]:
                continue
            low, high = earlier.span
            if low < end and begin < high:
                yield earlier, later


def _ranks_that_have_ended(graph: WaitGraph) -> dict[Step, frozenset[object]]:
    """For each step of a call the ranks whose call before has ended when it runs: its own, and those of all steps that it waits for."""
    found: dict[Step, frozenset[object]] = {}
    todo = list(graph)
    while todo:
        step = todo[-1]
        missing = [] if step in found else [before for before in graph.before(step) if before not in found]
        if missing:
            todo += missing
            continue
        todo.pop()
        found.setdefault(step, frozenset({step[1]}).union(*(found[before] for before in graph.before(step))))
    return found
