"""Random tensors that every rank can make, and their values as NumPy sees them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

TYPES = {"bfloat16": (torch.bfloat16, ml_dtypes.bfloat16), "float16": (torch.float16, np.float16)}


def drawn(seed: list[int], shape: tuple[int, ...], dtype: str) -> Any:
    """An array of standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(TYPES[dtype][1])


def place_of(world: Any) -> str:
    """Where a rank's tensors are."""
    return "cpu" if world.target == "cpu" else f"cuda:{world.device}"


def tensor(array: Any, place: str, requires_grad: bool = False) -> torch.Tensor:
    """A new tensor with the values and the strides of an array."""
    kind = next(kind for kind, other in TYPES.values() if array.dtype == other)
    made = torch.from_numpy(array.view(np.int16)).view(kind)
    return made.to(place, copy=True, memory_format=torch.preserve_format).requires_grad_(requires_grad)


def array(made: torch.Tensor) -> Any:
    """The values of a tensor, contiguous."""
    name = str(made.dtype).removeprefix("torch.")
    return made.detach().cpu().contiguous().view(torch.int16).numpy().view(TYPES[name][1])
