"""What one call reads and writes is ordered before what the next call does to the same bytes, for every pair of plans in every world."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.proofs import allgather_gemm as areas_allgather_gemm
from mkernel.planner.proofs import reduce as areas_reduce
from mkernel.planner.proofs.areas import AHEAD, HEAP, STAGING, Area, Call, unordered, unordered_ahead, unseen
from mkernel.planner.proofs.wait_graph import WaitGraph
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from tests.shared.proofs import (
    check_accesses,
    check_entries,
    check_flags,
    check_no_deadlock,
    check_order,
    check_steps_wait_for_entries,
    with_waits,
)

WORLDS = {"1x2": (2, 2), "1x4": (4, 4), "2x2": (4, 2), "3x2": (6, 2), "4x1": (4, 1)}
GATHER_PACKETS, GATHER_TAGGED = GATHERS = "allgather_gemm, packets", "allgather_gemm, tagged packets"
PACKETS = (*GATHERS, "packets", "gemm_reduce_scatter, packets", "packets, shares", "gemm_reduce_scatter, packets, shares")
OPS = ("allgather_gemm", "gemm_reduce_scatter", "two_shot", "one_shot", *PACKETS)
SMS = 8


@functools.cache
def call_of(how: str, world: str, rows: int, n: int, k: int, cluster: int = 1) -> Call:
    topology = Topology(*WORLDS[world])
    if how.startswith("allgather_gemm"):
        problem = allgather_gemm.AllGatherGemmProblem(topology, n, k, "bfloat16", True)
        tiling = Tiling(64 if how == GATHER_TAGGED else None, cluster=cluster, packets=1 + GATHERS.index(how) if how in GATHERS else 0)
        gather = allgather_gemm.make_plan(problem, rows, SMS, tiling=tiling)
        assert (gather.packets, gather.tagged) == (how in GATHERS, how == GATHER_TAGGED)
        return areas_allgather_gemm.call_of(gather)
    op = "gemm_reduce_scatter" if how.startswith("gemm_reduce_scatter") else "gemm_allreduce"
    algorithm = "one_shot" if how == "one_shot" else "two_shot"
    sums = reduce.ReduceProblem(op, topology, n, k, "bfloat16", True, algorithm=algorithm)
    pulls = Split(intra_comm=cluster) if how == "two_shot" else None  # asks for tiles instead of packets
    shares = min(3, math.ceil(k / 64)) if how.endswith("shares") else 1
    tiling = Tiling(span=1 if how == "gemm_reduce_scatter" else None, shares=shares, cluster=cluster)
    plan = reduce.make_plan(sums, rows, SMS, pulls, tiling=tiling)
    return areas_reduce.call_of(plan)


def ops_of(world: str) -> list[str]:
    return [how for how in OPS if how not in PACKETS or world.startswith("1x")]


def draw(rng: np.random.Generator, how: str, world: str) -> Call:
    """A call of few tiles, whose areas begin and end anywhere."""
    most = 200 if how.endswith("shares") or how in GATHERS else 600
    rows, n, k = int(rng.integers(1, most)), 8 * int(rng.integers(1, 60)), 64 * int(rng.integers(1, 20))
    paired = how in ("allgather_gemm", GATHER_PACKETS, "gemm_reduce_scatter", "two_shot")
    return call_of(how, world, rows, n, k, int(rng.integers(1, 3)) if paired else 1)


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_calls_is_ordered(rng: np.random.Generator, world: str) -> None:
    for first, second in itertools.product(ops_of(world), repeat=2):
        for _ in range(3):
            check_order(draw(rng, first, world), draw(rng, second, world), f"{first}, then {second}")


def overlapping(world: str) -> tuple[Call, Call]:
    """The pair that gave wrong results between nodes: an all-reduce in two steps, then a gather over the same bytes."""
    return call_of("two_shot", world, 2048, 256, 64), call_of("allgather_gemm", world, 224, 64, 1024)


@pytest.mark.parametrize("world", ["2x2", "3x2"])
def test_waiting_for_the_owner_only_is_not_enough(world: str) -> None:
    first, second = overlapping(world)
    assert next(unordered(first, second), None) is None
    earlier, later = next(unordered(first, with_waits(second, "put", for_peer=True)))
    assert later.step[0] == "put"
    assert earlier.step[1] not in (later.rank, later.step[1]), "neither the owner of the memory nor the one who writes"


@pytest.mark.parametrize("how", OPS)
def test_steps_that_do_not_wait_for_entries_are_found(how: str) -> None:
    """Each kind of step that writes, one at a time. What takes packets of shards writes to its own rank's memory: others did before."""
    world = "1x4" if how in PACKETS else "2x2"
    call = call_of(how, world, 300, 256, 256)
    if how not in GATHERS:
        check_steps_wait_for_entries(call, how)
        return
    before, kind = call_of("allgather_gemm", world, 300, 256, 256), "take" if how == GATHER_PACKETS else "tile"
    assert next(unordered(before, call), None) is None
    found = list(unordered(before, with_waits(call, kind, for_peer=False)))
    assert {(earlier.step[0], later.step[0]) for earlier, later in found} == {("push", kind)}


# ---- packets that are sent before their rank has entered


@pytest.mark.parametrize("world", [world for world in WORLDS if world.startswith("1x")])
def test_packets_are_sent_ahead_of_entries(rng: np.random.Generator, world: str) -> None:
    """They are in order with those of two calls before, whatever the call between them is; one half for all calls would not do."""
    for how, (begin, end) in itertools.product(ops_of(world), itertools.product(GATHERS, repeat=2)):
        first, between, second = (draw(rng, one, world) for one in (begin, how, end))
        assert next(unordered_ahead(first, between, second), None) is None, how
        assert any(access.area.segment == AHEAD for access in second.accesses)
        if begin == end:  # else they have nothing in common
            earlier, later = next(unordered(first, second, halves=1))
            assert (earlier.area.segment, later.step[0]) == (AHEAD, "send")


@pytest.mark.parametrize("how", OPS)
def test_a_call_that_ends_before_all_have_entered_is_found(rng: np.random.Generator, how: str) -> None:
    """No step of rank 1 waits for rank 0, which may then still be in the call before: two calls later it has packets to take."""
    call = draw(rng, how, "1x4")
    check_entries(call)
    graph = WaitGraph()
    for step in call.graph:
        graph.add(step, [before for before in call.graph.before(step) if step[1] != 1 or before[1] == 1])
    hasty = Call(graph, call.areas, call.accesses)
    assert (1, 0) in unseen(hasty)
    for gather in GATHERS:
        packets = call_of(gather, "1x4", 16, 64, 64)
        earlier, later = next(unordered_ahead(packets, hasty, packets))
        assert earlier.area.segment == AHEAD
        assert later.step == ("send", 1)


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
        check_no_deadlock(call.graph)
        check_accesses(call)
        check_entries(call)


def test_docs_list_the_areas() -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory_model.md").read_text()
    for how in OPS:
        for area in call_of(how, "1x4" if how in PACKETS else "2x2", 300, 256, 256).areas:
            if area.bytes:
                assert row(how, area) in text


def row(how: str, area: Area) -> str:
    """A line of the table in docs/memory_model.md."""
    known = how.removesuffix(", shares")  # with shares there is another area, too
    op = known if known.startswith(("allgather", "gemm", "moe")) else f"gemm_allreduce, {known.replace('_', '-')}"
    steps = [", ".join(sorted(kinds)) for kinds in (area.writers, area.readers)]
    return f"| {op} | {area.name} | {area.segment} | {steps[0]} | {steps[1]} | {area.next_writer_waits_for} |"


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_waited_for_is_what_was_written(rng: np.random.Generator, world: str) -> None:
    """Within a call, who reads bytes has waited for who writes them: the model of the accesses fits the wait graph."""
    for how in ops_of(world):
        if how in PACKETS:
            continue  # words that are their own flags
        call = draw(rng, how, world)
        check_flags(call)
