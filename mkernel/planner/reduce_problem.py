"""GEMM+ReduceScatter and GEMM+AllReduce: what the ranks agree on, and in how many steps an all-reduce is done."""

from __future__ import annotations

import dataclasses

from mkernel.planner.derived import hashed_once
from mkernel.planner.topology import Topology

__all__ = ["ALGORITHMS", "ALLREDUCE", "PARTIALS", "REDUCE_SCATTER", "ReduceProblem", "choose_algorithm", "sums_by_node"]

REDUCE_SCATTER, ALLREDUCE = "gemm_reduce_scatter", "gemm_allreduce"
ALGORITHMS = ("one_shot", "two_shot")  # of the all-reduce
PARTIALS = ("output", "float32")  # what partial tiles travel as
_ONE_SHOT_BYTES = 2 * 1024 * 1024  # up to so much sent per rank, one step costs less than two


@hashed_once
@dataclasses.dataclass(frozen=True)
class ReduceProblem:
    """What the ranks agree on once; each call has its own number of rows.

    ``k``: of a rank; ``algorithm``: None chooses by those rows; ``canonical``: contributions are added by rank and by node, whoever the
    owner is and however they travel.
    """

    op: str
    topology: Topology
    n: int
    k: int
    dtype: str
    b_row_major: bool
    partials: str = "output"
    algorithm: str | None = None
    canonical: bool = False

    def result_shape(self, rows: int) -> tuple[int, int]:
        return rows, self.n


def sums_by_node(algorithm: str | None, topology: Topology) -> bool:
    """Whether an all-reduce makes each node's sum first; in one step it adds the ranks' contributions as they are."""
    return algorithm != "one_shot" or 1 in (topology.num_nodes, topology.ranks_per_node)


def choose_algorithm(topology: Topology, rows: int, n: int, item: int = 2, *, canonical: bool = False) -> str:
    """How to reduce to all: in one step between two ranks, and across nodes, where little is sent; else in two.

    Inside a node of four, two steps in packets were faster even for a single row (docs/speed_log.md). ``canonical``: all sums are made
    alike, so by node.
    """
    near = topology.num_nodes == 1 and topology.size > 2
    if canonical and not sums_by_node("one_shot", topology):
        return "two_shot"
    return "one_shot" if not near and rows * n * item * (topology.size - 1) <= _ONE_SHOT_BYTES else "two_shot"
