"""Ring attention with gradients.

The backward pass gathers k and v, lets torch's flash attention work out the gradients of this rank's rows with the o and lse of the whole
sequence, and adds up the gradients of k and v over the ranks in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mkernel as mk
from mkernel.torch.gemm import all_gather
from mkernel.torch.library import cast, define, name_of, named, plain, require_tensors
from mkernel.torch.pieces import PIECES, pieces_of

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    world: World | str | None = None,
) -> mk.Attended:
    """``mk.ring_attention`` with gradients of q, k and v by o. Arguments and results as there; ``lse`` has no gradient.

    The backward pass takes k and v of the whole sequence, and their gradients in float32, in memory of this rank. Collective, as is its
    backward pass.
    """
    require_tensors(q=q, k=k, v=v)
    q, k, v = cast(q, k, v)
    o, lse = _ring_attention(q, k, v, causal, scale, layout, name_of(world))
    return mk.Attended(o, lse)


def _do(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, layout: str, world: str) -> tuple[Tensor, Tensor]:
    operands = plain(q), plain(k), plain(v)
    return mk.ring_attention(*operands, causal=causal, scale=scale, layout=layout, world=named(world))


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, layout: str, world: str) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, scale, ctx.layout, ctx.world = inputs
    ctx.scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    gradients = _ring_attention_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.layout, ctx.world)
    return (*gradients, None, None, None, None)


def _do_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    layout: str,
    world: str,
) -> tuple[Tensor, Tensor, Tensor]:
    w = named(world)
    every_k, every_v = (_whole(all_gather(_matrix(plain(x)), world), x, w.size, layout) for x in (k, v))
    dq, dk, dv = (torch.zeros(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, every_k.shape, every_v.shape))
    for rows, keys, diagonal in _pieces(q.shape[2], w.rank, w.size, causal, layout):
        my_gradient, my_q, my_o, my_lse = (x[:, :, rows] for x in (gradient, q, o, lse))
        pieces = _flash_backward(my_gradient, my_q, my_o, my_lse, every_k[:, :, keys], every_v[:, :, keys], diagonal, scale)
        for whole, part, piece in zip((dq, dk, dv), (rows, keys, keys), pieces, strict=True):
            whole[:, :, part] += piece
    return dq.to(q.dtype), *(_reduce_scatter(_by_rank(x, w.size, layout), w, k) for x in (dk, dv))


def _fake_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- which rows see which keys
def _pieces(length: int, rank: int, ranks: int, causal: bool, layout: str) -> Iterator[tuple[slice, slice, bool]]:
    """Rows of this rank, keys of the sequence that they see, and whether row i sees only keys 0 to i of these."""
    if not causal:
        yield slice(0, length), slice(0, length * ranks), False
        return
    chunks = [(rank, length)] if layout == "contiguous" else [(rank, length // 2), (2 * ranks - 1 - rank, length // 2)]
    for at, (chunk, size) in enumerate(chunks):
        rows = slice(at * size, (at + 1) * size)
        if chunk:
            yield rows, slice(0, chunk * size), False
        yield rows, slice(chunk * size, (chunk + 1) * size), True


def _order(ranks: int, layout: str) -> list[int]:
    """Chunks of the sequence in the order in which the ranks hold them."""
    return list(range(ranks)) if layout == "contiguous" else [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]


def _matrix(x: Tensor) -> Tensor:
    """A rank's keys (B, H, S/W, D) as rows of D."""
    return x.contiguous().view(-1, x.shape[3])


def _whole(rows: Tensor, x: Tensor, ranks: int, layout: str) -> Tensor:
    """Keys of all ranks in the order of the sequence: (B, H, S, D). ``x``: those of one rank."""
    order = _order(ranks, layout)
    batches, heads, length, d = x.shape
    each = len(order) // ranks
    held = rows.view(ranks, batches, heads, each, length // each, d).permute(1, 2, 0, 3, 4, 5)
    chunks = held.reshape(batches, heads, len(order), length // each, d)
    back = sorted(range(len(order)), key=order.__getitem__)
    return chunks[:, :, back].reshape(batches, heads, length * ranks, d)


def _by_rank(x: Tensor, ranks: int, layout: str) -> Tensor:
    """(B, H, S, D) in the order of the sequence as rows of D, rank by rank: the inverse of ``_whole``."""
    order = _order(ranks, layout)
    batches, heads, length, d = x.shape
    chunks = x.view(batches, heads, len(order), length // len(order), d)[:, :, order]
    held = chunks.view(batches, heads, ranks, length // ranks, d)
    return held.permute(2, 0, 1, 3, 4).reshape(-1, d)


def _reduce_scatter(x: Tensor, world: Any, like: Tensor) -> Tensor:
    """Rows of this rank of the float32 sum of all ranks' ``x``, rounded once: a product of the pieces of each number with identities."""
    summed: Any = mk.gemm_reduce_scatter(
        torch.cat(pieces_of(x, like.dtype), 1), _identities(x.shape[1], like.dtype, x.device), partials="float32", world=world
    )
    return summed.view(like.shape)


def _identities(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(n, dtype=dtype, device=device).repeat(PIECES[dtype], 1)


# ---- torch's own kernels
def _flash_backward(
    gradient: Tensor, q: Tensor, o: Tensor, lse: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v over some of the keys, where ``o`` and ``lse`` are those over all keys."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if q.is_cuda:
        dq, dk, dv = _on_gpu(gradient, q, k, v, o, lse, diagonal, scale)
    else:
        dq, dk, dv = _on_cpu(gradient, q, k, v, o, lse, diagonal, scale)
    if group > 1:
        dk, dv = (x.float().unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _on_cpu(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, diagonal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In float32, which this kernel takes."""
    exact = [x.float().contiguous() for x in (gradient, q, k, v, o)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(*exact, lse.contiguous(), 0.0, diagonal, scale=scale)


def _on_gpu(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, diagonal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = q.shape[2], k.shape[2]
    return kernel(gradient, q, k, v, o, lse.contiguous(), None, None, *lengths, 0.0, diagonal, seed, seed, scale=scale)


_ring_attention = define(
    "ring_attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str layout, str world) -> (Tensor, Tensor)",
    _do, _fake, backward=_backward, save=_save,
)  # fmt: skip
_ring_attention_backward = define(
    "ring_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "bool causal, float scale, str layout, str world) -> (Tensor, Tensor, Tensor)",
    _do_backward, _fake_backward,
)  # fmt: skip
