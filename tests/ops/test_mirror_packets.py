"""The schedule of the reductions in packets, and the room for them, in kernel and plan."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import pytest

from mkernel import abi
from mkernel.planner.gemm import GemmTile
from mkernel.planner.reduce import ALGORITHMS, ALLREDUCE, REDUCE_SCATTER, ReduceProblem, make_plan
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from tests.ops.test_mirror_reduce import Mirror, check_order, check_roles


@pytest.mark.cases(
    how=(*ALGORITHMS, REDUCE_SCATTER),
    specialize=("all", "none"),
    size=(2, 3, 8),
    clusters=((2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
)
@pytest.mark.drawn(4)
def test_clusters_take_the_tiles_of_ctas_alone(how: str, specialize: str, size: int, clusters: tuple[int, int]) -> None:
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(size, size), 520, 64, "bfloat16", False, "output", algorithm)
    for rows, group_m in itertools.product((0, 1, 129, 300, 1000), (4, 16)):
        made = (
            dataclasses.replace(make_plan(problem, rows, 8, specialize=specialize, tiling=Tiling(64, None, 1, m, 1, n)), group_m=group_m)
            for m, n in (clusters, (1, 1))
        )
        plan, alone = made
        assert (plan.packets, plan.spec.cluster, plan.packet_bytes) == (True, clusters[0] * clusters[1], alone.packet_bytes)
        mirror = Mirror(plan)
        for rank in range(size):
            check_order(mirror, rank)
            assert set(plan.tiles_of(rank)) == set(alone.tiles_of(rank))


@pytest.mark.cases(
    how=(*ALGORITHMS, REDUCE_SCATTER),
    specialize=("all", "none"),
    size=(2, 3, 8),
    clusters=((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)),
    shares=(1, 3),
    valid=lambda clusters, shares, **_: shares == 1 or clusters == (1, 1),
)
@pytest.mark.drawn(4)
def test_tiles_of_swapped_operands_and_room(how: str, specialize: str, size: int, clusters: tuple[int, int], shares: int) -> None:
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(size, size), 520, 512, "bfloat16", False, "output", algorithm)
    for rows, tile_rows in itertools.product((0, 1, 16, 17, 129, 300, 333), (1, 3)):
        plan = make_plan(problem, rows, 8, specialize=specialize, tiling=Tiling(None, None, shares, clusters[0], 1, clusters[1], tile_rows))
        if not plan.swapped:  # there is no room for so many shares
            assert rows * size * problem.n * 4 * shares > abi.PACKET_BYTES // 2
            continue
        mirror = Mirror(plan)
        for rank in range(size):
            check_order(mirror, rank)
        mirror.library.mirror_packet_bytes.restype = ctypes.c_uint64
        assert mirror.library.mirror_packet_bytes(ctypes.byref(mirror.shape)) == plan.exchanged_bytes(plan.rows, plan.tiles)
        if shares > 1:
            mirror.library.mirror_share_bytes.restype = ctypes.c_uint64
            shared = plan.packet_bytes - plan.exchanged_bytes(plan.rows, plan.tiles)
            assert mirror.library.mirror_share_bytes(ctypes.byref(mirror.shape)) == shared


@pytest.mark.parametrize("how", [*ALGORITHMS, REDUCE_SCATTER])
@pytest.mark.parametrize("specialize", ["all", "none"])
@pytest.mark.parametrize(("size", "n", "block_n"), [(2, 264, 64), (3, 1000, 128), (5, 72, 128), (8, 264, 64)])
@pytest.mark.parametrize("shares", [1, 3, 8])
@pytest.mark.drawn(8)
def test_tiles_and_room(specialize: str, how: str, size: int, n: int, block_n: int, shares: int) -> None:
    for rows in (0, 1, 16, 17, 128, 129, 300):
        op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
        problem = ReduceProblem(op, Topology(size, size), n, 512, "bfloat16", False, "output", algorithm)
        plan = make_plan(problem, rows, 4, Split(compute=4), GemmTile.deepest(block_n), specialize=specialize, tiling=Tiling(shares=shares))
        assert plan.packets
        if plan.shares != shares:
            assert dataclasses.replace(plan, shares=shares).packet_bytes > abi.PACKET_BYTES, "only where there is no room"
            continue
        mirror = Mirror(plan)
        for rank in range(size):
            check_order(mirror, rank)
        mirror.library.mirror_packet_bytes.restype = ctypes.c_uint64
        exchanged = plan.exchanged_bytes(plan.rows, plan.tiles)
        assert mirror.library.mirror_packet_bytes(ctypes.byref(mirror.shape)) == exchanged
        assert plan.sizes_of(plan.rows).exchanged == (exchanged if shares > 1 else 0)
        if shares > 1:
            mirror.library.mirror_share_bytes.restype = ctypes.c_uint64
            assert mirror.library.mirror_share_bytes(ctypes.byref(mirror.shape)) == plan.packet_bytes - exchanged
        check_roles(mirror)
