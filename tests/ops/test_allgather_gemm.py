"""allgather_gemm on target cpu: right, the same every time, and whatever the ranks' timing. See body.py for what a rank does."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covering import pairwise

import mkernel as mk
from mkernel import env
from mkernel.abi import TraceKind
from mkernel.errors import ArgumentError
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.planner.spans import spans_of
from mkernel.planner.tiling import Tiling
from mkernel.tools.check import worst_product
from mkernel.transport import emulated
from tests.ops import packets_body
from tests.ops.body import SHAPES, SPLITS, USES, WORLDS, Case, Rank, aligned, back_to_back, problems, random, rows_of, topology
from tests.ops.body import split as split_of
from tests.ops.planted_bug import Bug

_DTYPES = ("bfloat16", "float16")


def ranks(fn: Any, world: str, *args: Any, seed: int, **options: Any) -> list[Any]:
    shape = topology(world)
    return mk.launch(fn, shape.size, shape.ranks_per_node, "cpu", args, seed=seed, heap_bytes=64 << 20, **options)


def seeds(request: pytest.FixtureRequest) -> range:
    """One, or many with --full: there are many cases."""
    first = request.config.getoption("--seed")
    return range(first, first + (20 if request.config.getoption("--full") else 1))


_AXES: dict[str, Any] = {"world": WORLDS, "shape": SHAPES, "split": ("mover", *SPLITS), "dtype": _DTYPES, "row_major": (True, False)}


def plans_of(p: dict[str, Any]) -> list[AllGatherGemmPlan]:
    """The plans of one combination of the axes."""
    case, shape = Case(p["dtype"], *p["shape"], p["row_major"], p["split"]), topology(p["world"])
    problem = AllGatherGemmProblem(shape, case.n, case.k, case.dtype, case.row_major)
    return [make_plan(problem, rows, env.CPU_SMS.get(), split_of(case.split, shape)) for rows in rows_of(case.k)]


def test_the_cases_reach_all_of_the_kernel() -> None:
    """What the planner decides for the cases below; not every choice is made in every case."""
    covered = [plan for p in pairwise(_AXES) for plan in plans_of(p)]
    assert {plan.tile.block_n for plan in covered} == {64, 128, 192, 256}
    assert {plan.parts > 1 for plan in covered} == {True, False}
    assert {(plan.whole_tiles < plan.num_tiles, plan.problem.b_row_major) for plan in covered} == set(
        itertools.product((True, False), repeat=2)
    )
    assert max(plan.chunks for plan in covered if plan.parts > 1) > max(plan.parts for plan in covered), "several blocks in parts"
    assert {plan.num_tiles % plan.grid == 0 for plan in covered} == {True, False}
    inside = [plan.packets for plan in covered if plan.problem.topology.num_nodes == 1 < plan.problem.topology.size and plan.rows]
    assert 0.1 < sum(inside) / len(inside) < 0.6, "shards travel in chunks, and in packets"


@pytest.mark.cases(**_AXES)
@pytest.mark.usefixtures("compiled_ahead")
@pytest.mark.drawn(3)
def test_every_element(request: pytest.FixtureRequest, world: str, shape: tuple[int, int], split: str, dtype: str, row_major: bool) -> None:
    case = Case(dtype, *shape, row_major, split)
    for seed in seeds(request):
        for rank, results in enumerate(ranks(back_to_back, world, case, seed, 0.0, rows_of(case.k), seed=seed)):
            assert problems(results) == [], f"rank {rank}"


@pytest.mark.cases(world=("1x2", "1x4"), shape=SHAPES, dtype=_DTYPES, row_major=(True, False))
@pytest.mark.drawn(2)
def test_every_element_without_communication_ctas(
    request: pytest.FixtureRequest, world: str, shape: tuple[int, int], dtype: str, row_major: bool
) -> None:
    every_element(request, world, Case(dtype, *shape, row_major, "warps", tiling=Tiling(packets=0)))


def every_element(request: pytest.FixtureRequest, world: str, case: Case) -> None:
    for seed in seeds(request):
        for rank, results in enumerate(ranks(back_to_back, world, case, seed, 0.0, rows_of(case.k), seed=seed)):
            assert problems(results) == [], f"rank {rank}"


# ---- shards that travel in packets

_PACKETS = (Tiling(packets=1), Tiling(64, packets=1), Tiling(192, None, 1, 1, 1), Tiling(256, packets=1), Tiling(128, None, 1, 2, 1))
_PACKETS += (Tiling(64, None, 2, packets=1), Tiling(128, None, 3, packets=1), Tiling(64, None, 5, 2, 1), Tiling(64, None, 9, packets=1))
_PACKETS += (Tiling(64, packets=2), Tiling(64, None, 3, packets=2), Tiling(192, None, 1, packets=2), Tiling(128, None, 5, packets=2))


def _in_packets(tiling: Tiling, shape: tuple[int, int], split: str, **_: Any) -> bool:
    return (tiling.shares or 1) <= -(-shape[0] // 64) and not (split == "one" and tiling.cluster == 2)


@pytest.mark.cases(
    world=("1x2", "1x3", "1x4", "1x8"),
    tiling=_PACKETS,
    shape=((64, 256), (136, 264), (8, 8), (520, 136), (584, 392), (2056, 8)),
    split=("default", "one", "warps"),
    dtype=_DTYPES,
    row_major=(True, False),
    valid=_in_packets,
)
@pytest.mark.drawn(2)
def test_every_element_of_shards_in_packets(
    request: pytest.FixtureRequest, world: str, tiling: Tiling, shape: tuple[int, int], split: str, dtype: str, row_major: bool
) -> None:
    """Shards of any size: those without room travel in chunks meanwhile."""
    every_element(request, world, Case(dtype, *shape, row_major, split, tiling=tiling))


@pytest.mark.parametrize("world", ["1x2", pytest.param("1x4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workload", packets_body.WORKLOADS)
def test_packets_beside_what_is_rare(request: pytest.FixtureRequest, world: str, workload: str) -> None:
    """NaNs with all bits set, calls that are skipped after a refused one, CTAs that are late."""
    for seed in seeds(request):
        assert packets_body.found_wrong(world, workload, seed) is None


# ---- tiles that span shards

_PAIRS = ("pairs", "few pairs")
_SPANS = [Tiling(span=span) for span in range(2, 7)]
_SHARES = [Tiling(64, 1, 2), Tiling(128, 1, 3), Tiling(64, 2, 4), Tiling(128, 4, 2), Tiling(192, 1, 3), Tiling(64, 1, 3, 2)]
# By pairs, too; of wide tiles; more shares than a thread has packets.
_SHARES += [Tiling(64, 1, 9), Tiling(64, 1, 5, 2), Tiling(128, 2, 2, 2), Tiling(256, 1, 3, 2), Tiling(192, 4, 5)]


def possible(world: str, tiling: Tiling, shape: tuple[int, int], split: str, **_: Any) -> bool:
    """Whether tiles of a case can be like that; splits without communication CTAs are those of one node."""
    at = topology(world)
    inside = at.num_nodes == 1
    shared = inside or not tiling.shares
    enough = (tiling.shares or 1) <= -(-shape[0] // 64)
    even = split == "warps" or (split in _PAIRS) == (tiling.cluster == 2)
    return tiling.span in spans_of(at) and shared and enough and even and (split != "warps" or inside)


@pytest.mark.drawn(3)
@pytest.mark.cases(
    world=(*WORLDS, "3x2"),
    tiling=(*_SPANS, *_SHARES),
    shape=((64, 256), (136, 264), (8, 8), (520, 136), (584, 392), (4096, 8)),
    split=("mover", "narrow", "wide", "warps", *_PAIRS),
    dtype=_DTYPES,
    row_major=(True, False),
    valid=possible,
)
def test_every_element_of_tiles_that_span_shards_or_share_k(
    request: pytest.FixtureRequest, world: str, tiling: Tiling, shape: tuple[int, int], split: str, dtype: str, row_major: bool
) -> None:
    every_element(request, world, Case(dtype, *shape, row_major, split, tiling=tiling))


@pytest.mark.parametrize("world", ["1x1", "1x4", "2x2"])
def test_a_span_that_cannot_be(world: str) -> None:
    def asked(world: Any) -> str:
        a, b = random((8, 64), "float16", np.random.default_rng(0)), random((64, 8), "float16", np.random.default_rng(1))
        with pytest.raises(ArgumentError, match="tiling") as caught:
            mk.plan("allgather_gemm", a, b, world=world, tiling={"span": 3})
        with pytest.raises(ArgumentError, match="must be one of block_n, span, shares"):
            mk.plan("allgather_gemm", a, b, world=world, tiling={"columns": 64})
        return str(caught.value)

    assert "span must be one of 1" in ranks(asked, world, seed=1)[0]


# ---- one seed, one run


def _traced(world: Any, case: Case, seed: int, delay: float) -> tuple[list[bytes], int, int]:
    results = back_to_back(world, case, seed, delay, (7, 129))
    assert problems(results) == []
    world.barrier()  # all kernels have ended
    thread_ranks = world.backend.thread_ranks
    return [result.c.tobytes() for result in results], thread_ranks.trace, thread_ranks.turns


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(1)
def test_the_same_seed_gives_the_same_run(request: pytest.FixtureRequest, world: str) -> None:
    seed, case = request.config.getoption("--seed"), Case("bfloat16", 136, 72)
    first = ranks(_traced, world, case, seed, 0.0, seed=seed)
    again = ranks(_traced, world, case, seed, 0.02, seed=seed)  # whatever the host's timing
    assert again == first
    other = ranks(_traced, world, case, seed, 0.0, seed=seed + 1)
    assert [results for results, _, _ in other] == [results for results, _, _ in first], "bitwise the same in every interleaving"
    assert {trace for _, trace, _ in other}.isdisjoint({trace for _, trace, _ in first}), "another seed is another interleaving"


@pytest.mark.parametrize("world", [world for world in WORLDS if world != "1x1"])
@pytest.mark.drawn(1)
def test_ranks_that_are_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    """Kernels wait for the entry of ranks that are busy elsewhere (their threads sleep), each time another one."""
    monkeypatch.setattr("mkernel.runtime.cpu.thread_ranks._IMPATIENT_SECONDS", 0.005)  # else the scheduler lets nobody go ahead
    case = Case("float16", 200, 72)
    seed = request.config.getoption("--seed")
    for rank, results in enumerate(ranks(back_to_back, world, case, seed, 0.05, (0, 7, 129), seed=seed)):
        assert problems(results) == [], f"rank {rank}"


@pytest.mark.parametrize("world", ["2x2", "4x1"])
@pytest.mark.parametrize("window_us", [5.0, 100.0, 2000.0])
@pytest.mark.drawn(1)
def test_a_network_that_delays_and_reorders(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, window_us: float
) -> None:
    """As SRD may: the bytes of a put land in any order before its signal, as late as is legal."""
    seed, case = request.config.getoption("--seed"), Case("bfloat16", 200, 72)
    faults = emulated.Faults(seed=seed, delay_us=window_us, reorder_us=window_us)
    monkeypatch.setattr(emulated, "Faults", lambda: faults)
    for rank, results in enumerate(ranks(back_to_back, world, case, seed, 0.0, (0, 7, 300), seed=seed)):
        assert problems(results) == [], f"rank {rank}"


# ---- several plans and ways to call


def _taken_early(world: Any) -> int:
    """Tiles that were taken before their CTA had begun to multiply the one before, whichever threads were left behind."""
    rng = np.random.default_rng(world.rank)
    a, b = random((512, 2048), "bfloat16", rng), random((2048, 8), "bfloat16", rng)
    with mk.trace(world) as recorded:
        mk.allgather_gemm(a, b, split=mk.Split(intra_comm=1), world=world)
    early, events = 0, recorded.events
    for cta in np.unique(events["cta"]):
        of_kind = {kind: events[(events["cta"] == cta) & (events["kind"] == kind)] for kind in (TraceKind.tile, TraceKind.wait)}
        tiles = of_kind[TraceKind.tile]
        before = dict(itertools.pairwise(tiles["argument"][np.argsort(tiles["begin"])]))
        begun = dict(zip(tiles["argument"], tiles["begin"], strict=True))
        taken = dict(zip(of_kind[TraceKind.wait]["argument"], of_kind[TraceKind.wait]["begin"], strict=True))
        early += sum(taken[tile] < begun[last] for last, tile in before.items() if tile in taken)
    return early


_TAKEN_EARLY = Bug("tiles are taken as soon as there is room", "tile/schedule.cuh", "    if (parts != 0) {  // a", "    if (false) {  // a")


@pytest.mark.parametrize("bug", [None, pytest.param(_TAKEN_EARLY, marks=pytest.mark.slow)])
def test_tiles_are_not_taken_before_they_are_needed(tmp_path: Path, bug: Bug | None) -> None:
    """One that a CTA takes ahead is missing where another has nothing to do."""
    with env.override(MKERNEL_CPU_SMS=3), bug.in_force(tmp_path / "kernels_src") if bug else contextlib.nullcontext():
        early = sum(sum(ranks(_taken_early, "1x2", seed=seed)) for seed in range(2))
    assert (early > 0) == (bug is not None)


def _alternating(world: Any, cases: tuple[Case, ...], seed: int) -> list[Any]:
    several = [Rank(world, case, seed + i, (7, 129)) for i, case in enumerate(cases)]
    order = np.random.default_rng(seed).permutation(12) % len(cases)
    return [several[i].call(number, (7, 129)[number % 2], USES[number]) for number, i in enumerate(order)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(1)
def test_plans_alternate(request: pytest.FixtureRequest, world: str) -> None:
    """One workspace and one set of flags for all plans: what one call leaves there must not disturb the next."""
    seed = request.config.getoption("--seed")
    cases = (Case("bfloat16", 136, 72), Case("float16", 8, 8), Case("bfloat16", 72, 200, False), Case("float16", 64, 64, True, "narrow"))
    for rank, results in enumerate(ranks(_alternating, world, cases, seed, seed=seed)):
        assert problems(results) == [], f"rank {rank}"


class _Lent:
    """An array that shows itself by DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def _planned(world: Any) -> list[str]:
    rng = np.random.default_rng(world.rank)
    a, b = (random(shape, "float16", rng) for shape in ((40, 64), (64, 96)))
    plan = mk.plan("allgather_gemm", a, b, world=world)
    assert plan.can_run()
    assert plan.split().total <= world.backend.sm_count
    assert plan.workspace_bytes == (world.size * a.nbytes if world.size > 1 else 0)
    out = aligned((40 * world.size, 96), "float16")
    assert plan.run(a, b, out=out) is out
    results = [out, plan.run(a, b), mk.allgather_gemm(_Lent(a), _Lent(b)), mk.allgather_gemm(a, np.asfortranarray(b), split=plan.split())]
    whole = np.concatenate([random((40, 64), "float16", np.random.default_rng(rank)) for rank in range(world.size)])
    assert all(result.tobytes() == out.tobytes() for result in results)
    assert worst_product(np, out, whole, b) <= 1.0
    return plan.describe().splitlines()


@pytest.mark.parametrize("world", WORLDS)
def test_planned_first_and_called_in_other_ways(world: str) -> None:
    described = ranks(_planned, world, seed=1)
    assert "float16" in described[0][0]
    assert f"{world} ranks" in described[0][0]
