"""The schedule of the reductions in kernels and plan; and what one rank stores is what another looks for, in a place of its own."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.jit import cpu
from mkernel.ops.reduce import Parameters
from mkernel.planner.gemm import GemmTile
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem, make_plan
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from mkernel.runtime.cpu.scheduler import scheduler_library

_KERNELS = Path(__file__).parent / "kernels"


class Place(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("rank", ctypes.c_uint32), ("flag", ctypes.c_uint32)]


class Mirror:
    """The functions of one kernel, for one plan."""

    def __init__(self, plan: ReducePlan) -> None:
        scheduler_library()  # kernels find the scheduler's functions there
        spec = dataclasses.replace(plan.spec, name=f"mirror_{plan.spec.name}")
        self.library = ctypes.CDLL(str(cpu.compile(spec, include=[_KERNELS])))
        self.plan = plan
        offsets = {f"{area}_offset": offset for area, offset in plan.offsets.items()}
        self.shape = Parameters(fields=plan.fields, **plan.arguments, **offsets)

    def tiles(self, rank: int) -> list[tuple[int, ...]]:
        """Owner, number, row, column, whether it is a sum, whether it exists, which share or slice."""
        words = np.full((self.library.mirror_num_tiles(rank, ctypes.byref(self.shape)), 7), -1, np.int32)
        self.library.mirror_tiles(rank, ctypes.byref(self.shape), words.ctypes.data_as(ctypes.c_void_p))
        return [tuple(row) for row in words.tolist()]

    def tile(self, rank: int, number: int) -> tuple[int, ...]:
        words = (ctypes.c_uint32 * 7)()
        self.library.mirror_tile(rank, ctypes.byref(self.shape), number, words)
        return tuple(words)

    def assigned(self, rank: int, cta: int) -> list[int]:
        numbers = (self.library.mirror_assigned(rank, ctypes.byref(self.shape), cta, i) & 0xFFFFFFFF for i in itertools.count())
        return list(itertools.takewhile(lambda number: number != 0xFFFFFFFF, numbers))

    def places(self, function: str, *arguments: int, room: int = 2) -> tuple[int, list[Place]]:
        """What it returns, and the places that it writes."""
        out = (Place * room)()
        return getattr(self.library, function)(arguments[0], ctypes.byref(self.shape), *arguments[1:], out), list(out)


@dataclasses.dataclass
class Memory:
    """What one rank has: which flag says what, and which bytes hold what."""

    flags: dict[int, Any] = dataclasses.field(default_factory=dict)
    regions: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)

    def add(self, flag: int, offset: int, size: int, what: Any) -> None:
        assert flag not in self.flags, f"flag {flag} is for {self.flags.get(flag)} and {what}"
        assert offset not in self.regions, f"{self.regions.get(offset)} and {what} are at one place"
        self.flags[flag] = what
        self.regions[offset] = size, what

    def check(self, plan: ReducePlan) -> None:
        assert max(self.flags, default=-1) < plan.flag_words
        end = 0
        for offset, (size, what) in sorted(self.regions.items()):
            assert offset >= end, f"{what} begins before what is below it ends"
            end = offset + size
        assert end <= plan.workspace_bytes


# The plan's words for a world, sizes, and what the planner would choose otherwise for such small problems.
_CASES = [
    # nodes, ranks per node, N, block_n, group_m, group_tiles, chunk_tiles, split without compute, interleaved
    (1, 1, 264, 64, 16, 4, 1, (0, 0, 0), False),
    (1, 2, 264, 256, 6, 3, 2, (1, 0, 0), True),
    (1, 3, 520, 64, 2, 4, 1, (1, 0, 0), False),
    (1, 4, 72, 128, 2, 2, 1, (3, 0, 0), True),
    (2, 2, 520, 192, 3, 3, 2, (1, 1, 1), False),
    (2, 2, 264, 64, 3, 3, 2, (1, 1, 1), True),
    (4, 1, 136, 64, 1, 5, 2, (2, 3, 2), False),
    (3, 5, 1000, 256, 4, 4, 4, (2, 2, 3), False),
    (4, 8, 264, 128, 16, 7, 4, (4, 2, 2), False),
]
# The same for pairs of CTAs, whose groups are of pairs of tiles.
_PAIRS = [
    (1, 1, 264, 64, 16, 4, 1, (0, 0, 0), False),
    (1, 2, 264, 256, 6, 3, 2, (2, 0, 0), True),
    (1, 3, 520, 64, 2, 4, 1, (2, 0, 0), False),
    (1, 4, 72, 128, 2, 2, 1, (4, 0, 0), True),
    (2, 2, 520, 192, 4, 3, 2, (2, 2, 2), False),
    (2, 2, 264, 64, 8, 4, 4, (2, 2, 4), True),
    (4, 1, 136, 64, 2, 5, 2, (2, 4, 2), False),
    (3, 5, 1000, 256, 4, 4, 4, (2, 2, 4), False),
]


def plan_of(
    case: tuple[Any, ...], op: str, algorithm: str, rows: int, partials: str, specialize: str, cluster: int = 1, cluster_n: int = 1
) -> ReducePlan:
    nodes, per_node, n, block_n, group_m, group_tiles, chunk_tiles, (intra, send, reduce), interleaved = case
    topology = Topology(nodes * per_node, per_node)
    one_shot = algorithm == "one_shot"
    together = cluster * cluster_n
    split = Split(3 if together == 1 else together, intra if op == ALLREDUCE and not one_shot else 0, send, 0 if one_shot else reduce)
    if split.intra_comm == 0 and op == ALLREDUCE and not one_shot and topology.size > 1:
        split = dataclasses.replace(split, intra_comm=together)
    problem = ReduceProblem(op, topology, n, 64, "bfloat16", False, partials, algorithm)
    tiling = Tiling(cluster=cluster, cluster_n=cluster_n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mkernel.planner.reduce.fits_packets", lambda plan: False)  # those are for test_mirror_packets.py
        plan = make_plan(problem, rows, split.total, split, GemmTile.deepest(block_n), group_tiles, specialize, tiling)
    return dataclasses.replace(plan, group_m=group_m, chunk_tiles=chunk_tiles, interleaved=interleaved)


_BY_NAME = {f"{case[0]}x{case[1]}{' in turn' if case[-1] else ''}": case for case in _CASES}


def check_roles(mirror: Mirror) -> None:
    split = mirror.plan.split
    roles = collections.Counter(abi.Role(mirror.library.mirror_role(ctypes.byref(mirror.shape), cta)) for cta in range(split.total))
    assert roles == +collections.Counter({role: getattr(split, role.name) for role in abi.Role})


def check_order(mirror: Mirror, rank: int) -> None:
    """The kernel's tiles are the plan's."""
    plan = mirror.plan
    expected = [(t.owner, t.index, t.m, t.n, t.is_sum, plan.exists(t.owner, t.index), t.share) for t in plan.tiles_of(rank)]
    found = mirror.tiles(rank)
    if plan.ctas_together > 1:
        there = [t for t in found if t[5]]
        assert there == expected
        numbers = [list(together) for _, together in itertools.groupby(range(len(found)), lambda i: i // plan.ctas_together)]
        assert [[found[i] for i in pair if found[i][5]] for pair in numbers] == [
            [(t.owner, t.index, t.m, t.n, t.is_sum, True, t.share) for t in together] for together in plan.taken_of(rank)
        ]
        return
    assert [t if t[5] else (*t[:2], *t[4:]) for t in found] == [t if t[5] else (*t[:2], *t[4:]) for t in expected]


@pytest.mark.cases(name=tuple(_BY_NAME), op=(REDUCE_SCATTER, ALLREDUCE), partials=("output", "float32"), specialize=("all", "none"))
@pytest.mark.drawn(4)
def test_tiles_with_owners(name: str, op: str, partials: str, specialize: str) -> None:
    for rows in (0, 1, 129, 300, 1000):
        check_all(plan_of(_BY_NAME[name], op, "two_shot", rows, partials, specialize))


_PAIRS_BY_NAME = {f"{case[0]}x{case[1]}{' in turn' if case[-1] else ''}": case for case in _PAIRS}


@pytest.mark.cases(name=tuple(_PAIRS_BY_NAME), op=(REDUCE_SCATTER, ALLREDUCE), partials=("output", "float32"), specialize=("all", "none"))
@pytest.mark.drawn(4)
def test_pairs_of_tiles_with_owners(name: str, op: str, partials: str, specialize: str) -> None:
    for rows in (0, 1, 129, 300, 650, 1000, 2180):
        plan = plan_of(_PAIRS_BY_NAME[name], op, "two_shot", rows, partials, specialize, cluster=2)
        assert plan.spec.cluster == 2
        check_all(plan)
        alone = plan_of(_PAIRS_BY_NAME[name], op, "two_shot", rows, partials, specialize)
        assert {(t.owner, t.m, t.n) for t in plan.tiles_of(0)} >= {(t.owner, t.m, t.n) for t in alone.tiles_of(0) if op == REDUCE_SCATTER}
        assert {(t.m, t.n) for t in plan.tiles_of(0)} == {(t.m, t.n) for t in alone.tiles_of(0) if alone.exists(t.owner, t.index)}


@pytest.mark.cases(
    name=("1x1", "1x2 in turn", "1x3", "1x4 in turn"),
    op=(REDUCE_SCATTER, ALLREDUCE),
    clusters=((1, 2), (2, 2), (1, 4), (4, 1)),
    partials=("output", "float32"),
    specialize=("all", "none"),
    valid=lambda name, op, clusters, **_: name == "1x1" or (op == REDUCE_SCATTER and 1 in clusters),
)
@pytest.mark.drawn(4)
def test_clusters_of_tiles_of_one_owner(name: str, op: str, clusters: tuple[int, int], partials: str, specialize: str) -> None:
    for rows in (0, 1, 129, 300, 650, 1000, 2180):
        case = (*_PAIRS_BY_NAME[name][:4], 4 * clusters[0], *_PAIRS_BY_NAME[name][5:])  # a group has whole clusters
        plan = plan_of(case, op, "two_shot", rows, partials, specialize, *clusters)
        assert (plan.cluster, plan.cluster_n, plan.spec.cluster) == (*clusters, clusters[0] * clusters[1])
        check_all(plan)
        alone = plan_of(case, op, "two_shot", rows, partials, specialize)
        assert set(plan.tiles_of(0)) == set(alone.tiles_of(0)), "with the numbers that they have alone"


def check_all(plan: ReducePlan) -> None:
    """The kernel of a plan has its order; and what one rank stores is what another looks for."""
    op = plan.op
    mirror, ranks = Mirror(plan), range(plan.problem.topology.size)
    for rank in ranks:
        check_order(mirror, rank)
        check_sums(mirror, rank)
    memories = {rank: Memory() for rank in ranks}
    if len(ranks) > 1:
        for rank in ranks:
            record_sent(mirror, rank, memories)
    if op == ALLREDUCE:
        for rank in ranks:
            record_finished(mirror, rank, memories)
    for rank in ranks:
        memories[rank].check(plan)
        check_added(mirror, rank, memories)
    check_roles(mirror)


def check_sums(mirror: Mirror, rank: int) -> None:
    plan = mirror.plan
    expected, ctas, cluster = list(plan.taken_sums_of(rank)), plan.split.inter_reduce or 0, plan.ctas_together
    for cta in range(ctas):
        found = [mirror.tile(rank, number) for number in mirror.assigned(rank, cta)]
        found = [tile for tile in found if tile[5] or cluster == 1]
        mine = [taken[cta % cluster] for taken in expected[cta // cluster :: ctas // cluster] if cta % cluster < len(taken)]
        assert [(t[0], t[1], bool(t[4])) for t in found] == [(t.owner, t.index, True) for t in mine]


def record_sent(mirror: Mirror, rank: int, memories: dict[int, Memory]) -> None:
    """Partial tiles go to this node's rank on the owner's rail; sums to this rank's own heap, and by puts to their owners."""
    plan, topology = mirror.plan, mirror.plan.problem.topology
    node = topology.node(rank)
    numbers = [*range(len(mirror.tiles(rank))), *(n for cta in range(plan.split.inter_reduce or 0) for n in mirror.assigned(rank, cta))]
    for number in numbers:
        owner, index, _, _, is_sum, exists, _ = mirror.tile(rank, number)
        if not exists or (owner == rank and not is_sum):
            continue
        _, (place, _) = mirror.places("mirror_sent", rank, number)
        assert place.rank == (topology.local_rank(rank) if is_sum else topology.local_rank(owner))
        what = ("sum", rank, owner, index) if is_sum else ("partial", rank, owner, index)
        memories[topology.rank(node, place.rank)].add(place.flag, place.offset, plan.partial_bytes, what)
    for distance, chunk in itertools.product(range(1, topology.num_nodes), range(plan.num_chunks)):
        peer, first = topology.rank((node + distance) % topology.num_nodes, topology.local_rank(rank)), chunk * plan.chunk_tiles
        count, (source, target) = mirror.places("mirror_put_sums", rank, distance, first)
        assert count == sum(plan.exists(peer, index) for index in range(first, min(first + plan.chunk_tiles, plan.tiles)))
        if count:
            assert memories[rank].flags[source.flag] == ("sum", rank, peer, first)
            assert memories[rank].regions[source.offset][1] == ("sum", rank, peer, first)
            memories[peer].add(target.flag, target.offset, count * plan.partial_bytes, ("arrived", rank, peer, first))


def record_finished(mirror: Mirror, rank: int, memories: dict[int, Memory]) -> None:
    """A rank's finished tiles lie in its own heap and, by chunks, in those of its rail peers; every rank has a flag for each of them."""
    plan, topology = mirror.plan, mirror.plan.problem.topology
    node, local = topology.node(rank), topology.local_rank(rank)
    if topology.size == 1:
        return
    for index in (index for index in range(plan.tiles) if plan.exists(rank, index)):
        _, (own, _) = mirror.places("mirror_finished", rank, 0, local, index)
        memories[rank].add(own.flag, own.offset, plan.result_bytes, ("finished", rank, index))
        for mate in topology.node_ranks(node):
            if mate != rank:
                _, (there, _) = mirror.places("mirror_finished", mate, 0, local, index)
                assert (there.flag, there.offset) == (own.flag, own.offset), "who pulls looks where the owner has put it"
                assert there.flag not in memories[mate].flags
                memories[mate].flags[there.flag] = ("finished", rank, index)
    for distance, chunk in itertools.product(range(1, topology.num_nodes), range(plan.num_chunks)):
        peer, first = topology.rank((node + distance) % topology.num_nodes, local), chunk * plan.chunk_tiles
        count, (source, target) = mirror.places("mirror_put_results", rank, distance, first)
        if count:
            assert memories[rank].regions[source.offset][1] == ("finished", rank, first)
            assert memories[rank].flags[source.flag] == ("finished", rank, first)
            memories[peer].add(target.flag, target.offset, count * plan.result_bytes, ("copy", rank, first))
            back = topology.num_nodes - distance
            for mate in topology.node_ranks(topology.node(peer)):
                _, (there, _) = mirror.places("mirror_finished", mate, back, local, first)
                assert (there.flag, there.offset) == (target.flag, target.offset)
                if mate != peer:
                    assert there.flag not in memories[mate].flags
                    memories[mate].flags[there.flag] = ("copy", rank, first)


def check_added(mirror: Mirror, rank: int, memories: dict[int, Memory]) -> None:
    """An own tile adds what the node's others have sent, then the other nodes' sums; a sum all of its node's; in a fixed order."""
    plan, topology = mirror.plan, mirror.plan.problem.topology
    node, per_node = topology.node(rank), topology.ranks_per_node
    mates = [topology.rank(node, (topology.local_rank(rank) + i) % per_node) for i in range(per_node)]
    numbers = [*range(len(mirror.tiles(rank))), *(n for cta in range(plan.split.inter_reduce or 0) for n in mirror.assigned(rank, cta))]
    memory = memories[rank]
    for number in numbers:
        owner, index, _, _, is_sum, exists, _ = mirror.tile(rank, number)
        if not exists or topology.size == 1:
            continue
        first_part, second_part = (mirror.places("mirror_addends", rank, number, part, room=topology.size + 1) for part in (0, 1))
        if not is_sum:
            assert first_part[0] == 0, "a product is sent as it is, and an own one waits for nobody"
        count, places = first_part if is_sum else second_part
        if owner != rank and not is_sum:
            continue
        expected = [("partial", source, owner, index) for source in (mates if is_sum else mates[1:])]
        chunk = index // plan.chunk_tiles * plan.chunk_tiles
        sums = [] if is_sum else [("arrived", source, rank, chunk) for source in topology.rail_peers(rank)]
        assert count == len(expected) + len(sums)
        for place, what in zip(places, [*expected, *sums], strict=False):
            assert memory.flags[place.flag] == what
            assert place.rank == what[1], "who is named when the wait fails"
            begin = place.offset - (index - chunk) * plan.partial_bytes * (what[0] == "arrived")
            assert memory.regions[begin][1] == what


@pytest.mark.cases(name=tuple(_BY_NAME), partials=("output", "float32"), specialize=("all", "none"))
@pytest.mark.drawn(4)
def test_one_shot(name: str, partials: str, specialize: str) -> None:
    for rows in (0, 1, 129, 300):
        plan = plan_of(_BY_NAME[name], ALLREDUCE, "one_shot", rows, partials, specialize)
        mirror, topology = Mirror(plan), plan.problem.topology
        for rank in range(topology.size):
            check_order(mirror, rank)
            memory = Memory()
            for number, tile in enumerate(plan.tiles_of(rank)):
                count, places = mirror.places("mirror_addends", rank, number, 0, room=topology.size)
                assert count == (topology.size if tile.is_sum else 0)
                for source, place in enumerate(places[:count]):
                    assert place.rank == source, "in the order of the ranks"
                    first = tile.index // plan.chunk_tiles * plan.chunk_tiles
                    told_by = tile.index if topology.node(source) == topology.node(rank) else first
                    assert place.flag == source * plan.tiles + told_by
                    memory.regions[place.offset] = plan.partial_bytes, (source, tile.index)
            assert len(memory.regions) == topology.size * plan.tiles
            memory.check(plan)
            assert plan.flag_words == topology.size * plan.tiles
    check_roles(mirror)
