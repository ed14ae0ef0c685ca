"""What the MoE ops share: the arrays that tell where a token's rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mkernel.typing import Array

__all__ = ["Routing"]


class Routing(NamedTuple):
    """Where the rows of this rank's tokens are, as a dispatch has worked it out. int32 arrays that own their memory.

    T: tokens of this rank; k: choices of a token; N: nodes; W: ranks.

    Attributes
    ----------
    topk_ids
        (T, k): the experts of each token, -1 where a choice is not routed. Give it to another dispatch to send the same way again.
    rows
        (N, max_tokens, k): row of choice k of token t of the rank on this rank's rail in node n, where its expert is in this node, as
        ``local_rank * max_rows + row``; else -1. For the own node the tokens are this rank's.
    experts
        (N, max_tokens, k): the expert of that row, counted from 0 on the rank that has it; else -1.
    sums
        (N, max_tokens): place of this rank's token t among those that node n lists; -1 where n has no expert of it, and for the own node.
    listed
        (N, max_tokens): tokens of the rank on this rank's rail in node n for which this node has experts, in order of the tokens.
    counts
        (N, 2): how many of node n's tokens are listed here, and how many of this rank's tokens node n lists; 0 for the own node.
    expert_offsets
        (E/W + 1): row with which each expert of this rank begins, and the row after the last.

    Examples
    --------
    One rank has both experts. Token 0 goes to expert 1, token 1 to both; rows are grouped by expert.

    >>> import numpy as np, mkernel as mk
    >>> from mkernel.planner.topology import Topology
    >>> from mkernel.tools.routing import reference_routing
    >>> ids = np.array([[1, -1], [1, 0]], np.int32)
    >>> (known,) = reference_routing([ids], Topology(1, 1), num_experts=2, max_tokens=2, max_rows=4)
    >>> routing = mk.Routing(*(getattr(known, name) for name in mk.Routing._fields))
    >>> routing.expert_offsets.tolist(), routing.rows[0].tolist()
    ([0, 1, 3], [[1, -1], [2, 0]])
    """

    topk_ids: Array
    rows: Array
    experts: Array
    sums: Array
    listed: Array
    counts: Array
    expert_offsets: Array
