"""gemm_reduce_scatter and gemm_allreduce on target cpu: right, bitwise the same always and everywhere. See body.py for what a rank does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from covering import pairwise
from numpy.typing import NDArray

import mkernel as mk
from mkernel import env
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem, choose_algorithm, make_plan
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from mkernel.transport import emulated
from tests.ops.body import (
    ROWS,
    SPLITS,
    WORLDS,
    Case,
    Rank,
    Result,
    aligned,
    back_to_back,
    bits,
    problems,
    random,
    scatters_tiles,
    topology,
    use_of,
)
from tests.ops.body import split as split_of
from tests.ops.test_allgather_gemm import _Lent, ranks, seeds

HOWS = (REDUCE_SCATTER, "one_shot", "two_shot")  # the reduce-scatter, and the all-reduce by its algorithms
PACKETS = ("packets", "scattered")  # two-shot, and the reduce-scatter, in packets
SHAPES = ((64, 520), (136, 256), (8, 8), (200, 72), (8, 1272))  # (K / W, N); of the last, an owner's tiles are several chunks
_FAULTS = emulated.Faults
_AXES: dict[str, Any] = {
    "world": WORLDS,
    "how": HOWS,
    "shape": SHAPES,
    "split": SPLITS,
    "dtype": ("bfloat16", "float16"),
    "row_major": (True, False),
    "partials": ("output", "float32"),
}
# By split: SMs (several for each of three communication roles), and how long a put should be (chunks that begin and end amid groups).
_SETTINGS = {"default": (4, 1 << 20), "narrow": (4, 70 << 10), "wide": (6, 1 << 20)}


def case_of(how: str, dtype: str, k: int, n: int, row_major: bool = True, split: str = "default", partials: str = "output") -> Case:
    """Two-shot by bulk copies, unless ``how`` is "packets"; one-shot inside a node by packets, unless partial tiles are float32.

    The reduce-scatter by bulk copies, too (a fixture of this file), unless ``how`` is "scattered".
    """
    scatters = how in (REDUCE_SCATTER, "scattered")
    op, algorithm = (REDUCE_SCATTER, None) if scatters else (ALLREDUCE, "two_shot" if how == "packets" else how)
    split = "mover" if how == "two_shot" and split == "default" else split
    return Case(dtype, k, n, row_major, split, op, partials, algorithm)


@pytest.fixture(autouse=True)
def _tiles_or_packets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values of a reduce-scatter travel in packets in tests of "scattered" only."""
    if getattr(request.node, "callspec", None) is None or request.node.callspec.params.get("how") != "scattered":
        scatters_tiles(monkeypatch)


def each(worlds: tuple[str, ...], *usual: tuple[str, str]) -> pytest.MarkDecorator:
    """Worlds and ways to go about it: these, and all with --full."""
    inside = [(world, how) for world in worlds if topology(world).size == topology(world).ranks_per_node > 1 for how in PACKETS]
    possible = [*itertools.product(worlds, HOWS), *inside]
    assert set(usual) <= set(possible)
    return pytest.mark.parametrize(
        ("world", "how"), [pytest.param(*case, marks=[] if case in usual else pytest.mark.slow) for case in possible]
    )


def rows_of(n: int) -> tuple[int, ...]:
    """Fewer of them where a call is many tiles."""
    return ROWS if n < 256 else (0, 7, 129, 300) if n < 1024 else (7, 300)


def plans(case: Case, world: str) -> list[ReducePlan]:
    shape = topology(world)
    split = split_of(case.split, shape, case.op, case.algorithm)
    algorithm = case.algorithm or "two_shot"
    problem = ReduceProblem(case.op, shape, case.n, case.k, case.dtype, case.row_major, case.partials, algorithm)
    return [make_plan(problem, rows, env.CPU_SMS.get(), split) for rows in rows_of(case.n)]


def settle(patch: pytest.MonkeyPatch, split: str) -> None:
    sms, put_bytes = _SETTINGS[split]
    patch.setenv("MKERNEL_CPU_SMS", str(sms))
    patch.setattr("mkernel.planner.gemm._PUT_BYTES", (put_bytes, put_bytes))


def plans_of(p: dict[str, Any]) -> list[ReducePlan]:
    """The plans of one combination of the axes."""
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, p["split"])
        return plans(case_of(p["how"], p["dtype"], *p["shape"], p["row_major"], p["split"], p["partials"]), p["world"])


def check(by_rank: list[list[Result]]) -> None:
    for rank, results in enumerate(by_rank):
        assert problems(results) == [], f"rank {rank}"
        if results and results[0].case.op == ALLREDUCE:
            assert bits(results) == bits(by_rank[0]), f"rank {rank} has other bits than rank 0"


def test_the_cases_reach_all_of_the_kernels() -> None:
    """What the planner decides for the cases below; not every choice is made in every case."""
    covered = [plan for p in pairwise(_AXES) for plan in plans_of(p)]
    two_steps = [plan for plan in covered if not plan.one_shot and plan.problem.topology.size > 1]
    across = [plan for plan in covered if plan.problem.topology.num_nodes > 1]
    assert {plan.tile.block_n for plan in covered} == {64, 128, 192, 256}
    assert {len(plan.groups()) for plan in two_steps} >= {0, 1, 2, 3}
    assert {(plan.op, plan.algorithm, plan.num_chunks > 1) for plan in across} == {
        (op, algorithm, many)
        for (op, algorithm), many in itertools.product(
            ((REDUCE_SCATTER, "two_shot"), (ALLREDUCE, "one_shot"), (ALLREDUCE, "two_shot")), (False, True)
        )
    }
    assert any(plan.group_tiles % plan.chunk_tiles for plan in across), "a chunk of two groups"
    last = [plan.problem.topology.size - 1 for plan in two_steps]
    exist = {plan.exists(owner, 0) for plan, owner in zip(two_steps, last, strict=True) if plan.tiles}
    assert exist == {True, False}, "owners with and without tiles"
    assert {(plan.split.inter_send or 0) > 1 for plan in across} == {(plan.split.inter_reduce or 0) > 1 for plan in across} == {True, False}


@pytest.mark.cases(**_AXES)
@pytest.mark.usefixtures("compiled_ahead")
@pytest.mark.drawn(3)
def test_every_element(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    world: str,
    how: str,
    shape: tuple[int, int],
    split: str,
    dtype: str,
    row_major: bool,
    partials: str,
) -> None:
    case = case_of(how, dtype, *shape, row_major, split, partials)
    settle(monkeypatch, split)
    for seed in seeds(request):
        check(ranks(back_to_back, world, case, seed, 0.0, rows_of(case.n), seed=seed))


@pytest.mark.parametrize(("link_peak", "many"), [(1.0, False), (math.inf, True)])
@pytest.mark.parametrize("world", ["1x2", "1x3", "1x4"])
@pytest.mark.drawn(2)
def test_an_allreduce_inside_a_node_by_groups_or_not(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, link_peak: float, many: bool
) -> None:
    """Where links are slow (bytes per second) all of the others' tiles come first."""
    monkeypatch.setattr("mkernel.planner.reduce._LINK_PEAK", link_peak)
    monkeypatch.setenv("MKERNEL_CPU_SMS", "4")
    case = case_of("two_shot", "bfloat16", 8, 1272)
    assert {len(plan.groups()) > 1 for plan in plans(case, world) if plan.rows == 300} == {many}
    for seed in seeds(request):
        check(ranks(back_to_back, world, case, seed, 0.0, rows_of(case.n), seed=seed))


@pytest.mark.cases(
    world=("1x2", "1x3", "1x4", "1x8"),
    how=("one_shot", *PACKETS),
    shape=((64, 264), (136, 72), (8, 8)),
    sms=(1, 4),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
)
@pytest.mark.drawn(3)
def test_packets(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    world: str,
    how: str,
    shape: tuple[int, int],
    sms: int,
    dtype: str,
    row_major: bool,
) -> None:
    """Rows about the edges of a thread's, of a warp's and of a tile; every number of them once, back to back."""
    monkeypatch.setenv("MKERNEL_CPU_SMS", str(sms))
    case, rows = case_of(how, dtype, *shape, row_major), (1, 7, 8, 16, 17, 128, 129, 300)
    problem = ReduceProblem(case.op, topology(world), case.n, case.k, dtype, row_major, "output", case.algorithm)
    assert make_plan(problem, 300, sms).packets
    for seed in seeds(request):
        check(ranks(back_to_back, world, case, seed, 0.0, rows, seed=seed))


def shared(case: Case, block_n: int, shares: int) -> Case:
    """``shares`` CTAs share K of a tile."""
    return dataclasses.replace(case, tiling=Tiling(block_n, None, shares))


def _special(world: Any, case: Case) -> tuple[NDArray[Any], list[Result]]:
    """Three rows in turn: NaNs with all bits set, zeros, infinities. Then two calls of ordinary numbers."""
    a, b = aligned((36, case.k), case.dtype), aligned((case.k, case.n), case.dtype)  # 12 rows of each owner
    a.view(np.uint16)[0::3], a[1::3], a[2::3], b[...] = 0xFFFF, 0.0, np.inf, 1.0
    rank = Rank(world, case, 3, (35,))
    c = getattr(mk, case.op)(a, b, world=world, split=rank.split, **case.options)
    return np.array(c, np.float32), [rank.call(number, 35, use_of(number, case)) for number in range(2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", ["one_shot", *PACKETS])
@pytest.mark.parametrize("shares", [1, 2])
def test_numbers_that_are_none_travel_in_packets(how: str, dtype: str, shares: int) -> None:
    """No value is taken for one that has not come."""
    case = case_of(how, dtype, 128, 136)
    found = ranks(_special, "1x3", case if shares == 1 else shared(case, 64, shares), seed=1)
    check([results for _, results in found])
    for c, _ in found:
        assert np.isnan(c[0::3]).all()
        assert (c[1::3] == 0.0).all()
        assert np.isposinf(c[2::3]).all()


# ---- the checks themselves


@pytest.mark.parametrize("world", ["1x2", "1x4", "2x2", "4x1"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("partials", ["output", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.drawn(3)
def test_a_partial_lost_or_added_twice_is_seen(world: str, how: str, partials: str, dtype: str) -> None:
    """Also in the smallest result there is, one row of eight."""
    shape, case = topology(world), case_of(how, dtype, 8, 8, partials=partials)
    for seed, rank in itertools.product(range(20), range(shape.size)):
        right = _exact(case, shape, rank, seed, [1.0] * shape.size)
        assert right.problem() is None
        for source, times in itertools.product(range(shape.size), (0.0, 2.0)):
            weights = [1.0 if other != source else times for other in range(shape.size)]
            wrong = _exact(case, shape, rank, seed, weights)
            assert "times the bound" in (wrong.problem() or "")


def _exact(case: Case, shape: Topology, rank: int, seed: int, weights: list[float]) -> Result:
    """The result of one row (per rank), each rank's product taken so many times, rounded once."""
    empty = aligned((1, case.n), case.dtype)
    result = Result(0, 1, case, seed, rank, shape, use_of(0, case), empty, False)
    mine = slice(rank, rank + 1) if case.op == REDUCE_SCATTER else slice(None)
    products = [result._a(source)[mine].astype(np.float64) @ result._b(source).astype(np.float64) for source in range(shape.size)]
    empty[...] = sum(weight * product for weight, product in zip(weights, products, strict=True))
    return result


# ---- one seed, one run


def _traced(world: Any, case: Case, seed: int, delay: float) -> tuple[list[Result], int, int]:
    results = back_to_back(world, case, seed, delay, (7, 129))
    world.barrier()  # all kernels have ended
    return results, world.backend.thread_ranks.trace, world.backend.thread_ranks.turns


@each(
    WORLDS,
    ("1x1", "two_shot"),
    ("1x2", "one_shot"),
    ("1x4", REDUCE_SCATTER),
    ("1x4", "two_shot"),
    ("1x4", "packets"),
    ("1x4", "scattered"),
    ("2x2", "one_shot"),
    ("2x2", "two_shot"),
    ("4x1", REDUCE_SCATTER),
)
@pytest.mark.drawn(1)
def test_the_same_seed_gives_the_same_run(request: pytest.FixtureRequest, world: str, how: str) -> None:
    seed, case = request.config.getoption("--seed"), case_of(how, "bfloat16", 136, 72)
    first, again, other = (
        ranks(_traced, world, case, seed, delay, seed=seed + more)
        for delay, more in ((0.0, 0), (0.02, 0), (0.0, 1))  # whatever the host's timing
    )
    for run in (first, again, other):
        check([results for results, _, _ in run])
        assert [bits(results) for results, _, _ in run] == [bits(results) for results, _, _ in first]
    assert [after for _, *after in again] == [after for _, *after in first]
    assert {trace for _, trace, _ in other}.isdisjoint({trace for _, trace, _ in first}), "another seed is another interleaving"


# ---- the same bits whatever happens


def _calls(world: Any, case: Case, seed: int, longest_delay: float, rows: tuple[int, ...], count: int) -> list[Result]:
    """The inputs are the seed's, the ranks' delays are fresh."""
    rank = Rank(world, case, seed, rows)
    delays = np.random.default_rng().random(count) * longest_delay
    return [rank.call(i, rows[i % len(rows)], use_of(i, case), delay) for i, delay in enumerate(delays)]


def _same(runs: Iterator[list[list[Result]]]) -> None:
    first: list[list[bytes]] = []
    for run in runs:
        if not first:
            check(run)
            first = [bits(results) for results in run]
        assert [bits(results) for results in run] == first


def _network(patch: pytest.MonkeyPatch, seed: int, window_us: float) -> None:
    faults = _FAULTS(seed=seed, delay_us=window_us, reorder_us=window_us)
    patch.setattr(emulated, "Faults", lambda: faults)


@each(("1x4", "2x2"), ("1x4", REDUCE_SCATTER), ("1x4", "packets"), ("1x4", "scattered"), ("2x2", "one_shot"), ("2x2", "two_shot"))
@pytest.mark.parametrize("partials", ["output", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.drawn(1)
def test_many_runs_give_the_same_bits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, how: str, partials: str
) -> None:
    """Ranks come late, roles are delayed by the scheduler (a seed per run), and the network delays and reorders what it carries.

    12 runs: each of the six kinds of lateness twice; 50 with --full. Whatever depends on the order of arrival differs between any two.
    """
    monkeypatch.setattr("mkernel.runtime.cpu.thread_ranks._IMPATIENT_SECONDS", 0.002)  # else the scheduler lets nobody go ahead
    seed, case = request.config.getoption("--seed"), case_of(how, "bfloat16", 72, 136, partials=partials)
    count = 50 if request.config.getoption("--full") else 12

    def runs() -> Iterator[list[list[Result]]]:
        for i in range(count):
            _network(monkeypatch, seed + i, (0.0, 5.0, 100.0)[i % 3])
            yield ranks(_calls, world, case, seed, 0.004 * (i % 2), (129, 7), 2, seed=seed + i)

    _same(runs())


@each(
    ("1x4", "2x2"),
    ("1x4", "one_shot"),
    ("1x4", "two_shot"),
    ("1x4", "packets"),
    ("1x4", "scattered"),
    ("2x2", REDUCE_SCATTER),
    ("2x2", "one_shot"),
)
@pytest.mark.drawn(1)
def test_a_search_of_schedules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, how: str) -> None:
    """One CTA per role: every wait matters. All of them for packets, or no tile would overtake another."""
    first, count = request.config.getoption("--seed"), 200 if request.config.getoption("--full") else 6
    case = case_of(how, "float16", 64, 520, split="default" if how in PACKETS else "narrow")

    def runs() -> Iterator[list[list[Result]]]:
        for seed in range(first, first + count):
            _network(monkeypatch, seed, (0.0, 20.0, 400.0)[seed % 3])
            yield ranks(_calls, world, case, first, 0.0, (300, 1, 129), 3, seed=seed)

    _same(runs())


@each(
    ("1x2", "1x4", "2x2", "4x1"), ("1x2", "one_shot"), ("1x4", REDUCE_SCATTER), ("1x4", "packets"), ("2x2", "two_shot"), ("4x1", "one_shot")
)
@pytest.mark.drawn(1)
def test_ranks_that_are_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, how: str) -> None:
    """Kernels wait for the entry of ranks that are busy elsewhere (their threads sleep), each time another one."""
    monkeypatch.setattr("mkernel.runtime.cpu.thread_ranks._IMPATIENT_SECONDS", 0.005)
    seed = request.config.getoption("--seed")
    check(ranks(back_to_back, world, case_of(how, "float16", 200, 72), seed, 0.05, (0, 7, 129), seed=seed))


@each(("2x2", "4x1"), ("2x2", REDUCE_SCATTER), ("2x2", "one_shot"), ("4x1", "two_shot"))
@pytest.mark.parametrize("window_us", [pytest.param(5.0, marks=pytest.mark.slow), 2000.0])
@pytest.mark.drawn(1)
def test_a_network_that_delays_and_reorders(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, how: str, window_us: float
) -> None:
    """As SRD may: the bytes of a put land in any order before its signal, as late as is legal."""
    seed = request.config.getoption("--seed")
    _network(monkeypatch, seed, window_us)
    check(ranks(back_to_back, world, case_of(how, "bfloat16", 200, 520), seed, 0.0, (0, 7, 300), seed=seed))


# ---- several plans and ways to call


def _alternating(world: Any, cases: tuple[Case, ...], seed: int) -> list[list[Result]]:
    """The results by case."""
    several = [Rank(world, case, seed + i, (7, 129)) for i, case in enumerate(cases)]
    order = np.random.default_rng(seed).permutation(3 * len(cases)) % len(cases)
    results: list[list[Result]] = [[] for _ in cases]
    for number, i in enumerate(order):
        results[i].append(several[i].call(number, (7, 129)[number % 2], use_of(number, cases[i])))
    return results


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(1)
def test_plans_of_different_ops_alternate(request: pytest.FixtureRequest, world: str) -> None:
    """One workspace and one set of flags for all: what one call leaves there must not disturb the next."""
    seed = request.config.getoption("--seed")
    cases = (
        Case("bfloat16", 136, 72),
        case_of(REDUCE_SCATTER, "bfloat16", 72, 200),
        case_of("one_shot", "float16", 8, 8),
        case_of("two_shot", "bfloat16", 64, 64, split="narrow"),
        case_of("packets", "bfloat16", 64, 72),
        case_of("two_shot", "float16", 136, 520, False, partials="float32"),
        case_of(REDUCE_SCATTER, "float16", 8, 264, False, "narrow", "float32"),
        Case("bfloat16", 64, 64, op=ALLREDUCE),
    )
    found = ranks(_alternating, world, cases, seed, seed=seed)
    for i in range(len(cases)):
        check([by_case[i] for by_case in found])


def _planned(world: Any, how: str) -> tuple[list[str], bytes]:
    case = case_of(how, "float16", 64, 96)
    rows = case.rows_of_a(40, world.size)
    a, b = (random(shape, "float16", np.random.default_rng([world.rank, i])) for i, shape in enumerate(((rows, 64), (64, 96))))
    plan = mk.plan(case.op, a, b, world=world, **case.options)
    assert plan.can_run()
    assert plan.split().total <= world.backend.sm_count
    in_packets = how != REDUCE_SCATTER and world.num_nodes == 1 and world.size > 1
    assert (plan.workspace_bytes > 0) == ((world.size > 1 or how == "one_shot") and not in_packets)
    out = aligned((40, 96), "float16")
    assert plan.run(a, b, out=out) is out
    call = getattr(mk, case.op)
    results = [plan.run(a, b), call(_Lent(a), _Lent(b), **case.options), call(a, np.asfortranarray(b), split=plan.split(), **case.options)]
    assert all(result.tobytes() == out.tobytes() for result in results)
    if case.op == ALLREDUCE:  # by size, and that is small here
        usual = choose_algorithm(world.topology, 40, 96)
        assert mk.gemm_allreduce(a, b).tobytes() == mk.gemm_allreduce(a, b, algorithm=usual).tobytes()
    return plan.describe().splitlines(), out.tobytes()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", (*HOWS, "scattered"))
@pytest.mark.drawn(2)
def test_planned_first_and_called_in_other_ways(world: str, how: str) -> None:
    found = ranks(_planned, world, how, seed=1)
    described, _ = found[0]
    scatters = how in (REDUCE_SCATTER, "scattered")
    for word in ("float16", f"{world} ranks", *(() if scatters else (how,))):
        assert word in described[0]
    assert scatters or len({result for _, result in found}) == 1


def test_owners_without_tiles_at_the_end_of_a_group_of_rows(request: pytest.FixtureRequest) -> None:
    """16 rows of tiles for three owners: the last has a tile less."""
    seed = request.config.getoption("--seed")
    check(ranks(_calls, "1x3", case_of("two_shot", "bfloat16", 8, 8), seed, 0.0, (2048, 7), 2, seed=seed))


def test_the_algorithm_is_chosen_by_size() -> None:
    def chosen(world: Any) -> list[str]:
        shapes = ((1, 8), (64, 256), (8192, 512))
        plans = [mk.plan(ALLREDUCE, aligned((m, 8), "float16"), aligned((8, n), "float16"), world=world) for m, n in shapes]
        return [next(name for name in ("one_shot", "two_shot") if name in plan.describe()) for plan in plans]

    assert ranks(chosen, "1x2", seed=1) == [["one_shot", "one_shot", "two_shot"]] * 2
