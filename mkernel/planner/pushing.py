"""Who moves the shards of an AllGather+GEMM inside a node: CTAs of their own, or a warp of every computing CTA; in how many parts of K."""

from __future__ import annotations

import functools
import math

from mkernel.planner.gemm import BLOCK_M, GemmProblem, GemmTile, choose_ctas, seconds_to_multiply
from mkernel.planner.k_parts import choose_parts
from mkernel.planner.slices import choose_slices
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

__all__ = ["FEW_WAVES", "default_split", "most_parts", "pushing_ctas", "warps_pay", "warps_push"]

FEW_WAVES = 6  # tiles per SM up to which the tail counts, and K travels in parts
_WARPS_BYTES, _LINK_BYTES = 220e9, 310e9  # per second, that the warps of all computing CTAs read, and send to all peers together
_CTA_READS, _CTA_WRITES = 32e9, 40e9  # the same for one CTA of intra_comm, beside the others' tiles
_IN_TIME = 0.45  # of the time that multiplying takes: when the last chunk should have come
_WARPS_GAIN = 1.05  # in waves of tiles, from which they are worth it
_HALVES = 0.57  # of a tile's time, that all SMs take for the halves of the last ones


def warps_push(topology: Topology, split: Split, span: int = 1) -> bool:
    """Whether computing CTAs move the data inside a node: to its other ranks, and where tiles span shards into the own gather buffer."""
    return (topology.ranks_per_node > 1 or span > 1) and not split.intra_comm


def most_parts(problem: GemmProblem) -> int:
    """In how many parts K may travel: one across nodes, whose puts are contiguous in a."""
    topology = problem.topology
    return choose_parts(problem.k) if topology.num_nodes == 1 < topology.size else 1


def pushing_ctas(topology: Topology) -> tuple[int, ...]:
    """How many CTAs fill the links, ascending: of an H200 to three peers 9, and fewer bytes a second with more (docs/planner.md).

    One that pushes to a single peer has to read all that it writes, which takes half as long again: of them it takes more
    (docs/speed_log.md).
    """
    return (12, 16) if topology.num_nodes == 1 and topology.size == 2 else (8,)


def default_split(problem: GemmProblem, rows: int, sm_count: int, tiles: int) -> Split:
    """As many CTAs push as the links take; where there is time, fewer.

    Tiles are multiplied faster beside a steady flow than beside a short flood (docs/speed_log.md).
    """
    topology = problem.topology
    intra = min(pushing_ctas(topology)[0], max(1, sm_count // 4)) if topology.ranks_per_node > 1 else 0
    if topology.num_nodes == 1 < topology.size and tiles > FEW_WAVES * sm_count:
        multiplying = seconds_to_multiply(rows * topology.size, problem.n, problem.k, sm_count)
        pushing = _seconds_to_push(problem, rows, _CTA_READS, _CTA_WRITES)
        intra = choose_ctas(pushing, _IN_TIME * multiplying, 2, intra)
    send = min(4, max(1, sm_count // 8)) if topology.num_nodes > 1 else 0
    return Split(intra_comm=intra, inter_send=send, inter_reduce=0)


@functools.lru_cache(maxsize=4096)
def warps_pay(problem: GemmProblem, rows: int, tile: GemmTile, sm_count: int) -> bool:
    """Whether a call ends sooner if a warp of every CTA pushes than with CTAs for it (docs/speed_log.md).

    So between two ranks where all SMs need fewer waves for the tiles, and multiply longer than their warps push. What goes to several
    peers takes the link longer, and what the link cannot take yet stands in front of the loads of all SMs: on four GPUs a tile took 1.5
    times as long.
    """
    size = problem.topology.size
    if problem.topology.num_nodes > 1 or size != 2:
        return False
    tiles = math.ceil(rows / BLOCK_M) * size * math.ceil(problem.n / tile.block_n)
    default = default_split(problem, rows, sm_count, tiles)
    split = default.complete(default, sm_count)
    compute = split.compute or 1
    waves = math.ceil(tiles / split.total)
    otherwise = tiles // compute + _HALVES if choose_slices(tiles, tile, split) > 1 else math.ceil(tiles / compute)
    fewer = tiles <= FEW_WAVES * split.total and otherwise >= _WARPS_GAIN * waves
    in_time = waves * tile.seconds(problem.k) >= _seconds_to_push(problem, rows, _WARPS_BYTES, _LINK_BYTES)
    return fewer and in_time


def _seconds_to_push(problem: GemmProblem, rows: int, reads: float, writes: float) -> float:
    """The shard to all others, where so many bytes a second are read, and written to all of them together."""
    return rows * problem.k * 2 * max(1 / reads, (problem.topology.size - 1) / writes)
