"""Who reads and writes which bytes of the memory that all plans of a world share, and why the next call may write there.

A plan's areas and accesses are stated beside its wait graph (``areas_allgather_gemm``, ``areas_reduce``). ``unordered`` joins two calls:
rule 7 of docs/memory_model.md holds for a pair of plans when it finds nothing. ``unordered_ahead`` joins a call with the one after the
next, and ``unseen`` says what the call between them must do: rule 19.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator

from mkernel.planner.proofs.wait_graph import Step, WaitGraph

__all__ = ["AHEAD", "COUNTED", "FLAGS", "HEAP", "PACKETS", "STAGING", "Access", "Area", "Call", "unordered", "unordered_ahead", "unseen"]

# What areas lie in: the workspace and the staging area of the data heap; flags, counted flags and packets of the signal segment, and that
# half of its packets ahead which calls of the same parity of the epoch have, and behind it that of tagged ones.
HEAP, STAGING, FLAGS, COUNTED, PACKETS, AHEAD = "workspace", "staging", "flags", "counted flags", "packets", "packets ahead"
_NEXT_WRITER_WAITS_FOR = {STAGING: "the end of this rank's own kernel", AHEAD: "the entries of all ranks into the call before its own"}


@dataclasses.dataclass(frozen=True, slots=True)
class Area:
    """Bytes that a plan uses on every rank.

    Attributes
    ----------
    name, segment
        What it holds, and which of ``HEAP``, ``STAGING``, ``FLAGS``, ``COUNTED``, ``PACKETS`` and ``AHEAD`` it lies in.
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
        return _NEXT_WRITER_WAITS_FOR.get(self.segment, "the entries of all ranks")


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


def unordered(first: Call, second: Call, halves: int = 2) -> Iterator[tuple[Access, Access]]:
    """Pairs of an access of ``first`` and a conflicting one of ``second``, the next call, which nothing orders.

    Two accesses conflict when their bytes overlap and one of them writes. A rank's kernels follow each other, and the engine has completed
    a kernel's puts when it ends; within the second call order is what its wait graph says. ``halves``: into which the packets ahead are
    divided. With two of them, calls that follow each other have none in common.
    """
    yield from _unordered(first, second, _ranks_behind(second.graph), lambda segment: segment != AHEAD or halves == 1)


def unordered_ahead(first: Call, between: Call, second: Call) -> Iterator[tuple[Access, Access]]:
    """The same of accesses to the packets ahead, in two calls with one between them.

    Where a rank has ended the call between, all whose entry into that call it has seen have ended the first one.
    """
    seen = _entries_seen(between.graph)
    ended = {step: frozenset().union(ranks, *(seen[rank] for rank in ranks)) for step, ranks in _ranks_behind(second.graph).items()}
    yield from _unordered(first, second, ended, lambda segment: segment == AHEAD)


def unseen(call: Call) -> list[tuple[object, object]]:
    """Pairs of ranks, of which the first may end the call and has not seen that the second has entered it."""
    seen = _entries_seen(call.graph)
    # A rank without work has no step but its entry; in its kernel every CTA opens the entry of its own, which sees all ranks enter.
    working = {step[1] for step in call.graph if step[0] != "enter"}
    return [(rank, other) for rank in seen if rank in working for other in seen if other not in seen[rank]]


def _unordered(
    first: Call, second: Call, ended: dict[Step, frozenset[object]], shared: Callable[[str], bool]
) -> Iterator[tuple[Access, Access]]:
    """``ended``: by steps of the second call the ranks whose first call has ended then; ``shared``: whether both have a segment."""
    by_place: dict[tuple[int, str], list[Access]] = defaultdict(list)
    for access in first.accesses:
        by_place[access.rank, access.area.segment].append(access)
    for later in second.accesses:
        begin, end = later.span
        for earlier in by_place[later.rank, later.area.segment] if shared(later.area.segment) else ():
            if not (earlier.writes or later.writes) or earlier.step[1] in ended[later.step]:
                continue
            low, high = earlier.span
            if low < end and begin < high:
                yield earlier, later


def _ranks_behind(graph: WaitGraph) -> dict[Step, frozenset[object]]:
    """For each step of a call the ranks whose call before has ended when it runs: its own, and those of all steps that it waits for."""
    return _collected(graph, lambda step: frozenset({step[1]}))


def _entries_seen(graph: WaitGraph) -> dict[object, frozenset[object]]:
    """For each rank the ranks that have entered the call for certain when it ends: one of its steps comes after that."""
    entries = _collected(graph, lambda step: frozenset({step[1]}) if step[0] == "enter" else frozenset())
    seen: dict[object, frozenset[object]] = {}
    for step, ranks in entries.items():
        seen[step[1]] = seen.get(step[1], frozenset()) | ranks
    return seen


def _collected(graph: WaitGraph, of: Callable[[Step], frozenset[object]]) -> dict[Step, frozenset[object]]:
    """For each step what ``of`` says of it and of all steps that it waits for."""
    found: dict[Step, frozenset[object]] = {}
    todo = list(graph)
    while todo:
        step = todo[-1]
        missing = [] if step in found else [before for before in graph.before(step) if before not in found]
        if missing:
            todo += missing
            continue
        todo.pop()
        found.setdefault(step, of(step).union(*(found[before] for before in graph.before(step))))
    return found
