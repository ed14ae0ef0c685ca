"""The plans of gemm_reduce_scatter and gemm_allreduce by bulk copies: pure Python. For packets: test_packets.py.

tests/ops/test_mirror_reduce.py compares the kernels' copy of the schedule.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mkernel.planner.gemm import BLOCK_M, GemmTile
from mkernel.planner.proofs.reduce import wait_graph
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem, Tile, choose_algorithm, default_split, make_plan
from mkernel.planner.split import Split, SplitError
from mkernel.planner.topology import Topology

WORLDS = [Topology(nodes * per_node, per_node) for nodes in range(1, 5) for per_node in range(1, 9)]  # up to 4 x 8
HOWS = (REDUCE_SCATTER, "one_shot", "two_shot")
SIZES = [(0, 64), (1, 8), (7, 72), (128, 256), (129, 264), (300, 520), (1000, 1000)]  # rows, N


def problem_of(topology: Topology, how: str, n: int, **changes: Any) -> ReduceProblem:
    op, algorithm = (REDUCE_SCATTER, "two_shot") if how == REDUCE_SCATTER else (ALLREDUCE, how)
    return dataclasses.replace(ReduceProblem(op, topology, n, 64, "bfloat16", True, "output", algorithm), **changes)


def plan_of(topology: Topology, how: str, rows: int, n: int, sms: int = 12, split: Split | None = None, **changes: Any) -> ReducePlan:
    return dataclasses.replace(make_plan(problem_of(topology, how, n), rows, sms, split), **changes)


@pytest.fixture(autouse=True)
def _no_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the values are."""
    monkeypatch.setattr("mkernel.planner.reduce.fits_packets", lambda plan: False)


def label(topology: Topology) -> str:
    return f"{topology.num_nodes}x{topology.ranks_per_node}"


def existing(plan: ReducePlan, rank: int) -> list[Tile]:
    return [tile for tile in plan.tiles_of(rank) if plan.exists(tile.owner, tile.index)]


each_world = pytest.mark.parametrize(  # 6 and 7 ranks per node with --full only: 5 is no power of two, either
    "topology", [pytest.param(world, marks=pytest.mark.slow if world.ranks_per_node in (6, 7) else ()) for world in WORLDS], ids=label
)
each_how = pytest.mark.parametrize("how", HOWS)


# ---- tiles


@each_world
@each_how
def test_every_tile_has_one_owner_and_is_computed_once_by_every_rank(topology: Topology, how: str) -> None:
    for rows, n in SIZES:
        for plan in (plan_of(topology, how, rows, n), plan_of(topology, how, rows, n, group_tiles=5, group_m=3, tile=GemmTile.deepest(64))):
            grid = set(itertools.product(range(plan.tile_rows), range(plan.tiles_n)))
            # Of a reduce-scatter every owner has a grid of its own; where everyone adds up everything, every rank "owns" all tiles.
            owners = range(topology.size)
            owned = {owner: [plan.at(owner, i) for i in range(plan.tiles) if plan.exists(owner, i)] for owner in owners}
            if how == "two_shot":
                assert sorted((tile.m, tile.n) for tiles in owned.values() for tile in tiles) == sorted(grid)
            else:
                assert all(sorted((tile.m, tile.n) for tile in tiles) == sorted(grid) for tiles in owned.values())
            for rank in {0, topology.size // 2, topology.size - 1}:
                expected = owned[rank] if how == "one_shot" else [tile for tiles in owned.values() for tile in tiles]
                computed = [tile for tile in existing(plan, rank) if not tile.is_sum]
                assert len(computed) == len(expected)
                assert set(computed) == set(expected)
                summed = [dataclasses.replace(tile, is_sum=False) for tile in existing(plan, rank) if tile.is_sum]
                assert summed == (expected if how == "one_shot" else [])
            assert plan.tile_rows * BLOCK_M >= rows > (plan.tile_rows - 1) * BLOCK_M
            assert plan.tiles_n * plan.tile.block_n >= n > (plan.tiles_n - 1) * plan.tile.block_n


@each_world
@pytest.mark.parametrize("how", [REDUCE_SCATTER, "two_shot"])
def test_sums_of_nodes_are_made_once(topology: Topology, how: str) -> None:
    plan = plan_of(topology, how, 300, 520, group_tiles=4)
    for node in range(topology.num_nodes):
        sums = [tile for rank in topology.node_ranks(node) for tile in plan.sums_of(rank)]
        assert all(tile.is_sum for tile in sums)
        others = [rank for rank in range(topology.size) if topology.node(rank) != node]
        assert collections.Counter((tile.owner, tile.index) for tile in sums) == collections.Counter(
            itertools.product(others, range(plan.tiles))
        )
    for rank in range(topology.size):
        assert {topology.local_rank(tile.owner) for tile in plan.sums_of(rank)} <= {topology.local_rank(rank)}, "puts stay on their rail"


@each_world
@pytest.mark.parametrize("how", [REDUCE_SCATTER, "two_shot"])
def test_tiles_come_in_the_order_of_need(topology: Topology, how: str) -> None:
    """What must cross the network first, then what the node's ranks wait for; own tiles a group later, when what they add has come."""
    plan = plan_of(topology, how, 600 * (1 if how == REDUCE_SCATTER else topology.size), 520, group_tiles=3)
    assert len(plan.groups()) > 1
    for rank in range(topology.size):
        peers = plan.peers(rank)
        assert sorted([*peers, rank]) == list(range(topology.size))
        near = [topology.node(peer) == topology.node(rank) for peer in peers]
        assert near == sorted(near)
        own_rail = [topology.local_rank(peer) == topology.local_rank(rank) for peer in peers if topology.node(peer) != topology.node(rank)]
        assert own_rail == sorted(own_rail), "the own rail's sum needs the node's other ranks, which send theirs first"
        order = list(plan.tiles_of(rank))
        group = {(tile.owner, tile.index): tile.index // plan.group_tiles for tile in order}
        sent = [group[tile.owner, tile.index] for tile in order if tile.owner != rank]
        assert sent == sorted(sent)
        for at, tile in enumerate(order):
            if tile.owner == rank and topology.size > 1:
                before = {group[other.owner, other.index] for other in order[:at] if other.owner != rank}
                assert max(before) == min(group[rank, tile.index] + 1, len(plan.groups()) - 1)
    for i in range(topology.size - 1):
        assert sorted(plan.peers(rank)[i] for rank in range(topology.size)) == list(range(topology.size)), (
            "nobody is sent to by two at once"
        )


@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_owners_come_in_turn_where_links_are_flooded(size: int) -> None:
    """Tiles of little K are computed faster than they can be sent: then from the second group on one for each peer, and an own one."""
    topology = Topology(size, size)
    plan = plan_of(topology, REDUCE_SCATTER, 600, 520, group_tiles=4)
    assert plan.interleaved
    assert len(plan.groups()) > 2
    whole = sum(len(group) == plan.group_tiles for group in plan.groups())
    for rank in range(size):
        peers = plan.peers(rank)
        owners = [tile.owner for tile in plan.tiles_of(rank)]
        begin, end = (size - 1) * plan.group_tiles, (size * whole - 1) * plan.group_tiles
        assert owners[:begin] == [peer for peer in peers for _ in range(plan.group_tiles)]
        assert owners[begin:end] == [*peers, rank] * ((end - begin) // size)
        assert owners[-plan.group_tiles :] == [rank] * plan.group_tiles, "the last are own ones"


def test_owners_follow_each_other_where_the_links_keep_up() -> None:
    problem = ReduceProblem(REDUCE_SCATTER, Topology(4, 4), 8192, 2048, "bfloat16", False)
    assert make_plan(problem, 2048, 132).interleaved
    assert not make_plan(dataclasses.replace(problem, k=4096), 2048, 132).interleaved, "half as many bytes in the same time"
    assert make_plan(dataclasses.replace(problem, k=4096, partials="float32"), 2048, 132).interleaved
    assert "in turn" in make_plan(problem, 2048, 132).describe()
    assert "in turn" not in make_plan(dataclasses.replace(problem, n=2048), 128, 132).describe(), "one group"
    assert not make_plan(dataclasses.replace(problem, topology=Topology(2, 2)), 2048, 132).interleaved, "half of the tiles are own ones"
    assert not make_plan(dataclasses.replace(problem, topology=Topology(4, 2)), 2048, 132).interleaved, "the network decides"
    assert not make_plan(dataclasses.replace(problem, topology=Topology(1, 1)), 2048, 132).interleaved
    two_shot = ReduceProblem(ALLREDUCE, Topology(4, 4), 8192, 2048, "bfloat16", False)
    assert not make_plan(two_shot, 8192, 132).interleaved


def test_few_kernels_serve_many_shapes() -> None:
    """Rows are no constant of a kernel; what follows from them takes few values."""
    plans = [
        make_plan(ReduceProblem(REDUCE_SCATTER, Topology(4, 2), 4096, 1024, "bfloat16", False), rows, 132) for rows in range(1, 20_000, 37)
    ]
    assert {plan.chunk_tiles.bit_count() for plan in plans} == {1}
    assert {plan.put_bytes for plan in plans if plan.tiles >= 256} == {512 << 10, 1 << 20, 2 << 20, 4 << 20}
    assert len({plan.spec for plan in plans}) <= 4, "tile widths"


# ---- the data heap and the flags


@each_world
@each_how
@pytest.mark.parametrize("partials", ["output", "float32"])
def test_areas(topology: Topology, how: str, partials: str) -> None:
    for rows, n in SIZES:
        plan = make_plan(problem_of(topology, how, n, partials=partials), rows, 12)
        at = 0
        for name, offset in plan.offsets.items():
            assert offset == at
            at += plan.areas[name]
        assert at == plan.workspace_bytes
        assert plan.partial_bytes == BLOCK_M * plan.tile.block_n * (4 if partials == "float32" else 2)
        assert plan.result_bytes == BLOCK_M * plan.tile.block_n * 2
        assert plan.chunk_tiles >= 1
        assert plan.num_chunks * plan.chunk_tiles >= plan.tiles > (plan.num_chunks - 1) * plan.chunk_tiles
        if how != "one_shot":
            assert plan.chunk_tiles <= plan.group_tiles


# ---- the wait graph


def splits(topology: Topology, how: str) -> list[Split]:
    """One CTA per role; uneven numbers; more communication CTAs than tiles."""
    default = default_split(plan_of(topology, how, 1, 8, 64), 64, Split())
    numbers = ((1, 1, 1, 1), (2, 3, 2, 3), (5, 9, 7, 11))
    return [Split(c, *(n * bool(usual) for n, usual in zip(rest, dataclasses.astuple(default)[1:], strict=True))) for c, *rest in numbers]


# Rows, N, and what the planner would choose otherwise for such small problems: group_tiles, chunk_tiles, group_m.
_SCHEDULES = [(1, 64, 1, 1, 16), (300, 520, 3, 3, 2), (700, 264, 5, 2, 4)]


@each_world
@each_how
@pytest.mark.drawn(13)
def test_nobody_waits_for_ever(topology: Topology, how: str) -> None:
    for rows, n, group, chunk, group_m in _SCHEDULES:
        tile = GemmTile.deepest(64 if topology.size <= 8 else 256)
        for split in splits(topology, how):
            plan = plan_of(topology, how, rows, n, 64, split, tile=tile, group_tiles=group, chunk_tiles=chunk, group_m=group_m)
            graph = wait_graph(plan)
            assert graph.find_cycle() is None
            assert graph.missing() == set()
            assert collections.Counter(step[0] for step in graph) == +_steps(plan)


@each_world
@each_how
@pytest.mark.parametrize("sms", [4, 132])
@pytest.mark.drawn(17)
def test_nobody_waits_for_ever_in_what_the_planner_chooses(topology: Topology, how: str, sms: int) -> None:
    for rows, n in ((300, 2056), (1000, 520)):
        if topology.size > 8 and how == REDUCE_SCATTER:
            rows //= 8
        plan = make_plan(problem_of(topology, how, n), rows, sms)
        graph = wait_graph(plan)
        assert graph.find_cycle() is None, plan.describe()
        assert graph.missing() == set()


def _steps(plan: ReducePlan) -> collections.Counter[object]:
    """How many of each kind there must be, from the problem alone."""
    topology = plan.problem.topology
    size, per_node, others = topology.size, topology.ranks_per_node, topology.num_nodes - 1
    grid = plan.tile_rows * plan.tiles_n
    steps: collections.Counter[object] = collections.Counter(enter=size)
    if plan.one_shot:
        steps["tile"] = 2 * size * grid
        steps["send"] = size * others * -(-grid // plan.chunk_tiles)
        steps["tell"] = steps["send"] if per_node > 1 else 0
        return steps
    total = grid * (size if plan.op == REDUCE_SCATTER else 1)  # tiles of all owners
    owned = [grid if plan.op == REDUCE_SCATTER else max(0, min(plan.tiles, grid - owner * plan.tiles)) for owner in range(size)]
    chunks = sum(-(-tiles // plan.chunk_tiles) for tiles in owned)
    steps["tile"] = size * total
    steps["sum"] = others * total  # of every node for every other's tiles
    steps["put"] = others * chunks
    if plan.op == ALLREDUCE:
        steps["send"] = others * chunks
        steps["pull"] = (per_node - 1) * total + others * per_node * chunks if size > 1 else 0
    return steps


def test_the_graph_knows_what_is_added() -> None:
    """Rank 0 of 2 x 2: its own tile adds rank 1's, and the sum that rank 2 makes of its own and rank 3's."""
    plan = plan_of(Topology(4, 2), "two_shot", 300, 256, split=Split(1, 1, 1, 1), tile=GemmTile.deepest(64), group_tiles=2, chunk_tiles=2)
    graph = wait_graph(plan)
    assert plan.tiles == 3
    tiles = {rank: existing(plan, rank) for rank in range(4)}

    def computed(rank: int, owner: int, index: int) -> Step:
        return ("tile", rank, tiles[rank].index(plan.at(owner, index)))

    entered = {("enter", rank) for rank in range(4)}
    own = tiles[0].index(plan.at(0, 1))
    assert set(graph.before(("tile", 0, own))) == entered | {computed(1, 0, 1), ("put", 2, 0, 0), ("tile", 0, own - 1)}
    assert set(graph.before(("put", 2, 0, 0))) == entered | {("sum", 2, 0, 0), ("sum", 2, 0, 1)}
    assert set(graph.before(("sum", 2, 0, 1))) == entered | {computed(2, 0, 1), computed(3, 0, 1), ("sum", 2, 0, 0)}
    assert set(graph.before(computed(3, 0, 1))) == entered | {computed(3, 0, 0)}, "what is sent waits for nobody"
    assert computed(0, 0, 2) in graph.before(("pull", 1, 0, 2))
    assert ("send", 0, 2, 1) in graph.before(("pull", 2, 0, 1)), "the own rail's chunk by put"
    assert ("pull", 2, 0, 1) in graph.before(("pull", 3, 0, 1)), "the others' from the node's rank on that rail"


def _own_tiles_first(graph: WaitGraph, plan: ReducePlan) -> None:
    """A rank adds up its own tiles before it has computed what it sends."""
    for rank in range(plan.problem.topology.size):
        tiles = existing(plan, rank)
        first_own = next(i for i, tile in enumerate(tiles) if tile.owner == rank)
        graph.add(("tile", rank, 0), [("tile", rank, first_own)])


def _sum_after_own(graph: WaitGraph, plan: ReducePlan) -> None:
    """Sums for other nodes as the last tile's epilogue."""
    for rank in range(plan.problem.topology.size):
        first = next(iter(plan.sums_of(rank)), None)
        if first is not None:
            graph.add(("sum", rank, first.owner, first.index), [("tile", rank, len(existing(plan, rank)) - 1)])


def _chunk_too_long(graph: WaitGraph, plan: ReducePlan) -> None:
    """The first put of sums brings the last group as well."""
    last = plan.tiles - 1
    for rank in range(plan.problem.topology.size):
        for peer in plan.problem.topology.rail_peers(rank):
            graph.add(("put", rank, peer, 0), [("sum", rank, peer, last)])


@pytest.mark.parametrize("how", [REDUCE_SCATTER, "two_shot"])
@pytest.mark.parametrize("plant", [_own_tiles_first, _sum_after_own, _chunk_too_long])
def test_a_schedule_that_deadlocks_is_found(plant: Callable[[WaitGraph, ReducePlan], None], how: str) -> None:
    for topology in (Topology(4, 2), Topology(8, 2), Topology(32, 8)):
        rows = 384 if how == REDUCE_SCATTER else 384 * topology.size
        plan = plan_of(topology, how, rows, 128, split=Split(1), group_tiles=1, chunk_tiles=1, tile=GemmTile.deepest(128))
        assert plan.tiles >= 3
        graph = wait_graph(plan)
        assert graph.find_cycle() is None
        plant(graph, plan)
        cycle = graph.find_cycle()
        assert cycle is not None
        for step, waited_for in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert waited_for in graph.before(step)


@pytest.mark.parametrize("how", [REDUCE_SCATTER, "two_shot"])
def test_puts_longer_than_a_group_deadlock(how: str) -> None:
    """Why the planner limits them: a chunk's last sums come after own tiles that wait for the chunk."""
    topology = Topology(4, 2)
    plan = plan_of(topology, how, 300 if how == REDUCE_SCATTER else 1200, 256, split=Split(1), tile=GemmTile.deepest(64), group_tiles=3)
    assert wait_graph(dataclasses.replace(plan, chunk_tiles=3)).find_cycle() is None
    assert wait_graph(dataclasses.replace(plan, chunk_tiles=7)).find_cycle() is not None


def test_own_tiles_before_what_is_sent_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of tiles is not for speed alone."""
    plan = plan_of(Topology(4, 4), REDUCE_SCATTER, 129, 64)
    orders = {rank: sorted(plan.tiles_of(rank), key=lambda tile: tile.owner != rank) for rank in range(4)}
    assert wait_graph(plan).find_cycle() is None
    monkeypatch.setattr(ReducePlan, "tiles_of", lambda self, rank: iter(orders[rank]))
    assert wait_graph(plan).find_cycle() is not None


# ---- splits


@pytest.mark.parametrize(
    ("size", "rows", "k", "ctas"),
    [
        *((2, 16384, 8192, 4), (2, 8192, 4096, 5), (4, 16384, 4096, 8), (4, 32768, 8192, 4)),
        *((2, 8192, 2048, 14), (4, 8192, 2048, 14), (4, 99, 8, 14)),  # the links take longer than the products
    ],
)
def test_as_many_ctas_pull_as_are_in_time(size: int, rows: int, k: int, ctas: int) -> None:
    problem = ReduceProblem(ALLREDUCE, Topology(size, size), max(rows, 8), k, "bfloat16", True)
    assert make_plan(problem, rows, 132, Split(compute=1)).split.intra_comm == ctas


@pytest.mark.parametrize(
    ("op", "topology", "rows", "k", "group"),
    [
        (ALLREDUCE, Topology(4, 4), 8192, 2048, 512),  # the links take longer: all of an owner's tiles
        (ALLREDUCE, Topology(4, 4), 8192, 4096, 64),
        (ALLREDUCE, Topology(4, 4), 32768, 8192, 256),
        (ALLREDUCE, Topology(2, 2), 8192, 4096, 128),
        (ALLREDUCE, Topology(2, 2), 8192, 2048, 1024),
        (ALLREDUCE, Topology(4, 2), 8192, 2048, 64),
        (ALLREDUCE, Topology(4, 2), 32768, 8192, 1024),
        (REDUCE_SCATTER, Topology(4, 4), 2048, 2048, 64),
    ],
)
def test_how_many_tiles_of_an_owner_follow_each_other(op: str, topology: Topology, rows: int, k: int, group: int) -> None:
    problem = ReduceProblem(op, topology, 8192 if rows < 8192 else rows, k, "bfloat16", False)
    assert make_plan(problem, rows, 132).group_tiles == group


@each_world
@each_how
@pytest.mark.parametrize("sms", [4, 8, 132])
def test_the_default_split_always_fits(topology: Topology, how: str, sms: int) -> None:
    split = plan_of(topology, how, 300, 64, sms).split
    several, one_shot = topology.num_nodes > 1, how == "one_shot"
    assert split.total == sms
    assert (split.intra_comm or 0) > 0 or how != "two_shot" or topology.size == 1
    assert ((split.inter_send or 0) > 0) == several
    assert ((split.inter_reduce or 0) > 0) == (several and not one_shot)


@pytest.mark.parametrize(
    ("world", "how", "split", "rule"),
    [
        (Topology(4, 4), REDUCE_SCATTER, Split(intra_comm=1), "intra_comm has nothing to do"),
        (Topology(4, 4), REDUCE_SCATTER, Split(inter_reduce=1), "inter_reduce has nothing to do"),
        (Topology(4, 2), REDUCE_SCATTER, Split(inter_reduce=0), "inter_reduce is needed"),
        (Topology(4, 2), REDUCE_SCATTER, Split(inter_send=0), "inter_send is needed"),
        (Topology(4, 4), "two_shot", Split(intra_comm=0), "intra_comm is needed"),
        (Topology(4, 1), "two_shot", Split(intra_comm=0), "intra_comm is needed"),
        (Topology(4, 2), "one_shot", Split(inter_reduce=1), "inter_reduce has nothing to do"),
        (Topology(4, 2), "one_shot", Split(intra_comm=1), "intra_comm has nothing to do"),
        (Topology(1, 1), "two_shot", Split(intra_comm=1), "intra_comm has nothing to do"),
    ],
    ids=str,
)
def test_a_split_that_does_not_fit(world: Topology, how: str, split: Split, rule: str) -> None:
    with pytest.raises(SplitError, match=rule):
        plan_of(world, how, 300, 64, 12, split)


# ---- what is compiled, what ranks compare, and what is chosen


@each_how
def test_the_number_of_rows_is_no_compile_time_constant(how: str) -> None:
    few, many = (plan_of(Topology(4, 4), how, rows, 512, tile=GemmTile(128, 4), group_tiles=8, chunk_tiles=4) for rows in (65, 3000))
    assert few.spec == many.spec
    assert few.digest != many.digest


def test_plans_that_differ_have_other_digests() -> None:
    """Also in the 24 bits that travel in the entry flags, for all that a user is likely to confuse."""
    base = ReduceProblem(ALLREDUCE, Topology(4, 2), 256, 64, "bfloat16", True, "output", "two_shot")
    changes: list[dict[str, Any]] = [
        {},
        {"n": 64},
        {"k": 256},
        {"dtype": "float16"},
        {"b_row_major": False},
        {"topology": Topology(4, 4)},
        {"partials": "float32"},
        {"algorithm": "one_shot"},
        {"op": REDUCE_SCATTER},
    ]
    plans = [make_plan(dataclasses.replace(base, **change), 128, 12) for change in changes]
    plans.insert(1, make_plan(base, 129, 12))
    plans += [
        make_plan(base, 128, 12, split) for split in (Split(compute=1), Split(intra_comm=1), Split(inter_send=2), Split(inter_reduce=2))
    ]
    plans += [
        make_plan(base, 128, 12, None, GemmTile.deepest(128)),
        make_plan(base, 128, 12, group_tiles=7),
        dataclasses.replace(plans[0], group_m=8),
    ]
    assert len({plan.digest & 0xFFFFFF for plan in plans}) == len(plans)
    assert len({plan.describe().splitlines()[0] for plan in plans[:14]}) >= 13, "all but the number of inter_send CTAs that is the default"
    assert make_plan(base, 128, 12).digest == plans[0].digest


def test_the_first_line_of_the_description_tells_plans_apart() -> None:
    topology = Topology(4, 2)
    lines = [
        make_plan(problem_of(topology, how, 256, partials=partials), rows, 12, split).describe().splitlines()[0]
        for how, rows, partials, split in itertools.product(HOWS, (128, 129), ("output", "float32"), (None, Split(compute=1)))
    ]
    assert len(set(lines)) == len(lines)
    assert "gemm_reduce_scatter: a (512, 64), b (64, 256) row-major, bfloat16, partials output, 2x2 ranks, 10/0/1/1 SMs" in lines[0]


def test_few_rows_go_in_one_step() -> None:
    one = Topology(1, 1)
    for topology in (Topology(2, 2), Topology(4, 2), Topology(4, 1), Topology(32, 8)):
        assert choose_algorithm(topology, 1, 8192) == "one_shot"
        assert choose_algorithm(topology, 8192, 8192) == "two_shot"
        chosen = [choose_algorithm(topology, rows, 8192) for rows in range(0, 1000, 8)]
        assert chosen == sorted(chosen), "one step up to some number of rows, two from there on"
    assert choose_algorithm(one, 10**6, 10**6) == choose_algorithm(one, 1, 8)


@pytest.mark.parametrize("size", range(3, 9))
def test_more_than_two_ranks_inside_a_node_always_take_two_steps(size: int) -> None:
    assert {choose_algorithm(Topology(size, size), rows, n) for rows in (0, 1, 8192) for n in (8, 8192)} == {"two_shot"}
