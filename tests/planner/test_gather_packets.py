"""The plans of allgather_gemm whose shards travel in packets: few rows, inside a node."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.planner.gemm import BLOCK_M
from mkernel.planner.proofs.allgather_gemm import call_of, wait_graph
from mkernel.planner.proofs.areas import AHEAD
from mkernel.planner.row_classes import class_of, classes, span
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology
from tests.shared.proofs import check_call

SMS = 132
LIMIT = 16 << 10  # bytes of all shards, for each SM
each_size = pytest.mark.parametrize("size", range(2, 9))


def plan_of(
    size: int, rows: int, n: int, k: int, sms: int = SMS, tiling: Tiling | None = None, split: Split | None = None
) -> AllGatherGemmPlan:
    return make_plan(AllGatherGemmProblem(Topology(size, size), n, k, "bfloat16", True), rows, sms, split, tiling=tiling)


@each_size
@pytest.mark.parametrize("sms", [4, 132])
def test_few_rows_travel_in_packets(rng: np.random.Generator, size: int, sms: int) -> None:
    """Classes of rows up to the limit, whatever N is; a width that is asked for needs no other kernel."""
    for _ in range(10):
        n, k = (8 * int(2 ** rng.uniform(0, 9)) for _ in range(2))
        for rows in classes(4 * LIMIT * sms // (size * k * 2)):
            assert plan_of(size, rows, n, k, sms, Tiling(64)).packets == (size * rows * k * 2 <= min(LIMIT * sms, abi.AHEAD_BYTES)), (
                rows,
                n,
                k,
            )


@pytest.mark.parametrize(
    ("topology", "split", "tiling"),
    [
        (Topology(1, 1), None, None),
        (Topology(9, 9), None, None),
        (Topology(4, 2), None, None),
        (Topology(4, 1), None, None),
        (Topology(4, 4), Split(intra_comm=1), None),
        (Topology(4, 4), None, Tiling(span=1)),
        (Topology(4, 4), None, Tiling(span=4)),  # it asks for tiles that wait for the chunks of all shards
        (Topology(4, 4), None, Tiling(packets=0)),
    ],
    ids=str,
)
def test_where_shards_travel_in_chunks(topology: Topology, split: Split | None, tiling: Tiling | None) -> None:
    problem = AllGatherGemmProblem(topology, 256, 256, "bfloat16", True)
    plan = make_plan(problem, 16, SMS, split, tiling=tiling)
    assert not plan.packets
    assert plan.ahead_bytes == 0
    if topology.num_nodes > 1 or topology.size in (1, 9) or split is not None or (tiling and tiling.span == 1):
        asked = Tiling(span=tiling.span if tiling else None, packets=1)
        with pytest.raises(TilingError, match="inside a node of 2 to 8 ranks"):
            make_plan(problem, 16, SMS, split, tiling=asked)


@each_size
def test_as_much_as_there_is_room_for(size: int) -> None:
    """Packets that are asked for: 4 MiB of all shards, and no more; as many bytes again of tags."""
    fits = set()
    for rows, packets in itertools.product(classes(4096), (1, 2)):
        plan = plan_of(size, rows, 256, 2048, tiling=Tiling(64, packets=packets))
        fits.add(plan.packets)
        assert plan.packets == (size * rows * 4096 <= abi.AHEAD_BYTES)
        assert plan.tagged == (plan.packets and packets == 2)
        assert plan.ahead_bytes <= (abi.TAGGED_BYTES if plan.tagged else abi.AHEAD_BYTES)
    assert fits == {True, False}
    assert not plan_of(size, 0, 256, 2048, tiling=Tiling(packets=1)).packets or class_of(0) == 1
    assert abi.AHEAD_OFFSET + 2 * (abi.AHEAD_BYTES + abi.TAGGED_BYTES) == abi.SIGNAL_BYTES


@each_size
def test_packets_are_tagged(size: int) -> None:
    """If they are asked for; the model chooses them."""
    for width, packets in itertools.product((64, 128, 192, 256), (None, 1, 2)):
        if packets == 2 and width == 256:
            with pytest.raises(TilingError, match="at most 192 columns"):
                plan_of(size, 5, 512, 1024, tiling=Tiling(width, None, 1, packets=packets))
            continue
        plan = plan_of(size, 5, 512, 1024, tiling=Tiling(width, None, 1, packets=packets))
        assert plan.packets
        assert plan.tagged == (packets == 2)
        assert dict(plan.spec.constants)["kPackets"] == 1 + plan.tagged
    with pytest.raises(TilingError, match="is alone"):
        plan_of(size, 100, 512, 1024, tiling=Tiling(64, None, 1, 2, packets=2))
    assert not plan_of(size, 100, 512, 1024, tiling=Tiling(64, None, 1, 2)).tagged


@each_size
def test_rounds_in_which_rows_are_taken(rng: np.random.Generator, size: int) -> None:
    """As many k steps at once as there are stages, and registers: 128 rows of a k step in all, of a tile rounded up to a power of two."""
    for _ in range(20):
        rows, k, shares = int(rng.integers(1, 100)), 8 * int(rng.integers(1, 200)), int(rng.integers(1, 4))
        plan = plan_of(size, rows, 64, k, tiling=Tiling(64, None, min(shares, -(-k // 64)), packets=2))
        tall = next(power for power in (1, 2, 4, 8, 16, 32, 64, 128) if power >= min(128, size * rows))
        most = max(b - a for a, b in itertools.pairwise(-(-k // 64) * i // plan.sizes.shares for i in range(plan.sizes.shares + 1)))
        stages = plan.tile.low_stages if size * rows <= 64 else plan.tile.stages
        assert plan.rounds == -(-most // min(stages, 128 // tall))


@each_size
def test_all_compute_as_a_world_of_one_with_all_rows(size: int) -> None:
    for rows, n, k in ((1, 8, 8), (16, 14336, 2048), (30, 7920, 6656), (130, 1000, 136)):
        plan = plan_of(size, rows, n, k, tiling=Tiling(packets=1))
        assert plan.packets
        assert (plan.span, plan.planes, plan.pushers, plan.flag_words) == (size, 1, 0, 0)
        assert plan.split == Split(SMS, 0, 0, 0)
        assert plan.workspace_bytes == plan.ahead_bytes == size * rows * k * 2
        assert plan.tile_rows == -(-size * rows // BLOCK_M)
        covered = [(tile.m, tile.n) for tile in plan.tiles(0) if tile.kind < 2 and tile.share == 0]
        assert sorted(covered) == list(itertools.product(range(plan.tile_rows), range(plan.tiles_n)))
        assert all(list(plan.tiles(rank)) == list(plan.tiles(0)) for rank in range(size))
        assert all(plan.waits(rank, tile) == (tile.kind != 2) for rank in range(size) for tile in plan.tiles(rank))
        assert "packets" in plan.describe()
        assert plan.flag_name(0, 0) == "packets of the shards"
    assert plan_of(size, 30, 1024, 6656, split=Split(compute=7), tiling=Tiling(packets=1)).split == Split(7, 0, 0, 0)


@each_size
def test_few_tiles_are_shared(size: int) -> None:
    """K of few tiles is shared by CTAs, in the kernel that all packets have."""
    plan = plan_of(size, 16, 512, 4096)
    assert plan.shares > 1
    assert plan.num_tiles * plan.sizes.shares <= SMS
    alone = plan_of(size, 16, 512, 4096, tiling=Tiling(plan.tile.block_n, None, 1))
    assert alone.shares == 1
    assert alone.spec == plan.spec
    assert plan_of(size, 16, 512, 4096, tiling=Tiling(64, None, 5, packets=1)).shares == 5
    assert plan_of(size, 300, 512, 512, tiling=Tiling(64, None, None, 2, 1)).cluster == 2
    chunks = plan_of(size, 16, 512, 4096, tiling=Tiling(packets=0))
    assert dict(chunks.spec.constants)["kPackets"] == 0 != dict(plan.spec.constants)["kPackets"]
    assert len({one.digest & 0xFFFFFF for one in (plan, alone, chunks)}) == 3


@each_size
def test_the_graph_of_tagged_packets(size: int) -> None:
    """Sending waits for nothing, a tile for all entries and for the shards of which it has rows; nobody answers."""
    plan = plan_of(size, 40, 136, 512, 6, Tiling(64, None, 3, packets=2))
    graph, ranks = wait_graph(plan), range(size)
    assert collections.Counter(step[0] for step in graph) == {"enter": size, "send": size, "tile": size * len(list(plan.tiles(0)))}
    for rank in ranks:
        assert graph.before(("send", rank)) == []
        for index, tile in enumerate(plan.tiles(rank)):
            before = graph.before(("tile", rank, index))
            assert {("enter", other) for other in ranks} <= set(before)
            first, last = tile.m * BLOCK_M // 40, (min((tile.m + 1) * BLOCK_M, 40 * size) - 1) // 40
            sources = {source for kind, source, *_ in before if kind == "send"}
            assert sources == (set() if tile.kind == 2 else set(range(first, last + 1)))
    check_call(call_of(plan))


@each_size
def test_the_graph(size: int) -> None:
    """Sending waits for nothing, taking for all that is sent and all entries, a tile for its own rank's taking."""
    plan = plan_of(size, 40, 136, 512, 6, Tiling(64, None, 3, packets=1))
    graph, ranks = wait_graph(plan), range(size)
    of_rank = len(list(plan.tiles(0)))
    assert collections.Counter(step[0] for step in graph) == {"enter": size, "send": size, "take": size, "tile": size * of_rank}
    for rank in ranks:
        assert graph.before(("send", rank)) == []
        assert set(graph.before(("take", rank))) == {*(("enter", other) for other in ranks), *(("send", other) for other in ranks)}
        for index, tile in enumerate(plan.tiles(rank)):
            assert (("take", rank) in graph.before(("tile", rank, index))) == (tile.kind != 2)
    check_call(call_of(plan))
    graph.add(("send", 0), [("take", 1)])  # a rank that answers
    assert graph.find_cycle() is not None


@each_size
def test_what_is_taken_is_what_was_sent(rng: np.random.Generator, size: int) -> None:
    """Each byte that a rank takes was sent by one other rank in the same call, and it takes all of them."""
    for _ in range(5):
        rows, k = int(rng.integers(1, 300)), 8 * int(rng.integers(1, 40))
        call = call_of(plan_of(size, rows, 64, k, tiling=Tiling(packets=1)))
        ahead = next(area for area in call.areas if area.name == "packets of shards")
        words: dict[str, Any] = collections.defaultdict(list)
        for access in call.accesses:
            if access.area is ahead:
                words["sent" if access.step[0] == "send" else "zeroed" if access.writes else "taken"].append((access.rank, access.span))
        assert sorted(words["sent"]) == sorted(words["taken"]) == sorted(words["zeroed"])
        assert len(set(words["sent"])) == len(words["sent"]) == size * (size - 1)
        tagged = call_of(plan_of(size, rows, 64, k, tiling=Tiling(64, None, 1, packets=2)))
        shard, read = 2 * rows * k * 2, np.zeros((size, size), int)
        for access in tagged.accesses:
            if access.area.segment == AHEAD and access.step[0] == "tile":
                assert access.begin // shard == (access.begin + access.bytes - 1) // shard, "of one source"
                read[access.rank, access.begin // shard] += access.bytes
        assert np.array_equal(read, shard * (1 - np.eye(size, dtype=int))), "all, but for the own shard"


def test_calls_of_a_class_travel_alike(rng: np.random.Generator) -> None:
    for _ in range(100):
        size, k, n = int(rng.integers(2, 9)), 8 * int(2 ** rng.uniform(0, 10)), 8 * int(2 ** rng.uniform(0, 10))
        numbers = span(int(2 ** rng.uniform(0, 12)))
        plans = [plan_of(size, rows, n, k) for rows in {numbers[0], numbers[len(numbers) // 2], numbers[-1]}]
        assert len({(plan.packets, plan.spec) for plan in plans}) == 1
