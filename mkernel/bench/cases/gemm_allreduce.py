"""gemm_allreduce: M = N = S, K = S/W per rank, and the few rows of decoding; each rank gets the whole sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.bench.cases.base import Op, is_row_major, up
from mkernel.bench.cases.reduce import ReduceCase, parse_size
from mkernel.bench.shapes import expand
from mkernel.planner.reduce import ALLREDUCE, ReduceProblem

if TYPE_CHECKING:
    from mkernel.bench.timing import Call
    from mkernel.planner.topology import Topology

__all__ = ["OP"]

_LARGE = ("2048", "4096", "8192", "16384", "32768")
_SMALL = tuple(f"{m}x8192x8192" for m in (1, 8, 32, 128, 256))


class _GemmAllreduce(ReduceCase):
    def __init__(self, label: str, m: int, whole_k: int, problem: ReduceProblem, options: dict[str, str]) -> None:
        super().__init__(label, m, whole_k, problem, options)
        # After the reduce-scatter every finished shard but the own one comes the same ways: what any algorithm without multicast moves.
        self.link_bytes *= 2
        self.network_bytes *= 2

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        return self._calls(mk.gemm_allreduce, split)

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        calls: dict[str, Sequence[Call]] = baselines.gemm_allreduce(*self._sets(self._c))
        return calls


class _Op(Op):
    name = ALLREDUCE
    title = "M = N = S or M x N x K, K/W per rank"
    sizes = (*_LARGE, *_SMALL)
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"large": _LARGE, "small": _SMALL}
    options = ("partials", "algorithm", "b")

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        return self.groups.get(text) or expand(text, topology, splits_k=True)

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        # The second has few rows, which go in one step.
        sizes = ((256, 1408, 512), (7, 288, 136)) if target == "cpu" else ((4096, 4096, 4096), (7, 1048, 1032))
        return [f"{m}x{n}x{up(k, 8 * ranks)}" for m, n, k in sizes]

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> _GemmAllreduce:
        """``S``, or ``MxNxK`` with K of all ranks."""
        m, n, k = parse_size(size, topology)
        how = is_row_major(options), options.get("partials", "output"), options.get("algorithm")
        problem = ReduceProblem(ALLREDUCE, topology, n, k // topology.size, dtype, *how)
        return _GemmAllreduce(size.lower(), m, k, problem, options)


OP = _Op()
