"""What one call reads and writes is ordered before what the next call does to the same bytes, for every pair of plans in every world."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from mkernel.plan import allgather_gemm, areas_allgather_gemm, areas_reduce, reduce
from mkernel.plan.areas import FLAGS, HEAP, STAGING, Area, Call, unordered
from mkernel.plan.split import Split
from mkernel.plan.topology import Topology
from mkernel.plan.wait_graph import Step, WaitGraph

WORLDS = {"1x2": (2, 2), "1x4": (4, 4), "2x2": (4, 2), "3x2": (6, 2), "4x1": (4, 1)}
OPS = ("allgather_gemm", "gemm_reduce_scatter", "two_shot", "one_shot", "packets")
SMS = 8


@functools.cache
def call_of(how: str, world: str, rows: int, n: int, k: int) -> Call:
    topology = Topology(*WORLDS[world])
    if how == "allgather_gemm":
        problem = allgather_gemm.AllGatherGemmProblem(topology, rows, n, k, "bfloat16", True)
        return areas_allgather_gemm.call_of(allgather_gemm.make_plan(problem, SMS))
    op = "gemm_reduce_scatter" if how == "gemm_reduce_scatter" else "gemm_allreduce"
    algorithm = "one_shot" if how == "one_shot" else "two_shot"
    sums = reduce.ReduceProblem(op, topology, rows, n, k, "bfloat16", True, algorithm=algorithm)
    pulls = Split(intra_comm=1) if how == "two_shot" else None  # asks for tiles instead of packets
    plan = reduce.make_plan(sums, SMS, pulls)
    return areas_reduce.call_of(plan)


def ops_of(world: str) -> list[str]:
    return [how for how in OPS if how != "packets" or world.startswith("1x")]


def draw(rng: np.random.Generator, how: str, world: str) -> Call:
    """A call of few tiles, whose areas begin and end anywhere."""
    rows, n, k = int(rng.integers(1, 600)), 8 * int(rng.integers(1, 60)), 64 * int(rng.integers(1, 20))
    return call_of(how, world, rows, n, k)


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_calls_is_ordered(rng: np.random.Generator, world: str) -> None:
    for first, second in itertools.product(ops_of(world), repeat=2):
        for _ in range(3):
            pair = next(unordered(draw(rng, first, world), draw(rng, second, world)), None)
            assert pair is None, f"{first}, then {second}: {pair[0]}, and then {pair[1]}"


def overlapping(world: str) -> tuple[Call, Call]:
    """The pair that gave wrong results between nodes: an all-reduce in two steps, then a gather over the same bytes."""
    return call_of("two_shot", world, 2048, 256, 64), call_of("allgather_gemm", world, 224, 64, 1024)


def with_waits(call: Call, kind: str, *, for_peer: bool) -> Call:
    """The call whose steps of a kind wait for nothing, or, puts, for the entry of the rank that they go to."""
    graph = WaitGraph()
    for step in call.graph:
        waits = call.graph.before(step)
        graph.add(step, ([("enter", step[-1])] if for_peer else []) if step[0] == kind else waits)
    return Call(graph, call.areas, call.accesses)


@pytest.mark.parametrize("world", ["2x2", "3x2"])
def test_waiting_for_the_owner_only_is_not_enough(world: str) -> None:
    first, second = overlapping(world)
    assert next(unordered(first, second), None) is None
    earlier, later = next(unordered(first, with_waits(second, "put", for_peer=True)))
    assert later.step[0] == "put"
    assert earlier.step[1] not in (later.rank, later.step[1]), "neither the owner of the memory nor the one who writes"


@pytest.mark.parametrize("how", OPS)
def test_steps_that_do_not_wait_for_entries_are_found(how: str) -> None:
    """Each kind of step that writes, one at a time."""
    world = "1x4" if how == "packets" else "2x2"
    call = call_of(how, world, 300, 256, 256)
    kinds = {access.step[0] for access in call.accesses if access.writes} - {"stage"}
    assert kinds
    for kind in kinds:
        found = list(unordered(call, with_waits(call, str(kind), for_peer=False)))
        assert found, f"{how}: {kind}"


def test_staging_in_the_workspace_is_found() -> None:
    first, second = overlapping("2x2")
    staging = next(area for area in second.areas if area.segment == STAGING)
    plane = next(area for area in second.areas if area.segment == HEAP).bytes // 4
    moved = [
        type(a)(
            a.step, a.rank, Area(staging.name, HEAP, a.rank * plane, plane, staging.writers, staging.readers), a.begin, a.bytes, a.writes
        )
        if a.area is staging
        else a
        for a in second.accesses
    ]
    assert any(later.step[0] == "stage" for _, later in unordered(first, Call(second.graph, second.areas, tuple(moved))))


@pytest.mark.parametrize("world", WORLDS)
def test_accesses_stay_inside_their_areas_and_are_those_that_the_areas_list(rng: np.random.Generator, world: str) -> None:
    for how in ops_of(world):
        call = draw(rng, how, world)
        assert call.graph.missing() == set()
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


def test_docs_list_the_areas() -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory_model.md").read_text()
    for how in OPS:
        for area in call_of(how, "1x4" if how == "packets" else "2x2", 300, 256, 256).areas:
            if area.bytes:
                assert row(how, area) in text


def row(how: str, area: Area) -> str:
    """A line of the table in docs/memory_model.md."""
    op = how if how.startswith(("allgather", "gemm")) else f"gemm_allreduce, {how.replace('_', '-') if how != 'packets' else 'packets'}"
    steps = [", ".join(sorted(kinds)) for kinds in (area.writers, area.readers)]
    return f"| {op} | {area.name} | {area.segment} | {steps[0]} | {steps[1]} | {area.next_writer_waits_for} |"


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_waited_for_is_what_was_written(rng: np.random.Generator, world: str) -> None:
    """Within a call, who reads bytes has waited for who writes them: the model of the accesses fits the wait graph."""
    for how in ops_of(world):
        if how == "packets":
            continue  # words that are their own flags
        call = draw(rng, how, world)
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
