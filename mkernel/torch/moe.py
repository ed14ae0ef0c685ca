"""Mixture of experts with gradients.

Of a dispatch that has brought rows X to the experts, dx is ``moe_gemm_combine(dY, w^T)``, and dw of each expert is X^T dY. Of a combine
``moe_gemm_combine(a, w)``, where a dispatch brings rows Z of the gradient to the experts, da is weight * (Z w^T), dw is a^T (weight * Z),
and the gradient of a weight is the product of its rows of a and Z w^T.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import mkernel as mk
from mkernel.ops.moe import check_bound, check_rows
from mkernel.ops.moe_slots import slots_after
from mkernel.planner.moe import SEGMENT_ROWS
from mkernel.torch.library import cast, define, name_of, named, plain, require_tensors
from mkernel.torch.pieces import pieces_of

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["Dispatched", "moe_combine", "moe_dispatch_gemm", "moe_gemm_combine", "moe_layer"]

_COLUMNS = 8  # a row's extent is a multiple


class Dispatched(NamedTuple):
    """What ``moe_dispatch_gemm`` returns: as ``mk.Dispatched``, of which it has what a program of torch needs."""

    y: Tensor
    expert_offsets: Tensor
    source: Tensor
    routing: mk.Routing


def moe_dispatch_gemm(
    x: Tensor, topk_ids: Tensor, w: Tensor, *, max_tokens: int, max_rows: int | None = None, world: World | str | None = None
) -> Dispatched:
    """``mk.moe_dispatch_gemm`` without activation, with gradients of ``x`` and ``w``.

    ``max_tokens``, and with it ``max_rows``, must be given, because a compiled graph needs the shapes of results. Rows of ``y`` from
    ``expert_offsets[-1]`` on are undefined, and so are their gradients. While ``w`` requires a gradient, the rows that the experts got are
    kept for the backward pass: (max_rows, H).
    """
    require_tensors(x=x)
    require_tensors(2, topk_ids=topk_ids)
    require_tensors(3, w=w)
    name, (x, w) = name_of(world), cast(x, w)
    keep = torch.is_grad_enabled() and w.requires_grad
    most = _most_rows(name, max_rows, max_tokens, topk_ids, w)
    y, offsets, source, _, ids, *tables, _ = _dispatch(x, topk_ids, w, None, max_tokens, most, keep, name)
    return Dispatched(y, offsets, source, mk.Routing._make([ids, *tables, offsets]))


def moe_gemm_combine(
    a: Tensor,
    w: Tensor,
    routing: mk.Routing,
    *,
    topk_weights: Tensor | None = None,
    add: Tensor | None = None,
    world: World | str | None = None,
) -> Tensor:
    """``mk.moe_gemm_combine`` with gradients of ``a``, ``w``, ``topk_weights`` and ``add``."""
    require_tensors(a=a, w=w, **_given(topk_weights=topk_weights, add=add))
    a, w, add = cast(a, w, add)
    return _gemm_combine(a, w, *routing, topk_weights, add, name_of(world))


def moe_combine(
    rows: Tensor, routing: mk.Routing, *, topk_weights: Tensor | None = None, add: Tensor | None = None, world: World | str | None = None
) -> Tensor:
    """``mk.moe_combine`` with gradients of ``rows``, ``topk_weights`` and ``add``."""
    require_tensors(rows=rows, **_given(topk_weights=topk_weights, add=add))
    rows, add = cast(rows, add)
    return _combine(rows, *routing, topk_weights, add, name_of(world))


def moe_layer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    add: Tensor | None = None,
    max_tokens: int,
    max_rows: int | None = None,
    world: World | str | None = None,
) -> Tensor:
    """``mk.moe_layer`` with SwiGLU, and with gradients of all but ``topk_ids``.

    Without gradients it is ``mk.moe_layer`` itself. With them the activation is torch's, on rows that were rounded to the dtype of ``x``
    once more, and ``max_rows`` x 2 F values are kept.
    """
    require_tensors(x=x, topk_weights=topk_weights, w_down=w_down, **_given(add=add))
    require_tensors(2, topk_ids=topk_ids)
    require_tensors(3, w_gate_up=w_gate_up)
    name, (x, w_gate_up, w_down, add) = name_of(world), cast(x, w_gate_up, w_down, add)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weights, w_gate_up, w_down, add))
    if not wanted:
        most = _most_rows(name, max_rows, max_tokens, topk_ids, w_gate_up)
        return _layer(x, topk_ids, topk_weights, w_gate_up, w_down, add, max_tokens, most, name)
    d = moe_dispatch_gemm(x, topk_ids, w_gate_up, max_tokens=max_tokens, max_rows=max_rows, world=name)
    gate, up = d.y.chunk(2, 1)
    activated = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
    return moe_gemm_combine(activated, w_down, d.routing, topk_weights=topk_weights, add=add, world=name)


def _given(**operands: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: each for name, each in operands.items() if each is not None}


def _most_rows(world: str, given: int | None, max_tokens: int, topk_ids: Tensor, w: Tensor) -> int:
    return check_rows(
        _ranks(world), given, check_bound("max_tokens", max_tokens), topk_ids.shape[1], w.shape[0], 1, w.shape[1] + w.shape[2]
    )


@torch.compiler.assume_constant_result
def _ranks(world: str) -> int:
    return named(world).size


# ---- forward
def _do_dispatch(
    x: Tensor, ids: Tensor, w: Tensor, weights: Tensor | None, max_tokens: int, max_rows: int, keep: bool, world: str
) -> tuple[Tensor, ...]:
    it = named(world)
    operands = plain(x), plain(ids), plain(w), None if weights is None else plain(weights), None
    with it.lock:
        d = mk.moe_dispatch_gemm(*operands[:3], topk_weights=operands[3], max_tokens=max_tokens, max_rows=max_rows, world=it)
        rows = x.new_empty((max_rows if keep else 0, x.shape[1]))
        if keep:
            stream = it.backend.libraries[torch.Tensor].stream()
            words = slots_after(it, operands, max_tokens, max_rows, stream)
            slots = torch.as_tensor(words, device=None if it.target == "cpu" else f"cuda:{it.device}").view(x.dtype)
            it.backend.after(stream, lambda: torch.index_select(slots, 0, _slots_of(d.expert_offsets, max_rows, len(slots)), out=rows))
    weight = x.new_empty(0, dtype=torch.float32) if d.row_weight is None else d.row_weight
    return d.y, d.expert_offsets, d.source, weight, *d.routing[:6], rows


def _slots_of(offsets: Any, rows: int, slots: int) -> Tensor:
    """The slot of each row: an expert's slots begin at a multiple of ``SEGMENT_ROWS``. Of rows that there are not, any slot."""
    counts = offsets.diff()
    segments = (counts + SEGMENT_ROWS - 1) // SEGMENT_ROWS * SEGMENT_ROWS
    shift = segments.cumsum(0) - segments - offsets[:-1]
    row = torch.arange(rows, device=offsets.device)
    expert = torch.searchsorted(offsets[1:], row.int(), right=True).clamp_(max=len(counts) - 1)
    return (row + shift[expert]).clamp_(max=slots - 1)


def _do_gemm_combine(a: Tensor, w: Tensor, *more: Any) -> Tensor:
    *routing, weights, add, world = more
    return mk.moe_gemm_combine(
        plain(a), plain(w), mk.Routing._make(routing), topk_weights=_plain(weights), add=_plain(add), world=named(world)
    )


def _do_combine(rows: Tensor, *more: Any) -> Tensor:
    *routing, weights, add, world = more
    return mk.moe_combine(plain(rows), mk.Routing._make(routing), topk_weights=_plain(weights), add=_plain(add), world=named(world))


def _do_layer(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, add: Tensor | None, max_tokens: int, max_rows: int, world: str
) -> Tensor:
    operands = (plain(each) for each in (x, ids, weights, up, down))
    return mk.moe_layer(*operands, add=_plain(add), max_tokens=max_tokens, max_rows=max_rows, world=named(world))


def _plain(tensor: Tensor | None) -> Any:
    return None if tensor is None else plain(tensor)


# ---- results without values
def _fake_dispatch(
    x: Tensor, ids: Tensor, w: Tensor, weights: Tensor | None, max_tokens: int, max_rows: int, keep: bool, world: str
) -> tuple[Tensor, ...]:
    nodes, (tokens, topk) = named(world).num_nodes, ids.shape

    def table(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    shapes = [(tokens, topk), *[(nodes, max_tokens, topk)] * 2, *[(nodes, max_tokens)] * 2, (nodes, 2)]
    tables = [table(*shape) for shape in shapes]
    weight = x.new_empty(0 if weights is None else max_rows, dtype=torch.float32)
    rows = x.new_empty((max_rows if keep else 0, x.shape[1]))
    return x.new_empty((max_rows, w.shape[2])), table(w.shape[0] + 1), table(max_rows, 3), weight, *tables, rows


def _fake_gemm_combine(a: Tensor, w: Tensor, ids: Tensor, *more: Any) -> Tensor:
    return a.new_empty((ids.shape[0], w.shape[2]))


def _fake_combine(rows: Tensor, ids: Tensor, *more: Any) -> Tensor:
    return rows.new_empty((ids.shape[0], rows.shape[1]))


# ---- gradients
def _save_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, w, _, _, _, _, ctx.world = inputs
    _, offsets, _, _, *tables, rows = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(w, *tables, offsets, rows)


def _backward_dispatch(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    w, *routing, rows = ctx.saved_tensors
    gradient, offsets = gradient.contiguous(), routing[6]
    dx = _gemm_combine(gradient, w.transpose(1, 2), *routing, None, None, ctx.world) if ctx.needs_input_grad[0] else None
    dw = _weight_gradient(rows, gradient, offsets, w) if ctx.needs_input_grad[2] else None
    return dx, None, dw, None, None, None, None, None


def _save_gemm_combine(ctx: Any, inputs: Any, output: Any) -> None:
    a, w, *routing, weights, _, ctx.world = inputs
    ctx.weighted = weights is not None
    ctx.save_for_backward(a, w, *routing, *([weights] if ctx.weighted else []))


def _backward_gemm_combine(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    a, w, *routing = ctx.saved_tensors
    weights = routing.pop() if ctx.weighted else None
    wants_a, wants_w, wants_weights, wants_add = (ctx.needs_input_grad[at] for at in (0, 1, 9, 10))
    da = dw = dweights = None
    if wants_a or wants_w or wants_weights:
        arguments = gradient.contiguous(), routing[0], w.transpose(1, 2), weights, routing[1].shape[1], a.shape[0], wants_w, ctx.world
        z, offsets, source, row_weight, *_, rows = _dispatch(*arguments)
        factor = row_weight[:, None] if ctx.weighted else None
        if wants_weights:
            dweights = _weights_gradient((a.float() * z.float()).sum(1), source, routing, a.dtype, ctx.world)
        if wants_a:
            da = z if factor is None else (z.float() * factor).to(z.dtype)
        if wants_w:
            dw = _weight_gradient(a, rows if factor is None else (rows.float() * factor).to(rows.dtype), offsets, w)
    return da, dw, *[None] * 7, dweights, gradient if wants_add else None, None


def _save_combine(ctx: Any, inputs: Any, output: Any) -> None:
    rows, *routing, weights, _, ctx.world = inputs
    ctx.weighted = weights is not None
    ctx.save_for_backward(rows, *routing, *([weights] if ctx.weighted else []))


def _backward_combine(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, *routing = ctx.saved_tensors
    weights = routing.pop() if ctx.weighted else None
    drows = dweights = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[8]:
        experts = routing[6].shape[0] - 1
        nothing = gradient.new_zeros((experts, gradient.shape[1], _COLUMNS))  # only the rows are wanted
        arguments = gradient.contiguous(), routing[0], nothing, weights, routing[1].shape[1], rows.shape[0], True, ctx.world
        _, _, source, row_weight, *_, brought = _dispatch(*arguments)
        if ctx.needs_input_grad[8]:
            dweights = _weights_gradient((rows.float() * brought.float()).sum(1), source, routing, rows.dtype, ctx.world)
        drows = brought if weights is None else (brought.float() * row_weight[:, None]).to(brought.dtype)
    return drows, *[None] * 7, dweights, gradient if ctx.needs_input_grad[9] else None, None


def _weights_gradient(products: Tensor, source: Tensor, routing: list[Tensor], dtype: torch.dtype, world: str) -> Tensor:
    """(T, k) float32: each row's product goes back to its token in columns of its own, in numbers of ``dtype`` that make it up."""
    topk, parts = routing[0].shape[1], _apart(products, dtype)
    columns = -(-topk * len(parts) // _COLUMNS) * _COLUMNS
    choice = source[:, 2].long().clamp(0, topk - 1)[:, None]  # undefined in rows that there are not
    places = choice * len(parts) + torch.arange(len(parts), device=choice.device)
    sent = torch.zeros((len(products), columns), dtype=dtype, device=products.device).scatter(1, places, torch.stack(parts, 1))
    back = _combine(sent, *routing, None, None, world)
    return _together(back[:, : topk * len(parts)].float().view(-1, topk, len(parts)), dtype)


def _apart(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """float32 as numbers of ``dtype``: three of bfloat16 that add up to it; of float16 two for its mantissa, and its exponent."""
    if dtype != torch.float16:
        return pieces_of(x, dtype)
    mantissa, exponent = torch.frexp(x)
    return [*pieces_of(mantissa, dtype), exponent.to(dtype)]


def _together(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers whose parts lie in the last dimension."""
    return torch.ldexp(parts[..., 0] + parts[..., 1], parts[..., 2].int()) if dtype == torch.float16 else parts.sum(-1)


def _weight_gradient(rows: Tensor, gradient: Tensor, offsets: Tensor, w: Tensor) -> Tensor:
    """rows^T @ gradient of each expert, in the layout of ``w`` (E/W, H, F)."""
    if w.stride(2) == 1:
        return _grouped(rows, gradient, offsets)
    return _grouped(gradient, rows, offsets).transpose(1, 2)


def _do_grouped(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a^T @ b of the rows of each expert: (E/W, columns of a, columns of b)."""
    a, b = plain(a), plain(b)
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch._grouped_mm(a.t(), b, offs=offsets[1:])
    ends = offsets.tolist()  # waits for the device
    out = a.new_empty((len(ends) - 1, a.shape[1], b.shape[1]))
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])
    return out


_ROUTING = "Tensor topk_ids, Tensor rows, Tensor experts, Tensor sums, Tensor listed, Tensor counts, Tensor expert_offsets"
_dispatch = define(
    "moe_dispatch_gemm(Tensor x, Tensor topk_ids, Tensor w, Tensor? topk_weights, int max_tokens, int max_rows, bool keep, str world) "
    f"-> ({', '.join(['Tensor'] * 11)})",
    _do_dispatch, _fake_dispatch, backward=_backward_dispatch, save=_save_dispatch,
)  # fmt: skip
_gemm_combine = define(
    f"moe_gemm_combine(Tensor a, Tensor w, {_ROUTING}, Tensor? topk_weights, Tensor? add, str world) -> Tensor",
    _do_gemm_combine, _fake_gemm_combine, backward=_backward_gemm_combine, save=_save_gemm_combine,
)  # fmt: skip
_combine = define(
    f"moe_combine(Tensor x, {_ROUTING}, Tensor? topk_weights, Tensor? add, str world) -> Tensor",
    _do_combine, _fake_combine, backward=_backward_combine, save=_save_combine,
)  # fmt: skip
_layer = define(
    "moe_layer(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? add, int max_tokens, int max_rows, "
    "str world) -> Tensor",
    _do_layer,
    lambda x, *more: x.new_empty(x.shape),
)
_grouped = define(
    "moe_grouped(Tensor a, Tensor b, Tensor expert_offsets) -> Tensor",
    _do_grouped,
    lambda a, b, offsets: a.new_empty((offsets.shape[0] - 1, a.shape[1], b.shape[1])),
)
