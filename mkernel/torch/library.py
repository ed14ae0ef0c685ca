"""How an op is registered with torch, and how it finds its world.

An op takes its world by name (``World.name``), because a compiled graph holds text but no objects, and because torch runs backward passes
on threads of its own, where no world is current.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from mkernel.errors import ArgumentError
from mkernel.runtime import current
from mkernel.runtime.current import named

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["autocast_dtype", "cast", "define", "is_watched", "name_of", "named", "plain", "require_tensors"]

_library = torch.library.Library("mkernel", "DEF")
# Inductor must hand over what it traced: kernels take some strides only.
_TAGS = (torch.Tag.needs_exact_strides,)


def define(
    schema: str,
    call: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., Any] | None = None,
) -> Any:
    """Register the op ``mkernel::<schema>``; returns what calls it.

    An eager call of plain tensors that nobody watches goes past torch's dispatcher, which takes longer than all else of a call: ``call``
    itself, or one ``torch.autograd.Function`` where a gradient is wanted. All other calls are of the registered op, which is its ``op``.
    Below autograd that is another op, ``mkernel::_<schema>``, which has no gradient: a compiled graph, in which gradients have been taken
    care of, calls one that does not ask for them in Python again.

    Parameters
    ----------
    schema
        Name, arguments and results as torch writes them. Arguments are only read; results are new and contiguous.
    call
        Does it, on CPU and on CUDA tensors.
    fake
        The results without values.
    backward, save
        Of autograd: gradients of all arguments, and what is kept for them. None: there is no gradient, and a backward pass says so, where
        torch would go on without it; likewise there are no gradients of gradients (``create_graph=True``).
    """
    name = schema.partition("(")[0]
    for of_op, its_schema in ((name, schema), (f"_{name}", f"_{schema}")):
        _library.define(its_schema, tags=_TAGS)
        for device in ("CPU", "CUDA"):
            _library.impl(of_op, call, device)
        torch.library.register_fake(f"mkernel::{of_op}", _of_one_kind(fake), lib=_library)
    backward = _once(name, backward or _refused(name))
    op, below = getattr(torch.ops.mkernel, name).default, getattr(torch.ops.mkernel, f"_{name}").default

    def call_below(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return below(*arguments)

    eager = _differentiable(name, call, save, backward)
    _library.impl(name, _differentiable(name, call_below, save, backward), "Autograd")

    def run(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or is_watched():
            _refuse_tangents(name, arguments)
            return op(*arguments)
        are_plain = all(type(each) in _PLAIN and not each.is_meta for each in arguments if isinstance(each, torch.Tensor))
        return (eager if are_plain else op)(*arguments)

    run.op = op  # type: ignore[attr-defined]
    return run


def _of_one_kind(fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake`` that refuses tensors with values beside those without: its results would be like the former, and hold whatever was there."""

    @functools.wraps(fake)
    def checked(*arguments: Any) -> Any:
        if len({each.is_meta for each in arguments if isinstance(each, torch.Tensor)}) > 1:
            raise ArgumentError("arguments", "some on device meta", "must all be on it, or none")
        return fake(*arguments)

    return checked


_DEVICES = ("cpu", "cuda")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_watched() -> bool:
    """Whether somebody wants to see the ops of this thread: a mode (fake tensors, counting), a trace, a transform, or the profiler."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
    )


def _refuse_tangents(name: str, arguments: Any) -> None:
    """Raise where an argument has a tangent: torch takes the op for a constant there."""
    if forward_ad._current_level >= 0:
        tensors = (each for each in arguments if isinstance(each, torch.Tensor))
        if any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
            raise NotImplementedError(f"mkernel::{name} has no forward-mode gradient: use torch.autograd.grad or backward()")


def _refused(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(f"mkernel::{name} has no gradient: call it under torch.no_grad(), or with detached arguments")

    return backward


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` that refuses to be differentiated again.

    torch would do so without what a gradient holds of other ranks, and of rows that were kept: wrong results. Its ``once_differentiable``
    does not notice where only the kept operands require a gradient.

    Operands have been cast where the op was called; what ``torch.autocast`` is enabled for then, if anything, does not count.
    """

    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"mkernel::{name} has no gradient of its gradient: differentiate it without create_graph=True")
        device = gradients[0].device.type
        if autocast_dtype(device) is None:
            return backward(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return once


def _differentiable(
    name: str, call: Callable[..., Any], save: Callable[..., Any] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    """``call``, and where a gradient is wanted what is kept for it: forward pass and that in one step, of a Function."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = call(*arguments)
        if save is not None:
            save(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = types.new_class(name, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(methods))

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments):
            return function.apply(*arguments)
        return call(*arguments)

    return run


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` on a type of device; None where it is not enabled."""
    return torch.get_autocast_dtype(device) if device in _DEVICES and torch.is_autocast_enabled(device) else None


def cast(*operands: Any) -> tuple[Any, ...]:
    """The operands of a product as ``torch.autocast`` has them: where it is enabled, tensors of numbers become ones of its dtype.

    As torch does, it leaves float64 alone. Operands may be None.
    """
    dtype = autocast_dtype(operands[0].device.type)
    if dtype is None:
        return operands
    return tuple(
        each.to(dtype) if each is not None and each.is_floating_point() and each.dtype != torch.float64 else each for each in operands
    )


def require_tensors(dimensions: int | None = None, /, **operands: object) -> None:
    """Raise ArgumentError for the first operand that is no tensor, nor what stands for one in a trace, or has other dimensions."""
    for name, each in operands.items():
        if not isinstance(each, torch.Tensor):
            if not hasattr(type(each), "__torch_function__"):
                raise ArgumentError(name, repr(each), "must be a torch.Tensor")
        elif dimensions is not None and each.dim() != dimensions:
            raise ArgumentError(name, tuple(each.shape), f"must have {dimensions} dimensions")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as mkernel's functions take it, which refuse those that require a gradient."""
    return tensor.detach() if tensor.requires_grad else tensor


def name_of(world: World | str | None) -> str:
    """The name of a world, which may be given by its name; None: the current one's."""
    if world is None:
        return _current_name()
    return world if isinstance(world, str) else world.name


@torch.compiler.assume_constant_result
def _current_name() -> str:
    return current.current().name
