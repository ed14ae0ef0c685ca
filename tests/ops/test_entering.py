"""Entering a call when a rank is late, fails or has another plan: every op, several nodes, in virtual time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import abi, errors
from mkernel.errors import AbortedError, Error, MismatchError
from tests.ops.body import Case, Rank, problems, topology, use_of
from tests.ops.planted_bug import Bug
from tests.virtual_time import sleep

WORLDS = ("1x2", "2x2", "4x1", "3x2")
CASES = {
    "allgather_gemm": Case("bfloat16", 64, 72, split="few movers"),
    "gemm_reduce_scatter": Case("bfloat16", 64, 72, split="few movers", op="gemm_reduce_scatter"),
    "two_shot": Case("bfloat16", 64, 72, split="few movers", op="gemm_allreduce", algorithm="two_shot"),
    "one_shot": Case("bfloat16", 64, 72, split="few movers", op="gemm_allreduce", algorithm="one_shot"),
}
EVERY = CASES | {"packets": Case("bfloat16", 64, 72)}  # of few rows inside a node
PACKETS = [(world, "packets") for world in ("1x2", "1x4")]
ROWS = 24
TIMEOUT, ENTRY_TIMEOUT = 2.0, 120.0  # seconds of virtual time


def run(fn: Any, world: str, *args: Any, seed: int) -> list[Any]:
    shape = topology(world)
    options = {"heap_bytes": 32 << 20, "timeout": TIMEOUT, "entry_timeout": ENTRY_TIMEOUT}
    return mk.launch(fn, shape.size, shape.ranks_per_node, "cpu", args, seed=seed, **options)


def _seed(request: pytest.FixtureRequest) -> int:
    seed: int = request.config.getoption("--seed")
    return seed


def _anybody(seed: int, world: str) -> int:
    return int(np.random.default_rng(seed).integers(topology(world).size))


def _told(world: Any, how: str, seed: int) -> tuple[list[str], int, int, list[int]]:
    rank = Rank(world, EVERY[how], seed, (ROWS,))
    found = problems([rank.call(number, ROWS, use_of(number, EVERY[how])) for number in range(3)])
    world.barrier()
    ring = abi.Ring.from_address(world._ring.address)
    return found, ring.launched, ring.ended, sorted(slot.dst_rank for slot in ring.slots if slot.ticket and slot.channel == 0)


@pytest.mark.parametrize("how", CASES)
@pytest.mark.parametrize("world", ["2x2", *(pytest.param(world, marks=pytest.mark.slow) for world in ("4x1", "3x2"))])
def test_what_an_engine_is_told(request: pytest.FixtureRequest, world: str, how: str) -> None:
    """One command per node and call for the entry, and when the calls that were launched have ended."""
    seed, shape = _seed(request), topology(world)
    for rank, (found, launched, ended, entries) in enumerate(run(_told, world, how, seed, seed=seed)):
        assert found == []
        assert launched == ended == 3
        assert entries == sorted(3 * shape.rail_peers(rank))


def _late(world: Any, how: str, seed: int, who: int, seconds: float) -> list[str]:
    rank = Rank(world, EVERY[how], seed, (ROWS,))
    results = [rank.call(0, ROWS, use_of(0, EVERY[how]))]
    world.barrier()
    if world.rank == who:
        sleep(world, seconds)
    results.append(rank.call(1, ROWS, use_of(1, EVERY[how])))
    return problems(results)


@pytest.mark.parametrize(("world", "how"), [*itertools.product(WORLDS, CASES), *PACKETS])
@pytest.mark.drawn(3)
def test_a_rank_may_be_late_by_up_to_entry_timeout(request: pytest.FixtureRequest, world: str, how: str) -> None:
    seed = _seed(request)
    draw = np.random.default_rng(seed)
    who, seconds = int(draw.integers(topology(world).size)), float(draw.uniform(1.1 * TIMEOUT, 0.9 * ENTRY_TIMEOUT))
    assert run(_late, world, how, seed, who, seconds, seed=seed) == [[]] * topology(world).size, (who, seconds)


def _never(world: Any, how: str, seed: int, who: int) -> str:
    rank = Rank(world, EVERY[how], seed, (ROWS,))
    rank.call(0, ROWS, use_of(0, EVERY[how]))
    world.barrier()
    try:
        if world.rank == who:
            sleep(world, 2 * ENTRY_TIMEOUT)
            world.check()
        else:
            rank.call(1, ROWS, use_of(1, EVERY[how]))
    except errors.TimeoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("world", "how"), [*itertools.product(("2x2", "4x1"), CASES), *PACKETS])
def test_a_rank_that_never_comes_is_named(request: pytest.FixtureRequest, world: str, how: str) -> None:
    seed = _seed(request)
    who = _anybody(seed, world)
    for message in run(_never, world, how, seed, who, seed=seed):
        assert f"waited {ENTRY_TIMEOUT:.1f} s for rank {who}, which never entered call 2" in message


def _raises(world: Any, seed: int, who: int, chunks: int) -> str:
    case = CASES["allgather_gemm"]
    case = Case(case.dtype, 4096, 8, split="few movers")
    rows = chunks * 64  # a chunk is a put of 512 KiB
    rank = Rank(world, case, seed, (rows,))
    rank.call(0, 1, use_of(0, case))
    rank.call(1, rows, use_of(1, case))
    world.barrier()
    if world.rank == who:
        sleep(world, 1.0)  # what the others can do without this rank, they have done
        raise ValueError("the input file is gone")
    try:
        rank.call(2, rows, use_of(2, case))
    except AbortedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("who", range(4))
@pytest.mark.drawn(1)
def test_a_rank_that_raises_while_chunks_are_under_way(request: pytest.FixtureRequest, who: int) -> None:
    """More of them per CTA than its queues have room for: the kernels of the other ranks leave all the same."""
    heard: list[str] = []

    def body(world: Any) -> None:
        found = _raises(world, _seed(request), who, 6)
        heard.append(found)

    with pytest.raises(ValueError, match="the input file is gone") as caught:
        run(body, "2x2", seed=_seed(request))
    assert len(heard) == 3
    assert all("the input file is gone" in message for message in heard), heard
    assert not any("deadlock" in note for note in getattr(caught.value, "__notes__", ()))


def _another_plan(world: Any, how: str, seed: int, who: int) -> str:
    mine, theirs = Rank(world, EVERY[how], seed, (ROWS,)), Rank(world, EVERY[how], seed, (ROWS + 8,))
    for number, rank, rows in ((0, mine, ROWS), (1, theirs, ROWS + 8)):  # all know both plans
        rank.call(number, rows, use_of(number, EVERY[how]))
    world.barrier()
    rank, rows = (theirs, ROWS + 8) if world.rank == who else (mine, ROWS)
    try:
        rank.call(2, rows, use_of(2, EVERY[how]))
        world.check()
    except MismatchError as error:
        return type(error).__name__
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("world", "how"), [*itertools.product(("2x2", "4x1"), CASES), *PACKETS])
def test_another_plan_on_a_rank_of_any_node_is_a_mismatch_everywhere(request: pytest.FixtureRequest, world: str, how: str) -> None:
    seed = _seed(request)
    who = _anybody(seed, world)
    assert run(_another_plan, world, how, seed, who, seed=seed) == ["MismatchError"] * topology(world).size, who


_NOT_WAITED_FOR = Bug("pieces that were loaded are left under way", "comm/copy.cuh", "    for (; ahead > 0; --ahead) take_piece();\n")


@pytest.mark.slow
def test_a_refused_call_waits_for_what_it_has_loaded(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seed = _seed(request)
    with _NOT_WAITED_FOR.in_force(tmp_path / "kernels_src"):
        found = run(_another_plan, "2x2", "allgather_gemm", seed, 0, seed=seed)
    assert any("nobody has waited for the TMA loads" in text or "a TMA load into it is in flight" in text for text in found), found
