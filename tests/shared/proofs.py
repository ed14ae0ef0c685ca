"""What the proofs of every op (``mkernel.planner.proofs``) must say: no step waits in a circle, and no two calls meet in memory."""

from __future__ import annotations

import itertools

from mkernel.planner.proofs.areas import FLAGS, Area, Call, unordered, unseen
from mkernel.planner.proofs.wait_graph import Step, WaitGraph

__all__ = [
    *("check_accesses", "check_call", "check_entries", "check_flags", "check_no_deadlock", "check_order", "check_steps_wait_for_entries"),
    "with_waits",
]


def check_no_deadlock(graph: WaitGraph) -> None:
    """Every step can end, whatever the timing."""
    assert graph.missing() == set()
    assert graph.find_cycle() is None


def check_accesses(call: Call) -> None:
    """Areas of a plan do not overlap, and steps access what the areas list."""
    by_segment: dict[str, list[Area]] = {}
    for area in call.areas:
        by_segment.setdefault(area.segment, []).append(area)
    for areas in by_segment.values():
        ends = sorted((area.offset, area.offset + area.bytes) for area in areas if area.bytes)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), "areas of one plan do not overlap"
    for access in call.accesses:
        assert access.area in call.areas
        assert access.begin >= 0
        assert access.begin + access.bytes <= access.area.bytes, str(access)
        assert access.step[0] in (access.area.writers if access.writes else access.area.readers), str(access)


def check_flags(call: Call) -> None:
    """Who reads a flag has waited for the one step that raises it: the model of the accesses fits the wait graph."""
    after = {step: set(call.graph.before(step)) for step in call.graph}
    writers: dict[tuple[int, str, int], set[Step]] = {}
    for access in call.accesses:
        if access.writes and access.area.segment == FLAGS:
            writers.setdefault((access.rank, access.area.segment, access.span[0]), set()).add(access.step)
    for access in call.accesses:
        if access.writes or access.area.segment != FLAGS:
            continue
        raisers = writers[access.rank, access.area.segment, access.span[0]]
        assert len(raisers) == 1, f"{access}: one writer of a flag, not {raisers}"
        assert raisers <= after[access.step] | {access.step}, f"{access} waits for {raisers}"


def check_entries(call: Call) -> None:
    """No rank ends the call before it has seen all ranks enter it: so packets may be sent ahead two calls later."""
    assert unseen(call) == [], sorted({step[0] for step in call.graph if step[1] in {rank for rank, _ in unseen(call)}})


def check_call(call: Call) -> None:
    """All that can be said of one call alone."""
    check_no_deadlock(call.graph)
    check_entries(call)
    check_accesses(call)
    check_flags(call)


def check_order(first: Call, second: Call, names: str) -> None:
    """What ``first`` reads and writes is ordered before what ``second``, the next call, does to the same bytes."""
    pair = next(unordered(first, second), None)
    assert pair is None, f"{names}: {pair[0]}, and then {pair[1]}"


def with_waits(call: Call, kind: str, *, for_peer: bool) -> Call:
    """The call whose steps of a kind wait for nothing, or, puts, for the entry of the rank that they go to."""
    graph = WaitGraph()
    for step in call.graph:
        waits = call.graph.before(step)
        graph.add(step, ([("enter", step[-1])] if for_peer else []) if step[0] == kind else waits)
    return Call(graph, call.areas, call.accesses)


def check_steps_wait_for_entries(call: Call, name: str) -> None:
    """The proof can fail: of each kind of step that writes, one that waits for nothing is found."""
    kinds = {access.step[0] for access in call.accesses if access.writes} - {"stage"}
    assert kinds
    for kind in kinds:
        assert list(unordered(call, with_waits(call, str(kind), for_peer=False))), f"{name}: {kind}"
