"""gemm_reduce_scatter: M = N = S, K = S/W per rank; each rank gets M/W rows of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.base import Op
from mkernel.bench.cases.reduce import ReduceCase, parse_size
from mkernel.errors import ArgumentError
from mkernel.plan.reduce import REDUCE_SCATTER, ReduceProblem

if TYPE_CHECKING:
    from mkernel.bench.lab import Call
    from mkernel.plan.topology import Topology

__all__ = ["OP"]


class _GemmReduceScatter(ReduceCase):
    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        return self._calls(mk.gemm_reduce_scatter, split)

    def baselines(self, libraries: Any) -> dict[str, Sequence[Call]]:
        calls: dict[str, Sequence[Call]] = libraries.gemm_reduce_scatter(*self._sets(self._c))
        return calls


class _Op(Op):
    name = REDUCE_SCATTER
    title = "M = N = S, K = S/W per rank"
    sizes = ("2048", "4096", "8192", "16384", "32768")
    options = ("partials",)

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> _GemmReduceScatter:
        """``S``, or ``MxNxK`` with K of all ranks."""
        m, n, k = parse_size(size, topology)
        if m % topology.size:
            raise ArgumentError("--shapes", f"{m}x{n}x{k}", f"M must be a multiple of {topology.size} (ranks)")
        partials = options.get("partials", "output")
        problem = ReduceProblem(REDUCE_SCATTER, topology, m // topology.size, n, k // topology.size, dtype, True, partials)
        return _GemmReduceScatter(size.lower(), m, k, problem, options)


OP = _Op()
