"""What the plans of the MoE ops share: how many rows there may be, and how they lie in memory (``kernels_src/moe``)."""

from __future__ import annotations

import math

from mkernel.errors import CallError, CallReport
from mkernel.planner.topology import Topology

__all__ = [
    "LINE",
    "MAX_TOPK",
    "SEGMENT_ROWS",
    "STAGED_ROWS",
    "RoutingError",
    "bands",
    "columns",
    "most_rows",
    "row_bits",
    "routing_error",
    "rows_per_piece",
    "slot_blocks",
    "whole_lines",
]

MAX_TOPK = 16
_LIST_COLUMNS, _MOST_BANDS = 512, 16
SEGMENT_ROWS = 64  # an expert's slots begin at a multiple
LINE = 128  # bytes of a line of L2
STAGED_ROWS = 32  # rows that are staged, and flagged, at once

_BAD_EXPERT, _TWICE, _TOO_MANY_TOKENS, _TOO_MANY_ROWS = 1, 2, 3, 4  # RoutingFault of kernels_src/moe/routing.cuh


_PIECE_BYTES, _MOST_PER_PIECE = 16 << 10, 8  # kPieceBytes of kernels_src/comm/copy.cuh; kTold of kernels_src/moe/pull.cuh


def whole_lines(row_bytes: int) -> int:
    """Bytes from a row to the next one where each begins with a line: L2 answers those at more than twice the rate (docs/speed_log.md)."""
    return -(-row_bytes // LINE) * LINE


def rows_per_piece(row_bytes: int) -> int:
    """How many rows a CTA copies at once: a power of two, so that those of a batch fill pieces."""
    return min(_MOST_PER_PIECE, 1 << max(0, (_PIECE_BYTES // row_bytes).bit_length() - 1))


class RoutingError(CallError):
    """The routing of a call is wrong on some rank; nothing was moved. Raised on every rank, and the world stays usable.

    Attributes
    ----------
    rank
        Whose routing it is: of the first token that is wrong, or the first rank with too many tokens or rows.
    token
        The number of that token on its rank; None where there are too many.
    value
        The expert's id, or how many tokens or rows there are.
    remedy
        What to do; part of the message.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x, w = np.ones((4, 64), ml_dtypes.bfloat16), np.ones((2, 64, 8), ml_dtypes.bfloat16)
    ...     try:
    ...         mk.moe_dispatch_gemm(x, np.full((4, 1), 3 + world.rank, np.int32), w)
    ...     except mk.RoutingError as error:
    ...         return error.rank, error.token, error.value
    >>> mk.launch(rank, ranks=2, target="cpu")  # there are experts 0 to 3
    [(1, 0, 4), (1, 0, 4)]
    """

    def __init__(self, message: str, report: CallReport, remedy: str) -> None:
        super().__init__(f"{message} ({remedy})", report)
        rank, second, third = report.details
        many = report.code in (_TOO_MANY_TOKENS, _TOO_MANY_ROWS)
        self.rank, self.remedy = rank, remedy
        self.token = None if many else second
        self.value = second if many else third - (third >> 31 << 32)


def routing_error(report: CallReport, experts: int) -> RoutingError:
    """The exception for what the kernel of a dispatch reports."""
    rank, second, third = report.details
    where = f"{report.op}, call {report.call}: rank {rank}"
    value = third - (third >> 31 << 32)
    if report.code == _BAD_EXPERT:
        remedy = f"ids must be 0 to {experts - 1}, or -1 where a choice is not routed"
        return RoutingError(f"{where}, token {second}: there is no expert {value}", report, remedy)
    if report.code == _TWICE:
        return RoutingError(f"{where}, token {second}: expert {value} twice", report, "the choices of a token must differ; use -1")
    if report.code == _TOO_MANY_TOKENS:
        return RoutingError(f"{where} has {second} tokens, max_tokens is {third}", report, "pass a larger max_tokens on every rank")
    remedy = "pass a larger max_rows on every rank, or balance the routing"
    return RoutingError(f"{where} gets {second} rows, max_rows is {third}", report, remedy)


def most_rows(ranks: int, max_tokens: int, topk: int, experts: int, alignment: int) -> int:
    """Rows that a rank may get under any routing; ``experts``: of a rank."""
    return ranks * max_tokens * min(topk, experts) + experts * (alignment - 1)


def row_bits(topology: Topology) -> int:
    """Bits of a row's number in ``Routing.rows``, above which the local rank is: ``kRowBits`` of ``kernels_src/moe/places.cuh``."""
    return 31 - (topology.ranks_per_node - 1).bit_length()


def slot_blocks(max_rows: int, experts: int) -> int:
    """Blocks of ``SEGMENT_ROWS`` slots that rows of a rank may take."""
    return math.ceil(max_rows / SEGMENT_ROWS) + experts


def columns(topology: Topology, experts: int) -> int:
    """What tokens are counted for: ``kColumns`` of ``kernels_src/moe/routing.cuh``."""
    lists = topology.size + topology.num_nodes
    return experts * topology.size + experts + lists * bands(topology, experts)


def bands(topology: Topology, experts: int) -> int:
    """By how many bands of first experts a node's lists are ordered: ``kBands`` there. ``experts``: of a rank."""
    if topology.num_nodes == 1:
        return 1
    return max(1, min(_LIST_COLUMNS // (topology.size + topology.num_nodes), _MOST_BANDS, experts))
