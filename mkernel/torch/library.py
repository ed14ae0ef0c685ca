"""How an op is registered with torch, and how it finds its world.

An op takes its world by name (``World.name``), because a compiled graph holds text but no objects, and because torch runs backward passes
on threads of its own, where no world is current.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mkernel.runtime import current
from mkernel.runtime.world import named

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["define", "name_of", "named", "plain"]

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
    """Register the op ``mkernel::<schema>``; returns it, to be called.

    Parameters
    ----------
    schema
        Name, arguments and results as torch writes them. Arguments are only read; results are new and contiguous.
    call
        Does it, on CPU and on CUDA tensors.
    fake
        The results without values.
    backward, save
        Of autograd: gradients of all arguments, and what is kept for them. None: there is no gradient.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    for device in ("CPU", "CUDA"):
        _library.impl(name, call, device)
    torch.library.register_fake(f"mkernel::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"mkernel::{name}", backward, setup_context=save, lib=_library)
    return getattr(torch.ops.mkernel, name).default


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
