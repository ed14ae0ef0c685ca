"""Numbers of float32 as several of a 16-bit dtype, which ops can move and add up."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PIECES", "pieces_of"]

PIECES = {torch.bfloat16: 3, torch.float16: 2}  # numbers of a dtype that add up to one of float32


def pieces_of(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of ``dtype`` that add up to ``x``, the largest first."""
    pieces, rest = [], x
    for _ in range(PIECES[dtype]):
        pieces.append(rest.to(dtype))
        rest = rest - pieces[-1]
    return pieces
