"""gemm_reduce_scatter: M = N = S, K = S/W per rank; each rank gets M/W rows of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.base import Op, is_row_major, up
from mkernel.bench.cases.reduce import ReduceCase, parse_size
from mkernel.bench.shapes import expand
from mkernel.errors import ArgumentError
from mkernel.planner.reduce import REDUCE_SCATTER, ReduceProblem

if TYPE_CHECKING:
    from mkernel.bench.timing import Call
    from mkernel.planner.topology import Topology

__all__ = ["OP"]


class _GemmReduceScatter(ReduceCase):
    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        return self._calls(mk.gemm_reduce_scatter, split)

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        calls: dict[str, Sequence[Call]] = baselines.gemm_reduce_scatter(*self._sets(self._c))
        return calls


class _Op(Op):
    name = REDUCE_SCATTER
    title = "M = N = S, K = S/W per rank"
    sizes = ("2048", "4096", "8192", "16384", "32768")
    options = ("partials", "b")

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        return expand(text, topology, splits_k=True)

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        sizes = ((512, 512, 512), (200, 288, 136)) if target == "cpu" else ((4096, 4096, 4096), (1000, 1048, 1032))
        return [f"{up(m, ranks)}x{n}x{up(k, 8 * ranks)}" for m, n, k in sizes]

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> _GemmReduceScatter:
        """``S``, or ``MxNxK`` with K of all ranks."""
        m, n, k = parse_size(size, topology)
        if m % topology.size:
            raise ArgumentError("--shapes", f"{m}x{n}x{k}", f"M must be a multiple of {topology.size} (ranks)")
        partials = options.get("partials", "output")
        problem = ReduceProblem(REDUCE_SCATTER, topology, n, k // topology.size, dtype, is_row_major(options), partials)
        return _GemmReduceScatter(size.lower(), m, k, problem, options)


OP = _Op()
