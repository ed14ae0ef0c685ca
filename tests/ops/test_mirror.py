"""The schedule in the kernel and the one in the plan are the same: the kernel's functions, compiled for the host, against Python's."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.jit import cpu
from mkernel.jit.spec import KernelSpec
from mkernel.ops.allgather_gemm import Parameters
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.planner.gemm import BLOCK_K, GemmTile
from mkernel.planner.proofs.allgather_gemm import taken
from mkernel.planner.spans import spans_of
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from mkernel.runtime.cpu.scheduler import scheduler_library

_KERNELS = Path(__file__).parent / "kernels"


def mirror(spec: KernelSpec) -> ctypes.CDLL:
    scheduler_library()  # kernels find the scheduler's functions there
    library = ctypes.CDLL(str(cpu.compile(dataclasses.replace(spec, name="mirror"), include=[_KERNELS])))
    library.mirror_shard_offset.restype = library.mirror_flag_offset.restype = ctypes.c_uint64
    return library


_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))


@pytest.mark.parametrize(("specialize", "clusters"), [("all", (1, 1)), *(("none", clusters) for clusters in _CLUSTERS)])
@pytest.mark.parametrize(
    ("nodes", "per_node", "n", "k", "block_n", "group_m", "split"),
    [
        (1, 1, 264, 64, 64, 16, Split(3, 0, 0, 0)),
        (1, 4, 72, 136, 128, 2, Split(2, 3, 0, 0)),
        (1, 4, 520, 8192, 128, 6, Split(6, 3, 0, 0)),
        (1, 2, 264, 4096, 256, 6, Split(5, 1, 0, 0)),
        (1, 4, 520, 8192, 128, 6, Split(5, 0, 0, 0)),
        (2, 2, 520, 8192, 192, 3, Split(1, 1, 1, 0)),
        (4, 1, 136, 72, 64, 1, Split(2, 0, 3, 0)),
        (3, 5, 1000, 8, 256, 4, Split(5, 2, 2, 0)),
        (4, 8, 264, 4096, 128, 16, Split(4, 4, 2, 0)),
        (1, 1, 808, 136, 144, 4, Split(3, 0, 0, 0)),  # columns that are no whole panels
        (1, 1, 264, 520, 0, 4, Split(3, 0, 0, 0)),  # swapped operands
        (1, 4, 520, 4096, 0, 2, Split(2, 3, 0, 0)),
        (1, 3, 264, 136, 0, 6, Split(5, 0, 0, 0)),
        (2, 2, 264, 512, 0, 3, Split(1, 1, 1, 0)),
    ],
)
@pytest.mark.drawn(6)
def test_kernel_and_plan_agree(
    nodes: int, per_node: int, n: int, k: int, block_n: int, group_m: int, split: Split, specialize: str, clusters: tuple[int, int]
) -> None:
    topology = Topology(nodes * per_node, per_node)
    if max(clusters) > 1:  # the same number of CTAs in all
        split = Split(*(math.prod(clusters) * (number or 0) for number in dataclasses.astuple(split)))

    some = 3 if nodes == 1 and k > 3 * 64 else 1

    def plan_of(rows: int, span: int, shares: int) -> AllGatherGemmPlan:
        problem = AllGatherGemmProblem(topology, n, k, "bfloat16", False)
        tiling = Tiling(None, span, shares, clusters[0], None, clusters[1], None if block_n else 2)
        plan = make_plan(problem, rows, 2 * split.total, split, GemmTile.deepest(block_n or 256), specialize, tiling)
        assert (plan.swapped > 0) == (block_n == 0)
        return dataclasses.replace(plan, group_m=group_m)

    for rows, span, shares in itertools.product((0, 1, 129, 300, 1000), spans_of(topology), dict.fromkeys((1, some))):
        plan = plan_of(rows, span, shares)
        library = mirror(plan.spec)
        shape = ctypes.byref(Parameters(fields=plan.fields, **plan.arguments))
        assert library.mirror_num_chunks(shape) == plan.chunks
        for source in range(topology.size):
            assert library.mirror_shard_offset(shape, source) == source * plan.shard_bytes // plan.parts
            offsets = [library.mirror_flag_offset(shape, source, chunk) // 8 for chunk in range(plan.chunks)]
            assert offsets == list(range(source * plan.chunks, (source + 1) * plan.chunks))
        assert plan.flag_words == topology.size * plan.chunks
        for block, part in itertools.product(range(plan.blocks), range(plan.parts)):
            assert library.mirror_chunk_index(shape, block, part) == plan.chunk_index(block, part)
        if plan.parts > 1 and rows:
            check_pieces(plan, library, shape)
        check_tiles(plan, library, shape)
        for rank in range(topology.size):
            check_waits(plan, library, shape, rank)
    roles = collections.Counter(library.mirror_role(shape, cta) for cta in range(split.total))
    expected = {abi.Role.compute: split.compute, abi.Role.intra_comm: split.intra_comm, abi.Role.inter_send: split.inter_send}
    assert roles == collections.Counter({role: number for role, number in expected.items() if number})


@pytest.mark.parametrize(("block_n", "ctas"), [(64, 2), (128, 3), (64, 8)])
def test_kernel_and_plan_agree_where_clusters_share_k(block_n: int, ctas: int) -> None:
    problem = AllGatherGemmProblem(Topology(1, 1), 264, 520, "bfloat16", False)
    for rows in (0, 1, 129, 1000):
        plan = make_plan(problem, rows, 20, tiling=Tiling(block_n, cluster_k=ctas))
        assert plan.cluster_k == plan.spec.cluster == ctas
        assert plan.grid % ctas == 0
        check_tiles(plan, mirror(plan.spec), ctypes.byref(Parameters(fields=plan.fields, **plan.arguments)))


@pytest.mark.parametrize("specialize", ["all", "none"])
@pytest.mark.parametrize(
    ("per_node", "block_n", "shares", "clusters"),
    [
        *((2, 64, 1, (1, 1)), (3, 128, 4, (1, 1)), (8, 256, 1, (2, 1)), (4, 64, 3, (2, 1))),
        *((2, 128, 1, (1, 2)), (3, 64, 3, (1, 2)), (2, 64, 2, (1, 4)), (4, 128, 1, (2, 2))),
        *((2, 0, 3, (1, 1)), (4, 0, 1, (2, 1)), (3, 0, 1, (1, 4)), (2, 0, 2, (1, 2))),
    ],
)
@pytest.mark.parametrize("packets", [1, 2])
@pytest.mark.drawn(3)
def test_kernel_and_plan_agree_where_shards_travel_in_packets(
    per_node: int, block_n: int, shares: int, clusters: tuple[int, int], packets: int, specialize: str
) -> None:
    """Tiles as of a world of one that has all rows."""
    problem = AllGatherGemmProblem(Topology(per_node, per_node), 264, 520, "bfloat16", False)
    for rows in (1, 16, 43, 129, 300):
        cluster, cluster_n = clusters if packets == 1 else (1, 1)
        swapped = block_n == 0 and packets == 1  # never of tagged packets
        tiling = Tiling(None if swapped else min(block_n or 64, 192), None, shares, cluster, packets, cluster_n, 2 if swapped else None)
        plan = make_plan(problem, rows, 6, None, None, specialize, tiling)
        assert plan.packets
        assert plan.tagged == (packets == 2)
        library = mirror(plan.spec)
        shape = ctypes.byref(Parameters(fields=plan.fields, **plan.arguments))
        check_tiles(plan, library, shape)
        for source in range(per_node):
            assert library.mirror_shard_offset(shape, source) == source * plan.shard_bytes


def check_tiles(plan: AllGatherGemmPlan, library: ctypes.CDLL, shape: Any) -> None:
    """Each rank takes the plan's tiles, in its order."""
    for rank in range(plan.problem.topology.size):
        tiles, number = list(plan.tiles(rank)), library.mirror_num_tiles(rank, shape)
        assert number == len(list(taken(plan, tiles)))
        words = np.full((number * plan.ctas_together, 6), -1, np.int32)
        library.mirror_tiles(rank, shape, words.ctypes.data_as(ctypes.c_void_p))
        found = [tuple(row) for row in words.tolist()]
        there = [row for row in found if row[1] < plan.tile_rows and row[2] < plan.tiles_n]
        assert there == [(t.plane, t.m, t.n, t.slice, t.kind, t.share) for t in tiles]
        rest = [row for row in found if row not in there]
        of_rows, of_columns = (range(end, end + beside) for end, beside in ((plan.tile_rows, plan.cluster), (plan.tiles_n, plan.cluster_n)))
        assert all(row[1] in of_rows or row[2] in of_columns for row in rest), "the rest of a cluster"


def check_waits(plan: AllGatherGemmPlan, library: ctypes.CDLL, shape: Any, rank: int) -> None:
    """Tiles wait for the blocks of rows that the plan says, of all shards that they cover, or read the own shard, where their rows lie."""
    numbers = list(taken(plan, plan.tiles(rank)))
    for index, (tile, *_) in enumerate(numbers):
        if tile.n not in {0, plan.tiles_n - 1} or tile.share or tile.slice > 1:
            continue
        words = np.zeros(3, np.uint32)
        library.mirror_waits(rank, shape, index, words.ctypes.data_as(ctypes.c_void_p))
        row = tile.m * plan.block_rows
        if not plan.waits(rank, tile):
            of_own = tile.kind != 2 and plan.problem.topology.size > 1
            assert words.tolist() == [0xFFFFFFFF, 0xFFFFFFFF, row - rank % plan.span * plan.rows if of_own else words[2]]
            assert not of_own or set(plan.sources(tile)) == {rank}
            continue
        assert words[2] == row
        waited = {divmod(block, plan.blocks) for block in range(int(words[0]), int(words[1]) + 1)}
        chunks = {(source, plan.chunk_index(block, part)) for source, block in waited for part in range(plan.parts)}
        assert chunks == {chunk for tile in numbers[index] for chunk in plan.tile_chunks(tile)}


def check_pieces(plan: AllGatherGemmPlan, library: ctypes.CDLL, shape: Any) -> None:
    """The boxes of a chunk, one after the other, cover its rows of its part, in the order in which they lie in the gather buffer."""
    box_rows, box_units = plan.piece_box
    units = plan.problem.k // plan.parts // BLOCK_K
    for block, part in itertools.product(range(plan.blocks), range(plan.parts)):
        rows = min(plan.chunk_rows, plan.rows - block * plan.chunk_rows)
        words = np.full((rows * units, 2), -1, np.int32)
        count = library.mirror_pieces(shape, plan.chunk_index(block, part), words.ctypes.data_as(ctypes.c_void_p))
        first = block * plan.chunk_rows
        expected = [
            (row, unit) for row in range(first, first + rows, box_rows) for unit in range(part * units, (part + 1) * units, box_units)
        ]
        assert [tuple(word) for word in words[:count].tolist()] == expected
