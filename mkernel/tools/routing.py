"""What routing means, in NumPy: which row of which rank an expert's token becomes. The reference of the MoE kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.planner.moe import bands, row_bits

if TYPE_CHECKING:
    from mkernel.planner.topology import Topology

__all__ = ["RankRouting", "reference_routing"]

Ints = Any  # an integer array


@dataclasses.dataclass(frozen=True)
class RankRouting:
    """What one rank knows after a dispatch. E/W: experts of a rank; N: nodes; all arrays int32.

    Attributes
    ----------
    topk_ids
        (T, k): this rank's ids, as given.
    rows
        (N, max_tokens, k): of the tokens of the rank on this rank's rail in node n, the row of choice k, where its expert is in this node:
        ``local_rank << bits | row`` (``planner.moe.row_bits``); else -1. n may be the own node: then the tokens are this rank's own.
    experts
        (N, max_tokens, k): the expert of that row, counted from 0 on its rank; else -1.
    sums
        (N, max_tokens): place of own token t in the list of node n; -1 where no expert of n has it, and for the own node.
    listed
        (N, max_tokens): the tokens of the rank on this rank's rail in node n that this node has experts for: its list, in order of bands of
        the first expert that a token has there, each counted on its rank; those of a band in order.
    counts
        (N, 2): how many are listed of node n's, and how many own tokens node n lists; 0 for the own node.
    expert_offsets
        (E/W + 1): the row with which each expert of this rank begins.
    source
        (max_rows, 3): rank, token and choice of each row of this rank; -1 where there is none.
    """

    topk_ids: Ints
    rows: Ints
    experts: Ints
    sums: Ints
    listed: Ints
    counts: Ints
    expert_offsets: Ints
    source: Ints


def _list(ids: Ints, there: Ints, experts: int, topology: Topology) -> Ints:
    """The tokens, in the order of a node's list, that have experts ``there`` (T, k); ``experts``: of a rank."""
    first = np.where(there, ids % experts, experts).min(1, initial=experts)
    order = np.argsort(first * bands(topology, experts) // experts, kind="stable")
    return order[first[order] < experts]


def reference_routing(
    ids: Sequence[Ints], topology: Topology, num_experts: int, max_tokens: int, max_rows: int, alignment: int = 1
) -> list[RankRouting]:
    """What every rank knows of the routing ``ids[rank]`` (T of the rank, k), which must be right.

    Rows of a rank are grouped by expert; those of an expert are in order of source rank, then token. Each expert begins at a multiple of
    ``alignment``.
    """
    size, nodes, per_node = topology.size, topology.num_nodes, topology.ranks_per_node
    topk, per_rank = ids[0].shape[1], num_experts // size
    row_of = [np.full(of_rank.shape, -1, np.int32) for of_rank in ids]  # on the rank that has the expert
    offsets = np.zeros((size, per_rank + 1), np.int32)
    source = np.full((size, max_rows, 3), -1, np.int32)
    for owner in range(size):
        row = 0
        for local in range(per_rank):
            offsets[owner, local] = row
            for rank, of_rank in enumerate(ids):
                for token, choice in np.argwhere(of_rank == owner * per_rank + local):
                    row_of[rank][token, choice] = row
                    source[owner, row] = rank, token, choice
                    row += 1
            row = -(-row // alignment) * alignment
        offsets[owner, per_rank] = row
    node_of_expert = [np.where(of_rank >= 0, of_rank // per_rank // per_node, -1) for of_rank in ids]
    listed = {
        (rank, node): _list(ids[rank], node_of_expert[rank] == node, per_rank, topology) for rank in range(size) for node in range(nodes)
    }
    found = []
    for rank in range(size):
        node, local = topology.node(rank), topology.local_rank(rank)
        made = RankRouting(
            ids[rank].astype(np.int32),
            np.full((nodes, max_tokens, topk), -1, np.int32),
            np.full((nodes, max_tokens, topk), -1, np.int32),
            np.full((nodes, max_tokens), -1, np.int32),
            np.full((nodes, max_tokens), -1, np.int32),
            np.zeros((nodes, 2), np.int32),
            offsets[rank],
            source[rank],
        )
        for other in range(nodes):
            peer = other * per_node + local
            of_peer, here = ids[peer], node_of_expert[peer] == node
            owner_local = of_peer // per_rank % per_node
            made.rows[other, : len(of_peer)] = np.where(here, owner_local << row_bits(topology) | row_of[peer], -1)
            made.experts[other, : len(of_peer)] = np.where(here, of_peer % per_rank, -1)
            if other != node:
                tokens, sent = listed[peer, node], listed[rank, other]
                made.listed[other, : len(tokens)] = tokens
                made.sums[other, sent] = np.arange(len(sent))
                made.counts[other] = len(tokens), len(sent)
        found.append(made)
    return found
