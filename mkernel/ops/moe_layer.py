"""``mk.moe_layer``: the whole MoE layer, two kernels one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import ITEM, check_matrix, check_places, check_writable
from mkernel.ops.call import named, not_plain, remember
from mkernel.ops.moe import check_ids, check_tokens, check_weights, layout_of_experts
from mkernel.ops.moe_dispatch_gemm import Dispatched, moe_dispatch_gemm
from mkernel.ops.moe_gemm_combine import moe_gemm_combine
from mkernel.planner.moe import whole_lines
from mkernel.runtime import current

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.libraries import Library
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["ARRAYS", "NAME", "OPTIONS", "Between", "check", "moe_layer", "queue_of"]

NAME = "moe_layer"
ARRAYS = ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down", "add", "expert_counts")
_NAMES, _FILLED = (*ARRAYS, "out"), ("expert_counts", "out")
OPTIONS: Mapping[str, Any] = {"activation": "swiglu", "clamp": None, "max_tokens": None, "max_rows": None}


def moe_layer(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    activation: str | None = "swiglu",
    clamp: float | None = None,
    add: Array | None = None,
    expert_counts: Array | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    world: World | None = None,
    out: Array | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> Array:
    """Pass each token through its experts: ``y = add + sum over k of weight_k * (silu(x @ gate_k) * (x @ up_k)) @ down_k``.

    Of E experts, rank r has r*E/W to (r+1)*E/W - 1. Two kernels: ``mk.moe_dispatch_gemm`` with SwiGLU, then ``mk.moe_gemm_combine``.

    Parameters
    ----------
    x
        (T, H) bfloat16 or float16, contiguous: this rank's tokens. T may be 0 and differ by rank and call. H is a multiple of 8.
    topk_ids
        (T, k) int32 or int64, contiguous, k from 1 to 16: the experts of each token, all different; -1: not routed.
    topk_weights
        (T, k) float32, contiguous: the router's weights.
    w_gate_up
        (E/W, H, 2 F), the dtype of ``x``: [gate | up] of this rank's experts, each row-major or all transpose views of (2 F, H). F is a
        multiple of 8. With ``activation`` None: (E/W, H, F).
    w_down
        (E/W, F, H), in either layout.
    activation
        "swiglu", or None: the products go on as they are.
    clamp
        Of ``moe_dispatch_gemm``: gate is cut off above it, up outside of +-clamp.
    add
        (T, H), the dtype of ``x``: added to the result, such as what a shared expert makes of ``x``.
    expert_counts
        (E) int32, to be filled: how many tokens of all ranks each expert gets, for load balancing.
    max_tokens, max_rows
        As in ``mk.moe_dispatch_gemm``.
    out
        (T, H) to fill, no byte shared with another argument; returned as given.
    split
        SMs per role, of both kernels. None: mkernel's choice for each.

    Returns
    -------
    y
        (T, H). Sums are formed in float32. Rounded once each to the dtype of ``x``: the activated rows, their products with ``w_down``,
        one sum per token and other node, and the result. Bitwise the same on every run.

    Notes
    -----
    Collective, asynchronous and capturable as ``mk.moe_dispatch_gemm``; ``mk.plan("moe_layer", ...)`` prepares both kernels. Rows
    between the two stay with the world: ``max_rows`` of them, of F values rounded up to a multiple of 64, and the arrays of
    ``mk.Routing``, once for each shape of layer.

    Raises
    ------
    ArgumentError, RoutingError, MismatchError, TimeoutError, PeerLostError, TransportError
        As ``mk.moe_dispatch_gemm`` and ``mk.moe_gemm_combine``. After a RoutingError ``y`` is undefined, and the world stays usable.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x = np.ones((2, 64), ml_dtypes.bfloat16)  # two tokens; one expert on each rank, which multiplies by its rank + 1
    ...     up, down = np.eye(64)[None].astype(x.dtype), (world.rank + 1) * np.eye(64)[None].astype(x.dtype)
    ...     ids, weights = np.array([[0, 1], [1, -1]], np.int32), np.array([[0.5, 0.5], [1, 0]], np.float32)
    ...     y = mk.moe_layer(x, ids, weights, up, down.astype(x.dtype), activation=None)
    ...     return y[:, 0].tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[1.5, 2.0], [1.5, 2.0]]

    The algorithm: docs/architecture.md, and the two kernels it is made of.
    """
    w = current.current(world)
    options: dict[str, Any] = {"activation": activation, "clamp": clamp, "max_tokens": max_tokens, "max_rows": max_rows}
    arrays = (x, topk_ids, topk_weights, w_gate_up, w_down, add, expert_counts, out)
    with w.lock:
        libraries = w.backend.libraries
        try:
            asked = (NAME, *options.values(), *(None if array is None else libraries[type(array)].key(array) for array in arrays))
            known: Dispatched | None = w.bound_calls.get(asked)
        except ArgumentError as error:
            raise named(error, w, _NAMES, arrays) from None
        except TypeError as error:
            raise not_plain(options) or error from None
        shape = between = None
        if known is None:
            views: list[Any] = [None if array is None else libraries[type(array)].view(array) for array in arrays]
            shape = (type(x), *check(w, activation, *views), *options.values())
            between = w.kept.get(shape)
            if between is not None:
                home = libraries[type(x)]
                known = between.of(home, views[0].shape[0], queue_of(w, home, stream))
        more: dict[str, Any] = {"world": w, "split": split, "stream": stream}
        rows = moe_dispatch_gemm(x, topk_ids, w_gate_up, expert_counts=expert_counts, out=known, **options, **more)
        if shape is not None:
            if between is None:
                home = libraries[type(x)]
                queue = queue_of(w, home, stream)
                between = w.kept[shape] = Between(home, rows, queue)
                remember(w, asked, between.of(home, rows.routing.topk_ids.shape[0], queue))
            else:
                remember(w, asked, rows)
        return moe_gemm_combine(rows.y, w_down, rows.routing, topk_weights=topk_weights, add=add, out=out, **more)


def check(
    world: World, activation: str | None, x: Any, ids: Any, weights: Any, up: Any, down: Any, add: Any, counts: Any, out: Any = None
) -> tuple[Any, ...]:
    """Extents, dtypes and the layout of what is dispatched to: calls alike in them share arrays, whatever their tokens.

    What the second kernel would refuse is refused before the first one runs.
    """
    for name, view in (("x", x), ("topk_ids", ids), ("topk_weights", weights), ("w_gate_up", up), ("w_down", down)):
        if view is None:
            raise ArgumentError(name, None, f"{NAME} needs it")
    tokens, h = check_matrix("x", x)
    topk = check_ids(ids, tokens)
    check_weights(weights, (tokens, topk))
    experts, columns, row_major, _ = layout_of_experts("w_gate_up", up, h, x.dtype)
    f = columns if activation is None else columns // 2
    if layout_of_experts("w_down", down, f, x.dtype)[:2] != (experts, h):
        raise ArgumentError("w_down.shape", down.shape, f"must be ({experts}, {f}, {h}), as w_gate_up and x have it")
    for name, view in (("add", add), ("out", out)):
        if view is not None:
            check_tokens(name, view, (tokens, h), x.dtype)
    for name, view in (("expert_counts", counts), ("out", out)):
        if view is not None and not view.writable:
            check_writable(name, view)
    check_places(_NAMES, (x, ids, weights, up, down, add, counts, out), _FILLED)
    return h, x.dtype, topk, experts, columns, row_major


def queue_of(world: World, home: Library, stream: Any) -> Any:
    """The stream of a call that was asked for ``stream``; None: where ``home``, the library of its arrays, works now."""
    return home.stream() if stream is None else world.backend.stream(stream)


class Between:
    """The arrays between the two kernels of a layer, which all calls of a shape use one after the other, whatever their tokens."""

    __slots__ = ("_dispatched", "_ids")

    def __init__(self, home: Library, dispatched: Dispatched, queue: Any) -> None:
        """``dispatched``: of the first call, or made for it. Rows of y begin at whole lines here, which the second kernel loads faster."""
        rows, columns = dispatched.y.shape
        if (pitch := whole_lines(columns * ITEM) // ITEM) != columns:
            whole = home.empty((rows, pitch), home.view(dispatched.y).dtype, queue)
            dispatched = dispatched._replace(y=whole[:, :columns])
        self._dispatched, self._ids = dispatched, dispatched.routing.topk_ids

    def of(self, home: Library, tokens: int, queue: Any) -> Dispatched:
        """The arrays of a call of so many tokens on the stream ``queue``; ``home``: the library that makes them."""
        routing = self._dispatched.routing
        if tokens > self._ids.shape[0]:
            self._ids = home.empty((max(tokens, routing.rows.shape[1]), self._ids.shape[1]), "int32", queue)
        ids = self._ids if tokens == self._ids.shape[0] else self._ids[:tokens]
        return self._dispatched._replace(routing=routing._replace(topk_ids=ids))
