"""What the MoE ops share: the arrays that tell where a token's rows are, checks of operands, agreed bounds."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import DTYPES, ITEM, check_aligned, check_extents, check_matrix, check_multiple, check_writable, row_stride
from mkernel.planner.moe import MAX_TOPK, SEGMENT_ROWS, most_rows, row_bits, slot_blocks

if TYPE_CHECKING:
    from mkernel.planner.topology import Topology
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = [
    "Routing",
    "agreed_tokens",
    "check_bound",
    "check_columns",
    "check_contiguous",
    "check_expert_counts",
    "check_ids",
    "check_routing",
    "check_row_bits",
    "check_rows",
    "check_weights",
    "is_refused",
    "layout_of_experts",
    "note_refused",
]

_MOST_BYTES = 8 << 30  # that rows of any routing may take where the caller does not say how many there are
_MOST_ROWS = 1 << 27  # of one rank
_MARKS = 64  # bits of what kernels note of a token: its choices, the nodes, and one more
_MOST_EXPERTS, _MOST_COLUMNS = 4095, 12288
_TOKENS = 64  # the number of tokens that a call without max_tokens has room for is a multiple


class Routing(NamedTuple):
    """Where the rows of this rank's tokens are, as a dispatch has worked it out. int32 arrays that own their memory.

    T: tokens of this rank; k: choices of a token; N: nodes; W: ranks.

    Attributes
    ----------
    topk_ids
        (T, k): the experts of each token, -1 where a choice is not routed. Give it to another dispatch to send the same way again.
    rows
        (N, max_tokens, k): row of choice k of token t of the rank on this rank's rail in node n, where its expert is in this node, as
        ``local_rank << bits | row`` (``planner.moe.row_bits``); else -1. For the own node the tokens are this rank's.
    experts
        (N, max_tokens, k): the expert of that row, counted from 0 on the rank that has it; else -1.
    sums
        (N, max_tokens): place of this rank's token t among those that node n lists; -1 where n has no expert of it, and for the own node.
    listed
        (N, max_tokens): tokens of the rank on this rank's rail in node n for which this node has experts, in the order in which their rows
        come here: those whose first expert here is one of a rank's first come first.
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


def check_contiguous(name: str, view: TensorView, item: int = 4) -> None:
    shape = view.shape
    if 0 in shape:
        return
    wanted, strides = item, view.strides
    for i in range(len(shape) - 1, -1, -1):
        if strides[i] != wanted and shape[i] > 1:
            raise ArgumentError(f"{name}.strides", strides, f"{name} must be contiguous", f"use xp.ascontiguousarray({name})")
        wanted *= shape[i]
    check_aligned(name, view)


def check_routing(routing: Any) -> None:
    """What a caller passes may be another tuple of the same arrays."""
    if not isinstance(routing, tuple) or len(routing) != len(Routing._fields):
        rule = f"must be the routing that a dispatch has returned, a tuple of {', '.join(Routing._fields)}"
        raise ArgumentError("routing", type(routing).__name__, rule, "pass its .routing")


def check_row_bits(topology: Topology, max_rows: int) -> None:
    """A row's number and the local rank that has it are one int32."""
    if max_rows >> row_bits(topology):
        raise ArgumentError("max_rows", max_rows, f"must be below 2^{row_bits(topology)}")


def check_ids(ids: TensorView, tokens: int) -> int:
    """The number of choices of a token."""
    if len(ids.shape) != 2 or ids.shape[0] != tokens:
        raise ArgumentError("topk_ids.shape", ids.shape, f"must be (T, k) with T = x.shape[0] = {tokens}")
    if ids.dtype not in ("int32", "int64"):
        raise ArgumentError("topk_ids.dtype", ids.dtype, "must be int32 or int64")
    if not 1 <= ids.shape[1] <= MAX_TOPK:
        raise ArgumentError("topk_ids.shape", ids.shape, f"must have 1 to {MAX_TOPK} choices of a token")
    check_contiguous("topk_ids", ids, 8 if ids.dtype == "int64" else 4)
    return ids.shape[1]


def check_tokens(name: str, view: TensorView, shape: tuple[int, int], dtype: str) -> None:
    """An array with a row per token: ``add`` or ``out`` of what is combined."""
    if check_matrix(name, view, dtype) != shape:
        raise ArgumentError(f"{name}.shape", view.shape, f"must be (T, H) = {shape}")
    if shape[0]:
        check_aligned(name, view)
    check_extents(row_stride(name, view))


def check_weights(weights: TensorView | None, shape: tuple[int, int]) -> None:
    if weights is None:
        return
    if weights.shape != shape or weights.dtype != "float32":
        raise ArgumentError("topk_weights", f"{weights.shape} {weights.dtype}", f"must be {shape} float32, as topk_ids")
    check_contiguous("topk_weights", weights)


def check_expert_counts(counts: TensorView | None, experts: int) -> None:
    """``experts``: of all ranks."""
    if counts is None:
        return
    if counts.shape != (experts,) or counts.dtype != "int32":
        raise ArgumentError("expert_counts", f"{counts.shape} {counts.dtype}", f"must be ({experts},) int32: one of every expert")
    check_contiguous("expert_counts", counts)
    check_writable("expert_counts", counts)


def check_bound(name: str, value: Any) -> int:
    """A positive integer, the same on every rank."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < _MOST_ROWS:
        raise ArgumentError(name, value, f"must be a positive integer below {_MOST_ROWS}, the same on every rank")
    return int(value)


def layout_of_experts(name: str, w: TensorView, inner: int, dtype: str) -> tuple[int, int, bool, int]:
    """(experts, columns, whether row-major, bytes between rows or columns) of weights (E/W, inner, columns) in either layout."""
    if len(w.shape) != 3 or w.shape[1] != inner or w.shape[0] < 1:
        raise ArgumentError(f"{name}.shape", w.shape, f"must be (E/W, {inner}, columns), with at least one expert")
    if w.dtype not in DTYPES or w.dtype != dtype:
        raise ArgumentError(f"{name}.dtype", w.dtype, f"must be {dtype}, like the other operands")
    experts, _, columns = w.shape
    check_multiple(f"columns of {name}", columns)
    check_extents(experts, inner, columns)
    check_aligned(name, w)
    expert, row, column = w.strides
    for row_major, one, other, extent in ((True, column, row, columns), (False, row, column, inner)):
        if one == ITEM and other >= extent * ITEM and other % 16 == 0 and (experts == 1 or (expert % 16 == 0 and expert > 0)):
            return experts, columns, row_major, other
    rule = "each expert's weights must be row-major or the transpose view of a row-major matrix"
    raise ArgumentError(f"{name}.strides", w.strides, rule, f"copy them: xp.ascontiguousarray({name})")


def agreed_tokens(world: World, key: Hashable, tokens: int, given: Any) -> int:
    """Most tokens of a rank: what the caller says, else what the ranks agree on at the first call of this kind, a collective."""
    if given is not None:
        return check_bound("max_tokens", given)
    known = world.agreed.get(key)
    if known is None:
        most = max(world.exchange(f"most tokens of {key}", tokens))
        known = world.agreed[key] = max(1, math.ceil(most / _TOKENS)) * _TOKENS
    return known


def note_refused(world: World, topk_ids: TensorView) -> None:
    """Remember the ``topk_ids`` of a routing whose dispatch the device refuses, because this rank has more than ``max_tokens`` tokens.

    The host knows this before the error is there. What it launches with that routing until the error is raised is skipped on the device.
    """
    world.unchecked.add((topk_ids.address, topk_ids.shape))


def is_refused(world: World, topk_ids: TensorView) -> bool:
    """Whether a routing with these ids is that of a dispatch with too many tokens, whose error has not been raised yet."""
    return (topk_ids.address, topk_ids.shape) in world.unchecked


def check_columns(topology: Topology, topk: int) -> None:
    """Raise ArgumentError where kernels have no bit for each choice of a token and each node (kernels_src/moe/router.cuh)."""
    most = _MARKS - 1 - topology.num_nodes
    if topk >= most:
        nodes = topology.num_nodes
        rule = f"a token must have fewer than {max(most, 0)} choices: choices and nodes ({nodes}) together fewer than {_MARKS - 1}"
        raise ArgumentError("topk_ids.shape", f"(T, {topk})", rule)


def check_number_of_experts(experts: int, topology: Topology) -> None:
    """Raise ArgumentError where tables have no room for so many of a rank (kernels_src/moe/routing.cuh, tile/grouped.cuh)."""
    lists = topology.size + topology.num_nodes
    bands = max(1, min(512 // lists, 16, experts)) if topology.num_nodes > 1 else 1
    columns = experts * (topology.size + 1) + bands * lists
    if experts > _MOST_EXPERTS or columns > _MOST_COLUMNS:
        rule = f"at most {_MOST_EXPERTS} experts of a rank, and {_MOST_COLUMNS} columns, of which {topology.size} ranks need {columns}"
        raise ArgumentError("w.shape", f"({experts}, H, F)", rule)


def place_in_memory(array: Any) -> Any:
    """Where an array of any library begins, to tell whether two are the same; the array's own number where it does not say."""
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    for protocol in ("__cuda_array_interface__", "__array_interface__"):
        told = getattr(array, protocol, None)
        if told is not None:
            return told["data"][0]
    return id(array)


def check_rows(ranks: int, given: Any, max_tokens: int, topk: int, experts: int, alignment: int, columns: int) -> int:
    """Most rows of a rank: what the caller says, else those of any routing. ``columns``: of a row and of its result together."""
    if given is not None:
        return check_bound("max_rows", given)
    rows = most_rows(ranks, max_tokens, topk, experts, alignment)
    bytes_of_all = (slot_blocks(rows, experts) * SEGMENT_ROWS) * columns * ITEM
    if bytes_of_all > _MOST_BYTES or rows >= _MOST_ROWS:
        rule = f"rows of any routing ({rows} of a rank) would take {bytes_of_all} bytes, more than {_MOST_BYTES}"
        twice = 2 * max_tokens * topk + experts * (alignment - 1)
        raise ArgumentError("max_rows", None, rule, f"pass max_rows on every rank; {twice} is twice what balanced routing needs")
    return rows
