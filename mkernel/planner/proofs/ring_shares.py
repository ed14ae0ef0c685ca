"""Shares of keys in ring attention: which chunks one has blocks of, and whose tile it is."""

from __future__ import annotations

import math

from mkernel.planner.ring_attention import RingAttentionPlan

__all__ = ["chunks_read", "tile_number"]


def tile_number(plan: RingAttentionPlan, item: int) -> int:
    """Which tile of all heads an item is of, or has a share of."""
    group, (pair, inside) = plan.problem.group, divmod(item, plan.items_per_pair)
    head = pair % plan.problem.kv_heads * group + inside // plan.shares % group
    return (pair // plan.problem.kv_heads * plan.problem.q_heads + head) * plan.tiles + plan.tile_of(item)


def chunks_read(plan: RingAttentionPlan, rank: int, item: int) -> dict[int, list[int]]:
    """By source, in order, the chunks of which an item of ``rank`` has a block; its share of the blocks is every so many."""
    problem, last = plan.problem, plan.last_position(rank, plan.tile_of(item))
    share, taken, found = item % plan.shares, 0, dict[int, list[int]]()
    for source in (rank, *(plan.source_of(rank, ring) for ring in range(problem.rings))):
        chunks = found.setdefault(source, [])
        for part in range(problem.parts):
            rows = last - problem.part_position(source, part, plan.part_rows) + 1 if problem.causal else plan.part_rows
            for block in range(math.ceil(max(0, min(rows, plan.part_rows)) / problem.tile.key_block)):
                chunk = part * plan.chunks_per_part + block // plan.chunk_blocks
                if taken % plan.shares == share and chunk not in chunks:
                    chunks.append(chunk)
                taken += 1
    return found
