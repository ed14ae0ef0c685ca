"""The inner loop: allgather_gemm in a world of one is a plain GEMM, measured against cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.allgather_gemm import AllgatherGemm
from mkernel.bench.cases.base import Op, is_row_major
from mkernel.bench.shapes import expand
from mkernel.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.bench.timing import Call
    from mkernel.planner.topology import Topology

__all__ = ["OP"]


class _Gemm(AllgatherGemm):
    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        return {}  # compute alone is the contestant


class _Op(Op):
    name = "gemm"
    title = "C = A @ B in a world of one (M x N x K)"
    sizes = ("8192x8192x8192", "16384x4096x8192")
    options = ("b",)

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        return expand(text, topology, splits_k=False)

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> _Gemm:
        if topology.size != 1:
            raise ArgumentError(
                "--world", f"{topology.num_nodes}x{topology.ranks_per_node}", "gemm runs in a world of one", "use --world 1x1"
            )
        try:
            m, n, k = (int(part) for part in size.lower().split("x"))
        except ValueError:
            raise ArgumentError("--shapes", size, "must be MxNxK", "for example 8192x8192x8192") from None
        return _Gemm(size.lower(), m, n, k, topology, dtype, is_row_major(options))


OP = _Op()
