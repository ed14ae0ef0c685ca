"""Reports name flags in words: what a plan calls a flag is what the step does that raises it, for every flag of every op and world.

The steps, and which flags and bytes they access, are stated in ``mkernel/planner/proofs/*.py``: a name is right when it says the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.proofs import allgather_gemm as areas_allgather_gemm
from mkernel.planner.proofs import reduce as areas_reduce
from mkernel.planner.proofs.areas import FLAGS, HEAP, Access, Call
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from mkernel.runtime.failure import read_host_block

WORLDS = {"1x2": (2, 2), "1x4": (4, 4), "2x2": (4, 2), "3x2": (6, 2), "4x1": (4, 1)}
OPS = ("allgather_gemm", "gemm_reduce_scatter", "two_shot", "one_shot")
PLANS = 12  # of an op and world
_WORD = 8


def draw(rng: np.random.Generator, how: str, world: str) -> Any:
    """A plan of any sizes, with few or many tiles and chunks; K may travel in parts."""
    topology, sms = Topology(*WORLDS[world]), int(rng.choice((6, 8, 16)))
    rows, n = int(2 ** rng.uniform(0, 9.5)), 8 * int(2 ** rng.uniform(0, 7))
    if how == "allgather_gemm":
        k = int(rng.choice((4096, 8192, 64 * int(rng.integers(1, 40)))))
        return allgather_gemm.make_plan(allgather_gemm.AllGatherGemmProblem(topology, n, k, "bfloat16", True), rows, sms)
    op, algorithm = ("gemm_reduce_scatter", None) if how == "gemm_reduce_scatter" else ("gemm_allreduce", how)
    partials = str(rng.choice(("output", "float32")))
    problem = reduce.ReduceProblem(op, topology, n, 64, "bfloat16", True, partials, algorithm)
    if how == "one_shot" and topology.num_nodes == 1:  # in packets, but for what is too large or exact
        problem = dataclasses.replace(problem, partials="float32")
    pulls = Split(intra_comm=1) if how == "two_shot" else None  # asks for tiles instead of packets
    plan = reduce.make_plan(problem, rows, sms, pulls, group_tiles=int(rng.choice((1, 2, 5, 40))))
    return plan if rng.random() < 0.5 else dataclasses.replace(plan, chunk_tiles=int(rng.choice((1, 2, 4))))


def call_of(plan: Any) -> Call:
    gathers = plan.op == allgather_gemm.OP
    return areas_allgather_gemm.call_of(plan) if gathers else areas_reduce.call_of(plan)


def raised(call: Call) -> dict[tuple[int, int], list[Access]]:
    """Who raises flag ``index`` of ``rank``, by (rank, index)."""
    found: dict[tuple[int, int], list[Access]] = {}
    for access in call.accesses:
        if access.writes and access.area.segment == FLAGS:
            found.setdefault((access.rank, access.begin // _WORD), []).append(access)
    return found


def name_of(plan: Any, call: Call, access: Access) -> str:
    """What the step tells by raising this flag."""
    return _chunk_name(plan, call, access) if plan.op == allgather_gemm.OP else _tile_name(plan, access)


def _chunk_name(plan: Any, call: Call, access: Access) -> str:
    """From the bytes that the same step writes on the same rank."""
    kind, rank, *rest = access.step
    source, chunk = (rest[0], rest[1]) if kind == "forward" else (rank, rest[0])
    (data,) = (a for a in call.accesses if a.step == access.step and a.rank == access.rank and a.area.segment == HEAP and a.writes)
    row_bytes = plan.problem.k // plan.parts * 2
    shard = plan.rows * row_bytes  # of one part; the parts of all shards lie side by side
    part, inside = divmod(data.begin - source * shard, plan.problem.topology.size * shard)
    first, count = inside // row_bytes, data.bytes // row_bytes
    of_part = f", part {part} of K" if plan.parts > 1 else ""
    return f"chunk {chunk} of rank {source}'s shard: rows {first} to {first + count - 1}{of_part}"


def _tile_name(plan: Any, access: Access) -> str:
    kind, rank, *rest = access.step
    topology = plan.problem.topology

    def tile(owner: int, index: int) -> str:
        if plan.one_shot:
            return f"tile {index}"
        at = plan.at(owner, index)
        return f"tile {index} of rank {owner} (row {at.m}, column {at.n})"

    if kind == "tile":
        made = [one for one in plan.tiles_of(rank) if plan.exists(one.owner, one.index)][rest[0]]
        whose = made.owner if not plan.one_shot else rank
        return f"{tile(whose, made.index)}, {'finished' if made.owner == rank and not plan.one_shot else f'as rank {rank} has it'}"
    if kind == "sum":
        return f"{tile(*rest)}, summed over this node"
    if kind == "put":
        peer, chunk = rest
        return f"chunk {chunk} of tiles of rank {peer}, summed over node {topology.node(rank)}"
    if kind == "send":
        first = rest[1] * plan.chunk_tiles
        return f"{tile(rank, first)}, {f'as rank {rank} has it' if plan.one_shot else 'finished'}"
    if kind == "tell":
        return f"{tile(rank, rest[1] * plan.chunk_tiles)}, as rank {rest[0]} has it"
    assert kind == "pull", kind
    owner, chunk = rest  # of another node: passed on to this one's ranks
    assert topology.node(owner) != topology.node(rank)
    return f"{tile(owner, chunk * plan.chunk_tiles)}, finished"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", OPS)
def test_every_flag_is_named_after_what_raises_it(rng: np.random.Generator, how: str, world: str) -> None:
    for _ in range(PLANS):
        plan = draw(rng, how, world)
        call = call_of(plan)
        flags = raised(call)
        assert flags or plan.flag_words == 0 or getattr(plan, "packets", False), plan
        for (rank, index), accesses in flags.items():
            assert index < plan.flag_words
            names = {name_of(plan, call, access) for access in accesses}
            assert names == {plan.flag_name(rank, index)}, (plan, rank, index, accesses)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", OPS)
def test_no_flag_is_without_a_name(rng: np.random.Generator, how: str, world: str) -> None:
    """Also one that nobody raises, of a tile that does not exist, say: a kernel that waits for it is what a report would be about."""
    for _ in range(PLANS):
        plan = draw(rng, how, world)
        ranks = range(plan.problem.topology.size)
        for rank in ranks:
            names = [plan.flag_name(rank, index) for index in range(plan.flag_words)]
            assert all(names)
            raised_names = {plan.flag_name(*key) for key in raised(call_of(plan)) if key[0] == rank}
            assert len(raised_names) == sum(key[0] == rank for key in raised(call_of(plan))), "a name says which flag it is"


@pytest.mark.parametrize("how", OPS)
def test_a_report_says_so(rng: np.random.Generator, how: str) -> None:
    """A kernel that has given up waiting for any flag reports op and shape, which chunk or tile, and whose."""
    for world in WORLDS:
        plan = draw(rng, how, world)
        call = call_of(plan)
        waits = [a for a in call.accesses if not a.writes and a.area.segment == FLAGS and a.bytes == _WORD]
        for access in (waits[i] for i in rng.integers(len(waits), size=min(10, len(waits)))):
            index, (writer, *_) = access.begin // _WORD, raised(call)[access.rank, access.begin // _WORD]
            block = abi.HostBlock(
                rank=access.rank, role=abi.Role.compute, cta=3, flag_kind=abi.FlagKind.chunk, flag_index=index, peer=writer.step[1],
                epoch=7, expected=7, seen=5, problem=2, rows=plan.rows, schedule=9, state=abi.State.timed_out,
            )  # fmt: skip
            plans = {(2, plan.rows, 9): plan}
            failure = read_host_block(block, timeout_ns=10**9, entry_timeout_ns=10**9, plan_of=lambda *key: plans.get(key))  # noqa: B023
            assert failure is not None
            error = str(failure.error())
            assert f"of rank {writer.step[1]} in call 7" in error
            assert name_of(plan, call, writer) in error
            assert plan.describe().splitlines()[0] in error
            assert "rank" in name_of(plan, call, writer), "whose it is"


@pytest.mark.parametrize("kind", [abi.FlagKind.ring_done, abi.FlagKind.ring_slot])
def test_a_put_that_is_stuck_names_its_own_destination(kind: abi.FlagKind) -> None:
    """A kernel waits for its last put, to rank 2, and behind it hides an earlier one, to rank 5, that does not complete."""
    block = abi.HostBlock(rank=1, flag_kind=kind, flag_index=9, peer=2, epoch=3, expected=9, seen=4, state=abi.State.timed_out)
    for known, missing in ((5, 5), (None, 2)):
        failure = read_host_block(
            block,
            timeout_ns=10**9,
            entry_timeout_ns=10**9,
            plan_of=lambda *key: None,
            destination_of=lambda ticket: known if ticket == 4 else 7,  # noqa: B023
        )
        assert failure is not None and failure.record is not None
        assert failure.record.peer == missing
        assert f"put 4, to rank {missing}, is not complete" in failure.message
