"""Tilings of the reductions: what callers may ask for, and what the planner makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from mkernel.planner.choice import plan_reduce
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

each_op = pytest.mark.parametrize("op", [REDUCE_SCATTER, ALLREDUCE])


def plan_of(op: str, rows: int, n: int, k: int, tiling: Tiling | None = None, world: str = "1x2", **changes: Any) -> ReducePlan:
    nodes, per_node = map(int, world.split("x"))
    problem = ReduceProblem(op, Topology(nodes * per_node, per_node), n, k, "bfloat16", True, **changes)
    return plan_reduce(problem, rows, 132, tiling=tiling)


@each_op
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
@pytest.mark.parametrize("block_n", [64, 128, 192, 256])
def test_tiles_are_as_wide_as_asked_for(op: str, world: str, block_n: int) -> None:
    for rows in (1, 600):
        plan = plan_of(op, rows, 4096, 2048, Tiling(block_n), world, algorithm="two_shot" if op == ALLREDUCE else None)
        assert plan.tile.block_n == block_n
        assert not plan.packets or block_n <= 128


def test_packets_have_no_wide_tiles() -> None:
    assert plan_of(ALLREDUCE, 1, 4096, 2048, Tiling(128), algorithm="one_shot").packets
    assert not plan_of(ALLREDUCE, 1, 4096, 2048, Tiling(192), algorithm="one_shot").packets


@each_op
def test_ctas_alone_are_the_only_ones(op: str) -> None:
    assert plan_of(op, 16, 4096, 2048, Tiling(cluster=1)) == plan_of(op, 16, 4096, 2048)
    with pytest.raises(TilingError, match="reductions have no pairs"):
        plan_of(op, 16, 4096, 2048, Tiling(cluster=2))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_of_all_ranks_or_of_one_are_in_a_tile(size: int) -> None:
    """All of them where values travel in packets."""
    world = f"1x{size}"
    assert plan_of(REDUCE_SCATTER, 16, 4096, 2048, world=world) == plan_of(REDUCE_SCATTER, 16, 4096, 2048, Tiling(span=size), world)
    together, apart = (plan_of(REDUCE_SCATTER, 16, 4096, 2048, Tiling(128, span), world) for span in (size, 1))
    assert (together.packets, together.span, together.tiles) == (True, size, 32)
    assert (apart.packets, apart.span, apart.tiles) == (False, 1, 32), "of each owner"
    for rows, span in ((16, size + 1), (4096, size)):
        with pytest.raises(TilingError, match=f"span must be 1, and {size} in packets"):
            plan_of(REDUCE_SCATTER, rows, 4096, 2048, Tiling(span=span), world)
    with pytest.raises(TilingError, match="span must be 1"):
        plan_of(ALLREDUCE, 16, 4096, 2048, Tiling(span=size), world)
