"""The plan of allgather_gemm where shards travel in chunks: pure Python, no compiler. Packets: ``test_gather_packets.py``.

The kernel's own copy of the schedule is compared in tests/ops/test_mirror.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, Tile, make_plan
from mkernel.planner.gemm import BLOCK_M, SHARED_LIMIT, GemmTile
from mkernel.planner.proofs.allgather_gemm import wait_graph
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.pushing import default_split
from mkernel.planner.spans import spans_of
from mkernel.planner.specialize import parse
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

WORLDS = [Topology(nodes * per_node, per_node) for nodes in range(1, 5) for per_node in range(1, 9)]  # up to 4 x 8
SIZES = [(0, 64, 64), (1, 8, 8), (7, 72, 520), (128, 256, 512), (129, 264, 136), (300, 520, 8192), (1000, 1000, 4096)]  # rows, N, K


def plan_of(topology: Topology, rows: int, n: int, k: int, sms: int = 12, split: Split | None = None, **changes: Any) -> AllGatherGemmPlan:
    plan = make_plan(AllGatherGemmProblem(topology, n, k, "bfloat16", True), rows, sms, split, tiling=Tiling(packets=0))
    return dataclasses.replace(plan, **changes)


def label(topology: Topology) -> str:
    return f"{topology.num_nodes}x{topology.ranks_per_node}"


each_world = pytest.mark.parametrize(  # 6 and 7 ranks per node with --full only: 5 is no power of two, either
    "topology", [pytest.param(world, marks=pytest.mark.slow if world.ranks_per_node in (6, 7) else ()) for world in WORLDS], ids=label
)


# ---- tiles


@each_world
def test_tiles_cover_c_once(topology: Topology) -> None:
    for rows, n, k in SIZES:
        plans = [plan_of(topology, rows, n, k), plan_of(topology, rows, n, k, tile=GemmTile.deepest(64), group_m=3)]
        for plan in [*plans, *(dataclasses.replace(plans[0], span=span) for span in spans_of(topology))]:
            everything = {
                Tile(*t)
                for t in itertools.product(range(plan.planes), range(plan.tile_rows), range(plan.tiles_n), range(1, plan.slices + 1))
            }
            for rank in {0, topology.size // 2, topology.size - 1}:
                tiles = list(plan.tiles(rank))
                slices = [dataclasses.replace(t, slice=s) for t in tiles for s in ((t.slice,) if t.slice else range(1, plan.slices + 1))]
                assert len(slices) == plan.slices * plan.num_tiles == len(everything)
                assert set(slices) == everything
                assert [t.slice == 0 for t in tiles] == [True] * plan.whole_tiles + [False] * (len(tiles) - plan.whole_tiles)
            assert plan.tile_rows * BLOCK_M >= plan.span * rows > (plan.tile_rows - 1) * BLOCK_M
            assert plan.tiles_n * plan.tile.block_n >= n > (plan.tiles_n - 1) * plan.tile.block_n


@each_world
def test_tiles_come_in_the_order_of_arrival(topology: Topology) -> None:
    plan = plan_of(topology, 300, 520, 136, tile=GemmTile.deepest(128), span=1)
    for rank in range(topology.size):
        distance = [0 if t.plane == rank else 1 if topology.node(t.plane) == topology.node(rank) else 2 for t in plan.tiles(rank)]
        assert distance == sorted(distance), "own shard, then the node's, then the others'"
        assert distance.count(0) == plan.tile_rows * plan.tiles_n
    sources = [[plan.plane(rank, d) for d in range(topology.size)] for rank in range(topology.size)]
    for rank in range(topology.size):
        assert sources[rank][0] == rank
        assert sorted(sources[rank]) == list(range(topology.size))
        per_node = topology.ranks_per_node
        assert sources[rank][per_node::per_node] == topology.rail_peers(rank), "of another node, the own rail first"
    for d in range(topology.size):
        assert sorted(of_rank[d] for of_rank in sources) == list(range(topology.size)), "nobody is wanted by two ranks at once"


def test_shards_advance_together() -> None:
    """Their chunks arrive at about the same rate: of each shard row 0 comes before row 1 of any, as far as groups allow."""
    plan = plan_of(Topology(4, 4), 600, 64, 64, group_m=2, span=1)
    rows = [tile.m for tile in plan.tiles(1) if tile.plane != 1]
    assert rows == sorted(rows)
    columns = [(tile.plane, tile.n) for tile in plan_of(Topology(4, 4), 300, 512, 64, tile=GemmTile(128, 2), group_m=2, span=1).tiles(0)]
    assert columns[:4] == [(0, 0), (0, 0), (0, 1), (0, 1)], "two rows of tiles share a column of B"


def test_each_row_of_tiles_that_shards_bring_is_the_next(rng: np.random.Generator) -> None:
    """In a plane of all shards own tiles come first; then each 128 rows of the others, beside their last ones, release a row of tiles."""
    for rows in [128, 129, 255, *(int(2 ** rng.uniform(7, 12)) for _ in range(30))]:
        size = int(rng.integers(2, 9))
        plan = plan_of(Topology(size, size), rows, 64, 64, span=size)
        for rank in range(size):
            order, own = [tile.m for tile in plan.tiles(rank) if tile.n == 0], plan.own_rows(rank)
            assert order[: len(own)] == list(own)
            assert sorted(order) == list(range(plan.tile_rows))
            begun = order[len(own)] * BLOCK_M < rank * rows < (order[len(own)] + 1) * BLOCK_M  # the own shard begins in it
            for index, m in enumerate(order[len(own) + begun :][: rows // BLOCK_M * (size - 1)]):
                needed = 0
                for row in range(m * BLOCK_M, min((m + 1) * BLOCK_M, size * rows)):
                    shard, inside = divmod(row, rows)
                    last = (shard + 1) * rows % BLOCK_M if shard + 1 < size else 0  # so many rows travel first
                    needed = max(needed, (inside + last) % rows + 1 - last if shard != rank else 0)
                assert needed <= BLOCK_M * (index // (size - 1) + 1), (rows, size, rank, m)


def test_tiles_are_halved_where_all_ctas_can_take_the_halves_at_once(rng: np.random.Generator) -> None:
    """In each call, whatever is left over where a class of rows ends."""
    halved = 0
    for _ in range(60):
        n, rows = 8 * int(2 ** rng.uniform(6, 10)), int(2 ** rng.uniform(7, 11))
        plan = make_plan(AllGatherGemmProblem(Topology(4, 4), n, 2048, "bfloat16", True), rows, 132, tiling=Tiling(256, packets=0))
        for number in range(max(1, rows - 60), rows + 1):
            one = plan.of_rows(number)
            cut = one.num_tiles - one.whole_tiles
            assert cut == 0 or (one.whole_tiles % (one.split.compute or 1) == 0 < one.whole_tiles and 2 * cut <= one.split.total)
            halved += cut > 0
    assert halved


# ---- chunks


@each_world
def test_chunks(topology: Topology) -> None:
    for rows, n, k in SIZES:
        plan = plan_of(topology, rows, n, k)
        assert plan.chunk_rows & (plan.chunk_rows - 1) == 0
        assert 1 <= plan.chunk_rows <= BLOCK_M, "a tile never waits for rows far beyond its own"
        assert plan.blocks * plan.chunk_rows >= rows > (plan.blocks - 1) * plan.chunk_rows
        assert plan.parts == 1 or (topology.num_nodes == 1 and k % (plan.parts * 64) == 0), "puts are contiguous, parts are whole steps"
        numbers = [plan.chunk_index(block, part) for block in range(plan.blocks) for part in range(plan.parts)]
        assert sorted(numbers) == list(range(plan.chunks))
        assert plan.flag_words == topology.size * plan.chunks
        assert plan.workspace_bytes == (topology.size * rows * k * 2 if topology.size > 1 else 0)
        for one in (dataclasses.replace(plan, span=span) for span in spans_of(topology)):
            for tile in one.tiles(0):
                covered = range(tile.m * BLOCK_M, min((tile.m + 1) * BLOCK_M, one.span * rows))
                places = [divmod(tile.plane * one.span * rows + row, rows) for row in covered]  # rank, and row of its shard
                needed = sorted({(source, row // plan.chunk_rows) for source, row in places})
                chunks = [(source, plan.chunk_index(block, part)) for part in range(plan.parts) for source, block in needed]
                assert one.tile_chunks(tile) == chunks


@each_world
def test_chunk_writers(topology: Topology) -> None:
    """A shard crosses the network once per destination node, and a flag's writer is a rank that has the chunk."""
    plan = plan_of(topology, 7, 8, 8)
    crossings: collections.Counter[tuple[int, int]] = collections.Counter()
    for reader, source in itertools.product(range(topology.size), repeat=2):
        writer = plan.chunk_writer(reader, source)
        if writer != source:
            assert topology.node(writer) == topology.node(reader), "only a node's own ranks forward to it"
            assert plan.chunk_writer(writer, source) == source, "who forwards got it from the source"
        if topology.node(writer) != topology.node(reader):
            assert topology.local_rank(writer) == topology.local_rank(reader), "puts stay on their rail"
            crossings[source, topology.node(reader)] += 1
    assert set(crossings.values()) <= {1}
    assert len(crossings) == topology.size * (topology.num_nodes - 1)


# ---- the wait graph


def splits(topology: Topology) -> list[Split]:
    """One CTA per role; uneven numbers; more communication CTAs than chunks; none, where that is possible."""
    local, remote = int(topology.ranks_per_node > 1), int(topology.num_nodes > 1)
    chosen = [Split(compute, intra * local, send * remote, 0) for compute, intra, send in ((1, 1, 1), (2, 3, 2), (5, 9, 7))]
    return chosen if remote or not local else [*chosen, Split(1, 0, 0, 0), Split(5, 0, 0, 0)]


@each_world
def test_nobody_waits_for_ever(topology: Topology) -> None:
    for rows, n, k in ((1, 64, 64), (300, 264, 8192), (129, 8, 16384)):
        for split in splits(topology):
            span = list(spans_of(topology))[(rows + split.total) % len(list(spans_of(topology)))]
            plan = plan_of(topology, rows, n, k, 64, split, span=span)
            graph = wait_graph(plan)
            assert graph.find_cycle() is None
            assert graph.missing() == set()
            kinds = collections.Counter(step[0] for step in graph)
            foreign, local = topology.num_nodes - 1, topology.ranks_per_node > 1
            assert kinds["enter"] == topology.size
            of_k = 2 * plan.shares if plan.shares > 1 else 1  # shares, and as many sums
            assert kinds["tile"] == topology.size * of_k * (plan.whole_tiles + plan.slices * (plan.num_tiles - plan.whole_tiles))
            assert kinds["push"] == (local or span > 1) * topology.size * plan.chunks
            assert kinds["put"] == topology.size * plan.chunks * foreign
            assert kinds["forward"] == local * topology.size * plan.chunks * foreign


def test_the_graph_knows_what_a_tile_needs() -> None:
    """Rank 0 of 2 x 2 gets its neighbour's chunks pushed, its rail peer's by put, and those of rank 3 forwarded by rank 1."""
    plan = plan_of(Topology(4, 2), 300, 64, 8192, split=Split(1, 1, 1), span=1)
    assert plan.chunk_rows == 16
    graph = wait_graph(plan)
    tiles = list(plan.tiles(0))
    expected: dict[int, Callable[[int], Step]] = {
        1: lambda chunk: ("push", 1, chunk),
        2: lambda chunk: ("put", 2, chunk, 0),
        3: lambda chunk: ("forward", 1, 3, chunk),
    }
    entered = {("enter", r) for r in range(4)}
    for source, step in expected.items():
        at = tiles.index(Tile(source, 1, 0))
        waits = graph.before(("tile", 0, at))
        assert set(waits) == entered | {step(c) for c in range(8, 16)} | {("tile", 0, at - 1)}
    assert set(graph.before(("tile", 0, 1))) == entered | {("tile", 0, 0)}, "the own shard is there"
    assert set(graph.before(("forward", 1, 3, 0))) == {*entered, ("put", 3, 0, 1), ("push", 1, plan.chunks - 1)}
    assert set(graph.before(("put", 3, 2, 1))) == {*entered, ("put", 3, 1, 1)}


def _forward_before_pushing(graph: WaitGraph, plan: AllGatherGemmPlan) -> None:
    """The same CTA sends its own chunks to other nodes only after it has forwarded theirs."""
    topology = plan.problem.topology
    for rank in range(topology.size):
        for peer in topology.rail_peers(rank):
            graph.add(("put", rank, 0, peer), [("forward", rank, peer, 0)])


def _push_after_computing(graph: WaitGraph, plan: AllGatherGemmPlan) -> None:
    """Communication as the last tile's epilogue."""
    for rank in range(plan.problem.topology.size):
        graph.add(("push", rank, 0), [("tile", rank, plan.num_tiles - 1)])


def _push_when_received(graph: WaitGraph, plan: AllGatherGemmPlan) -> None:
    """Ranks that answer only those who have sent to them."""
    ranks = plan.problem.topology.node_ranks(0)
    for rank in ranks:
        graph.add(("push", rank, 0), [("push", (rank + 1) % len(ranks), 0)])


@pytest.mark.parametrize("plant", [_forward_before_pushing, _push_after_computing, _push_when_received])
def test_a_schedule_that_deadlocks_is_found(plant: Callable[[WaitGraph, AllGatherGemmPlan], None]) -> None:
    for topology in (Topology(4, 2), Topology(8, 2), Topology(32, 8)):
        plan = plan_of(topology, 129, 64, 64, split=Split(1, 1, 1))
        graph = wait_graph(plan)
        assert graph.find_cycle() is None
        plant(graph, plan)
        cycle = graph.find_cycle()
        assert cycle is not None
        for step, waited_for in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert waited_for in graph.before(step)


def test_tiles_in_another_order_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of tiles is for speed alone: communication never waits for tiles."""
    plan = plan_of(Topology(8, 4), 300, 264, 64)
    backwards = dict.fromkeys(range(8))
    for rank in backwards:
        backwards[rank] = list(reversed(list(plan.tiles(rank))))
    monkeypatch.setattr(AllGatherGemmPlan, "tiles", lambda self, rank: iter(backwards[rank]))
    assert wait_graph(plan).find_cycle() is None


# ---- splits


def test_without_intra_comm_warps_push() -> None:
    plan = make_plan(AllGatherGemmProblem(Topology(4, 4), 1024, 4096, "bfloat16", False), 1024, 132, Split(intra_comm=0))
    assert plan.split == Split(132, 0, 0, 0)
    assert plan.pushers == 132
    assert plan.chunk_rows * 4096 * 2 // plan.parts == 32 * 1024
    assert "pushed by a warp of 132 of them" in plan.describe()
    assert make_plan(plan.problem, 1024, 132).pushers == 0
    assert make_plan(dataclasses.replace(plan.problem, topology=Topology(1, 1)), 1024, 132, Split(intra_comm=0)).pushers == 0
    with pytest.raises(SplitError, match="intra_comm is needed here"):
        make_plan(dataclasses.replace(plan.problem, topology=Topology(4, 2)), 1024, 132, Split(intra_comm=0))


@pytest.mark.parametrize(
    ("size", "s", "pays"),
    [(2, 4096, False), (2, 8192, True), (2, 16384, False), (4, 2048, False), (4, 4096, False), (4, 8192, False), (4, 16384, False)],
)
def test_warps_push_where_that_saves_a_wave(size: int, s: int, pays: bool) -> None:
    """512 tiles are four waves of 132 SMs, and more than four of 124. With several peers, links slow the SMs that push."""
    problem = AllGatherGemmProblem(Topology(size, size), s // 4, s, "bfloat16", False)
    assert (make_plan(problem, s // size, 132).split.intra_comm == 0) is pays
    assert make_plan(problem, s // size, 132, Split(compute=120)).split.intra_comm != 0, "who names compute leaves room for the others"
    assert make_plan(problem, s // size, 132, Split(intra_comm=4)).split == Split(128, 4, 0, 0)


def test_pushing_takes_the_time_there_is() -> None:
    """Few CTAs push for a long product; for a short one, or where much is to be pushed for it, eight do."""
    by_size = {s: make_plan(AllGatherGemmProblem(Topology(4, 4), s // 4, s, "bfloat16", False), s // 4, 132) for s in (4096, 16384, 32768)}
    assert [plan.split.intra_comm for plan in by_size.values()] == [8, 8, 4]
    narrow = dataclasses.replace(by_size[32768].problem, n=1024)
    assert make_plan(narrow, 8192, 132).split.intra_comm == 8
    across = dataclasses.replace(by_size[32768].problem, topology=Topology(4, 2))
    assert make_plan(across, 8192, 132).split.intra_comm == 8, "they forward, too"


def test_most_of_what_pushes_has_a_chunk(rng: np.random.Generator) -> None:
    """Chunks of 256 KiB left five of eight CTAs without any, of a shard of 617 KB, whose gather took three times as long."""
    for _ in range(60):
        rows, n, k = (8 * int(2 ** rng.uniform(0, most)) for most in (10, 10, 10))
        ranks = int(rng.choice((2, 4, 8)))
        plan = make_plan(AllGatherGemmProblem(Topology(ranks, ranks), n, k, "bfloat16", True), rows, 132, tiling=Tiling(packets=0))
        pushing, bytes_of_chunk = plan.split.intra_comm or 0, plan.chunk_rows * k * 2 // plan.parts
        assert 2 * plan.chunks * plan.parts >= pushing or bytes_of_chunk <= 16 << 10 or plan.chunk_rows == 1, plan.describe()


def test_a_split_is_completed() -> None:
    default = Split(intra_comm=8, inter_send=4, inter_reduce=0)
    assert Split().complete(default, 132) == Split(120, 8, 4, 0)
    assert Split(intra_comm=2).complete(default, 132) == Split(126, 2, 4, 0)
    assert Split(compute=1).complete(default, 132) == Split(1, 8, 4, 0)
    assert Split(compute=1).complete(default, 132).total == 13
    assert Split(120, 8, 4, 0).complete(default, 132) == Split(120, 8, 4, 0)
    assert Split(compute=124).complete(default, 132) == Split(124, 4, 4, 0), "others share what is left"
    assert Split(intra_comm=128).complete(default, 132) == Split(1, 128, 3, 0)
    assert Split(122).complete(default, 132, step=2) == Split(122, 6, 4, 0)
    assert Split().complete(Split(intra_comm=0, inter_send=0, inter_reduce=0), 1) == Split(1, 0, 0, 0)


@pytest.mark.parametrize(
    ("split", "rule"),
    [
        (Split(compute=131), "asks for 133 SMs, the device has 132"),
        (Split(compute=0), "compute gets 0 of 132 SMs"),
        (Split(compute=-3), "compute gets -3 of 132 SMs"),
        (Split(intra_comm=131), "compute gets 0 of 132 SMs"),
        (Split(intra_comm=200), "compute gets -69 of 132 SMs"),
        (Split(intra_comm=0), "intra_comm is needed here and gets no SM"),
        (Split(inter_send=0), "inter_send is needed here and gets no SM"),
        (Split(inter_reduce=1), "inter_reduce has nothing to do in this op and world"),
        (Split(inter_send=-1), "inter_send must be a number of SMs >= 0"),
        (Split(intra_comm="8"), "intra_comm must be a number of SMs >= 0"),  # type: ignore[arg-type]
        (Split(compute=1.0), "compute gets 1.0 of 132 SMs"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_split_that_does_not_fit(split: Split, rule: str) -> None:
    with pytest.raises(SplitError) as caught:
        split.complete(Split(intra_comm=8, inter_send=4, inter_reduce=0), 132)
    assert caught.value.rule == rule
    assert caught.value.split is split
    assert caught.value.remedy
    assert caught.value.remedy in str(caught.value)


@each_world
@pytest.mark.parametrize("sms", [3, 4, 8, 132])
def test_the_default_split_always_fits(topology: Topology, sms: int) -> None:
    plan = plan_of(topology, 300, 64, 64, sms)
    split = plan.split
    assert split.total == sms
    assert (split.intra_comm or plan.pushers) > 0 or topology.ranks_per_node == 1
    assert (split.inter_send or 0) > 0 or topology.num_nodes == 1
    if plan.pushers == 0:
        default = default_split(plan.problem, plan.rows, sms, plan.num_tiles)
        assert split == default.complete(default, sms)


# ---- what is compiled, and what ranks compare


def test_the_number_of_rows_is_no_compile_time_constant() -> None:
    topology = Topology(4, 4)
    few, many = (plan_of(topology, rows, 512, 512, tile=GemmTile(128, 4), split=Split(intra_comm=3)) for rows in (65, 3000))
    assert few.spec == many.spec
    assert few.digest != many.digest


@pytest.mark.parametrize("span", [1, 4])
def test_no_more_rows_are_loaded_than_there_are(span: int, rng: np.random.Generator) -> None:
    """But for those that a warp has besides."""
    for rows in (0, 1, 16, 17, 32, 33, 128, 129, *map(int, rng.integers(1, 3000, 20))):
        plan = plan_of(Topology(4, 4), rows, 512, 512, span=span)
        sizes, all_rows = plan.sizes_of(rows), span * rows
        assert sizes.load_rows == min(BLOCK_M, max(1, math.ceil(all_rows / 16)) * 16)
        assert sizes.last_row == max(0, math.ceil(all_rows / BLOCK_M) - 1)
        assert 0 <= sizes.last_row * BLOCK_M + sizes.tail_rows - all_rows < 16 or all_rows == 0
        assert sizes.tail_rows % 16 == 0 < sizes.tail_rows <= BLOCK_M


@pytest.mark.parametrize("world", [Topology(1, 1), Topology(2, 2)], ids=label)
def test_clusters_need_no_room_beside_each_other_where_none_waits_for_another(world: Topology) -> None:
    """In a world of one, unless they share K in packets: who adds up then waits for those who multiply."""
    kinds = set()
    for shares, cluster, cluster_n, cluster_k, tile_rows in itertools.product((1, 3), (1, 2), (1, 2), (None, 2), (None, 2)):
        asked = Tiling(64, None, None if cluster_k else shares, cluster, None, cluster_n, tile_rows, cluster_k)
        with contextlib.suppress(SplitError, TilingError):
            plan = make_plan(AllGatherGemmProblem(world, 136, 4096, "bfloat16", True), 200, 132, tiling=asked)
            in_packets, together = plan.shares > 1 and plan.cluster_k == 1, plan.ctas_together * plan.cluster_k > 1
            assert plan.spec.clusters_are_apart == (world.size == 1 and together and not in_packets), plan.describe()
            kinds.add((in_packets, together))
    assert kinds == {(shared, together) for shared in (True, False) for together in (True, False)}


def test_plans_that_differ_have_other_digests() -> None:
    """Also in the 24 bits that travel in the entry flags, for all that a user is likely to confuse."""
    base = AllGatherGemmProblem(Topology(4, 2), 256, 64, "bfloat16", True)
    problems = [base] + [
        dataclasses.replace(base, **change)
        for change in ({"n": 64}, {"k": 256}, {"dtype": "float16"}, {"b_row_major": False}, {"topology": Topology(4, 4)})
    ]
    plans = [make_plan(problem, 128, 12, specialize="all") for problem in problems]
    plans.insert(1, make_plan(base, 129, 12, specialize="all"))
    plans += [make_plan(base, 128, 12, split, specialize="all") for split in (Split(compute=1), Split(intra_comm=1), Split(inter_send=2))]
    plans += [
        make_plan(base, 128, 12, None, GemmTile.deepest(64), specialize="all"),
        make_plan(base, 128, 12, None, GemmTile(64, 2), specialize="all"),
        dataclasses.replace(plans[0], group_m=8),
    ]
    plans += [dataclasses.replace(plans[0], chunk_rows=8)]
    assert len({plan.digest & 0xFFFFFF for plan in plans}) == len(plans)
    assert make_plan(base, 128, 12, specialize="all").digest == plans[0].digest
    assert len({plan.spec for plan in plans}) == len(plans) - 4, "all but rows, chunks, compute CTAs and order of tiles is compiled in"
    run_time = [dataclasses.replace(plan, specialize=parse("none")) for plan in plans]
    kept = {(p.problem.dtype, p.problem.b_row_major, p.problem.topology, p.tile) for p in plans}
    assert len({plan.spec for plan in run_time}) == len(kept), "sizes, chunks and splits are not"
    assert len({plan.digest & 0xFFFFFF for plan in [*plans, *run_time]}) == 2 * len(plans)


@pytest.mark.parametrize("block_n", [64, 128, 192, 256])
def test_tiles_fit_into_shared_memory(block_n: int) -> None:
    tile = GemmTile.deepest(block_n)
    assert tile.shared_bytes <= SHARED_LIMIT
    assert tile.stages == 8 or GemmTile(block_n, tile.stages + 1).shared_bytes > SHARED_LIMIT


def test_the_first_line_of_the_description_tells_plans_apart() -> None:
    topology = Topology(4, 2)
    plans = [plan_of(topology, 128, 256, 64), plan_of(topology, 129, 256, 64), plan_of(topology, 128, 256, 64, split=Split(compute=1))]
    lines = {plan.describe().splitlines()[0] for plan in plans}
    assert len(lines) == 3
    assert "allgather_gemm: a (128, 64) per rank, b (64, 256) row-major, bfloat16, 2x2 ranks, 8/3/1 SMs" in lines
