"""Products whose operands are spread over the ranks, with gradients. Formulas: c = a @ b, dC the gradient of c.

| op | da | db |
|---|---|---|
| allgather_gemm | gemm_reduce_scatter(dC, b^T) | gathered(a)^T @ dC |
| gemm_reduce_scatter | allgather_gemm(dC, b^T) | a^T @ gathered(dC) |
| gemm_allreduce | dC @ b^T | a^T @ dC |
| replicated_gemm | gemm_allreduce(dC, b^T) | a^T @ dC |

The gradient of ``b`` has the layout of ``b``, so that a weight kept as (N, K) and passed as its transpose view gets a contiguous one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.torch.library import cast, define, name_of, named, plain, require_tensors

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["all_gather", "allgather_gemm", "gemm_allreduce", "gemm_reduce_scatter", "replicated_gemm", "shared"]

_COLUMNS = 8  # fewest columns, and fewest rows, of an operand
_WORDS = _COLUMNS // 2  # of float32


def allgather_gemm(a: Tensor, b: Tensor, *, world: World | str | None = None, gather_again: bool = False) -> Tensor:
    """``mk.allgather_gemm`` with gradients: c (M, N) = rows of all ranks @ this rank's columns.

    Parameters
    ----------
    a
        (M/W, K) bfloat16 or float16, contiguous: this rank's rows.
    b
        (K, N), the dtype of ``a``: this rank's columns, row-major or a transpose view.
    world
        A world, its name, or None: the current one.
    gather_again
        What the gradient of ``b`` needs, the rows of all ranks: False keeps them until the backward pass ((M, K) more memory), True keeps
        ``a`` only and gathers again.

    Notes
    -----
    Collective, and so is its backward pass: all ranks differentiate the same ops in the same order, with the same ``requires_grad``.
    Raises as ``mk.allgather_gemm``.

    Examples
    --------
    >>> import torch, mkernel as mk, mkernel.torch as mkt
    >>> def rank(world):
    ...     a = torch.ones(16, 64, dtype=torch.bfloat16)
    ...     weight = torch.ones(8, 64, dtype=torch.bfloat16, requires_grad=True)
    ...     mkt.allgather_gemm(a, weight.t()).sum().backward()
    ...     return tuple(weight.grad.shape), float(weight.grad[0, 0])
    >>> mk.launch(rank, ranks=2, target="cpu")
    [((8, 64), 32.0), ((8, 64), 32.0)]
    """
    require_tensors(2, a=a, b=b)
    if not isinstance(gather_again, bool):
        raise ArgumentError("gather_again", repr(gather_again), "must be True or False")
    a, b = cast(a, b)
    if not gather_again and torch.is_grad_enabled() and b.requires_grad:
        c, _ = _allgather_gemm_gathered(a, b, name_of(world))
        return c
    return _allgather_gemm(a, b, name_of(world))


def gemm_reduce_scatter(a: Tensor, b: Tensor, *, world: World | str | None = None, partials: str = "output") -> Tensor:
    """``mk.gemm_reduce_scatter`` with gradients: c (M/W, N) = this rank's rows of the sum over the ranks of a (M, K/W) @ b (K/W, N).

    ``partials`` as there. Collective, and so is its backward pass, which is one ``allgather_gemm``.
    """
    require_tensors(a=a, b=b)
    a, b = cast(a, b)
    return _gemm_reduce_scatter(a, b, name_of(world), partials)


def gemm_allreduce(a: Tensor, b: Tensor, *, world: World | str | None = None, partials: str = "output") -> Tensor:
    """``mk.gemm_allreduce`` with gradients: c (M, N) = the sum over the ranks of a (M, K/W) @ b (K/W, N), on every rank.

    What follows must be the same on all ranks: then the gradient of ``c`` is, too, and the backward pass communicates nothing.
    """
    require_tensors(a=a, b=b)
    a, b = cast(a, b)
    return _gemm_allreduce(a, b, name_of(world), partials)


def replicated_gemm(a: Tensor, b: Tensor, *, world: World | str | None = None) -> Tensor:
    """Multiply a (M, K), the same on all ranks, by b (K, N), this rank's columns. The backward pass is one ``mk.gemm_allreduce``."""
    require_tensors(a=a, b=b)
    a, b = cast(a, b)
    return _replicated_gemm(a, b, name_of(world))


def shared(parameter: Tensor, *, world: World | str | None = None) -> Tensor:
    """A parameter that all ranks have and each uses for rows of its own: its gradient is summed over the ranks.

    For biases and norms under sequence parallelism, of bfloat16, float16 or float32. The sum is formed in float32 and rounded once.
    """
    require_tensors(parameter=parameter)
    return _shared(parameter, name_of(world))


def all_gather(x: Tensor, world: str) -> Tensor:
    """The rows of all ranks, (M, K), of x (M/W, K) contiguous. Collective; has no gradient."""
    return _all_gather(x, world)


# ---- forward
def _do_allgather_gemm(a: Tensor, b: Tensor, world: str) -> Tensor:
    return mk.allgather_gemm(plain(a), plain(b), world=named(world))


def _do_allgather_gemm_gathered(a: Tensor, b: Tensor, world: str) -> tuple[Tensor, Tensor]:
    w = named(world)
    gathered = a.new_empty((a.shape[0] * w.size, a.shape[1]))
    return mk.allgather_gemm(plain(a), plain(b), gathered=gathered, world=w), gathered


def _do_gemm_reduce_scatter(a: Tensor, b: Tensor, world: str, partials: str) -> Tensor:
    return mk.gemm_reduce_scatter(plain(a), plain(b), partials=partials, world=named(world))


def _do_gemm_allreduce(a: Tensor, b: Tensor, world: str, partials: str) -> Tensor:
    return mk.gemm_allreduce(plain(a), plain(b), partials=partials, world=named(world))


def _do_replicated_gemm(a: Tensor, b: Tensor, world: str) -> Tensor:
    return plain(a) @ plain(b)


def _do_shared(parameter: Tensor, world: str) -> Tensor:
    return plain(parameter).clone(memory_format=torch.contiguous_format)


def _do_sum_over_ranks(x: Tensor, world: str) -> Tensor:
    return _summed_words(plain(x), world) if x.dtype == torch.float32 else _summed(plain(x), named(world))


def _summed(values: Tensor, w: World) -> Tensor:
    """A row of ones times the ranks' values, each rank's in the first of 8 rows.

    The ones are new each time: kept ones might have been made in a capture, where they have no values yet, out of the memory of its graph.
    """
    count = values.numel()
    columns = max(1, -(-count // _COLUMNS)) * _COLUMNS
    b = torch.constant_pad_nd(values.reshape(1, count), (0, columns - count, 0, _COLUMNS - 1))
    summed: Tensor = mk.gemm_allreduce(values.new_ones((1, _COLUMNS)), b, partials="float32", world=w)
    return (summed if columns == count else summed[:, :count].clone()).view(values.shape)


def _summed_words(values: Tensor, world: str) -> Tensor:
    """The sum of float32 by the order of ranks, on each of them: their words travel as pairs of 16-bit numbers, untouched."""
    count = values.numel()
    columns = max(1, -(-count // _WORDS)) * _WORDS
    words = torch.constant_pad_nd(values.reshape(1, count), (0, columns - count)).view(torch.bfloat16)
    every = _do_all_gather(words, world).view(torch.float32)[:, :count].unbind(0)
    return functools.reduce(torch.add, every[1:], every[0]).view(values.shape).clone(memory_format=torch.contiguous_format)


def _do_all_gather(x: Tensor, world: str) -> Tensor:
    """The product with a few zeros is not wanted."""
    w = named(world)
    gathered = x.new_empty((x.shape[0] * w.size, x.shape[1]))
    mk.allgather_gemm(plain(x), x.new_zeros((x.shape[1], _COLUMNS)), gathered=gathered, world=w)
    return gathered


# ---- results without values
def _fake_rows(a: Tensor, b: Tensor, world: str) -> Tensor:
    return a.new_empty((a.shape[0] * named(world).size, b.shape[1]))


def _fake_gathered(a: Tensor, b: Tensor, world: str) -> tuple[Tensor, Tensor]:
    return _fake_rows(a, b, world), a.new_empty((a.shape[0] * named(world).size, a.shape[1]))


def _fake_scattered(a: Tensor, b: Tensor, world: str, partials: str) -> Tensor:
    return a.new_empty((a.shape[0] // named(world).size, b.shape[1]))


def _fake_product(a: Tensor, b: Tensor, world: str, partials: str = "") -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _fake_same(x: Tensor, world: str) -> Tensor:
    return x.new_empty(x.shape)


# ---- gradients
def _weight_gradient(a: Tensor, gradient: Tensor, b: Tensor) -> Tensor:
    """a^T @ gradient, in the layout of ``b``."""
    if b.stride(1) == 1:
        return a.t() @ gradient
    return (gradient.t() @ a).t()


def _save_operands(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, ctx.world, *_ = inputs
    ctx.save_for_backward(a, b)


def _save_gathered(ctx: Any, inputs: Any, output: Any) -> None:
    _, b, ctx.world = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], b)


def _save_world(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.world = inputs[-1]


def _scattered(ctx: Any, gradient: Tensor, b: Tensor) -> Tensor:
    return _gemm_reduce_scatter(gradient, b.t(), ctx.world, "output")


def _backward_allgather_gemm(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (a, b), gradient = ctx.saved_tensors, gradient.contiguous()
    da = _scattered(ctx, gradient, b) if ctx.needs_input_grad[0] else None
    db = _weight_gradient(_all_gather(a, ctx.world), gradient, b) if ctx.needs_input_grad[1] else None
    return da, db, None


def _backward_gathered(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    (gathered, b), gradient = ctx.saved_tensors, gradient.contiguous()
    da = _scattered(ctx, gradient, b) if ctx.needs_input_grad[0] else None
    db = _weight_gradient(gathered, gradient, b) if ctx.needs_input_grad[1] else None
    return da, db, None


def _backward_reduce_scatter(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (a, b), gradient = ctx.saved_tensors, gradient.contiguous()
    da = gathered = db = None
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
        da, gathered = _allgather_gemm_gathered(gradient, b.t(), ctx.world)
    elif ctx.needs_input_grad[0]:
        da = _allgather_gemm(gradient, b.t(), ctx.world)
    elif ctx.needs_input_grad[1]:
        gathered = _all_gather(gradient, ctx.world)
    if gathered is not None:
        db = _weight_gradient(a, gathered, b)
    return da, db, None, None


def _backward_allreduce(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    da = gradient @ b.t() if ctx.needs_input_grad[0] else None
    db = _weight_gradient(a, gradient, b) if ctx.needs_input_grad[1] else None
    return da, db, None, None


def _backward_replicated(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (a, b), gradient = ctx.saved_tensors, gradient.contiguous()
    da = _gemm_allreduce(gradient, b.t(), ctx.world, "output") if ctx.needs_input_grad[0] else None
    db = _weight_gradient(a, gradient, b) if ctx.needs_input_grad[1] else None
    return da, db, None


def _backward_shared(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return _sum_over_ranks(gradient, ctx.world), None


# ---- the ops
_gemm_reduce_scatter = define(
    "gemm_reduce_scatter(Tensor a, Tensor b, str world, str partials) -> Tensor",
    _do_gemm_reduce_scatter, _fake_scattered, backward=_backward_reduce_scatter, save=_save_operands,
)  # fmt: skip
_gemm_allreduce = define(
    "gemm_allreduce(Tensor a, Tensor b, str world, str partials) -> Tensor",
    _do_gemm_allreduce, _fake_product, backward=_backward_allreduce, save=_save_operands,
)  # fmt: skip
_allgather_gemm = define(
    "allgather_gemm(Tensor a, Tensor b, str world) -> Tensor",
    _do_allgather_gemm, _fake_rows, backward=_backward_allgather_gemm, save=_save_operands,
)  # fmt: skip
_allgather_gemm_gathered = define(
    "allgather_gemm_gathered(Tensor a, Tensor b, str world) -> (Tensor, Tensor)",
    _do_allgather_gemm_gathered, _fake_gathered, backward=_backward_gathered, save=_save_gathered,
)  # fmt: skip
_replicated_gemm = define(
    "replicated_gemm(Tensor a, Tensor b, str world) -> Tensor",
    _do_replicated_gemm, _fake_product, backward=_backward_replicated, save=_save_operands,
)  # fmt: skip
_shared = define("shared(Tensor x, str world) -> Tensor", _do_shared, _fake_same, backward=_backward_shared, save=_save_world)
_sum_over_ranks = define("sum_over_ranks(Tensor x, str world) -> Tensor", _do_sum_over_ranks, _fake_same)
_all_gather = define(
    "all_gather(Tensor x, str world) -> Tensor",
    _do_all_gather,
    lambda x, world: x.new_empty((x.shape[0] * named(world).size, x.shape[1])),
)
