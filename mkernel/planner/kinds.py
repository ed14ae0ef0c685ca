"""Which kernels serve all N and K, where these come with the call: of each op sixteen at most, however many N and K a program has.

Kernels of an op in one world then differ in what ``Kind`` says. Which sixteen was found by ``tests/planner/kinds.py``: of all plans that
the model chooses from, for drawn N, K and rows, those by which the fastest of the sixteen are the least slower than the fastest of all.
A reduce-scatter between ranks, of which nothing is compiled in by default, has only kinds that GPUs had measured before.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from mkernel.planner.allgather_gemm import OP as GATHER
from mkernel.planner.candidates import WIDTHS
from mkernel.planner.heights import highest, several_blocks
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER
from mkernel.planner.topology import Topology

__all__ = ["MOST_KINDS", "OPS", "Kind", "kept", "kind_of", "op_of", "serves_all"]

MOST_KINDS = 16  # of an op in a world
OPS = GATHER, REDUCE_SCATTER, ALLREDUCE


class Kind(NamedTuple):
    """What tells apart kernels of one op and world, where N and K come with the call.

    ``width``: columns of a tile, or rows at most if operands are swapped; ``cluster``: CTAs in M and in N. ``shared``: K is, by several
    CTAs, or by the ``cluster_k`` of a cluster. ``packets``: values travel in packets; ``tagged``: each with its own tag. ``pushed``: chunks
    are pushed, or pulled, by CTAs. ``at_once``: tiles that the warpgroups have.
    """

    width: int
    cluster: tuple[int, int] = (1, 1)
    swapped: bool = False
    shared: bool = False
    packets: bool = False
    tagged: bool = False
    one_shot: bool = False
    pushed: bool = False
    cluster_k: int = 1
    at_once: int = 1


def op_of(problem: Any) -> str:
    return getattr(problem, "op", GATHER)


def kind_of(plan: Any) -> Kind:
    gathers = op_of(plan.problem) == GATHER
    packets, swapped = bool(plan.packets), plan.swapped > 0
    shared = plan.shares > 1 and not (gathers and (packets or swapped))  # whose kernels may share K in any call
    several = plan.problem.topology.size > 1  # else there is nothing to send, in one step or two
    one_shot = several and not gathers and plan.one_shot
    pushed = several and bool(plan.split.intra_comm)
    cluster = plan.cluster, plan.cluster_n
    tagged, cluster_k = bool(getattr(plan, "tagged", False)), getattr(plan, "cluster_k", 1)
    at_once = getattr(plan, "tiles_at_once", 1)
    width = highest(plan.columns, at_once) if swapped and several_blocks(plan.columns, at_once) else plan.tile.block_n
    return Kind(width, cluster, swapped, shared, packets, tagged, one_shot, pushed, cluster_k, at_once)


def _in_packets(*kinds: Kind) -> frozenset[Kind]:
    return frozenset(kind._replace(packets=True) for kind in kinds)


def _pushed(*kinds: Kind) -> frozenset[Kind]:
    return frozenset(kind._replace(pushed=True) for kind in kinds)


def _in_one_step(*kinds: Kind) -> frozenset[Kind]:
    return frozenset(kind._replace(one_shot=True) for kind in kinds)


_PLAIN = frozenset(map(Kind, WIDTHS))
_SWAPPED, _SWAPPED_SUM = Kind(256, swapped=True), Kind(192, swapped=True)

# A world of one.
_PRODUCTS = (
    _PLAIN
    | {Kind(128, (2, 2))}
    | {Kind(width, shared=True, cluster_k=ctas) for width, ctas in ((64, 2), (64, 3), (64, 4), (64, 8))}
    | {_SWAPPED._replace(cluster=cluster) for cluster in ((1, 1), (2, 2))}
    | {Kind(160, cluster, swapped=True, at_once=2) for cluster in ((1, 1), (1, 2), (2, 1))}
    | {Kind(192, cluster, swapped=True) for cluster in ((1, 1), (2, 1))}  # wide
)
_SUMS_OF_ONE = (
    _PLAIN
    | {Kind(width, cluster) for width in WIDTHS for cluster in ((2, 1), (1, 2))}
    | {Kind(width, (2, 2)) for width in (64, 128, 192)}
    | {Kind(128, (1, 4))}
)

# One node of several ranks.
_GATHERS = (
    _pushed(*_PLAIN, Kind(128, shared=True), Kind(128, (1, 2)), Kind(192, (2, 1)), Kind(256, (2, 1)))
    | _in_packets(Kind(64), Kind(64, tagged=True), Kind(192), _SWAPPED, _SWAPPED._replace(cluster=(2, 2)))
    | {Kind(192), Kind(256)}
)
_SHARED_SUMS = _in_packets(Kind(64), Kind(64, shared=True), Kind(128), Kind(128, shared=True))
_TOGETHER = _in_packets(Kind(128, (1, 2)), Kind(128, (2, 2)))
_SWAPPED_SUMS = _in_packets(_SWAPPED_SUM, _SWAPPED_SUM._replace(cluster=(2, 2)))
_SCATTERS = (
    {Kind(128), Kind(192), Kind(256), Kind(192, (2, 1)), Kind(256, (2, 1))}
    | _SHARED_SUMS
    | _SWAPPED_SUMS
    | _TOGETHER
    | _in_packets(_SWAPPED_SUM._replace(cluster=(2, 1)), Kind(128, (2, 1)), Kind(64, (2, 2)))
)
_PULLED = _pushed(Kind(128), Kind(192), Kind(192, (2, 1)), Kind(256, (2, 1)))
_SUMS_OF_TWO = (
    _PULLED
    | _TOGETHER
    | {_SWAPPED_SUM._replace(packets=True)}
    | _in_one_step(Kind(128), Kind(192), Kind(256), *_SHARED_SUMS, *_in_packets(Kind(64, (1, 2)), _SWAPPED_SUM._replace(cluster=(2, 2))))
)
_SUMS_OF_SEVERAL = (
    _PULLED
    | _pushed(Kind(256))
    | _SHARED_SUMS
    | _SWAPPED_SUMS
    | _TOGETHER
    | _in_packets(Kind(128, (2, 1)))
    | _in_one_step(*_in_packets(Kind(128), Kind(128, shared=True)))
)

_ALONE = {GATHER: _PRODUCTS, REDUCE_SCATTER: _SUMS_OF_ONE, ALLREDUCE: _SUMS_OF_ONE}
_OF_TWO = {GATHER: _GATHERS | _in_packets(Kind(128)), REDUCE_SCATTER: _SCATTERS, ALLREDUCE: _SUMS_OF_TWO}
_OF_SEVERAL = {GATHER: _GATHERS | {Kind(128)}, REDUCE_SCATTER: _SCATTERS, ALLREDUCE: _SUMS_OF_SEVERAL}


def kept(op: str, topology: Topology) -> AbstractSet[Kind]:
    """The kinds that serve all N and K in a world of one node."""
    return (_ALONE if topology.size == 1 else _OF_TWO if topology.size == 2 else _OF_SEVERAL)[op]


def serves_all(plan: Any) -> bool:
    """Whether the plan's kernel is one of those. Across nodes all are: no op has more than sixteen there.

    Where the problem asks for the algorithm of an all-reduce: also one that differs from those in the algorithm alone.
    """
    problem, kind = plan.problem, kind_of(plan)
    if problem.topology.num_nodes > 1:
        return True
    kinds = kept(op_of(problem), problem.topology)
    if getattr(problem, "algorithm", None) is None:
        return kind in kinds
    return _of_any_algorithm(kind) in map(_of_any_algorithm, kinds)


def _of_any_algorithm(kind: Kind) -> Kind:
    return kind._replace(one_shot=False, pushed=False)
