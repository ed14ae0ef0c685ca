"""What tiles of an allgather_gemm cover: which spans and shares there are, what is chosen, and that calls with them are safe."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.planner.gemm import BLOCK_K, BLOCK_M
from mkernel.planner.proofs.allgather_gemm import call_of
from mkernel.planner.proofs.areas import PACKETS
from mkernel.planner.row_classes import classes
from mkernel.planner.spans import Product, candidates, spans_of
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology
from tests.shared.proofs import check_call, check_order, check_steps_wait_for_entries

WORLDS = [Topology(*shape) for shape in ((1, 1), (2, 2), (4, 4), (8, 8), (2, 1), (4, 2), (4, 1), (6, 2), (6, 3), (8, 4))]
SMS = 132


def problem_of(topology: Topology, n: int, k: int) -> AllGatherGemmProblem:
    return AllGatherGemmProblem(topology, n, k, "bfloat16", True)


@pytest.mark.parametrize("topology", WORLDS, ids=str)
def test_planes_divide_nodes_or_are_whole_nodes(topology: Topology) -> None:
    spans = list(spans_of(topology))
    assert spans[0] == 1
    assert spans[-1] == topology.size
    for span in spans:
        for plane in range(topology.size // span):
            nodes = {topology.node(rank) for rank in range(plane * span, (plane + 1) * span)}
            assert len(nodes) == max(1, span // topology.ranks_per_node), "a plane is inside a node, or all of some nodes"


@pytest.mark.parametrize("topology", WORLDS, ids=str)
def test_candidates_are_what_kernels_can_do(rng: np.random.Generator, topology: Topology) -> None:
    for _ in range(20):
        rows, n, k = int(2 ** rng.uniform(0, 13)), 8 * int(2 ** rng.uniform(0, 11)), 8 * int(2 ** rng.uniform(0, 10))
        found = list(candidates(Product(topology, rows, n, k, SMS), 0.35))
        assert (found[0].span, found[0].shares) == (1, 1)
        assert {one.span for one in found} == set(spans_of(topology))
        for one in found:
            tiles = math.ceil(one.span * rows / BLOCK_M) * topology.size // one.span * math.ceil(n / one.tile.block_n)
            assert one.seconds > 0
            assert one.shares == 1 or (topology.num_nodes == 1 and tiles * one.shares <= SMS)
            assert one.shares <= math.ceil(k / BLOCK_K)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("s", [2048, 4096, 8192, 16384])
def test_where_shards_are_many_tiles_each_has_its_own(size: int, s: int) -> None:
    """The tables that the other choices were measured with stay as they are."""
    plan = make_plan(problem_of(Topology(size, size), s // 4, s), s // size, SMS)
    assert (plan.span, plan.shares) == (1, 1)


@pytest.mark.parametrize(
    ("size", "shape", "chosen"),
    [
        (4, (256, 14336, 8192), (4, 1)),  # 64 rows of each rank: half a tile
        (4, (20, 15872, 5504), (4, 1)),
        (4, (88, 12656, 3832), (4, 1)),
        (4, (84, 1480, 5528), (4, 5)),  # 24 tiles for 132 SMs
        (2, (88, 12656, 3832), (2, 1)),
        (1, (16, 2560, 8192), (1, 6)),
    ],
)
def test_few_rows_share_tiles_and_few_tiles_are_shared(size: int, shape: tuple[int, int, int], chosen: tuple[int, int]) -> None:
    m, n, k = shape
    plan = make_plan(problem_of(Topology(size, size), n, k), m // size, SMS, tiling=Tiling(packets=0))
    alone = make_plan(plan.problem, plan.rows, SMS, tiling=Tiling(span=1, shares=1))
    assert (plan.span, plan.shares) == chosen
    assert plan.num_tiles * plan.shares <= SMS
    assert (alone.span, alone.shares) == (1, 1)


def test_an_own_kernel_is_worth_it_for_few_classes_only() -> None:
    """Between two ranks, where warps may push too, all widths would be many kernels: those with shares are at most two more."""
    for n, k in itertools.product((1024, 2568, 4096, 14336), (4096, 8192)):
        specs = {make_plan(problem_of(Topology(2, 2), n, k), rows, SMS, specialize="none").spec for rows in classes(16384)}
        assert len(specs) <= 8, (n, k)


@pytest.mark.parametrize(
    ("topology", "tiling"),
    [
        (Topology(4, 4), Tiling(span=3)),
        (Topology(6, 2), Tiling(span=3)),
        (Topology(4, 2), Tiling(shares=2)),
        (Topology(2, 2), Tiling(shares=200)),
        (Topology(2, 2), Tiling(shares=200, packets=0)),
        (Topology(2, 2), Tiling(shares=200, packets=1)),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(topology: Topology, tiling: Tiling) -> None:
    with pytest.raises(TilingError, match="span must be one of 1, 2"):
        make_plan(problem_of(topology, 256, 1024), 100, SMS, tiling=tiling)


def test_tilings_have_different_numbers() -> None:
    """What ranks compare: a rank that means other tiles is found."""
    values = [None, 1, 2, 3, 4, 8, 256]
    tilings = [
        Tiling(*fields)
        for fields in itertools.product([None, 64, 128, 192, 256], values, values, *[[None, 1, 2, 4], [None, 0, 1, 2], [None, 1, 2, 4]])
    ]
    assert len({tiling.number for tiling in tilings}) == len(tilings)
    assert Tiling().number == 0
    assert Tiling.parse({"span": 2, "shares": 3}) == Tiling(None, 2, 3)
    assert Tiling.parse({"packets": 0}) == Tiling(packets=0)
    for wrong in (
        {"columns": 64},
        {"span": 0},
        {"span": True},
        {"block_n": 100},
        {"shares": 257},
        {"span": "2"},
        {"packets": 3},
        {"packets": -1},
    ):
        with pytest.raises(ValueError, match="must be"):
            Tiling.parse(wrong)  # type: ignore[arg-type]


# ---- proofs


def _draw(rng: np.random.Generator, topology: Topology) -> AllGatherGemmPlan:
    spans = list(spans_of(topology))
    span = spans[rng.integers(len(spans))]
    packets = int(rng.integers(2)) if topology.num_nodes == 1 < topology.size == span else 0
    shares = int(rng.integers(1, 5)) if topology.num_nodes == 1 else 1
    columns = int(rng.choice((64, 128)))
    rows, n, k = int(rng.integers(1, 400)), 8 * int(rng.integers(1, 40)), 64 * int(rng.integers(4, 20))
    return make_plan(problem_of(topology, n, k), rows, 8, tiling=Tiling(columns, span, shares, packets=packets))


@pytest.mark.parametrize("topology", [Topology(*shape) for shape in ((1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (4, 1))], ids=str)
def test_calls_are_safe(rng: np.random.Generator, topology: Topology) -> None:
    """Nothing waits in a circle, what is read has been waited for, and calls of any two tilings do not meet in memory."""
    calls = [call_of(_draw(rng, topology)) for _ in range(4)]
    for call in calls:
        check_call(call)
    for first, second in itertools.product(calls, repeat=2):
        check_order(first, second, "tilings")


def test_the_proofs_can_fail() -> None:
    """Steps that write without having waited for entries are found, tiles that leave packets among them."""
    plan = make_plan(problem_of(Topology(2, 2), 136, 512), 90, 8, tiling=Tiling(64, 2, 3))
    call = call_of(plan)
    assert any(access.area.segment == PACKETS and access.writes for access in call.accesses)
    check_steps_wait_for_entries(call, "tiles that span shards and share K")
