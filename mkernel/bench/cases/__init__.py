"""The ops that can be measured, one module each. A new op is one file here and one line below."""

from __future__ import annotations

from mkernel.bench.cases import allgather_gemm, gemm, gemm_allreduce, gemm_reduce_scatter
from mkernel.bench.cases.base import Case, LocalGemm, Op

__all__ = ["OPS", "Case", "LocalGemm", "Op"]

OPS: dict[str, Op] = {op.name: op for op in (allgather_gemm.OP, gemm_reduce_scatter.OP, gemm_allreduce.OP, gemm.OP)}
