"""mkernel for programs of torch: the ops with gradients, seen by ``torch.compile`` and ``torch.export``, and tensor-parallel layers.

Importing it imports torch 2.11 or newer; nothing else of mkernel does. docs/torch.md shows how it is used.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401 (a clear message where it is missing)
except ImportError as error:
    raise ImportError(f"mkernel.torch needs torch 2.11 or newer ({error}): install it as its own pages say, for your CUDA") from error

from mkernel.torch.attention import ring_attention
from mkernel.torch.gemm import allgather_gemm, gemm_allreduce, gemm_reduce_scatter, replicated_gemm, shared
from mkernel.torch.linear import ColumnParallelLinear, RowParallelLinear
from mkernel.torch.moe import moe_combine, moe_dispatch_gemm, moe_gemm_combine, moe_layer
from mkernel.torch.parallel import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "RowParallelLinear",
    "RowwiseParallel",
    "allgather_gemm",
    "gemm_allreduce",
    "gemm_reduce_scatter",
    "moe_combine",
    "moe_dispatch_gemm",
    "moe_gemm_combine",
    "moe_layer",
    "replicated_gemm",
    "ring_attention",
    "shared",
]
