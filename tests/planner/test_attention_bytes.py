"""What a call of ring attention brings to a rank, and what an item multiplies, counted one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from mkernel.planner.attention_bytes import most_received, received_bytes
from mkernel.planner.predict_attention import keys_of_item
from mkernel.planner.ring_attention import RingAttentionPlan, make_plan
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes
from mkernel.planner.topology import Topology

KINDS = [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")]
WORLDS = [(1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (3, 1)]


@pytest.fixture(params=itertools.product(WORLDS, KINDS), ids=str)
def plans(request: pytest.FixtureRequest, rng: np.random.Generator) -> list[RingAttentionPlan]:
    """Plans of a world, a mask and a layout."""
    world, (causal, layout) = request.param
    found = []
    for _ in range(6):
        kv_heads, group, d = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.choice((64, 128)))
        problem = RingAttentionProblem(Topology(*world), kv_heads * group, kv_heads, d, "bfloat16", causal, layout, 0.1)
        found.append(make_plan(problem, Sizes(int(rng.integers(1, 4)), 2 * int(2 ** rng.uniform(0, 11))).code, 132))
    return found


def test_bytes(plans: list[RingAttentionPlan]) -> None:
    """Segment by segment; and nobody receives more than is said."""
    for plan in plans:
        topology = plan.problem.topology
        all_ranks = [received_bytes(plan, rank) for rank in range(topology.size)]
        for rank, found in enumerate(all_ranks):
            near = far = 0
            for segment in plan.segments():
                for ring in range(plan.problem.rings):
                    source = plan.source_of(rank, ring)
                    if topology.node(source) != topology.node(rank) and plan.feeder_of(rank, ring) == source:
                        far += plan.sent(segment, source, topology.node(rank))
                    else:
                        near += plan.streamed(segment, source, rank)
            assert found == (near * 2 * plan.plane_bytes, far * 2 * plan.plane_bytes)
        assert most_received(plan) == tuple(max(each) for each in zip(*all_ranks, strict=True)), plan.describe()


def test_keys(plans: list[RingAttentionPlan]) -> None:
    """In whole blocks of each part of the sequence, the mean over all tiles of all ranks."""
    for plan in plans:
        assert keys_of_item(plan) == pytest.approx(np.mean(list(_keys(plan))))


def _keys(plan: RingAttentionPlan) -> Any:
    problem, length = plan.problem, plan.sizes.length
    parts, block, rows = problem.parts, problem.tile.key_block, problem.tile.q_rows
    part = length // parts
    begins = [number * part for number in range(parts * problem.topology.size)]
    if not problem.causal:
        for _ in range(math.ceil(length / rows)):
            yield problem.topology.size * math.ceil(length / block) * block
        return
    for begin in begins:  # of the tile's part, whoever has it
        for tile in range(math.ceil(part / rows)):
            last = begin + min((tile + 1) * rows, part)
            yield sum(math.ceil(min(max(last - other, 0), part) / block) * block for other in begins)
